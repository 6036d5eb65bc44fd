"""torchtitan's override: `--override.imports coda_agent.integrations.torchtitan.swiglu`.

torchtitan imports this module when it is named so, and not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.feed_forward import (  # pyright: ignore[reportMissingImports]
    FeedForward,
)
from torchtitan.overrides.fused_swiglu import (  # pyright: ignore[reportMissingImports]
    FusedSwiGLU,
    fused_swiglu,
)

from coda_agent.generated import gemm_swiglu


class SwiGLU(FusedSwiGLU):
    """torchtitan's feed-forward of one weight `w13` (F, 2, d), by one kernel.

    Parameters, initialisers, shardings and checkpoints are `FusedSwiGLU`'s: the rows of gate and
    up take turns there as the kernel wants them. Weights are bfloat16 or float16 when it runs.
    Where they are DTensors, which no kernel takes, torchtitan's own forward runs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FusedSwiGLU.Config):
        """That of `FusedSwiGLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute (…, d) of x (…, d)."""
        if isinstance(self.w13, DTensor):
            return super().forward(x)
        _, out = gemm_swiglu(x, self.w13.flatten(0, 1))
        return self.w2(out)


@override(target=FeedForward.Config, exact=True, description="SwiGLU in the product's epilogue.")
def swiglu(config: Any) -> Any:
    """Replace a `FeedForward.Config`; a subclass of it computes something else."""
    return derive(fused_swiglu(config), SwiGLU.Config)
