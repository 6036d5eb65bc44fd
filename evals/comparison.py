"""What `eval run` and `eval ablate` say of trials, as tables for a terminal and as JSON data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coda_agent.agent import authors
from coda_agent.agent.tips import Tips
from coda_agent.agent.workbench import WITHHELD
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import metrics
from coda_agent.evals.metrics import METRICS, Difference, Groups, Interval
from coda_agent.evals.pages import Rows, tabulate
from coda_agent.evals.records import Device, TrialRecord
from coda_agent.primitives.errors import CodaError, MachineError

Tried = Mapping[str, Sequence[TrialRecord]]
"""Trials by author."""


def withheld(
    workspace: Workspace, author: str, without: Iterable[str], device: Device
) -> tuple[str, ...]:
    """What an ablation withholds from an author, sorted, each once.

    Raises:
        CodaError: nothing of that name can be withheld, or it would change nothing that the author
            sees.
    """
    parts = tuple(sorted(set(without)))
    if unknown := [part for part in parts if part not in WITHHELD]:
        raise CodaError(f"--without is {unknown[0]!r}, expected one of {', '.join(WITHHELD)}")
    if not authors.kind_of(author)[0].aided:
        message = f"{author} reads no tips, demos, profile or diagnosis"
        raise CodaError(f"{message}: an ablation would compare it with itself")
    if "profile" in parts and device == "cpu":
        raise MachineError("without a GPU there is no profile to withhold")
    if "tips" in parts and not Tips.of(workspace).all():
        raise CodaError("this workspace has no tips to withhold")
    return parts


class Compared(NamedTuple):
    """A metric of two on the specs both tried: both means, and the difference."""

    name: str
    first: Interval
    second: Interval
    difference: Difference

    def record(self) -> dict[str, Any]:
        """The difference as plain JSON data."""
        found = self.difference
        return {**found.interval._asdict(), "specs": found.specs, "apart": found.apart}


def compare(first: Groups, second: Groups) -> list[Compared]:
    """Each metric that is compared and that both have."""
    found: list[Compared] = []
    for name, value in metrics.compared().items():
        one, other = (metrics.score(groups, value) for groups in (first, second))
        difference = metrics.difference(first, second, value)
        if one and other and difference:
            found.append(Compared(name, one, other, difference))
    return found


def ablation(found: Iterable[Compared], without: str) -> Rows:
    """A line for each metric: with everything, without a part, and what the part is worth."""

    def interval(one: Compared) -> str:
        return f"{one.difference.interval.low:+.4g} to {one.difference.interval.high:+.4g}"

    return tabulate(found, {
        "metric": lambda one: one.name,
        "with": lambda one: f"{one.first.value:.4g}",
        without: lambda one: f"{one.second.value:.4g}",
        "difference": lambda one: f"{one.difference.interval.value:+.4g}",
        "95 % interval": interval,
        "": lambda one: "more than chance" if one.difference.apart else "no difference shown",
    })  # fmt: skip


def document(found: Tried, together: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """For each author: scores, means, the chances of groups that are of use `together`, trials."""
    said: dict[str, Any] = {}
    for author, records in found.items():
        groups = metrics.by_spec(records)
        means = {key: metrics.score(groups, value) for key, value in metrics.compared().items()}
        keys = {"spec", "trial", "outcome", "reason", "run", "spent"}
        said[author] = {
            "scores": {key: score and score._asdict() for key, score in _scores(groups).items()},
            "means": {key: mean and mean.value for key, mean in means.items()},
            "groups": {name: metrics.together(groups, specs) for name, specs in together.items()},
            "trials": [record.model_dump(mode="json", include=keys) for record in records],
        }
    return said


def _scores(groups: Groups) -> dict[str, Interval | None]:
    """Solved, and how fast: each with its interval where there is one."""
    found = {m.key: metrics.score(groups, m) for m in METRICS.values() if m.kind == "score"}
    most = min((len(records) for records in groups.values()), default=0)
    return found | ({f"pass@{most}": metrics.passing(groups, most)} if most > 1 else {})


def summary(found: Tried) -> Rows:
    """A line for each author."""
    groups = {author: metrics.by_spec(records) for author, records in found.items()}
    counted = {author: [r for rs in specs.values() for r in rs] for author, specs in groups.items()}

    def mean(author: str, value: metrics.Metric) -> str:
        score = metrics.score(groups[author], value)
        timed = not value.timed or any(record.cells for record in counted[author])
        return f"{score.value:.2f}" if score and timed else "–"

    return tabulate(found, {
        "author": str,
        "specs": lambda author: str(len(groups[author])),
        "trials": lambda author: str(len(counted[author])),
        "faults": lambda author: str(len(found[author]) - len(counted[author])),
        "solved@1": lambda author: str(metrics.score(groups[author], metrics.solved) or "–"),
        "roofline": lambda author: mean(author, metrics.roofline),
        "attempts": lambda author: mean(author, metrics.attempts),
        "USD": lambda author: mean(author, metrics.dollars),
        "s": lambda author: mean(author, metrics.wall_s),
    })  # fmt: skip


def chances(authors: Mapping[str, Any], together: Iterable[str]) -> Rows:
    """A line a group of kernels that are of use together: each author's chance of all of them, out
    of `document`."""
    said = {name: [about["groups"][name] for about in authors.values()] for name in together}
    rows = ((name, *("–" if c is None else f"{c:.2f}" for c in row)) for name, row in said.items())
    return [("all of", *authors), *rows]
