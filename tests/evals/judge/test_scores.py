"""Tests of evals/judge/scores.py: mutants and right programs judged, records that resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.agent.judge.records import VERSIONS, JsonObject
from coda_agent.evals.cells import read
from coda_agent.evals.judge import scores
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import suite
from coda_agent.evals.judge.scores import Score, recorded

SEED = 5
JUDGE = scores.Judge(Path(), "cpu")


@pytest.mark.slow
def test_a_stratified_sample_is_killed_and_mostly_diagnosed(
    kernels: list[Subject], demonstrated: dict[str, Subject]
) -> None:
    small = [r for r in kernels if r.spec.name == "gemm_rmsnorm_swiglu"]
    small += [demonstrated["gelu_backward"], demonstrated["gated_statistics"]]
    sample = [m for m in suite(small, seed=SEED, count=22) if "memo" not in m.operator]
    cells = {m.name: scores.trial(JUDGE, m, seed=SEED) for m in sample}
    assert [name for name, c in cells.items() if c["layer"] == "survived"] == []
    assert {c["layer"] for c in cells.values()} >= {"numerics", "signature"}
    named = [c["fault"] in c["expected"] for c in cells.values() if "fault" in c]
    assert len(named) >= 10 and sum(named) >= 0.8 * len(named)


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same gates and seed; else all is judged again."""
    done: list[str] = []

    def job(name: str, stop: bool = False) -> JsonObject:
        if stop:
            raise KeyboardInterrupt
        done.append(name)
        return {"layer": "numerics"}

    def run(seed: int = 1, stop: bool = False) -> dict[str, Score]:
        jobs = {"one": lambda: job("one"), "two": lambda: job("two", stop)}
        return recorded(scores.Judge(tmp_path, "cpu"), "mutants", jobs, seed=seed)

    monkeypatch.setenv("CODA_AGENT_COMMIT", "abc1234")
    with pytest.raises(KeyboardInterrupt):
        run(stop=True)
    assert [*run()] == ["one", "two"] == done
    path = tmp_path / "evals" / "results" / "judge-mutants-cpu.jsonl"
    assert {s.commit for s in read(path, Score).values()} == {"abc1234"}
    run(seed=2)
    assert done == ["one", "two"] * 2
    monkeypatch.setitem(VERSIONS, "performance", 99)
    assert not any(score.stale for score in run(seed=2).values()) and done == ["one", "two"] * 2
    monkeypatch.setitem(VERSIONS, "numerics", 99)
    assert {tuple(s.stale) for s in read(path, Score).values()} == {("numerics",)}
    assert not any(score.stale for score in run(seed=2).values()) and done == ["one", "two"] * 3


def test_right_programs_have_a_cell_a_spec(tmp_path: Path, variants: list[Subject]) -> None:
    right = [r for r in variants if r.spec.name == "gemm_swiglu"][:1]
    wrong = right[0].with_program(right[0].program, f"{right[0].name}: another")
    judge = scores.Judge(tmp_path, "cpu")
    judge.numerics = lambda subject, *_: (  # type: ignore[method-assign]
        None if subject is not wrong else type("F", (), {"message": "off"})()
    )
    (score,) = scores.score_corpus(judge, [*right, wrong], repeat=3).values()
    assert score.cell == {
        "programs": [right[0].name, wrong.name], "trials": 6, "refused": [f"{wrong.name}: off"] * 3,
    }  # fmt: skip
