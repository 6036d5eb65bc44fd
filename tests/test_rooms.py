"""Imports run one way: no module imports itself by way of others, nor does any room, and the picture
of the rooms in docs/architecture.md is the one that the sources draw."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "primitives",
    "specs",
    "demos",
    "runtime",
    "generated",
    "agent",
    "fuse",
    "integrations",
    "evals",
)
# Rooms within rooms. What is left of `agent` is single modules, which are rooms of their own here.
INNER = ("agent.authors.claude", "agent.authors.composer", "evals.cli", "evals.judge")

Arrows = dict[str, set[str]]


def modules() -> dict[str, Path]:
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return {name: path for name, path in found.items() if not name.startswith("generated.")}


@cache
def imports() -> Arrows:
    """Modules and what they import, inside functions too; what only type checkers see is left out."""
    known, arrows = modules(), Arrows()
    for name, path in known.items():
        arrows[name] = set()
        pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
        while pending:
            node = pending.pop()
            match node:
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.ImportFrom(module=str(module), names=names):
                    origin = module.removeprefix("coda_agent.")
                    whole = {f"{origin}.{alias.name}" for alias in names}
                    arrows[name] |= (whole & known.keys()) or ({origin} & known.keys())
            pending += ast.iter_child_nodes(node)
        arrows[name].discard(name)
    return arrows


def room(module: str) -> str:
    for inner in INNER:
        if f"{module}.".startswith(f"{inner}."):
            return inner
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "agent" else 1])


def rooms() -> Arrows:
    arrows: Arrows = {}
    for module, others in imports().items():
        arrows.setdefault(room(module), set()).update(map(room, others))
    return {name: others - {name} for name, others in arrows.items()}


def reach(arrows: Arrows, start: str) -> set[str]:
    seen, pending = set[str](), [start]
    while pending:
        for other in arrows[pending.pop()] - seen:
            seen.add(other)
            pending.append(other)
    return seen


def picture(arrows: Arrows) -> str:
    """The rooms as a Mermaid flowchart: folders only, and no arrow that others imply."""
    folders = {name for name in arrows if (ROOT / name.replace(".", "/")).is_dir()}
    below = {name: reach(arrows, name) & folders for name in sorted(folders)}
    lines = ["flowchart TD"]
    for name, others in below.items():
        implied = set[str]().union(*(below[other] for other in others))
        lines += [f"    {name} --> {other}" for other in sorted(others - implied)]
    return "\n".join(lines)


@pytest.mark.parametrize("arrows", [imports, rooms])
def test_no_import_comes_back_to_where_it_began(arrows: Callable[[], Arrows]) -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_judge_does_not_know_who_carries_out_its_jobs() -> None:
    assert not {"agent.execution", "agent.workbench"} & reach(rooms(), "agent.judge")


def test_the_picture_of_the_rooms_is_what_the_sources_draw() -> None:
    drawn = picture(rooms())
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert f"```mermaid\n{drawn}\n```" in page, f"docs/architecture.md should have\n{drawn}"
