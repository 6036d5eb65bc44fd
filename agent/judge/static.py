"""Gate 1: is the text a candidate, and what does it compute?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.errors import TextError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program


def read_candidate(spec: Spec, text: str) -> tuple[dict[str, Program], list[Finding]]:
    """Read the programs of a spec, or find the text's faults."""
    try:
        return read_programs(text, [spec.variant(b) for b in spec.bindings()]), []
    except TextError as error:
        faults = error.faults
    return {}, [Finding(message=f.message, where={"line": f.line}, hint=f.hint) for f in faults]
