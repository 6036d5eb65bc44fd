"""A plan as a page: its picture, the rules that fired, and what each step moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.evals import pages, svg

if TYPE_CHECKING:
    from coda_agent.agent.plans.show import Cost, Shown

_LETTERS = 18
"""Of a step's name in its box; the table has all of it."""


def write(path: Path, name: str, plan: Shown) -> Path:
    """Write the page of a function's plan, one file that loads nothing.

    Raises:
        OSError: it cannot be written there.
    """

    def box(at: int) -> svg.Box:
        cost = plan.steps[at]
        label = cost.step if len(cost.step) <= _LETTERS else f"{cost.step[: _LETTERS - 1]}…"
        kind = "op" if cost.what.startswith(("PyTorch", "tail")) else "out"
        return kind, label, f"{cost.bytes / 1e6:.1f} MB, {cost.floor_us:.1f} µs"

    parents = {at: cost.takes for at, cost in enumerate(plan.steps)}
    rows: pages.Rows = [("step", "moves", "launches", "at least", "what it is")]
    total = plan.total()
    rows += [_row(cost) for cost in (*plan.steps, total, plan.eager)]
    text = pages.render(
        "plan.html", name=name, plan=plan, rows=rows, total=total,
        picture=svg.steps(f"Plan of {name}", parents, box) if parents else "",
        fired=[("rule", "where", "why")]
        + [(note.rule, note.where, note.why) for note in plan.notes if note.fired],
    )  # fmt: skip
    path.write_text(text, "utf-8")
    return path


def _row(cost: Cost) -> tuple[object, ...]:
    moves, floor = f"{cost.bytes / 1e6:.1f} MB", f"{cost.floor_us:.1f} µs"
    return cost.step, moves, cost.launches, floor, cost.what
