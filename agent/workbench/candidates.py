"""Tools that write a candidate, or have it judged."""

from typing import Annotated, Literal

from coda_agent.agent.authors.composer import Composer, handed_over
from coda_agent.agent.judge import static
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.keys import KEYS
from coda_agent.agent.workbench.feedback import lines_of
from coda_agent.agent.workbench.registry import Result, ToolError, bounded, told, tool
from coda_agent.agent.workbench.session import Proposal, Workbench
from coda_agent.primitives.syntax import MAX_CHARACTERS

Level = Annotated[
    Literal["static", "compile", "interpret", "gpu"],
    told(
        "static: the language (instant). compile: also compiled. interpret: "
        "also its numbers, by the interpreter. gpu: the numbers of the compiled kernels."
    ),
]


@tool()
def write_candidate(
    bench: Workbench, text: Annotated[str, told("The complete text of kernel.py.")]
) -> Result:
    """Sets the candidate's text, and says what is wrong at first sight."""
    return _saved(bench, text)


@tool(reads=True)
def read_candidate(bench: Workbench) -> Result:
    """The candidate's whole text, and what became of it so far."""
    tried = [attempt for attempt in bench.state.attempts if attempt.text == bench.state.candidate]
    last = f"attempt {tried[-1].number}: " + ("failed", "passed")[tried[-1].passed] if tried else ""
    return Result(text=f"{bench.candidate()}\n({last or 'not judged yet'})")


@tool()
def compose(bench: Workbench) -> Result:
    """Has the composer write the program by its rules: the candidate, or a draft with holes where
    it stopped, and why."""
    if draft := handed_over(bench.spec):
        return Result(text=draft, data={"composed": False})
    result = _saved(bench, Composer().write(bench.spec, bench.log.observer))
    return result.model_copy(update={"data": {**result.data, "composed": True}})


@tool()
def edit_candidate(
    bench: Workbench,
    old: Annotated[str, told("Text that occurs exactly once in the candidate.")],
    new: Annotated[str, told("What stands there instead.")],
) -> Result:
    """Replaces one passage of the candidate."""
    count = bench.state.candidate.count(old) if old else 0
    if count != 1:
        hint = "quote a longer passage" if count else "quote it exactly as it stands"
        now = bounded(bench.state.candidate, 4000)
        raise ToolError(f"`old` occurs {count} times; the candidate is:\n{now}", hint=hint)
    return _saved(bench, bench.state.candidate.replace(old, new))


@tool(reads=True)
def check(bench: Workbench, level: Level) -> Proposal | Result:
    """Judges the candidate up to a level, and says what is wrong, where, and what to try."""
    return bench.propose(level)


def _saved(bench: Workbench, text: str) -> Result:
    if len(text) > MAX_CHARACTERS or KEYS.redacted(text) != text:
        raise ToolError(f"a candidate has at most {MAX_CHARACTERS} characters and no secrets")
    digest = bench.log.candidate(text)
    said = f"candidate {digest}, {len(text.splitlines())} lines"
    programs, found = static.read_candidate(bench.spec, text)
    found = found or check_signature(bench.spec, programs)
    if "diagnosis" in bench.withheld:
        said += ", refused" * bool(found)
    else:
        lines = (f"\n{line}" for finding in found for line in lines_of(finding))
        said += "".join(lines) or ", names and shapes fit the spec"
    return Result(text=said, data={"findings": len(found)})
