"""The exception tree: one line each, with what to do."""

from collections.abc import Sequence
from typing import NamedTuple, Self


class CodaError(Exception):
    """Base of every error of a user's; the CLI exits with `exit_code`.

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
    """A spec that is unreadable, malformed, or at odds with its reference."""


class ProgramError(CodaError):
    """An epilogue program that breaks the rules of the language."""


class Fault(NamedTuple):
    """One thing wrong with a text: what, on which line, its remedy."""

    message: str
    line: int
    hint: str


class TextError(ProgramError):
    """A text that is no program; `faults` has all, the message one."""

    faults: Sequence[Fault] = ()

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """Make the error of some faults."""
        first = faults[0]
        error = cls(f"line {first.line}: {first.message}", hint=first.hint)
        error.faults = faults
        return error


class LaunchError(CodaError, ValueError):
    """Tensors that a kernel cannot take, by shape, dtype, device or layout."""


class ArgumentError(LaunchError, TypeError):
    """A call of a kernel without an input, or with unknown ones."""


class CompileError(CodaError):
    """A program that could not be lowered or compiled for an architecture."""


class WorkspaceError(CodaError):
    """No usable workspace or git repository, or an unknown name in it."""


class MachineError(CodaError):
    """A machine without what a command needs, such as a GPU."""

    exit_code = 3


def no_hopper(hint: str) -> MachineError:
    """Make the error of a command that needs a GPU."""
    return MachineError("this needs a Hopper GPU (H100, H200), and none is here", hint=hint)
