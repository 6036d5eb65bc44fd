"""What a command comes to: document, text, exit code; and errors.

It is a module of its own because a command may be carried out in another process.
"""

import errno
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from coda_agent.primitives.errors import CodaError

REFUSED, INTERRUPTED, BUG = 1, 130, 70
"""Exit codes beside an error's own: 70 is sysexits' EX_SOFTWARE, so that a crash in CI is never
taken for the judge's refusal."""
_PLACES = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""What says that a place cannot be used, which is the user's to mend, where no path comes with it:
only a current folder that was removed is not found and has none."""
_MOST_CHARACTERS = 1000
"""Of an error's line: a path may be a few thousand long."""


@dataclass(frozen=True)
class Reply:
    """A command's answer: for --json, for people, exit code; `err`: to stderr."""

    document: object
    text: str = ""
    code: int = 0
    err: bool = False


def answered(command: Callable[[], Reply]) -> Reply:
    """Call a command; what it raises is a reply too."""
    try:
        return command()
    except CodaError as error:
        return _failed(error, error.exit_code)
    except KeyboardInterrupt:
        return _failed(CodaError("interrupted"), INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and (error.filename or error.errno in _PLACES):
            return _failed(_unusable(error), CodaError.exit_code)
        traceback.print_exc()
        hint = "this is a fault of coda-agent; the trace above belongs in a report"
        return _failed(CodaError(f"{type(error).__name__}: {error}", hint=hint), BUG)


def _unusable(error: OSError) -> CodaError:
    gone = "the current folder" if error.errno == errno.ENOENT else "the disk"
    return CodaError(f"{error.filename or gone} cannot be used: {error.strerror}")


def problem(kind: str, message: str, hint: str, code: int) -> dict[str, object]:
    """Make the document of what went wrong, as --json shows it."""
    return {"error": {"kind": kind, "message": message, "hint": hint, "exit_code": code}}


def _failed(error: CodaError, code: int) -> Reply:
    about = problem(type(error).__name__, error.message, error.hint, code)
    said = " ".join(str(error).split())
    if len(said) > _MOST_CHARACTERS:
        said = f"{said[:200]} … {said[-200:]}"
    return Reply(about, f"error: {said}", code, err=True)
