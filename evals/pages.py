"""What records and pages are made of: JSON by the line, templates, tables, and what figures say.

An HTML page loads nothing and runs nothing: style and pictures are inside, links are relative, and
whatever is filled in is escaped. Markdown that is filled in brings no HTML and no links of its own.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup

from coda_agent.primitives.objects import write_whole

T = TypeVar("T")
Rows = list[Sequence[object]]
"""A table's rows; the first is its head."""

TIMED = {"ours": "this kernel", "gemm": "bare cuBLAS", "compile": "torch.compile"}
"""What the judge times, as pages call it."""


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(("html.j2",)), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"table": table, "escaped": escaped, "label": label, "prose": prose}
    return environment


def render(template: str, **values: Any) -> str:
    """The text of `template` (its name without .j2) filled with `values`."""
    return _environment().get_template(f"{template}.j2").render(values)


def write(path: Path, template: str, **values: Any) -> Path:
    """Render `template` into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(template, **values), encoding="utf-8", errors="replace")
    return path


def today() -> str:
    """The day, UTC, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def gpu_record(root: Path, name: str, machine: Mapping[str, Any], device: str) -> Path:
    """Where a workspace keeps a record that belongs to a GPU, or else a device."""
    gpu = re.sub(r"\W+", "-", str(machine["gpu"].get("name", device)).lower())
    return root / "evals" / "results" / f"{name}-{gpu}.json"


def latest(root: Path, name: str) -> tuple[dict[str, Any], Path] | None:
    """A workspace's latest record of a name, on any GPU, and its file; None without one."""
    files = (root / "evals" / "results").glob(f"{name}-*.json")
    records = [(json.loads(file.read_text("utf-8")), file) for file in files]
    return max(records, key=lambda pair: pair[0]["date"], default=None)


def write_record(path: Path, head: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Write a record: the head's keys, then `cells`, one a line; never half a file."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items())
    text = f'{json.dumps(head).removesuffix("}")}, "cells": {{\n{lines}\n}}}}\n'
    write_whole(path, text)


def tabulate(items: Iterable[T], columns: Mapping[str, Callable[[T], object] | None]) -> Rows:
    """A table with a row an item, the head first: what `table`, `named`, the templates' macro of
    that name and a terminal's `columns` show. By head it is said what a column says of an item;
    None leaves the column out."""
    shown = {head: says for head, says in columns.items() if says}
    return [tuple(shown), *(tuple(says(item) for says in shown.values()) for item in items)]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as a Markdown table; the first one is its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def escaped(text: Any) -> Any:
    """Text, or rows of it, that Markdown shows as it is: authors and files may hold anything."""
    if not isinstance(text, str):
        return [[escaped(str(cell)) for cell in row] for row in text]
    for mark in "\\`*_[]|<>#":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else f"&#{ord(mark)};")
    return " ".join(text.split())


def prose(text: str) -> Markup:
    """A spec's Markdown as HTML below a page's own headings; HTML, links and pictures in it stay
    text, as written."""
    reader = MarkdownIt("commonmark", {"html": False}).disable(
        ["link", "autolink", "image", "reference"]
    )
    tokens = reader.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 2, 6)}"
    return Markup(reader.renderer.render(tokens, reader.options, {}))


def named(rows: Sequence[Sequence[object]]) -> list[dict[str, object]]:
    """Rows as plain JSON data, each by the names of the first, the head."""
    return [dict(zip(map(str, rows[0]), row, strict=True)) for row in rows[1:]]


def label(sizes: Mapping[str, int]) -> str:
    """`4096³`, or M×N×K; evidence keeps its keys in the alphabet's order."""
    extents = [sizes[dim] for dim in sorted(sizes, key="MNK".find)]
    if len(extents) == 3 and len(set(extents)) == 1:
        return f"{extents[0]}³"
    return "×".join(map(str, extents))


def interval(ratio: Mapping[str, float]) -> str:
    """A ratio with its interval."""
    return "{ratio:.3f} ({low:.3f}–{high:.3f})".format(**ratio)


def machine(about: Mapping[str, Any]) -> str:
    """The GPU, or the device, and the versions on it."""
    gpu = about.get("gpu", {})
    versions = {"driver": gpu.get("driver_version"), "CUDA": about.get("cuda"),
                **about.get("packages", {})}  # fmt: skip
    said = (f"{name} {version}" for name, version in versions.items() if version)
    return ", ".join([gpu.get("name") or about.get("device") or "unknown", *said])


def speed(cells: Iterable[Mapping[str, Any]]) -> Rows:
    """The performance gate's cells that hold times. Ratios of the steady regime are there where a
    cell has them."""

    def median(name: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda cell: f"{cell['times'][name]['median_us']:.1f}"

    def ratio(key: str, regime: str = "") -> Callable[[Mapping[str, Any]], str]:
        def says(cell: Mapping[str, Any]) -> str:
            found = cell.get(regime, {}) if regime else cell
            return interval(found[key]) if key in found else "–"

        return says

    timed = [c for c in cells if "times" in c]
    streamed = any("of_gemm" in c.get("steady", {}) for c in timed)
    ratios = {"of_gemm": "of GEMM", "over_compile": "over compile"}
    return tabulate(timed, {
        "dtype": itemgetter("dtype"),
        "shape": lambda c: label(c["sizes"]),
        **{f"{name}, µs": median(key) for key, name in TIMED.items()},
        **{name: ratio(key) for key, name in ratios.items()},
        **{f"{name}, steady": ratio(key, "steady") for key, name in ratios.items() if streamed},
        "TFLOP/s": lambda c: f"{c['tflops']:.0f}",
        "floor, µs": lambda c: f"{c['floor_us']:.1f}",
        "tile": itemgetter("tile"),
    })  # fmt: skip
