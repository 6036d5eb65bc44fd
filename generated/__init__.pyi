"""The types of accepted kernels, which `python scripts/stubs.py` writes."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
from typing import Literal

from torch import Tensor

from coda_agent.runtime.kernel import Kernel

class _gemm_bias_act(Kernel):
    """Linear layer with a scaled addend, a bias per column or row, and an activation."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        bias: Tensor,
        alpha: Tensor | float,
        beta: Tensor | float,
        *,
        activation: Literal["gelu_tanh", "relu", "silu"] = ...,
        bias_per: Literal["column", "row"] = ...,
        block_size: int | None = ...,
    ) -> Tensor: ...

gemm_bias_act: _gemm_bias_act

class _gemm_fp8_residual_partial_rmsnorm(Kernel):
    """FP8 output projection plus residual, the norm's weight, and the row statistics of the next
    RMSNorm."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        C: Tensor,
        gamma: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_fp8_residual_partial_rmsnorm: _gemm_fp8_residual_partial_rmsnorm

class _gemm_fp8_rmsnorm(Kernel):
    """FP8 linear layer behind a delayed RMSNorm, which scales each row of the product."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor | float,
        scale_b: Tensor | float,
        r: Tensor,
        *,
        block_size: int | None = ...,
    ) -> Tensor: ...

gemm_fp8_rmsnorm: _gemm_fp8_rmsnorm

class _gemm_fp8_rmsnorm_rope(Kernel):
    """FP8 query, key and value projection behind a delayed RMSNorm, with rotary position
    embedding."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor | float,
        scale_b: Tensor | float,
        r: Tensor,
        cs: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_fp8_rmsnorm_rope: _gemm_fp8_rmsnorm_rope

class _gemm_fp8_rmsnorm_swiglu(Kernel):
    """FP8 gate and up projections behind a delayed RMSNorm, with SwiGLU on adjacent column
    pairs."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor | float,
        scale_b: Tensor | float,
        r: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_fp8_rmsnorm_swiglu: _gemm_fp8_rmsnorm_swiglu

class _gemm_fp8_rmsnorm_swiglu_quantised(Kernel):
    """FP8 gate and up projections behind a delayed RMSNorm, with SwiGLU written in FP8, row by row,
    and each row's amax."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor | float,
        scale_b: Tensor | float,
        r: Tensor,
        scale_o: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_fp8_rmsnorm_swiglu_quantised: _gemm_fp8_rmsnorm_swiglu_quantised

class _gemm_fp8_swiglu(Kernel):
    """SwiGLU on adjacent column pairs of a row-wise scaled FP8 product."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_fp8_swiglu: _gemm_fp8_swiglu

class _gemm_fp8_swiglu_quantised(Kernel):
    """SwiGLU on a row-wise scaled FP8 product, written in FP8 with one scale, and each row's
    amax."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        scale_o: Tensor | float,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_fp8_swiglu_quantised: _gemm_fp8_swiglu_quantised

class _gemm_partial_cross_entropy(Kernel):
    """Language-model head with the two numbers of each row that a cross-entropy needs."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        y: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_partial_cross_entropy: _gemm_partial_cross_entropy

class _gemm_partial_swiglu_bwd(Kernel):
    """Backward of SwiGLU inside the down projection's gradient, with the row statistic of the norm
    before it."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        Z: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_partial_swiglu_bwd: _gemm_partial_swiglu_bwd

class _gemm_residual_partial_rmsnorm(Kernel):
    """Output projection plus residual, the norm's weight, and the row statistics of the next
    RMSNorm."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        gamma: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_residual_partial_rmsnorm: _gemm_residual_partial_rmsnorm

class _gemm_residual_partial_rmsnorm_bwd(Kernel):
    """Backward of a delayed RMSNorm inside the product that brings the gradient, added to the
    residual stream's."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        r: Tensor,
        gamma: Tensor,
        z: Tensor,
        X: Tensor,
        *,
        update: Literal["in_place", "out_of_place"] = ...,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_residual_partial_rmsnorm_bwd: _gemm_residual_partial_rmsnorm_bwd

class _gemm_rmsnorm(Kernel):
    """Linear layer whose RMSNorm is applied afterwards, as one scale per row."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        r: Tensor,
        *,
        block_size: int | None = ...,
    ) -> Tensor: ...

gemm_rmsnorm: _gemm_rmsnorm

class _gemm_rmsnorm_partial_cross_entropy(Kernel):
    """Language-model head behind a delayed RMSNorm, with what a cross-entropy needs of each row."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        r: Tensor,
        y: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

gemm_rmsnorm_partial_cross_entropy: _gemm_rmsnorm_partial_cross_entropy

class _gemm_rmsnorm_rope(Kernel):
    """Query, key and value projection behind a delayed RMSNorm, with rotary position embedding."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        r: Tensor,
        cs: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_rmsnorm_rope: _gemm_rmsnorm_rope

class _gemm_rmsnorm_swiglu(Kernel):
    """Gate and up projections behind a delayed RMSNorm, with SwiGLU on adjacent column pairs."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        r: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_rmsnorm_swiglu: _gemm_rmsnorm_swiglu

class _gemm_rope(Kernel):
    """Query, key and value projection with rotary position embedding on adjacent column pairs."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        cs: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_rope: _gemm_rope

class _gemm_swiglu(Kernel):
    """Gate and up projections in one GEMM, with SwiGLU on adjacent column pairs."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        *,
        block_size: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

gemm_swiglu: _gemm_swiglu

class _gemm_symlog(Kernel):
    """Linear layer with bias whose output is compressed by a logarithm that keeps the sign."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        bias: Tensor,
        *,
        block_size: int | None = ...,
    ) -> Tensor: ...

gemm_symlog: _gemm_symlog
