"""Commands on accepted kernels and on files that may become some: judge, judge again, look."""

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from coda_agent.agent import execution
from coda_agent.agent import verify as verification
from coda_agent.agent.cli import report, targets
from coda_agent.agent.cli.options import All, DeviceOption, Kernels, NoCommit
from coda_agent.agent.cli.report import columns, outcomes, progress, quiet, reported
from coda_agent.agent.judge.records import GATES
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import Kernel, Workspace, find, kernel_names, resolve_kernel
from coda_agent.primitives.errors import CodaError


@reported(compiles=True)
def check(
    target: Annotated[str, typer.Argument(metavar="FILE|KERNEL")],
    spec: Annotated[str | None, typer.Option(help="The spec, where the file has none.")] = None,
    device: DeviceOption = "auto",
    sanitize: Annotated[
        str | None, typer.Option(help="Tools of compute-sanitizer: memcheck,racecheck,initcheck.")
    ] = None,
) -> Reply:
    """Judge a program without timing or storing it."""
    tools: tuple[str, ...] = ()
    if sanitize is not None:
        from coda_agent.agent.execution import sanitize as sanitizing

        device, tools = "cuda", sanitizing.tools(sanitize)
    execution.usable_gpu(device)
    gates = (*(gate for gate in GATES if gate != "performance"), *tools)
    outcome = targets.judged("check", target, spec, device=device, gates=gates)
    return outcomes([outcome], single=True)


@reported("contended", compiles=True)
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
    records: list[dict[str, Any]] = []
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
        if other := _differing(workspace, kernel):
            said += f"\n{name}: its spec.md differs from {other}; generate makes a kernel of that"
        if not no_commit and (again := _again(kernel)):
            said += f"\n{name}: {again}, on a machine with a Hopper GPU"
        records[-1]["differing_spec"] = other
        if not quiet():
            typer.echo(said)
    stand = sum(record["passed"] for record in records)
    text = f"{stand} of {len(records)} kernels stand"
    return Reply({"kernels": records}, text, report.REFUSED if stand < len(records) else 0)


@reported()
def list_() -> Reply:
    """List the kernels, also the package's, and the specs still without one."""
    workspace = find()
    kernels = kernel_names(workspace)
    missing = sorted(set(workspace.spec_names()) - set(kernels))
    listed = [
        {
            "name": k.name, "level": k.level, "folder": k.folder, "stale": k.stale,
            "packaged": not workspace.owns(k), "differing_spec": _differing(workspace, k),
        }
        for k in sorted(kernels.values(), key=lambda k: (not workspace.owns(k), k.name))
    ]  # fmt: skip
    rows = []
    for k in listed:
        notes = ["of the package"] * k["packaged"]
        notes += [f"its spec.md differs from {path}" for path in [k["differing_spec"]] if path]
        if not notes:
            notes = [_again(kernels[k["name"]])]
        rows.append((k["name"], k["level"], "; ".join(notes)))
    rows += [(name, "spec only", "") for name in missing]
    return Reply({"kernels": listed, "specs": missing}, columns(rows))


@reported()
def show(kernel: Annotated[str, typer.Argument()]) -> Reply:
    """Show a kernel: program, level, evidence in short, what a call dispatches."""
    found = targets.accepted(kernel)
    evidence = found.evidence
    program = found.program.read_text("utf-8")
    document = {"name": kernel, "folder": found.folder, "program": program,
                "evidence": evidence.model_dump(mode="json"),
                "dispatch": (runs := dispatched(found.program.parent))}  # fmt: skip
    rows = [(key, getattr(evidence, key)) for key in ("level", "author", "date", "run")]
    rows += [(f"{key} digest", value) for key, value in evidence.digests.items()]
    rows += [("machine", evidence.machine.name)]
    for name, gate in evidence.gates.items():
        rows.append((name, f"{'passed' if gate.passed else 'failed'}, version {gate.version}"))
    rows += [("evidence", said) for said in filter(None, [_again(found)])]
    rows += [("not shown", sentence) for sentence in evidence.not_shown]
    for where, tiles in runs.items():
        rows += [(where if i == 0 else "", line) for i, line in enumerate(tiles)]
    return Reply(document, f"{found.folder}\n{columns(rows)}\n\n{program.rstrip()}")


def dispatched(folder: Path) -> dict[str, list[str]]:
    """What calls run, by M, at the N and K of the kernel's first benchmark: on this machine's GPU,
    else on an H200; or why the kernel cannot be called."""
    import torch

    from coda_agent.runtime.dispatch import H200
    from coda_agent.runtime.kernel import load_kernel

    try:
        kernel = load_kernel(folder)
    except CodaError as error:
        return {"calls": [error.message]}
    _, n, k = (kernel.spec.bench_shapes[0][dim] for dim in kernel.spec.gemm_dims)
    dtype = kernel.spec.dtype_of(kernel.spec.gemm[0], kernel.spec.default_types())
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else H200.name
    tiles = {m: kernel.choose(m, n, k, dtype, gpu=gpu) for m in (1 << i for i in range(14))}
    lines = []
    for tile, rows in groupby(tiles, lambda m: tiles[m]):
        first, *_, last = [*rows] * 2
        why = "" if tile is None or tile.fused else ": cuBLAS's product and one kernel are faster"
        span = f"{first} to {last}" if last > first else f"{first}"
        lines.append(f"M = {span}: {tile.label if tile else 'none'}{why}")
    return {f"{dtype}, N = {n}, K = {k}, {gpu}": lines}


def _again(kernel: Kernel) -> str:
    """What to do about gates whose word is stale; nothing where all stand."""
    stale = ", ".join(kernel.stale)
    return f"stale ({stale}): coda-agent verify {kernel.name} judges it again" if stale else ""


def _differing(workspace: Workspace, kernel: Kernel) -> Path | None:
    """The file of a kernel's spec where it holds another text than the one it was accepted with."""
    frozen = kernel.spec.read_text("utf-8", errors="replace") if kernel.spec.is_file() else ""
    return workspace.differing_spec(kernel.name, frozen)
