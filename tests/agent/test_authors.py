"""The registry of authors, and that adding one is one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent import authors, doctor, judge, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.keys import KEYS
from coda_agent.evals.cells import read
from coda_agent.evals.trials import Trial, records_of
from tests.agent.claude.bench import quick_judge

ROOT = Path(__file__).parents[2]
TOY = f"""
from coda_agent.agent.authors import Kind, Need, Writer


class Toy(Writer):
    name = "toy"

    def write(self, spec, observer):
        return open({str(ROOT / "generated")!r} + f"/{{spec.name}}/kernel.py").read()


class _Toys(Kind):
    name = "toy"
    spelling = "toy"
    precedence = 3
    deterministic = True

    def need(self):
        return Need("a toy box", True, "any box will do", "where there is a box")

    def make(self, which, options, workspace):
        return Toy()


AUTHOR = _Toys()
"""
"""All that adding an author takes."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file, in the folder of authors."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(authors, "__path__", [*authors.__path__, str(folder)])
    authors.kinds.cache_clear()
    yield
    authors.kinds.cache_clear()


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    monkeypatch.setattr(judge, "judge_candidate", quick_judge)
    made, _ = workspace.init(tmp_path / "w")
    made.git("config", "user.name", "U")
    made.git("config", "user.email", "u@example.com")
    monkeypatch.chdir(made.root)
    return made


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_program_of_ones_own_is_an_author(where: workspace.Workspace) -> None:
    text = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()
    Path("mine.py").write_text(text)
    assert "proved, commit" in run("generate", "gemm_swiglu", "--author", "file:mine.py")
    kernel = where.kernel("gemm_swiglu")
    assert (kernel.text, kernel.evidence.author) == (text, "file:mine.py")
    for name, said in (
        ("file:other.py", "other.py cannot be read"),
        ("file", "file:PATH, such as"),
    ):
        result = CliRunner().invoke(app, ["generate", "gemm_swiglu", "--author", name])
        assert result.exit_code == 2 and said in result.output


def test_adding_an_author_is_one_file(where: workspace.Workspace, toy: None) -> None:
    assert "gemm_swiglu: proved, commit" in run("generate", "gemm_swiglu", "--author", "toy")
    assert where.kernel("gemm_swiglu").evidence.author == "toy"
    assert "gemm_rope: proved, commit" in run("generate", "gemm_rope")  # the first choice
    assert where.kernel("gemm_rope").evidence.author == "toy"
    (item,) = (i for i in doctor.diagnose(where.root)[0] if i.name == "a toy box")
    assert (item.value, item.enables, item.hint) == ("set", "the author `toy`", "any box will do")
    assert authors.choices().endswith(
        "; else composer or ladder where a key is set or toy where there is a box."
    )
    suite = where.root / "evals" / "suites" / "mine.toml"
    suite.parent.mkdir(parents=True)
    suite.write_text('title = "T"\nspecs = ["gemm_swiglu"]\ngoal = "proved"\ntrials = 2\n')
    assert "toy gemm_swiglu 1: proved" in run("eval", "run", "--suite", "mine", "--author", "toy")
    (record,) = read(
        records_of(where.root, "mine"), Trial
    ).values()  # one: its trials are all alike
    assert (record.author, record.solved) == ("toy", True)


def test_the_first_choice_is_what_can_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KEYS, "_held", {})
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert authors.default() == "composer"
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-canary")
    assert authors.default() == "ladder"
    assert authors.choices() == (
        "composer, file:PATH, replay, claude or claude:MODEL, ladder, messages:MODEL; "
        "else composer or ladder where a key is set."
    )


def test_a_recorded_run_is_an_author_by_name() -> None:
    here = workspace.find(ROOT)
    assert authors.make("replay:gemm_rope-5f11", authors.Options(), here).name.startswith("replay:")
    with pytest.raises(authors.CodaError, match="no recorded run 'nope'"):
        authors.make("replay:nope", authors.Options(), here)
