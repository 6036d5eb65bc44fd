"""The command that derives specs of a backward pass."""

from typing import Annotated

import typer

from coda_agent.agent import references
from coda_agent.agent.cli.report import reported
from coda_agent.agent.cli.targets import here
from coda_agent.agent.references import check_free
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import find, resolve_spec
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.objects import write_whole
from coda_agent.specs import load_spec

_Names = list[str] | None


@reported(compiles=True)
def derive(
    spec: Annotated[str, typer.Argument(help="A forward spec's path or name.")],
    into: Annotated[
        str, typer.Option(metavar="OUTPUT", help="The output that the next product multiplies.")
    ] = "",
    norm: Annotated[
        str,
        typer.Option(
            metavar="OUTPUT",
            help="The row mean of squares whose rsqrt scales the next product's rows.",
        ),
    ] = "",
    kept: Annotated[
        _Names, typer.Option(metavar="OUTPUT", help="An output that has no gradient.")
    ] = None,
    without: Annotated[
        _Names, typer.Option(metavar="INPUT", help="An input whose gradient is not wanted.")
    ] = None,
    choose: Annotated[
        _Names, typer.Option(metavar="NAME=VALUE", help="A static parameter; else its first value.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite specs that are there.")] = False,
) -> Reply:
    """Derive the specs of the backward pass of SPEC; they are checked against autograd."""
    from coda_agent.agent.authors.composer import Composer
    from coda_agent.agent.derive import backward as deriving
    from coda_agent.agent.derive.checking import check
    from coda_agent.agent.derive.kernel import Asked

    found, workspace = load_spec(resolve_spec(spec, here())), find()
    references.admitted(found)
    asked = Asked(into, norm, tuple(kept or ()), tuple(without or ()))
    chosen = {x: value for x, _, value in (option.partition("=") for option in choose or ())}
    derived = deriving.derive(found, asked, chosen)
    check(derived)
    says = [*derived.notes]
    paths = {name: workspace.specs / f"{name}.md" for name in derived.files}
    for name, path in paths.items():
        check_free(path, derived.files[name], force=force)
    for name, text in derived.files.items():
        write_whole(paths[name], text)
        try:
            Composer().write(load_spec(paths[name]), lambda *_: None)
            says.append(f"wrote {paths[name]}")
        except ProgramError as error:
            says.append(f"wrote {paths[name]}, which the composer leaves to an author: {error}")
    after = " && ".join(f"coda-agent generate {name}" for name in derived.files)
    text = "\n".join([*says, "", derived.code, f"next: {after}"])
    data = {
        "spec": found.name, "form": derived.kernel.form.value, "specs": list(paths.values()),
        "notes": says, "code": derived.code,
    }  # fmt: skip
    return Reply(data, text)
