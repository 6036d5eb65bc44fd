"""Liger's registry: its `fused_linear_cross_entropy` by an accepted kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coda_agent.generated import gemm_partial_cross_entropy

OP, NAME = "fused_linear_cross_entropy", "nvidia-coda"
# Behind Liger's own (10 and 50): it takes fewer options, so it is asked for by name.
_RANK = 1000
# Logits that the loss holds at a time: 1 GiB in 16 bits.
_LOGITS = 1 << 29


def register() -> None:
    """Enter the kernel `gemm_partial_cross_entropy` in the registry, for Hopper GPUs, as `NAME`.

    `liger_kernel.functional.fused_linear_cross_entropy(..., impl="nvidia-coda")` runs it then, or
    the environment's `LIGER_KERNEL_IMPL_FUSED_LINEAR_CROSS_ENTROPY=nvidia-coda`. Input (BT, H) and
    weight (V, H) are bfloat16 or float16; the loss is float32. Gradients are summed in float32,
    whatever `accum_dtype` says. Other options are refused with a ValueError.

    Raises:
        ImportError: liger_kernel is missing, or has no registry (before 0.8).
    """
    from liger_kernel.backends import (  # pyright: ignore[reportMissingImports]
        Capability,
        register_impl,
    )

    hopper = Capability(min_cc=(9, 0), max_cc=(9, 0), modules=["quack"])
    entered = register_impl(
        OP,
        impl_name=NAME,
        capability=hopper,
        modes=("default",),
        default_mode="default",
        preference_rank=_RANK,
        notes="coda-agent's gemm_partial_cross_entropy: log-sum-exp in the product's epilogue.",
    )
    entered(fused_linear_cross_entropy)


def fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: object = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    mode: str | None = None,
) -> tuple[Tensor, None, None, None]:
    """Give the loss alone of what Liger's function returns."""
    options = {
        "bias": bias,
        "ce_weight": ce_weight,
        "lse_square_scale": lse_square_scale,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
        "softcap": softcap,
        "return_z_loss": return_z_loss,
        "use_token_scaling": use_token_scaling,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
        "mode": None if mode == "default" else mode,
    }
    _refuse(options)
    if not torch.is_grad_enabled():  # which a function of autograd is not told
        _input, weight = _input.detach(), weight.detach()
    rows = target != ignore_index
    loss = _loss(_input, weight, target.where(rows, 0), rows)
    return loss / rows.sum() if reduction == "mean" else loss, None, None, None


def _refuse(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if option == "reduction":
            known, expected = value in ("mean", "sum"), "mean or sum"
        else:
            known, expected = isinstance(value, (int, float, tuple)) and not value, "none"
        if not known and value is not None:
            got = "of a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{OP} by {NAME} has {option} {got}, expected {expected}")


class _Loss(torch.autograd.Function):
    """Σ cross-entropy(x weightᵀ, targets) over rows, in float32.

    Logits are held for some rows at a time, and gradients are taken while they are there. They are
    those of the sum, so that float16 holds them: a mean's are scaled in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, weight, targets, rows = inputs
        needs = ctx.needs_input_grad[:2]
        loss, dweight, dx = x.new_zeros((), dtype=torch.float32), None, []
        step = max(128, _LOGITS // len(weight) // 128 * 128)  # whole tiles
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            z, target, lse = gemm_partial_cross_entropy(x[some], weight, targets[some])
            loss = loss + (lse - target).where(rows[some], 0).sum()
            if any(needs):
                _gradient(x.is_cuda)(z, lse, targets[some], rows[some])
            if needs[0]:
                dx.append(z @ weight)
            if needs[1]:
                dweight = _sum_product(dweight, z.T, x[some])
        ctx.save_for_backward(torch.cat(dx) if dx else None, dweight)
        ctx.types = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(ctx.saved_tensors, ctx.types, strict=True)
        found = [None if t is None else (t * grads[0]).to(kind) for t, kind in pairs]
        return (*found, None, None)


@lru_cache(maxsize=2)
def _gradient(on_gpu: bool) -> Callable[..., None]:
    return torch.compile(_logit_gradient, dynamic=True) if on_gpu else _logit_gradient


def _logit_gradient(z: Tensor, lse: Tensor, targets: Tensor, rows: Tensor) -> None:
    """Overwrite rounded logits (M, V) with the gradient of the summed loss.

    The softmax is that of the rounded ones: with the log-sum-exp of those before rounding alone, a
    row that is nearly sure would have a gradient of rounding errors.
    """
    hit = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    powers = torch.exp(z.float() - lse[:, None])
    grad = powers / powers.sum(-1, keepdim=True) - hit.float()
    z.copy_(grad.where(rows[:, None], 0))


def _sum_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a b of 16-bit factors to `total`, in float32."""
    if not a.is_cuda:
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _loss(*inputs: Tensor) -> Tensor:
    # torch.compile leaves it as it is: on an H200 with torch 2.11 it gave zeros (2026-11-23).
    # `disable` imports torch._dynamo, which takes seconds: not before something is traced.
    run: Any = _Loss.apply
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(*inputs)
