"""What ran a call of a fused function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent.fuse.plan import Plan

NO_PRODUCT = "no product of 16-bit matrices"


@dataclass(eq=False)
class Ran:
    """How a graph runs.

    Attributes:
        plan: Its plan; None where it has none.
        way: "the plan", "PyTorch" or "torch.compile".
        why: What PyTorch runs, and why; "" where it runs nothing that costs.
        run: What takes the graph's arguments.
        breaks: Where Dynamo could not go on after it, as a sentence; "" where it is the last.
    """

    plan: Plan | None
    way: str
    why: str
    run: Callable[[Sequence[Any]], Sequence[Any]]
    breaks: str = ""


GRAPHS: ContextVar[list[Ran] | None] = ContextVar("GRAPHS", default=None)
"""Where the graphs of a call are noted, in order."""


@dataclass
class Call:
    """A call of a fused function.

    Attributes:
        graphs: What it ran; none where Dynamo recorded nothing.
        refused: Why Dynamo was not asked, or recorded nothing.
    """

    graphs: list[Ran] = field(default_factory=list)
    refused: str = ""

    @property
    def plan(self) -> Plan | None:
        """The plan with most kernels; None where no kernel ran."""
        plans = [x.plan for x in self.graphs if x.plan and x.plan.kernels]
        return max(plans, key=lambda plan: len(plan.kernels), default=None)

    @property
    def why(self) -> str:
        """What of it was left to PyTorch, and why; "" where nothing was."""
        left = [x.why for x in self.graphs if not (self.plan and x.why == NO_PRODUCT)]
        said = self.refused, *left, *(x.breaks for x in self.graphs)
        return "; ".join(dict.fromkeys(filter(None, said)))

    @property
    def way(self) -> str:
        """What ran it; several, where Dynamo broke its graph."""
        return ", ".join(dict.fromkeys(x.way for x in self.graphs)) or "PyTorch"
