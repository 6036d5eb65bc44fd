"""Final values of partials, by the kernels that coda-agent runs."""

from __future__ import annotations

from typing import Callable

import torch

from coda_agent.agent.export.loader.store import KernelError, Store
from coda_agent.primitives.memory import allocator

Fold = Callable[[torch.Tensor], torch.Tensor]


def folding(
    store: Store,
    arch: str,
    combine: str,
    weight: float,
    layout: tuple[tuple[int, int], tuple[int, int]],
    device: torch.device,
) -> Fold:
    """Make what folds float32 partials (kept, folded) in one launch.

    Args:
        arch: The architecture of the device.
        combine: "add", "max", "min" or "logsumexp".
        weight: The factor of a sum.
        layout: Shape and strides of the partials.
    """
    (kept, folded), strides = layout
    numbers = [folded, *strides]
    # Triton compiles a number that is 1, or a multiple of 16, as such.
    hints = [1 if x == 1 else 16 if x % 16 == 0 else 0 for x in numbers]
    suiting = [x for x in store.folds[arch] if x["combine"] == combine and x["hints"] == hints]
    # They are sorted by how many partials of a row a step takes.
    about = next((x for x in suiting if x["across"] >= folded), suiting[-1])
    launch, handle = store.fold(about)
    blocks = -(-kept // about["down"])
    first = handle, blocks, about["threads"], about["shared"]
    last = (kept, *[x for x in numbers if x != 1], float(weight), 0.0)
    stream, index, empty = torch._C._cuda_getCurrentRawStream, device.index, allocator(device)

    def run(raw: torch.Tensor) -> torch.Tensor:
        out = empty((kept,), (1,), torch.float32)
        error = launch(*first, stream(index), raw.data_ptr(), out.data_ptr(), *last)
        if error:
            raise KernelError(f"a fold cannot be launched: CUDA error {error}")
        return out

    return run
