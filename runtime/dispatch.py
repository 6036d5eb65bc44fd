"""A model of each configuration's time, by which a call's is chosen.

The time of a configuration is that of a roofline with steps. CTA tiles come in waves over the SMs.
A wave costs so much for each step along K, and so much for its epilogues. No kernel is faster than
memory is. `dispatch_fit.py` finds the costs from measured times: some of each configuration, and
two of memory that all configurations of a kernel share. What the formula misses at a measured shape
is kept too, and corrects predictions near that shape. Without measured times there is a prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import TileConfig, offered

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program

Shape = tuple[int, int, int]
"""(M, N, K)."""
# Octaves of M, N and K over which a miss of the formula fades; how much closer, in their squares, a
# shape must be to outweigh others; and how much evidence, in measured shapes at distance zero, the
# formula itself counts as. Where shapes were held back, others near these values did as well.
_REACH = 2.0
_CLOSE = 0.1
_TRUST = 0.1
# K steps of a wave that splitting K has to save a library before it does.
_SPLIT_STEPS = 16
# Configurations are corrected that the formula puts within this factor of the fastest.
_CONTENDS = 1.4
# Sharpness of the roofline's edge: where work and memory take equally long, a kernel takes 2^(1/4)
# as long as either.
_EDGE = 4.0
# Microseconds that 128 threads take for one store to local memory each and for loading it again. On
# an H200 (2026-11-23) tiles with 901 of them took 82 us, as if the other warp group's mainloop hid
# its own time of that; 144 to 221 took 2 to 5 us more than none.
_SPILLED_US, _LEAST_US = 0.085, 0.02


class Gpu(NamedTuple):
    """A GPU as the prior needs it: memory in bytes a second."""

    name: str
    sms: int
    bytes_s: float


H200 = Gpu("NVIDIA H200", 132, 4.8e12)


@dataclass(frozen=True)
class Regret:
    """How much slower the picks are than the fastest configuration.

    Ratios: geometric mean and worst, over so many shapes, each picked by a model that was fitted
    without it.
    """

    mean: float
    worst: float
    shapes: int


class Cost(NamedTuple):
    """What a configuration costs, in microseconds.

    Its CTA tiles come in waves; where the last wave is not full, waves are more than the tiles
    would fill.

    Attributes:
        start: A launch, to its first product and from its last one.
        step: A wave's 128 bytes along K, however few its tiles are.
        load: The same for as many tiles as fill the GPU, which share its caches and its power.
        padding: What is added to that by rows of A that a tile has and the matrix does not. On an
            H200 few rows took up to 1.6 times as long as rows that fill their tiles.
        wave: The epilogue of a wave, as far as no mainloop hides it.
        epilogue: The same for as many tiles as fill the GPU.
        split: What is added to `start` where K is in parts.
    """

    start: float
    step: float
    load: float
    padding: float
    wave: float
    epilogue: float
    split: float = 0.0


class Memory(NamedTuple):
    """Microseconds for a byte of A and B, and an output element."""

    byte: float
    element: float


class Features(NamedTuple):
    """What a shape is to a configuration.

    Waves, how often its tiles fill the GPU, steps along K of one tile, the part of the tiles' M
    that is padding, bytes of A and B, elements of the output, and 1 where K is in parts, else 0.
    """

    waves: float
    filled: float
    steps: float
    padding: float
    bytes: float
    elements: float
    split: float


def features(config: TileConfig, shape: Shape, *, element_bytes: int, sms: int) -> Features:
    """Find what `shape` is to `config`."""
    m, n, k = shape
    in_bytes = (m + n) * k * element_bytes
    steps = math.ceil(k * element_bytes / 128)
    if not config.fused:
        waves, split = _library_waves(shape, steps, sms)
        filled, padding = m * n / 128**2 / sms, 1 - m / (64 * -(-m // 64))
        return Features(waves, filled, steps, padding, in_bytes, m * n, split)
    rows, columns = (n, m) if config.swap_ab else (m, n)
    # A cluster is launched whole.
    height, width = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    down, along = -(-rows // height), -(-columns // width)
    parts, cluster = config.parts(k), config.cluster_m * config.cluster_n
    # Some SMs are left over: on an H200 120 CTAs in clusters of four ran at once, and 128 did not.
    filled = down * along * cluster * parts / (sms if cluster < 4 else sms * 10 / 11)
    padding = 1 - m / (along * width if config.swap_ab else down * height)
    steps = math.ceil(steps / parts)
    return Features(math.ceil(filled), filled, steps, padding, in_bytes, m * n, parts > 1)


# What cuBLAS may pick among: CTA tiles, and what a wave of one costs beside its area's share.
_LIBRARY = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.05), (64, 256, 1.2), (128, 64, 1.3),
    (64, 128, 1.3), (64, 64, 1.7),
)  # fmt: skip


@lru_cache(maxsize=256)
def _library_waves(shape: Shape, steps: int, sms: int) -> tuple[float, bool]:
    """Count the 128 x 128 waves that a library's product is worth."""
    m, n, k = shape
    found = (
        (
            math.ceil(-(-m // height) * -(-n // width) * parts / sms)
            * (height * width / 128**2 / parts)
            * (factor * (1 + 0.06 * (parts - 1))),
            parts > 1,
        )
        for height, width, factor in _LIBRARY
        for parts in (1, 2, 4)
        if parts == 1 or k >= 1024 * parts
    )
    return min(found, key=lambda pick: pick[0] * steps + pick[1] * _SPLIT_STEPS)


def time_us(cost: Any, memory: Any, f: Any) -> Any:
    """Apply the formula to numbers, or to tensors of costs and features."""
    step = f.waves * cost.step + f.filled * (cost.load + f.padding * cost.padding)
    work = f.steps * step + f.waves * cost.wave + f.filled * cost.epilogue
    floor = memory.byte * f.bytes + memory.element * f.elements
    return cost.start + f.split * cost.split + (work**_EDGE + floor**_EDGE) ** (1 / _EDGE)


@dataclass(frozen=True)
class Model:
    """Times of one kernel's configurations on one GPU.

    Attributes:
        shapes: Where it was measured.
        misses: By configuration, at each of `shapes`: the logarithm of measured over predicted
            time; None where it was not measured.
    """

    sms: int
    element_bytes: int
    memory: Memory
    costs: Mapping[TileConfig, Cost]
    shapes: tuple[Shape, ...] = ()
    misses: Mapping[TileConfig, tuple[float | None, ...]] = field(default_factory=dict)

    def ranked(
        self, shape: Shape, configs: Iterable[TileConfig] | None = None
    ) -> list[tuple[TileConfig, float]]:
        """Rank known configurations of `configs`, by default all, with predicted microseconds."""
        m, n, k = shape
        shape = max(m, 1), n, k  # no rows take as long as one
        known = self.costs if configs is None else [c for c in configs if c in self.costs]
        times = {c: self._formula_us(c, shape) for c in known}
        if self.misses and times:
            near, limit = self._near(shape), _CONTENDS * min(times.values())
            for config, time in times.items():
                if time < limit:
                    times[config] = time * self._correction(config, shape, near)
        return sorted(times.items(), key=lambda found: found[1])

    def _formula_us(self, config: TileConfig, shape: Shape) -> float:
        return time_us(self.costs[config], self.memory, self._features(config, shape))

    def _features(self, config: TileConfig, shape: Shape) -> Features:
        return features(config, shape, element_bytes=self.element_bytes, sms=self.sms)

    def _correction(
        self, config: TileConfig, shape: Shape, near: Sequence[tuple[int, float]]
    ) -> float:
        """Correct a configuration's time by the misses near a shape.

        Those count most where its waves were as full as they are here, and alone what was measured
        here.
        """
        misses, full = self.misses[config], self._fullness.get(config)
        if full is None:
            seen = (self._features(config, shape) for shape in self.shapes)
            full = self._fullness[config] = tuple(_full(config, x) for x in seen)
        here = _full(config, self._features(config, shape))
        total, weight = 0.0, _TRUST
        for i, square in near:
            if (miss := misses[i]) is not None:
                if not square:
                    return math.exp(miss)  # measured here
                far = square + (here - full[i]) ** 2
                w = math.exp(-far / 2) / (1 + far / _CLOSE)
                total += w * miss
                weight += w
        return math.exp(total / weight)

    @cached_property
    def _fullness(self) -> dict[TileConfig, tuple[float, ...]]:
        """Of configurations that were asked for, at each of `shapes`."""
        return {}

    def _near(self, shape: Shape) -> list[tuple[int, float]]:
        """Find measured shapes that matter here, with their squared distances."""
        x, y, z = _place(shape)
        squares = [(x - u) ** 2 + (y - v) ** 2 + (z - w) ** 2 for u, v, w in self._places]
        return [(i, square) for i, square in enumerate(squares) if square < 8]

    @cached_property
    def _places(self) -> list[tuple[float, ...]]:
        return list(map(_place, self.shapes))

    def measured(self) -> dict[Shape, dict[TileConfig, float]]:
        """List the times that it was fitted to, in microseconds by shape."""
        return {
            shape: {
                config: self._formula_us(config, shape) * math.exp(miss)
                for config, misses in self.misses.items()
                if (miss := misses[i]) is not None
            }
            for i, shape in enumerate(self.shapes)
        }


def _full(config: TileConfig, seen: Features) -> float:
    """Give the filled part of a configuration's waves; 0 of a library's."""
    return seen.filled / seen.waves if config.fused else 0.0


def _place(shape: Shape) -> tuple[float, ...]:
    return tuple(math.log2(size) / _REACH for size in shape)


def prior(
    program: Program,
    shape: Shape,
    gpu: Gpu,
    *,
    element_bytes: int = 2,
    spills: Mapping[str, int] | None = None,
) -> Model:
    """Model a program's times at a shape, where nothing was measured.

    Costs are rounded from those fitted to 19 kernels on an H200 (2026-11-22), at whose 3772 places
    its picks are 4.6 % slower than the fastest. `spills` has a thread's stores to local memory, by
    a configuration's label.
    """
    one, two = (
        inspect_program(program, (128, columns, 64), element_bytes=2, gemm_bytes=0).bytes_moved
        for columns in (1024, 2048)
    )
    element = (two - one) / (128 * 1024)
    # Each subtile waits for what it reads of tables. With this the formula comes near to what
    # tiles of 128 x 128 and of 128 x 256 took on an H200, with one table as with four (2026-11-23).
    waits = 4.0 * any(issubclass(kind, Table) for kind in program.operands.values())
    costs = {config: _guessed(config, element, waits) for config in offered(program, [shape])}
    for config, cost in costs.items() if spills else ():
        threads = 128 if config.pingpong or config.tile_m == 64 else 256
        stores = (spills or {}).get(config.label, 0) * threads / 128
        mainloop = math.ceil(shape[2] * element_bytes / 128) * cost.step
        spilled = _SPILLED_US * stores - mainloop * config.pingpong
        costs[config] = cost._replace(wave=cost.wave + max(spilled, _LEAST_US * stores))
    per_byte = 1e6 / (0.75 * gpu.bytes_s)
    return Model(gpu.sms, element_bytes, Memory(per_byte, element * per_byte), costs)


def _guessed(config: TileConfig, element: float, waits: float) -> Cost:
    """Guess a configuration's costs by its epilogue's bytes an element and waits."""
    if not config.fused:  # two launches, and cuBLAS splits K where it has few tiles
        return Cost(12.0, 0.02, 0.5, 0.0, 0.1, 1.0, 1.5)
    area = config.tile_m * config.tile_n / 128**2
    split = config.split_k * (1.1 + 1.6 * area)
    # Ping-pong hides most of an epilogue, and the start of a mainloop.
    exposed, slower = (0.2, 1.0) if config.pingpong else (1.0, 1.13)
    epilogue = (0.6 + 0.1 * element + waits) * area * exposed
    step = (0.12 + 0.24 * area) * slower
    return Cost(6 + 2.5 * area, step, 0.01, 0.3 * step, epilogue, 0.1, split)


def propose(
    program: Program,
    shape: Shape,
    *,
    model: Model | None = None,
    spills: Mapping[str, int] | None = None,
) -> list[TileConfig]:
    """List configurations to measure, the fastest by `model` or the prior first."""
    configs = offered(program, [shape])
    known = model or prior(program, shape, H200, spills=spills)
    found = [config for config, _ in known.ranked(shape, configs)]
    # What the model has not seen comes last.
    return [*found, *(c for c in configs if c not in found)]
