"""Metrics against hand-computed cases and against independent ways to the same figures."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest

from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.state import Spent
from coda_agent.evals import metrics
from coda_agent.evals.metrics import COSTS, SCORES
from coda_agent.evals.trials import Trial

SOLVED, ROOFLINE, FASTER = SCORES.values()
ATTEMPTS = COSTS["attempts"]


def trial(spec: str = "a", number: int = 1, *, speed: float | None = None, **more: Any) -> Trial:
    """A trial that was accepted at this speed over torch.compile, or one that was refused."""
    about: JsonObject = {"commit": "abc1234", "machine": "NVIDIA H200", "date": "2026-01-01"}
    about |= {"suite": "s", "suite_digest": "d", "device": "cuda", "spec": spec, "run": "r"}
    about |= {"spec_digest": "d", "author": "x", "trial": number}
    about |= {"goal": "accepted", "attempts": 2, "spent": Spent(usd=0.0), "roofline": 0.5}
    about |= {"over_compile": speed, "outcome": "accepted" if speed else "refused"}
    return Trial.model_validate(about | more)


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
        trial("a", 1, speed=1.3, roofline=0.8), trial("a", 2, speed=0.95, roofline=0.6),
        trial("b", 1, speed=1.15, roofline=0.5), trial("b", 2), trial("b", 3), trial("b", 4),
        trial("c", 1), trial("c", 2, outcome="harness_fault"),
    ]  # fmt: skip
    groups = metrics.by_spec(records)
    assert {spec: len(trials) for spec, trials in groups.items()} == {"a": 2, "b": 4, "c": 1}

    def value(of: metrics.Value) -> float:
        found = metrics.score(groups, of)
        assert found and found.low <= found.value <= found.high
        return found.value

    # Specs weigh the same: a has 1, b 1/4, c 0.
    assert value(SOLVED) == pytest.approx((1 + 0.25 + 0) / 3)
    assert value(FASTER) == pytest.approx((0.5 + 0.25) / 3)
    assert value(ROOFLINE) == pytest.approx((0.7 + 0.5 / 4) / 3)
    assert metrics.passing(groups, 2) is None  # c has one trial that counts
    both = metrics.passing({spec: groups[spec] for spec in "ab"}, 2)
    assert both == pytest.approx((1 + 0.5) / 2)  # b: 3 of the 6 pairs hold the success
    assert metrics.score({}, SOLVED) is metrics.passing({}, 1) is None
    assert metrics.per_solution(records, ATTEMPTS) == pytest.approx(14 / 3)
    assert metrics.per_solution([trial()], ATTEMPTS) is None
    unknown = trial(speed=1.0, spent=Spent(usd=None))
    assert metrics.per_solution([*records, unknown], COSTS["USD"]) is None
    speeds = metrics.of_solved([*records, trial(roofline=0.9)], lambda t: t.over_compile)
    assert speeds == pytest.approx((1.3 * 0.95 * 1.15) ** (1 / 3))


def test_what_was_refused_scores_nothing_however_fast() -> None:
    refused = trial(over_compile=9.0, roofline=0.9)
    assert [value(refused) for value in SCORES.values()] == [0, 0, 0]
    assert not FASTER(trial(speed=1.0)) and FASTER(trial(speed=1.001))  # more than, not at least
    assert metrics.by_spec([trial(speed=9.0, outcome="harness_fault")]) == {}


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


def ranks(one: metrics.Groups, other: metrics.Groups, value: metrics.Value = SOLVED) -> list[int]:
    return [*metrics.ranks({"one": one, "other": other}, value).values()]


def test_authors_are_ranked_apart_only_where_their_difference_is_not_chance() -> None:
    good, good_too, bad = (
        author([rate] * 10, 5, seed) for rate, seed in ((0.9, 1), (0.9, 2), (0.2, 3))
    )
    authors = {"bad": bad, "good": good, "good too": good_too}
    assert metrics.ranks(authors, SOLVED) == {"bad": 3, "good": 1, "good too": 1}


def test_few_specs_rank_nobody_apart() -> None:
    for specs, expected in ((5, [1, 1]), (6, [1, 2])):
        sure, never = (author([rate] * specs, 3, 0) for rate in (1.0, 0.0))
        assert ranks(sure, never) == expected
    assert ranks(author([1.0], 1, 0), {"other": [trial("other")]}) == [1, 1]


def test_the_difference_is_paired() -> None:
    """Specs differ far more than the authors do; paired, a small constant lead shows."""
    lead = {f"s{i}": [trial(f"s{i}", speed=1.1, attempts=10 * i + 1)] for i in range(10)}
    lag = {f"s{i}": [trial(f"s{i}", speed=1.1, attempts=10 * i)] for i in range(10)}
    assert ranks(lead, lag, ATTEMPTS) == [1, 2]


def test_equal_authors_are_rarely_ranked_apart() -> None:
    wrong = 0
    for seed in range(100):
        pair = [author([0.3, 0.5, 0.7, 0.9] * 2, 2, 1000 + 2 * seed + i) for i in (0, 1)]
        wrong += ranks(pair[0], pair[1]) != [1, 1]
    assert wrong <= 12
