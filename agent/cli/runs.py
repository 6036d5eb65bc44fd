"""Commands on past runs, and on what they taught."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from coda_agent.agent import inspect_log, pages, pipeline, run_page
from coda_agent.agent import runs as past
from coda_agent.agent.authors.replay import Replay
from coda_agent.agent.cli.options import RUN, DeviceOption, RunName
from coda_agent.agent.cli.report import columns, progress, quiet, reported
from coda_agent.agent.plain import dollars
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.tips import Tips
from coda_agent.agent.workspace import Run, find, resolve_spec
from coda_agent.primitives.errors import CodaError


@reported(timed=True, compiles=True)
def replay(
    run: RunName,
    device: DeviceOption = "auto",
    commit: Annotated[bool, typer.Option("--commit", help="Accept what passes.")] = False,
) -> Reply:
    """Repeat a recorded author's calls before today's judge; no network."""
    workspace = find()
    found = past.find(workspace, run)
    recorded = found.folder / "spec.md"
    who = Replay(past.events_of(found))
    path = recorded if recorded.is_file() else resolve_spec(str(past.state(found).spec), workspace)
    with progress() as observer:
        outcome = pipeline.generate(workspace, path, who, observer, device=device, commit=commit)
    document = {**outcome.record(), "differences": who.differences, "skipped": who.skipped}
    lines = [f"differs: {line}" for line in who.differences]
    lines += [f"not possible here: {line}" for line in who.skipped]
    lines.append(f"{len(who.differences)} differences ({outcome.run})")
    return Reply(document, "\n".join(lines), REFUSED if who.differences else 0)


@reported()
def runs(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=f"{RUN} None lists all.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of RUN there, instead.")
    ] = None,
    format: Annotated[
        Literal["inspect"] | None, typer.Option(help="Write RUN as a log of inspect_ai, instead.")
    ] = None,
) -> Reply:
    """List the runs, or show one: what was tried, what the judge said, what it cost."""
    workspace = find()
    if run:
        return _one(past.find(workspace, run), html, format)
    if html or format:
        hint = "such as coda-agent runs last --html FILE"
        raise CodaError("--html and --format are of one run", hint=hint)
    states = [(run, past.state(run)) for run in past.everything(workspace)]
    found = [(run, about, past.outcome(run, about)) for run, about in states]
    rows = [
        (r.id, s.author or "-", ended, s.level or s.reason or s.error or "", dollars(s.spent.usd))
        for r, s, ended in found
    ]  # fmt: skip
    head = ("run", "author", "outcome", "level, or why", "cost")
    document = [{"run": r.id, **s.record(), "outcome": ended} for r, s, ended in found]
    return Reply(document, columns([head, *rows]) if rows else "no runs yet")


def _one(found: Run, html: Path | None, format: str | None) -> Reply:
    """Show a run; its events where one document is asked for."""
    from rich.console import Console

    events = past.events_of(found)
    if quiet():
        return Reply([event.line() for event in events])
    if format:
        path = inspect_log.write(found, events)
        return Reply(None, f"wrote {path}; inspect view --log-dir {path.parent} opens it")
    if html:
        pages.write(html, found.id, [*run_page.sections(events)])
        return Reply(None, f"wrote {html}")
    Console().print(past.timeline(found, events))
    return Reply(None)


@reported()
def tips(
    prune: Annotated[
        list[str] | None, typer.Option(help='A tip to remove; "auto": those that did not help.')
    ] = None,
) -> Reply:
    """List what earlier runs taught, with its worth: shown against held back."""
    store = Tips.of(find())
    if prune:
        gone = store.prune(None if prune == ["auto"] else prune)
        return Reply([tip.id for tip in gone], "\n".join(f"removed {t.line()}" for t in gone))
    known = sorted(store.all().values(), key=lambda tip: (-tip.worth, tip.id))
    rows: list[tuple[str, ...]] = [("tip", "shown", "solved", "held back", "solved", "p", "text")]
    for tip in known:
        p = tip.p_value()
        cells = (tip.shown.runs, tip.shown.successes, tip.held.runs, tip.held.successes)
        rows.append((tip.id, *map(str, cells), "-" if p is None else f"{p:.2f}",
                     f"{tip.text} (seen: {tip.evidence})"))  # fmt: skip
    document = [{"id": t.id, **dataclasses.asdict(t), "p_value": t.p_value()} for t in known]
    return Reply(document, columns(rows) if known else "no tips yet")
