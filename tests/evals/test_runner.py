"""Tests of evals/runner.py: what is measured, checked, kept, skipped and said."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.judge.samples import Samples
from coda_agent.evals.cases import Absent, Call, Case, Contender, Setup, Suite
from coda_agent.evals.cells import Cell, Record, read
from coda_agent.evals.runner import Bench, Choice, fallbacks
from coda_agent.primitives.errors import CodaError, MachineError

TIMES = {"ours": 200.0, "eager": 300.0, "gemm": 190.0, "liger": 250.0}
HERE = Record(commit="abc1234", machine="NVIDIA H200, driver 1, torch 2", date="2026-11-25")


class Clock:
    """Says the times that it is told, after one call of each; stops after so many cases."""

    def __init__(self, cases: int = 99, **faults: str) -> None:
        self.cases, self.faults, self.seen = cases, faults, list[list[str]]()

    def __call__(self, calls: Mapping[str, Call], rounds: int, _: str) -> Mapping[str, Samples]:
        if len(self.seen) == self.cases:
            raise KeyboardInterrupt
        self.seen.append([*calls])
        for call in calls.values():
            call(0)
        return {n: Samples((TIMES[n],) * rounds, None, self.faults.get(n, "")) for n in calls}


def fails(fault: Exception) -> Any:
    def make() -> Contender:
        raise fault

    return make


def case(name: str, *, limit: float = 0.1, **makers: Any) -> Case:
    """A case whose truth is 1; ours is 1 % off, and PyTorch 2 %."""

    def off(by: float) -> Callable[[], Contender]:
        return lambda: Contender(lambda _: {"y": torch.tensor([1.0 + by])}, note=lambda: "a note")

    def make(device: str, shrink: int) -> Setup:
        known = {"ours": off(0.01), "eager": off(0.02), "gemm": lambda: Contender(lambda _: {})}
        return Setup({**known, **makers}, {"y": torch.ones(1)}, limit)

    return Case(name, ("ours", "eager", "gemm", *makers), make)


def suite(*cases: Case, regimes: Sequence[str] = ("warm",)) -> Suite:
    return Suite("tiny", "", cases, regimes, 20)


def run(root: Path, what: Suite, clock: Any = None, *, about: Record = HERE, **choice: Any) -> Any:
    said, clock = list[str](), clock or Clock()
    bench = Bench(root, about, "cpu", 1, {"warm": clock, "steady": clock})
    path = bench.run(what, Choice(**choice), said.append)
    return said, {key[:3]: cell for key, cell in read(path, Cell).items()}


def test_a_cell_has_times_ratios_errors_and_what_it_was_measured_with(tmp_path: Path) -> None:
    said, cells = run(tmp_path, suite(case("one")))
    ours, eager, gemm = cells.values()
    assert (ours.time_us, ours.interval_us, ours.ratio) == (200.0, (200.0, 200.0), 1.0)
    assert (eager.ratio, eager.ratio_interval, gemm.ratio) == (1.5, (1.5, 1.5), 0.95)
    assert (ours.error, ours.error_ratio, eager.error) == (0.01, 0.5, 0.02)
    assert gemm.error is None and ours.note == "a note"
    assert {(c.commit, c.machine, c.date, c.suite) for c in cells.values()} == {
        ("abc1234", HERE.machine, "2026-11-25", "tiny")
    }
    assert said[0] == "0 of 1 cases are in the record"
    assert said[1].startswith("1/1 one: error 0.50 of eager, over eager 1.500 warm")


def test_cells_that_are_there_are_skipped(tmp_path: Path) -> None:
    cases, clock = suite(case("one"), case("two")), Clock()
    run(tmp_path, cases, clock)
    said, _ = run(tmp_path, cases, clock)
    assert said == ["2 of 2 cases are in the record"] and len(clock.seen) == 2
    run(tmp_path, cases, clock, again=True)
    assert len(clock.seen) == 2  # of this commit
    later = HERE.model_copy(update={"commit": "fedcba9"})
    run(tmp_path, cases, clock, about=later)
    assert len(clock.seen) == 2
    _, cells = run(tmp_path, cases, clock, about=later, again=True, cases=["one"])
    assert clock.seen[2:] == [["eager", "ours", "gemm"]]
    assert {c.case: c.commit for c in cells.values()} == {"one": "fedcba9", "two": "abc1234"}
    other = HERE.model_copy(update={"machine": "NVIDIA H100, driver 1, torch 2"})
    run(tmp_path, cases, clock, about=other, cases=["two"])
    assert len(clock.seen) == 4
    run(tmp_path, cases, clock, about=other, regimes=["steady"], cases=["two"])
    assert len(clock.seen) == 5


def test_an_interruption_loses_one_case_and_seconds_are_heeded(tmp_path: Path) -> None:
    cases = suite(case("one"), case("two"), case("three"))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, cases, Clock(cases=1))
    said, cells = run(tmp_path, cases, seconds=0)
    assert said[0] == "1 of 3 cases are in the record"
    assert said[-1] == "stopped after 0 s: 1 cases are left"
    assert {c.case for c in cells.values()} == {"one", "two"}


def test_what_is_wrong_or_cannot_run_is_kept_with_the_reason(tmp_path: Path) -> None:
    wrong = lambda: Contender(lambda _: {"y": torch.tensor([1.2])})
    late = lambda: Contender(lambda i: {"y": torch.ones(1)} if i == 0 else fails(OSError("late"))())
    makers = {"wrong": wrong, "late": late, "library": fails(ImportError("no module")),
              "none": fails(Absent("has nothing")), "compile": fails(AssertionError()),
              "memory": fails(torch.OutOfMemoryError("out of memory\nmuch more"))}  # fmt: skip
    clock = Clock()
    _, cells = run(tmp_path, suite(case("one", **makers)), clock)
    assert {c.contender: c.absent for c in cells.values() if c.absent} == {
        "wrong": "computes something else: error 2.0e-01", "late": "OSError: late",
        "library": "not installed: no module", "none": "has nothing",
        "compile": "needs a GPU", "memory": "OutOfMemoryError: out of memory",
    }  # fmt: skip
    assert clock.seen == [["eager", "ours", "gemm"]]
    run(tmp_path, suite(case("one", **makers)), clock)
    assert len(clock.seen) == 1  # an answer like another
    _, cells = run(tmp_path, suite(case("two", limit=0.001)))
    assert cells["two", "ours", "warm"].absent == "computes something else: error 1.0e-02"
    assert cells["two", "eager", "warm"].error == 0.02  # nobody judges the form to compare with


def test_a_gpu_that_faulted_ends_the_run(tmp_path: Path) -> None:
    """What follows would fail too, and be kept as absent."""
    broken = case("one", liger=fails(RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(MachineError, match="one: liger: RuntimeError: CUDA error"):
        run(tmp_path, suite(broken))
    assert read(tmp_path / "evals" / "results" / "tiny.jsonl", Cell) == {}


def test_what_the_clocks_disagree_about_is_said_and_not_kept(tmp_path: Path) -> None:
    said, cells = run(tmp_path, suite(case("one")), Clock(gemm="the clocks disagree"))
    assert [key[1] for key in cells] == ["ours", "eager"]
    assert "one: gemm, warm: not kept: the clocks disagree" in said
    _, cells = run(tmp_path, suite(case("one")))
    assert [key[1] for key in cells] == ["ours", "eager", "gemm"]
    _, cells = run(tmp_path, suite(case("two")), Clock(ours="the clocks disagree"))
    assert cells["two", "eager", "warm"].ratio is None


def test_contenders_and_regimes_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = lambda: Contender(lambda _: {})
    cases = suite(case("one", liger=fine), case("block one"), regimes=("warm", "steady"))
    clock = Clock()
    monkeypatch.setattr("coda_agent.evals.runner.find_spec", lambda name: None)
    run(tmp_path, cases, clock, contenders=["liger"], cases=["block one"])
    assert clock.seen == [["eager", "ours"]] * 2
    run(tmp_path, cases, clock, cases=["one"], regimes=["steady"])
    assert clock.seen[2:] == [["eager", "ours", "gemm"]] * 2  # liger is not installed
    monkeypatch.undo()
    _, cells = run(tmp_path, cases, clock, regimes=["untimed"])
    assert len(clock.seen) == 4
    assert cells["one", "ours", "untimed"].time_us is None
    wrong: list[JsonObject] = [
        {"cases": ["bloc"]}, {"contenders": ["mine"]}, {"regimes": ["cold"]}
    ]  # fmt: skip
    for choice in wrong:
        with pytest.raises(CodaError, match=r"no (case|contender|regime) '"):
            run(tmp_path, cases, clock, **choice)


def test_what_torch_compile_leaves_as_it_was_is_named() -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break("on purpose")
        return x * 2

    for function, expected in ((whole, []), (broken, ["graph break: "])):
        with fallbacks() as said:
            torch.compile(function, backend="eager")(torch.ones(2))
        assert [line[:13] for line in said] == expected
    with fallbacks() as said:  # as where Triton does not compile a kernel that is traced
        try:
            raise ValueError
        except ValueError:
            logger = logging.getLogger("torch._higher_order_ops.triton_kernel_wrap")
            logger.warning("Encountered an exception", exc_info=True)
    assert said == ["Encountered an exception (ValueError)"]


def test_an_error_that_is_no_number_is_wrong(tmp_path: Path) -> None:
    nan = lambda: Contender(lambda _: {"y": torch.tensor([math.nan])})
    _, cells = run(tmp_path, suite(case("one", liger=nan)))
    assert cells["one", "liger", "warm"].absent == "computes something else: error inf"
