"""Commands that make kernels ready for shapes of a user's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import fitting, shapes, warming
from coda_agent.agent import tune as tuning
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.options import All, Kernels, completed, known_kernels
from coda_agent.agent.cli.report import progress, reported
from coda_agent.agent.execution import executor
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Shape
from coda_agent.runtime.loading import user_tuning
from coda_agent.specs import load_spec

ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help=f"{shapes.EXPECTED}; repeatable.")
]
ShapesOption = Annotated[
    Path | None,
    typer.Option("--shapes", metavar="FILE", help="A file of them, one a line, or a JSON list."),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--from-model",
        metavar="CONFIG",
        help="A model's config.json or its folder: the products where the kernel stands in it.",
    ),
]
RowsOption = Annotated[str, typer.Option(help="Values of M, with --from-model.")]
ROWS = "1,16,64,128,512,2048,8192"


@reported(timed=True, compiles=True)
def tune(
    kernel: Annotated[
        str,
        typer.Argument(
            help="A kernel of the workspace or of the package.",
            autocompletion=completed(known_kernels),
        ),
    ],
    shape: ShapeOption = None,
    file: ShapesOption = None,
    from_model: ModelOption = None,
    rows: RowsOption = ROWS,
    commit: Annotated[
        bool, typer.Option("--commit", help="Also into the workspace's tuned.json, and commit it.")
    ] = False,
) -> Reply:
    """Find a kernel's best tiles for your own shapes on this GPU, and keep them for its calls."""
    named = _named(shape, file, from_model, rows)
    workspace = find() if commit else None
    found = workspace.kernel(kernel) if workspace else targets.accepted(kernel)
    wanted = named(found.spec)

    with progress() as observer:

        def observe(type: str, data: JsonObject) -> None:
            if type != "gate.finished" or not data.get("passed"):  # three gates a shape
                observer(type, data)

        new_run = partial(targets.new_run, "tune", kernel)
        lines, sha = tuning.tune(found, wanted, observe, new_run=new_run, commit=workspace)
    path = user_tuning(found.folder).path
    text = [
        f"{dtype} {e['m']} x {e['n']} x {e['k']}: {TileConfig(**e['config']).label}, "
        f"{e['median_us']} us"
        for types in lines.values()
        for dtype, entries in types.items()
        for e in entries
    ]
    text += [f"kept in {path}", *([f"commit {sha}"] if sha else [])]
    return Reply({"tuned": lines, "cache": path, "commit": sha}, "\n".join(text))


@reported()
def warm(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL...", help="As for tune.", autocompletion=completed(known_kernels)
        ),
    ],
    shape: ShapeOption = None,
    file: ShapesOption = None,
    from_model: ModelOption = None,
    rows: RowsOption = ROWS,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="For calls with this block_size.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help='Such as "NVIDIA H200"; else the one here.')
    ] = None,
) -> Reply:
    """Compile ahead what calls of these shapes will run, so that a first call compiles nothing."""
    named = _named(shape, file, from_model, rows)
    found = [targets.accepted(name) for name in dict.fromkeys(kernels)]
    with progress() as observer:
        observer("gate.started", {"gate": "warm"})
        work = [warming.ahead(k, named(k.spec), gpu=gpu, block=block_size) for k in found]
        jobs, folds = ([x for part in parts for x in part] for parts in zip(*work, strict=True))
        built = warming.compiled(jobs, folds, observer)
    said = f"{built.new} compiled, {built.known} were there, in {built.folder}"
    text = "\n".join([*(f"{job}: {why}" for job, why in built.failed.items()), said])
    return Reply(vars(built), text, REFUSED if built.failed else 0)


@reported(timed=True, compiles=True)
def fit(
    kernels: Kernels = None,
    every: All = False,
    count: Annotated[int, typer.Option(min=24, help="Shapes to measure, of each kernel.")] = 120,
    shape: ShapeOption = None,
    file: ShapesOption = None,
    from_model: ModelOption = None,
    rows: RowsOption = ROWS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure what is known, too.")] = False,
) -> Reply:
    """Measure kernels over shapes on this GPU, and fit what picks their tiles elsewhere.

    Shapes of your own are measured too, and what is fastest there is then picked there.
    """
    workspace = find()
    named = _named(shape, file, from_model, rows) if shape or file or from_model else None
    chosen = targets.named(kernels, every, workspace.kernel)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        typer.echo(line)

    with progress() as observer:
        wanted = fitting.Wanted(count, named, fresh)
        path = fitting.fit_tables(workspace.generated, chosen, wanted, executor(), observer, say)
    written = f"wrote {path}; it takes effect where the package is loaded next" if path else ""
    return Reply({"table": path, "kernels": lines}, written)


def _named(
    given: list[str] | None, file: Path | None, model: Path | None, rows: str
) -> Callable[[Path], list[Shape]]:
    """Make what gives the shapes that options name, by a spec's path."""
    if not (given or file or model):
        raise CodaError("no shapes are named", hint="--shape, --shapes or --from-model")
    own = [shapes.shape(text) for text in given or []] + (shapes.in_file(file) if file else [])
    counts = shapes.numbers("--rows", rows, "positive numbers, such as 1,16,128")

    def named(spec: Path) -> list[Shape]:
        found = shapes.of_model(model, load_spec(spec), counts) if model else []
        return list(dict.fromkeys([*own, *found]))

    return named
