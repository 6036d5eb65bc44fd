"""The command `tool`, which does one call of an author's tool."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import prompt
from coda_agent.agent.cli.options import DeviceOption, NoCommit, completed, known_specs
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.reply import Reply
from coda_agent.agent.session import Call, perform
from coda_agent.agent.workbench import TOOLS
from coda_agent.agent.workspace import find
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of
from coda_agent.primitives.suggest import near_matches

_TEXTS = {"write_candidate", "edit_candidate"}
"""The tools whose help has the rules of the language."""


@reported(timed=True, compiles=True)
def tool(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A tool; none lists them.", is_eager=True)
    ] = None,
    given: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="@FILE reads a value.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run to go on with; else the open one.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(help="Start a run for this spec.", autocompletion=completed(known_specs)),
    ] = None,
    author: Annotated[
        str, typer.Option(envvar="CODA_AGENT_AUTHOR", help="Who a new run says wrote it.")
    ] = "cli",
    device: DeviceOption = "auto",
    no_commit: NoCommit = False,
    help: Annotated[
        bool, typer.Option("--help", help="Show this, or after a tool's name what it takes.")
    ] = False,
) -> Reply:
    """Work at a run's bench: call one of an author's tools."""
    if help:
        return _described(name) if name else Reply(None, context.get_help())
    if name is None:
        return _listed()
    if run is not None and spec is not None:
        raise CodaError("--run goes on with a run and --spec starts one: name one of them")
    texts, words = read(given or [])
    arguments = texts | typed(name, words)
    call = Call(name, arguments, run, spec, author, device, not no_commit)
    return perform(find(), call, lambda *_: None)


def read(given: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split KEY=VALUE into texts of files, after @, and words."""
    texts: dict[str, str] = {}
    words: dict[str, str] = {}
    for word in given:
        key, sign, value = word.partition("=")
        if not sign:
            raise CodaError(f"{word!r} is not KEY=VALUE", hint="text=@kernel.py reads a file")
        if value.startswith("@@"):
            texts[key] = value[1:]
        elif value.startswith("@"):
            texts[key] = text_of(Path(value[1:]), "@@ stands for an @ that begins a text")
        else:
            words[key] = value
    return texts, words


def typed(name: str, words: dict[str, str]) -> JsonObject:
    """Convert words to the types that a tool's schema has.

    Raises:
        CodaError: a word is no JSON where JSON is due.
    """
    fields = TOOLS[name].schema()["properties"] if name in TOOLS else {}
    values: JsonObject = {}
    for key, value in words.items():
        if fields.get(key, {}).get("type") != "string" and value[:1] in ("[", "{"):
            try:
                values[key] = json.loads(value)
            except ValueError as error:
                raise CodaError(f"{key} is not JSON: {error}") from error
        else:
            values[key] = value
    return values


def _listed() -> Reply:
    document = [
        {"name": t.name, "description": t.description, "input": t.schema()} for t in TOOLS.values()
    ]
    rows = [(t.name, " ".join(t.schema()["properties"]), t.description) for t in TOOLS.values()]
    return Reply(document, columns(rows))


def _described(name: str) -> Reply:
    """Say what a tool takes."""
    if name not in TOOLS:
        raise CodaError(f"no tool named {name!r}", hint=near_matches(name, TOOLS))
    tool = TOOLS[name]
    schema = tool.schema()
    needed = schema.get("required", ())
    rows = [
        (f"  {key}", _values(field) + ", optional" * (key not in needed), field["description"])
        for key, field in schema["properties"].items()
    ]
    said = f"{name}: {tool.description}"
    said += f"\n\nInput, as KEY=VALUE:\n{columns(rows)}" * bool(rows)
    if name in _TEXTS:
        said += f"\n\nThe language of a candidate:\n{prompt.language()}"
    document = {"name": name, "description": tool.description, "input": schema}
    return Reply(document, said)


def _values(field: JsonObject) -> str:
    """Say what a field of a schema takes, in a few words."""
    if "enum" in field:
        return "|".join(map(str, field["enum"]))
    return "a,b,..." if field["type"] == "array" else field["type"]
