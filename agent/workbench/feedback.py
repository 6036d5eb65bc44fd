"""What the judge said, as an author reads it: gate by gate, each fault once.

The grammar, one attempt:

    attempt 3, check interpret: FAILED at numerics
      static       passed
      compile      passed
      numerics     FAILED   1 fault in 4 findings
        1. what is wrong; what explains it
           at     where: output, row, column, program, sizes, case
           there  what the program reads at the worst element; acc is the product
           rows   row: what it gives, what is due; of the worst element and its neighbours
           also   other programs, types and tiles with this fault
           try    what to try
           outputs  which passed, which are wrong
      performance  skipped: why

A gate that passed may add figures: the worst error as a share of what is allowed (1.0 is the
limit), times in microseconds with their share of a bare GEMM's speed and of torch.compile's. What a
failed check leaves out, `read_artifact` shows.
"""

from collections.abc import Iterable, Iterator

from coda_agent.agent.judge import Finding, Verdict
from coda_agent.agent.judge.records import (
    CompileReport,
    NumericsReport,
    PerformanceReport,
    Resources,
)

LIMIT = 1200
"""Characters of a failed check."""
PROFILE = "; what its time is made of: profile"
_MESSAGE, _LINE = 460, 170  # characters of a finding's first line, and of each that follows
_TOLD = ("got", "expected", "fault", "seed", "at_tile", "there", "rows", "outputs")
_COPY = ("program", "dtype", "tile")


def feedback(verdict: Verdict, check: str, number: int) -> str:
    """Render a verdict for an author; a failed one within `LIMIT` characters."""
    failed = next((gate.name for gate in verdict.gates if not gate.passed), None)
    head = f"FAILED at {failed}" if failed else f"passed ({verdict.level or 'nothing shown yet'})"
    lines, faults = [f"attempt {number}, check {check}: {head}"], list[list[str]]()
    for gate in verdict.gates:
        if gate.skipped:
            lines.append(f"  {gate.name:<12} skipped: {gate.skipped}")
            continue
        groups = merged(gate.findings)
        said = "" if failed else "; ".join(_figures(gate.data))
        if groups:
            said = f"{len(groups)} fault{'s' * (len(groups) > 1)} in {len(gate.findings)} findings"
        lines.append(f"  {gate.name:<12} {'passed' if gate.passed else 'FAILED'}   {said}".rstrip())
        lines += (f"    {line}" for line in _timings(gate.data))
        faults += [lines_of(*group) for group in groups]
    if not failed:
        return "\n".join([*lines, *(f"  not shown: {sentence}" for sentence in verdict.not_shown)])
    rest = f"    more: read_artifact artifacts/verdict-{number}.json"
    rest += PROFILE * (failed == "performance")
    for i, (what, *more) in enumerate(faults, 1):
        block = [f"    {i}. {what}", *(f"     {line}" for line in more)]
        if len("\n".join([*lines, *block, rest])) > LIMIT:
            break
        lines += block
    return "\n".join([*lines, rest])[:LIMIT]


def merged(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings by what is wrong, across programs, types and tiles."""
    groups = dict[tuple[object, ...], list[Finding]]()
    for finding in findings:
        about = finding.where.get("output"), finding.where.get("fault")
        key = about if about[1] else (*about, finding.message)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def resources(kernel: Resources) -> str:
    """Say how many registers a kernel has, and what it spills."""
    said = f"{kernel.registers} registers, {kernel.local_stores} spill stores"
    return f"{said} to {kernel.stack_bytes} bytes a thread" if kernel.local_stores else said


def lines_of(first: Finding, *others: Finding) -> list[str]:
    """Render findings of one fault: what is wrong, where, what to try."""
    where = first.where
    parts = {
        "at": ", ".join(f"{k} {_short(v)}" for k, v in where.items() if k not in _TOLD),
        "there": ", ".join(f"{k} {_short(v)}" for k, v in where.get("there", {}).items()),
        "rows": "; ".join(
            f"{r}: got {_short(g)}, due {_short(e)}" for r, g, e in where.get("rows", ())
        ),
        "also": _copies(first, others),
        "outputs": ", ".join(f"{k} {v}" for k, v in where.get("outputs", {}).items()),
        "try": first.hint,
    }
    more = [f"  {name:<6} {_cut(text, _LINE)}" for name, text in parts.items() if text]
    return [_cut(first.message, _MESSAGE), *more]


def _copies(first: Finding, others: Iterable[Finding]) -> str:
    own, *said = (
        " ".join(str(f.where[k]) for k in _COPY if k in f.where) for f in (first, *others)
    )
    return ", ".join(name for name in dict.fromkeys(said) if name not in ("", own))


def _cut(text: str, limit: int) -> str:
    """Cut a text's middle: a finding ends with what explains it."""
    return text if len(text) <= limit else f"{text[: limit // 3]} … {text[-limit * 2 // 3 + 3 :]}"


def _short(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case dict():
            return " ".join(f"{k}={v}" for k, v in value.items())
        case list() | tuple():
            return f"({', '.join(map(_short, value))})"
        case _:
            return str(value)


def _figures(report: object) -> Iterator[str]:
    match report:
        case CompileReport(kernels=kernels):
            made = [k for k in kernels if not k.error]
            yield f"{len(made)} kernels for {', '.join(dict.fromkeys(k.arch for k in made))}"
            for k in sorted(made, key=lambda k: not k.local_stores)[:2]:  # spilling ones first
                yield f"{k.program} {k.arch} {k.dtype} at {k.tile}: {resources(k)}"
            if len(made) > 2:
                yield f"{len(made) - 2} more"
            if any(k.local_stores for k in kernels):
                yield "what spills: inspect tiles"
        case NumericsReport(ran=ran, worst=worst, refused_tiles=refused, approximated=near):
            yield f"by the {ran}"
            for program, error in worst.items():
                where = f" ({error.output})" if error.output else ""
                yield f"{program}: {error.ratio:.2f} of the bound{where}"
            for output, off in (near or {}).items():
                yield f"{output} is approximated, to {off:.1g} of an element"
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
