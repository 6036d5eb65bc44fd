"""Weights as the kernels take them, out of Hugging Face's and back: rows in another order, so
exact.

Products of one input are one product: their weights lie one below the other. What an epilogue
combines must be neighbours: rows of gate and up take turns, and so do the halves of a head that is
rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coda_agent.layers import passes
from coda_agent.layers.passes import Places

_LARGE_BYTES = 20_000_000


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """Rows of two weights (F, …) in turn: (2F, …)."""
    if first.shape == second.shape and _together(first, second):
        half = len(first)
        return _packed(((0, 0, half), (0, half, half)), first, second)
    return torch.stack((first, second), dim=1).flatten(0, 1)


def separate(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `interleave`: contiguous copies."""
    return packed[0::2].contiguous(), packed[1::2].contiguous()


def pair_halves(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head, (heads · D, …), from [first half, second half] to pairs in turn."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def split_pairs(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `pair_halves`."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[int] | None) -> Tensor:
    """Weights (or biases) of query, key and value as one.

    Args:
        q, k, v: (Hq · D, …), (Hk · D, …), (Hk · D, …).
        heads: Hq and Hk, whose halves become pairs; None leaves the order as it is.
    """
    if heads is not None and _together(q, k, v):
        halves = [len(t) // count // 2 for t, count in zip((q, k), heads, strict=True)]
        places = (0, 0, halves[0]), (len(q), 0, halves[1]), (len(q) + len(k), 0, 0)
        return _packed(places, q, k, v)
    if heads is not None:
        q, k = pair_halves(q, heads[0]), pair_halves(k, heads[1])
    return torch.cat((q, k, v))


def unpack_qkv(
    packed: Tensor, sizes: Sequence[int], heads: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`; `sizes` are the rows of q, k and v."""
    q, k, v = packed.split(list(sizes))
    if heads is not None:
        q, k = split_pairs(q, heads[0]), split_pairs(k, heads[1])
    return q.clone(), k.clone(), v.clone()


def rotary_table(cos: Tensor, sin: Tensor, rotated: int, columns: int) -> Tensor:
    """The table of `norm_linear` out of Hugging Face's cosines and sines.

    Args:
        cos, sin: (…, S, D), the second half of the columns like the first.
        rotated: Heads that are rotated, those of queries and keys.
        columns: Columns of the product; those behind the rotated heads stay as they are.

    Returns:
        (… · S, columns), in the type of `cos`.
    """
    half = cos.shape[-1] // 2
    head = torch.stack((cos[..., :half], -sin[..., :half]), dim=-1).flatten(-2).flatten(0, -2)
    rest = head.new_zeros(len(head), columns - rotated * head.shape[1])
    rest[:, 0::2] = 1
    return torch.cat((head.repeat(1, rotated), rest), dim=1)


def made_of(weight: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """What a weight was packed of and where those rows lie in it, None of what is no packed copy.
    Who keeps that does not keep the copy."""
    return getattr(weight, "_coda_packed", ((weight,), None))


def turned_weight(parts: Sequence[Tensor], places: Any = None) -> Tensor:
    """weightᵀ as B of a product, of what `kept_weight` keeps; where that pays its columns in memory
    order.

    On an H200 (16,384 rows, 2026-11-23) products by weights of 23 to 180 MB took 1.05 to 1.29 times
    as long as by turned ones, and turning takes about 0.03 times as long as these. A weight of 13
    MB gained nothing.
    """
    if places is None and not _large(parts[0]):
        return parts[0].T
    return on(parts[0]).turned(parts, places or ((0, 0, 0),))


def kept_weight(weight: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """What to keep of a weight for `turned_weight`, and how it was packed. A large one is turned
    out of what it was packed of: until the backward pass a model's packed copies would take half
    as much as its weights.
    """
    parts, places = made_of(weight)
    return (parts, places) if _large(weight) else ((weight,), None)


def _large(weight: Tensor) -> bool:
    return weight.is_cuda and weight.numel() * weight.element_size() >= _LARGE_BYTES


def _packed(places: Places, *parts: Tensor) -> Tensor:
    packed: Any = _Packing.apply(places, *parts)
    packed._coda_packed = parts, places
    return packed


class _Packing(torch.autograd.Function):
    """Weights packed, and their gradients out of the packed one's, by one launch each. PyTorch's
    copies of rows in another order moved 1.3 TB/s on an H200 (2026-11-24), a third of what a copy
    in order moves."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        places, *parts = inputs
        ctx.places, ctx.rows = places, [*map(len, parts)]
        return on(parts[0]).packed(parts, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *on(grads[0]).unpacked(grads[0], ctx.rows, ctx.places)


def _together(*weights: Tensor) -> bool:
    """Whether one pass packs these: matrices of one width, type and device that no other code than
    PyTorch's own, such as a DTensor's, and no torch.compile looks at."""
    first = weights[0]
    return not torch.compiler.is_compiling() and all(
        type(t) in (Tensor, nn.Parameter)
        and t.ndim == 2
        and t.stride(1) == 1
        and (t.device, t.dtype, t.shape[1]) == (first.device, first.dtype, first.shape[1])
        for t in weights
    )


def on(tensor: Tensor) -> Any:
    """`passes` as launches of their own where the tensor is on a GPU, else in PyTorch; what
    torch.compile traces is in PyTorch, too."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        from coda_agent.layers import kernels  # Triton, which not every torch brings

        return kernels
    return passes
