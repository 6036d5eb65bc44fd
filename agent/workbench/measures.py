"""Tools that measure a candidate: its numbers, its time, its code."""

from typing import Annotated, Literal

from pydantic import Field

from coda_agent.agent.judge import Finding
from coda_agent.agent.judge.records import PerformanceReport, Timed
from coda_agent.agent.judge.runners import one_thread
from coda_agent.agent.log import short_digest
from coda_agent.agent.state import Attempt
from coda_agent.agent.workbench.registry import Result, ToolError, pick, told, tool
from coda_agent.agent.workbench.session import Proposal, Workbench

PAGE = 4000
"""Characters of a page of an artifact."""


@tool(reads=True)
def evaluate(
    bench: Workbench,
    expression: Annotated[
        str | None,
        told("Of acc and operands; lines before the last assign. None: the candidate."),
    ] = None,
    values: Annotated[
        dict[str, float | list[float]] | None,
        told("Numbers of the first row by name, such as acc (infinite: of all rows); else drawn."),
    ] = None,
    failing: Annotated[bool, told("On the case in which a check failed.")] = False,
    against: Annotated[int | None, told("Number of an attempt to show beside it.")] = None,
    program: Annotated[str | None, told("One program of several.")] = None,
) -> Result:
    """What the candidate or an expression gives at a few elements, beside the exact reference:
    in float64, and as float32 arithmetic stores it."""
    from coda_agent.agent.workbench.evaluating import failing_inputs, inputs_of, table, written
    from coda_agent.primitives.reader import read_programs

    names = {bench.spec.variant(b): b for b in bench.spec.bindings()}
    failed = _failed(bench) if failing else None
    where = failed[1].where if failed else {}
    name = where.get("program") or program or next(iter(names))
    binding, values = pick(names, name, "program"), values or {}
    found = written(bench.spec, binding, expression) if expression else None
    programs = {"expression": found} if found else {}
    if not found:
        programs["candidate"] = read_programs(bench.candidate(), [*names])[name]
    if against is not None:
        attempts = {str(a.number): a.text for a in bench.state.attempts}
        text = pick(attempts, str(against), "attempt")
        programs[f"attempt {against}"] = read_programs(text, [*names])[name]
    with one_thread():
        drawn = failing_inputs(bench.spec, binding, failed[0].text, failed[1]) if failed else None
        inputs = inputs_of(bench.spec, binding, values, drawn)
        given = max((len(v) if isinstance(v, list) else 1 for v in values.values()), default=0)
        element = str(where.get("dtype", ""))
        text = table(bench.spec, binding, programs, inputs, given=given, element=element)
    head = f"where attempt {failed[0].number} failed, {name}:\n" if failed else ""
    return Result(text=head + text)


@tool(reads=True)
def read_artifact(
    bench: Workbench,
    name: Annotated[str, told("As a result names it, such as artifacts/verdict-1.json.")],
    page: Annotated[int, Field(ge=1, description="From 1.")] = 1,
) -> Result:
    """One page of a file that an earlier result left in the run's folder."""
    files = sorted((bench.log.folder / "artifacts").glob("*"))
    known = {f"artifacts/{file.name}": file for file in files if file.is_file()}
    text = pick(known, name, "artifact").read_text("utf-8")
    pages = max(1, -(-len(text) // PAGE))
    if page > pages:
        raise ToolError(f"{name} has {pages} pages")
    shown = text[(page - 1) * PAGE : page * PAGE]
    return Result(text=f"{name}, page {page} of {pages}\n{shown}", data={"pages": pages})


@tool(reads=True)
def benchmark(bench: Workbench) -> Proposal | Result:
    """Times the candidate on the GPU against a bare GEMM and torch.compile."""
    return bench.propose("benchmark")


@tool(reads=True)
def profile(bench: Workbench) -> Result:
    """What the candidate's time is made of where benchmark found it slowest: the kernel beside
    itself without each output, operand and statistic of groups."""
    from coda_agent.agent.explain import program_of
    from coda_agent.agent.workbench.attribution import attributed

    bench.need_gpu()
    program, cell = program_of(bench.spec, bench.candidate()), _slowest(bench)
    said = attributed(bench.spec, program, cell)
    sizes = "x".join(map(str, cell.sizes.values()))
    return Result(text=f"{program.name}, {cell.dtype} {sizes} at {cell.tile}\n{said}", gpu=True)


@tool(reads=True)
def inspect(
    bench: Workbench,
    what: Annotated[
        Literal["graph", "roofline", "tiles", "cute", "ptx", "sass"],
        told(
            "graph: its operations. roofline: time and traffic at the bench shapes. tiles: "
            "registers and spills in each. cute, ptx, sass: its epilogue for sm_90a, at the "
            "default tile."
        ),
    ],
    program: Annotated[str | None, told("One program of several.")] = None,
) -> Result:
    """What a program became: its graph, its roofline, its tiles or its code."""
    from coda_agent.agent.explain import explain
    from coda_agent.agent.workbench.inspection import epilogue, roofline, tiles

    text = bench.candidate()
    match what:
        case "graph":
            return Result(text=explain(bench.spec, text, what, program))
        case "roofline":
            return Result(text=roofline(bench.spec, text, program))
        case "tiles":
            return Result(text=tiles(bench.spec, text, program))
    whole = explain(bench.spec, text, what, program)
    path = bench.log.artifact(f"{what}-{short_digest(whole)}.txt", whole)
    return Result(text=f"{epilogue(what, whole)}\n(the whole kernel: {path})", artifacts=[path])


def _slowest(bench: Workbench) -> Timed:
    """Where the candidate's last benchmark found it slowest beside the bare product."""
    for attempt in reversed(bench.state.attempts):
        if attempt.text != bench.state.candidate:
            continue
        report = bench.verdict_of(attempt).report(PerformanceReport)
        if report and report.timed:
            return min(report.timed, key=lambda cell: cell.of_gemm.ratio)
    raise ToolError("this candidate was not timed yet", hint="benchmark picks tile and shape")


def _failed(bench: Workbench) -> tuple[Attempt, Finding]:
    """The candidate's last failure, else that of the last attempt: its first finding."""
    attempts = bench.state.attempts
    own = [a for a in attempts if a.text == bench.state.candidate and not a.passed]
    for attempt in (own or attempts)[-1:]:
        if found := next((f for g in bench.verdict_of(attempt).gates for f in g.findings), None):
            return attempt, found
    said = f"attempt {attempts[-1].number} passed" if attempts else "nothing was checked yet"
    raise ToolError(f"there is no failing case: {said}", hint="leave `failing` out")
