"""The catalogue of specs: each is admitted, and its level says what it takes to write it.

`solutions/` has a program for each spec that the composer cannot write. No author is shown them.
"""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer, load
from coda_agent.agent.judge.instructions import check_instructions
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.agent.judge.static import check_source
from coda_agent.agent.workspace import packaged_specs
from coda_agent.primitives import Program
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs import Spec, admit, load_spec

SPECS = {name: load_spec(path) for name, path in packaged_specs().items()}
CATALOGUE = {name: spec for name, spec in SPECS.items() if spec.path.parent.name == "catalogue"}
EXTEND = sorted(name for name, spec in CATALOGUE.items() if spec.level == "extend")
SOLUTIONS = Path(__file__).with_name("solutions")


def judged(spec: Spec, text: str) -> dict[str, Program]:
    """The programs of `text`, if static and meaning accept it and its own instructions are right."""
    assert check_source(text, [spec.variant(binding) for binding in spec.bindings()]) == []
    programs = load(text)
    assert check_instructions(programs) == []
    assert check_meaning(spec, programs) == []
    return programs


def test_how_many_there_are() -> None:
    assert len(SPECS) >= 60
    assert len(EXTEND) >= 10
    assert {name for name, spec in SPECS.items() if spec.name != name} == set()


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - set(EXTEND)))
def test_the_composer_writes_it(name: str) -> None:
    admit(CATALOGUE[name])
    judged(CATALOGUE[name], Composer().write(CATALOGUE[name], lambda *_: None))


@pytest.mark.parametrize("name", EXTEND)
def test_an_author_writes_what_the_composer_cannot(name: str) -> None:
    admit(CATALOGUE[name])
    with pytest.raises(ProgramError):
        Composer().write(CATALOGUE[name], lambda *_: None)
    programs = judged(CATALOGUE[name], (SOLUTIONS / f"{name}.py").read_text("utf-8"))
    tiles = {(name, "bfloat16"): (DEFAULT_CONFIGS["sm_90a"],)}
    outcome = check_numerics(
        CATALOGUE[name], programs, tiles, device="cpu", progress=lambda *_: None
    )
    assert list(outcome.findings) == []
