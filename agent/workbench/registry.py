"""The registry of tools: each is a method of the Workbench, its input a pydantic model.

The Messages loop, the MCP server and the command line read the same list, so that a tool is
described once, where it is written.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coda_agent.primitives.errors import CodaError

LIMIT = 12_000
"""Characters of a result that an author sees; the rest is in an artifact."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Input(BaseModel):
    """Base of the inputs: a misspelt field is an error, not a default."""

    model_config = ConfigDict(extra="forbid")


class Nothing(Input):
    """No input."""


class Result(BaseModel):
    """What a tool says: `text` for the author, `data` for programs."""

    ok: bool = True
    """Whether the tool could do what was asked; a refused candidate is an answer, not a failure."""
    text: str
    data: dict[str, Any] = {}
    artifacts: list[str] = []
    """Files of the run's folder that hold what did not fit."""
    gpu: bool = False
    """Whether a GPU worked; its seconds count against the budget."""


class ToolError(CodaError):
    """A call that cannot be done as asked; the author is told and may do better."""


@dataclass(frozen=True)
class Tool:
    """One tool; `last` ones may still be called in the turn after a budget's end."""

    name: str
    description: str
    input: type[Input]
    method: Callable[..., Result]
    last: bool

    def parsed(self, given: object) -> Input:
        """
        Raises:
            ToolError: `given` is no input of the tool; names every field that does not fit.
        """
        try:
            return self.input.model_validate(given)
        except ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'input'}: {e['msg']}" for e in error.errors()
            )
            raise ToolError(f"the input of {self.name} does not fit: {said}") from None

    def schema(self) -> dict[str, Any]:
        """The JSON schema of its input, without the titles that repeat the names."""
        schema = self.input.model_json_schema()
        schema.pop("title", None)
        schema.pop("description", None)
        for field in schema.setdefault("properties", {}).values():
            field.pop("title", None)
        return schema


def tool(*, last: bool = False) -> Callable[[Method], Method]:
    """Marks a method `(self, given: Input) -> Result` as a tool."""

    def mark(method: Method) -> Method:
        setattr(method, "_tool_last", last)  # noqa: B010  (no such attribute, to a type checker)
        return method

    return mark


def registry(workbench: type) -> dict[str, Tool]:
    """The tools of a class, in the order they are written."""
    found: dict[str, Tool] = {}
    for name, method in vars(workbench).items():
        if hasattr(method, "_tool_last"):
            doc = inspect.cleandoc(method.__doc__ or "")
            given = inspect.signature(method).parameters["given"].annotation
            found[name] = Tool(name, doc, given, method, method._tool_last)
    return found


def bounded(text: str, limit: int = LIMIT) -> str:
    """`text` cut to its head and tail where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head = text[: limit * 2 // 3].rpartition("\n")[0] or text[: limit * 2 // 3]
    tail = text[-limit // 4 :].partition("\n")[2] or text[-limit // 4 :]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"
