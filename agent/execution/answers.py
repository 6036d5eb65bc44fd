"""What any worker answers: one tagged union, as data on its pipe."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from coda_agent.agent.judge.records import Record
from coda_agent.primitives import errors


class Ok(Record):
    """The job's result, JSON data."""

    kind: Literal["ok"] = "ok"
    result: Any = None


class Refused(Record):
    """The job raised an error of `primitives.errors`."""

    kind: Literal["refused"] = "refused"
    error: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: errors.CodaError) -> Self:
        """Turn an error that was raised into data."""
        return cls(error=type(error).__name__, message=error.message, hint=error.hint)

    def raised(self) -> errors.CodaError:
        """Make the error again."""
        return getattr(errors, self.error)(self.message, hint=self.hint)


class Fault(Record):
    """The GPU, or its memory, failed: how, and what was said."""

    kind: Literal["fault"] = "fault"
    fault: str
    detail: str


class Bug(Record):
    """Anything else was raised."""

    kind: Literal["bug"] = "bug"
    trace: str


Answer = Ok | Refused | Fault | Bug
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def read_answer(data: object) -> Answer:
    """Read an answer of data.

    Raises:
        ValueError: it is none.
    """
    return _ANSWER.validate_python(data)


def answered(function: Callable[[], object]) -> Answer:
    """Answer with what `function` returns, JSON data, or with what it raised."""
    try:
        return Ok(result=function())
    except errors.CodaError as error:
        return Refused.of(error)
    except Exception as error:
        first = next((s for s in str(error).splitlines() if s.strip()), "")
        return Refused(error="CompileError", message=f"{type(error).__name__}: {first}")
