"""Commands that time accepted kernels on a GPU: for tiles, for figures, for the suite's pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from coda_agent.agent import pipeline
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.report import Progress, Reply, outcomes, reported
from coda_agent.agent.cli.targets import Json, sharing
from coda_agent.agent.workspace import Workspace, find
from coda_agent.primitives.errors import CodaError


@reported
@sharing("sandbox", "contended")
def tune(
    kernel: Annotated[str, typer.Argument(help="An accepted kernel.")],
    shape: Annotated[list[str], typer.Option(help="M,N,K, such as 16384,4096,4096; repeatable.")],
    as_json: Json = False,
) -> Reply:
    """Find a kernel's best tiles for shapes of your own on this GPU, and commit them."""
    from coda_agent.primitives.tiles import TileConfig

    shapes = [_shape(text) for text in shape]
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


@reported
@sharing("sandbox", "contended")
def bench(
    kernels: targets.Kernels = None,
    every: targets.All = False,
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
    as_json: Json = False,
) -> Reply:
    """Time accepted kernels on this GPU. A suite and --numerics are stored; a suite resumes."""
    workspace = find()
    if numerics:
        return _numerics(workspace, table=table)
    if suite is not None:
        return _suite(
            workspace, suite, kernels=kernels or [], sizes=sizes, contenders=contenders,
            rounds=rounds, table=table, say=lambda line: typer.echo(line, err=as_json),
        )  # fmt: skip
    if table:
        from coda_agent.evals.benchmarks import write_table

        path = write_table(workspace.root)
        return Reply({"table": path}, f"wrote {path}")
    targets.require_gpu("cuda")
    judged = (targets.judged("bench", n, silent=as_json) for n in targets.named(kernels, every))
    return outcomes(list(judged))


def _numbers(text: str | None) -> list[int]:
    """`2048,4096` as a list; nothing as an empty one.

    Raises:
        CodaError: something else than positive whole numbers.
    """
    try:
        found = [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(n <= 0 or n % 128 for n in found):
        raise CodaError(f"--sizes is {text!r}, expected multiples of 128, such as 2048,4096")
    return found


def _shape(text: str) -> tuple[int, int, int]:
    """`4096,8192,4096` as (M, N, K).

    Raises:
        CodaError: something else than three positive whole numbers.
    """
    try:
        m, n, k = map(int, text.replace("x", ",").split(","))
    except ValueError:
        m = n = k = 0
    if min(m, n, k) <= 0:
        raise CodaError(f"--shape is {text!r}, expected M,N,K, such as 16384,4096,4096")
    return m, n, k


def _suite(
    workspace: Workspace,
    name: str,
    *,
    kernels: list[str],
    sizes: str | None,
    contenders: str | None,
    rounds: int,
    table: bool,
    say: Callable[[str], None],
) -> Reply:
    """Measure what the suite's record lacks, unless only the `table` is wanted; write its pages."""
    from coda_agent.evals.contest import run_contest
    from coda_agent.evals.contest_page import write_page
    from coda_agent.evals.workloads import load_benchmark

    chosen, multiples = load_benchmark(name), _numbers(sizes)
    if not table:
        from coda_agent.agent.judge import timing
        from coda_agent.agent.judge.machine import require_idle
        from coda_agent.primitives.target import use_cache

        use_cache()
        names = [n.strip() for n in (contenders or "").split(",") if n.strip()]
        require_idle()
        run_contest(
            workspace.root, chosen, clock=timing, machine=_machine(), kernels=kernels,
            sizes=multiples, names=names, rounds=rounds, say=say,
        )  # fmt: skip
    return _written(write_page(workspace.root, chosen))


def _numerics(workspace: Workspace, *, table: bool) -> Reply:
    """Measure the error of GEMM - RMSNorm - GEMM, unless only the `table` is wanted; write it."""
    from coda_agent.evals import chain_error

    if not table:
        from coda_agent.evals.contest import require_hopper
        from coda_agent.primitives.target import use_cache

        require_hopper()
        use_cache()
        chain_error.measure(workspace.root, machine=_machine(), device="cuda")
    return _written(chain_error.write_page(workspace.root))


def _machine() -> dict[str, Any]:
    from coda_agent.agent.execution.environment import environment

    found = environment("cuda")
    gpu = {key: found["gpu"].get(key) for key in ("name", "driver_version")}
    return {"gpu": gpu, "cuda": found["cuda"], "packages": found["packages"]}


def _written(paths: list[Path]) -> Reply:
    record, *pages = paths
    document = {"record": record, "pages": pages, **json.loads(record.read_text("utf-8"))}
    return Reply(document, "\n".join(f"wrote {page}" for page in pages))
