"""The command that makes specs, and what others have of a spec."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from coda_agent import primitives
from coda_agent.agent import references
from coda_agent.agent.cli.report import reported
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import Workspace, find, packaged_specs
from coda_agent.primitives.errors import CodaError, WorkspaceError
from coda_agent.primitives.objects import text_of, write_whole
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.format import DTYPES
from coda_agent.specs.layout import extent
from coda_agent.specs.source import Example, Source, axes_of, extracted, located

_CAST = {
    "bool": "such as a mask of 0 and 1 of which the function asks `> 0`",
    "int8": "such as float8_e4m3fn, or cast it to that of the other operand before the call",
    "uint8": "such as float8_e4m3fn, or cast it to that of the other operand before the call",
}
"""Types that a user has and a kernel does not, and what to do."""
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
    # A program that a primitive is called like could not import it.
    called = name or ("gemm_" * (function.name in primitives.__all__) + function.name)
    if not called.isidentifier() or "__" in called:
        hint = "--name gives another"
        raise CodaError(f"{called!r} is no name of a spec: letters, digits and _", hint=hint)
    if called in primitives.__all__:
        raise CodaError(f"{called!r} is a primitive's name", hint=f"such as --name gemm_{called}")
    path = workspace.specs / f"{called}.md"
    check_free(path, force=force)
    text = references.drafted(function, examples_of(function, shape or []), called)
    write_whole(path, text)
    drafted = load_spec(path)
    return Reply(about(drafted), f"{path}: {line(drafted)}\nnext: coda-agent generate {called}")


def _copied(workspace: Workspace, name: str, *, force: bool) -> Reply:
    """A shipped spec in the workspace, to be changed there."""
    known = packaged_specs()
    if name not in known:
        raise WorkspaceError(f"no shipped spec {name!r}", hint=near_matches(name, known))
    path = workspace.specs / f"{name}.md"
    check_free(path, force=force)
    write_whole(path, known[name].read_text("utf-8"))
    return Reply(about(load_spec(path)), f"{path}: copied; rename it if you change it")


def check_free(path: Path, text: str | None = None, *, force: bool) -> None:
    """Raises WorkspaceError where a file is there that may not be overwritten: one that holds
    anything but `text`, if that is known."""
    same = text is not None and path.exists() and path.read_text("utf-8") == text
    if path.exists() and not (force or same):
        raise WorkspaceError(f"{path} is there already", hint="--force overwrites it")


def source_of(function: str) -> Source:
    """The function that `MODULE:FUNCTION`, `FILE.py:FUNCTION` or `-` names.

    Raises:
        CodaError: it cannot be read.
        SpecError: there is none, or it does not stand alone.
    """
    if function == "-":
        return extracted(sys.stdin.read().removeprefix("\ufeff"), "stdin")
    path, called = located(function)
    return extracted(text_of(path), str(path), called)


def examples_of(source: Source, given: list[str]) -> dict[str, Example]:
    """An example for each argument: of --shape, or of its annotation.

    Raises:
        CodaError: an option or an argument that there is no example of.
    """
    shapes: dict[str, Example] = {}
    known = [argument.name for argument in source.arguments]
    for option in given:
        name, sign, rest = option.partition("=")
        sizes, _, dtype = rest.partition(":")
        axes = axes_of(sizes)
        if not sign or (sizes.strip() and not axes) or dtype not in ("", *DTYPES):
            types = ", ".join(DTYPES)
            hint = f"expected NAME=SIZES, such as x=4096,4096 or t=4096:int64; types are {types}"
            if dtype in _CAST:
                hint = f"no kernel reads {dtype}: give {name} in another type, {_CAST[dtype]}"
            raise CodaError(f"--shape {option!r} is no example", hint=hint)
        if name not in known:
            raise CodaError(
                f"{source.name} has no argument {name!r}", hint=near_matches(name, known)
            )
        shapes[name] = Example(axes, dtype or ("T" if axes else "float32"))
    for argument in source.arguments:
        if argument.name in shapes or argument.default:
            continue
        if argument.axes is None:
            hint = f"give --shape {argument.name}=SIZES, or a default"
            message = f"{source.where}:{argument.line}: nothing says what {argument.name} is"
            raise CodaError(message, hint=hint)
        shapes[argument.name] = Example(argument.axes, argument.dtype or "T")
    return {x: shapes[x] for x in known if x in shapes}


def spec_examples(spec: Spec) -> tuple[Source, dict[str, Example]]:
    """A spec's reference as a function, with its first bench shape for an example."""
    declared, sizes = spec.declared, spec.declared.bench_shapes[0]
    binding = spec.bind()
    examples: dict[str, Example] = {}
    for name, x in declared.inputs.items():
        shape = x.shape.cases[binding[x.shape.parameter] if x.shape.parameter else ""]
        axes = tuple(extent(entry, sizes) for entry in shape)
        examples[name] = Example(axes, "T" if x.dtype in spec.types else x.dtype)
    return extracted(spec.reference_source, str(spec.path), "reference"), examples


def about(spec: Spec) -> dict[str, object]:
    """What a spec is, as a document."""
    return {
        "spec": spec.name, "path": spec.path, "summary": spec.summary, "digest": spec.digest,
        "inputs": {x: list(spec.symbolic_shape(x)) for x in spec.inputs},
        "outputs": {x: list(spec.symbolic_shape(x)) for x in spec.outputs},
    }  # fmt: skip


def line(spec: Spec) -> str:
    """What a spec is, on one line."""

    def faces(names: Iterable[str]) -> str:
        return ", ".join(f"{x} {list(spec.symbolic_shape(x))}".replace("'", "") for x in names)

    return f"{faces(spec.inputs)} -> {faces(spec.outputs)}"
