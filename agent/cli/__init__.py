"""The command line, `coda-agent`.

Exit codes: 0 done, 1 refused by the judge, 2 bad input, 3 the machine lacks something,
70 a fault of coda-agent, 130 interrupted.

- A command is a function of one of these modules. The module is imported when the command is run
  (`lazy.py`); torch and what else takes long is imported inside the function that needs it.
"""

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from coda_agent.agent.cli.lazy import group, lazily

_EVALS = "coda_agent.evals.cli"
"""Where evaluations have their commands: named here, since this room does not import that one."""


GROUPS = {
    "Write a kernel": [
        *lazily("basics", "init"),
        *lazily("spec", "spec"),
        *lazily("authoring", "generate"),
        *lazily("kernels", "check", "verify"),
    ],
    "Look": [
        *lazily("basics", "doctor"),
        *lazily("show", "show"),
        *lazily("basics", "explain", "primitives"),
    ],
    "Measure": [
        *lazily("tuning", "tune", "fit"),
        *lazily(f"{_EVALS}.bench", "bench"),
        group("eval", "Compare authors on a suite, and score the judge.",
              *lazily(f"{_EVALS}.trials", "run", "leaderboard"),
              *lazily(f"{_EVALS}.judge", "judge")),
    ],
    "Ship": [
        *lazily("tuning", "warm"),
        *lazily("exporting", "export"),
    ],
    "Agents": [
        *lazily("runs", "runs"),
        *lazily("authoring", "resume"),
        *lazily("runs", "replay", "tips"),
        *lazily("authoring", "prompt"),
        *lazily("tool", "tool"),
        *lazily("authoring", "mcp"),
        *lazily("exporting", "skill"),
    ],
}  # fmt: skip
"""Every command, as `--help` shows them."""


class _Root(TyperGroup):
    """Every command, by group."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = [command for some in GROUPS.values() for command in some]
        super().__init__(**settings)

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """Write the groups; typer's own panels need rich, which takes 0.1 s."""
        wide = max(len(str(name)) for name in self.commands)
        limit = formatter.width - 6 - wide
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(str(c.name).ljust(wide), c.get_short_help_str(limit)) for c in commands]
                )


app = typer.Typer(
    name="coda-agent",
    cls=_Root,
    help="Writes, judges and keeps GEMM-epilogue kernels.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # rich help costs 0.1 s and says the same
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the console script; with `--json` a misused command is a document, too."""
    if "--json" not in sys.argv:
        app()
    try:
        sys.exit(app(standalone_mode=False))  # the code of its reply
    except TyperException as error:
        from coda_agent.agent.reply import problem

        misused: Any = error
        misused.show()
        about = problem("UsageError", misused.format_message(), "see --help", misused.exit_code)
        typer.echo(json.dumps(about, indent=1))
        sys.exit(misused.exit_code)


def _version(asked: bool) -> None:
    if asked:
        from coda_agent.agent.doctor import package_version

        typer.echo(f"coda-agent {package_version('coda-agent', 'coda_agent')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    from coda_agent.agent.keys import KEYS

    KEYS.take()
