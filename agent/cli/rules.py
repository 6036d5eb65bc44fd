"""`coda-agent rules`: the versions of what decides a verdict; for who changes the judge."""

from typing import Annotated

import typer

from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.judge import rules
from coda_agent.agent.reply import Reply

app = typer.Typer(invoke_without_command=True)

Rules = Annotated[list[str], typer.Argument(metavar="RULE...")]
Why = Annotated[str, typer.Option(help="The reason; it stays in the lock.")]


@app.callback()
def _root(context: typer.Context) -> None:
    """Say which version each rule has, and which sources say other than the lock."""
    if context.invoked_subcommand is None:
        show()


@app.command()
@reported()
def show() -> Reply:
    """The versions, and what differs from the lock."""
    differing, locked = rules.differing(), rules.lock()
    rows = [("rule", "version", "sources", "why"), *(
        (name, entry.version, "differ" if name in differing else "as locked",
         "; ".join([entry.why, *(f"same: {why}" for why in entry.same)]))
        for name, entry in locked.items()
    )]  # fmt: skip
    entries = {name: entry.model_dump() for name, entry in locked.items()}
    document = {"rules": entries, "differing": differing}
    return Reply(document, columns(rows), int(bool(differing)))


@app.command("raise")
@reported()
def raise_(names: Rules, why: Why) -> Reply:
    """The meaning of rules changed: verdicts by them have to be given again."""
    locked = rules.raise_versions(names, why)
    return _changed(names, {name: locked[name].version for name in names})


@app.command()
@reported()
def same(names: Rules, why: Why) -> Reply:
    """Rules are worded otherwise and mean the same; the judge's scores then have to confirm it."""
    locked = rules.declare_same(names, why)
    return _changed(names, {name: locked[name].version for name in names})


def _changed(names: list[str], versions: dict[str, int]) -> Reply:
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Reply({"rules": versions}, f"locked: {said}")
