"""Roundings against their formats, written out; on a GPU tests/gpu compares every bit."""

from __future__ import annotations

import math

import pytest
import torch

from coda_agent.primitives import (
    Tile,
    derivative,
    epilogue,
    floor,
    round_even,
    stochastic_bfloat16,
    stochastic_e4m3,
    to_bfloat16,
    to_e4m3,
    to_e5m2,
    to_float16,
)
from coda_agent.primitives.placed import philox

# Bits of the fraction, least exponent of a normal number, largest number.
FORMATS = {
    to_bfloat16: (7, -126, 3.3895313892515355e38),
    to_float16: (10, -14, 65504.0),
    to_e4m3: (3, -6, 448.0),
    to_e5m2: (2, -14, 57344.0),
}


def nearest(x: float, bits: int, least: int, largest: float) -> float:
    """x in a format, by its definition; ties to even."""
    if x == 0 or not math.isfinite(x):
        return x
    step = 2.0 ** (max(math.frexp(x)[1] - 1, least) - bits)
    found = round(x / step) * step  # Python's round has ties to even
    return math.copysign(math.inf, x) if abs(found) > largest else found


@pytest.mark.parametrize("atom", FORMATS, ids=lambda a: a.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_narrow_format(atom, dtype: torch.dtype) -> None:
    bits, least, largest = FORMATS[atom]
    generator = torch.Generator().manual_seed(bits)
    values = (
        torch.randn(2000, generator=generator)
        * torch.randn(2000, generator=generator).mul(6).exp2()
    )
    steps = torch.arange(-40.0, 40.0) * 2.0 ** (-bits - 2)  # ties among them
    values = torch.cat([values, 1 + steps, steps * 2.0**least, torch.tensor([largest, -largest])])
    values = values.to(dtype)
    expected = [nearest(x, bits, least, largest) for x in values.tolist()]
    if atom is to_e4m3:
        expected = [max(-448.0, min(448.0, x)) for x in expected]
    assert atom(values).dtype is dtype
    assert atom(values).tolist() == expected


def test_beyond_the_range() -> None:
    x = torch.tensor([464.5, 1e9, math.inf, -math.inf, math.nan])
    assert to_e4m3(x).nan_to_num(7.0).tolist() == [448.0, 448.0, 448.0, -448.0, 7.0]
    x = torch.tensor([61439.0, 61440.0, -1e9, math.nan])
    assert to_e5m2(x).nan_to_num(7.0, 9.0, -9.0).tolist() == [57344.0, 9.0, -9.0, 7.0]


def test_derivatives_are_those_of_pytorch() -> None:
    """Through a cast the gradient passes, through a step it does not."""

    @epilogue(O=Tile, P=Tile)
    def slopes(acc, C: Tile):
        through = derivative(lambda x: to_e4m3(x) * 3.0, C)
        assert derivative(lambda x: floor(x) * 3.0, C) == 0.0
        return {"O": acc * through, "P": acc * derivative(lambda x: round_even(x) * x, C)}

    x = torch.tensor([0.3, 1.7], requires_grad=True)
    (x.to(torch.bfloat16).float() * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    operations = [n.op for n in slopes.graph.nodes]
    assert "to_e4m3" not in operations and "round_even" in operations


@pytest.mark.parametrize("atom", [stochastic_bfloat16, stochastic_e4m3], ids=lambda a: a.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_is_right_on_average_and_to_a_neighbour(atom, dtype) -> None:
    to = torch.bfloat16 if atom is stochastic_bfloat16 else torch.float8_e4m3fn
    u = philox(1, 2, 512, 512).flatten()
    for x in (1.03, -3.7e-3, 300.3, -(2.0**-11), 447.9, 0.0, 2.0):
        found = atom(torch.full_like(u, x, dtype=dtype), u.to(dtype))
        assert found.dtype is dtype
        assert torch.equal(found, found.to(to).to(dtype))  # it holds them
        values = found.unique()
        assert len(values) <= 2 and values.min() <= x <= values.max()
        step = float(values.max() - values.min())
        assert abs(float(found.double().mean()) - x) <= 4 * step / 2 / 512 + abs(x) * 2**-30
    ends = torch.tensor([1e9, math.inf, -math.inf, math.nan], dtype=dtype)
    got = atom(ends, torch.full((4,), 0.5, dtype=dtype)).nan_to_num(7.0, 8.0, -8.0).tolist()
    wide = float(torch.tensor(1e9).bfloat16())
    assert got[1:] == ([8.0, -8.0, 7.0] if to is torch.bfloat16 else [448.0, -448.0, 7.0])
    assert abs(got[0] - wide) <= 2**22 if to is torch.bfloat16 else got[0] == 448.0
