"""What an author is shown of the demonstrations."""

import re
from pathlib import Path

from coda_agent.agent.prompt import DEMOS, demos_for, opening
from coda_agent.agent.workspace import packaged_specs
from coda_agent.primitives.catalogue import entries
from coda_agent.specs import load_spec

NAMES = {entry.name for entry in entries()} - {"epilogue"}
SOLUTIONS = sorted(Path(__file__).with_name("solutions").glob("*.py"))[::3]
SPECS = packaged_specs()


def primitives(text: str) -> set[str]:
    return NAMES.intersection(re.findall(r"\w+", text))


def test_demonstrations_cover_what_solutions_need() -> None:
    """Of what is in solutions that the composer cannot write; four at random show 0.47 of it."""
    needed = shown = 0
    for path in SOLUTIONS:
        chosen = demos_for(load_spec(SPECS[path.stem]))
        assert len({demo.name for demo in chosen}) == DEMOS
        need = primitives(path.read_text("utf-8"))
        needed += len(need)
        shown += len(need & primitives("".join(demo.candidate for demo in chosen)))
    assert needed > 40 and shown / needed >= 0.85


def test_the_composers_draft_is_in_the_first_message_where_it_stopped() -> None:
    parts = opening(load_spec(SPECS["gemm_probit"]))
    assert "HOLE_1(0.999 * tanh(0.5 * (acc + bias)))" in parts["draft"]
    assert "draft" not in opening(load_spec(SPECS["gemm_swiglu"]))
