"""Specs whose values follow from an element's place: admitted, composed and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer, load
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.primitives import Scalar, Tile, dropout, epilogue
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.admission import admit

SPEC = """---
name: placed
level: compose
summary: values of places
types: {T: [bfloat16]}
dims: {M: {}, N: {multiple_of: 16}, K: {multiple_of: 8}}
gemm: [A, B]
inputs:
  A: {shape: [M, K], dtype: T, draw: normal}
  B: {shape: [N, K], dtype: T, draw: {normal: {std: K**-0.5}}}
  C: {shape: [M, N], dtype: T, draw: normal}
  seed: {shape: [], dtype: float32, draw: {integers: [0, 16777216]}}
outputs:
  O: {shape: [M, N], dtype: T}
check_shapes: [{M: 77, N: 384, K: 64}]
bench_shapes: [{M: 4096, N: 4096, K: 4096}]
tolerance: {multiple: 2.0}
target: 0.9
---
```python reference
from coda_agent.primitives.placed import philox


def reference(A, B, C, seed):
    d = (A @ B.T).float()
    u = philox(seed, 3, *d.shape, device=d.device)
<body>
```
"""
BODIES = {
    "dropout": "    return {'O': (C + d * (u >= 0.1) / 0.9).to(A.dtype)}",
    "noise": "    return {'O': (C + d + u.float()).to(A.dtype)}",
    "lower": "    return {'O': (C + u + d.tril(2)).to(A.dtype)}",
    "upper": "    return {'O': (C + u + d.triu(-1)).to(A.dtype)}",
}


def spec_of(body: str) -> Spec:
    return load_spec(Path("placed.md"), text=SPEC.replace("<body>", body))


@pytest.mark.parametrize("name", BODIES)
def test_it_is_admitted_composed_and_right(name: str) -> None:
    spec = spec_of(BODIES[name])
    admit(spec)
    programs = load(Composer().write(spec, lambda *_: None))
    assert "philox_uniform" in {n.op for n in programs["placed"].graph.nodes}
    assert check_meaning(spec, programs) == []
    tiles = {("placed", "bfloat16"): (TileConfig(128, 128),)}
    report = check_numerics(spec, programs, tiles, device="cpu", progress=lambda *_: None)
    assert report.findings == ()


def test_another_seed_is_another_function() -> None:
    @epilogue(O=Tile)
    def placed(acc, C: Tile, seed: Scalar):
        return {"O": C + dropout(acc, 0.1, 3, seed)}

    (finding,) = check_meaning(spec_of(BODIES["dropout"]), {"placed": placed})
    assert "another function" in finding.message
