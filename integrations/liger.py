"""Liger's registry: its `fused_linear_cross_entropy` by an accepted kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OP, NAME = "fused_linear_cross_entropy", "nvidia-coda"
# Behind Liger's own (10 and 50): it takes fewer options, so it is asked for by name.
_RANK = 1000


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

    from coda_agent.agent.export.loader.layers import cross_entropy, reduced, refuse
    from coda_agent.generated import gemm_partial_cross_entropy

    run = cross_entropy(gemm_partial_cross_entropy, _logit_gradient)

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
        accum_dtype: Any = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        mode: str | None = None,
    ) -> tuple[Tensor, None, None, None]:
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
        refuse(f"{OP} by {NAME}", options)
        return reduced(run, _input, weight, target, ignore_index, reduction), None, None, None

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


def _logit_gradient(z: Tensor, _: Tensor, lse: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    if z.is_cuda:
        from coda_agent.layers import kernels as home
    else:
        from coda_agent.layers import passes as home
    home.logit_gradient(z, lse, targets, rows.float())
    return z
