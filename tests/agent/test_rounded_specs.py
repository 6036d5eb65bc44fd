"""Specs that round and compute on: composed, and judged on the rounding as on anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.agent.judge.runners import run_interpreter
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives import ColVector, Tile, epilogue, to_e4m3, to_e5m2
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec
from tests import written
from tests.agent import verdicts


@pytest.fixture(scope="module")
def spec() -> Spec:
    return written.spec(
        "r = r[:, None]; q = ((A @ B.T).float() / r).clamp(-448, 448).to(torch.float8_e4m3fn); "
        "return {'O': (q.float() * r).to(A.dtype)}",
        {"r": "{shape: [M], dtype: float32, draw: {uniform: [0.5, 1.5]}, domain: [0.01, 100]}"},
        name="fake",
        header="types: {T: [bfloat16]}\n"
        "check_shapes: [{M: 256, N: 512, K: 1024}, {M: 33, N: 48, K: 16}]\n",
    )


@epilogue(O=Tile)
def without(acc, r: ColVector):
    return {"O": acc / r * r}


@epilogue(O=Tile)
def another(acc, r: ColVector):
    return {"O": to_e5m2(acc / r) * r}


@epilogue(O=Tile)
def unsaturated(acc, r: ColVector):
    return {"O": to_e4m3(acc * 2.0 / r) * r * 0.5}


@pytest.mark.parametrize("program", [without, another, unsaturated], ids=lambda p: p.name)
def test_another_rounding_is_another_function(spec: Spec, program: Program) -> None:
    verdicts.refused(spec, program)


def test_it_is_admitted_composed_and_right(spec: Spec) -> None:
    assert "to_e4m3" in {n.op for n in verdicts.composed(spec)["fake"].graph.nodes}


@pytest.mark.parametrize("seed", range(3))
def test_float32_falls_on_either_side_of_a_tie(spec: Spec, seed: int) -> None:
    """A kernel's sums err in their last bits, and near a tie a whole step of e4m3 follows."""
    programs = read_programs(Composer().write(spec, lambda *_: None))
    tiles = {("fake", "bfloat16"): (TileConfig(128, 128),)}
    moved = 0

    def erring(
        spec: Spec, program: Program, inputs: Any, config: TileConfig, dtypes: Any
    ) -> dict[str, torch.Tensor]:
        nonlocal moved
        # As much as float32 loses in a sum of 16 and a quotient.
        near = {**inputs, "r": inputs["r"] * (1 + 2.0**-20)}
        right, found = (run_interpreter(spec, program, x, config, dtypes) for x in (inputs, near))
        moved += int((right["O"] != found["O"]).sum())
        return found

    report = check_numerics(
        Variant.of_all(spec, programs),
        tiles,
        device="cpu",
        progress=lambda *_: None,
        run=erring,
        seed=seed,
    )
    assert report.findings == ()
    assert moved > 5
