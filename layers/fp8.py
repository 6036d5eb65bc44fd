"""The forward pass of a pre-norm decoder in FP8 (e4m3), for inference, by accepted kernels.

- A weight is quantised once, with a scale for each of its rows. That of query, key and value has
  one scale in all: the accepted kernel with the rotation takes no more.
- Tokens in front of a product are quantised one by one, each by its own maximum, in one pass
  (`fp8_products.rows`). A norm's r is multiplied into a token's scale there, so it costs nothing
  more.
- Between the products of an MLP no pass is left: the first one's kernel writes e4m3. A tile of it
  does not know a token's maximum in time, so this one scale, `inner`, is static: a number that is
  known before, from calibration. What is beyond 448 · inner saturates.
- The stream x and all weights of norms are bfloat16. The caller flattens leading dims: rows are
  tokens.
- There are no gradients: where one is asked for, a call is refused. Training in FP8 is
  `functional.py`'s, by `fp8=True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coda_agent.generated import (
    gemm_fp8_residual_partial_rmsnorm,
    gemm_fp8_rmsnorm,
    gemm_fp8_rmsnorm_rope,
    gemm_fp8_swiglu_quantised,
)
from coda_agent.layers import modules
from coda_agent.layers.fit import eps as eps_of
from coda_agent.layers.fp8_products import E4M3, LARGEST, Quantised, fitting, rows, whole
from coda_agent.layers.passes import fused

__all__ = [
    "E4M3",
    "LARGEST",
    "DecoderLayer",
    "Quantised",
    "WholeWeight",
    "linear_residual_norm",
    "mlp",
    "norm_linear",
    "normed",
    "quantised",
    "quantised_rows",
    "quantised_whole",
]


_rope = gemm_fp8_rmsnorm_rope.without("D")


class WholeWeight(NamedTuple):
    """A quantised weight with one scale.

    Attributes:
        values: (N, K) e4m3.
        scale: A number, which costs a kernel no launch.
    """

    values: Tensor
    scale: float


def quantised(weight: Tensor) -> Quantised:
    """A weight (N, K), as `nn.Linear` has it, with a scale for each row.

    Raises:
        ValueError: `weight` is no matrix, or N or K no multiple of 16.
    """
    return rows(fitting(weight))


def quantised_whole(weight: Tensor) -> WholeWeight:
    """A weight (N, K) with one scale; it raises what `quantised` does."""
    values, scale = whole(fitting(weight))
    return WholeWeight(values, scale.item())


def quantised_rows(x: Tensor) -> Quantised:
    """Tokens (M, K), each by its own maximum.

    Raises:
        ValueError: a gradient is asked for.
    """
    _forward_only(x)
    return rows(x)


def normed(x: Tensor, gamma: Tensor, eps: float) -> Quantised:
    """The RMS norm of a stream (M, d) that no kernel wrote, such as an embedding's, quantised.

    Raises:
        ValueError: a gradient is asked for.
    """
    _forward_only(x, gamma)
    return Quantised(*fused(_normed, x)(x, gamma, eps))


def linear_residual_norm(
    a: Tensor, weight: Quantised, x: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Quantised]:
    """x + a weightᵀ, and its RMS norm, quantised.

    Args:
        a: (M, K) bfloat16, such as attention's output; it is quantised here.
        weight: (d, K).
        x: (M, d) bfloat16, the stream.
        gamma: (d,) bfloat16, the weight of the norm behind.
        eps: Of that norm.

    Raises:
        ValueError: a gradient is asked for.
    """
    _forward_only(x, gamma)
    return _residual_norm(quantised_rows(a), weight, x, gamma, eps)


def mlp(
    x: Tensor,
    given: Quantised,
    gate_up: Quantised,
    down: Quantised,
    inner: float,
    next_gamma: Tensor,
    next_eps: float,
) -> tuple[Tensor, Quantised, Tensor]:
    """x + v downᵀ with v = silu(n gateᵀ) · (n upᵀ); its RMS norm, quantised; and the amax of v.

    Args:
        x: (M, d) bfloat16, the stream.
        given: n (M, d), its norm.
        gate_up: (2F, d), rows of gate and up in turn (`packing.interleave`), F a multiple of 16.
        down: (d, F).
        inner: The static scale of v in e4m3.
        next_gamma: (d,) bfloat16, the weight of the norm behind.
        next_eps: Of that norm.

    Returns:
        The third is max |v| of each row, (M,) float32, whatever `inner` is. So a run with an
        `inner` of 1 calibrates: the largest amax / 448 holds all values that it saw.

    Raises:
        ValueError: a gradient is asked for, or `inner` is not positive.
    """
    _forward_only(x, next_gamma)
    if not inner > 0:
        raise ValueError(f"inner is {inner}, expected a positive scale: the largest amax / 448")
    v, amax = gemm_fp8_swiglu_quantised(
        given.values, gate_up.values, given.scale, gate_up.scale, 1 / inner
    )
    scale = torch.full_like(given.scale, inner)
    return *_residual_norm(Quantised(v, scale), down, x, next_gamma, next_eps), amax


def norm_linear(
    given: Quantised, weight: WholeWeight, sizes: Sequence[int], table: Tensor | None = None
) -> tuple[Tensor, ...]:
    """n weightᵀ in bfloat16, in parts of `sizes` columns.

    Args:
        given: n (M, d).
        weight: (N, d).
        sizes: Columns of each part, N in all.
        table: (M, N) bfloat16, by which adjacent pairs of columns are rotated
            (`packing.rotary_table`); None rotates nothing.
    """
    factors = given.values, weight.values, 1.0, weight.scale, given.scale
    if table is None:
        y = gemm_fp8_rmsnorm(*factors)
    else:
        y = _rope(*factors, table)
    return y.split(sizes, dim=1)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class DecoderLayer:
    """`modules.DecoderLayer` in FP8, forward only; make it by `of`."""

    qkv: WholeWeight
    o: Quantised
    gate_up: Quantised
    down: Quantised
    input_norm: nn.RMSNorm
    mlp_norm: nn.RMSNorm
    sizes: tuple[int, int, int]
    inner: float

    @classmethod
    def of(cls, layer: modules.DecoderLayer, inner: float) -> DecoderLayer:
        """A layer with its weights quantised. It shares the norms and none of the other weights.

        Args:
            layer: bfloat16, with SwiGLU and without norms of heads.
            inner: The static scale between the products of the MLP (`mlp`).

        Raises:
            ValueError: the layer has what no accepted FP8 kernel computes, or a width that is no
                multiple of 16.
        """
        if layer.activation != "silu" or layer.q_norm is not None:
            what = "norms of heads" if layer.q_norm is not None else f"gate {layer.activation!r}"
            raise ValueError(
                f"a layer with {what} has no FP8 kernels, expected a 'silu' gate and no such norms"
            )
        return cls(
            qkv=quantised_whole(layer.qkv.weight),
            o=quantised(layer.o.weight),
            gate_up=quantised(layer.gate_up.weight),
            down=quantised(layer.down.weight),
            input_norm=layer.input_norm,
            mlp_norm=layer.mlp_norm,
            sizes=layer.sizes,
            inner=inner,
        )

    def __call__(
        self,
        x: Tensor,
        given: Quantised | None,
        table: Tensor | None,
        next_norm: nn.RMSNorm,
        attend: modules.Attend,
    ) -> tuple[Tensor, Quantised, Tensor]:
        """The stream behind this layer, its norm by `next_norm`, and the amax of `mlp`.

        Args:
            x: (B, S, d) bfloat16, the stream.
            given: Its norm by this layer's `input_norm`, from the layer before; None where there
                is none.
            table: (B · S, columns of `qkv`), as `modules.DecoderLayer.table` gives it.
            next_norm: The norm behind this layer.
            attend: Attention, in bfloat16.

        Raises:
            ValueError: a gradient is asked for.
        """
        rows, norm = x.flatten(0, 1), self.mlp_norm
        if given is None:
            given = normed(rows, self.input_norm.weight, eps_of(self.input_norm))
        parts = norm_linear(given, self.qkv, self.sizes, table)
        q, k, v = (part.unflatten(0, x.shape[:2]) for part in parts)
        a = attend(q, k, v).flatten(0, 1)
        rows, given = linear_residual_norm(a, self.o, rows, norm.weight, eps_of(norm))
        last = self.inner, next_norm.weight, eps_of(next_norm)
        rows, given, amax = mlp(rows, given, self.gate_up, self.down, *last)
        return rows.view_as(x), given, amax


def _residual_norm(
    a: Quantised, weight: Quantised, x: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Quantised]:
    factors = a.values, weight.values, a.scale, weight.scale
    out, h, s = gemm_fp8_residual_partial_rmsnorm(*factors, x, gamma)
    return out, rows(h, s, eps)


def _normed(x: Tensor, gamma: Tensor, eps: float) -> Quantised:
    wide = x.float()
    return rows(wide * gamma.float(), wide.square().mean(-1), eps)


def _forward_only(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "FP8 layers have no gradients and an input requires one; "
            "call them under torch.no_grad() or torch.inference_mode()"
        )
