"""What is installed: one namespace of whole rooms and their data; and which room imports which."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "agent",
    "demos",
    "evals",
    "fuse",
    "generated",
    "integrations",
    "layers",
    "primitives",
    "specs",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from a copy of this tree with one more kernel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in (*ROOMS, "tests", "logs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    kernel = tree / "generated" / "packaging_probe"
    kernel.mkdir()
    for name in ("kernel.py", "spec.md", "evidence.json", "tuned.json"):
        (kernel / name).write_text("")
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_wheel_holds_one_namespace(wheel: set[str]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"coda_agent", f"coda_agent-{version}.dist-info"}
    assert "coda_agent/__init__.py" not in wheel
    assert {name.split("/")[1] for name in wheel if name.startswith("coda_agent/")} == set(ROOMS)


def test_wheel_holds_every_module_of_the_rooms(wheel: set[str]) -> None:
    """A folder without __init__.py is not found by setup.py; only kernels' folders may lack one."""
    modules = {
        f"coda_agent/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
    }
    assert modules <= wheel, sorted(modules - wheel)


def test_wheel_holds_data(wheel: set[str]) -> None:
    kernel = "coda_agent/generated/packaging_probe"
    for name in ("kernel.py", "spec.md", "evidence.json", "tuned.json"):
        assert f"{kernel}/{name}" in wheel
    for room in ROOMS:
        assert f"coda_agent/{room}/py.typed" in wheel
    specs = {f"coda_agent/specs/{path.name}" for path in (ROOT / "specs").glob("*.md")}
    assert specs <= wheel


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_regular_package(room: str) -> None:
    """Without __init__.py the editable install takes a room for a namespace, until reinstalled."""
    assert (ROOT / room / "__init__.py").is_file()


def test_typing_links_are_the_rooms() -> None:
    links = sorted((ROOT / ".typing" / "coda_agent").iterdir())
    assert [link.name for link in links] == list(ROOMS)
    assert all(link.resolve() == ROOT / link.name for link in links)


def test_command_is_installed() -> None:
    (script,) = metadata.distribution("coda-agent").entry_points.select(group="console_scripts")
    assert script.name == "coda-agent"
    assert callable(script.load())


def test_importing_a_room_is_light() -> None:
    """torch takes seconds and needs no place in `coda-agent --help`."""
    rooms = ", ".join(f"coda_agent.{room}" for room in ROOMS)
    code = (
        f"import sys, {rooms}\n"
        "print(*sorted({'torch', 'cutlass', 'quack', 'triton', 'anthropic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.split() == []


def _allowed() -> dict[str, set[str]]:
    """The last column of the table of rooms in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    rooms: set[str] = set(ROOMS)
    return {
        room: rooms if words.startswith("all") else rooms & set(re.findall(r"\w+", words))
        for room, words in rows
    }


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_the_architecture_allows(room: str) -> None:
    allowed = _allowed()[room] | {room}
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for module in (prefix + alias.name for alias in node.names):
                parts = module.split(".")
                if parts[0] == "coda_agent":
                    line = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert parts[1] in allowed, f"{line}: {room} may not import {module}"
