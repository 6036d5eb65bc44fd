"""Auxiliary reductions against torch in float64, from partials made by the interpreter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coda_agent.primitives import (
    ColIndex,
    ColSum,
    HalfTile,
    RowGather,
    RowLogSumExp,
    RowMean,
    Tile,
    epilogue,
    gather,
    pairs,
)
from coda_agent.primitives.auxiliary import (
    column_sum,
    cross_entropy_loss,
    rmsnorm_backward_statistic,
    rstd,
)
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret

M, K = 77, 64
SIZES = pytest.mark.parametrize(("n", "block"), [(256, 128), (272, 128), (96, 128), (400, 192)])


@epilogue(D=Tile, s=RowMean)
def squares(acc):
    return {"D": acc, "s": acc * acc}


@epilogue(Z=Tile, target=RowGather, lse=RowLogSumExp)
def logits(acc, y: ColIndex):
    return {"Z": acc, "target": gather(acc, y), "lse": acc}


@epilogue(D=Tile, g=ColSum)
def weight_gradient(acc, x: Tile):
    return {"D": acc, "g": acc * x}


@epilogue(O=HalfTile, z=RowMean)
def products(acc):
    x, y = pairs(acc)
    return {"O": x, "z": x * y}


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


@SIZES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_loss(n: int, block: int, reduction: Any, ignored: str) -> None:
    y = torch.randint(n, (M,), generator=torch.Generator().manual_seed(1))
    if ignored != "none":
        y[:: 1 if ignored == "all" else 5] = -1
    found, z = raw(logits, n, block, y=y)
    got = cross_entropy_loss(found["lse"], found["target"], y, ignore_index=-1, reduction=reduction)
    want = F.cross_entropy(z, y, ignore_index=-1, reduction=reduction)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ignored == "all" or got.isfinite().all()


def test_an_ignored_row_counts_for_nothing_whatever_it_holds() -> None:
    lse = torch.tensor([[0.0, 0.0], [float("nan"), 1.0]])
    loss = cross_entropy_loss(lse, torch.tensor([0.25, float("inf")]), torch.tensor([0, -100]))
    torch.testing.assert_close(loss, torch.tensor(2.0).log() - 0.25)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_column_sum(block: int) -> None:
    x = torch.randn(M, 96, generator=torch.Generator().manual_seed(2))
    found, d = raw(weight_gradient, 96, block, x=x)
    assert found["g"].shape == (96, -(-M // block))
    torch.testing.assert_close(
        column_sum(found["g"]).double(), (d * x).sum(0), rtol=1e-5, atol=1e-5
    )


@SIZES
def test_rmsnorm_backward_statistic(n: int, block: int) -> None:
    found, d = raw(products, n, block)
    # Over pairs a partial holds half as many elements as its block has columns.
    got = rmsnorm_backward_statistic(found["z"], block=block // 2, d=48)
    want = (d[:, 0::2] * d[:, 1::2]).sum(-1) / 48
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_rmsnorm_backward_through_a_projection() -> None:
    """The statistic is the mean of z·Δz over the norm's outputs, taken behind the projection."""
    generator = torch.Generator().manual_seed(3)
    x, w, g = (torch.randn(*s, generator=generator).double() for s in ((9, 24), (40, 24), (9, 40)))
    x.requires_grad_()
    z = F.rms_norm(x, (24,), eps=0.0)
    (gradient,) = torch.autograd.grad(z @ w.mT, x, g)
    y, scale = z @ w.mT, x.square().mean(-1).rsqrt()
    partials = torch.stack([(y * g)[:, i : i + 16].sum(-1) / 16 for i in (0, 16, 32)], dim=-1)
    statistic = rmsnorm_backward_statistic(partials, block=16, d=24)
    torch.testing.assert_close(scale[:, None] * (g @ w - z * statistic[:, None]), gradient)


def test_under_torch_compile() -> None:
    compiled = torch.compile(rstd, fullgraph=True, backend="aot_eager")
    partials = torch.rand(8, 3)
    torch.testing.assert_close(
        compiled(partials, n=300, block=128), rstd(partials, n=300, block=128)
    )
    loss = torch.compile(cross_entropy_loss, fullgraph=True, backend="aot_eager")
    arguments = torch.rand(8, 3), torch.rand(8), torch.arange(8)
    torch.testing.assert_close(loss(*arguments), cross_entropy_loss(*arguments))


P = torch.zeros(4, 2)
BAD = {
    "16-bit partials": (lambda: column_sum(P.half()), "float16, expected"),
    "a vector": (lambda: rstd(P[0], n=2, block=1), "expected .*rows, blocks"),
    "too few partials": (lambda: rstd(P, n=300, block=128), "2 columns, expected"),
    "no block": (lambda: rstd(P, n=2, block=0), "block = 0"),
    "three dimensions": (lambda: column_sum(P[None]), r"\(1, 4, 2\), expected \(N, blocks\)"),
    "no width": (lambda: rmsnorm_backward_statistic(P, block=128, d=0), "d = 0"),
    "logits of other rows": (
        lambda: cross_entropy_loss(P, torch.zeros(3), torch.zeros(4).long()),
        r"target_logit has shape \(3,\), expected \(4,\)",
    ),
    "targets of other rows": (
        lambda: cross_entropy_loss(P, torch.zeros(4), torch.zeros(4, 1).long()),
        r"target has shape \(4, 1\)",
    ),
    "targets that are no integers": (
        lambda: cross_entropy_loss(P, torch.zeros(4), torch.zeros(4)),
        "float32, expected integers",
    ),
    "an unknown reduction": (
        lambda: cross_entropy_loss(P, torch.zeros(4), torch.zeros(4).long(), reduction="max"),  # pyright: ignore
        "unknown reduction 'max'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(LaunchError, match=message):
        call()
