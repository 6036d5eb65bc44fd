"""`coda-agent eval leaderboard`, `regrade` and `audit`: what the trial records say, renewing them,
and what a person found out about one.

- A record is stale once the judge, the toolchain or its spec is another. Its figures stay, marked.
- Regrading judges the recorded program again, offline. What was timed needs a GPU to be renewed.
"""

import functools
import gc
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coda_agent.agent.cli.report import Reply, columns, reported
from coda_agent.agent.cli.targets import Json
from coda_agent.agent.workspace import Workspace, find
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.evals.leaderboard import Stale
    from coda_agent.evals.records import TrialRecord
    from coda_agent.evals.suites import Suite

app = typer.Typer()

RecordsOption = Annotated[
    Path | None, typer.Option("--records", help="Folder; evals/results/trials of the workspace.")
]


@app.command()
@reported
def leaderboard(
    records: RecordsOption = None,
    html: Annotated[Path | None, typer.Option(help="Write one page here, programs beside.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
    as_json: Json = False,
) -> Reply:
    """Rank authors from their trial records."""
    from coda_agent.evals import leaderboard as pages
    from coda_agent.evals.records import read_records

    gc.disable()  # hundreds of thousands of objects and no garbage: it is a third of the time
    workspace, folder = _places(records)
    found = read_records(folder)
    boards = pages.boards(found.records, staleness(workspace, suites(folder)))
    written: list[Path] = []
    if html:
        page = html if html.suffix == ".html" else html / "index.html"
        written.append(
            pages.write_page(page, boards, found.problems, root=workspace.root, records=folder)
        )
    if markdown:
        written.append(pages.write_markdown(markdown, boards, found.problems))
    parts = [f"{board.title}: {board.first}\n\n{columns(board.ranking)}\n\n{columns(board.matrix)}"
             for board in boards]  # fmt: skip
    parts += [f"not counted: {problem}" for problem in found.problems]
    parts += [f"wrote {path}" for path in written]
    document = {
        "boards": [board.record() for board in boards],
        "problems": [problem._asdict() for problem in found.problems], "written": written,
    }  # fmt: skip
    return Reply(document, "\n\n".join(parts) or f"no records in {folder}")


@app.command()
@reported
def regrade(records: RecordsOption = None, as_json: Json = False) -> Reply:
    """Judge the programs of stale records again; without a GPU, timed ones stay as they are."""
    from coda_agent.agent.execution import usable_gpu
    from coda_agent.evals.records import file_name, read_records, record_path, write_record

    workspace, folder = _places(records)
    known = suites(folder)
    stale, gpu = staleness(workspace, known), usable_gpu("auto") is not None
    said: list[dict[str, str]] = []
    for record in read_records(folder).records:
        if not (why := stale(record)):
            continue
        name = file_name(record.key)
        try:
            new, outcome = _regraded(workspace, known[record.suite.digest], record, gpu)
        except CodaError as error:
            new, outcome = None, "cannot be judged"
            why = [" ".join(str(error).split())]
        if new is not None:
            place = record_path(folder, record)
            write_record(place.parent if place else folder / record.suite.name, new)
        said.append({"outcome": outcome, "record": name, "why": ", ".join(why)})
        if not as_json:
            typer.echo("{outcome}: {record} ({why})".format(**said[-1]))
    counts = Counter(one["outcome"] for one in said)
    end = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return Reply({"records": said}, end or "nothing is stale")


@app.command()
@reported
def audit(
    record: Annotated[str, typer.Argument(help="The name of a record's file.")],
    finding: Annotated[
        Literal["clean", "exploit", "leak", "harness fault"],
        typer.Argument(help="An exploit or a leak solves nothing; a harness fault is left out."),
    ],
    evidence: Annotated[str, typer.Option(help="What shows it: a line, a file, a link.")],
    records: RecordsOption = None,
    as_json: Json = False,
) -> Reply:
    """Write down what you found out about a trial; it is in its cell from then on."""
    from coda_agent.evals import pages
    from coda_agent.evals import records as kept

    _, folder = _places(records)
    known = {kept.file_name(found.key): found for found in kept.read_records(folder).records}
    name = Path(record).name
    if name not in known or not (place := kept.record_path(folder, known[name])):
        raise CodaError(f"no record {name} in {folder}", hint="the leaderboard's cells link them")
    if not evidence.strip():
        raise CodaError("--evidence is empty, expected what shows it")
    note = kept.Audit(finding=finding, evidence=evidence, date=pages.today())
    fields = {**known[name].model_dump(), "audit": note.model_dump()}
    path = kept.write_record(place.parent, kept.TrialRecord.model_validate(fields))
    return Reply({"record": path, "audit": note.model_dump()}, f"{finding}: {path}")


def suites(folder: Path) -> "dict[str, Suite]":
    """The suites beside the records, by digest; what is damaged, `read_records` names."""
    from coda_agent.evals.suites import Suite

    found: dict[str, Suite] = {}
    for path in folder.rglob("suite-*.json"):
        try:
            suite = Suite.model_validate({"title": "", **json.loads(path.read_text("utf-8"))})
        except (OSError, ValueError):
            continue
        found[suite.digest] = suite
    return found


def staleness(workspace: Workspace, known: "dict[str, Suite]") -> "Stale":
    """What says of a record which of judge, toolchain and spec is another today."""
    from coda_agent.agent.judge.provenance import digests

    @functools.cache
    def today(suite: str, spec: str) -> dict[str, str]:
        try:
            return digests(known[suite].spec(workspace, spec), "")
        except (CodaError, KeyError):
            return {}

    def stale(record: "TrialRecord") -> list[str]:
        now = today(record.suite.digest, record.spec.name)
        then = {**(record.verdict.digests if record.verdict else {}), "spec": record.spec.digest}
        keys = ("judge", "toolchain", "spec")
        return [key for key in keys if key in then and then[key] != now.get(key)]

    return stale


def _places(records: Path | None) -> tuple[Workspace, Path]:
    from coda_agent.evals.records import TRIALS

    workspace = find()
    folder = records or workspace.root / TRIALS
    if not folder.is_dir():
        raise CodaError(f"no folder {folder}", hint="coda-agent eval run writes records")
    return workspace, folder


def _regraded(
    workspace: Workspace, suite: "Suite", record: "TrialRecord", gpu: bool
) -> "tuple[TrialRecord | None, str]":
    """The record by today's judge, or None where it stays; and what came of it."""
    from coda_agent.agent.execution import executor
    from coda_agent.agent.judge import judge_candidate
    from coda_agent.evals.records import FIGURES, Judgement, Machine, SpecRef, Step, TrialRecord

    if record.program is None:
        return None, "without a program"
    spec = suite.spec(workspace, record.spec.name)
    device = "cuda" if record.machine.device == "cuda" and gpu else "cpu"
    verdict = judge_candidate(spec, record.program, executor(), device=device)
    if device != record.machine.device:
        return None, f"kept ({verdict.level or 'refused'} here; no GPU to time it)"
    judged = Judgement.of(verdict)
    steps: list[Step] = []
    if judged.passed and judged.level:
        means = {figure: judged.mean(figure) for figure in FIGURES}
        steps.append(Step(
            attempt=max(record.attempts, 1), submitted=True, level=judged.level,
            **means, **record.spent.model_dump(),
        ))  # fmt: skip
    renewed = record.model_copy(update={
        "spec": SpecRef(name=spec.name, digest=spec.digest, level=spec.level),
        "verdict": judged, "outcome": judged.level if judged.passed else "refused",
        "reason": judged.finding, "steps": tuple(steps), "machine": Machine.of(verdict),
    })  # fmt: skip
    # Through the validator: what is written must be readable.
    return TrialRecord.model_validate(renewed.model_dump()), renewed.outcome
