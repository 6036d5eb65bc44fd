"""The right programs that tests of the judge's scores take."""

from __future__ import annotations

import pytest

from coda_agent.demos import demos
from coda_agent.evals.judge import corpus
from coda_agent.evals.judge.corpus import Subject
from coda_agent.runtime.loading import load_kernel
from tests.evals.small import ROOT


@pytest.fixture(scope="module")
def variants() -> list[Subject]:
    folders = sorted((ROOT / "generated").glob("*/evidence.json"))
    return corpus.kernels(load_kernel(file.parent) for file in folders)


@pytest.fixture(scope="module")
def kernels(variants: list[Subject]) -> list[Subject]:
    return [right for right in variants if right.is_default]


@pytest.fixture(scope="module")
def demonstrated() -> dict[str, Subject]:
    right, left_out = corpus.demonstrations(demos())
    # Tables, whose dims no kind of operand gives; a rounding that a spec in bfloat16 cannot mean.
    tables = ["gated_samples", "placed_tokens", "turned_halves"]
    assert left_out == ["rope_by_head", "stored_squares", *tables]
    return {r.name.removeprefix("demonstration "): r for r in right}
