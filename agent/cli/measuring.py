"""The command that times accepted kernels on a GPU: for figures, and for the suite's pages."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coda_agent.agent import execution, shapes
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.options import All, Kernels
from coda_agent.agent.cli.report import columns, outcomes, reported
from coda_agent.agent.execution.environment import environment
from coda_agent.agent.judge import timing
from coda_agent.agent.judge.machine import require_idle
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import find
from coda_agent.evals import (
    chain_error,
    contest,
    contest_page,
    definitions,
    host_time,
    layer_speed,
)
from coda_agent.evals.review import write_benchmarks
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import use_cache


@reported("contended")
def bench(
    kernels: Kernels = None,
    every: All = False,
    suite: Annotated[
        str | None,
        typer.Option(help="paper, shapes, layers, fuse, gradients, or KERNELs of one."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", "--rows", help="Of the suite: 2048,4096,8192.")
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", "--cases", help="Of the suite: llama-3-8b,…")
    ] = None,
    contenders: Annotated[str | None, typer.Option(help="Of the suite: ours,compile,…")] = None,
    rounds: Annotated[int | None, typer.Option(min=10, help="Of the suite.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no cell of the suite after so long.")
    ] = None,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="The error of GEMM - RMSNorm - GEMM instead.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="What a call costs the host instead, and its parts.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Only write the page in docs/ from what is stored.")
    ] = False,
    same: Annotated[
        str | None,
        typer.Option(help="Of layers, fuse, gradients: why changed sources time the same."),
    ] = None,
) -> Reply:
    """Time accepted kernels on this GPU. A suite and --numerics are stored; a suite resumes."""
    root = find().root
    if host:
        execution.hopper()
        use_cache()
        chosen = targets.named(kernels, every)
        found = [host_time.measure(load_kernel(kernel.folder)) for kernel in chosen]
        document = {"timed": host_time.TIMED, "kernels": [asdict(one) for one in found]}
        return Reply(document, columns(host_time.table(found)))
    if numerics:
        if not table:
            execution.hopper()
            use_cache()
            chain_error.measure(root, machine=_machine(), device="cuda")
        return _written(chain_error.write_page(root))
    if same is not None and suite not in layer_speed.SUITES:
        raise CodaError(f"--same goes with --suite {', '.join(layer_speed.SUITES)}")
    if suite in layer_speed.SUITES:
        if same is not None:
            layer_speed.declare_same(root, suite, same)
        elif not table:
            _ready()
            layer_speed.measure(
                root, suite, clock=timing, machine=_machine(), cases=_names(models),
                names=_names(contenders), rounds=rounds, seconds=seconds,
                say=typer.echo,
            )  # fmt: skip
        return _written(layer_speed.write_page(root, suite))
    if suite is not None:
        chosen = definitions.load(suite, others=layer_speed.SUITES)
        rows = bool(chosen.measured().models)  # refused before anything is measured or read
        wanted = ("numbers of rows, such as 1,16", 1) if rows else ("multiples of 128", 128)
        named = ("--rows" if rows else "--sizes", (sizes or "").strip(" ,"))
        numbers = shapes.numbers(*named, wanted[0], of=wanted[1]) if named[1] else []
        if not table:
            _ready()
            contest.run_contest(
                root, chosen, clock=timing, machine=_machine(), kernels=kernels or [],
                sizes=numbers, models=_names(models), names=_names(contenders), rounds=rounds,
                seconds=seconds, say=typer.echo,
            )  # fmt: skip
        write = contest_page.write_shapes if rows else contest_page.write_page
        return _written(write(root, chosen))
    if table:
        path = write_benchmarks(root)
        return Reply({"table": path}, f"wrote {path}")
    execution.usable_gpu("cuda")
    judged = (targets.judged("bench", k.name) for k in targets.named(kernels, every))
    return outcomes(list(judged))


def _names(text: str | None) -> list[str]:
    """`ours,compile` as a list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _ready() -> None:
    """Refuse a machine whose GPU cannot be timed now."""
    execution.hopper()
    use_cache()
    require_idle()


def _machine() -> dict[str, Any]:
    found = environment("cuda")
    gpu = {key: found["gpu"].get(key) for key in ("name", "driver_version")}
    return {"gpu": gpu, "cuda": found["cuda"], "packages": found["packages"]}


def _written(paths: list[Path]) -> Reply:
    pages = [path for path in paths if path.suffix != ".json"]
    document: dict[str, Any] = {"pages": pages}
    for record in (path for path in paths if path not in pages):
        document |= {"record": record, **json.loads(record.read_text("utf-8"))}
    return Reply(document, "\n".join(f"wrote {page}" for page in pages))
