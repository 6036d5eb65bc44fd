"""A search for the fastest right configuration at a shape.

Three rounds of elimination, all interleaved: every admitted configuration; the best few in other
rasterisation orders, which need no other code; the best of those again, for longer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from coda_agent.agent.judge.compare import measure, within
from coda_agent.agent.judge.machine import require_idle
from coda_agent.agent.judge.oracle import Source
from coda_agent.agent.judge.records import Inputs, Progress, Tiles, Tuned
from coda_agent.agent.judge.runners import held
from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.judge.timing import Call, interleave
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import SWIZZLES, TileConfig, offered
from coda_agent.runtime.function import reduction_block
from coda_agent.runtime.launch import Arguments, Bound, allocate, launch
from coda_agent.runtime.plan import finalised
from coda_agent.runtime.tuning import TunedShape
from coda_agent.specs import Spec, draw_inputs

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Dtypes


CallT = TypeVar("CallT", bound=Call)

SEARCH_ROUNDS = 7
LAST = 4  # configurations in the last round


def tune(
    spec: Spec,
    programs: Mapping[str, Program],
    admitted: Tiles,
    *,
    progress: Progress,
) -> Tuned:
    """Find the default program's fastest right configurations at the bench shapes.

    Raises:
        CompileError: no configuration computes the right result at a shape.
        MachineError: as `searched`.
    """
    tuned: Tuned = {}
    for problem, search in searched(spec, programs, admitted, progress=progress):
        if not search:
            raise CompileError(
                f"{problem.program.name}: no tile computes the right result at {problem.sizes}"
            )
        line = problem.line(search, search[0][1])
        tuned[problem.gemm_type] = (*tuned.get(problem.gemm_type, ()), line)
    return tuned


def searched(
    spec: Spec,
    programs: Mapping[str, Program],
    admitted: Tiles,
    *,
    progress: Progress,
) -> Iterator[tuple[Problem, list[tuple[TileConfig, float]]]]:
    """Search for the default program's tiles, by type and bench shape.

    Raises:
        MachineError: the GPU is in use, or its clocks disagree about every configuration.
    """
    require_idle()
    binding = spec.bindings()[0]
    name = spec.variant(binding)
    elements = sorted({e for p, e in admitted if p == name})
    total = len(elements) * len(spec.bench_shapes)
    walk = product(elements, spec.bench_shapes)
    for done, (element, sizes) in enumerate(walk):
        progress(done, total, f"{element} {'x'.join(map(str, sizes.values()))}")
        problem = Problem(spec, programs[name], binding, sizes, element)
        yield problem, problem.search(admitted[name, element])
    progress(total, total, "")


def ranked(
    runs: Mapping[TileConfig, CallT],
    rounds: int,
    clock: Callable[[Mapping[str, CallT], int], Mapping[str, Samples]],
) -> list[tuple[TileConfig, float]]:
    """Order configurations by their median time in microseconds, with it.

    Those about which the clocks disagree are left out. `clock` times them side by side, as
    `timing.interleave`.

    Raises:
        MachineError: the clocks disagree about every one.
    """
    samples = clock({config.label: run for config, run in runs.items()}, rounds)
    faults = [s.fault for s in samples.values() if s.fault]
    if len(faults) == len(samples):
        raise MachineError(faults[0])
    timed = [(c, s.median_us) for c in runs if not (s := samples[c.label]).fault]
    return sorted(timed, key=lambda found: found[1])


class Problem:
    """One element type at one shape: a case, and other inputs."""

    def __init__(
        self,
        spec: Spec,
        program: Program,
        binding: Mapping[str, str],
        sizes: Mapping[str, int],
        element: str,
    ) -> None:
        self.spec, self.program, self.binding = spec, program, binding
        self.sizes, self.element = dict(sizes), element
        types = dict.fromkeys(spec.types, element)
        self.gemm_type = spec.dtype_of(spec.gemm[0], types)
        self.dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
        self.case = Source(spec, binding, sizes, element, "cuda", secrets.randbits(62)).case()
        other = draw_inputs(
            spec, sizes, types, seed=secrets.randbits(62), device="cuda", binding=binding
        )
        self.inputs: tuple[Inputs, ...] = (self.case.inputs, other)

    @property
    def mnk(self) -> tuple[int, int, int]:
        a, b = (self.case.inputs[g] for g in self.spec.gemm)
        return a.shape[0], b.shape[0], a.shape[1]

    def run(self, config: TileConfig) -> Launched:
        """Take the program in one configuration, with its own output buffers."""
        return Launched(self.spec, self.program, self.inputs, self.dtypes, config)

    def search(self, configs: Sequence[TileConfig]) -> list[tuple[TileConfig, float]]:
        """Order right configurations by their median time in microseconds, with it.

        Those that came into the last round stand before the others.
        """
        suited = offered(self.program, [self.mnk])
        right = [c for c in configs if c in suited and self.is_right(c)]
        if not right:
            return []
        first = self._ranked(right, SEARCH_ROUNDS)
        fused = [c for c, _ in first[:3] if c.fused]
        orders = [replace(c, swizzle=s) for c in fused for s in SWIZZLES if self._cut(c) > s]
        second = self._ranked([c for c, _ in first[:LAST]] + orders, SEARCH_ROUNDS)
        last = self._ranked([c for c, _ in second[:LAST]], 3 * SEARCH_ROUNDS)
        known = {c for c, _ in last}
        rest = sorted({**dict(first), **dict(second)}.items(), key=lambda found: found[1])
        return last + [(c, t) for c, t in rest if c not in known]

    def _cut(self, config: TileConfig) -> int:
        """Count output tiles along the shorter side: larger groups are one."""
        m, n, _ = self.mnk
        return min(-(-m // config.tile_m), -(-n // config.tile_n))

    def _ranked(self, configs: Sequence[TileConfig], rounds: int) -> list[tuple[TileConfig, float]]:
        # Every configuration ran when it was checked, so that one round warms the clocks.
        clock = partial(interleave, warmup=1)
        return ranked({c: self.run(c) for c in configs}, rounds, clock)

    def is_right(self, config: TileConfig) -> bool:
        """Whether a configuration computes the right result here."""
        run = self.run(config)
        run.restore(0)
        results = run(0)
        return all(
            within(measure(results[o], self.case.truth[o]), self.case.bounds[o])
            for o in self.spec.outputs
        )

    def line(self, search: Sequence[tuple[TileConfig, float]], time_us: float) -> TunedShape:
        """Write a line of tuned.json: best configurations, by reduction block too."""
        m, n, k = self.mnk
        blocks: dict[str, TileConfig] = {}
        for config, _ in search:
            if (block := reduction_block(self.program, config)) is not None:
                blocks.setdefault(str(block), config)
        best = search[0][0]
        return TunedShape(m=m, n=n, k=k, config=best, blocks=blocks, median_us=time_us)


class Launched:
    """A program in one configuration, called with the round's number."""

    def __init__(
        self,
        spec: Spec,
        program: Program,
        inputs: Sequence[Inputs],
        dtypes: Dtypes,
        config: TileConfig,
    ) -> None:
        self.spec, self.program, self.inputs, self.config = spec, program, inputs, config
        a, b = (inputs[0][g] for g in spec.gemm)
        self.m, self.n = a.shape[0], b.shape[0]
        self.outputs = allocate(program, self.m, self.n, dtypes, config, a.device)

    def restore(self, i: int) -> None:
        """Put back what an in-place output starts from."""
        for o, start in held(self.spec, self.program, self._set(i)).items():
            self.outputs[o].copy_(start)

    def launch(self, i: int) -> None:
        """Run the kernel, and leave reductions as partials."""
        inputs = self._set(i)
        a, b = (inputs[g] for g in self.spec.gemm)
        operands = [inputs[o] for o in self.program.operands]
        self._bound((a, b, *operands), [*self.outputs.values()])

    @cached_property
    def _bound(self) -> Bound:
        """Bind the launch, which inputs of every set suit."""
        inputs = self._set(0)
        a, b = (inputs[g] for g in self.spec.gemm)
        return launch(Arguments(self.program, a, b, inputs, self.outputs, self.config), run=False)

    def __call__(self, i: int) -> dict[str, torch.Tensor]:
        self.launch(i)
        return finalised(self.program, self.outputs, self.m, self.n, self.config)

    def _set(self, i: int) -> Inputs:
        return self.inputs[i % len(self.inputs)]
