"""The command that makes specs, and what others have of a spec."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from coda_agent.agent import references
from coda_agent.agent.cli.options import completed
from coda_agent.agent.cli.report import reported, waiting
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import Workspace, find, packaged_specs
from coda_agent.primitives.errors import CodaError, WorkspaceError
from coda_agent.primitives.objects import text_of, write_whole
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.layout import extent
from coda_agent.specs.source import Example, Source, extracted, located

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SIZES[:TYPE]",
        help="An argument's sizes or dims, such as x=4096,4096 or x=M,K or t=4096:int64;"
        " x= for a number.",
    ),
]


@reported(compiles=True)
def spec(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION|NAME",
            help="MODULE:FUNCTION, FILE.py:FUNCTION or - for stdin; or the name of a shipped spec.",
            autocompletion=completed(packaged_specs, files=True),
        ),
    ],
    shape: Shapes = None,
    name: Annotated[str | None, typer.Option(help="The spec's; else the function's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a spec that is there.")] = False,
) -> Reply:
    """Draft a spec from a PyTorch function and its shapes, or copy a shipped one."""
    workspace = find()
    if source != "-" and ":" not in source:
        if shape or name:
            raise CodaError("--shape and --name are of a function", hint="FILE.py:FUNCTION is one")
        return _copied(workspace, source, force=force)
    function = source_of(source)
    with waiting(f"spec of {function.name}"):
        path = references.new_spec(workspace.specs, function, shape or [], name, force=force)
    drafted = load_spec(path)
    named = f"a primitive is called {function.name}: --name gives another than {path.stem}\n"
    said = f"{path}: {line(drafted)}\n" + named * (not name and path.stem != function.name)
    return Reply(about(drafted), f"{said}next: coda-agent generate {path.stem}")


def _copied(workspace: Workspace, name: str, *, force: bool) -> Reply:
    """Copy a shipped spec into the workspace, to be changed there."""
    known = packaged_specs()
    if name not in known:
        raise WorkspaceError(f"no shipped spec {name!r}", hint=near_matches(name, known))
    path = workspace.specs / f"{name}.md"
    references.check_free(path, force=force)
    write_whole(path, known[name].read_text("utf-8"))
    return Reply(about(load_spec(path)), f"{path}: copied; rename it if you change it")


def source_of(function: str) -> Source:
    """Read the function that `MODULE:FUNCTION`, `FILE.py:FUNCTION` or `-` names.

    Raises:
        CodaError: it cannot be read.
        SpecError: there is none, or it does not stand alone.
    """
    if function == "-":
        return extracted(sys.stdin.read().removeprefix("\ufeff"), "stdin")
    path, called = located(function)
    return extracted(text_of(path), str(path), called)


def spec_examples(spec: Spec) -> tuple[Source, dict[str, Example]]:
    """Read a spec's reference as a function, with examples of its arguments."""
    sizes, examples = spec.declared.bench_shapes[0], dict[str, Example]()
    for name, x in spec.declared.inputs.items():
        axes = tuple(extent(entry, sizes) for entry in _shape(spec, name))
        examples[name] = Example(axes, "T" if x.dtype in spec.types else x.dtype)
    return extracted(spec.reference_source, str(spec.path), "reference"), examples


def about(spec: Spec) -> dict[str, object]:
    """Describe a spec as a document."""
    return {
        "spec": spec.name, "path": spec.path, "summary": spec.summary, "digest": spec.digest,
        "inputs": {x: _shape(spec, x) for x in spec.declared.inputs},
        "outputs": {x: _shape(spec, x) for x in spec.declared.outputs},
    }  # fmt: skip


def line(spec: Spec) -> str:
    """Describe a spec on one line, as a kernel of it is called."""

    def faces(names: Iterable[str]) -> str:
        return ", ".join(f"{x} {_shape(spec, x)}".replace("'", "") for x in names)

    return f"{faces(spec.declared.inputs)} -> {faces(spec.declared.outputs)}"


def _shape(spec: Spec, name: str) -> list[str | int]:
    """Find a tensor's shape as the spec declares it."""
    declared = {**spec.declared.inputs, **spec.declared.outputs}[name].shape
    return [*declared.cases[spec.bind()[declared.parameter] if declared.parameter else ""]]
