"""What records and pages are made of: JSON by the line, templates, tables, and what figures say.

An HTML page loads nothing and runs nothing: style and pictures are inside, links are relative, and
whatever is filled in is escaped. Markdown that is filled in brings no HTML and no links of its own.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
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


def tabulate(items: Iterable[T], columns: Mapping[str, str | Callable[[T], object]]) -> Rows:
    """A table with a row an item, the head first: what `table`, `named`, the templates' macro of
    that name and a terminal's `columns` show. By head there is a function of an item, or a text
    that is `filled` with it."""

    def says(column: str | Callable[[T], object], item: Any) -> object:
        return filled(column, item) if isinstance(column, str) else column(item)

    return [tuple(columns), *(tuple(says(c, item) for c in columns.values()) for item in items)]


def filled(text: str, item: Mapping[str, Any]) -> str:
    """A text with fields of a record, as "{times[ours][median_us]:.1f}"; where the record lacks
    one, a dash."""
    try:
        return text.format(**item)
    except KeyError:
        return "–"


def interval(field: str) -> str:
    """The text of a ratio with its interval, to be `filled` with a record that has it there."""
    return "{0[ratio]:.3f} ({0[low]:.3f}–{0[high]:.3f})".replace("{0", f"{{{field}")


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
    timed = [{**c, "shape": label(c["sizes"])} for c in cells if "times" in c]
    ratios = {"of GEMM": "of_gemm", "over compile": "over_compile"}
    if any("of_gemm" in c.get("steady", {}) for c in timed):
        ratios |= {f"{name}, steady": f"steady[{key}]" for name, key in ratios.items()}
    return tabulate(timed, {
        "dtype": "{dtype}",
        "shape": "{shape}",
        **{f"{name}, µs": f"{{times[{key}][median_us]:.1f}}" for key, name in TIMED.items()},
        **{name: interval(key) for name, key in ratios.items()},
        "TFLOP/s": "{tflops:.0f}",
        "floor, µs": "{floor_us:.1f}",
        "tile": "{tile}",
    })  # fmt: skip
