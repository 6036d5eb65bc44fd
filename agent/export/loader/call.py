"""What a call copies, allocates, launches and folds, resolved once."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import torch

from coda_agent.agent.export.loader.fold import Fold
from coda_agent.primitives.memory import parts_meet, tma_ready
from coda_agent.runtime.call_cache import CallPlan, launching


class Chosen(NamedTuple):
    """What runs a call.

    Attributes:
        dtypes: Of the outputs.
        order: Places of A, B, D and C, and of the epilogue's arguments, among all that is launched.
        folds: Places of the outputs that stay no partials as they are, and what folds them; None
            turns them.
    """

    dtypes: Sequence[str]
    tile: Mapping[str, Any]
    order: Sequence[Sequence[int]]
    launch: Callable[..., object]
    folds: Sequence[tuple[int, Optional[Fold]]]


def planned(
    about: Mapping[str, Any], chosen: Chosen, given: Sequence[Any], shape: tuple[int, int, int]
) -> CallPlan:
    """Resolve a call by its checked inputs: A, B and the operands."""
    tile, outputs, device = chosen.tile, about["outputs"], given[0].device
    lead, folds = given[0].shape[:-1], chosen.folds
    made: list[Optional[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]] = []
    for x, dtype in zip(outputs, chosen.dtypes):
        sizes = buffer(x, shape, tile)
        strides = (sizes[1], 1) if len(sizes) == 2 else (1,)
        made.append(None if x["accumulates"] else (sizes, strides, getattr(torch, dtype)))
    makes: list[Optional[Callable[[torch.Tensor], torch.Tensor]]] = [
        partial(_ready, ndim=2, rows=True), partial(_ready, ndim=2, rows=False)
    ]  # fmt: skip
    first = 3 + len(outputs)  # of the operands among all that is launched
    launched: list[tuple[int, Callable[[Any], Any]]] = []
    if tile["swap_ab"]:
        launched.append((first - 1, attrgetter("mT")))
    for i, x in enumerate(about["operands"]):
        dims = x["dims"]
        makes.append(partial(_ready, ndim=len(dims), rows=dims[0] == "M") if dims else None)
        if not dims:
            in_memory = isinstance(given[i + 2], torch.Tensor)
            launched.append((first + i, methodcaller("data_ptr") if in_memory else float))
        if x["vector"]:
            launched.append((first + i, methodcaller("unsqueeze", 0)))
    if about["kept"]:
        makes[-1] = _copied
    ready = [(i, make) for i, make in enumerate(makes) if make and make(given[i]) is not given[i]]
    count = torch.cuda.get_device_properties(device).multi_processor_count
    clusters = count // (tile["cluster_m"] * tile["cluster_n"]) * tile["persistent"]
    scheduler = (clusters, None, tile["swizzle"], None, None, None)
    sizes = (shape[1], shape[0]) if tile["swap_ab"] else shape[:2]
    extent, cluster = ((tile[f"{x}_m"], tile[f"{x}_n"]) for x in ("tile", "cluster"))
    meet = partial(parts_meet, *sizes, extent, cluster) if tile["split_k"] > 1 else None

    def finish(results: list[torch.Tensor]) -> None:
        for i, fold in folds:
            results[i] = fold(results[i]) if fold else results[i].mT
        for i, x in enumerate(outputs):
            results[i] = led(x, results[i], lead)

    bound = launching(chosen.launch, chosen.order, launched, scheduler, meet)
    return CallPlan(bound, device, made, ready, finish, about["kept"])


def extents(about: Mapping[str, Any], m: int, n: int) -> tuple[int, ...]:
    """Give an output's shape, with one dimension of rows."""
    sizes = {"M": m, "N": n, "2*N": 2 * n, "N/2": n // 2}
    return tuple([sizes[d] for d in about["dims"]])


def buffer(
    about: Mapping[str, Any], shape: tuple[int, int, int], tile: Mapping[str, Any]
) -> tuple[int, ...]:
    """Give the shape of what a tile's kernel writes of an output."""
    m, n, _ = shape
    if not about["reduction"]:
        return extents(about, m, n)
    if about["reduction"]["over_rows"]:
        return -(-m // tile["tile_m"]), n
    return m, -(-n // tile["tile_n"])


def led(about: Mapping[str, Any], t: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """Give an output the leading dimensions of A, where it has them."""
    if len(lead) == 1 or about["accumulates"] or about["dims"][0] != "M":
        return t
    return t.reshape(*lead, *t.shape[1:])


def _ready(t: torch.Tensor, ndim: int, rows: bool) -> torch.Tensor:
    """Flatten rows to one dimension; copy what TMA cannot load."""
    return tma_ready(t.flatten(0, t.ndim - ndim) if rows and t.ndim > ndim else t)


def _copied(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).flatten(0, -2)
