"""The auxiliary reduction against torch in float64, from partials made by the interpreter."""

from typing import Any

import pytest
import torch

from coda_agent.primitives import RowMean, Tile, epilogue
from coda_agent.primitives.auxiliary import rstd
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret

M, K = 77, 64
SIZES = pytest.mark.parametrize(("n", "block"), [(256, 128), (272, 128), (96, 128), (400, 192)])


@epilogue(D=Tile, s=RowMean)
def squares(acc):
    return {"D": acc, "s": acc * acc}


def raw(program: Any, n: int, block: int, **operands: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Partials of `program`, and its accumulator in float64."""
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(M, K, generator=generator)
    b = torch.randn(n, K, generator=generator) / 8
    dtypes = dict.fromkeys(program.outputs, torch.float32)
    found = interpret(
        program, a, b, operands, dtypes=dtypes, block=block, row_block=block, raw=True
    )
    return found, a.double() @ b.double().mT


@SIZES
def test_rstd(n: int, block: int) -> None:
    found, d = raw(squares, n, block)
    got = rstd(found["s"], n=n, block=block, eps=1e-5)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), (d.square().mean(-1) + 1e-5).rsqrt(), rtol=1e-5, atol=0
    )


def test_rstd_keeps_leading_dimensions_and_zero_rows_finite() -> None:
    got = rstd(torch.zeros(2, 3, 4), n=500, block=128, eps=1e-6)
    torch.testing.assert_close(got, torch.full((2, 3), 1e3))


def test_under_torch_compile() -> None:
    compiled = torch.compile(rstd, fullgraph=True, backend="aot_eager")
    partials = torch.rand(8, 3)
    torch.testing.assert_close(
        compiled(partials, n=300, block=128), rstd(partials, n=300, block=128)
    )


P = torch.zeros(4, 2)
BAD = {
    "16-bit partials": (lambda: rstd(P.half(), n=2, block=1), "float16, expected"),
    "a vector": (lambda: rstd(P[0], n=2, block=1), "expected .*rows, blocks"),
    "too few partials": (lambda: rstd(P, n=300, block=128), "2 columns, expected"),
    "no block": (lambda: rstd(P, n=2, block=0), "block = 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(LaunchError, match=message):
        call()
