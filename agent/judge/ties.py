"""Cases on a function's jumps: halves, thresholds, signs of 0.

Elsewhere a difference at a jump is excused, since errors of arithmetic decide to which side a value
falls. Here there are none: rows of A pick single elements of B, and these, like all other inputs,
are halves of whole numbers, thresholds, or the float32 numbers beside them. Elements count where
float32 and float64 give the same number, for the reference as for the program. So a difference is
one of the functions themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from coda_agent.agent.judge.draws import draw_doubles
from coda_agent.agent.judge.replaying import COMPARISONS
from coda_agent.agent.judge.runners import interpreted
from coda_agent.agent.judge.structures import base_shape
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.specs import Spec, draw_inputs

_DRAWS = 3
_NEAR = 1e-9
# What thresholds may be beside a program's constants. A smaller constant is none, but an epsilon:
# beside it a difference may be one of digits. So it would be beside the largest float32.
_USUAL = 0.0, 1.0
_LEAST = 2.0**-20
_EXPONENTS = 8, 120, 120  # of two, in either sign
SUMS = "add", "iadd", "radd", "sub", "isub", "rsub", "subtract"
_ANGLES = "sin", "cos", "tan", "sinc"
_WIDEST = 2.0**16  # of an angle: float32 holds it to 2^-8, and a quotient by 2 pi not even so far
# What tells a number that float32 happens to hold from one that is exact, as a share of it. Odd: a
# multiple of 3 is one no longer, which a remainder by 1.5 shows, and no power of two meets it.
MARK = 141 * 2.0**-52
_BLOCK = 16  # columns, of one power of two


class Draw(NamedTuple):
    """Inputs on jumps; does float32 `alone` tell sides there?"""

    label: str
    inputs: dict[str, Any]
    alone: bool = False


def tie_draws(
    variant: Variant, seed: int, sizes: Mapping[str, int] | None = None
) -> Iterator[Draw]:
    """Draw halves, thresholds and powers of two, with their neighbours."""
    spec, graph = variant.spec, variant.program.graph
    about = spec, variant.binding, sizes or base_shape(spec)
    numbers = constants(graph)
    halves, factors = _values(numbers), (0.5, 1.0, 2.0)
    for i in range(_DRAWS if all(map(is_short, _computed_with(graph))) else 0):
        yield Draw("halves of whole numbers", _drawn(*about, halves, factors, seed, i))
    centres = torch.tensor([*_USUAL, *(c for c in numbers if c >= _LEAST)], dtype=torch.float64)
    thresholds = _sides(centres.outer(torch.tensor([-1.0, 0.5, 1.0, 2.0]).double()).flatten())
    for i in range(_DRAWS):
        inputs = _drawn(*about, thresholds, (0.0, 1.0), seed, i)
        yield Draw("thresholds and the numbers beside them", inputs)
    a, b = spec.gemm
    for i, most in enumerate(_EXPONENTS if spec.inputs[b].domain is None else ()):
        inputs = _drawn(*about, thresholds, (1.0,), seed, i)
        inputs[a], inputs[b] = _powers(inputs[a], inputs[b], most, seed + i)
        label = f"powers of two from 2^-{most} to 2^{most} and the numbers beside them"
        yield Draw(label, inputs, alone=True)


def compared_draws(
    variant: Variant, seed: int, sizes: Mapping[str, int] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw usual inputs with numbers that the program compares with constants, all at once.

    Numbers between two such constants are drawn, too. Of a tensor every other element is one.
    """
    spec, found = variant.spec, _compared(variant)
    if not found:
        return
    generator = torch.Generator().manual_seed(seed)
    numbers = {x: values for x, values in found.items() if not spec.symbolic_shape(x)}
    for values in itertools.islice(itertools.product(*numbers.values()), _DRAWS**2):
        inputs = draw_doubles(spec, variant.binding, sizes or base_shape(spec), seed)
        inputs |= dict(zip(numbers, values, strict=True))
        for x in found.keys() - numbers:
            pool, drawn = torch.tensor(found[x], dtype=torch.float64), inputs[x]
            some = pool[torch.randint(len(pool), drawn.shape, generator=generator)]
            inputs[x] = some.where(torch.rand(drawn.shape, generator=generator) < 0.5, drawn)
        yield "numbers that the program compares", inputs


def _compared(variant: Variant) -> dict[str, list[float]]:
    """Find constants with which operands are compared, and numbers between them."""
    nodes, found = variant.program.graph.nodes, dict[str, set[float]]()
    for node in nodes:
        if node.op in COMPARISONS and len(node.args) == 2:
            pair = sorted((nodes[a] for a in node.args), key=lambda n: n.op)
            if [n.op for n in pair] == ["const", "operand"] and pair[1].shape is not Shape.INDEX:
                low, high = variant.spec.inputs[pair[1].name].domain or (-math.inf, math.inf)
                if low <= pair[0].value <= high:
                    found.setdefault(pair[1].name, set()).add(pair[0].value)
    between = {
        x: {(a + b) / 2 for a, b in itertools.pairwise(sorted(values))}
        for x, values in found.items()
    }
    return {x: sorted(values | between[x]) for x, values in sorted(found.items())}


def _drawn(
    spec: Spec, binding: Mapping[str, str], sizes: Mapping[str, int], pool: torch.Tensor,
    factors: tuple[float, ...], seed: int, i: int,
) -> dict[str, Any]:  # fmt: skip
    """Draw inputs; rows of A pick single elements of B."""
    generator = torch.Generator().manual_seed(seed + i)
    a, b = spec.gemm
    inputs = draw_inputs(spec, sizes, spec.default_types(), seed=seed + i, binding=binding)
    for x, value in inputs.items():
        tensor, value = spec.inputs[x], torch.as_tensor(value).double()
        if tensor.draw.kind == "integers":
            continue
        if x == a:
            index = torch.randint(value.shape[1], (len(value), 1), generator=generator)
            inputs[x] = torch.zeros_like(value).scatter_(1, index, 1.0)
            continue
        low, high = tensor.domain or (-math.inf, math.inf)
        least = 0.0 if tensor.domain is None else low
        choices = pool[(pool >= low) & (pool <= high)]
        if (x != b and value.ndim < 2) or not len(choices):
            some = [f for f in factors if least <= f <= high] or [low]
            choices = torch.tensor(some, dtype=torch.float64)
        drawn = choices[torch.randint(len(choices), value.shape, generator=generator)]
        inputs[x] = drawn if drawn.ndim else float(drawn)
    return inputs


def _powers(
    picks: torch.Tensor, like: torch.Tensor, most: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw powers of two for rows of A and groups of B.

    Rows of A are powers of two times one-hot, and B such that the largest of a group of columns is
    that power, or a number beside it.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randperm(2 * most + 1, generator=generator).double() - most
    exponents = exponents.repeat(-(-len(picks) // len(exponents)))[: len(picks)]

    def some(numbers: list[float], *shape: int) -> torch.Tensor:
        pool = torch.tensor(numbers, dtype=torch.float64)
        return pool[torch.randint(len(pool), shape, generator=generator)]

    tops = some([1.0, 1.0, 1 + 2.0**-23, 1 - 2.0**-24], -(-len(like) // _BLOCK), like.shape[1])
    shares = some([1.0, -1.0, 0.5, -0.5, 0.25, 0.0], *like.shape)
    powers = tops.repeat_interleave(_BLOCK, 0)[: len(like)] * shares
    return picks * exponents[:, None].exp2(), powers


def _sides(values: torch.Tensor) -> torch.Tensor:
    """List numbers as float32 holds them, and the ones on either side."""
    held = values.float()
    up, down = (held.nextafter(torch.tensor(way)) for way in (math.inf, -math.inf))
    near = torch.cat([held, up, down]).unique()
    near = near.where(near.abs() >= 2.0**-126, 0.0)  # a GPU flushes what is less
    return near[near.isfinite()].double()


def differing(
    variant: Variant, inputs: Mapping[str, Any], o: str, out: torch.Tensor, truth: torch.Tensor
) -> torch.Tensor:
    """Find elements that are exact in both and not equal."""
    wide = variant.reference(inputs, wide=torch.float32)[o]
    dtypes = dict.fromkeys(variant.program.outputs, torch.float32)
    single = interpreted(variant.spec, variant.program, dict(inputs), dtypes=dtypes)[o]
    exact = (wide.double() == truth) & (single.double() == out) & truth.isfinite()
    wrong = exact & ~((out - truth).abs() <= _NEAR * truth.abs())
    for sign in (1.0, -1.0) if bool(wrong.any()) else ():
        wrong &= variant.reference(inputs, touch=partial(bare, sign=sign))[o] == truth
    return wrong


def called(function: Any) -> str:
    """Name a function of torch as its method is called."""
    name = getattr(function, "__name__", "")
    return name[2:-2] if name.startswith("__") else name


def bare(function: Any, args: tuple[Any, ...], result: Any, sign: float = 1.0) -> Any:
    """Lay bare what a reference loses, as a `touch` of its run.

    A sum that float64 rounds moves by `MARK` of it: (x + 0.5) - 0.5 is 0 at x = 2^-120 in every
    type, and so is log(1 + e^-40) in float64. A sine is NaN at an angle of which float32 keeps too
    little.
    """
    name = called(function)
    if name in _ANGLES and floating(args[0]):
        return result.where(args[0].abs() <= _WIDEST, math.nan)
    if name not in SUMS or not floating(result):
        return result
    a, b = args[:2]
    a, b = (a, b) if name.endswith("add") else (-a, b) if name == "rsub" else (a, -b)
    part = result - a
    lost = (a - (result - part)) + (b - part)
    return result.where(lost == 0, result * (1.0 + sign * MARK))


def floating(value: Any) -> bool:
    """Whether a value is a tensor of real numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_short(value: float) -> bool:
    """Whether a number has at most eight bits, meant exactly."""
    mantissa, _ = math.frexp(value)
    return math.isfinite(value) and mantissa * 256 == round(mantissa * 256)


def _computed_with(graph: Graph) -> list[float]:
    """List a graph's constants that are more than a bound."""
    nodes = graph.nodes
    used = {a for n in nodes if n.op not in ("maximum", "minimum") for a in n.args}
    return [n.value for i, n in enumerate(nodes) if n.op == "const" and i in used]


def constants(graph: Graph) -> set[float]:
    """List the sizes of a graph's constants."""
    return {abs(n.value) for n in graph.nodes if n.op == "const" and math.isfinite(n.value)}


def rounded_number(value: float) -> float:
    """Round a number to float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def _values(numbers: set[float]) -> torch.Tensor:
    """List halves around 0, the ends of 8 bits, and numbers."""
    centres = {0.0, 127.0, 128.0} | {c for c in numbers if c < 2**15}
    halves = {sign * c + i / 2 for c in centres for sign in (1, -1) for i in range(-9, 10)}
    return torch.tensor(sorted(halves), dtype=torch.float64)
