"""The registry of tools: each is a function of a workbench.

The Messages loop, the MCP server and the command line read the same list, so that a tool is
described once, where it is written.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.suggest import near_matches

LIMIT = 12_000
"""Characters of a result that an author sees; the rest is in an artifact."""

Function = TypeVar("Function", bound=Callable[..., object])
T = TypeVar("T")


class Result(BaseModel):
    """What a tool says: `text` for the author, `data` for programs."""

    ok: bool = True
    """Whether the tool could do what was asked; a refused candidate is an answer, not a failure."""
    text: str
    data: JsonObject = {}
    artifacts: list[str] = []
    """Files of the run's folder that hold what did not fit."""
    gpu: bool = False
    """Whether a GPU worked; its seconds count against the budget."""

    @property
    def failed(self) -> bool:
        """Whether whoever asked takes it for an error, as a refused candidate."""
        return not self.ok or self.data.get("passed") is False


class ToolError(CodaError):
    """A call that cannot be done as asked."""


@dataclass(frozen=True)
class Tool:
    """One tool; `last` ones run after a budget's end, `reads` change nothing."""

    name: str
    description: str
    input: type[BaseModel]
    function: Callable[..., Any]
    """Of the workbench and the input; a `Result`, or a `Proposal` to the judge."""
    last: bool
    reads: bool

    def parsed(self, given: object) -> JsonObject:
        """Check an input; the arguments of the function.

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

    def schema(self) -> JsonObject:
        """The JSON schema of its input: types, and what each field is."""
        schema = self.input.model_json_schema()
        schema.pop("title", None)
        schema.pop("description", None)
        schema["properties"] = {x: _short(y) for x, y in schema.get("properties", {}).items()}
        return schema


def tool(*, last: bool = False, reads: bool = False) -> Callable[[Function], Function]:
    """Mark a function as a tool, whose further parameters are the input."""

    def mark(function: Function) -> Function:
        vars(function)["_tool"] = last, reads
        return function

    return mark


def told(description: str) -> object:
    """Describe an argument to an author."""
    return Field(description=description)


def registry(*modules: ModuleType) -> dict[str, Tool]:
    """Collect the tools of modules, in the order they are written."""
    return {
        name: Tool(name, inspect.cleandoc(value.__doc__ or ""), _input(value), value, *kind)
        for module in modules
        for name, value in vars(module).items()
        if (kind := getattr(value, "_tool", None)) is not None
    }


def pick(choices: Mapping[str, T], name: str, what: str) -> T:
    """Look a name up.

    Raises:
        ToolError: there is none; names the nearest.
    """
    if name not in choices:
        raise ToolError(f"no {what} named {name!r}", hint=near_matches(name, choices))
    return choices[name]


def _input(function: Callable[..., object]) -> type[BaseModel]:
    """A model of a function's parameters, which refuses misspelt ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    fields: JsonObject = {
        p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters
    }
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _short(field: JsonObject) -> JsonObject:
    """Shorten a field's schema: one that is left out needs neither null nor a default."""
    kept = {key: field[key] for key in field if key not in ("title", "default", "anyOf")}
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    return kept | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})


def bounded(text: str, limit: int = LIMIT) -> str:
    """Cut `text` to its head and tail where it is long."""
    if len(text) <= limit:
        return text
    head = text[: limit * 2 // 3].rpartition("\n")[0] or text[: limit * 2 // 3]
    tail = text[-limit // 4 :].partition("\n")[2] or text[-limit // 4 :]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"
