"""The catalogue of specs: each is admitted, and its level says what it takes to write it.

`solutions/` has a program for each spec that the composer cannot write. No author is shown them, and
a third of the newer specs is named nowhere else.
"""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.workspace import packaged_specs
from coda_agent.evals import suites
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs import admit, load_spec
from tests.agent import verdicts

SPECS = {name: load_spec(path) for name, path in packaged_specs().items()}
CATALOGUE = {name: spec for name, spec in SPECS.items() if spec.path.parent.name == "catalogue"}
EXTEND = sorted(name for name, spec in CATALOGUE.items() if spec.level == "extend")
SOLUTIONS = Path(__file__).with_name("solutions")


def test_how_many_there_are() -> None:
    assert len(SPECS) >= 60
    assert len(EXTEND) >= 32
    assert {name for name, spec in SPECS.items() if spec.name != name} == set()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - set(EXTEND)))
def test_the_composer_writes_it(name: str) -> None:
    verdicts.composed(CATALOGUE[name])


def test_what_is_held_out_is_in_no_demonstration_and_on_no_page() -> None:
    held, others = suites.load("held_out").specs, suites.load("extend").specs
    assert sorted([*held, *others]) == EXTEND and len(held) == 8
    root = Path(__file__).parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("agent/*.md")]
    texts = [path.read_text("utf-8") for path in (*pages, *root.glob("demos/*.py"))]
    assert len(texts) > 40
    assert [name for name in held for text in texts if name in text] == []


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", EXTEND)
def test_an_author_writes_what_the_composer_cannot(name: str) -> None:
    spec = CATALOGUE[name]
    admit(spec)
    with pytest.raises(ProgramError):
        Composer().write(spec, lambda *_: None)
    verdicts.right(spec, verdicts.judged(spec, (SOLUTIONS / f"{name}.py").read_text("utf-8")))
