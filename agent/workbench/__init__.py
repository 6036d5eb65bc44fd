"""The workbench: all that an author of a kernel can do.

`TOOLS` has every tool, in the order that an author is shown them. A tool refuses with a sentence;
whatever else it raises is a fault of ours and ends the run.
"""

from collections.abc import Sequence

from coda_agent.agent.log import RunLog
from coda_agent.agent.workbench import candidates, endings, lookups, measures
from coda_agent.agent.workbench.registry import Result, Tool, ToolError, registry
from coda_agent.agent.workbench.session import NEXT, Proposal, Work, Workbench
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.specs import Spec

__all__ = [
    "NEXT", "TOOLS", "WITHHELD", "Proposal", "Result", "Tool", "ToolError", "Work", "Workbench",
    "open_bench", "shown",
]  # fmt: skip

TOOLS = registry(lookups, candidates, measures, endings)

WITHHELD: dict[str, tuple[str, ...]] = {
    "tips": ("search_tips",),
    "demos": ("list_demos", "read_demo"),
    "profile": ("profile",),
    "diagnosis": ("evaluate", "read_artifact"),
}
"""What an ablation may withhold from an author, with the tools that go with it."""


def shown(withheld: Sequence[str] = ()) -> dict[str, Tool]:
    """List the tools without those that go with what is withheld."""
    hidden = {name for part in withheld for name in WITHHELD[part]}
    return {name: tool for name, tool in TOOLS.items() if name not in hidden}


def open_bench(workspace: Workspace, run: Run, spec: Spec, log: RunLog) -> Workbench:
    """Make a run's workbench, with the tools its author is shown."""
    return Workbench(workspace, run, spec, log, shown(log.state.withheld))
