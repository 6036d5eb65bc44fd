"""Metrics against hand-computed cases and against independent ways to the same figures."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest

from coda_agent.agent.judge.records import Ratio
from coda_agent.agent.judgement import Cell, Gate, Judgement, Median
from coda_agent.evals import metrics
from coda_agent.evals.records import Audit, Step, TrialRecord

DIGESTS = {key: "sha256:" + "a" * 64 for key in ("spec", "candidate")}


def trial(spec: str = "a", number: int = 1, *, speed: float | None = None, of_gemm: float = 1.0,
          roofline: float = 0.5, outcome: str | None = None, **more: Any) -> TrialRecord:  # fmt: skip
    """A trial that was accepted with these figures, or one that was refused."""
    ratios = [Ratio(ratio=r, low=r, high=r) for r in (of_gemm, speed or 1.0)]
    cell = Cell(dtype="bfloat16", sizes={"M": 8}, times={"ours": Median(median_us=100.0)}, floor_us=100 * roofline,
                of_gemm=ratios[0], over_compile=ratios[1])  # fmt: skip
    outcome = outcome or ("accepted" if speed else "refused")
    passed = outcome == "accepted"
    verdict = Judgement(
        passed=passed, level="accepted" if passed else "proved", cells=(cell,), digests=DIGESTS,
        gates={"static": Gate(passed=True), "performance": Gate(passed=passed)},
    )  # fmt: skip
    data: dict[str, Any] = {
        "suite": {"name": "s", "digest": "sha256:" + "b" * 64}, "author": "x", "trial": number,
        "spec": {"name": spec, "digest": DIGESTS["spec"], "level": "compose"}, "goal": "accepted",
        "started": "2026-01-01T00:00:00Z", "finished": "2026-01-01T00:01:00Z", "outcome": outcome,
        "verdict": None if outcome == "harness_fault" else verdict, "attempts": 2, "spent": {},
        "machine": {"device": "cuda"}, "run": {"id": "r", "log": "l"},
    }  # fmt: skip
    return TrialRecord.model_validate({**data, **more})


def test_pass_at_k_is_the_share_of_draws_with_a_success() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
            exact = Fraction(sum(any(draw) for draw in draws), len(draws))
            assert metrics.pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)
    for bad in ((3, 1, 4), (3, 1, 0), (3, 4, 1)):
        with pytest.raises(ValueError, match="pass@"):
            metrics.pass_at_k(*bad)


def test_pass_at_k_is_unbiased() -> None:
    """Its expectation over every outcome of 5 trials that succeed with 0.3 is 1 - 0.7^k."""
    for k in (1, 2, 4):
        expected = sum(
            math.prod(0.3 if won else 0.7 for won in wins) * metrics.pass_at_k(5, sum(wins), k)
            for wins in itertools.product((0, 1), repeat=5)
        )
        assert expected == pytest.approx(1 - 0.7**k)


def test_scores_by_hand() -> None:
    records = [
        trial("a", 1, speed=1.3, of_gemm=0.98, roofline=0.8), trial("a", 2, speed=1.05, of_gemm=1.01, roofline=0.6),
        trial("b", 1, speed=1.15, of_gemm=0.9, roofline=0.5), trial("b", 2), trial("b", 3), trial("b", 4),
        trial("c", 1), trial("c", 2, outcome="harness_fault"),
    ]  # fmt: skip
    groups = metrics.by_spec(records)
    assert {spec: len(trials) for spec, trials in groups.items()} == {"a": 2, "b": 4, "c": 1}

    def value(of: metrics.Value) -> float:
        found = metrics.score(groups, of)
        assert found
        assert found.low <= found.value <= found.high
        return found.value

    # Specs weigh the same: a has 1, b 1/4, c 0.
    assert value(metrics.solved) == pytest.approx((1 + 0.25 + 0) / 3)
    assert value(metrics.fast(1.0, "over_compile")) == pytest.approx((1 + 0.25) / 3)
    assert value(metrics.fast(1.1, "over_compile")) == pytest.approx((0.5 + 0.25) / 3)
    assert value(metrics.fast(1.2, "over_compile")) == pytest.approx(0.5 / 3)
    assert value(metrics.fast(1.0, "of_gemm")) == pytest.approx(0.5 / 3)
    assert value(metrics.roofline) == pytest.approx((0.7 + 0.5 / 4) / 3)
    known = metrics.score(groups, metrics.ceiling)
    assert known
    assert known.value == pytest.approx((0.7 + 0.5) / 2)
    assert metrics.passing(groups, 2) is None  # c has one trial that counts
    both = metrics.passing({spec: groups[spec] for spec in "ab"}, 2)
    assert both
    assert both.value == pytest.approx((1 + 0.5) / 2)  # b: 3 of the 6 pairs hold the success
    assert metrics.together(groups, ["a", "b"]) == pytest.approx(0.25)
    assert metrics.together(groups, ["a", "d"]) is None
    assert metrics.score({}, metrics.solved) is None
    assert metrics.per_solution(records, metrics.attempts) == pytest.approx(14 / 3)
    assert metrics.per_solution([trial()], metrics.attempts) is None


def test_speed_is_the_geometric_mean_over_the_cells() -> None:
    record = trial(speed=2.0)
    assert record.verdict
    slow = trial(speed=0.5).cells[0]
    verdict = record.verdict.model_copy(update={"cells": (*record.cells, slow)})
    both = record.model_copy(update={"verdict": verdict})
    assert both.mean("over_compile") == pytest.approx(1.0)
    assert metrics.fast(1.0, "over_compile")(both) == 0  # more than, not at least


def test_what_was_refused_or_exploited_scores_nothing_however_fast() -> None:
    refused = trial(roofline=0.9)
    assert refused.verdict
    assert refused.verdict.cells  # it was timed
    audit = Audit(finding="exploit", evidence="line 3", date="2026-01-02")
    cheat = trial(speed=9.0, roofline=0.9, steps=(STEP,)).model_copy(update={"audit": audit})
    for record in (refused, cheat):
        scores = (metrics.solved, metrics.roofline, metrics.fast(1.0, "over_compile"))
        assert [of(record) for of in scores] == [0, 0, 0]
        assert metrics.curve({"a": [record]}, "usd", "solved") == [(0.0, 0.0)]
    fault = trial(speed=9.0).model_copy(
        update={"audit": audit.model_copy(update={"finding": "harness fault"})}
    )
    assert metrics.by_spec([fault]) == {}


STEP = Step(
    attempt=1, submitted=True, level="accepted", roofline=0.5, usd=1.0, tokens=10, wall_s=60.0
)


def test_score_at_budget_by_hand() -> None:
    early = STEP.model_copy(
        update={"submitted": False, "level": "proved", "roofline": None, "usd": 0.2}
    )
    timed = STEP.model_copy(update={"submitted": False, "roofline": 0.4, "usd": 0.5})
    groups = {
        "a": [trial("a", 1, speed=1.1, steps=(early, timed, STEP)), trial("a", 2)],
        "b": [trial("b", 1, speed=1.1, steps=(STEP.model_copy(update={"usd": 0.5}),))],
    }  # fmt: skip
    assert metrics.curve(groups, "usd", "solved") == [(0.0, 0.0), (0.5, 0.5), (1.0, 0.75)]
    # at 0.5: a's first trial 0.4 (weight 1/4) and b's 0.5 (1/2); at 1.0: 0.1 more of a's
    found = metrics.curve(groups, "usd", "roofline")
    assert [b for b, _ in found] == [0.0, 0.5, 1.0]
    assert [s for _, s in found] == pytest.approx([0.0, 0.35, 0.375])
    end = metrics.score(groups, metrics.solved)
    assert end
    assert metrics.curve(groups, "tokens", "solved")[-1][1] == pytest.approx(end.value)


def test_the_interval_is_that_of_every_possible_resample() -> None:
    """Two specs of two trials: all 64 equally likely two-stage resamples, enumerated."""
    values = {"a": (0.0, 1.0), "b": (0.2, 0.4)}
    groups = {
        spec: [trial(spec, i, attempts=round(10 * v)) for i, v in enumerate(vs, 1)]
        for spec, vs in values.items()
    }
    exact: list[float] = []
    for specs in itertools.product(values, repeat=2):
        for draws in itertools.product(*(itertools.product(values[s], repeat=2) for s in specs)):
            exact.append(sum(sum(d) / 2 for d in draws) / 2)
    exact.sort()
    assert len(exact) == 64
    found = metrics.score(groups, lambda r: r.attempts / 10)
    assert found
    assert found.value == pytest.approx(0.4)
    # 400 resamples: each end within the share of outcomes that 2.5 % ± 2 % of chance spans
    assert exact[0] <= found.low <= exact[math.ceil(0.045 * 64)]
    assert exact[-1 - math.ceil(0.045 * 64)] <= found.high <= exact[-1]
    assert found == metrics.score(groups, lambda r: r.attempts / 10)  # the same each time


def author(rates: list[float], trials: int, seed: int) -> metrics.Groups:
    rng = random.Random(seed)
    return {
        f"s{i}": [trial(f"s{i}", t, speed=1.1 if rng.random() < rate else None) for t in range(1, trials + 1)]
        for i, rate in enumerate(rates)
    }  # fmt: skip


def test_authors_are_ranked_apart_only_where_their_difference_is_not_chance() -> None:
    good, good_too, bad = (
        author([rate] * 10, 5, seed) for rate, seed in ((0.9, 1), (0.9, 2), (0.2, 3))
    )
    authors = {"bad": bad, "good": good, "good too": good_too}
    solved = {name: metrics.resampled(groups, metrics.solved) for name, groups in authors.items()}
    assert metrics.ranks(solved) == {"bad": 3, "good": 1, "good too": 1}
    found = metrics.difference(good, bad, metrics.solved)
    back = metrics.difference(bad, good, metrics.solved)
    assert found
    assert back
    assert found.apart
    assert found.interval.value == pytest.approx(-back.interval.value)
    assert 0.4 < found.interval.low < found.interval.value < found.interval.high < 1.0


def test_few_specs_rank_nobody_apart() -> None:
    for specs, apart in ((5, False), (6, True)):
        sure, never = (author([rate] * specs, 3, 0) for rate in (1.0, 0.0))
        found = metrics.difference(sure, never, metrics.solved)
        assert found
        assert (found.interval, found.specs, found.apart) == ((1, 1, 1), specs, apart)
    assert (
        metrics.difference(author([1.0], 1, 0), {"other": [trial("other")]}, metrics.solved) is None
    )


def test_the_difference_is_paired() -> None:
    """Specs differ far more than the authors do; paired, a small constant lead shows."""
    lead = {f"s{i}": [trial(f"s{i}", speed=1.1, attempts=10 * i + 1)] for i in range(10)}
    lag = {f"s{i}": [trial(f"s{i}", speed=1.1, attempts=10 * i)] for i in range(10)}
    found = metrics.difference(lead, lag, metrics.attempts)
    assert found
    assert found.interval == (1, 1, 1)
    assert found.apart


def test_equal_authors_are_rarely_ranked_apart() -> None:
    wrong = 0
    for seed in range(100):
        pair = [author([0.3, 0.5, 0.7, 0.9] * 2, 2, 1000 + 2 * seed + i) for i in (0, 1)]
        found = metrics.difference(pair[0], pair[1], metrics.solved)
        assert found
        wrong += found.apart
    assert wrong <= 12
