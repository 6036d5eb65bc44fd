"""Numbers that make a program right: constants, factors, terms, bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from coda_agent.agent.judge.edits import BOUNDS, Changes, Edit, Values
from coda_agent.agent.judge.replaying import MISFITS, Replay
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Node
from coda_agent.primitives.ptx import operation

_FAR = 1e3  # a constant that may stand for infinity
_STEPS = 8  # of Newton's method for a number


def constants(replay: Replay, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    for i, n in nodes:
        if n.op != "const":
            continue
        used = next((j for j, m in nodes if i in m.args), None)
        where = f" in `{replay.read.text(used)}`" if used is not None else ""
        if _FAR <= abs(n.value) < math.inf:  # what a maximum begins with, of few numbers
            text = f"the constant {n.value:.9g}{where} should be {math.copysign(math.inf, n.value)}"
            yield Edit("wrong_constant", text, lambda v, i=i: {i: v[i] * math.inf})
        found = _fit(replay, lambda v, t, i=i: {i: v[i] + t})
        if found is None:
            continue
        value = n.value + found
        if used is not None and replay.graph.nodes[used].op in BOUNDS:
            further = {i: replay.values[i] + 2.0 * found}
            if replay.right(further):  # so it is not to be met at all
                much = f"too {'small' if found > 0 else 'large'}"
                text = f"the constant {n.value:.9g}{where} is {much}: it is met"
                yield Edit("wrong_constant", text, lambda v, i=i, t=found: {i: v[i] + t})
                continue
        if abs(value + n.value) < 1e-6 * abs(value):
            fault, text = "wrong_sign", f"the constant {n.value:.9g}{where} has the other sign"
        else:
            fault, is_, due = "wrong_constant", f"{n.value:.9g}", f"{_rounded(value):.9g}"
            if is_ == due:  # something else, that comes to as little
                continue
            text = f"the constant {is_}{where} should be {due}"
        yield Edit(fault, text, lambda v, i=i, t=found: {i: v[i] + t})


def bounds(replay: Replay) -> Iterator[Edit]:
    """Fit two numbers of one size, such as a range's ends."""
    nodes = enumerate(replay.graph.nodes)
    consts = [(i, n.value) for i, n in nodes if n.op == "const" and n.value]
    for (i, c), (j, d) in itertools.combinations(consts, 2):
        if c != -d:
            continue

        def scaled(v: Values, t: float, i: int = i, j: int = j) -> Changes:
            return {i: v[i] * (1 + t), j: v[j] * (1 + t)}

        if (t := _fit(replay, scaled)) is not None:
            text = f"the constants ±{abs(c):.7g} should be ±{_rounded(abs(c) * (1 + t)):.7g}"
            yield Edit("wrong_constant", text, lambda v, f=scaled, t=t: f(v, t))


def fitted(replay: Replay, sites: list[tuple[Any, int]]) -> Iterator[Edit]:
    """Fit a factor, a term or a bound that is a number."""
    graph = replay.read
    for place, i in sites:
        what, use = graph.text(i), graph.use(place)

        def scaled(v: Values, t: float, p: Any = place, i: int = i) -> Changes:
            return {p: v[i] * (1 + t)}

        def shifted(v: Values, t: float, p: Any = place, i: int = i) -> Changes:
            return {p: v[i] + t}

        consts = [n.value for n in graph.nodes if n.op == "const" and abs(n.value) not in (0, 1)]
        # An infinite constant has no inverse, and a fit may find that nothing is left of a value.
        factors = (f for c in (2.0, *consts) if math.isfinite(c) for f in (c, 1 / c))
        known = (f - 1 for f in factors if replay.right(scaled(replay.values, f - 1)))
        t = next(known, None) or _fit(replay, scaled)
        if t is not None and abs(1 + t) > 1e-9:  # less leaves nothing of the value
            text = f"`{what}` enters times {_rounded(1 / (1 + t)):.7g}{use}"
            text += f": `{_rounded(1 + t):.7g} · {what}` is due"
            yield Edit("constant_factor", text, lambda v, f=scaled, t=t: f(v, t))
        if (t := _fit(replay, shifted)) is not None:
            text = f"a term is left out: `{what} {'+-'[t < 0]} {abs(_rounded(t)):.7g}` is due{use}"
            yield Edit("missing_term", text, lambda v, f=shifted, t=t: f(v, t))
        value = replay.values[i].double()
        for op, share in (("minimum", 0.98), ("maximum", 0.02)):
            start = float(value.flatten()[:100_000].quantile(share)) if value.numel() > 1 else 0.0

            def bounded(
                v: Values, t: float, p: Any = place, i: int = i, op: str = op, s: float = start
            ) -> Changes:
                return {p: operation(op).torch(v[i], torch.tensor(s + t, dtype=torch.float64))}

            if value.numel() > 1 and (t := _fit(replay, bounded)) is not None:
                due = f"{op}({what}, {_rounded(start + t):.7g})"
                text = f"a bound is left out: `{due}` is due{use}"
                yield Edit("missing_term", text, lambda v, f=bounded, t=t: f(v, t))


def _fit(replay: Replay, changes: Callable[[Values, float], Changes]) -> float | None:
    """Fit the number that makes the output right, by Newton's method."""
    wrong, truth, t, step = replay.wrong, replay.truth, 0.0, 1e-6
    for _ in range(_STEPS):
        try:
            here = replay.run(changes(replay.values, t))
            slope = (replay.run(changes(replay.values, t + step)) - here) / step
        except MISFITS:
            return None
        if here.shape != truth.shape:
            return None
        # Steps of what does not move are infinite: left out.
        moves = ((truth - here) / slope)[wrong & (slope.abs() > 1e-12 * truth.abs())]
        moves = moves[moves.isfinite()]
        if not moves.numel():
            return None
        by = float(moves.median())
        t += by
        if not abs(t) < 1e6:
            return None
        if abs(by) <= 1e-10 * max(1.0, abs(t)):
            break
    return t if abs(t) > 1e-9 and replay.right(changes(replay.values, t)) else None


def _rounded(x: float) -> float:
    """Round a number to what one would write, where near."""
    for digits in (3, 5, 7):
        short = float(f"{x:.{digits}g}")
        if abs(short - x) <= 1e-6 * abs(x):
            return short
    return x
