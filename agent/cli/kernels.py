"""Commands that judge accepted kernels, and files that may become some."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import execution
from coda_agent.agent import verify as verification
from coda_agent.agent.cli import report, targets
from coda_agent.agent.cli.options import (
    All,
    DeviceOption,
    Kernels,
    NoCommit,
    completed,
    known_kernels,
    known_specs,
)
from coda_agent.agent.cli.report import judged, progress, quiet, reported
from coda_agent.agent.cli.spec import about, line
from coda_agent.agent.judge import Terms
from coda_agent.agent.judge.records import GATES, JsonObject
from coda_agent.agent.log import short_run
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import Kernel, Workspace, find, here, resolve_kernel, resolve_spec
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import load_spec


@reported(compiles=True)
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|KERNEL",
            help="A .md file is a spec, to be admitted.",
            autocompletion=completed(known_kernels, files=True),
        ),
    ],
    spec: Annotated[
        str | None,
        typer.Option(
            help="The spec, where the file has none.",
            autocompletion=completed(known_specs, files=True),
        ),
    ] = None,
    device: DeviceOption = "auto",
    sanitize: Annotated[
        str | None, typer.Option(help="Tools of compute-sanitizer: memcheck,racecheck,initcheck.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeat the draws of a verdict, which names its seed.")
    ] = None,
) -> Reply:
    """Judge a program without timing or storing it, or admit a spec."""
    if target.endswith(".md"):
        if spec is not None or sanitize is not None or seed is not None:
            raise CodaError(f"{target} is a spec; --spec, --sanitize and --seed are of a program")
        return _admitted(target)
    tools: tuple[str, ...] = ()
    if sanitize is not None:
        from coda_agent.agent.execution import sanitize as sanitizing

        device, tools = "cuda", sanitizing.tools(sanitize)
    execution.usable_gpu(device)
    gates = (*(gate for gate in GATES if gate != "performance"), *tools)
    text, found = targets.program(target, spec)
    run = targets.new_run("check", found.name)
    with progress() as observer, short_run(run, observer, "check", found.name) as log:
        terms = Terms(device, gates, seed=seed)
        outcome = verification.judge_only(log, found, text, terms)
    return judged(outcome)


def _admitted(path: str) -> Reply:
    """Parse a spec and admit it; no program is written or judged."""
    from coda_agent.agent import references

    found = load_spec(resolve_spec(path, here()))
    with report.waiting(f"admission of {found.name}"):
        references.admitted(found)
    return Reply(about(found), f"{found.path}: {line(found)}")


@reported(timed=True, compiles=True)
def verify(
    kernels: Kernels = None,
    every: All = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Whether stale or not.")] = False,
    device: DeviceOption = "auto",
    no_commit: NoCommit = False,
) -> Reply:
    """Judge again what is stale of accepted kernels; raise or revoke their levels."""
    gpu, workspace = execution.usable_gpu(device), find()
    chosen = targets.named(kernels, every)
    if every and not quiet() and gpu is None:
        typer.echo("No GPU is used: numerics are interpreted, nothing is timed. A level can be "
                   "kept or revoked, and none raised above proved.")  # fmt: skip
    records: list[JsonObject] = []
    for kernel in chosen:
        name = kernel.name
        try:
            with progress(silent=every) as observer:
                outcome = verification.verify(
                    workspace, name, observer,
                    device=device, commit=not no_commit, fresh=fresh,
                )  # fmt: skip
        except CodaError as error:
            if len(chosen) == 1:
                raise
            # One that cannot be judged stops no other.
            records.append({"kernel": name, "passed": False, "reason": str(error)})
            said = f"{name}: cannot be judged: {' '.join(str(error).split())}"
        else:
            records.append(outcome.record())
            said = report.sentence(outcome) if every else report.told(outcome)
        kernel = resolve_kernel(name, workspace)
        if other := differing(workspace, kernel):
            said += f"\n{name}: its spec.md differs from {other}; generate makes a kernel of that"
        if not no_commit and (again := _again(kernel)):
            said += f"\n{name}: {again}, on a machine with a Hopper GPU"
        records[-1]["differing_spec"] = other
        if not quiet():
            typer.echo(said)
    stand = sum(record["passed"] for record in records)
    text = f"{stand} of {len(records)} kernels stand"
    return Reply({"kernels": records}, text, report.REFUSED if stand < len(records) else 0)


def _again(kernel: Kernel) -> str:
    """Say what to do about stale gates; nothing where all stand."""
    stale = ", ".join(kernel.stale)
    return f"stale ({stale}): coda-agent verify {kernel.name} judges it again" if stale else ""


def differing(workspace: Workspace, kernel: Kernel) -> Path | None:
    """Find the spec of a kernel's name, where its text is another."""
    frozen = kernel.spec.read_text("utf-8", errors="replace") if kernel.spec.is_file() else ""
    return workspace.differing_spec(kernel.name, frozen)
