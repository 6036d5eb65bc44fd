"""Commands that make a workspace, say what the machine has, and show what programs are made of."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from coda_agent.agent import workspace
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.options import Json
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.doctor import diagnose
from coda_agent.agent.explain import explain as explained
from coda_agent.agent.reply import Reply
from coda_agent.primitives.catalogue import entries
from coda_agent.primitives.errors import MachineError, WorkspaceError
from coda_agent.primitives.suggest import near_matches

_EXAMPLE = """an example, in that folder:
  coda-agent spec copy gemm_bias_act      # or: coda-agent spec new FILE.py:FUNCTION
  coda-agent generate gemm_bias_act"""


@reported
def init(path: Annotated[Path, typer.Argument()] = Path(), as_json: Json = False) -> Reply:
    """Make a workspace: specs/, generated/, logs/ under git."""
    made, new = workspace.init(path)
    left = workspace.commit_made(made, new)
    text = f"workspace {made.root}" + ("".join(f"\n  + {item}" for item in new) or " (unchanged)")
    text += f"\n{left}" * bool(left) + f"\n{_EXAMPLE}" * bool(new)
    return Reply({"workspace": made.root, "made": new, "left": left}, text)


@reported
def doctor(as_json: Json = False) -> Reply:
    """Say what this machine has, and what that makes possible."""
    items, level = diagnose(Path.cwd())
    rows = [
        (item.name, item.value or "missing", item.enables + (f" ({item.hint})" * (not item.value)))
        for item in items
    ]
    end = f"kernels can reach `{level}` here" if level else "nothing can be shown here"
    document = {"items": [vars(item) for item in items], "level": level}
    code = 0 if level else MachineError.exit_code
    return Reply(document, f"{columns(rows)}\n\n{end}", code)


@reported
def explain(
    target: Annotated[str, typer.Argument(metavar="SPEC|KERNEL|FILE")],
    stage: Annotated[
        Literal["graph", "program", "cute", "ptx", "sass"], typer.Option(help="What to print.")
    ] = "program",
    variant: Annotated[str | None, typer.Option(help="One variant of several.")] = None,
    as_json: Json = False,
) -> Reply:
    """Print one stage of a program on its way to the machine."""
    program, spec = targets.explainable(target)
    text = explained(spec, program, stage, variant=variant)
    return Reply({"target": target, "stage": stage, "text": text}, text.rstrip())


@reported
def primitives(
    name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False
) -> Reply:
    """List what programs are written from, or describe one."""
    known = {entry.name: entry for entry in entries()}
    if name is None:
        keys = ("name", "kind", "signature", "summary")
        document = [{key: getattr(entry, key) for key in keys} for entry in known.values()]
        return Reply(document, columns([(e.name, e.kind, e.summary) for e in known.values()]))
    if name not in known:
        raise WorkspaceError(f"no primitive named {name!r}", hint=near_matches(name, known))
    entry = known[name]
    fields = ("name", "kind", "signature", "summary", "doc")
    text = f"{entry.signature}  ({entry.kind})\n\n{entry.doc}"
    return Reply({key: getattr(entry, key) for key in fields}, text)
