"""Rounding as an operation: to narrower element types and back.

A program rounds at its stores anyway. What rounds here is computed on: fake quantisation, and
statistics of what will be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.fast_math import Register, assembly
from coda_agent.primitives.operation import Decorator, Edge, Term, elementwise, kept

__all__ = [
    "stochastic_bfloat16",
    "stochastic_e4m3",
    "to_bfloat16",
    "to_e4m3",
    "to_e5m2",
    "to_float16",
]

ROUNDINGS = {
    "bfloat16": "to_bfloat16",
    "float16": "to_float16",
    "float8_e4m3fn": "to_e4m3",
    "float8_e5m2": "to_e5m2",
}
"""The operation that rounds to an element type and back, by torch's name of the type."""


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a floating tensor to `dtype` and back, ties to even.

    e4m3 has no infinity, and releases of PyTorch differ in what they make of a value beyond it.
    Here it saturates, as the GPU's conversion does.
    """
    held = x.clamp(-448.0, 448.0) if dtype is torch.float8_e4m3fn else x
    # Through float32, as torch rounds float64 to 8 bits, whatever its release.
    return held.float().to(dtype).to(x.dtype)


def stochastic(x: torch.Tensor, u: Term, dtype: torch.dtype) -> torch.Tensor:
    """Round a floating tensor to one of its two neighbours in `dtype`.

    It goes away from 0 where the share of the step that it is beyond the lower one, plus u in [0,
    1), reaches 1.

    The reference of a spec may call it, with numbers of `coda_agent.primitives.placed.philox`.
    """
    info = torch.finfo(dtype)
    # Below the normal numbers the step is that of the least of them, which is added meanwhile.
    lift = torch.where(x.abs() < info.smallest_normal, info.smallest_normal, 0.0).to(x.dtype)
    size = (x.abs() + lift).double()
    step = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1) * info.eps
    found = ((size / step + u).floor() * step - lift).to(x.dtype)
    found = found.clamp(max=info.max) if dtype.itemsize == 1 else found
    return torch.where(x.isfinite() | ((dtype.itemsize == 1) & x.isinf()), found.copysign(x), x)


def _through(half: str) -> Callable[..., Register]:
    """Convert to a 16-bit type and back."""
    return assembly(f".reg .b16 h; cvt.rn.{half}.f32 h, $1; cvt.f32.{half} $0, h;")


# Both 8-bit conversions take pairs, and give their own back through float16, which holds them all.
_EIGHT = (
    ".reg .b16 h, low, high; .reg .b32 both; .reg .f32 zero; mov.f32 zero, 0f00000000; "
    "cvt.rn.satfinite.{0}x2.f32 h, zero, $1; cvt.rn.f16x2.{0}x2 both, h; "
    "mov.b32 {{low, high}}, both; cvt.f32.f16 $0, low;"
)
# From halfway beyond the largest number, 57344, e5m2 is infinite.
_INFINITE = (
    " .reg .pred p; .reg .f32 size; abs.f32 size, $1; setp.ge.f32 p, size, 0f47700000; "
    "@p copysign.f32 $0, $1, 0f7f800000;"
)


def _cast(lowering: Callable[..., Register], *, finite: bool = False) -> Decorator:
    return elementwise(
        lowering,
        # What PyTorch's casts have: the gradient passes through.
        derivative=lambda z, x, dx: dx,
        edge=kept if finite else lambda x: Edge(x.zero, x.zero),
    )


@_cast(_through("bf16"))
def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, ties to even, and computed on in float32.

    Cost: two conversions. `derivative` passes through, as PyTorch's does.

        return {"O": to_bfloat16(acc) * 2.0}
    """
    return rounded(x, torch.bfloat16)


@_cast(_through("f16"))
def to_float16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to float16, ties to even, infinite beyond 65504.

    Cost: two conversions. `derivative` passes through, as PyTorch's does.

        return {"O": to_float16(acc) * 2.0}
    """
    return rounded(x, torch.float16)


@_cast(assembly(_EIGHT.format("e4m3")), finite=True)
def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to FP8 e4m3 (3 bits of fraction), ties to even; saturates at ±448, NaN stays NaN.

    Cost: three conversions. `derivative` passes through, as PyTorch's does. Use it for fake
    quantisation, where PyTorch writes `.to(torch.float8_e4m3fn)` and casts back; its releases
    differ beyond 448, so a reference clamps first.

        return {"O": to_e4m3(acc * 16.0) * 0.0625}
    """
    return rounded(x, torch.float8_e4m3fn)


@_cast(assembly(_EIGHT.format("e5m2") + _INFINITE))
def to_e5m2(x: torch.Tensor) -> torch.Tensor:
    """x rounded to FP8 e5m2 (2 bits of fraction), ties to even, infinite from 61440 on.

    Cost: three conversions and three instructions that keep infinity. `derivative` passes through,
    as PyTorch's does.

        return {"O": to_e5m2(acc * 16.0) * 0.0625}
    """
    return rounded(x, torch.float8_e5m2)


def _drawn(bits: int, low: str, top: str = "") -> Callable[..., Register]:
    """Lower the rounding of $1 by $2 in [0, 1).

    Its fraction has `bits` too many; what is added to them carries as often as they are large.
    Below `low` the step does not shrink.
    """
    return assembly(
        ".reg .f32 size, lift, share; .reg .b32 word, add; .reg .pred p; "
        f"abs.f32 size, $1; setp.lt.f32 p, size, {low}; mov.f32 lift, 0f00000000; "
        f"@p mov.f32 lift, {low}; add.f32 size, size, lift; "
        f"mul.f32 share, $2, 0f{(127 + bits) << 23:08x}; cvt.rzi.u32.f32 add, share; "
        f"mov.b32 word, size; add.u32 word, word, add; and.b32 word, word, {-(1 << bits)}; "
        f"mov.b32 size, word; sub.f32 size, size, lift; {top} copysign.f32 $0, $1, size; "
        "testp.notanumber.f32 p, $1; @p mov.f32 $0, $1;",
        arity=2,
    )


_stochastic = partial(
    elementwise,
    flops=4,
    derivative=lambda z, x, u, dx, du: dx,
    edge=lambda x, u: Edge(x.zero, x.zero),
)


@_stochastic(_drawn(16, "0f00800000"))
def stochastic_bfloat16(x: torch.Tensor, u: Term) -> torch.Tensor:
    """x rounded to one of its neighbours in bfloat16, by u in [0, 1): on average it is x.

    Cost: ten instructions. Use it with `philox_uniform`, for weights and states kept in 16 bits.

        return {"O": stochastic_bfloat16(acc, philox_uniform(acc, 7, 0))}
    """
    return stochastic(x, u, torch.bfloat16)


@_stochastic(_drawn(20, "0f3c800000", "min.f32 size, size, 0f43e00000;"))
def stochastic_e4m3(x: torch.Tensor, u: Term) -> torch.Tensor:
    """x rounded to one of its neighbours in e4m3, by u in [0, 1); saturates at ±448.

    Cost: twelve instructions. See `stochastic_bfloat16`.

        return {"O": stochastic_e4m3(acc, philox_uniform(acc, 7, 0))}
    """
    return stochastic(x, u, torch.float8_e4m3fn)
