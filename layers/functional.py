"""The sequences of a pre-norm decoder, with gradients: each is one or two accepted kernels forward,
and backward their accepted counterparts beside `torch.mm`.

- The stream x (M, d) goes with a `Normed`: h = x · gamma, and r = rsqrt(mean x² + eps) of each row.
  The kernel that writes x writes both; the next product applies r to its rows (paper, 3.2.1).
- h and r carry no gradient. Whoever reads them knows that they are functions of x and gamma, and
  gives the whole gradient by those. So gamma belongs to the sequence behind the norm.
- A norm's backward needs the mean of g · x · r over each row, g being the gradient at x · r. It is
  the inner product of the next product's output with its gradient, over d (paper, 3.2.4). So it
  is known before the product that brings g, and that product's epilogue ends the norm's backward.
- All tensors are bfloat16 or all float16. The caller flattens leading dims: rows are tokens.
- A second derivative is refused by PyTorch (`once_differentiable`).
- A weight that has a `main_grad` gets its gradient there (`weight_gradient`).
- With `fp8` the forward pass multiplies in e4m3 (`fp8_products`), with scales that it finds anew:
  each token by its own maximum, and so each row of a weight in front of a residual; a weight behind
  a norm has one scale. All else stays bfloat16: what is given and returned, and the backward pass.
  Gradients are straight-through: those of bfloat16 products, at the values that were computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coda_agent.generated import (
    gemm_partial_swiglu_bwd,
    gemm_residual_partial_rmsnorm,
    gemm_residual_partial_rmsnorm_bwd,
    gemm_rmsnorm,
    gemm_rmsnorm_rope,
    gemm_rmsnorm_swiglu,
)
from coda_agent.layers import passes
from coda_agent.layers.fp8_products import FP8, Products, fitting
from coda_agent.layers.packing import kept_weight, on, turned_weight
from coda_agent.layers.passes import fused
from coda_agent.layers.weight_gradient import added, mains
from coda_agent.runtime.sharded import distributed

_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_whole(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse DTensors: a norm's statistic, and its backward pass, need rows that are whole."""

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        values = (*args, *kwargs.values())
        parts = [x for value in values for x in (value if isinstance(value, Normed) else (value,))]
        if distributed(parts):
            raise TypeError(
                f"{function.__name__} got a DTensor, expected plain tensors: use what FSDP has "
                "gathered, .full_tensor(), or PyTorch's own calls under tensor parallelism"
            )
        return function(*args, **kwargs)

    return checked


class Normed(NamedTuple):
    """What a product behind a norm takes of the stream.

    Attributes:
        h: x · gamma (M, d), in the type of x.
        r: rsqrt(mean x² + eps) (M,), float32.
    """

    h: Tensor
    r: Tensor


@of_whole
def normed(x: Tensor, gamma: Tensor, eps: float) -> Normed:
    """The `Normed` of a stream that no kernel wrote, such as an embedding's."""
    with torch.no_grad():
        return Normed(*fused(_normed, x)(x, gamma, eps))


@of_whole
def linear_residual_norm(
    a: Tensor, weight: Tensor, x: Tensor, gamma: Tensor, eps: float, *, fp8: bool = False
) -> tuple[Tensor, Normed]:
    """x + a weightᵀ, and its `Normed`.

    Args:
        a: (M, K).
        weight: (d, K), as `nn.Linear` has it.
        x: (M, d), the stream.
        gamma: (d,), the weight of the norm behind.
        eps: Of that norm.
        fp8: Whether to multiply in e4m3; all tensors are bfloat16 then.

    Raises:
        ValueError: `fp8`, and a type or a size that it does not take.
    """
    sequence = _Fp8LinearResidualNorm if _in_fp8(fp8, x, weight) else _LinearResidualNorm
    out, h, r = sequence.apply(a, weight, x, gamma.detach(), eps)
    return out, Normed(h, r)


@of_whole
def mlp(
    x: Tensor,
    given: Normed,
    gamma: Tensor,
    gate_up: Tensor,
    down: Tensor,
    next_gamma: Tensor,
    next_eps: float,
    activation: str = "silu",
    *,
    fp8: bool = False,
) -> tuple[Tensor, Normed]:
    """x + (f(n gateᵀ) · (n upᵀ)) downᵀ with n = x · r · gamma, and its `Normed`.

    SwiGLU is in the epilogues of its products, forward and backward. Of other gates there is no
    accepted kernel: those are a pass of PyTorch between the products.

    Args:
        x: (M, d), the stream.
        given: Its `Normed` by `gamma`.
        gamma: (d,), the norm's weight.
        gate_up: (2F, d), rows of gate and up in turn (`packing.interleave`).
        down: (d, F).
        next_gamma: (d,), the weight of the norm behind.
        next_eps: Of that norm.
        activation: f, one of `passes.ACTIVATIONS`.
        fp8: Whether to multiply in e4m3; all tensors are bfloat16 then.

    Raises:
        ValueError: no such activation; or `fp8`, and a type or a size that it does not take.
    """
    if activation not in passes.ACTIVATIONS:
        known = ", ".join(passes.ACTIVATIONS)
        raise ValueError(f"no activation {activation!r}, expected one of {known}")
    last = next_gamma.detach(), next_eps, activation, asked(x, gamma, gate_up, down)
    sequence = _Fp8Mlp if _in_fp8(fp8, x, gate_up, down) else _Mlp
    out, h, r = sequence.apply(x, *given, gamma, gate_up, down, *last)
    return out, Normed(h, r)


@of_whole
def norm_linear(
    x: Tensor,
    given: Normed,
    gamma: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    table: Tensor | None = None,
    bias: Tensor | None = None,
    rotated: tuple[int, int] | None = None,
    *,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """n weightᵀ + bias in parts of `sizes` columns, with n = x · r · gamma, and the stream.

    Args:
        x: (M, d), the stream.
        given: Its `Normed` by `gamma`.
        gamma: (d,), the norm's weight.
        weight: (N, d).
        sizes: Columns of each part, N in all.
        table: (M, N), cosines and negated sines in turn (`packing.rotary_table`), by which adjacent
            pairs of columns are rotated; None rotates nothing.
        bias: (N,), in the order of `weight`. With one, h and `weight` are copied with eight more
            columns.
        rotated: Heads that `table` rotates, and the columns of each, where it is as
            `packing.rotary_table` makes it: all heads have the same columns, and those behind them
            stay as they are. The backward pass then reads one head's.
        fp8: Whether to multiply in e4m3; all tensors are bfloat16 then, and there is no bias.

    Returns:
        The parts, each (M, size), and x. Who takes the residual of that x saves an addition of
        gradients: the last kernel of the backward pass adds them.

    Raises:
        ValueError: the bias is not one number for each row of `weight`, or those rows are fewer
            than the rotated columns; or `fp8`, and a bias, a type or a size that it does not take.
    """
    if table is None:
        rotated = None
    elif rotated is not None and (rotated[1] % 2 or math.prod(rotated) > len(weight)):
        raise ValueError(
            f"rotated is {rotated}, expected heads and their columns, which are even and in all "
            f"at most the {len(weight)} rows of weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, expected ({len(weight)},) as weight's rows")
    if fp8 and bias is not None:
        raise ValueError("FP8 products of a norm take no bias; leave fp8 out where there is one")
    sequence = _Fp8NormLinear if _in_fp8(fp8, x, weight) else _NormLinear
    return sequence.apply(x, *given, gamma, weight, bias, tuple(sizes), table, rotated)


@of_whole
def qk_norm_rope(y: Tensor, gamma: Tensor, eps: float, table: Tensor | None) -> Tensor:
    """Query or key (M, H · D) of `norm_linear` with no table: the RMS norm of each head, then the
    rotation. There is no accepted kernel of both: it is a pass of PyTorch.

    Args:
        y: (M, H · D).
        gamma: (D,), the norm's weight, in the order of `y`'s columns.
        eps: Of the norm.
        table: (M, H · D), those columns of `packing.rotary_table`; None rotates nothing.
    """
    return fused(passes.qk_norm_rope, y)(y, gamma, eps, table)


@of_whole
def gate(z: Tensor, activation: str) -> Tensor:
    """f(g) · u of gates g and ups u in turn, the columns of z (M, 2F): a pass of PyTorch."""
    return fused(passes.gated, z)(z, activation)


@of_whole
def add_normed(x: Tensor, y: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x (M, d) plus y (M, d) by its RMS norm, times gamma (d,): a pass of PyTorch."""
    return fused(passes.add_normed, y)(x, y, gamma, eps)


# No default of a function: torch.compile of torch 2.9 does not know a kernel there.
_PLAIN = Products(
    gemm_residual_partial_rmsnorm,
    gemm_rmsnorm,
    gemm_rmsnorm_rope.without("D"),
    gemm_rmsnorm_swiglu,
    gemm_rmsnorm_swiglu.without("D"),
)


class _LinearResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        a, weight, x, gamma, eps = inputs
        by = by or _PLAIN
        out, h, s = by.residual_norm(a, weight, x, gamma)
        ctx.save_for_backward(a, weight)
        ctx.mains = mains(weight)
        return _with_normed(ctx, out, h, _rms(s, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout: Tensor = grads[0]
        a, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            dout @ weight if needs[0] else None,
            added(ctx.mains[0], dout.T, a) if needs[1] else None,
            dout,
            None,
            None,
        )


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        x, h, r, gamma, gate_up, down, next_gamma, next_eps, activation, asked = inputs
        by = by or _PLAIN
        z: Any = None
        if activation != "silu":
            z = by.norm(h, gate_up, r)
            act = fused(passes.gated, z)(z, activation)
        elif asked:
            z, act = by.norm_swiglu(h, gate_up, r)
        else:
            act = by.norm_gated(h, gate_up, r)
        out, next_h, s = by.residual_norm(act, down, x, next_gamma)
        parts, ctx.places = kept_weight(gate_up)
        ctx.save_for_backward(x, r, gamma, down, z, *parts)
        ctx.mains, ctx.activation = mains(gate_up, down), activation
        return _with_normed(ctx, out, next_h, _rms(s, next_eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout: Tensor = grads[0]
        x, r, gamma, down, z, *gate_up = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dout = dout.contiguous()
        if ctx.activation == "silu":
            into = {"dZ": z} if _last_reader() else None
            dz, mean, act = gemm_partial_swiglu_bwd(dout, turned_weight([down]), z, out=into)
            statistic = mean * (down.shape[1] / x.shape[1])
        else:
            dz, total, act = fused(passes.gate_gradient, z)(dout @ down, z, ctx.activation)
            statistic = total / x.shape[1]
        ddown = added(ctx.mains[1], dout.T, act) if needs[5] else None
        del act
        turned = turned_weight(gate_up, ctx.places)
        dx, n, dgamma = through_norm(dz, turned, x, r, gamma, statistic, dout)
        del turned
        dgate_up = added(ctx.mains[0], dz.T, n) if needs[4] else None
        return dx, None, None, dgamma.to(gamma.dtype), dgate_up, ddown, None, None, None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        x, h, r, gamma, weight, bias, sizes, table, rotated = inputs
        by = by or _PLAIN
        factors = (h, weight) if bias is None else _with_bias(h, r, weight, bias)
        if table is None:
            y: Any = by.norm(*factors, r)
        else:
            y = by.norm_rope(*factors, r, table)
        parts, ctx.places = kept_weight(weight)
        ctx.save_for_backward(x, r, gamma, bias, table, y, *parts)
        ctx.mains, ctx.rotated = mains(weight), rotated
        return (*y.split(sizes, dim=1), x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, r, gamma, bias, table, y, *weight = ctx.saved_tensors
        *dparts, through = grads
        about = table, ctx.rotated, bias, x.shape[1]
        dy, statistic = on(x).put_back(dparts, y, *about)
        last = statistic, through.contiguous()
        turned = turned_weight(weight, ctx.places)
        dx, n, dgamma = through_norm(dy, turned, x, r, gamma, *last)
        del turned
        dweight = added(ctx.mains[0], dy.T, n) if ctx.needs_input_grad[4] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[5] else None
        return dx, None, None, dgamma.to(gamma.dtype), dweight, dbias, None, None, None


class _Fp8LinearResidualNorm(_LinearResidualNorm):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        return _LinearResidualNorm.forward(ctx, *inputs, by=by or FP8)


class _Fp8Mlp(_Mlp):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        return _Mlp.forward(ctx, *inputs, by=by or FP8)


class _Fp8NormLinear(_NormLinear):
    @staticmethod
    def forward(ctx: Any, *inputs: Any, by: Products | None = None) -> tuple[Tensor, ...]:
        return _NormLinear.forward(ctx, *inputs, by=by or FP8)


def asked(*tensors: Tensor) -> bool:
    """Whether a gradient of one is asked for. `needs_input_grad` says so under `no_grad`, too."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _in_fp8(fp8: bool, x: Tensor, *weights: Tensor) -> bool:
    """`fp8`, if that is possible.

    Raises:
        ValueError: it is not.
    """
    if fp8 and x.dtype != torch.bfloat16:
        raise ValueError(f"FP8 products give bfloat16 and x is {x.dtype}; leave fp8 out, or cast")
    for weight in weights if fp8 else ():
        fitting(weight)
    return fp8


def _normed(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return (wide * gamma.float()).to(x.dtype), _rms(wide.square().mean(-1), eps)


def _rms(mean: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(mean + eps)


def _with_normed(ctx: Any, out: Tensor, h: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    ctx.mark_non_differentiable(h, r)
    ctx.set_materialize_grads(False)
    return out, h, r


def through_norm(
    dy: Tensor,
    turned: Tensor,
    x: Tensor,
    r: Tensor,
    gamma: Tensor,
    statistic: Tensor,
    add: Tensor,
    update: str = "out_of_place",
) -> Any:
    """The backward of y = n weightᵀ with n = x · r · gamma, by the weight `_turned`: the gradient
    of x plus `add`, n, and the gradient of gamma in float32."""
    return gemm_residual_partial_rmsnorm_bwd(dy, turned, x, r, gamma, statistic, add, update=update)


def _with_bias(h: Tensor, r: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of h weightᵀ + bias / r, so that the kernel's r leaves the bias as it is: the bias
    meets a column of 1 / r, in two parts, since 16 bits hold too little of it."""
    columns, rows = h.new_zeros(len(h), 8), weight.new_zeros(len(weight), 8)
    columns[:, 0] = 1 / r
    columns[:, 1] = 1 / r - columns[:, 0]
    rows[:, :2] = bias[:, None]
    return torch.cat((h, columns), dim=1), torch.cat((weight, rows), dim=1)


def _last_reader() -> bool:
    """Whether nothing that a backward pass saved is read after it, so that it may be written over.
    Who keeps such a tensor all the same, by a hook, is told by PyTorch that it changed."""
    keeps: Any = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore
    return not torch.compiler.is_compiling() and not keeps()
