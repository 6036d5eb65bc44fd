"""The reference worker: a sandboxed child that runs a user's function, so that the command which
drafts or checks a spec never does.

Each job runs in a process of its own, which opens no file for writing (`child.forked`).
"""

from typing import Any

from pydantic import TypeAdapter

from coda_agent.agent.execution.answers import Ok, Refused, read_answer
from coda_agent.agent.execution.child import ChildError, forked, serve
from coda_agent.primitives.errors import CodaError, SpecError
from coda_agent.specs.admission import refusal
from coda_agent.specs.draft import Example, draft
from coda_agent.specs.effects import forbid_effects
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Source, extracted

_BYTES = 4 << 30
_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])


def _result(job: dict[str, Any]) -> str:
    """Of a draft the text, of admission its first fault."""
    if job["kind"] == "draft":
        source = _SOURCE.validate_python(job["source"])
        return draft(source, _EXAMPLES.validate_python(job["examples"]), job["name"])
    return refusal(load_spec(job["path"], text=job["text"]))


def handle(job: dict[str, Any]) -> Any:
    """The answer to one job."""

    def run() -> Any:
        forbid_effects()
        try:
            return Ok(result=_result(job)).model_dump()
        except CodaError as error:
            return Refused.of(error).model_dump()

    try:
        return read_answer(forked(run, _BYTES)).model_dump()
    except (ChildError, ValueError) as error:
        where = job["source"]["where"] if job["kind"] == "draft" else job["path"]
        said = f"{where}: the function ended its process, {getattr(error, 'detail', error)}"
        return Refused.of(SpecError(said, hint="a reference only computes")).model_dump()


def _warm() -> None:
    """Import all that a draft needs, of which a fork could open nothing for writing."""
    import torch

    torch.set_num_threads(1)
    source = extracted("def relu(x, w):\n    return (x @ w.T).relu()", "here")
    draft(source, {"x": Example((64, 8)), "w": Example((32, 8))}, "relu")


if __name__ == "__main__":
    _warm()
    serve(lambda job, _: handle(job))
