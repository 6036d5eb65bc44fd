"""The wrong programs that people wrote: each is a program, another one than accepted, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.evals.judge import by_hand, corpus, scores
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import Mutant
from coda_agent.primitives.errors import CodaError
from coda_agent.runtime.loading import load_kernel

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def kernels() -> dict[str, tuple[Subject, str]]:
    files = sorted((ROOT / "generated").glob("*/kernel.py"))
    rights = (corpus.kernels([load_kernel(file.parent)])[0] for file in files)
    return {r.spec.name: (r, file.read_text()) for r, file in zip(rights, files, strict=True)}


@pytest.fixture(scope="module")
def sets(kernels: dict[str, tuple[Subject, str]]) -> dict[str, list[Mutant]]:
    return {name: by_hand.written(name, kernels) for name in by_hand.SETS}


def test_each_set_is_of_different_wrong_programs(sets: dict[str, list[Mutant]]) -> None:
    assert len(sets["found"]) >= 40 and len(sets["blind"]) >= 200
    for found in sets.values():
        assert len({m.name for m in found}) == len(found)
        assert len({m.program.digest for m in found}) == len(found)
        assert all(m.program.digest != m.right.program.digest for m in found)
    assert len({m.right.spec.name for m in sets["blind"]}) == 19


def test_a_sample_of_them_is_refused(sets: dict[str, list[Mutant]]) -> None:
    judge = scores.Judge(ROOT, "cpu")
    sample = [*sets["found"][::15], *sets["blind"][::50]]
    layers = {m.name: scores.trial(judge, m, seed=5)["layer"] for m in sample}
    assert {n: x for n, x in layers.items() if x not in ("signature", "numerics")} == {}


def test_an_entry_that_fits_no_kernel_is_named(kernels: dict[str, tuple[Subject, str]]) -> None:
    kernels = {**kernels, "gemm_rope": (kernels["gemm_rope"][0], "")}
    with pytest.raises(CodaError, match="the program of 'gemm_rope' does not hold 'pairs"):
        by_hand.written("found", kernels)
