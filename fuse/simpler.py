"""Calls of torch that a plan takes apart, in terms of simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def simpler(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], torch.Tensor] | None:
    """The same call in parts; None of one that is not taken apart."""
    parts = _PARTS.get(getattr(func, "__name__", ""))
    if parts is None or getattr(func, "__module__", "") not in _HOMES:
        return None
    try:
        known = parts(*args, **kwargs)
    except TypeError:  # an argument that the parts know nothing of
        return None
    return known


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Callable[[], torch.Tensor] | None:
    import torch

    if len(normalized_shape) != 1 or eps is None:  # the default depends on the type
        return None

    def parts() -> torch.Tensor:
        x = _wide(input)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x if weight is None else x * weight).to(input.dtype)

    return parts


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Callable[[], torch.Tensor] | None:
    import torch

    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or input.ndim != 2 or target.ndim != 1 or target.dtype != torch.int64:
        return None

    def parts() -> torch.Tensor:
        wide = _wide(input)
        counted = target != ignore_index
        column = torch.where(counted, target, 0)
        picked = wide.gather(1, column.unsqueeze(1)).squeeze(1)
        lost = torch.where(counted, torch.logsumexp(wide, 1) - picked, 0.0)
        if reduction == "mean":
            lost = lost.sum() / counted.sum()
        elif reduction == "sum":
            lost = lost.sum()
        return lost.to(input.dtype)

    return parts


_HOMES = "torch.nn.functional", "torch", None
_PARTS: dict[str, Callable[..., Callable[[], torch.Tensor] | None]] = {
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
}
