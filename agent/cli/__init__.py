"""The command line, `coda-agent`.

Exit codes: 0 done, 1 refused by the judge, 2 bad input, 3 the machine lacks something,
70 a fault of coda-agent, 130 interrupted.

- A command is a function of one of these modules. The module is imported when the command is run
  (`lazy.py`); torch and what else takes long is imported inside the function that needs it.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coda_agent.agent.cli.lazy import group, lazily

_EVALS = "coda_agent.evals.cli"
"""Where evaluations have their commands: named here, since this room does not import that one."""


class _Root(TyperGroup):
    """Every command, in the order of `--help`."""

    def __init__(self, **settings: Any) -> None:
        scoring = "Score the judge: what it kills, passes and says."
        scores = "mutants", "diagnosis", "by_hand", "corpus", "generated", "plans", "timing"
        settings["commands"] = [
            *lazily("basics", "init", "doctor"),
            group("spec", "Draft a spec from a function, check one, copy a shipped one.",
                  *lazily("spec", "new", "check", "copy")),
            *lazily("kernels", "check"),
            *lazily("derive", "derive"),
            *lazily("tuning", "tune", "fit", "warm"),
            *lazily(f"{_EVALS}.bench", "bench"),
            *lazily("exporting", "export"),
            *lazily("kernels", "verify", "list_", "show"),
            *lazily("basics", "explain", "primitives"),
            *lazily("authoring", "generate", "resume"),
            *lazily("runs", "replay", "runs"),
            *lazily("authoring", "prompt"),
            *lazily("tool", "tool"),
            *lazily("authoring", "mcp"),
            *lazily("skill", "skill"),
            *lazily("runs", "tips"),
            group("run", "One run.", *lazily("runs", "show")),
            group("eval", "Compare authors on a suite.",
                  *lazily(f"{_EVALS}.trials", "run", "leaderboard")),
            *lazily("review", "review"),
            group("score-judge", scoring, *lazily(f"{_EVALS}.judge", *scores),
                  no_args_is_help=False),
        ]  # fmt: skip
        super().__init__(**settings)


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
    """The console script."""
    app()


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
