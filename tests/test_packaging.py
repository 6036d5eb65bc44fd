"""What is installed: one package of whole rooms and their data; and which room imports which."""

import ast
import json
import re
import runpy
import shutil
import site
import subprocess
import sys
import tomllib
import venv
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
    "primitives",
    "runtime",
    "specs",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a wheel built from a copy of this tree with one more kernel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("root", *ROOMS, "tests", "logs"):
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
    venv.create(folder / "venv")
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))  # torch, and the rest
    return packages


@pytest.fixture(scope="module")
def wheel(installed: Path) -> set[str]:
    """The names in the wheel."""
    paths = (path for top in installed.glob("coda_agent*") for path in top.rglob("*"))
    return {path.relative_to(installed).as_posix() for path in paths if path.is_file()}


def test_wheel_holds_one_package(wheel: set[str]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"coda_agent", f"coda_agent-{version}.dist-info"}
    inside = {name.split("/")[1] for name in wheel if name.startswith("coda_agent/")}
    assert inside == {*ROOMS, "__init__.py", "py.typed"}


@pytest.fixture
def editable(tmp_path: Path) -> Path:
    """An environment with the link that scripts/setup.sh puts beside an editable install."""
    venv.create(tmp_path / "editable")
    (packages,) = (tmp_path / "editable").glob("lib/python*/site-packages")
    (packages / "coda_agent-stubs").symlink_to(ROOT / ".typing" / "coda_agent")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return packages


TYPED = """
import coda_agent
import torch
from coda_agent import fuse
from coda_agent.fuse import apply_coda_kernels, explain
from coda_agent.fuse.backend import coda
from coda_agent.generated import gemm_bias_act, gemm_swiglu
from coda_agent.runtime.loading import load_kernel

def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.T)

reveal_type(fuse)
fuse(f)(torch.ones(2, 2), torch.ones(2, 2))
reveal_type(gemm_swiglu(torch.ones(2, 2), torch.ones(2, 2)))
fuse(3)
gemm_swiglu(block_size="x")
gemm_swiglu(torch.ones(2, 2))
gemm_bias_act(*[torch.ones(2, 2)] * 6, activation="tanh")
reveal_type(apply_coda_kernels(torch.nn.Linear(2, 2)))
reveal_type(explain(f))
reveal_type(coda)
reveal_type(load_kernel)
reveal_type(coda_agent.generated.gemm_rope)
reveal_type(fuse(f, dynamic=True))
reveal_type(fuse()(f))
reveal_type(fuse(torch.nn.Linear(2, 2)))
"""


@pytest.mark.parametrize("how", ["installed", "editable"])
def test_a_type_checker_knows_what_is_installed(
    how: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    python = request.getfixturevalue(how).parents[2] / "bin" / "python"
    command = [sys.executable, "-m", "pyright", "--pythonpath", python, "--outputjson", "typed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = [x["message"].splitlines()[0] for x in said if x["severity"] == "information"]
    types = [message.rpartition(" is ")[2].strip('"') for message in found]
    assert "**options: Any" in types[0]
    assert types[1] == "tuple[Tensor, Tensor]"
    assert types[2:4] == ["Report", "list[Shown]"]
    assert types[4].startswith("(module: GraphModule, inputs: Sequence[Any], *, mode: str | None")
    assert types[5:7] == ["(folder: str | Path) -> Kernel", "_gemm_rope"]
    assert types[7:] == ["(x: Tensor, w: Tensor) -> Tensor"] * 2 + ["Linear"]
    lines = TYPED.splitlines()
    wrong = [lines[x["range"]["start"]["line"]] for x in said if x["severity"] == "error"]
    assert [*dict.fromkeys(wrong)] == [x for x in lines if x.startswith(("fuse(3", "gemm_"))]


def test_checkers_are_told_of_each_kernel() -> None:
    """Else mypy takes a kernel's folder for a module."""
    from coda_agent import generated

    stubs = runpy.run_path(str(ROOT / "scripts" / "stubs.py"))["stubs"]()
    assert Path(generated.__file__).with_suffix(".pyi").read_text() == stubs
    ast.parse(stubs)


def test_the_package_says_what_it_holds() -> None:
    code = (
        "import coda_agent, inspect, pydoc, sys; print(coda_agent.__version__, *dir(coda_agent))\n"
        "print([getattr(coda_agent, x) for x in dir(coda_agent)] and 'torch' in sys.modules)\n"
        "print(inspect.signature(coda_agent.fuse), pydoc.plain(pydoc.render_doc(coda_agent.fuse)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    first, second, *rest = done.stdout.splitlines()
    rooms = ["fuse", "generated", "integrations", "primitives", "specs"]
    assert first.split() == [metadata.version("coda-agent"), "__version__", *rooms]
    assert second == "False"
    assert "**options: 'Any'" in rest[0] and any('backend="coda"' in x for x in rest)


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
    own, stub, *links = sorted((ROOT / ".typing" / "coda_agent").iterdir())
    assert own.resolve() == stub.resolve() == ROOT / "root" / "__init__.py"
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
