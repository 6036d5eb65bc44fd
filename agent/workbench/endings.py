"""Tools that end a run, and keep what it taught."""

from typing import Annotated

from coda_agent.agent import events as e
from coda_agent.agent.tips import Tip, Tips, names_in
from coda_agent.agent.workbench.registry import Result, ToolError, told, tool
from coda_agent.agent.workbench.session import Proposal, Workbench


@tool(last=True)
def log_tip(
    bench: Workbench,
    text: Annotated[str, told("One or two sentences: symptom, cause, what to do. No code.")],
    failing: Annotated[int, told("Number of an attempt that failed for lack of it.")],
    passing: Annotated[int, told("Number of the later attempt that passed with it.")],
) -> Result:
    """Keeps what an attempt taught, for later runs, which are shown it when the same goes wrong."""
    attempts = {attempt.number: attempt for attempt in bench.state.attempts}
    before, after = attempts.get(failing), attempts.get(passing)
    if not (before and not before.passed and after and after.passed and failing < passing):
        said = ", ".join(f"{n} {'passed' if a.passed else 'failed'}" for n, a in attempts.items())
        message = "a tip needs an attempt that failed and a later one that passed"
        raise ToolError(f"{message}; there are: {said or 'none'}")
    finding = " ".join(before.judgement.finding.split())[:160]
    tip = Tip(
        text=text, tags=[bench.fault(before), *sorted(names_in(before.text))],
        author=str(bench.state.author), run=bench.run.id,
        failing=f"check {failing}, {before.check}: {finding}",
        passing=f"check {passing}, {after.check}",
    )  # fmt: skip
    programs = [kernel.text for kernel in bench.workspace.kernels()]
    programs += [bench.state.candidate, best.text if (best := bench.state.best) else ""]
    kept = Tips.of(bench.workspace).add(tip, programs)
    return Result(text=f"tip {tip.id} kept" if kept else f"tip {tip.id} was known already")


@tool(last=True)
def submit(bench: Workbench) -> Proposal | Result:
    """The full trial: all gates this machine can run. A pass is committed and ends the run."""
    return bench.propose("submit")


@tool(last=True)
def give_up(
    bench: Workbench, reason: Annotated[str, told("What stands in the way, in one sentence.")]
) -> Result:
    """Ends the run without a kernel."""
    bench.log.append(e.GaveUp(reason=reason))
    return Result(text="the run is over; the candidate is kept")


@tool(reads=True)
def use(bench: Workbench) -> Result:
    """How the kernel that was accepted is imported, called, exported and given to others."""
    name = bench.spec.name
    if name not in {kernel.name for kernel in bench.workspace.kernels()}:
        raise ToolError(f"{name} has no kernel yet", hint="submit a candidate first")
    folder = bench.workspace.kernel(name).program.parent
    called = ", ".join(bench.spec.declared.inputs)
    outputs = ", ".join(bench.spec.declared.outputs)
    lines = [
        "from pathlib import Path",
        "from coda_agent.runtime.loading import load_kernel",
        f"{name} = load_kernel(Path({str(folder)!r}))  # help({name}) says what it takes",
        f"{outputs} = {name}({called})  # on a Hopper GPU one launch, elsewhere interpreted",
        f"# without coda-agent: coda-agent export {name} --out DIR",
    ]
    return Result(text="\n".join(lines))
