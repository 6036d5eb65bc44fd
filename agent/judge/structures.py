"""Inputs on which a wrong program cannot hide.

Small integers have results without rounding. In a one-hot row, a misplaced or forgotten element
stands alone. Extreme scales, NaN and infinities show what a program does beyond the usual values,
and strides and aliases are layouts that a caller may pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.tiles import STREAMING
from coda_agent.specs import Spec

if TYPE_CHECKING:
    Inputs = dict[str, Any]
    Change = Callable[[Inputs, Spec, torch.Generator, float], Inputs]


# Of so many masks leave one: most groups of columns have no element, or one.
_OF = 64
ROWS = 8  # of A, in which a number is planted beside zeros


@dataclass(frozen=True)
class Structure:
    """How a case departs from the spec's own draws.

    Attributes:
        label: What the case shows.
        change: Changed inputs, from (all inputs, spec, generator, factor).
        sizes: Dims.
        factors: Magnitudes to try in this order, until all outputs are in the range of their type.
        everywhere: Whether every tile is checked, or the default one alone.
        exact: Whether outputs without rounding must match: tiles bit for bit, vectors to 2⁻²⁰.
        planted: Whether results are NaN or infinite somewhere, or the inputs.
        layout: "" is contiguous. "padded" has a stride and an offset. "transposed" is padded too,
            and B has N as its unit stride, or K where the spec's own has N.
        alias: Two inputs that are one tensor.
    """

    label: str
    change: Change
    sizes: Mapping[str, int]
    factors: tuple[float, ...] = (1.0,)
    everywhere: bool = False
    exact: bool = False
    planted: bool = False
    layout: str = ""
    alias: tuple[str, str] | None = None

    @property
    def infinite(self) -> bool:
        """Whether inputs are infinite, and none NaN."""
        return self.planted and math.isinf(self.factors[0])


def _volume(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values())


def base_shape(spec: Spec) -> Mapping[str, int]:
    """Find the smallest check shape of some extent, or the largest."""
    m, n, _ = spec.gemm_dims
    shapes = sorted(spec.check_shapes, key=_volume)
    return next((s for s in shapes if s[m] > 1 and s[n] > 16), shapes[-1])


def structures(spec: Spec, binding: Mapping[str, str], element: str) -> list[Structure]:
    """List what is checked beside the spec's own draws, in one type.

    Shapes are the spec's own. Only the number of rows, or K, may be another, where the spec has no
    dims but M, N and K.
    """
    m, n, k = spec.gemm_dims
    base = base_shape(spec)
    free = len(spec.dims) == 3
    step = spec.dims[m].multiple_of
    ragged = {**base, m: -(-129 // step) * step} if free else base
    # Long enough for every tile that takes K in parts to do so; the last part is ragged.
    longest = 1 + 256 * max(c.split_k for _, c in STREAMING)
    long = {**base, k: -(-longest // spec.dims[k].multiple_of) * spec.dims[k].multiple_of}
    shapes = sorted(spec.check_shapes, key=_volume, reverse=True)
    even = next((s for s in shapes if s[n].bit_count() == 1 and s[m] > 1), base)
    wide = spec.dtype_of(spec.gemm[0], dict.fromkeys(spec.types, element)) != "float8_e4m3fn"
    fine, large, small = (8.0, 1e4, 1e-4) if wide else (2.0, 32.0, 2.0**-5)
    found = [
        Structure("integers", _integers, ragged, (fine,), everywhere=True, exact=True),
        Structure("coarse integers", _integers, even, (1.0,), everywhere=True, exact=True),
        Structure("NaN in A", plant, base, (math.nan,), everywhere=True, planted=True),
        Structure("one huge value", plant, base, (large, 64.0, 16.0)),
        Structure(f"A times {large:g} or less", _scaled, base, (large, large / 32, 4.0)),
        Structure(f"A times {small:g}", _scaled, base, (small,)),
    ]
    if free and spec.dims[k].only is None:
        found.append(Structure("long K", _as_drawn, long, everywhere=True))
    if wide:
        found.append(Structure("Inf in A", plant, base, (math.inf,), True, planted=True))
    if element != next(iter(spec.types.values()), (element,))[0]:
        return found
    # What does not depend on the element type.
    found += [
        Structure("one-hot rows of A", partial(_selecting, which=0), base),
        Structure("B a permutation", partial(_selecting, which=1), base),
        Structure("equal rows of A", _equal_rows, base),
        Structure("alternating signs", _alternating, base),
        Structure("rows of zeros", _zero_rows, base),
    ]
    if any(_plain(spec, name) for name in spec.inputs if name not in spec.gemm):
        for what in (math.nan, math.inf):
            label = f"{'Inf' if math.isinf(what) else 'NaN'} in the operands"
            found.append(Structure(label, plant_operands, base, (what,), planted=True))
        label = "NaN beside zeros"
        found.append(Structure(label, _beside_zeros, base, (math.nan,), planted=True))
        for beside, rows in (("", 0), ("A and ", ROWS)):
            label, change = f"-Inf in {beside}most of the operands", partial(_masked, rows=rows)
            found.append(Structure(label, change, base, (-math.inf,), planted=True))
    # A transposed operand is compiled for on a GPU, so only once.
    layout = "transposed" if wide and binding == spec.bindings()[0] else "padded"
    found.append(Structure(f"{layout} operands", _as_drawn, base, layout=layout))
    found.append(Structure("NaN in B", plant_pairs, base, (math.nan,), planted=True))
    a, b = spec.gemm
    alike = [(base, pair) for pair in _twins(spec, binding)]
    if free and base[n] % step == 0:
        alike.append(({**base, m: base[n]}, (a, b)))
    for sizes, (one, other) in alike:
        change = partial(_copied, one=one, other=other)
        label = f"{one} and {other} are one tensor"
        found.append(Structure(label, change, sizes, alias=(one, other)))
    return found


def _plain(spec: Spec, name: str) -> bool:
    """Whether an input is a tensor of floating numbers."""
    shapes = spec.inputs[name].shape.cases.values()
    return () not in shapes and not spec.inputs[name].dtype.startswith("int")


def _twins(spec: Spec, binding: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """List pairs of inputs of one kind that are only read."""
    seen: dict[Hashable, str] = {}
    for name, tensor in spec.inputs.items():
        shape = spec.symbolic_shape(name, binding)
        if not shape or name in spec.updated(binding).values():
            continue
        if (face := (shape, tensor.dtype, tensor.draw.kind == "integers")) in seen:
            yield seen.pop(face), name
        else:
            seen[face] = name


def _as_drawn(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    return {}


def _copied(inputs: Inputs, *_: object, one: str, other: str) -> Inputs:
    return {other: inputs[one].clone()}


def _integers(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    """Round every input to a grid of a power of two.

    The largest power of two below an input's root mean square is `factor` steps of its grid for A
    and B, and 2 steps for the rest.
    """
    changed: Inputs = {}
    for name, value in inputs.items():
        wide = torch.as_tensor(value).double()
        if wide.any() and spec.inputs[name].draw.kind != "integers":
            top = 2.0 ** math.floor(math.log2(float(wide.square().mean().sqrt())))
            unit = top / (factor if name in spec.gemm else 2.0)
            grid = (wide / unit).round() * unit
            changed[name] = grid.to(value.dtype) if wide.ndim else float(grid)
    return changed


def _pick(extent: int, generator: torch.Generator, count: int = 1) -> torch.Tensor:
    return torch.randperm(extent, generator=generator, device=generator.device)[:count]


def _with(
    x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | slice, value: float
) -> torch.Tensor:
    changed = x.double()  # a copy, since no input is; 8-bit floats have no indexed assignment
    changed[rows, columns] = value
    return changed.to(x.dtype)


def plant(
    inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float, count: int = 1
) -> Inputs:
    """Plant a number in rows of A."""
    a = inputs[name := spec.gemm[0]]
    rows, columns = _pick(a.shape[0], generator, count), _pick(a.shape[1], generator)
    return {name: _with(a, rows, columns, factor)}


def plant_pairs(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    """Plant a number in an even row of B and in an odd one, which are columns of the product.

    In a row of A it is in both of a pair, and in all of a group: what drops it beside a number does
    not show there.
    """
    b = inputs[name := spec.gemm[1]]
    sides = torch.arange(2, device=b.device)
    rows = 2 * _pick(len(b) // 2, generator, 2) + sides
    return {name: _with(b, rows, _pick(b.shape[1], generator), factor)}


def plant_operands(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    """Plant NaN or infinities in floating tensors beside A and B."""
    changed: Inputs = {}
    for name, value in inputs.items():
        if name in spec.gemm or not _plain(spec, name):
            continue
        if math.isnan(factor) or (spec.inputs[name].domain is None and value.element_size() > 1):
            flat = value.reshape(1, -1)
            for sign in (1.0, -1.0):
                at = _pick(flat.shape[1], generator)
                flat = _with(flat, at * 0, at, sign * factor)
            changed[name] = flat.reshape(value.shape)
    return changed


def _beside_zeros(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    """Plant NaN in A and the rest, and zeros in half of the rest that may have some."""
    changed = plant(inputs, spec, generator, factor, ROWS)  # half meet a zero
    for name, value in inputs.items():
        tensor = spec.inputs[name]
        low, high = tensor.domain or (-math.inf, math.inf)
        if name in spec.gemm or tensor.dtype.startswith("int") or not low <= 0.0 <= high:
            continue
        if not _plain(spec, name):
            changed[name] = 0.0
        elif tensor.domain != (0.0, math.inf):  # that is positive
            drawn = torch.rand(value.shape, generator=generator, device=value.device)
            zeros = value.double().masked_fill(drawn < 0.5, 0.0)
            changed[name] = zeros.to(value.dtype)
    return changed | plant_operands({**inputs, **changed}, spec, generator, factor)


def _masked(
    inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float, rows: int
) -> Inputs:
    """Leave one element of 64 of tensors beside A and B that may be masks; `rows` of A have one.

    So both terms of a sum may be masked.
    """
    changed: Inputs = {}
    for name, value in inputs.items():
        if name in spec.gemm or not _plain(spec, name) or spec.inputs[name].domain is not None:
            continue
        if value.element_size() > 1:
            flat = torch.arange(value.numel(), device=value.device).reshape(value.shape)
            left = _pick(min(_OF, value.numel()), generator)
            changed[name] = value.masked_fill(flat % _OF != left, factor)
    some = changed and rows and inputs[spec.gemm[0]].element_size() > 1
    return changed | (plant(inputs, spec, generator, factor, rows) if some else {})


def _selecting(
    inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float, which: int
) -> Inputs:
    """Make rows of A or B with a single 1, columns in equal shares."""
    x = inputs[name := spec.gemm[which]]
    rows, k = x.shape
    columns = torch.cat([_pick(k, generator, k) for _ in range(-(-rows // k))])[:rows]
    zeros = torch.zeros_like(x)
    return {name: _with(zeros, torch.arange(rows, device=x.device), columns, 1.0)}


def _equal_rows(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: a[:1].expand(a.shape).contiguous()}


def _alternating(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a, b = (inputs[name].float().abs() for name in spec.gemm)
    a[:, 1::2] *= -1
    return {name: x.to(inputs[name].dtype) for name, x in zip(spec.gemm, (a, b), strict=True)}


def _zero_rows(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: _with(a, _pick(a.shape[0], generator, a.shape[0] // 2), slice(None), 0.0)}


def _scaled(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: (a.float() * factor).to(a.dtype)}
