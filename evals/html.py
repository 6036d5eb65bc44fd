"""Self-contained pages: one Jinja environment that escapes everything, and pictures as inline SVG.

- A page loads nothing and runs nothing: style and pictures are inside, links are relative.
- Colours are classes of templates/base.html.j2, so that a picture follows the reader's dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from coda_agent.primitives.graph import Shape
from coda_agent.primitives.program import Program

COLOURS = 6
"""Series colours there are; further series repeat them with another dash."""

_SYMBOLS = {"mul": "×", "add": "+", "sub": "−", "div": "÷", "even": "even columns",
            "odd": "odd columns", "acc": "A Bᵀ"}  # fmt: skip
_WIDTHS = {Shape.WIDE: 4.5, Shape.TILE: 3, Shape.HALF: 2}
_BOX, _HIGH, _DUMMY, _GAP, _LAYER = 124, 38, 10, 16, 68

Point = tuple[float, float]


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The environment of every page: escapes by default, and an unknown name is an error."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def write(path: Path, template: str, **values: Any) -> Path:
    """Render `template` (its name without .html.j2) into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = environment().get_template(f"{template}.html.j2").render(values)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def dataflow(program: Program, dtypes: Mapping[str, str]) -> Markup:
    """A program's graph from the accumulator down to its outputs; a line is as thick as what it
    carries is wide, and constants are written into the operation they enter.

    Args:
        program: The program.
        dtypes: Element type of each operand and output.
    """
    nodes, graph = program.graph.nodes, program.graph
    parents: dict[Any, list[Any]] = {
        i: [a for a in n.args if nodes[a].op != "const"]
        for i, n in enumerate(nodes)
        if n.op != "const" or i in graph.outputs.values()
    }
    parents |= {name: [root] for name, root in graph.outputs.items()}
    rank: dict[Any, int] = {}
    for key in parents:
        rank[key] = 1 + max((rank[p] for p in parents[key]), default=-1)
    for key in (i for i in parents if isinstance(i, int) and nodes[i].op == "operand"):
        rank[key] = max(0, min(rank[c] for c in parents if key in parents[c]) - 1)
    chains: list[list[Any]] = []  # each edge with a place kept for it in every layer it crosses
    for key, above in parents.items():
        for p in dict.fromkeys(above):
            between = [("edge", p, key, r) for r in range(rank[p] + 1, rank[key])]
            rank |= {dummy: dummy[3] for dummy in between}
            chains.append([p, *between, key])
    x, wide = _placed(rank, chains)
    high = (max(rank.values()) + 1) * _LAYER
    parts: list[Markup] = []
    for chain in chains:
        shape = nodes[chain[0]].shape
        points = [(x[k], rank[k] * _LAYER + 6) for k in chain]
        # A bend starts under its box and ends on the next; through empty layers the line runs on.
        path = f"M{points[0][0]:.0f} {points[0][1] + _HIGH}"
        for (x0, y), (x1, y1) in pairwise(points):
            middle = (y + _HIGH + y1) / 2
            path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1}"
            path += f"V{y1 + _HIGH}" if (x1, y1) != points[-1] else ""
        parts.append(_tag("path", class_="flow", d=path, stroke_width=_WIDTHS.get(shape, 1)))
    for key in parents:
        if isinstance(key, str):
            kind, label = "out", f"{key}: {program.outputs[key].__name__}"
            under = dtypes.get(key, "")
        else:
            node = nodes[key]
            kind = {"acc": "acc", "operand": "operand"}.get(node.op, "op")
            label, under = _label(program, key), node.shape.value
            if kind != "op":
                under += f" {dtypes.get(node.name, 'float32')}"
        left, top = x[key] - _BOX / 2, rank[key] * _LAYER + 6
        parts.append(_tag("rect", class_=f"box {kind}", x=left, y=top, width=_BOX, height=_HIGH,
                          rx=5))  # fmt: skip
        parts.append(_tag("text", label, x=x[key], y=top + 16, class_="mid strong"))
        parts.append(_tag("text", under, x=x[key], y=top + 31, class_="mid small"))
    return _svg(wide, high, f"Dataflow of {program.name}", parts)


def _placed(rank: dict[Any, int], chains: list[list[Any]]) -> tuple[dict[Any, float], float]:
    """The centre of each box, layers ordered by where their neighbours lie; and the width."""
    layers: list[list[Any]] = [[] for _ in range(max(rank.values()) + 1)]
    for key in rank:
        layers[rank[key]].append(key)
    ups: dict[Any, list[Any]] = {key: [] for key in rank}
    downs: dict[Any, list[Any]] = {key: [] for key in rank}
    for chain in chains:
        for a, b in pairwise(chain):
            ups[b].append(a)
            downs[a].append(b)
    size = {key: _DUMMY if isinstance(key, tuple) else _BOX for key in rank}
    x: dict[Any, float] = {}
    for sweep in range(8):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            near = ups if sweep % 2 == 0 else downs
            known = {k: [x[n] for n in near[k] if n in x] or [x.get(k, 0.0)] for k in layer}
            wanted = {k: sum(v) / len(v) for k, v in known.items()}
            layer.sort(key=wanted.__getitem__)
            # Packed to the right of one another, then moved as a whole to where they want to be.
            edge, at = -math.inf, {}
            for key in layer:
                at[key] = max(wanted[key], edge + size[key] / 2)
                edge = at[key] + size[key] / 2 + _GAP
            shift = sum(at[k] - wanted[k] for k in layer) / len(layer)
            x |= {k: at[k] - shift for k in layer}
    left = min(x[k] - size[k] / 2 for k in x) - 4
    right = max(x[k] + size[k] / 2 for k in x) + 4
    return {k: v - left for k, v in x.items()}, right - left


def _label(program: Program, index: int) -> str:
    nodes, node = program.graph.nodes, program.graph.nodes[index]
    if node.op == "operand":
        return f"{node.name}: {program.operands[node.name].__name__}"
    name = _SYMBOLS.get(node.op, node.op)
    given = [f"{nodes[a].value:.4g}" if nodes[a].op == "const" else "·" for a in node.args]
    if set(given) <= {"·"}:
        return f"{node.value:g}" if node.op == "const" else name
    return f" {name} ".join(given) if node.op in _SYMBOLS else f"{name}({', '.join(given)})"


def strips(title: str, series: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Recorded times, µs: a tick for each round, a box for the middle half, a bar at the median.

    Args:
        title: What was timed.
        series: Name to the record of its rounds, with `times_us` and `median_us`.
    """
    every = [t for one in series.values() for t in one["times_us"]]
    low, high = min(every), max(every)
    left, wide, row = 104, 640, 34

    def place(value: float) -> float:
        return left + (wide - left - 70) * (value - low) / (high - low or 1.0)

    parts: list[Markup] = []
    for i, (name, one) in enumerate(series.items()):
        y, times = 6 + i * row, sorted(one["times_us"])
        quarter = times[len(times) // 4], times[3 * len(times) // 4]
        ticks = "".join(f"M{place(t):.1f} {y}v22" for t in times)
        start, width = place(quarter[0]), place(quarter[1]) - place(quarter[0]) + 1
        middle = place(one["median_us"])
        parts += [
            _tag("text", name, x=0, y=y + 15, class_="small"),
            _tag("path", d=ticks, class_=f"tick s{i}"),
            _tag("rect", y=y + 5, height=12, x=start, width=width, class_=f"range s{i}"),
            _tag("path", d=f"M{middle:.1f} {y - 2}v26", class_=f"median s{i}"),
            _tag("text", f"{one['median_us']:.1f}", x=place(times[-1]) + 8, y=y + 15,
                 class_="small"),
        ]  # fmt: skip
    bottom = 6 + len(series) * row
    parts += [
        _tag("path", d=f"M{left} {bottom}H{wide - 70}", class_="axis"),
        _tag("text", f"{low:.1f} µs", x=left, y=bottom + 14, class_="small"),
        _tag("text", f"{high:.1f} µs", x=wide - 70, y=bottom + 14, class_="small end"),
    ]
    return _svg(wide, bottom + 20, title, parts)


def curves(title: str, series: Mapping[str, Sequence[Point]], across: str, up: str) -> Markup:
    """Rising steps; y runs from 0 to 1, x is logarithmic, and what costs nothing is at its left.

    Args:
        title: Of the picture.
        series: Name to points in order of x, of which one at least is positive.
        across: What x is.
        up: What y is.
    """
    left, right, top, bottom = 40, 748, 28, 268
    xs = [x for points in series.values() for x, _ in points if x > 0]
    low, high = math.log10(min(xs)), math.log10(max(xs))

    def across_at(x: float) -> float:
        share = (math.log10(x) - low) / (high - low or 1.0) if x > 0 else 0.0
        return round(left + (right - left) * share, 1)

    def up_at(y: float) -> float:
        return round(bottom - (bottom - top) * y, 1)

    parts = [_tag("text", f"{title} (up: {up})", x=0, y=14, class_="strong")]
    for i in range(5):
        parts.append(_tag("path", d=f"M{left} {up_at(i / 4)}H{right}", class_="axis"))
        parts.append(_tag("text", f"{i / 4:g}", x=left - 6, y=up_at(i / 4) + 4, class_="small end"))
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = across_at(10.0**power)
        parts.append(_tag("text", f"{10.0**power:g}", x=x, y=bottom + 16, class_="small mid"))
    parts.append(_tag("text", across, x=right, y=bottom + 32, class_="small end"))
    for i, (name, points) in enumerate(series.items()):
        style = f"curve s{i % COLOURS} d{i // COLOURS % 3}"
        stairs = {across_at(x): up_at(y) for x, y in points}  # of one place, the last
        line = "".join(f"H{x}V{y}" for x, y in stairs.items())
        parts.append(_tag("path", d=f"M{left} {bottom}{line}H{right}", class_=style))
        x, y = left + 240 * (i % 3), bottom + 54 + 18 * (i // 3)
        parts.append(_tag("path", d=f"M{x} {y - 4}h24", class_=style))
        parts.append(_tag("text", name[:32], x=x + 30, y=y, class_="small"))
    return _svg(right + 12, bottom + 62 + 18 * ((len(series) + 2) // 3), title, parts)


def _svg(wide: float, high: float, title: str, parts: Sequence[Markup]) -> Markup:
    style = f"--wide:{wide:.0f}px"
    return _tag("svg", Markup("").join([_tag("title", title), *parts]), role="img", style=style,
                viewBox=f"0 0 {wide:.0f} {high:.0f}")  # fmt: skip


def _tag(name: str, inside: str = "", **attributes: object) -> Markup:
    given = Markup("").join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{v:.1f}" if isinstance(v, float) else v
        )
        for key, v in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, escape(inside))
