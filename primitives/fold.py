"""One launch that folds all partials of a call on a GPU.

PyTorch takes two launches for a scaled sum and more for a log-sum-exp: the cross-entropy loss from
the partials of 8192 rows of 32768 logits took 59 us with its own, and 30 us with this (H200).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_wait

from coda_agent.primitives.memory import allocator

# Elements a CTA takes in one step, in the shape that reads memory in order.
_STEP = 2048


@triton.jit
def _fold(raws, outs, numbers, COMBINE: tl.constexpr, KEPT: tl.constexpr, FOLDED: tl.constexpr):
    # Launched while the kernel that writes the partials still runs, and waits for its end here.
    gdc_wait()
    for which in tl.static_range(len(raws)):  # pyright: ignore[reportGeneralTypeIssues]
        if tl.program_id(1) == which:
            # Named, since Triton 3.6 takes no item of a constant tuple as an argument.
            combine: tl.constexpr = COMBINE[which]
            down: tl.constexpr = KEPT[which]
            across: tl.constexpr = FOLDED[which]
            kept, folded, kept_stride, folded_stride, weight, eps = numbers[which]
            _fold_one(
                raws[which], outs[which], kept, folded, kept_stride, folded_stride, weight, eps,
                combine, down, across,
            )  # fmt: skip


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fold_one(
    raw,
    out,
    kept,
    folded,
    kept_stride,
    folded_stride,
    weight,
    eps,
    COMBINE: tl.constexpr,
    KEPT: tl.constexpr,
    FOLDED: tl.constexpr,
):
    i = tl.program_id(0) * KEPT + tl.arange(0, KEPT)
    summed: tl.constexpr = COMBINE == "add" or COMBINE == "rstd"
    top = tl.full((KEPT,), float("-inf"), tl.float32)
    total = tl.zeros((KEPT,), tl.float32)
    for start in range(0, folded, FOLDED):
        j = start + tl.arange(0, FOLDED)
        inside = (i < kept)[:, None] & (j < folded)[None, :]
        at = i.to(tl.int64)[:, None] * kept_stride + j[None, :] * folded_stride
        nothing = float("inf") if COMBINE == "min" else float("-inf")
        x = tl.load(raw + at, mask=inside, other=0.0 if summed else nothing)
        if COMBINE == "min":
            x = -x
        if summed:
            total += tl.sum(x, 1)
        else:
            before, top = top, _larger(top, tl.reduce(x, 1, _larger))
            if COMBINE == "logsumexp":
                # Where all is -inf so far, so is the result: 0 stands in for the shift.
                shift = tl.where(top == float("-inf"), 0.0, top)
                total = total * tl.exp(before - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
    if COMBINE == "add":
        result = total * weight
    elif COMBINE == "rstd":
        result = tl.rsqrt(total * weight + eps)
    elif COMBINE == "max":
        result = top
    elif COMBINE == "min":
        result = -top
    else:
        # Where all is -inf the sum is 0, and its logarithm -inf; where all is NaN the sum is.
        result = top + tl.log(total)
    tl.store(out + i, result, mask=i < kept)


Way = tuple[str, float, float]
"""How to fold: "add", "max", "min", "logsumexp", or "rstd" for 1 / √(sum · weight + eps); the
factor of a sum; and what is added under the root."""

Grid = tuple[int, int, int]
Given = tuple[tuple[tuple[float, ...], ...], tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""What `_fold` takes after the tensors."""

Folds = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

# By what folds and their kernel depend on: sizes, strides, alignments, device, and numbers.
_BOUND: dict[tuple[object, ...], Folds] = {}
_KEPT = 1024


class _Absent:
    """A driver, as compiling needs it, of a GPU elsewhere."""

    def __init__(self, capability: int, device: int) -> None:
        self._target, self._device = GPUTarget("cuda", capability, 32), device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, _: int) -> int:
        return 0


@contextmanager
def _absent(capability: int = 90, device: int = -1) -> Iterator[None]:
    drivers: Any = triton.runtime.driver
    before, drivers._active = drivers._active, _Absent(capability, device)
    try:
        yield
    finally:
        drivers._active = before


def fold(raw: torch.Tensor, combine: str, weight: float, eps: float = 0.0) -> torch.Tensor:
    """Fold float32 `raw` (…, folded), any strides, in such a `Way`.

    Args:
        raw: The partials, on a GPU; or on the meta device, for which the kernel of a Hopper GPU is
            only compiled.
    """
    flat = [raw if raw.ndim == 2 else raw.flatten(0, -2)]
    return folding(flat, [(combine, weight, eps)])(flat)[0].view(raw.shape[:-1])


def compiled(raw: torch.Tensor, combine: str, capability: int) -> CompiledKernel:
    """Compile a fold of `raw` (kept, folded), on the meta device.

    It is for GPUs of a compute capability such as 90. It names no lines of source, so equal code
    gives equal bytes.
    """
    grid, rest = prepared([raw], [(combine, 1.0, 0.0)])
    out = raw.new_empty(raw.shape[:1])
    # Triton keeps what it compiled by the number of the device.
    with _absent(capability, -capability), knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        return _fold.warmup((raw,), (out,), *rest, grid=grid, launch_pdl=True)


def prepared(raws: Sequence[torch.Tensor], ways: Sequence[Way]) -> tuple[Grid, Given]:
    """Find the grid of `_fold`, and its arguments after the tensors."""
    layouts = [(*t.shape, *t.stride()) for t in raws]
    across = []
    for _, folded, _, stride in layouts:
        width = min(max(triton.next_power_of_2(folded), 16), 256 if stride == 1 else 64)
        # Where a warp has a row and cannot load it in vectors, ptxas sums each row before it loads
        # the next: 24 to 30 partials took 4 us longer than 32 on an H200 (2026-11-23).
        across.append(64 if width == 32 and folded % 16 and stride == 1 else width)
    down = [_STEP // x for x in across]
    most = max(triton.cdiv(kept, y) for (kept, *_), y in zip(layouts, down, strict=True))
    numbers = tuple((*x, *rest) for x, (_, *rest) in zip(layouts, ways, strict=True))
    combine = tuple(combine for combine, *_ in ways)
    return (most, len(raws), 1), (numbers, combine, tuple(down), tuple(across))


def folding(raws: Sequence[torch.Tensor], ways: Sequence[Way]) -> Folds:
    """Find what folds float32 tensors like `raws` in one launch.

    They are (kept, folded), each with its way. A layout's first `raws` are folded here, too.
    """
    device = raws[0].device
    layouts = [(t.shape, t.stride(), t.data_ptr() & 15) for t in raws]
    key = (device, *layouts, *ways)
    if known := _BOUND.get(key):
        return known
    grid, rest = prepared(raws, ways)
    # torch 2.11 takes a tuple and no `torch.Size`.
    made = [((t.shape[0],), (1,), torch.float32) for t in raws]
    empty = allocator(device)
    outs = [empty(*x) for x in made]
    if raws[0].is_meta:
        with _absent():
            _fold.warmup(tuple(raws), tuple(outs), *rest, grid=grid, launch_pdl=True)
        return lambda _: outs
    launch: Any = _fold[grid]
    kernel = launch(tuple(raws), tuple(outs), *rest, launch_pdl=True)
    stream_of, index = torch._C._cuda_getCurrentRawStream, device.index
    about = kernel.function, kernel.packed_metadata, None, None, None

    # Triton's own launch finds the kernel anew, and asks for hooks: 12 us of an H200's host. This
    # is what it then calls, in 4.
    def bound(raws: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs = [empty(*x) for x in made]
        given = tuple([t.data_ptr() for t in raws]), tuple([t.data_ptr() for t in outs])
        kernel.run(*grid, stream_of(index), *about, *given, *rest)
        return outs

    if len(_BOUND) >= _KEPT:
        _BOUND.clear()
    _BOUND[key] = bound
    return bound
