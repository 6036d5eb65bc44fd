"""What stands for a measurement: a clock that is told the times, and records of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coda_agent.agent.judge.samples import Samples, speedup

MACHINE = {"gpu": {"name": "NVIDIA H200", "driver_version": "580.1"}, "packages": {"torch": "2.11"}}


class Clock:
    """Runs each contender once and says how long it is told; is interrupted after so many cells.

    Attributes:
        cells: How many it timed.
        fault: What it raises instead.
        stalled: Who has no steady figure, and why.
    """

    PROTOCOL = 1

    def __init__(self, times_us: Mapping[str, float], cells: int = 99) -> None:
        self.times_us, self.left, self.cells = times_us, cells, 0
        self.fault: type[Exception] | None = None
        self.stalled: dict[str, str] = {}

    def interleave(
        self, contenders: Mapping[str, Callable[[int], Any]], rounds: int
    ) -> dict[str, Samples]:
        if self.left == self.cells:
            raise KeyboardInterrupt
        self.cells += 1
        if self.fault:
            raise self.fault("no")
        for run in contenders.values():
            run(1)
        return {name: Samples((self.times_us[name],) * rounds) for name in contenders}

    def steady(self, contenders: Mapping[str, Callable[[int], Any]]) -> dict[str, Samples]:
        times = {n: self.times_us[n] * (1.25 if n == "ours" else 1) for n in contenders}
        return {n: Samples((t,) * 3, None, self.stalled.get(n, "")) for n, t in times.items()}

    def gpu_state(self) -> dict[str, Any]:
        return {"clocks.sm": "1980"}


def figures(times_us: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a cell that was timed so, in one regime."""
    samples = {n: Samples((t,) * 20) for n, t in times_us.items()}
    return {
        "times": {n: s.timing().model_dump() for n, s in samples.items()},
        "of_gemm": {n: speedup(s, samples["gemm"]).model_dump() for n, s in samples.items()},
        "over": {n: speedup(samples["ours"], s).model_dump() for n, s in samples.items()},
    }


def cell(kernel: str, size: int, times_us: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """A cell of a record."""
    return {
        "kernel": kernel, "size": size, "sizes": {"M": size, "N": 3 * size, "K": size},
        "machine": MACHINE, "rounds": 20, "tiles": {"ours": "128x192 pp 2x1"}, "notes": {},
        "absent": {}, **figures(times_us), **more,
    }  # fmt: skip


def recorded(root: Path, suite: str, cells: Mapping[Any, Any], **about: Any) -> Path:
    """A suite's record on disk."""
    path = root / "evals" / "results" / f"{suite}-{about.pop('gpu', 'nvidia-h200')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"suite": suite, "date": "2026-01-02", "cells": cells, **about}))
    return path
