"""The exception tree. Each error is one line: what was wrong, what was expected, how to mend it."""

from collections.abc import Sequence
from typing import NamedTuple, Self


class CodaError(Exception):
    """Base of every error a user can cause or meet; the CLI prints it and exits with `exit_code`.

    Args:
        message: What was wrong and what was expected, in one line.
        hint: How to mend it, in one line; empty where the message already says so.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class SpecError(CodaError):
    """A spec file that cannot be used: unreadable, malformed, or disagreeing with its reference."""


class ProgramError(CodaError):
    """An epilogue program that breaks the rules of the language."""


class Fault(NamedTuple):
    """One thing wrong with a text: what, on which line, and how to mend it."""

    message: str
    line: int
    hint: str


class TextError(ProgramError):
    """A text that is no program; `faults` has all that is wrong with it, the message the first."""

    faults: Sequence[Fault] = ()

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """The error of some faults."""
        first = faults[0]
        error = cls(f"line {first.line}: {first.message}", hint=first.hint)
        error.faults = faults
        return error


class LaunchError(CodaError, ValueError):
    """Tensors a kernel cannot take: wrong shape, dtype, device, layout or block size."""


class ArgumentError(LaunchError, TypeError):
    """A kernel's call without one of its inputs, or with another than these."""


class CompileError(CodaError):
    """A program that could not be lowered or compiled for an architecture."""


class WorkspaceError(CodaError):
    """No usable workspace or git repository, or nothing known by the given name."""


class MachineError(CodaError):
    """The machine lacks something a command needs (a GPU, a tool, a package)."""

    exit_code = 3


def no_hopper(hint: str) -> MachineError:
    """The error of every command that needs a GPU where there is none; `hint` is what to do."""
    return MachineError("this needs a Hopper GPU (H100, H200), and none is here", hint=hint)
