"""docs/leaderboard.md: authors by suites, from trials of today's specs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coda_agent.agent import authors, pages
from coda_agent.agent.authors.replay import AUTHOR as REPLAY
from coda_agent.agent.tables import Rows, markdown
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import metrics, suites
from coda_agent.evals.cells import FOLDER, read
from coda_agent.evals.metrics import COSTS, SCORES, by_spec
from coda_agent.evals.trials import Trial
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole

PAGE = Path("docs", "leaderboard.md")
_HEAD = """# Leaderboard

Written by `coda-agent eval leaderboard` from `evals/results/trials-*.jsonl`; do not edit.

Solved means the level that the suite asks for; on a CPU it means proved right by the interpreter.
Intervals are 95 %. Authors have one rank where what they solve differs by chance at most. Costs are
what all trials took over how many solved. A trial counts as long as its spec, its suite and
the gates that decided are as they were. Recorded runs are one author, `replay`.
"""
Boards = Mapping[tuple[str, str], Mapping[str, Sequence[Trial]]]
"""Trials by suite and device, then by author."""


def boards(workspace: Workspace) -> Boards:
    """Group a workspace's trials of today's suites, specs and gates."""
    folder = workspace.root / "evals" / "suites"
    known = {name: suites.load(str(path)) for name, path in suites.paths(folder).items()}
    digests = dict[tuple[str, str], str]()
    found: dict[tuple[str, str], dict[str, list[Trial]]] = {}
    for path in sorted((workspace.root / FOLDER).glob("trials-*.jsonl")):
        for trial in read(path, Trial).values():
            if trial.stale:
                continue
            if suite := known.get(trial.suite):
                key = trial.suite, trial.spec
                if key not in digests:
                    digests[key] = _digest(suite, workspace, trial.spec)
                if (suite.digest, digests[key]) != (trial.suite_digest, trial.spec_digest):
                    continue
            # Each recorded run is of one spec; together they are one author.
            replayed = trial.author.startswith(f"{REPLAY.name}:")
            author = REPLAY.name if replayed else trial.author
            author += "".join(f" without {part}" for part in trial.without)
            found.setdefault((trial.suite, trial.device), {}).setdefault(author, []).append(trial)
    return found


def _digest(suite: suites.Suite, workspace: Workspace, spec: str) -> str:
    try:
        return suite.spec(workspace, spec).digest
    except CodaError:
        return ""


def table(found: Boards) -> Rows:
    """Tabulate the authors of each suite, best first."""
    rows: list[Sequence[object]] = [(
        "suite", "device", "author", "rank", "trials", *SCORES, "pass@k", "of GEMM",
        "over compile", *COSTS, "commit", "date",
    )]  # fmt: skip
    for (suite, device), trials in found.items():
        groups = {author: by_spec(records) for author, records in trials.items()}
        ranked = metrics.ranks(groups, SCORES["solved@1"])
        for author in sorted(trials, key=lambda author: (ranked[author], author)):
            rows.append((suite, device, author, ranked[author], *_row(trials[author])))
    return rows


def _row(trials: Sequence[Trial]) -> list[str]:
    counted = [trial for trial in trials if trial.counts]
    groups, timed = by_spec(trials), any(trial.of_gemm for trial in trials)

    def shown(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None else f"{value:{form}}"

    k = min(map(len, groups.values()), default=0)
    passing = metrics.passing(groups, k) if k > 1 else None
    scores = [str(metrics.score(groups, value) or "–") if timed or name == "solved@1" else "–"
              for name, value in SCORES.items()]  # fmt: skip
    days = sorted({trial.date for trial in trials})
    return [
        f"{sum(t.solved for t in counted)}/{len(counted)}", *scores,
        "–" if passing is None else f"{passing:.2f} of {k}",
        shown(metrics.of_solved(counted, lambda t: t.of_gemm), ".3f"),
        shown(metrics.of_solved(counted, lambda t: t.over_compile), ".3f"),
        *(shown(metrics.per_solution(counted, value)) for value in COSTS.values()),
        ", ".join(dict.fromkeys(trial.commit for trial in trials)),
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    ]  # fmt: skip


def matrix(trials: Mapping[str, Sequence[Trial]]) -> Rows:
    """Tabulate specs by authors: how many trials solved, and how fast."""

    def cell(author: str, spec: str) -> str:
        counted = [t for t in trials[author] if t.spec == spec and t.counts]
        speed = metrics.of_solved(counted, lambda t: t.of_gemm)
        solved = f"{sum(t.solved for t in counted)}/{len(counted)}"
        return solved + (f" {speed:.3f}× GEMM" if speed else "") if counted else "–"

    specs = sorted({trial.spec for records in trials.values() for trial in records})
    return [("spec", *trials), *((spec, *(cell(a, spec) for a in trials)) for spec in specs)]


def write(root: Path, found: Boards) -> Path:
    """Write docs/leaderboard.md of a workspace."""
    names = dict.fromkeys(a.partition(" without ")[0] for trials in found.values() for a in trials)
    about = "\n".join(f"- *{name}*: {authors.meaning(name)}" for name in names)
    path = root / PAGE
    write_whole(path, "\n".join([_HEAD, markdown(table(found)), "", about]) + "\n")
    return path


def write_html(path: Path, found: Boards) -> Path:
    """Write the table, and each suite's specs by authors, as a page."""
    sections: Iterable[pages.Section] = (
        (f"{suite}, {device}", matrix(trials)) for (suite, device), trials in found.items()
    )
    return pages.write(path, "Leaderboard", [("Authors", table(found)), *sections])
