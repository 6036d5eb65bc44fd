"""Calls resolved once: what later calls with such arguments copy, allocate, launch and fold."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import torch

from coda_agent.agent.export.loader.fold import Fold
from coda_agent.primitives.memory import allocator, parts_meet


class Chosen(NamedTuple):
    """What runs a call.

    Attributes:
        dtypes: Of the outputs.
        tile: The tile.
        order: Places of A, B, D and C, and of the epilogue's arguments, among all that is launched.
        launch: The kernel.
        folds: Places of the outputs that stay no partials as they are, and what folds them; None
            turns them.
    """

    dtypes: Sequence[str]
    tile: Mapping[str, Any]
    order: Sequence[Sequence[int]]
    launch: Callable[..., Any]
    folds: Sequence[tuple[int, Optional[Fold]]]


class Call:
    """A call of a variant, whose arguments were checked."""

    def __init__(
        self,
        about: Mapping[str, Any],
        chosen: Chosen,
        values: Sequence[Any],
        shape: tuple[int, int, int],
    ) -> None:
        tile, places = chosen.tile, about["places"]
        self._launch, self._folds = chosen.launch, chosen.folds
        self._gemm, self._epilogue = (_getter(x) for x in chosen.order)
        self._returned, self._kept = about["returned"], about["kept"]
        self._inputs, self._first, self._last = itemgetter(*places), places[0], places[-1]
        self._device = device = values[places[0]].device
        several, index = torch.cuda.device_count() > 1, device.index
        self._elsewhere = (lambda: torch.cuda.current_device() != index) if several else None
        self._empty = allocator(device)
        outputs = about["outputs"]
        self._made: list[Any] = []
        for x, dtype in zip(outputs, chosen.dtypes):
            sizes = buffer(x, shape, tile)
            strides = (sizes[1], 1) if len(sizes) == 2 else (1,)
            self._made.append(None if x["accumulates"] else (sizes, strides, getattr(torch, dtype)))
        self._added = next((i for i, x in enumerate(outputs) if x["accumulates"]), None)
        batched = values[places[0]].ndim > 2
        self._led = [x for x in enumerate(outputs) if batched and leads(x[1])]
        makes = [(0, partial(_ready, ndim=2, rows=True)), (1, partial(_ready, ndim=2, rows=False))]
        first = 3 + len(outputs)  # of the operands among all that is launched
        self._makes: list[tuple[int, Callable[[Any], Any]]] = []
        if tile["swap_ab"]:
            self._makes.append((first - 1, attrgetter("mT")))
        for i, x in enumerate(about["operands"]):
            if dims := x["dims"]:
                makes.append((i + 2, partial(_ready, ndim=len(dims), rows=dims[0] == "M")))
            elif isinstance(values[places[i + 2]], torch.Tensor):
                self._makes.append((first + i, methodcaller("data_ptr")))
            else:
                self._makes.append((first + i, float))
            if x["vector"]:
                self._makes.append((first + i, methodcaller("unsqueeze", 0)))
        self._ready = [(i, make) for i, make in makes if make(x := values[places[i]]) is not x]
        count = torch.cuda.get_device_properties(device).multi_processor_count
        clusters = count // (tile["cluster_m"] * tile["cluster_n"]) * tile["persistent"]
        self._scheduler = (clusters, None, tile["swizzle"], None, None, None)
        sizes = (shape[1], shape[0]) if tile["swap_ab"] else shape[:2]
        extent, cluster = ((tile[f"{x}_m"], tile[f"{x}_n"]) for x in ("tile", "cluster"))
        meeting = partial(parts_meet, *sizes, extent, cluster, device)
        self._meeting = meeting if tile["split_k"] > 1 else None

    def __call__(self, values: Sequence[Any]) -> Any:
        """The outputs that overwrite no input: a tuple, a single one alone, or None."""
        if self._elsewhere is not None and self._elsewhere():
            with torch.cuda.device(self._device):
                return self(values)
        inputs = self._inputs(values)
        if self._ready or self._kept:
            inputs = list(inputs)
            for i, make in self._ready:
                inputs[i] = make(inputs[i])
            if self._kept:
                inputs[-1] = inputs[-1].clone(memory_format=torch.contiguous_format)
        empty = self._empty
        outputs = [inputs[-1] if made is None else empty(*made) for made in self._made]
        launched = [None, *outputs, *inputs]
        for i, make in self._makes:
            launched[i] = make(launched[i])
        if self._meeting:
            launched += self._meeting()
        gemm, epilogue = self._gemm(launched), self._epilogue(launched)
        self._launch(*gemm, epilogue, self._scheduler, None, None, None)
        for i, fold in self._folds:
            outputs[i] = fold(outputs[i]) if fold else outputs[i].mT
        if self._added is not None:
            outputs[self._added] = self._into(outputs[self._added], values[self._last])
        for i, about in self._led:
            outputs[i] = led(about, outputs[i], values[self._first])
        return picked(self._returned, outputs)

    def _into(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """What was added to: the caller's tensor where it changes, and else the copy."""
        if self._kept:
            return result.reshape(given.shape)
        if result.data_ptr() != given.data_ptr():
            given.copy_(result.reshape(given.shape))
        else:  # or what autograd saved would not know
            torch.autograd.graph.increment_version(given)
        return given


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """As `itemgetter`, of one place and of none too."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


def extents(about: Mapping[str, Any], m: Any, n: int) -> tuple[Any, ...]:
    """The shape of an output, with one dimension of rows."""
    sizes = {"M": m, "N": n, "2*N": 2 * n, "N/2": n // 2}
    return tuple([sizes[d] for d in about["dims"]])


def buffer(
    about: Mapping[str, Any], shape: tuple[Any, int, int], tile: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The shape of what the kernel of a tile writes of an output."""
    m, n, _ = shape
    if not about["reduction"]:
        return extents(about, m, n)
    if about["reduction"]["over_rows"]:
        return -(-m // tile["tile_m"]), n
    return m, -(-n // tile["tile_n"])


def leads(about: Mapping[str, Any]) -> bool:
    """Whether an output has all dimensions of A's rows."""
    return not about["accumulates"] and about["dims"][0] == "M"


def led(about: Mapping[str, Any], t: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """An output with the leading dimensions of A."""
    if a.ndim == 2 or not leads(about):
        return t
    return t.reshape(*a.shape[:-1], *t.shape[1:])


def picked(places: Sequence[int], results: Sequence[torch.Tensor]) -> Any:
    """Of all outputs what a call returns."""
    if len(places) == 1:
        return results[places[0]]
    return tuple([results[i] for i in places]) or None


def _ready(t: torch.Tensor, ndim: int, rows: bool) -> torch.Tensor:
    """`t` with one dimension of rows, copied where TMA cannot load its strides or its address."""
    if rows and t.ndim > ndim:
        t = t.flatten(0, t.ndim - ndim)
    step = 16 // t.element_size()
    strides = t.stride()
    suits = strides[-1] == 1 and t.data_ptr() % max(16, 4 * t.element_size()) == 0
    if suits and all([s > 0 and s % step == 0 for s in strides[:-1]]):
        return t
    # Not `contiguous()`: that keeps any stride of a dimension of extent 1.
    return t.clone(memory_format=torch.contiguous_format)
