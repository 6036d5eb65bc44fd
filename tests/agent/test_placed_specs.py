"""Specs whose values follow from an element's place: admitted, composed and judged."""

from __future__ import annotations

import pytest

from coda_agent.primitives import Scalar, Tile, dropout, epilogue
from coda_agent.specs import Spec
from tests.agent import verdicts
from tests.written import spec

BODIES = {
    "dropout": "return {'O': (C + d * (u >= 0.1) / 0.9).to(A.dtype)}",
    "noise": "return {'O': (C + d + u.float()).to(A.dtype)}",
    "triangles": "return {'O': (C + u + d.tril(2) + C.triu(-1)).to(A.dtype)}",
}


def spec_of(body: str) -> Spec:
    drawn = "d = (A @ B.T).float(); u = philox(seed, 3, *d.shape, device=d.device); "
    seed = "{shape: [], dtype: float32, draw: {integers: [0, 16777216]}}"
    return spec(
        drawn + body,
        {"C": "[M, N]", "seed": seed},
        name="placed",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 77, N: 384, K: 64}]\n",
    )


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.one_in(2)
def test_it_is_admitted_composed_and_right(name: str) -> None:
    made = spec_of(BODIES[name])
    programs = verdicts.composed(made)
    assert "philox_uniform" in {n.op for n in programs["placed"].graph.nodes}
    verdicts.right(made, programs)


def test_another_seed_is_another_function() -> None:
    @epilogue(O=Tile)
    def placed(acc, C: Tile, seed: Scalar):
        return {"O": C + dropout(acc, 0.1, 3, seed)}

    verdicts.refused(spec_of(BODIES["dropout"]), placed)
