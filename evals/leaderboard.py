"""docs/leaderboard.md: authors by suites, from trials of today's specs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coda_agent.agent import authors, pages
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.authors.replay import AUTHOR as REPLAY
from coda_agent.agent.authors.replay import Replay
from coda_agent.agent.state import RunState
from coda_agent.agent.tables import Rows, cell_text, filled, markdown
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import metrics, suites
from coda_agent.evals.cells import FOLDER, period, read
from coda_agent.evals.metrics import COSTS, SCORES, by_spec
from coda_agent.evals.trials import Trial, records_of
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole

PAGE = Path("docs", "leaderboard.md")
GIVEN = "solved, given that the composer refused"
_HEAD = """# Leaderboard

Written by `coda-agent eval leaderboard` from `evals/results/trials-*.jsonl`; do not edit.

What a model adds is what it *solved, given that the composer refused*. It is solved@1 over the
specs that the composer was tried at and did not solve, and says of how many. It alone ranks. Where
the composer solved every spec, or was not tried, nobody has a rank.

Solved means the level that the suite asks for; on a CPU it means proved right by the interpreter.
Intervals are 95 %. Authors have one rank where they differ by chance at most. Costs are what all
trials took over how many solved. A trial counts as long as its spec, its suite and the gates that
decided are as they were.

*Recorded* are runs that others once did, repeated before today's judge; no model is asked. Authors
and models are as the recordings name them. They have no rank, and what they spent is not known.
"""


class Entrant(NamedTuple):
    """Who tries: a row of a table.

    Attributes:
        author: With what was withheld.
        model: Those it may ask, and how hard they think.
        recorded: Whether it worked without this program, which repeats what it did.
    """

    author: str
    model: str
    recorded: bool


Boards = Mapping[tuple[str, str], Mapping[Entrant, Sequence[Trial]]]
"""Trials by suite and device, then by who tried."""


def boards(workspace: Workspace, only: suites.Suite | None = None) -> Boards:
    """Group a workspace's trials of today's suites, specs and gates.

    Args:
        only: This suite, instead of all.
    """
    folder = workspace.root / "evals" / "suites"
    known = {name: suites.load(str(path)) for name, path in suites.paths(folder).items()}
    known |= {only.name: only} if only else {}
    digests = dict[tuple[str, str], str]()
    found: dict[tuple[str, str], dict[Entrant, list[Trial]]] = {}
    for path in sorted((workspace.root / FOLDER).glob("trials-*.jsonl")):
        if only and path != records_of(workspace.root, only.name):
            continue
        trials = [*read(path, Trial).values()]
        newest = {trial.suite: trial.suite_digest for trial in trials}  # the last one's
        for trial in trials:
            if trial.stale:
                continue
            if suite := known.get(trial.suite):
                key = trial.suite, trial.spec
                if key not in digests:
                    digests[key] = _digest(suite, workspace, trial.spec)
                if (suite.digest, digests[key]) != (trial.suite_digest, trial.spec_digest):
                    continue
            elif trial.suite_digest != newest[trial.suite]:  # it was named by its path
                continue
            board = found.setdefault((trial.suite, trial.device), {})
            board.setdefault(_entrant(trial, workspace), []).append(trial)
    return found


def _entrant(trial: Trial, workspace: Workspace) -> Entrant:
    """Name who tried and its models; a recorded one as its recording does."""
    name, models, effort, kinds = trial.author, trial.models, trial.effort, authors.kinds()
    kind, _, which = name.partition(":")
    recorded = kind == REPLAY.name or kind not in kinds
    if kind == REPLAY.name and (state := _recording(name, workspace)):
        options = state.options or {}
        models = tuple(options.get("models") or filter(None, [options.get("model")]))
        name, effort = state.author or name, str(options.get("effort", ""))
        kind, _, which = name.partition(":")
    # agent:claude names no model, and file:mine.py a program.
    if which and which not in kinds and (kind not in kinds or kinds[kind].aided):
        models = models or (which,)
    said = [f"{name}{f' ×{n}' * (n > 1)}" for name, n in Counter(models).items()]
    said += [f"effort {effort}"] if effort else []
    without = "".join(f" without {part}" for part in trial.without)
    none = "not named" if recorded else "–"
    return Entrant((kind if models else name) + without, ", ".join(said) or none, recorded)


def _recording(author: str, workspace: Workspace) -> RunState | None:
    """Read the run that a replay repeats, where the workspace has it."""
    try:
        replay = authors.make(author, authors.Options(), workspace)
    except CodaError:
        return None
    return replay.recorded if isinstance(replay, Replay) else None


def _digest(suite: suites.Suite, workspace: Workspace, spec: str) -> str:
    try:
        return suite.spec(workspace, spec).digest
    except CodaError:
        return ""


def table(found: Boards) -> Rows:
    """Tabulate each suite's authors, best first, and then its recorded runs."""
    rows: list[Sequence[object]] = [(
        "suite", "device", "author", "model", "recorded", "rank", GIVEN, "trials", *SCORES,
        "pass@k", "of GEMM", "over compile", *COSTS, "commit", "date",
    )]  # fmt: skip
    for (suite, device), board in found.items():
        left = _left(board)
        groups = {
            who: {spec: group for spec, group in by_spec(trials).items() if spec in left}
            for who, trials in board.items()
        }
        solved = SCORES["solved@1"]
        ranked = metrics.ranks({w: g for w, g in groups.items() if not w.recorded}, solved)
        for who in sorted(groups, key=lambda who: (who.recorded, ranked.get(who, 0), who)):
            score = metrics.score(groups[who], solved)
            given = f"{score} of {len(groups[who])}" if score else "–"
            rank = ranked[who] if left and not who.recorded else "–"
            about = suite, device, who.author, who.model, "yes" if who.recorded else "no"
            rows.append((*about, rank, given, *_row(who, board[who])))
    return rows


def _left(board: Mapping[Entrant, Sequence[Trial]]) -> set[str]:
    """Name the specs that the composer was tried at and did not solve."""
    tried = [t for trials in board.values() for t in trials if t.author == Composer.name]
    return {spec for spec, trials in by_spec(tried).items() if not any(t.solved for t in trials)}


def _row(who: Entrant, trials: Sequence[Trial]) -> list[str]:
    counted = [trial for trial in trials if trial.counts]
    groups, timed = by_spec(trials), any(trial.of_gemm for trial in trials)

    k = min(map(len, groups.values()), default=0)
    passing = metrics.passing(groups, k) if k > 1 else None
    scores = [str(metrics.score(groups, value) or "–") if timed or name == "solved@1" else "–"
              for name, value in SCORES.items()]  # fmt: skip
    return [
        f"{sum(t.solved for t in counted)}/{len(counted)}", *scores,
        "–" if passing is None else f"{passing:.2f} of {k}",
        cell_text(metrics.of_solved(counted, lambda t: t.of_gemm), ".3f"),
        cell_text(metrics.of_solved(counted, lambda t: t.over_compile), ".3f"),
        # A replay spends nothing of what its author did.
        *(cell_text(None if who.recorded else metrics.per_solution(counted, value), ".2f")
          for value in COSTS.values()),
        ", ".join(dict.fromkeys(trial.commit for trial in trials)),
        period(trials),
    ]  # fmt: skip


def matrix(board: Mapping[Entrant, Sequence[Trial]]) -> Rows:
    """Tabulate specs by authors: how many trials solved, and how fast."""

    def cell(who: Entrant, spec: str) -> str:
        counted = [t for t in board[who] if t.spec == spec and t.counts]
        speed = metrics.of_solved(counted, lambda t: t.of_gemm)
        solved = f"{sum(t.solved for t in counted)}/{len(counted)}"
        return solved + (f" {speed:.3f}× GEMM" if speed else "") if counted else "–"

    specs = sorted({trial.spec for trials in board.values() for trial in trials})
    heads = (who.author if who.model == "–" else f"{who.author} ({who.model})" for who in board)
    return [("spec", *heads), *((spec, *(cell(who, spec) for who in board)) for spec in specs)]


def write(root: Path, found: Boards) -> Path:
    """Write docs/leaderboard.md of a workspace."""
    names = {
        w.author.partition(" ")[0] for board in found.values() for w in board if not w.recorded
    }
    about = "\n".join(f"- *{name}*: {authors.meaning(name)}" for name in sorted(names))
    missing = sorted({*suites.paths(root / "evals" / "suites")} - {suite for suite, _ in found})
    parts = [_HEAD, markdown(filled(table(found))), "", about]
    parts += ["", f"Suites of which no trial counts: {', '.join(missing)}."] if missing else []
    path = root / PAGE
    write_whole(path, "\n".join(parts) + "\n")
    return path


def write_html(path: Path, found: Boards) -> Path:
    """Write the table, and each suite's specs by authors, as a page."""
    sections: Iterable[pages.Section] = (
        (f"{suite}, {device}", matrix(board)) for (suite, device), board in found.items()
    )
    return pages.write(path, "Leaderboard", [("Authors", filled(table(found))), *sections])
