"""The catalogue of specs: each is admitted, and its level says what it takes to write it.

`solutions/` has a program for each spec that the composer cannot write. No author is shown them.
"""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.workspace import packaged_specs
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs import admit, load_spec
from tests.agent import verdicts

SPECS = {name: load_spec(path) for name, path in packaged_specs().items()}
CATALOGUE = {name: spec for name, spec in SPECS.items() if spec.path.parent.name == "catalogue"}
EXTEND = sorted(name for name, spec in CATALOGUE.items() if spec.level == "extend")
SOLUTIONS = Path(__file__).with_name("solutions")


def test_how_many_there_are() -> None:
    assert len(SPECS) >= 60
    assert len(EXTEND) >= 10
    assert {name for name, spec in SPECS.items() if spec.name != name} == set()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - set(EXTEND)))
def test_the_composer_writes_it(name: str) -> None:
    verdicts.composed(CATALOGUE[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EXTEND)
def test_an_author_writes_what_the_composer_cannot(name: str) -> None:
    spec = CATALOGUE[name]
    admit(spec)
    with pytest.raises(ProgramError):
        Composer().write(spec, lambda *_: None)
    verdicts.right(spec, verdicts.judged(spec, (SOLUTIONS / f"{name}.py").read_text("utf-8")))
