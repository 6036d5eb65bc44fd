"""A call's device memory; exports take this module: it needs torch alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Flags by device, stream and how many. The last CTA clears them, so they are zero between kernels,
# and kernels of one stream may share them.
_FLAGS: dict[tuple[int, int, int], torch.Tensor] = {}


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Find what makes uninitialised tensors on `device`, the current one."""
    import torch
    from torch._C._dynamo import guards

    # What code of torch.compile calls: 1 us of an H200's host, where torch.empty takes 2.
    if device.type == "cuda" and (fast := getattr(guards, "_empty_strided_cuda", None)):
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def parts_meet(
    rows: int,
    columns: int,
    tile: tuple[int, int],
    cluster: tuple[int, int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make flags and float32 sums, where an output tile's CTAs meet.

    There is one of each for each tile of the kernel's output, in whole clusters and in quack's
    layout; the sums need no first value.
    """
    import torch

    down = -(-rows // (tile[0] * cluster[0])) * cluster[0]
    across = -(-columns // (tile[1] * cluster[1])) * cluster[1]
    tiles, area = down * across, tile[0] * tile[1]
    flags = _zeros(max(1024, 1 << (tiles - 1).bit_length()), device)
    sums = torch.empty(tiles * area, dtype=torch.float32, device=device)
    return (
        flags.as_strided((down, across, 1), (across, 1, tiles)),
        sums.as_strided((area, down, across, 1), (1, across * area, area, tiles * area)),
    )


def tile_counter(device: torch.device) -> torch.Tensor:
    """Find what counts the tiles that a kernel's CTAs took; the last one turns it back to 0."""
    return _zeros(1, device)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """Find the current stream's integers that are 0 between kernels.

    A graph may run beside the stream that captures it, so it has its own, and clears them each
    time. Others stay, so another thread allocates them: what this one does when torch.compile first
    runs what it will capture comes of the graph's own memory, of which it knows each piece that
    stays, or raises.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index), count
    if key not in _FLAGS:

        def zeros() -> torch.Tensor:
            flags = torch.zeros(count, dtype=torch.int32, device=device)
            flags[0].item()  # which waits for the zeros
            return flags

        with ThreadPoolExecutor(1) as thread:
            _FLAGS[key] = thread.submit(zeros).result()
    return _FLAGS[key]


def tma_ready(t: torch.Tensor, *, either_major: bool = False) -> torch.Tensor:
    """Give `t`, or a copy where the kernel's loads need one.

    It is 1-D or 2-D. quack holds vectors to four elements, which are 32 bytes of int64.

    Args:
        either_major: Whether the unit stride may be the first one (GEMM operands) or must be the
            last (epilogue operands).
    """
    import torch

    step = 16 // t.element_size()
    strides = t.stride()
    suits = strides[-1] == 1 and all(s % step == 0 and s > 0 for s in strides[:-1])
    if either_major and not suits:
        suits = strides[0] == 1 and strides[1] % step == 0 and strides[1] > 0
    if suits and t.data_ptr() % max(16, 4 * t.element_size()) == 0:
        return t
    # Not `contiguous()`: that keeps any stride of a dimension of extent 1.
    return t.clone(memory_format=torch.contiguous_format)
