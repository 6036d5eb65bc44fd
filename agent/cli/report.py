"""What the commands say: one JSON document, or text for people; errors in one line, never a trace.

Only a terminal gets rich, and only for what moves; lists are plain aligned text, which pipes,
pages and greps the same as it reads.
"""

import contextlib
import errno
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self

import typer

from coda_agent.agent.events import plain
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from rich.status import Status

    from coda_agent.agent.judge import Verdict

P = ParamSpec("P")

REFUSED, INTERRUPTED, BUG = 1, 130, 70
"""Exit codes beside an error's own: 70 is sysexits' EX_SOFTWARE, so that a crash in CI is never
taken for the judge's refusal."""


@dataclass(frozen=True)
class Reply:
    """A command's answer: the document for --json, the text for people, the exit code."""

    document: object
    text: str = ""
    code: int = 0


def reported(command: Callable[P, Reply]) -> Callable[P, None]:
    """Makes a function returning a Reply into a command; its --json parameter is `as_json`."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        with _stdout_to_stderr() if as_json else contextlib.nullcontext():
            reply = _answer(functools.partial(command, *args, **kwargs))
        if isinstance(reply, Reply):
            code = reply.code
            said = json.dumps(plain(reply.document), indent=1) if as_json else reply.text
            if said:
                typer.echo(said)
        else:
            code, error = reply
            if as_json:
                about = {"kind": type(error).__name__, "message": error.message}
                about |= {"hint": error.hint, "exit_code": code}
                typer.echo(json.dumps({"error": about}, indent=1))
            else:
                typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(code)

    return run


def _answer(command: Callable[[], Reply]) -> Reply | tuple[int, CodaError]:
    try:
        return command()
    except CodaError as error:
        return error.exit_code, error
    except KeyboardInterrupt:
        return INTERRUPTED, CodaError("interrupted")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            return CodaError.exit_code, CodaError(str(error))
        return _bug(error)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        return _bug(error)


def _bug(error: Exception) -> tuple[int, CodaError]:
    traceback.print_exc()
    hint = "this is a fault of coda-agent; the trace above belongs in a report"
    return BUG, CodaError(f"{type(error).__name__}: {error}", hint=hint)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends what libraries and child processes print to stderr: stdout is one document."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Rows as left-aligned columns, two spaces apart; the last one is as wide as it likes."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1:] = [0]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each finding: its message, then where and what to try, indented beneath."""
    for finding in findings:
        yield f"    {finding['message']}"
        if where := finding.get("where"):
            if isinstance(where, Mapping):
                where = ", ".join(f"{key} {value}" for key, value in where.items())
            yield f"      at   {where}"
        if finding.get("hint"):
            yield f"      try  {finding['hint']}"


def verdict_text(verdict: "Verdict") -> str:
    """What the progress lines leave out: what was not shown on this machine, and the timings."""
    lines = [f"not shown: {sentence}" for sentence in verdict.not_shown]
    for gate in verdict.gates:
        cells = [cell for cell in gate.data.get("cells", []) if "times" in cell]
        rows: list[tuple[str, ...]] = []
        rows.append(("dtype", "shape", "us", "TFLOP/s", "of gemm", "over compile"))
        for cell in cells:
            sizes = " ".join(f"{dim}={size}" for dim, size in cell["sizes"].items())
            ours = f"{cell['times']['ours']['median_us']:.1f}"
            ratios = (f"{cell[key]['ratio']:.3f}" for key in ("of_gemm", "over_compile"))
            rows.append((cell["dtype"], sizes, ours, str(cell["tflops"]), *ratios))
        lines += [columns(rows)] * bool(cells)
    return "\n".join(lines)


def outcomes(found: Sequence[Any], *, single: bool = False) -> Reply:
    """What became of candidates; exit code 0 where all passed."""
    lines: list[str] = []
    for outcome in found:
        if outcome.verdict and (more := verdict_text(outcome.verdict)):
            lines.append(more)
        lines.append(_sentence(outcome))
    records = [outcome.record() for outcome in found]
    code = 0 if all(outcome.passed for outcome in found) else REFUSED
    return Reply(records[0] if single else {"kernels": records}, "\n".join(lines), code)


def _sentence(outcome: Any) -> str:
    if not outcome.passed:
        end = f"; level is now {outcome.level}" if outcome.commit else ""
        return f"{outcome.kernel}: {outcome.reason or 'refused'}{end} (run: {outcome.run})"
    stored = f", commit {outcome.commit[:12]}" if outcome.commit else ""
    if outcome.folder and not outcome.commit:
        stored = ", unchanged"
    return f"{outcome.kernel}: {outcome.level}{stored} ({outcome.folder or outcome.run})"


class Progress:
    """An observer that shows the gates: a spinner on a terminal, plain lines elsewhere.

    A context manager, so that the spinner is gone before anything else is printed.
    """

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._live = not silent and sys.stdout.isatty()
        self._status: Status | None = None

    def __call__(self, type: str, data: Mapping[str, Any]) -> None:
        """Takes one event; types it does not know only change the spinner's note."""
        if self._silent:
            return
        gate = data.get("gate", "")
        if type == "gate.finished":
            self._spin(None)
            self._finished(str(gate), data)
        elif type == "gate.progress":
            done, total = data.get("done"), data.get("total")
            count = f" {done}/{total}" if total else ""
            self._spin(f"{gate}{count} {data.get('note') or ''}")
        elif type in ("gate.started", "author.started"):
            self._spin(str(gate or f"{data.get('author')} writes"))
        elif type == "author.finished":
            self._spin(None)
        elif type == "tool.finished":
            self._spin(None)
            first = (data["text"].splitlines() or [""])[0]
            typer.echo(f"{data['name']}: {first[:120]}")
        elif type == "request":
            self._spin("the model thinks")

    def _finished(self, gate: str, data: Mapping[str, Any]) -> None:
        if skipped := data.get("skipped"):
            mark = f"- {gate:<12}" if self._live else f"{gate}:"
            typer.echo(f"{mark} skipped: {skipped}")
            return
        passed = bool(data.get("passed"))
        seconds = float(data.get("seconds") or 0.0)
        if not self._live:
            typer.echo(f"{gate}: {'passed' if passed else 'FAILED'} ({seconds:.1f} s)")
        else:
            utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
            mark = ("✓" if passed else "✗") if utf8 else ("ok" if passed else "no")
            typer.secho(mark, fg="green" if passed else "red", nl=False)
            typer.echo(f" {gate:<12} {seconds:6.1f} s")
        for line in finding_lines(data.get("findings") or []):
            typer.echo(line)

    def _spin(self, note: str | None) -> None:
        if not self._live:
            return
        if note is None:
            if self._status is not None:
                self._status.stop()
            self._status = None
            return
        from rich.console import Console
        from rich.text import Text

        if self._status is None:
            self._status = Console().status(Text(note))
            self._status.start()
        else:
            self._status.update(Text(note))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spin(None)
