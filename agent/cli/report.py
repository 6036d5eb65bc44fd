"""What commands say: one JSON document, or text; errors in one line.

Only a terminal gets rich, and only for what moves; lists are plain aligned text, which pipes,
pages and greps the same as it reads.
"""

import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from threading import Timer
from typing import TYPE_CHECKING

import typer

from coda_agent.agent import tables
from coda_agent.agent.cli.options import AsJson, Contended
from coda_agent.agent.plain import plain
from coda_agent.agent.reply import REFUSED, Reply, answered
from coda_agent.primitives.objects import writable_cache

if TYPE_CHECKING:
    from rich.status import Status

    from coda_agent.agent.judge.records import JsonObject, Observer
    from coda_agent.agent.pipeline import Outcome

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SILENT_S = 5.0
_AS_JSON = ContextVar("_AS_JSON", default=False)


def reported(
    *, timed: bool = False, json_too: bool = True, compiles: bool = False
) -> Callable[[Callable[..., Reply]], Callable[..., None]]:
    """Make a function that returns a Reply a command.

    One that is `timed` has --contended, which the judge and its children read in the environment.
    One that `compiles` begins only where the cache can be written.
    """

    def decorate(command: Callable[..., Reply]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*, as_json: bool = False, contended: bool = False, **given: object) -> None:
            def called() -> Reply:
                if compiles:
                    writable_cache()
                if contended:
                    from coda_agent.agent.judge.machine import CONTENDED

                    os.environ[CONTENDED] = "1"
                return command(**given)

            with _one_document() if as_json else contextlib.nullcontext():
                reply = answered(called)
            # What a file holds must not steer a terminal.
            text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", reply.text)
            if said := json.dumps(plain(reply.document), indent=1) if as_json else text:
                typer.echo(said, err=reply.err and not as_json)
            raise typer.Exit(reply.code)

        signature, kind = inspect.signature(command), inspect.Parameter.KEYWORD_ONLY
        options = {"contended": Contended} if timed else {}
        options |= {"as_json": AsJson} if json_too else {}
        more = (inspect.Parameter(x, kind, default=None, annotation=y) for x, y in options.items())
        parameters = [*signature.parameters.values(), *more]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def columns(rows: tables.Rows, beside: int = 0) -> str:
    """Align rows; on a terminal they fit it, with some columns `beside` them."""
    width = shutil.get_terminal_size().columns - beside if sys.stdout.isatty() else None
    return tables.columns(rows, width)


def quiet() -> bool:
    """Tell whether stdout is one document, so that no progress is told."""
    return _AS_JSON.get()


@contextlib.contextmanager
def _one_document() -> Iterator[None]:
    """Send what libraries and child processes print to stderr."""
    before = _AS_JSON.set(True)
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        _AS_JSON.reset(before)


def told(outcome: "Outcome") -> str:
    """Say what progress lines leave out, and what became of a candidate."""
    from coda_agent.agent.judge.records import PerformanceReport
    from coda_agent.agent.judgement import Cell
    from coda_agent.agent.review import speed

    verdict = outcome.verdict
    lines = [f"not shown: {reason}" for reason in verdict.not_shown] if verdict else []
    performance = verdict.report(PerformanceReport) if verdict else None
    if performance and performance.timed:
        lines.append(columns(speed(map(Cell.model_validate, performance.timed))))
    failed = {gate.name for gate in verdict.gates if gate.findings} if verdict else set()
    if verdict and failed and outcome.run and "performance" not in failed:  # `check` times nothing
        seed, _, rest = verdict.replay.removeprefix("seed ").partition(", ")
        line = f"replay: coda-agent check {outcome.run / 'kernel.py'}"
        lines.append(line + f" --seed {seed}" * bool(seed) + f" ({rest})" * bool(rest))
    lines += [sentence(outcome, shown=True), *filter(None, [outcome.remark])]
    return "\n".join(lines)


def sentence(outcome: "Outcome", *, shown: bool = False) -> str:
    """Say what became of a candidate; of `shown` findings name the gate."""
    verdict, before = outcome.verdict, outcome.before
    if not outcome.passed:
        gates = verdict.gates if verdict else []
        failed = [gate for gate in gates if gate.findings]
        found = "; ".join(g.name if shown else f"{g.name}: {g.findings[0].message}" for g in failed)
        word = "revoked" if outcome.level == "revoked" else outcome.reason or "refused"
        cost = f"; {outcome.cost}" * bool(outcome.cost)
        return f"{outcome.kernel}: {word}{': ' * bool(found)}{found}{cost} (run: {outcome.run})"
    said = f"{outcome.kernel}: {outcome.level}"
    said += f" (was {before})" * (before not in (None, outcome.level) and bool(outcome.commit))
    if verdict and verdict.level != outcome.level:
        said += f", {verdict.level} here"
    if outcome.commit:
        said += f", commit {outcome.commit[:12]}"
    elif before and outcome.run is None:
        said += ", nothing is stale"
    elif outcome.folder or before:
        said += ", unchanged"
    said += f"; {outcome.cost}" * bool(outcome.cost)
    return said if before else f"{said} ({outcome.folder or outcome.run})"


def judged(outcome: "Outcome") -> Reply:
    """Reply what became of a candidate; exit code 0 where it passed."""
    return Reply(outcome.record(), told(outcome), 0 if outcome.passed else REFUSED)


class Standing:
    """How far a model's run has come, for the line shown meanwhile."""

    def __init__(self, usd: float) -> None:
        self.turns = self.attempts = 0
        self.usd = usd
        self.cap: float | None = None
        self.best = "nothing yet"

    def take(self, type: str, data: "JsonObject") -> None:
        """Take the next event of the run."""
        match type:
            case "run.started" | "run.resumed" if data.get("options"):
                self.cap = data["options"]["budget"]["usd"]
            case "response" | "request.failed":
                self.turns += type == "response"
                self.usd += data.get("usd") or 0.0
            case "judged":
                from coda_agent.agent.judge.records import GATES

                self.attempts = data["number"]
                gates = data["judgement"]["gates"]
                passed = [name for name, gate in gates.items() if gate.get("passed")]
                self.best = max([self.best, *passed], key=("nothing yet", *GATES).index)
            case _:
                pass

    def line(self, note: str) -> str:
        """Say turn, attempt, what is done, dollars of the cap, the best."""
        if self.cap is None:
            return note
        spent = f"${self.usd:.2f} of {self.cap:.2f}"
        said = f"turn {self.turns + 1}", f"attempt {self.attempts}", note, spent
        return " · ".join((*said, f"best: {self.best}"))


@contextlib.contextmanager
def progress(*, silent: bool = False, usd: float = 0.0) -> "Iterator[Observer]":
    """Make an observer that shows the gates; `usd` was spent before.

    It is a spinner on a terminal, gone before anything else is printed. Elsewhere it is plain
    lines, and what lasts is told on stderr.
    """
    if silent or quiet():
        yield lambda *_: None
        return
    status: Status | None = None
    standing, slow, note = Standing(usd), Timer(0, print), ""

    def spin(about: str) -> None:
        nonlocal status, slow, note
        note = standing.line(about)
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.text import Text

            status = status or Console().status("")
            status.update(Text(note))
            status.start()
        elif not slow.is_alive():  # of notes that follow one another quickly, one now and then
            slow = Timer(_SILENT_S, lambda: typer.echo(note, err=True))
            slow.daemon = True
            slow.start()

    def stop() -> None:
        nonlocal slow
        slow.cancel()
        slow = Timer(0, print)  # one that is cancelled is alive until its thread has noticed
        if status:
            status.stop()

    def observe(type: str, data: "JsonObject") -> None:
        gate = str(data.get("gate", ""))
        standing.take(type, data)
        match type:
            case "gate.started":
                spin(gate)
            case "gate.progress":
                count = f" {data.get('done')}/{data['total']}" if data.get("total") else ""
                spin(f"{gate}{count} {data.get('note') or ''}")
            case "gate.finished":
                stop()
                _finished(gate, data)
            case "author.started":
                spin(f"{data.get('author')} writes")
            case "candidate.saved":
                stop()
            case "shape.tuned":
                stop()
                typer.echo(f"measured {data['shape']}")
            case "request":
                spin("the model thinks")
            case "request.failed":
                stop()
                again = f"; again in {data['wait_s']:.0f} s" if data.get("wait_s") else ""
                typer.echo(f"{data['error'].partition(chr(10))[0]}{again}", err=True)
            case "tool.finished":
                stop()
                first = (data["text"].splitlines() or [""])[0]
                typer.echo(f"{data['name']}: {first[:120]}")
            case _:
                pass

    try:
        yield observe
    finally:
        stop()


@contextlib.contextmanager
def waiting(note: str) -> Iterator[None]:
    """Say meanwhile, on a terminal, what takes its time."""
    with progress() as observer:
        observer("gate.started", {"gate": note})
        yield


def _finished(gate: str, data: "JsonObject") -> None:
    if skipped := data.get("skipped"):
        typer.echo(f"{gate}: skipped: {skipped}")
        return
    passed, seconds = bool(data.get("passed")), float(data.get("seconds") or 0.0)
    said = f"{gate}: {'passed' if passed else 'FAILED'} ({seconds:.1f} s)"
    typer.secho(
        said, fg="green" if passed else "red"
    )  # colours are for terminals: click sees to it
    if findings := data.get("findings"):
        from coda_agent.agent.judge.records import Finding
        from coda_agent.agent.workbench.feedback import lines_of, merged

        for group in merged(map(Finding.model_validate, findings)):
            for line in lines_of(*group):
                typer.echo(f"    {line}")
