"""The registry of tools: each is a method of the Workbench, and its parameters are the input.

The Messages loop, the MCP server and the command line read the same list, so that a tool is
described once, where it is written.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from coda_agent.primitives.errors import CodaError

LIMIT = 12_000
"""Characters of a result that an author sees; the rest is in an artifact."""

Method = TypeVar("Method", bound=Callable[..., Any])


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

    @property
    def failed(self) -> bool:
        """Whether it is an error to whoever asked: a candidate that the judge refuses is one."""
        return not self.ok or self.data.get("passed") is False


class ToolError(CodaError):
    """A call that cannot be done as asked; the author is told and may do better."""


@dataclass(frozen=True)
class Tool:
    """One tool; `last` ones may still be called in the turn after a budget's end."""

    name: str
    description: str
    input: type[BaseModel]
    method: Callable[..., Result]
    last: bool

    def parsed(self, given: object) -> dict[str, Any]:
        """The arguments of the method.

        Raises:
            ToolError: `given` is no input of the tool; names every field that does not fit.
        """
        try:
            return dict(self.input.model_validate(given))
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
    """Marks a method as a tool; its parameters are the tool's input."""

    def mark(method: Method) -> Method:
        setattr(method, "_tool_last", last)  # noqa: B010  (no such attribute, to a type checker)
        return method

    return mark


def registry(workbench: type) -> dict[str, Tool]:
    """The tools of a class, in the order they are written."""
    return {
        name: Tool(name, inspect.cleandoc(method.__doc__ or ""), _input(method), method, last)
        for name, method in vars(workbench).items()
        if (last := getattr(method, "_tool_last", None)) is not None
    }


def _input(method: Callable[..., Result]) -> type[BaseModel]:
    """A model of a method's parameters; a misspelt one is an error, not a default."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters
    }
    return create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def bounded(text: str, limit: int = LIMIT) -> str:
    """`text` cut to its head and tail where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head = text[: limit * 2 // 3].rpartition("\n")[0] or text[: limit * 2 // 3]
    tail = text[-limit // 4 :].partition("\n")[2] or text[-limit // 4 :]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"
