"""`coda-agent eval leaderboard`, `enter`, `regrade`, `scaling` and `audit`: what the trial records
say, adding an agent's run to them, renewing them, summing them up, and what a person found out."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from coda_agent.agent import runs as past
from coda_agent.agent.cli.options import RunName
from coda_agent.agent.cli.report import columns, quiet, reported
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import Workspace, find
from coda_agent.evals import definitions, entries, pages, record_files, regrading, staleness
from coda_agent.evals import leaderboard as boarding
from coda_agent.evals import leaderboard_page as paging
from coda_agent.evals import scaling as evaluations
from coda_agent.evals.records import Audit
from coda_agent.primitives.errors import CodaError

RecordsOption = Annotated[
    Path | None, typer.Option("--records", help="Folder; evals/results/trials of the workspace.")
]


@reported()
def leaderboard(
    records: RecordsOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the pages here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
    publish: Annotated[
        bool, typer.Option("--publish", help="Pack the workspace's records into evals/archive/.")
    ] = False,
) -> Reply:
    """Rank authors from their trial records."""
    gc.disable()  # hundreds of thousands of objects and no garbage: it is a third of the time
    workspace, folder = _places(records)
    found = record_files.read_records(folder)
    stale = staleness.of_trials(workspace, definitions.beside(folder))
    boards = boarding.boards(found.records, stale)
    titles = definitions.titles(workspace.root / "evals" / "suites")
    overview = paging.Overview(boards, titles)
    written: list[Path] = []
    if html:
        page = html if html.suffix == ".html" else html / "index.html"
        written.append(paging.write_page(page, overview, found.problems, root=workspace.root))
    if markdown:
        written.append(paging.write_markdown(markdown, overview, found.problems))
    if publish:
        written.append(record_files.publish(workspace.root))
    parts = [columns(overview.matrix)] if boards else []
    parts += [f"{board.title}: {board.first}\n\n{columns(board.ranking)}\n\n{columns(board.matrix)}"
             for board in boards]  # fmt: skip
    parts += [f"not counted: {problem}" for problem in found.problems]
    parts += [f"wrote {path}" for path in written]
    document = {
        "overview": overview.record(), "boards": [board.record() for board in boards],
        "problems": [problem._asdict() for problem in found.problems], "written": written,
    }  # fmt: skip
    return Reply(document, "\n\n".join(parts) or f"no records in {folder}")


@reported()
def enter(
    run: RunName,
    suite: Annotated[str, typer.Option(help="smoke, paper, catalogue, blocks, a path.")],
    records: RecordsOption = None,
) -> Reply:
    """Enter an agent's run at the tools (tool, mcp) in a suite, as its next trial of that spec."""
    workspace = find()
    definition = definitions.load(suite, workspace.root / "evals" / "suites")
    folder = (records or record_files.trials_folder(workspace.root)) / definition.name
    made, path = entries.enter(workspace, definition, past.find(workspace, run), folder)
    said = f"{made.author} {made.spec.name} {made.trial}: {made.outcome} after {made.attempts}"
    document = {"record": path, **made.model_dump(mode="json", include={"outcome", "spent"})}
    return Reply(document, f"{said} attempts, {made.spent.received} characters ({path})")


@reported()
def regrade(records: RecordsOption = None) -> Reply:
    """Judge the programs of stale records again; without a GPU, timed ones stay as they are."""
    found: list[regrading.Regraded] = []
    for one in regrading.regrade(*_places(records)):
        found.append(one)
        if not quiet():
            typer.echo(f"{one.outcome}: {one.record} ({one.why})")
    counts = Counter(one.outcome for one in found)
    end = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return Reply({"records": [one._asdict() for one in found]}, end or "nothing is stale")


@reported()
def scaling() -> Reply:
    """Sum up trials that were run on one GPU of a host and on all: evals/results/scaling/."""
    summary, packed = evaluations.summarise(find().root)
    found = json.loads(summary.read_text("utf-8"))
    rows = [(f"{key} GPUs", f"{run['trials']} trials", f"{run['seconds']:.1f} s")
            for key, run in found["cells"].items()]  # fmt: skip
    return Reply({**found, "written": [summary, packed]}, columns(rows))


@reported()
def audit(
    record: Annotated[str, typer.Argument(help="The name of a record's file.")],
    finding: Annotated[
        Literal["clean", "exploit", "leak", "harness fault"],
        typer.Argument(help="An exploit or a leak solves nothing; a harness fault is left out."),
    ],
    evidence: Annotated[str, typer.Option(help="What shows it: a line, a file, a link.")],
    records: RecordsOption = None,
) -> Reply:
    """Write down what you found out about a trial; it is in its cell from then on."""
    _, folder = _places(records)
    known = {
        record_files.file_name(found.key): found
        for found in record_files.read_records(folder).records
    }
    name = Path(record).name
    if name not in known:
        raise CodaError(f"no record {name} in {folder}", hint="the leaderboard's cells link them")
    if not evidence.strip():
        raise CodaError("--evidence is empty, expected what shows it")
    note = Audit(finding=finding, evidence=evidence, date=pages.today())
    path = record_files.replace_record(folder, known[name], audit=note)
    return Reply({"record": path, "audit": note.model_dump()}, f"{finding}: {path}")


def _places(records: Path | None) -> tuple[Workspace, Path]:
    workspace = find()
    folder = records or record_files.trials_folder(workspace.root)
    if not folder.is_dir():
        raise CodaError(f"no folder {folder}", hint="coda-agent eval run writes records")
    return workspace, folder
