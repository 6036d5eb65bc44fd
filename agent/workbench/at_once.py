"""What is wrong with a candidate as far as that shows at once, while it is written."""

from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.static import read_candidate
from coda_agent.specs import Spec


def at_once(spec: Spec, text: str) -> list[Finding]:
    """Findings of the static gate, or of the signature."""
    programs, found = read_candidate(spec, text)
    return found or check_signature(spec, programs)
