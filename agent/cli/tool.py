"""The command `tool`, which has the workspace's bench carry out one call of an author's tool.

It imports as little as it can: an agent waits for it at every call.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from coda_agent.agent.bench.client import VARIABLE, Bench
from coda_agent.agent.cli.options import DeviceOption, NoCommit
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.keys import KEYS
from coda_agent.agent.reply import Reply
from coda_agent.agent.rooms import above
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of
from coda_agent.primitives.suggest import near_matches

_TEXTS = {"write_candidate", "edit_candidate"}
"""The tools whose help has the rules of the language."""


@reported("contended", compiles=True)
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
    spec: Annotated[str | None, typer.Option(help="Start a run for this spec.")] = None,
    author: Annotated[
        str, typer.Option(envvar="CODA_AGENT_AUTHOR", help="Who a new run says wrote it.")
    ] = "cli",
    device: DeviceOption = "auto",
    no_commit: NoCommit = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the workspace's bench.")] = False,
    help: Annotated[
        bool, typer.Option("--help", help="Show this, or after a tool's name what it takes.")
    ] = False,
) -> Reply:
    """Work at a run's bench: call one of an author's tools."""
    root = above(Path.cwd())
    if stop:
        ended = root is not None and Bench(root, _notice).stop()
        return Reply({"stopped": ended}, "the bench has ended" if ended else "there is no bench")
    if help:
        return _described(name) if name else Reply(None, context.get_help())
    if name is None:
        return _listed()
    if run is not None and spec is not None:
        raise CodaError("--run goes on with a run and --spec starts one: name one of them")
    texts, words = read(given or [])
    asked = {
        "tool": name, "given": texts, "words": words, "run": run, "spec": spec, "author": author,
        "device": device, "commit": not no_commit, "folder": str(Path.cwd()),
    }  # fmt: skip
    if root is None or os.environ.get(VARIABLE) == "off":
        from coda_agent.agent.bench.desk import here

        return here(asked, lambda *_: None)
    if any(KEYS.redacted(text) != text for text in (*texts.values(), *words.values())):
        raise CodaError("the input holds a key of yours; keys are not sent")
    reply = Bench(root, _notice).call(asked)
    if printed := reply.pop("printed"):
        typer.echo(printed, nl=False, err=True)
    return Reply(**reply)


def _notice(line: str) -> None:
    typer.echo(line, err=True)


def read(given: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """KEY=VALUE as texts of files, whose name follows an @ (@@ is an @ itself), and as words."""
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


def _listed() -> Reply:
    from coda_agent.agent.workbench import TOOLS

    document = [
        {"name": t.name, "description": t.description, "input": t.schema()} for t in TOOLS.values()
    ]
    rows = [(t.name, " ".join(t.schema()["properties"]), t.description) for t in TOOLS.values()]
    return Reply(document, columns(rows))


def _described(name: str) -> Reply:
    """What a tool takes."""
    from coda_agent.agent import prompt
    from coda_agent.agent.workbench import TOOLS

    if name not in TOOLS:
        raise CodaError(f"no tool named {name!r}", hint=near_matches(name, TOOLS))
    tool = TOOLS[name]
    schema = tool.schema()
    rows = [
        (f"  {key}", _values(field), field.get("description", ""))
        for key, field in schema["properties"].items()
    ]
    said = f"{name}: {tool.description}"
    said += f"\n\nInput, as KEY=VALUE:\n{columns(rows)}" * bool(rows)
    if name in _TEXTS:
        said += f"\n\nThe language of a candidate:\n{prompt.language()}"
    document = {"name": name, "description": tool.description, "input": schema}
    return Reply(document, said)


def _values(field: dict[str, Any]) -> str:
    """What a field of a schema takes, in a few words."""
    if "anyOf" in field:
        kinds = [_values(choice) for choice in field["anyOf"] if choice.get("type") != "null"]
    elif "enum" in field:
        kinds = [str(value) for value in field["enum"]]
    else:
        kinds = ["a,b,..." if field["type"] == "array" else field["type"]]
    return "|".join(kinds) + ", optional" * ("default" in field)
