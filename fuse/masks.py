"""Masks that are arguments: a graph for their values at the first call, another for all others.

A tokenizer's `attention_mask` without padding says nothing, and with it attention is causal or sees
all. So it is with a mask that another graph made, as where FSDP2's hooks part a model. At each call
such arguments are compared with what they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from coda_agent.fuse.attention import fold_masks

_LEAST = 1 << 20
"""Elements of a mask on a GPU, from which on it is worth to wait for the GPU at each call: with 64
times as many, attention of four layers took 25 ms less in both passes (H200)."""
_LARGEST = 1 << 28
"""Elements at most of an argument that is kept to be compared."""


def fold_given_masks(graph: fx.Graph, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Give attention by word the masks that arguments make: as `fold_masks`.

    Args:
        graph: Of torch calls, as Dynamo records it; it changes.
        inputs: Its arguments, at this call.

    Returns:
        By place, the values of arguments with which alone the graph is still right.
    """
    places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    if any(not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor) for x in inputs):
        return {}  # of sizes that change, or not at a call
    masks = {n: inputs[i] for n, i in places.items() if _pays(inputs[i]) and _is_mask(inputs[i])}
    used = set[fx.Node]().union(*fold_masks(graph, masks).values())
    return {places[node]: _kept(masks[node]) for node in used}


def _pays(x: torch.Tensor) -> bool:
    """Tell whether it pays to compare a mask of queries and keys, or of keys alone."""
    return not x.is_cuda or x.numel() * (x.shape[-1] if x.ndim == 2 else 1) >= _LEAST


def _is_mask(x: torch.Tensor) -> bool:
    if type(x) is not torch.Tensor or x.is_floating_point() or x.is_complex():
        return False
    if not x.ndim >= 2 or x.numel() > _LARGEST:
        return False
    return x.dtype is torch.bool or bool(((x == 0) | (x == 1)).all())


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Keep values, those that others keep only once."""
    for kept in _KEPT.values():
        if (x.shape, x.dtype, x.device) == (kept.shape, kept.dtype, kept.device):
            if torch.equal(x, kept):
                return kept
    first = x[:1].clone().expand_as(x)
    kept = first if torch.equal(x, first) else x.clone()
    _KEPT[id(kept)] = kept
    return kept


_KEPT = WeakValueDictionary[int, torch.Tensor]()


def by_masks(
    values: Mapping[int, torch.Tensor],
    special: Callable[..., object],
    general: Callable[..., object],
    compiled: Callable[[Sequence[object]], Callable[..., object]],
) -> Callable[..., object]:
    """Choose a graph at each call, by its masks.

    Args:
        values: By place, those of arguments at which `special` is right.
        special: The compiled graph for them.
        general: The graph for all masks, uncompiled.
        compiled: Compiles it, at its first call. While a CUDA graph is captured nothing can be
            compared or compiled: then the graph for all masks runs, as it is.
    """
    made: list[Callable[..., object]] = []

    def call(*args: Any) -> object:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            if not made:
                warnings.warn(
                    "coda-agent: while a CUDA graph is captured, a graph with masks among its "
                    "arguments runs uncompiled; capture by mode='reduce-overhead', or leave the "
                    "masks out",
                    stacklevel=2,
                )
            return (made[0] if made else general)(*args)
        if all(_same(args[i], value) for i, value in values.items()):
            return special(*args)
        if not made:
            made.append(compiled(args))
        return made[0](*args)

    return call


def _same(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Compare a mask; on a GPU once for all layers, until somebody writes to it."""
    if not x.is_cuda or x.is_inference():
        return torch.equal(x, value)
    if x not in _SEEN or _SEEN[x][0] != x._version:
        _SEEN[x] = x._version, []
    known = _SEEN[x][1]
    for other, same in known:
        if other is value:
            return same
    known.append((value, torch.equal(x, value)))
    return known[-1][1]


_SEEN = WeakIdKeyDictionary()
"""Of masks: their version, and what each was compared with."""
