"""Pictures as SVG: dataflow, timings and curves inside pages, bars as files of their own.

Inside a page, colours are classes of templates/base.html.j2, so that a picture follows the reader's
dark mode. A file brings its own style. A plotting library would save lines on the bars alone:
curves and timings take their colours from the page, tips hold exact figures, and the dataflow is no
chart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from coda_agent.primitives.graph import Shape
from coda_agent.primitives.program import Program

_SYMBOLS = {"mul": "×", "add": "+", "sub": "−", "div": "÷", "even": "even columns",
            "odd": "odd columns", "acc": "A Bᵀ"}  # fmt: skip
_WIDTHS = {Shape.WIDE: 4.5, Shape.TILE: 3, Shape.HALF: 2}
_BOX, _HIGH, _DUMMY, _GAP, _LAYER = 124, 38, 10, 16, 68

_COLOURS = ("#2f7de1", "#e0861a", "#8b929c", "#9a6dd7", "#2aa876", "#d2556b")
_BARS_STYLE = """text { font: 11px system-ui, sans-serif; fill: #24292f } .end { text-anchor: end }
.mid { text-anchor: middle } .title { font-weight: 600; font-size: 13px } .grid { stroke: #8884 }
.one { stroke: #24292f; stroke-width: 1.2; stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) { text { fill: #d7dce2 } .one { stroke: #d7dce2 } }"""

Point = tuple[float, float]
Box = tuple[str, str, str]


def dataflow(program: Program, dtypes: Mapping[str, str]) -> Markup:
    """A program's graph from the accumulator down to its outputs; a line is as thick as what it
    carries is wide, and constants are written into the operation they enter.

    `dtypes` has the element type of each operand and output.
    """
    nodes, graph = program.graph.nodes, program.graph
    parents: dict[Any, list[Any]] = {
        i: [a for a in n.args if nodes[a].op != "const"]
        for i, n in enumerate(nodes)
        if n.op != "const" or i in graph.outputs.values()
    }
    parents |= {name: [root] for name, root in graph.outputs.items()}
    rank = _ranked(parents)
    for key in (i for i in parents if isinstance(i, int) and nodes[i].op == "operand"):
        rank[key] = max(0, min(rank[c] for c in parents if key in parents[c]) - 1)

    def box(key: Any) -> Box:
        if isinstance(key, str):
            return "out", f"{key}: {program.outputs[key].__name__}", dtypes.get(key, "")
        node = nodes[key]
        kind = node.op if node.op in ("acc", "operand") else "op"
        under = f" {dtypes.get(node.name, 'float32')}" * (kind != "op")
        return kind, _label(program, key), node.shape.value + under

    widths = {i: _WIDTHS.get(nodes[i].shape, 1) for i in parents if isinstance(i, int)}
    return _layered(f"Dataflow of {program.name}", parents, rank, box, widths)


def steps(title: str, parents: Mapping[Any, Sequence[Any]], box: Callable[[Any], Box]) -> Markup:
    """Steps from the first down to the last, each under those whose results it takes.

    Args:
        title: Of the picture.
        parents: By step, in order, those before it that it takes from.
        box: A step's kind, what stands in its box, and below that.
    """
    return _layered(title, parents, _ranked(parents), box, {})


def _ranked(parents: Mapping[Any, Sequence[Any]]) -> dict[Any, int]:
    rank: dict[Any, int] = {}
    for key, above in parents.items():
        rank[key] = 1 + max((rank[p] for p in above), default=-1)
    return rank


def _layered(
    title: str, parents: Mapping[Any, Sequence[Any]], rank: dict[Any, int],
    box: Callable[[Any], Box], widths: Mapping[Any, float],
) -> Markup:  # fmt: skip
    rank = dict(rank)
    chains: list[list[Any]] = []  # each edge with a place kept for it in every layer it crosses
    for key, above in parents.items():
        for p in dict.fromkeys(above):
            between = [("edge", p, key, r) for r in range(rank[p] + 1, rank[key])]
            rank |= {dummy: dummy[3] for dummy in between}
            chains.append([p, *between, key])
    x, wide = _placed(rank, chains)
    parts: list[Markup] = []
    for chain in chains:
        points = [(x[k], rank[k] * _LAYER + 6) for k in chain]
        # A bend starts under its box and ends on the next; through empty layers the line runs on.
        path = f"M{points[0][0]:.0f} {points[0][1] + _HIGH}"
        for (x0, y), (x1, y1) in pairwise(points):
            middle = (y + _HIGH + y1) / 2
            path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1}"
            path += f"V{y1 + _HIGH}" if (x1, y1) != points[-1] else ""
        parts.append(_path(path, "flow", stroke_width=widths.get(chain[0], 1)))
    for key in parents:
        kind, label, under = box(key)
        middle, top = x[key], rank[key] * _LAYER + 6
        parts += [
            _rect(middle - _BOX / 2, top, _BOX, _HIGH, f"box {kind}", rx=5),
            _text(middle, top + 16, label, "mid strong"),
            _text(middle, top + 31, under, "mid small"),
        ]
    return _svg(wide, (max(rank.values()) + 1) * _LAYER, title, parts)


def _placed(rank: dict[Any, int], chains: list[list[Any]]) -> tuple[dict[Any, float], float]:
    """The centre of each box, layers ordered by where their neighbours lie; and the width."""
    layers = [[key for key in rank if rank[key] == r] for r in range(max(rank.values()) + 1)]
    edges = [edge for chain in chains for edge in pairwise(chain)]
    ups = {key: [a for a, b in edges if b == key] for key in rank}
    downs = {key: [b for a, b in edges if a == key] for key in rank}
    size = {key: _DUMMY if isinstance(key, tuple) else _BOX for key in rank}
    x: dict[Any, float] = {}
    for near, swept in [(ups, layers), (downs, layers[::-1])] * 4:
        for layer in swept:
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

    `series` has by name the record of the rounds, with `times_us` and `median_us`.
    """
    every = [t for one in series.values() for t in one["times_us"]]
    low, high = min(every), max(every)
    left, right, row = 104, 570, 34

    def place(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low or 1.0)

    parts: list[Markup] = []
    for i, (name, one) in enumerate(series.items()):
        y, times = 6 + i * row, sorted(one["times_us"])
        start, end = (place(times[n * len(times) // 4]) for n in (1, 3))
        parts += [
            _text(0, y + 15, name, "small"),
            _path("".join(f"M{place(t):.1f} {y}v22" for t in times), f"tick s{i}"),
            _rect(start, y + 5, end - start + 1, 12, f"range s{i}"),
            _path(f"M{place(one['median_us']):.1f} {y - 2}v26", f"median s{i}"),
            _text(place(times[-1]) + 8, y + 15, f"{one['median_us']:.1f}", "small"),
        ]
    bottom = 6 + len(series) * row
    parts += [
        _path(f"M{left} {bottom}H{right}", "axis"),
        _text(left, bottom + 14, f"{low:.1f} µs", "small"),
        _text(right, bottom + 14, f"{high:.1f} µs", "small end"),
    ]
    return _svg(right + 70, bottom + 20, title, parts)


def curves(title: str, series: Mapping[str, Sequence[Point]], across: str, up: str) -> Markup:
    """Rising steps; y runs from 0 to 1, x is logarithmic, and what costs nothing is at its left.

    `series` has by name points in order of x, of which one at least is positive.
    """
    left, right, top, bottom = 40, 748, 28, 268
    xs = [x for points in series.values() for x, _ in points if x > 0]
    low, high = math.log10(min(xs)), math.log10(max(xs))

    def across_at(x: float) -> float:
        share = (math.log10(x) - low) / (high - low or 1.0) if x > 0 else 0.0
        return round(left + (right - left) * share, 1)

    def up_at(y: float) -> float:
        return round(bottom - (bottom - top) * y, 1)

    parts = [_text(0, 14, f"{title} (up: {up})", "strong")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_path(f"M{left} {up_at(share)}H{right}", "axis"))
        parts.append(_text(left - 6, up_at(share) + 4, f"{share:g}", "small end"))
    for power in range(math.ceil(low), math.floor(high) + 1):
        parts.append(_text(across_at(10.0**power), bottom + 16, f"{10.0**power:g}", "small mid"))
    parts.append(_text(right, bottom + 32, across, "small end"))
    for i, (name, points) in enumerate(series.items()):
        # The page has a class for each colour; further curves repeat them with another dash.
        style = f"curve s{i % len(_COLOURS)} d{i // len(_COLOURS) % 3}"
        stairs = {across_at(x): up_at(y) for x, y in points}  # of one place, the last
        line = "".join(f"H{x}V{y}" for x, y in stairs.items())
        x, y = left + 240 * (i % 3), bottom + 54 + 18 * (i // 3)
        parts += [
            _path(f"M{left} {bottom}{line}H{right}", style),
            _path(f"M{x} {y - 4}h24", style),
            _text(x + 30, y, name[:32], "small"),
        ]
    return _svg(right + 12, bottom + 62 + 18 * ((len(series) + 2) // 3), title, parts)


def bars(
    title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, base: float
) -> Markup:
    """A file: one panel under another, groups of bars along each, a dashed line at 1.

    Args:
        title: Over the whole.
        panels: Panel title to group to series to value. A series keeps its colour throughout; a
            value that is missing leaves a hole.
        base: Where bars start. Lengths are read from there, so it is 0 or the dashed 1.
    """
    left, right, height, gap = 48, 952, 170, 44
    groups = [group for panel in panels.values() for group in panel.values()]
    series = list(dict.fromkeys(name for group in groups for name in group))
    values = [value for group in groups for value in group.values()] + [base, 1.0]
    low, high = math.floor(min(values) * 20) / 20, math.ceil(max(values) * 20) / 20
    step = next(s for s in (0.05, 0.1, 0.25, 0.5, 1, 5, 25, 125) if (high - low) / s <= 8)
    slanted = any(len(label) > 4 for panel in panels.values() for label in panel)
    parts = [_tag("style", Markup(_BARS_STYLE)), _text(left, 18, title, "title")]
    for i, name in enumerate(series):
        parts.append(_rect(left + 150 * i, 28, 10, 10, fill=_COLOURS[i]))
        parts.append(_text(left + 150 * i + 15, 37, name))
    for p, (heading, panel) in enumerate(panels.items()):
        top = 62 + p * (height + gap)

        def y(value: float, top: float = top) -> float:
            return top + height * (high - value) / (high - low)

        parts.append(_text(left, top - 4, heading, "title"))
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
            parts.append(_path(f"M{left} {y(i * step):.1f}H{right}", "grid"))
            parts.append(_text(left - 6, y(i * step) + 4, f"{i * step:g}", "end"))
        slot = (right - left) / max(len(panel), 1)
        wide = 0.8 * slot / max(len(series), 1)
        for g, (label, group) in enumerate(panel.items()):
            start = left + (g + 0.1) * slot
            for name, value in group.items():
                i = series.index(name)
                tip = _tag("title", f"{label}, {name}: {value:.3f}")
                upper, lower = sorted((y(value), y(base)))
                parts.append(_rect(start + i * wide, upper, wide, lower - upper, inside=tip,
                                   fill=_COLOURS[i]))  # fmt: skip
            if p == len(panels) - 1:
                x, bottom = start + 0.4 * slot, top + height + 14
                turn = {"transform": f"rotate(-25 {x:.1f} {bottom})"} if slanted else {}
                parts.append(_text(x, bottom, label, "end" if slanted else "mid", **turn))
        parts.append(_path(f"M{left} {y(1.0):.1f}H{right}", "one"))
    high = 56 + len(panels) * (height + gap) + (120 if slanted else 30) - gap
    return _svg(right + 8, high, title, parts, xmlns="http://www.w3.org/2000/svg")


def heat(
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]],
    columns: Sequence[str],
) -> Markup:
    """A file: one panel under another, ratios as coloured cells; blue is above 1, orange below.

    Args:
        title: Over the whole.
        panels: Panel title to row to column to a `ratio` and a `name` of what it is over. A column
            that is missing leaves a hole.
        columns: In order.
    """
    left, wide, high, y = 320, 54, 18, 44
    parts = [_tag("style", Markup(_BARS_STYLE)), _text(8, 18, title, "title")]
    for heading, rows in panels.items():
        parts.append(_text(8, y, heading, "title"))
        for i, column in enumerate(columns):
            parts.append(_text(left + wide * (i + 0.5), y, column, "mid"))
        y += 8
        for row, cells in rows.items():
            parts.append(_text(left - 8, y + 13, row, "end"))
            for i, column in enumerate(columns):
                if column not in cells:
                    continue
                ratio = cells[column]["ratio"]
                strength = 0.1 + 0.8 * min(1.0, abs(math.log(ratio)) / math.log(1.5))
                tip = _tag("title", f"{row}, {column}: {ratio:.3f} ({cells[column]['name']})")
                parts.append(_rect(
                    left + wide * i, y, wide - 2, high - 2, inside=tip,
                    fill=_COLOURS[0 if ratio >= 1 else 1], fill_opacity=f"{strength:.2f}",
                ))  # fmt: skip
                parts.append(_text(left + wide * (i + 0.5) - 1, y + 12, f"{ratio:.2f}", "mid"))
            y += high
        y += 30
    return _svg(left + wide * len(columns) + 8, y, title, parts, xmlns="http://www.w3.org/2000/svg")


def _svg(
    wide: float, high: float, title: str, parts: Sequence[Markup], **attributes: str
) -> Markup:
    inside = Markup("\n").join([_tag("title", title), *parts])
    return _tag("svg", inside, role="img", style=f"--wide:{wide:.0f}px",
                viewBox=f"0 0 {wide:.0f} {high:.0f}", **attributes)  # fmt: skip


def _path(line: str, kind: str, **attributes: object) -> Markup:
    return _tag("path", class_=kind, d=line, **attributes)


def _text(x: float, y: float, text: str, kind: str = "", **attributes: object) -> Markup:
    return _tag("text", text, x=x, y=y, class_=kind, **attributes)


def _rect(
    x: float, y: float, wide: float, high: float, kind: str = "", inside: str = "",
    **attributes: object,
) -> Markup:  # fmt: skip
    return _tag("rect", inside, x=x, y=y, width=wide, height=high, class_=kind, **attributes)


def _tag(name: str, inside: str = "", /, **attributes: object) -> Markup:
    given = Markup("").join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{v:.1f}" if isinstance(v, float) else v
        )
        for key, v in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, escape(inside))
