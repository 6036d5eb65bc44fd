"""What to build: the spec format, its reference, and the specs (`*.md`)."""

from coda_agent.specs.admission import admit
from coda_agent.specs.format import Spec
from coda_agent.specs.load import load_spec
from coda_agent.specs.reference import (
    as_declared,
    canonical_reference,
    draw_inputs,
    reference_callable,
    run_reference,
)

__all__ = [
    "Spec",
    "admit",
    "as_declared",
    "canonical_reference",
    "draw_inputs",
    "load_spec",
    "reference_callable",
    "run_reference",
]
