"""Rotations: the paper's convention, angles that keep their digits, and heads laid out in columns."""

from pathlib import Path

import pytest
import torch

from coda_agent.primitives import (
    ColVector,
    RowVector,
    Tile,
    epilogue,
    interleave,
    pairs,
    rotary,
    rotate,
)
from coda_agent.primitives.errors import LaunchError, ProgramError
from coda_agent.primitives.interpret import evaluate, interpret
from coda_agent.primitives.rotary import rotary_turns
from coda_agent.runtime.target import sass
from tests.programs import built

HEAD = 128
FREQUENCIES = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)


@epilogue(O=Tile)
def projection(acc, position: ColVector, turns: RowVector):
    return {"O": rotary(acc, position, turns)}


@epilogue(O=Tile)
def by_table(acc, cs: Tile):
    x, y = pairs(acc)
    cosine, sine = pairs(cs)
    u, v = rotate(x, y, cosine, sine)
    return {"O": interleave(u, v)}


def in_kernel(x: torch.Tensor, position: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """The epilogue's own arithmetic, on an accumulator x in its dtype."""
    operands = {"position": position[:, None].to(x.dtype), "turns": turns.to(x.dtype)}
    return evaluate(projection.graph, x, operands)[projection.graph.outputs["O"]]


@pytest.mark.parametrize("largest", [1000, 131072, 1_000_000, 2**24])
def test_angles_keep_their_digits(largest: int) -> None:
    position = torch.randint(largest + 1, (2048,), generator=torch.Generator().manual_seed(0))
    position[0] = largest
    turns = rotary_turns(FREQUENCIES, HEAD, head_dim=HEAD, heads=1)
    ones = torch.tensor([1.0, 0.0]).repeat(2048, HEAD // 2)
    got = in_kernel(ones, position.float(), turns)
    angle = position.double()[:, None] * FREQUENCIES
    assert (got[:, 0::2] - angle.cos()).abs().max() < 1e-6
    assert (got[:, 1::2] + angle.sin()).abs().max() < 1e-6


def test_a_rounded_product_would_not_do() -> None:
    angle = torch.tensor(1e6) * FREQUENCIES.float()
    assert (angle.cos() - (1e6 * FREQUENCIES).cos()).abs().max() > 1e-3


def test_rotary_equals_complex_multiplication() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 2 * HEAD, generator=generator).double()
    position = torch.randint(131072, (50,), generator=generator).double()
    turns = rotary_turns(FREQUENCIES, 2 * HEAD, head_dim=HEAD, heads=2)
    got = in_kernel(x, position, turns)
    turn = torch.polar(torch.ones(50, HEAD // 2).double(), -position[:, None] * FREQUENCIES)
    want = torch.view_as_complex(x.reshape(50, 2, HEAD // 2, 2)) * turn[:, None]
    torch.testing.assert_close(got, torch.view_as_real(want).flatten(1), rtol=0, atol=1e-9)
    torch.testing.assert_close(in_kernel(got, -position, turns), x, rtol=0, atol=1e-9)


def test_rotate_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b, cs = (torch.randn(*s, generator=generator).double() for s in ((5, 8), (6, 8), (5, 6)))
    got = interpret(by_table, a, b, {"cs": cs}, dtypes={"O": torch.float64}, compute=torch.float64)[
        "O"
    ]
    d = a @ b.mT
    torch.testing.assert_close(got[:, 0::2], d[:, 0::2] * cs[:, 0::2] + d[:, 1::2] * cs[:, 1::2])
    torch.testing.assert_close(got[:, 1::2], d[:, 1::2] * cs[:, 0::2] - d[:, 0::2] * cs[:, 1::2])


def test_columns_without_frequency_stay_as_they_are() -> None:
    turns = rotary_turns(FREQUENCIES[:16], 5 * HEAD, head_dim=HEAD, heads=3)
    heads = turns.view(5, HEAD)
    assert (heads[:3, 0:32:2] > 0).all()
    assert heads[:3, 32:].eq(0).all() and heads[3:].eq(0).all()
    exact = heads[1, 0:32:2].double() + heads[1, 1:32:2].double()
    torch.testing.assert_close(exact, FREQUENCIES[:16] / (2 * torch.pi), rtol=1e-13, atol=0)
    x = torch.randn(7, 5 * HEAD)
    got = in_kernel(x, torch.arange(1, 8) * 1e5, turns)
    still = turns.view(-1, 2).eq(0).all(-1).repeat_interleave(2)
    assert torch.equal(got[:, still], x[:, still])
    assert (got != x)[:, ~still].any(0).all()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.one_in(2)
def test_compiles(arch: str) -> None:
    found = built(projection, arch)
    assert found["mma_instructions"] > 0
    assert found["local_stores"] == 0
    text = sass(Path(found["object"]))
    # One sine and one cosine a pair, no slow path and no rounding on the same pipe.
    assert text.count("MUFU.SIN") == text.count("MUFU.COS") == 64
    assert "FRND" not in text


BAD = {
    "odd head": (dict(n=256, head_dim=127, heads=2), "head_dim = 127"),
    "more frequencies than pairs": (dict(n=256, head_dim=64, heads=2), r"\(64,\) frequencies"),
    "more heads than columns": (dict(n=256, head_dim=128, heads=3), "n = 256 for 3 heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layout(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(LaunchError, match=message):
        rotary_turns(FREQUENCIES, **arguments)


def test_half_width_values_are_refused() -> None:
    def body(acc, position: ColVector, turns: RowVector):
        return {"O": rotary(pairs(acc)[0], position, turns)}

    with pytest.raises(ProgramError, match="half-width"):
        epilogue(O=Tile)(body)
