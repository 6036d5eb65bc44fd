"""The command line, `coda-agent`.

Exit codes: 0 done, 1 refused by the judge, 2 bad input, 3 the machine lacks something,
70 a fault of coda-agent, 130 interrupted.

- Whatever is heavy (torch, the judge, pydantic, rich) is imported inside the command that needs
  it: `--help` and completion answer at once.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coda_agent.agent.cli import authoring, evaluate, judging, review
from coda_agent.agent.cli.report import Progress, Reply, columns, outcomes, reported
from coda_agent.agent.cli.targets import (
    ContendedOption,
    DeviceOption,
    Json,
    NoCommit,
    SandboxOption,
    require_gpu,
    require_sandbox,
)
from coda_agent.primitives.errors import CodaError, MachineError, WorkspaceError

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
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"coda-agent {version('coda-agent')}")
        except PackageNotFoundError:
            typer.echo("coda-agent (not installed)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    from coda_agent.agent.events import take_secrets

    take_secrets()


@app.command()
@reported
def init(path: Annotated[Path, typer.Argument()] = Path(), as_json: Json = False) -> Reply:
    """Make a workspace: specs/, generated/, logs/ under git."""
    from coda_agent.agent import workspace

    made, new = workspace.init(path)
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
    from coda_agent.agent import pipeline
    from coda_agent.agent.cli import targets

    require_sandbox(sandbox)
    tools: tuple[str, ...] = ()
    if sanitize is not None:
        from coda_agent.agent.judge import sanitize as sanitizing

        device, tools = "cuda", sanitizing.tools(sanitize)
    require_gpu(device)
    text, found = targets.program(target, spec)
    run = targets.new_run("check", found.name)
    gates = (*(gate for gate in pipeline.GATES if gate != "performance"), *tools)
    with Progress(silent=as_json) as observer:
        outcome = pipeline.judge_only(
            run, "check", found, text, observer, device=device, gates=gates
        )
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
    from coda_agent.agent import pipeline
    from coda_agent.agent.workspace import find
    from coda_agent.primitives.tiles import TileConfig

    require_sandbox(sandbox)
    shapes = [evaluate.shape(text) for text in shape]
    require_gpu("cuda")
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
    from coda_agent.agent import pipeline
    from coda_agent.agent.cli import targets
    from coda_agent.agent.workspace import find

    require_sandbox(sandbox)
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
    require_gpu("cuda")
    judged: list[pipeline.Outcome] = []
    for name in _named(kernels, every):
        text, spec = targets.program(str(workspace.kernel(name).program))
        run = workspace.new_run("bench", spec.name)
        with Progress(silent=as_json) as observer:
            judged.append(pipeline.judge_only(run, "bench", spec, text, observer, device="cuda"))
    return outcomes(judged)


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
    from coda_agent.agent import pipeline
    from coda_agent.agent.workspace import find

    require_sandbox(sandbox)
    require_gpu(device)
    workspace = find()
    judged: list[pipeline.Outcome] = []
    names = _named(kernels, every)
    if every:
        return review.verify_all(workspace, names, device, commit=not no_commit, silent=as_json)
    for name in names:
        if not as_json:
            typer.echo(name)
        with Progress(silent=as_json) as observer:
            outcome = pipeline.verify(
                workspace, name, observer, device=device, commit=not no_commit
            )
        judged.append(outcome)
    return outcomes(judged)


@app.command("list")
@reported
def list_(as_json: Json = False) -> Reply:
    """List the kernels, and the specs still without one."""
    from coda_agent.agent.workspace import find

    workspace = find()
    kernels = workspace.kernels()
    have = {kernel.name for kernel in kernels}
    missing = sorted(set(workspace.spec_names()) - have)
    document: dict[str, Any] = {
        "kernels": [{"name": k.name, "level": k.level, "folder": k.folder} for k in kernels],
        "specs": missing,
    }
    rows = [(kernel.name, kernel.level) for kernel in kernels]
    text = columns(rows + [(name, "spec only") for name in missing])
    return Reply(document, text or "no kernels and no specs yet")


@app.command()
@reported
def show(kernel: Annotated[str, typer.Argument()], as_json: Json = False) -> Reply:
    """Show a kernel: program, level, evidence in short."""
    from coda_agent.agent.workspace import find

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
    stage: Annotated[str, typer.Option(help="graph, program, cute, ptx or sass.")] = "program",
    variant: Annotated[str | None, typer.Option(help="One variant of several.")] = None,
    as_json: Json = False,
) -> Reply:
    """Print one stage of a program on its way to the machine."""
    stages = ("graph", "program", "cute", "ptx", "sass")
    if stage not in stages:
        raise CodaError(f"no stage {stage!r}", hint=f"one of {', '.join(stages)}")
    from coda_agent.agent.cli import targets

    found = targets.explainable(target)
    from coda_agent.agent.explain import explain as explained

    text = explained(found.spec, found.text, stage, variant=variant)
    return Reply({"target": target, "stage": stage, "text": text}, text.rstrip())


@app.command()
@reported
def primitives(
    name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False
) -> Reply:
    """List what programs are written from, or describe one."""
    from coda_agent.agent.workspace import near_matches
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


def _named(kernels: list[str] | None, every: bool) -> list[str]:
    """The kernels asked for; each is looked up before the first is judged."""
    from coda_agent.agent.workspace import find

    workspace = find()
    if every == bool(kernels):
        raise CodaError("name kernels, or give --all", hint="coda-agent list")
    known = [kernel.name for kernel in workspace.kernels()]
    return [workspace.kernel(name).name for name in kernels or known]
