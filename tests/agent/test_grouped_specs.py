"""Specs with statistics over groups of adjacent columns: composed as PyTorch spells them, and judged."""

from __future__ import annotations

import pytest

from coda_agent.agent.judge.compile_gate import check_signature, jobs_for
from coda_agent.primitives import (
    ColVector,
    GroupTile128,
    HalfTile,
    Program,
    RowVector,
    Tile,
    absolute,
    epilogue,
    exp,
    group_max,
    group_mean,
    group_sum,
    pairs,
    rsqrt,
    silu,
)
from coda_agent.primitives.tiles import offered
from coda_agent.specs import Spec
from tests.agent import verdicts
from tests.written import spec

VECTOR = "dtype: float32, draw: {uniform: [0.5, 1.5]}, domain: [0.01, 100]"
FULL, HALF = {"O": "[M, N]"}, {"O": "[M, N/2]"}
SCALED = {**FULL, "s": "{shape: [M, N/128], dtype: float32}"}


@epilogue(O=Tile)
def rms(acc, r: ColVector, g: RowVector):
    x = acc * g + r
    return {"O": x * rsqrt(group_mean(x * x, 64) + 1e-6)}


@epilogue(O=Tile)
def normalised(acc, r: ColVector, g: RowVector):
    e = exp((acc * g + r) * r)
    return {"O": e / group_sum(e, 32)}


@epilogue(O=Tile, s=GroupTile128)
def scaled(acc, r: ColVector, g: RowVector):
    x = acc * g + r
    s = group_max(absolute(x), 128) * (1 / 448)
    return {"O": x / s, "s": s}


@epilogue(O=HalfTile)
def gated(acc, r: ColVector, g: RowVector):
    gate, up = pairs(acc * g + r)
    h = silu(gate) * up
    return {"O": h - group_mean(h, 16)}


CASES = [
    (
        rms,
        FULL,
        [
            "h = x.view(x.shape[0], -1, 64)",
            "n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
            "return {'O': n.reshape(x.shape).to(A.dtype)}",
        ],
    ),
    (
        rms,
        FULL,
        [
            "m = (x * x).unflatten(1, (-1, 64)).mean(2).add(1e-6).rsqrt()",
            "return {'O': (x * m.repeat_interleave(64, 1)).to(A.dtype)}",
        ],
    ),
    (
        normalised,
        FULL,
        [
            "e = (x * r[:, None]).exp().unflatten(-1, (-1, 32))",
            "return {'O': (e / e.sum(-1, keepdim=True)).flatten(1).to(A.dtype)}",
        ],
    ),
    (
        scaled,
        SCALED,
        [
            "s = x.abs().view(x.shape[0], -1, 128).amax(-1) / 448",
            "q = x.view(x.shape[0], -1, 128) / s[..., None]",
            "return {'O': q.view_as(x).to(A.dtype), 's': s}",
        ],
    ),
    (
        gated,
        HALF,
        [
            "h = (F.silu(x[:, 0::2]) * x[:, 1::2]).unflatten(-1, (-1, 16))",
            "return {'O': (h - h.mean(-1, keepdim=True)).flatten(1).to(A.dtype)}",
        ],
    ),
]


def spec_of(outputs: dict[str, str], body: list[str]) -> Spec:
    return spec(
        "\n".join(["x = (A @ B.T).float() * g + r[:, None]", *body]),
        {"r": f"{{shape: [M], {VECTOR}}}", "g": f"{{shape: [N], {VECTOR}}}"},
        outputs,
        name="grouped",
        header="types: {T: [bfloat16]}\ndims: {M: {}, N: {multiple_of: 128}, K: {multiple_of: 8}}\n"
        "check_shapes: [{M: 77, N: 384, K: 64}]\n",
    )


@pytest.mark.parametrize(
    ("program", "outputs", "body"), CASES, ids=[f"{p.name}{i}" for i, (p, *_) in enumerate(CASES)]
)
@pytest.mark.one_in(2)
def test_as_pytorch_spells_it(program: Program, outputs: dict[str, str], body: list[str]) -> None:
    made = spec_of(outputs, body)
    programs = verdicts.composed(made)
    assert programs["grouped"].digest == program.digest
    assert check_signature(made, programs) == []
    verdicts.right(made, programs)


def test_another_width_is_another_function() -> None:

    @epilogue(O=Tile)
    def wider(acc, r: ColVector, g: RowVector):
        x = acc * g + r
        return {"O": x * rsqrt(group_mean(x * x, 128) + 1e-6)}

    verdicts.refused(spec_of(*CASES[0][1:]), wider)


def test_a_group_that_the_columns_do_not_fill_is_one_line() -> None:
    made = spec(
        "x = (A @ B.T).float().unflatten(1, (-1, 32))\n"
        "return {'O': (x - x.amax(-1, keepdim=True)).flatten(1).to(A.dtype)}",
        name="grouped",
        header="dims: {M: {}, N: {multiple_of: 32}, K: {multiple_of: 8}}\n",
    )

    @epilogue(O=Tile)
    def grouped(acc):
        return {"O": acc - group_max(acc, 64)}

    (finding,) = check_signature(made, {"grouped": grouped})
    assert "has groups of 64 columns; the spec's N=32 is no multiple" in finding.message


def test_tiles_and_architectures_that_carry_groups() -> None:
    assert {c.tile_n % 128 for c in offered(scaled)} == {0}
    assert {c.tile_n % 64 for c in offered(rms, [(16, 4096, 4096)])} == {0}
    assert not any(c.swap_ab for c in offered(rms, [(16, 4096, 4096)]))
    made = spec_of(*CASES[3][1:])
    jobs = jobs_for(made, {"grouped": scaled}, ["bfloat16"], newer=True)
    assert [job.arch for job in jobs] == ["sm_90a", "sm_100a"]
