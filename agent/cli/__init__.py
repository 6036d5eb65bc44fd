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

from coda_agent.agent.cli.lazy import Lazy, group

_EVALS = "coda_agent.evals.cli"
"""Where evaluations have their commands: named here, since this room does not import that one."""


GROUPS = {
    "Write a kernel": [
        Lazy("basics", "init", "init my-kernels"),
        Lazy("spec", "spec", "spec ffn.py:ffn_gate --shape x=M,K --shape w=N,K"),
        Lazy("authoring", "generate", "generate ffn_gate"),
        Lazy("kernels", "check", "check mine.py --spec ffn_gate"),
        Lazy("kernels", "verify", "verify --all"),
    ],
    "Look": [
        Lazy("basics", "doctor", "doctor"),
        Lazy("show", "show", "show gemm_swiglu"),
        Lazy("basics", "explain", "explain gemm_swiglu --stage ptx"),
        Lazy("basics", "primitives", "primitives RowSum"),
    ],
    "Measure": [
        Lazy("tuning", "tune", "tune gemm_swiglu --shape 512,28672,4096"),
        Lazy("tuning", "fit", "fit --all"),
        Lazy(f"{_EVALS}.bench", "bench", 'bench --suite paper --case "gemm_rope 4096"'),
        group("eval", "Compare authors on a suite, and score the judge.",
              Lazy(f"{_EVALS}.trials", "run", "eval run --suite smoke --author composer"),
              Lazy(f"{_EVALS}.trials", "leaderboard", "eval leaderboard --html leaderboard.html"),
              Lazy(f"{_EVALS}.judge", "judge", "eval judge mutants --count 20")),
    ],
    "Ship": [
        Lazy("tuning", "warm", "warm gemm_swiglu --shape 512,28672,4096"),
        Lazy("exporting", "export", "export gemm_swiglu gemm_rmsnorm --out kernels"),
    ],
    "Agents": [
        Lazy("runs", "runs", "runs last --html run.html"),
        Lazy("authoring", "resume", "resume last --max-usd 6"),
        Lazy("runs", "replay", "replay last"),
        Lazy("runs", "tips", "tips --prune auto"),
        Lazy("authoring", "prompt", "prompt gemm_rope --cost"),
        Lazy("tool", "tool", "tool check level=interpret"),
        Lazy("authoring", "mcp", "mcp --install claude"),
        Lazy("exporting", "skill", "skill --out .claude/skills/coda-agent"),
    ],
}  # fmt: skip
"""Every command, as `--help` shows them: its module, function and example."""


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
