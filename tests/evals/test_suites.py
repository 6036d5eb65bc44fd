"""Tests of evals/suites.py: what is read from a file, and what is refused in one line."""

from pathlib import Path

import pytest

from coda_agent.agent import workspace
from coda_agent.evals import suites
from coda_agent.primitives.errors import CodaError, SpecError, WorkspaceError

GOOD = 'title = "T"\nspecs = ["gemm_rope", "gemm_swiglu"]\ngoal = "proved"\n'


@pytest.fixture
def where(tmp_path: Path) -> workspace.Workspace:
    return workspace.init(tmp_path)[0]


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.toml").write_text(text)
    return str(tmp_path / "mine.toml")


def test_the_packaged_suites_name_specs_that_exist(where: workspace.Workspace) -> None:
    found = {p.stem: suites.load(p.stem) for p in suites.FOLDER.glob("*.toml")}
    assert set(found) == {"smoke", "paper", "catalogue", "blocks", "extend", "held_out"}
    for suite in found.values():
        names = suite.spec_names(where)
        assert [suite.spec(where, name).name for name in names] == names
    assert len(found["paper"].spec_names(where)) == 10
    assert found["catalogue"].spec_names(where) == sorted(workspace.spec_names(where))
    assert (found["smoke"].gpu, found["smoke"].goal) == ("", "proved")
    assert {name for name, suite in found.items() if suite.gpu == "H200"} == set(found) - {"smoke"}


def test_a_suites_shapes_replace_those_of_its_specs(where: workspace.Workspace) -> None:
    blocks = suites.load("blocks")
    name = "gemm_residual_partial_rmsnorm"
    spec, plain = blocks.spec(where, name), suites.load("paper").spec(where, name)
    assert [tuple(s.values()) for s in spec.bench_shapes] == [
        (8192, 4096, 4096),
        (8192, 4096, 14336),
    ]
    assert spec.check_shapes == plain.check_shapes
    assert (spec.reference_source, spec.prose) == (plain.reference_source, plain.prose)
    assert spec.inputs == plain.inputs
    assert spec.digest != plain.digest


def test_user_suites_go_by_path_or_by_name(where: workspace.Workspace, tmp_path: Path) -> None:
    suite = suites.load(written(tmp_path, GOOD))
    assert (suite.name, suite.spec_names(where)) == ("mine", ["gemm_rope", "gemm_swiglu"])
    assert suites.load("mine", tmp_path) == suite


def test_the_digest_is_of_what_decides_a_trial(tmp_path: Path) -> None:
    digest = suites.load(written(tmp_path, GOOD)).digest
    for same in (
        GOOD.replace("T", "Another title"),
        "# a comment\n" + GOOD,
        GOOD + "trials = 5\n",
    ):
        assert suites.load(written(tmp_path, same)).digest == digest
    for other in (
        GOOD.replace("proved", "verified"), GOOD.replace("gemm_rope", "gemm_rmsnorm"), GOOD + 'gpu = "H200"\n',
        GOOD + "budget = { usd = 1.0 }\n", GOOD + "[shapes.gemm_rope]\nbench = [{ M = 1, N = 16, K = 8 }]\n",
    ):  # fmt: skip
        assert suites.load(written(tmp_path, other)).digest != digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("specs", "spec"), r"unknown key 'spec'; expected title, specs, shapes"),
        (GOOD + "budget = { euros = 3 }\n", "unknown key 'budget.euros'"),
        (GOOD.replace("proved", "great"), "goal: Input should be 'proved', 'verified' or 'accepted'"),
        ('title = "T"\ngoal = "proved"\n', "specs: Field required"),
        (GOOD.replace("gemm_swiglu", "gemm_rope"), "a spec is listed twice"),
        (GOOD + "[shapes.gemm_fp8_rmsnorm]\nbench = []\n", "gemm_fp8_rmsnorm is not among its specs"),
        (GOOD + "trials = 0\n", "trials: Input should be greater than 0"),
        (GOOD.replace('["gemm_rope", "gemm_swiglu"]', "[]"), "specs is empty, expected specs ="),
        (GOOD + "specs = 3\n", "Cannot overwrite a value"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_and_fault(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(CodaError, match=said) as caught:
        suites.load(written(tmp_path, text))
    assert caught.value.message.startswith(f"{tmp_path}/mine.toml: ")
    assert "\n" not in caught.value.message


def test_what_does_not_exist_is_refused(where: workspace.Workspace, tmp_path: Path) -> None:
    with pytest.raises(CodaError, match=r"no suite 'smok', nor a path \(did you mean smoke\?\)"):
        suites.load("smok")
    with pytest.raises(CodaError, match=r"nowhere\.toml cannot be read.*No such file"):
        suites.load(str(tmp_path / "nowhere.toml"))
    with pytest.raises(WorkspaceError, match=r"no spec named 'gemm_rop'.*did you mean"):
        suites.load(written(tmp_path, GOOD.replace("gemm_rope", "gemm_rop"))).spec_names(where)
    wrong = GOOD + "[shapes.gemm_rope]\nbench = [{ M = 1, N = 17, K = 8 }]\n"
    with pytest.raises(SpecError, match="N=17; expected a positive multiple of 16"):
        suites.load(written(tmp_path, wrong)).spec(where, "gemm_rope")
