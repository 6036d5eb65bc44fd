"""What tests of suites share: a case at reduced size on a CPU, and the cells that come of it."""

from __future__ import annotations

from pathlib import Path

from coda_agent.evals.cases import Case, Suite
from coda_agent.evals.cells import Cell, Record, read
from coda_agent.evals.runner import UNTIMED, Bench, Choice

ROOT = Path(__file__).parents[2]


def measured(root: Path, shrink: int, *cases: Case) -> dict[tuple[str, str], Cell]:
    """The cells of cases by case and contender; nothing is timed."""
    about = Record(commit="abc1234", machine="cpu", date="2026-11-25")
    suite = Suite("layers", "", cases)  # a process of several looks for the case there
    path = Bench(root, about, "cpu", shrink).run(suite, Choice(regimes=[UNTIMED]), lambda _: None)
    return {key[:2]: cell for key, cell in read(path, Cell).items()}
