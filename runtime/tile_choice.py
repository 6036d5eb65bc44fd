"""Which tile a call runs: a measured one, else a likely one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import SWIZZLES, TileConfig, offered
from coda_agent.runtime import dispatch_tables as tables
from coda_agent.runtime.dispatch import H200, Gpu, Model, Shape, prior
from coda_agent.runtime.function import Chooser, reduction_block
from coda_agent.runtime.tuning import UserTuning


@dataclass(eq=False)
class TileChoice:
    """What is known of a kernel's tiles, or of a program's.

    Attributes:
        name: Of the kernel, in dispatch tables; "" of a program that is in none.
        tuned: GPU name to dtype to measured shapes with their best configuration.
        refused: Labels of tiles that compute wrongly; never dispatched.
        user: What the user measured of it; None of a kernel that is not an accepted one's folder.
        folder: Of accepted kernels, where a dispatch table may be beside the package's.
        spills: A thread's stores to local memory, by a tile's label.
        fitted: The digest of the program whose measurements choose tiles; by default its own.
    """

    name: str
    program: Program
    tuned: Mapping[str, Mapping[str, list[dict[str, Any]]]] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    user: UserTuning | None = None
    folder: Path = tables.PACKAGED
    spills: Mapping[str, int] = field(default_factory=dict)
    fitted: str = ""

    def __post_init__(self) -> None:
        self.fitted = self.fitted or self.program.digest

    def choose(
        self,
        m: int,
        n: int,
        k: int,
        dtype: str,
        block: int | None = None,
        gpu: str | None = None,
    ) -> TileConfig | None:
        """Choose the configuration to run, of those with this reduction block.

        It is what the user measured to be fastest at exactly this shape, else what tuned.json has
        of it, else what the GPU's dispatch table predicts to be, or without one the prior.

        Args:
            block: The reduction block; None leaves it open.
            gpu: A GPU's name; by default that of the first one here.

        Returns:
            The configuration; None where there is no GPU, or none has this block.
        """
        gpu = gpu or _gpu_name()
        if not gpu:
            return None
        if self.user and (config := self.user.find(gpu, dtype, (m, n, k), block)):
            if self._dispatchable(config, (m, n, k)):
                return config
        for line in self.tuned.get(gpu, {}).get(dtype, []):
            if (line["m"], line["n"], line["k"]) == (m, n, k):
                entry = line["config"] if block is None else line.get("blocks", {}).get(str(block))
                if entry and self._dispatchable(config := TileConfig(**entry), (m, n, k)):
                    return config
        return next(iter(self.ranked((m, n, k), dtype, gpu, block)), None)

    def ranked(
        self, shape: Shape, dtype: str, gpu: str | None = None, block: int | None = None
    ) -> list[TileConfig]:
        """List right configurations with this block, the likely fastest first.

        They are for the first GPU here by default; none where there is none.
        """
        if not (gpu := gpu or _gpu_name()):
            return []
        program = self.program
        usable = [
            config
            for config in offered(program, [shape])
            if config.label not in self.refused
            and (block is None or reduction_block(program, config) == block)
        ]
        model = self.model(gpu, dtype, near=True) if self.name else None
        if model is None or not any(config in model.costs for config in usable):
            width = tables.width(dtype)
            model = prior(program, shape, _gpu(gpu), element_bytes=width, spills=self.spills)
        return [config for config, _ in model.ranked(shape, usable)]

    @lru_cache(maxsize=8)  # noqa: B019 (there are as many functions as kernels)
    def model(self, gpu: str, dtype: str, *, near: bool = False) -> Model | None:
        """Find what was fitted to measurements on a GPU, if anything was.

        Where nothing was, `near` takes what another card's becomes with this one's SMs.
        """
        sms = _gpu(gpu).sms if near else 0
        return tables.find(self.folder, gpu, self.name, self.fitted, dtype, sms=sms)

    def _dispatchable(self, config: TileConfig, shape: tuple[int, int, int]) -> bool:
        """Tell whether a file's configuration is one that a tuner may find."""
        program = self.program
        plain = replace(config, swizzle=8)  # other orders run the same code
        if config.swizzle not in (8, *SWIZZLES) or plain not in offered(program, [shape]):
            return False
        return self.refused.isdisjoint((plain.label, config.label))


def fused_by(first: Chooser, otherwise: Chooser) -> Chooser:
    """Take what the first chooses, where that is one kernel: what takes B's rows apart."""

    def choose(m: int, n: int, k: int, dtype: str, block: int | None) -> TileConfig | None:
        found = first(m, n, k, dtype, block)
        return found if found and found.fused else otherwise(m, n, k, dtype, block)

    return choose


def scheduled(config: TileConfig, m: int, n: int) -> TileConfig:
    """Have CTAs take tiles as they come free, where that pays in this process."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return config.scheduled(m, n, alone=not known or distributed.get_world_size() == 1)


@lru_cache(maxsize=1)
def _gpu_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


@lru_cache(maxsize=4)
def _gpu(name: str) -> Gpu:
    """Describe a GPU to the prior: one here, else an H200."""
    if _gpu_name() != name or not torch.cuda.is_available():
        return H200._replace(name=name)
    about = torch.cuda.get_device_properties(0)
    # Kilohertz, twice a clock, and bits.
    rate = getattr(about, "memory_clock_rate", 0) * 2e3 * getattr(about, "memory_bus_width", 0) / 8
    return Gpu(name, about.multi_processor_count, rate or H200.bytes_s)
