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
    to_bfloat16,
    to_e4m3,
    to_e5m2,
    to_float16,
)

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
