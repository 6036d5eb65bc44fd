"""Inputs in float64 for what a program means.

Inputs leave the draw each by itself and together, within the domains that the spec declares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.structures import ROWS, base_shape, plant, plant_operands, plant_pairs
from coda_agent.primitives.deferred import torch
from coda_agent.specs import Spec, draw_inputs

if TYPE_CHECKING:
    Inputs = dict[str, Any]

# Binary exponents of the numbers of a type.
_EXPONENTS = {"float16": (-24, 15), "float8_e4m3fn": (-9, 8)}
_WIDEST = (-126, 127)
_SMALL, _SMALLEST = 2.0**-40, 2.0**-110
_LADDER = 10, 16, 24, 32, 48, 64, 96, 112
# Draws in which each input has a scale of its own. They show faults that need one large and another
# small.
_MIXES = 8
# The square of the first overflows in float32, and that of the other does not.
_LARGE = 2.0**66, 2.0**40
# Of A beside what is bounded.
_BESIDE = 4.0, 8.0, 16.0, 32.0, 64.0
# Of so many columns one is not 0, or of all.
_ALONE = 128
# Beside products of some -1. What a maximum begins with, other than minus infinity, is above those
# of the last: -1e30 is, too.
_NEGATIVE = 64.0, 2.0**16, 2.0**112
# The share of inputs that have one sign in such a draw.
_ALIKE = 0.5
# The same within one input, and the binary exponents of its scales.
_SPREADS, _SCALES = 3, (-20.0, 8.0)
# What two numbers that nearly cancel are apart, as a share of them. Half of float32's digits: where
# the square of what is left is a sum of squares, none is right.
NEARLY = 2.0**-12


def draw_doubles(
    spec: Spec, binding: Mapping[str, str], sizes: Mapping[str, int], seed: int
) -> Inputs:
    """Draw the spec's own inputs at a shape, in float64."""
    return held(spec, _drawn(spec, binding, sizes, seed))


def held(spec: Spec, inputs: Inputs) -> Inputs:
    """Hold inputs to what their types have, and turn tensors without dims into numbers."""
    given, types = dict[str, Any](), spec.default_types()
    for x, v in inputs.items():
        if isinstance(v, torch.Tensor) and v.is_floating_point():
            most = torch.finfo(getattr(torch, spec.dtype_of(x, types))).max
            v = v.clamp(-most, most)
        given[x] = v if getattr(v, "ndim", 0) else float(v)
    return given


def _drawn(spec: Spec, binding: Mapping[str, str], sizes: Mapping[str, int], seed: int) -> Inputs:
    inputs = draw_inputs(spec, sizes, spec.default_types(), seed=seed, binding=binding)
    floating = (x for x in inputs if spec.inputs[x].draw.kind != "integers")
    return inputs | {x: torch.as_tensor(inputs[x]).double() for x in floating}


def around(inputs: Mapping[str, Any], generator: torch.Generator, share: float) -> Inputs:
    """Draw inputs around others, a share of each element away."""
    return {
        x: v * (1 + share * torch.randn(v.shape, generator=generator, dtype=v.dtype))
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else v
        for x, v in inputs.items()
    }


def draws(
    spec: Spec, binding: Mapping[str, str], seed: int, sizes: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Inputs]]:
    """Draw sets of float64 inputs with words; the spec's own first."""
    rng = random.Random(f"{seed} {spec.variant(binding)}")
    generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def drawn() -> Inputs:
        return _drawn(spec, binding, sizes or base_shape(spec), rng.getrandbits(62))

    yield "", held(spec, drawn())
    a, b = spec.gemm
    free = [x for x, tensor in spec.inputs.items() if tensor.draw.kind != "integers"]
    for x in free:
        for label, change in _changes(spec, x):
            inputs = drawn()
            yield f"{x} {label}", held(spec, {**inputs, x: change(inputs[x], generator)})
    unbounded = [x for x in free if spec.inputs[x].domain is None]
    if {a, b} <= set(unbounded):
        inputs = drawn()
        for factor in (2 / inputs[a].shape[1], *_NEGATIVE):
            negative = {a: factor * inputs[a].abs(), b: -inputs[b].abs()}
            yield "every product negative", held(spec, inputs | negative)
        if {a, b} < set(unbounded):
            below = {x: -_NEGATIVE[-1] * abs(inputs[x]) for x in unbounded if x != a}
            below |= {a: inputs[a].abs(), b: below[b]}
            yield "every product and operand negative", held(spec, inputs | below)
        yield "every product positive", held(spec, inputs | {x: inputs[x].abs() for x in (a, b)})
    scalable = [x for x in free if may_scale(spec, x)]
    if a in unbounded:
        inputs = drawn()
        turned = {x: _turned(inputs[x], generator) for x in unbounded} | {a: 0.0 * inputs[a]}
        yield f"{a} times 0, the rest of either sign", held(spec, inputs | turned)
    # What is bounded may be far from its draw: of e^(z - l), e^z alone overflows there.
    bounded = [x for x in free if x not in scalable]
    for factor in _BESIDE if bounded and a in scalable else ():
        for where, share in (("anywhere in its domain", 0.0), ("at its domain's end", 1.0)):
            inputs = drawn()
            inputs |= {x: _anywhere(spec, x, share)(inputs[x], generator) for x in bounded}
            label = f"{a} times {factor:g}, {' and '.join(bounded)} {where}"
            yield label, held(spec, inputs | {a: factor * inputs[a]})
    inputs = drawn()
    columns = len(inputs[b])
    for every in (_ALONE, columns) if b in unbounded else ():
        rest = torch.arange(columns) % every != rng.randrange(min(every, columns))
        alone = {b: inputs[b].masked_fill(rest[:, None], 0.0)}
        yield f"one column of {every} alone", held(spec, inputs | alone)
    inputs = drawn()
    yield (
        "all inputs small together",
        held(spec, inputs | {x: _SMALL * inputs[x] for x in scalable}),
    )
    smallest = {x: _SMALLEST * inputs[x] for x in scalable if x != b}
    yield "all inputs smallest together", held(spec, inputs | smallest)
    for _ in range(_MIXES):
        inputs, words = drawn(), list[str]()
        for x in scalable:
            sign = rng.choice((-1.0, 1.0)) if spec.inputs[x].domain is None else 1.0
            factor, alike = sign * rng.choice((1 / 64, 1.0, 64.0)), rng.random() < _ALIKE
            inputs[x] = factor * (abs(inputs[x]) if alike else inputs[x])
            words.append(f"|{x}| {factor:g}" if alike else f"{x} {factor:g}")
        yield "inputs at scales of their own: " + ", ".join(words), held(spec, inputs)
    for _ in range(_SPREADS):
        inputs = drawn()
        spread = {x: _spread(inputs[x], x in (a, b), generator) for x in scalable}
        yield "elements and rows at scales of their own", held(spec, inputs | spread)
    if b in unbounded:
        inputs = drawn()
        alike = inputs[b][:1] + NEARLY * inputs[b]
        alike = {b: alike.float().double()}
        yield "columns that nearly agree", held(spec, inputs | alike)
        if a in scalable:
            large = inputs[a] / NEARLY  # an epsilon is no more than what is left
            yield "large columns that nearly agree", held(spec, inputs | alike | {a: large})


def planted(spec: Spec, inputs: Inputs, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Plant NaN in rows of A, in columns of the product, and in the rest, with words."""
    generator = torch.Generator().manual_seed(seed)
    yield "NaN in A", inputs | plant(inputs, spec, generator, math.nan, ROWS)
    yield "NaN in B", inputs | plant_pairs(inputs, spec, generator, math.nan)
    if operands := plant_operands(inputs, spec, generator, math.nan):
        yield "NaN in the operands", inputs | operands
        a = spec.gemm[0]
        yield "NaN in the operands, products of 0", inputs | operands | {a: 0.0 * inputs[a]}


def _spread(v: torch.Tensor, rows: bool, generator: torch.Generator) -> torch.Tensor:
    """Give each row, or each element, a scale of its own."""
    shape = (len(v), 1) if rows else v.shape
    scales = torch.empty(shape, dtype=v.dtype).uniform_(*_SCALES, generator=generator)
    return (v * scales.exp2()).float().double()


def _anywhere(
    spec: Spec, x: str, least: float = 0.0
) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    """Make what draws a bounded input evenly from its domain, but for the `least` share of it."""
    lo, hi = spec.inputs[x].domain or (0.0, 0.0)

    def drawn(v: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        share = least + (1.0 - least) * torch.rand(v.shape, generator=generator, dtype=v.dtype)
        return lo + (hi - lo) * share

    return drawn


def _turned(v: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Give each element a sign of its own."""
    return v * (2.0 * torch.randint(2, v.shape, generator=generator) - 1.0)


def may_scale(spec: Spec, x: str) -> bool:
    """Whether an input may be another times a positive number."""
    tensor = spec.inputs[x]
    return tensor.draw.kind != "integers" and tensor.domain in (None, (0.0, math.inf))


def _changes(spec: Spec, x: str) -> Iterator[tuple[str, Any]]:
    """List what an input may be: words, and functions of its draw."""
    domain = spec.inputs[x].domain
    low, high = _EXPONENTS.get(spec.dtype_of(x, spec.default_types()), _WIDEST)

    def log_uniform(v: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        exponents = torch.empty_like(v).uniform_(low, high, generator=generator)
        signs = torch.ones_like(v)
        if domain is None:
            signs -= 2.0 * torch.empty_like(v).bernoulli_(0.5, generator=generator)
        return signs * exponents.exp2()

    if not may_scale(spec, x):
        assert domain is not None
        lo, hi = domain
        yield "anywhere in its domain", _anywhere(spec, x)
        yield f"{lo:g}", lambda v, _: torch.full_like(v, lo)
        yield f"{hi:g}", lambda v, _: torch.full_like(v, hi)
        return
    factors = [64.0, 1 / 64]
    factors += [-1.0, -64.0, 0.0] if domain is None else []
    # An epsilon or a floor shows where a value is about as small.
    factors += [*_LARGE, *(2.0**-k for k in _LADDER)] if x == spec.gemm[0] else []
    # A single number has no spread of exponents, so these stand for it.
    scalar = not spec.inputs[x].shape.cases.get("", (1,))
    factors += [2.0**20, 2.0**-20] if scalar else []
    for factor in factors:
        yield f"times {factor:g}", lambda v, _, factor=factor: factor * v
    if not scalar:
        yield "of every magnitude", log_uniform
