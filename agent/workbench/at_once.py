"""What is wrong with a candidate as far as that shows at once, while it is written."""

from coda_agent.agent import execution
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.static import check_source
from coda_agent.primitives.errors import CompileError
from coda_agent.specs import Spec


def at_once(spec: Spec, text: str) -> list[Finding]:
    """Findings of the static gate, or of the trace in a worker, or of the signature.

    Raises:
        MachineError: a stronger sandbox is demanded than works here.
    """
    if found := check_source(text, [spec.variant(binding) for binding in spec.bindings()]):
        return found
    try:
        programs = execution.executor().load(text)
    except CompileError as error:
        return [Finding(message=error.message, hint=error.hint)]
    return check_signature(spec, programs)
