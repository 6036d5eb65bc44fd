"""The device child, but for launches that go wrong at the tiles a script names.

The script lies in the first folder of PYTHONPATH: a tile's label to a fault. It is read at each
launch, below the child's own watch over launches.
"""

import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from coda_agent.agent.execution import device_worker
from coda_agent.runtime.launch import Arguments, launcher

SCRIPT = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) / "script.json"


@triton.jit
def _stray(pointer, offset):
    tl.store(pointer + offset, 1.0)


def hang() -> None:
    torch.cuda._sleep(1 << 62)  # cycles: some eighty years


def stray() -> None:
    _stray[(1,)](torch.zeros(1, device="cuda"), 1 << 44)


def memory() -> None:
    torch.empty(200 << 30, dtype=torch.uint8, device="cuda")


FAULTS = {f.__name__: f for f in (hang, stray, memory)}


def timing() -> float:
    """The median time of a plain product, in microseconds, after a second of warming up."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(4000):
        torch.mm(a, a)
    events = []
    for _ in range(200):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, a)
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(1000 * start.elapsed_time(stop) for start, stop in events)


if __name__ == "__main__":
    plain = launcher.get()

    def launch(given: Arguments, *, run: bool = True) -> Any:
        fault = json.loads(SCRIPT.read_text()).get(given.config.label) if run else None
        if fault:
            FAULTS[fault]()
        return plain(given, run=run)

    launcher.set(launch)
    device_worker.COMMANDS["timing"] = timing
    device_worker.main()
