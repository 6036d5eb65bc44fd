"""The command line, `coda-agent`.

Exit codes: 0 done, 1 refused by the judge, 2 bad input, 3 the machine lacks something,
70 a fault of coda-agent, 130 interrupted.

- Whatever is heavy (torch, the judge, pydantic, rich) is imported inside the command that needs
  it: `--help` and completion answer at once.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coda_agent.agent import pipeline
from coda_agent.agent.cli import authoring, evaluate, judging, report, review, rules, targets
from coda_agent.agent.cli.report import Progress, Reply, columns, outcomes, reported
from coda_agent.agent.cli.targets import (
    ContendedOption,
    DeviceOption,
    Json,
    NoCommit,
    SandboxOption,
)  # fmt: skip
from coda_agent.agent.events import take_secrets
from coda_agent.agent.workspace import Kernel, Workspace, find
from coda_agent.agent.workspace import init as init_workspace
from coda_agent.primitives.errors import CodaError, MachineError, WorkspaceError
from coda_agent.primitives.suggest import near_matches

app = typer.Typer(
    name="coda-agent",
    help="Writes, judges and keeps GEMM-epilogue kernels.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # rich help costs 0.1 s and says the same
    pretty_exceptions_enable=False,
)

All = Annotated[bool, typer.Option("--all", help="Every kernel of the workspace.")]
Kernels = Annotated[list[str] | None, typer.Argument(metavar="[KERNEL]...")]


def main() -> None:
    """The console script."""
    app()


def _version(asked: bool) -> None:
    if asked:
        from coda_agent.agent.doctor import package_version

        typer.echo(f"coda-agent {package_version('coda-agent', 'coda_agent')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    take_secrets()


@app.command()
@reported
def init(path: Annotated[Path, typer.Argument()] = Path(), as_json: Json = False) -> Reply:
    """Make a workspace: specs/, generated/, logs/ under git."""
    made, new = init_workspace(path)
    text = f"workspace {made.root}" + ("".join(f"\n  + {item}" for item in new) or " (unchanged)")
    return Reply({"workspace": made.root, "made": new}, text)


@app.command()
@reported
def doctor(as_json: Json = False) -> Reply:
    """Say what this machine has, and what that makes possible."""
    from coda_agent.agent.doctor import diagnose

    items, level = diagnose(Path.cwd())
    rows = [
        (item.name, item.value or "missing", item.enables + (f" ({item.hint})" * (not item.value)))
        for item in items
    ]
    end = f"kernels can reach `{level}` here" if level else "nothing can be shown here"
    document = {"items": [vars(item) for item in items], "level": level}
    code = 0 if level else MachineError.exit_code
    return Reply(document, f"{columns(rows)}\n\n{end}", code)


app.add_typer(authoring.app)
app.add_typer(evaluate.app, name="eval")
app.add_typer(review.app)
app.add_typer(judging.app, name="score-judge")
app.add_typer(rules.app, name="rules", hidden=True)


@app.command()
@reported
def check(
    target: Annotated[str, typer.Argument(metavar="FILE|KERNEL")],
    spec: Annotated[str | None, typer.Option(help="The spec, where the file has none.")] = None,
    device: DeviceOption = "auto",
    sanitize: Annotated[
        str | None, typer.Option(help="Tools of compute-sanitizer: memcheck,racecheck,initcheck.")
    ] = None,
    sandbox: SandboxOption = None,
    as_json: Json = False,
) -> Reply:
    """Judge a program without timing or storing it."""
    from coda_agent.agent.judge.records import GATES

    targets.require_sandbox(sandbox)
    tools: tuple[str, ...] = ()
    if sanitize is not None:
        from coda_agent.agent.execution import sanitize as sanitizing

        device, tools = "cuda", sanitizing.tools(sanitize)
    targets.require_gpu(device)
    gates = (*(gate for gate in GATES if gate != "performance"), *tools)
    outcome = _judged("check", target, spec, device=device, gates=gates, silent=as_json)
    return outcomes([outcome], single=True)


@app.command()
@reported
def tune(
    kernel: Annotated[str, typer.Argument(help="An accepted kernel.")],
    shape: Annotated[list[str], typer.Option(help="M,N,K, such as 16384,4096,4096; repeatable.")],
    sandbox: SandboxOption = None,
    contended: ContendedOption = False,
    as_json: Json = False,
) -> Reply:
    """Find a kernel's best tiles for shapes of your own on this GPU, and commit them."""
    from coda_agent.primitives.tiles import TileConfig

    targets.require_sandbox(sandbox)
    shapes = [evaluate.shape(text) for text in shape]
    targets.require_gpu("cuda")
    with Progress(silent=as_json) as observer:
        measured, sha = pipeline.tune(find(), kernel, shapes, observer)
    lines = [
        f"{dtype} {e['m']} x {e['n']} x {e['k']}: {TileConfig(**e['config']).label}, "
        f"{e['median_us']} us"
        for types in measured.values()
        for dtype, entries in types.items()
        for e in entries
    ]
    text = "\n".join([*lines, f"commit {sha}"]) if sha else f"{kernel}: every shape was known"
    return Reply({"tuned": measured, "commit": sha}, text)


@app.command()
@reported
def bench(
    kernels: Kernels = None,
    every: All = False,
    suite: Annotated[str | None, typer.Option(help="A suite (paper), or KERNELs of it.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Of the suite: 2048,4096,8192.")] = None,
    contenders: Annotated[str | None, typer.Option(help="Of the suite: ours,compile,…")] = None,
    rounds: Annotated[int, typer.Option(min=10, help="Of the suite.")] = 50,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="The error of GEMM - RMSNorm - GEMM instead.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Only write the page in docs/ from what is stored.")
    ] = False,
    sandbox: SandboxOption = None,
    contended: ContendedOption = False,
    as_json: Json = False,
) -> Reply:
    """Time accepted kernels on this GPU. A suite and --numerics are stored; a suite resumes."""
    targets.require_sandbox(sandbox)
    workspace = find()
    if numerics:
        return evaluate.numerics(workspace, table=table)
    if suite is not None:
        return evaluate.suite(
            workspace, suite, kernels=kernels or [], sizes=sizes, contenders=contenders,
            rounds=rounds, table=table, say=lambda line: typer.echo(line, err=as_json),
        )  # fmt: skip
    if table:
        from coda_agent.evals.benchmarks import write_table

        path = write_table(workspace.root)
        return Reply({"table": path}, f"wrote {path}")
    targets.require_gpu("cuda")
    judged = (_judged("bench", n, silent=as_json) for n in _named(kernels, every))
    return outcomes(list(judged))


@app.command()
@reported
def verify(
    kernels: Kernels = None,
    every: All = False,
    device: DeviceOption = "auto",
    no_commit: NoCommit = False,
    sandbox: SandboxOption = None,
    contended: ContendedOption = False,
    as_json: Json = False,
) -> Reply:
    """Judge accepted kernels again; raise or revoke their levels."""
    from coda_agent.agent.execution import usable_gpu

    targets.require_sandbox(sandbox)
    targets.require_gpu(device)
    workspace = find()
    names = _named(kernels, every)
    if every and not as_json and usable_gpu(device) is None:
        typer.echo("No GPU is used: numerics are interpreted, nothing is timed. A level can be "
                   "kept or revoked, and none raised above proved.")  # fmt: skip
    records: list[dict[str, Any]] = []
    for name in names:
        try:
            with Progress(silent=as_json or every) as observer:
                outcome = pipeline.verify(
                    workspace, name, observer, device=device, commit=not no_commit
                )
        except CodaError as error:
            if len(names) == 1:
                raise
            # One that cannot be judged stops no other.
            records.append({"kernel": name, "passed": False, "reason": str(error)})
            said = f"{name}: cannot be judged: {' '.join(str(error).split())}"
        else:
            records.append(outcome.record())
            said = report.sentence(outcome) if every else report.told(outcome)
        if other := _differing(workspace, workspace.kernel(name)):
            said += f"\n{name}: its spec.md differs from {other}; generate makes a kernel of that"
        records[-1]["differing_spec"] = other
        if not as_json:
            typer.echo(said)
    stand = sum(record["passed"] for record in records)
    text = f"{stand} of {len(records)} kernels stand"
    return Reply({"kernels": records}, text, report.REFUSED if stand < len(records) else 0)


@app.command("list")
@reported
def list_(as_json: Json = False) -> Reply:
    """List the kernels, and the specs still without one."""
    workspace = find()
    kernels = workspace.kernels()
    missing = sorted(set(workspace.spec_names()) - {kernel.name for kernel in kernels})
    differing = [_differing(workspace, k) for k in kernels]
    listed = [
        {"name": k.name, "level": k.level, "folder": k.folder, "differing_spec": other}
        for k, other in zip(kernels, differing, strict=True)
    ]
    rows = [
        (k.name, k.level, f"its spec.md differs from {other}" if other else "")
        for k, other in zip(kernels, differing, strict=True)
    ]
    rows += [(name, "spec only", "") for name in missing]
    text = columns(rows) or "no kernels and no specs yet"
    return Reply({"kernels": listed, "specs": missing}, text)


@app.command()
@reported
def show(kernel: Annotated[str, typer.Argument()], as_json: Json = False) -> Reply:
    """Show a kernel: program, level, evidence in short."""
    found = find().kernel(kernel)
    evidence = found.evidence
    program = found.program.read_text("utf-8")
    document = {"name": kernel, "folder": found.folder, "program": program, "evidence": evidence}
    rows = [(key, evidence.get(key)) for key in ("level", "author", "date", "run")]
    rows += [(f"{key} digest", value) for key, value in evidence.get("digests", {}).items()]
    for gate in evidence.get("gates", []):
        passed = "passed" if gate.get("passed") else "failed"
        rows.append((gate["name"], f"skipped: {gate['skipped']}" if gate["skipped"] else passed))
    rows += [("not shown", sentence) for sentence in evidence.get("not_shown", [])]
    return Reply(document, f"{found.folder}\n{columns(rows)}\n\n{program.rstrip()}")


@app.command()
@reported
def explain(
    target: Annotated[str, typer.Argument(metavar="SPEC|KERNEL|FILE")],
    stage: Annotated[
        Literal["graph", "program", "cute", "ptx", "sass"], typer.Option(help="What to print.")
    ] = "program",
    variant: Annotated[str | None, typer.Option(help="One variant of several.")] = None,
    as_json: Json = False,
) -> Reply:
    """Print one stage of a program on its way to the machine."""
    from coda_agent.agent.explain import explain as explained

    program, spec = targets.explainable(target)
    text = explained(spec, program, stage, variant=variant)
    return Reply({"target": target, "stage": stage, "text": text}, text.rstrip())


@app.command()
@reported
def primitives(
    name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False
) -> Reply:
    """List what programs are written from, or describe one."""
    from coda_agent.primitives.catalogue import entries

    known = {entry.name: entry for entry in entries()}
    if name is None:
        keys = ("name", "kind", "signature", "summary")
        document = [{key: getattr(entry, key) for key in keys} for entry in known.values()]
        return Reply(document, columns([(e.name, e.kind, e.summary) for e in known.values()]))
    if name not in known:
        raise WorkspaceError(f"no primitive named {name!r}", hint=near_matches(name, known))
    entry = known[name]
    fields = ("name", "kind", "signature", "summary", "doc")
    text = f"{entry.signature}  ({entry.kind})\n\n{entry.doc}"
    return Reply({key: getattr(entry, key) for key in fields}, text)


def _judged(
    kind: str,
    target: str,
    spec: str | None = None,
    *,
    device: pipeline.Device = "cuda",
    gates: tuple[str, ...] | None = None,
    silent: bool,
) -> pipeline.Outcome:
    """What the judge says of a FILE or KERNEL, in a run of its own."""
    text, found = targets.program(target, spec)
    run = targets.new_run(kind, found.name)
    with Progress(silent=silent) as observer:
        return pipeline.judge_only(run, kind, found, text, observer, device=device, gates=gates)


def _differing(workspace: Workspace, kernel: Kernel) -> Path | None:
    """The file of a kernel's spec where it holds another text than the one it was accepted with."""
    frozen = kernel.spec.read_text("utf-8", errors="replace") if kernel.spec.is_file() else ""
    return workspace.differing_spec(kernel.name, frozen)


def _named(kernels: list[str] | None, every: bool) -> list[str]:
    """The kernels asked for; each is looked up before the first is judged."""
    workspace = find()
    if every == bool(kernels):
        raise CodaError("name kernels, or give --all", hint="coda-agent list")
    known = [kernel.name for kernel in workspace.kernels()]
    return [workspace.kernel(name).name for name in kernels or known]
