"""What the judge said, as an author reads it: gate by gate, the first finding first.

The grammar, one attempt:

    attempt 3, check interpret: FAILED at numerics
      static       passed
      compile      passed   8 kernels; a program, target and tile: registers, spill stores
      numerics     FAILED   2 findings
        1. what is wrong
           at   where: output, rows, columns, tile, sizes
           try  what to try
      performance  skipped: why

A passed gate may add figures: the worst error as a share of what is allowed (1.0 is the limit),
times in microseconds with their share of a bare GEMM's speed and of torch.compile's.
"""

from collections.abc import Iterator

from coda_agent.agent.judge import Finding, Verdict
from coda_agent.agent.judge.records import CompileReport, NumericsReport, PerformanceReport

MAX_FINDINGS = 8


def feedback(verdict: Verdict, check: str, number: int) -> str:
    """A verdict as text for an author; at most `MAX_FINDINGS` findings of a gate."""
    failed = next((gate.name for gate in verdict.gates if not gate.passed), None)
    head = f"FAILED at {failed}" if failed else f"passed ({verdict.level or 'nothing shown yet'})"
    lines = [f"attempt {number}, check {check}: {head}"]
    for gate in verdict.gates:
        if gate.skipped:
            lines.append(f"  {gate.name:<12} skipped: {gate.skipped}")
            continue
        count = f"{len(gate.findings)} findings"
        said = "; ".join(_figures(gate.data)) if gate.passed else count
        lines.append(f"  {gate.name:<12} {'passed' if gate.passed else 'FAILED'}   {said}".rstrip())
        for i, finding in enumerate(gate.findings[:MAX_FINDINGS], 1):
            what, *more = lines_of(finding)
            lines += [f"    {i}. {what}", *(f"     {line}" for line in more)]
        lines += (f"    {line}" for line in _timings(gate.data))
    lines += (f"  not shown: {sentence}" for sentence in verdict.not_shown)
    return "\n".join(lines)


def lines_of(finding: Finding) -> list[str]:
    """A finding as text: what is wrong, then, indented, where and what to try."""
    at = ", ".join(f"{key} {value}" for key, value in finding.where.items())
    more = [f"  at   {at}"] * bool(at) + [f"  try  {finding.hint}"] * bool(finding.hint)
    return [finding.message, *more]


def _figures(report: object) -> Iterator[str]:
    match report:
        case CompileReport(kernels=kernels):
            yield f"{len(kernels)} kernels"
            spilling = [k for k in kernels if k.local_stores]
            for k in [*spilling, *kernels][:2]:
                yield (
                    f"{k.program} {k.arch} {k.dtype} at {k.tile}: {k.registers} registers, "
                    f"{k.local_stores} spill stores"
                )
        case NumericsReport(ran=ran, worst=worst, refused_tiles=refused):
            yield f"by the {ran}"
            for program, error in worst.items():
                yield f"{program}: {error.ratio:.2f} of the bound ({error.output})"
            if refused:
                yield f"{len(refused)} tiles refused"


def _timings(report: object) -> Iterator[str]:
    for cell in report.timed if isinstance(report, PerformanceReport) else ():
        sizes = "x".join(str(size) for size in cell.sizes.values())
        yield (
            f"{cell.dtype} {sizes}: {cell.times['ours'].median_us:.1f} us at {cell.tile}, "
            f"{cell.of_gemm.ratio:.3f} of a bare GEMM's speed, "
            f"{cell.over_compile.ratio:.3f} of torch.compile's, floor {cell.floor_us} us"
        )
