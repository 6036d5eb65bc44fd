"""Gate 4: is it faster than what a user would run instead?

- The tuner picks configurations for each element type and bench shape. They are then timed, call by
  call in turn, against a bare cuBLAS GEMM and the reference (or the spec's baseline) under
  torch.compile. The warm regime decides. The fastest configuration is timed in the steady one too,
  for the record.
- Our time includes the finalisers of reductions. What an in-place output starts from is put back
  outside the timed region.
- Each timed output must equal, bit for bit, one that was checked against the fp64 truth.
- A time below what this GPU's own best rates allow is a fault. So are other launches than the
  program declares.
- Programs of other bindings are timed in one element type at the largest shape, in the best
  configuration of the default program that suits them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

from coda_agent.agent.judge.baselines import (
    bare_gemm,
    compiled_reference,
    given_by_user,
    recompiling,
)
from coda_agent.agent.judge.machine import contention_allowed, gpu_state
from coda_agent.agent.judge.records import (
    Failure,
    Figures,
    Finding,
    Outcome,
    PerformanceReport,
    Progress,
    Rates,
    Tiles,
    Timed,
    Tuned,
    Untimed,
)
from coda_agent.agent.judge.samples import Samples, speedup
from coda_agent.agent.judge.timing import Contender, interleave, steady
from coda_agent.agent.judge.tuner import LAST, Problem, searched
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.inspect import Ceiling, Inspection, inspect_program, launches, roofline
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec

FINAL_ROUNDS = 50
# Slack on the best rates measured here. A time below what they allow is a fault of the measurement.
# Clocks differ by the power a kernel draws: on an H200 a bf16 product of zeros ran at 1.13 times
# the rate of one of random data. A copy comes to nine tenths of the datasheet's bandwidth.
_FLOPS_SLACK, _BYTES_SLACK = 1.25, 1.15


def check_performance(
    spec: Spec,
    programs: Mapping[str, Program],
    admitted: Tiles,
    known: Tuned | None = None,
    *,
    progress: Progress,
) -> Outcome[PerformanceReport]:
    """Time the default program at every shape, others at the largest.

    A configuration that is `known` as the best at a shape stays unless another is faster by more
    than the interval of their comparison, so that what users run does not change for noise.

    Returns:
        Findings, all figures, and the tuned configurations.

    Raises:
        MachineError: the GPU is in use, or its clocks disagree about everything.
    """
    findings: list[Finding] = []
    cells: list[Timed | Untimed] = []
    variants: list[Timed | Untimed] = []
    tuned: Tuned = {}
    largest = max((math.prod(s.values()) for s in spec.bench_shapes), default=0)
    for problem, search in searched(spec, programs, admitted, progress=progress):
        # Three of the search's last round, and the best of those it dropped before.
        finalists = [config for config, _ in (*search[:3], *search[LAST : LAST + 1])]
        stored = _stored(problem, admitted, known or {})
        finalists += [stored] if stored and stored not in finalists else []
        searched_us = {c.label: round(t, 2) for c, t in search}
        record = _measured(problem, finalists, stored)
        record = record.model_copy(update={"search_us": searched_us})
        cells.append(record)
        is_largest = math.prod(problem.sizes.values()) == largest
        findings += _judge(record, target=spec.target if is_largest else None)
        if isinstance(record, Untimed):
            continue
        time_us, best = record.times["ours"].median_us, record.config
        ordered = [(best, time_us), *(found for found in search if found[0] != best)]
        line = problem.line(ordered, time_us)
        tuned[problem.gemm_type] = (*tuned.get(problem.gemm_type, ()), line)
        for binding in spec.bindings()[1:] if is_largest and not variants else ():
            variant = _variant(problem, programs, binding, admitted, [c for c, _ in ordered])
            variants.append(variant)
            findings += _judge(variant, target=None)
    report = PerformanceReport(
        program=spec.variant(spec.bindings()[0]), cells=tuple(cells), variants=tuple(variants)
    )
    return Outcome(findings=tuple(findings), report=report, tuned=tuned)


def _stored(problem: Problem, admitted: Tiles, known: Tuned) -> TileConfig | None:
    """Find the best known configuration at a problem's shape, if right."""
    lines = (x for x in known.get(problem.gemm_type, ()) if (x.m, x.n, x.k) == problem.mnk)
    line = next(lines, None)
    return line.config if line and _is_right(problem, line.config, admitted) else None


def _is_right(problem: Problem, config: TileConfig, admitted: Tiles) -> bool:
    # Other rasterisation orders of an admitted configuration are the same code.
    known = admitted.get((problem.program.name, problem.element), ())
    return replace(config, swizzle=8) in known and problem.is_right(config)


def _variant(
    problem: Problem,
    programs: Mapping[str, Program],
    binding: Mapping[str, str],
    admitted: Tiles,
    configs: Sequence[TileConfig],
) -> Timed | Untimed:
    """Measure another program in the first of `configs` that suits it."""
    name = problem.spec.variant(binding)
    other = Problem(problem.spec, programs[name], binding, problem.sizes, problem.element)
    right = (c for c in configs if _is_right(other, c, admitted))
    measured = _measured(other, [*islice(right, 1)], stream=False)
    return measured.model_copy(update={"program": name})


def _measured(
    problem: Problem,
    configs: Sequence[TileConfig],
    stored: TileConfig | None = None,
    *,
    stream: bool = True,
) -> Timed | Untimed:
    """Measure the finalists of a search beside the baselines.

    The fastest finalist is ours, or the `stored` one where none is faster for certain. It is timed
    in the steady regime too, unless `stream` is off. The order may be another than in the search,
    which runs kernels back to back and so throttles the GPU. Beside the baselines the clock is what
    a user's would be.

    Raises:
        MachineError: the clocks disagree about a baseline: that is no fault of the kernel.
    """
    about = {"dtype": problem.element, "sizes": problem.sizes}
    if not configs:
        return Untimed(**about, error="no tile computes the right result at this shape")
    before = gpu_state()
    samples, streams, mismatches = _timed(problem, configs, stored, stream)
    about["gpu"] = {"before": before, "after": gpu_state()}
    sound = [c for c in configs if not samples[c.label].fault]
    if not sound:
        clocks = {name: s.clock for name, s in samples.items() if s.clock}
        return Untimed(**about, error=samples[configs[0].label].fault, clocks=clocks)
    best = _chosen(sound, samples, stored)
    ours = samples[best.label]
    steadily = None
    if fault := next((s.fault for s in streams.values() if s.fault), ""):
        steadily = Failure(error=fault)
    elif streams:
        steadily = _figures(**streams)
    facts = inspected(
        problem.spec, problem.program, problem.sizes, problem.element, block=best.tile_n
    )
    declared = launches(problem.program, best, problem.mnk[:2])
    ceiling = measured_ceiling(problem.gemm_type)
    return Timed(
        **about,
        **dict(_figures(ours, samples["gemm"], samples["compile"])),
        steady=steadily,
        config=best,
        tile=best.label,
        finalists_us={c.label: round(samples[c.label].median_us, 2) for c in sound},
        mismatches=mismatches,
        launches=(declared,) if best.fused else (declared, declared + 1),
        ceiling=Rates(
            tflops=round(ceiling.flops_s / 1e12, 1), gbytes_s=round(ceiling.bytes_s / 1e9, 1)
        ),
        floor_us=round(roofline(facts, ceiling).floor_us, 2),
        tflops=round(facts.gemm_flops / ours.median_us / 1e6, 1),
    )


def _figures(ours: Samples, gemm: Samples, compile: Samples) -> Figures:
    """Compare ours with each baseline; keep all times.

    Raises:
        MachineError: one of them has none.
    """
    times = {"ours": ours, "gemm": gemm, "compile": compile}
    return Figures(
        of_gemm=speedup(ours, gemm),
        over_compile=speedup(ours, compile),
        times={name: s.timing() for name, s in times.items()},
    )


def _chosen(
    configs: Sequence[TileConfig], samples: Mapping[str, Samples], stored: TileConfig | None
) -> TileConfig:
    """Choose the fastest, or `stored` where none is surely faster."""
    best = min(configs, key=lambda c: samples[c.label].median_us)
    if stored not in (None, best) and stored in configs:
        gain = speedup(samples[best.label], samples[stored.label])
        return best if gain.low > 1 else stored
    return best


def inspected(
    spec: Spec, program: Program, sizes: Mapping[str, int], element: str, *, block: int = 128
) -> Inspection:
    """Inspect a program at one size, in the spec's types."""
    types = dict.fromkeys(spec.types, element)
    tensors = (spec.gemm[0], *program.outputs)
    widths = {t: getattr(torch, spec.dtype_of(t, types)).itemsize for t in tensors}
    m, n, k = (sizes[dim] for dim in spec.gemm_dims)
    gemm_bytes = widths[spec.gemm[0]]
    return inspect_program(program, (m, n, k), gemm_bytes=gemm_bytes, widths=widths, block=block)


@lru_cache(maxsize=4)
def measured_ceiling(dtype: str) -> Ceiling:
    """Measure the best rates of this GPU, with slack above them.

    Flops are those of cuBLAS on two random square matrices of 8192, of `dtype`, or of bfloat16
    where that is wider. Bytes are those of a copy of 1 GiB.

    Raises:
        MachineError: the clocks disagree.
    """
    n, copied = 8192, 1 << 30
    kind = getattr(torch, dtype)
    kind = torch.bfloat16 if kind.itemsize > 2 else kind
    a, b = (torch.randn(n, n, device="cuda").to(kind) for _ in range(2))
    source = torch.randn(copied // 4, device="cuda")
    target, gemm = torch.empty_like(source), bare_gemm(a, b)
    samples = interleave({"gemm": lambda _: gemm(a, b), "copy": lambda _: target.copy_(source)}, 20)
    flops_s, bytes_s = (
        1e6 * work / min(samples[name].trusted_us)
        for name, work in (("gemm", 2 * n**3), ("copy", 2 * copied))
    )
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return Ceiling(_FLOPS_SLACK * flops_s, _BYTES_SLACK * bytes_s, cache)


def _timed(
    problem: Problem, configs: Sequence[TileConfig], stored: TileConfig | None, stream: bool
) -> tuple[dict[str, Samples], dict[str, Samples], int]:
    """Time configurations and baselines; count the outputs that were wrong.

    Warm has all configurations and the baselines. Steady has the fastest configuration, as `ours`,
    and the baselines; it is empty unless `stream` is set.
    """
    runs = {c.label: problem.run(c) for c in configs}
    expected: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for label, run in runs.items():
        for i in range(2):
            run.restore(i)
            expected[label, i] = {o: t.clone() for o, t in run(i).items()}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    results: dict[str, dict[str, torch.Tensor]] = {}

    def timed(label: str) -> Callable[[int], None]:
        def call(i: int) -> None:
            results[label] = runs[label](i)

        return call

    def verify(label: str, i: int) -> None:
        for o, t in results[label].items():
            known = expected[label, i % 2][o]
            wrong.add_((t.view(torch.uint8) != known.view(torch.uint8)).any())
            t.fill_(float("nan"))

    baseline = compiled_reference(problem.spec, problem.binding)
    given = [given_by_user(problem.spec, x, problem.binding) for x in problem.inputs]
    a, b = ([inputs[g] for inputs in problem.inputs] for g in problem.spec.gemm)
    gemm = bare_gemm(a[0], b[0])
    contenders = {
        **{x: Contender(timed(x), run.restore, partial(verify, x)) for x, run in runs.items()},
        "gemm": lambda i: gemm(a[i % 2], b[i % 2]),
        "compile": lambda i: baseline(**given[i % 2]),
    }
    with recompiling():
        samples = interleave(contenders, FINAL_ROUNDS)
        sound = [c for c in configs if not samples[c.label].fault]
        if not (stream and sound):
            return samples, {}, int(wrong)
        best = _chosen(sound, samples, stored).label
        names = {best: "ours", "gemm": "gemm", "compile": "compile"}
        chosen = {name: contenders[name] for name in names}
        if problem.program.accumulated:
            # It adds to its buffer, so it has another output after every call of a stream.
            chosen[best] = Contender(timed(best), runs[best].restore)
        streams = steady(chosen)
    return samples, {names[name]: s for name, s in streams.items()}, int(wrong)


def _judge(measured: Timed | Untimed, *, target: float | None) -> list[Finding]:
    """Find what is wrong with one measurement."""
    where = measured.model_dump(include={"program", "dtype", "sizes"})
    return [Finding(message=message, where=where) for message in _faults(measured, target)]


def _faults(measured: Timed | Untimed, target: float | None) -> Iterator[str]:
    if isinstance(measured, Untimed):
        yield measured.error
        return
    ours = measured.times["ours"]
    if (count := measured.gpu["after"].get("other_processes")) and not contention_allowed():
        yield f"{count} other processes came onto the GPU while it was timed"
    if measured.mismatches:
        yield f"{measured.mismatches} timed outputs were wrong"
    seen = (ours.clock and ours.clock.launches) or ()
    if not set(seen) <= set(measured.launches):
        yield f"{[*seen]} launches were seen, the program declares {measured.launches[0]}"
    if ours.median_us < measured.floor_us:
        yield f"{ours.median_us} us is below the roofline floor of {measured.floor_us} us"
    if (ratio := measured.over_compile.ratio) < 1.0:
        yield f"slower than torch.compile: {ratio:.3f} of its speed"
    if target and (ratio := measured.of_gemm.ratio) < target:
        over = f"{measured.over_compile.ratio:.3f} of torch.compile's"
        yield f"{ratio:.3f} of the bare GEMM's speed, target {target} in the spec; {over}"
