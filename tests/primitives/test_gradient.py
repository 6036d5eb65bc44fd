"""Gradients of programs in float64, beside autograd of the interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColSum,
    ColVector,
    GroupTile16,
    HalfTile,
    HeadTable,
    PositionTable,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowSum,
    RowVector,
    SampleHeads,
    Scalar,
    Tile,
    WideTile,
    epilogue,
    gather,
    group_max,
    group_sum,
    interleave,
    pairs,
    rotate_half,
    silu,
    swiglu,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.gradient import PRODUCT, Gradient, gradient_of
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.program import Program

M, N, BLOCK = 24, 64, 20


@epilogue(D=Tile, O=HalfTile, s=RowMean, t=RowSum)
def gate(acc, r: ColVector, bias: RowVector):
    d = acc * r
    x, y = pairs(d + bias)
    return {"D": d, "O": swiglu(x, y), "s": x * y, "t": x * silu(y)}


@epilogue(Z=Tile, target=RowGather, lse=RowLogSumExp, g=ColSum)
def head(acc, r: ColVector, y: ColIndex, x: Tile):
    z = acc * r
    return {"Z": z, "target": gather(z, y), "lse": z, "g": z * x}


@epilogue(O=Tile, s=GroupTile16)
def tables(acc, p: PositionTable, h: SampleHeads, t: HeadTable):
    x = rotate_half(acc * p, 32) + h * t
    return {"O": x * x, "s": group_sum(acc * acc, 16)}


@epilogue(X=AddTile, s=RowSum)
def added(acc, alpha: Scalar, beta: Scalar, r: ColVector):
    return {"X": alpha * acc * r, "s": acc + beta * r}


@epilogue(dZ=WideTile, z=RowMean)
def wide(acc, Z: WideTile):
    x, y = pairs(Z)
    return {"dZ": interleave(acc * silu(x), acc * y), "z": acc * x}


PROGRAMS = [gate, head, tables, added, wide]
SHAPES = {"p": (6, 32), "h": (3, 4), "t": (M, 32), "Z": (M, 2 * N)}


def drawn(program: Program, generator: torch.Generator) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for o, kind in program.operands.items():
        shape = SHAPES.get(o) or kind.extents(M, N)
        tensors[o] = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind is ColIndex:
            tensors[o] = torch.randint(-2, N, shape, generator=generator)
    if o := program.accumulated:
        tensors[o] = torch.randn(M, N, generator=generator, dtype=torch.float64)
    return tensors


@pytest.mark.parametrize("raw", [False, True], ids=["final", "raw"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_gradients_are_those_of_autograd(
    program: Program, raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    acc = torch.randn(M, N, generator=generator, dtype=torch.float64).requires_grad_()
    operands = drawn(program, generator)
    leaves = {PRODUCT: acc} | {o: t for o, t in operands.items() if t.is_floating_point()}
    for t in leaves.values():
        t.requires_grad_()
    results = interpret(
        program,
        acc,
        torch.eye(N, dtype=torch.float64),
        operands,
        dtypes={},
        block=BLOCK,
        row_block=BLOCK,
        raw=raw,
        compute=torch.float64,
    )
    given = {
        o: torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for o, t in results.items()
    }
    loss = torch.stack([(results[o] * g).sum() for o, g in given.items()]).sum()
    want = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    gradient = Gradient.of(program, tuple(leaves), tuple(given), [*program.outputs])
    known: dict[str, Any] = operands | results
    tensors = {o: known[o].detach() for o in gradient.reads}
    tensors |= {gradient_of(o): g for o, g in given.items()}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    for call in (gradient, gradient.fused) if raw else (gradient,):
        got = call(
            (M, N), tensors, [torch.float64] * len(leaves), acc.detach(), BLOCK if raw else None
        )
        for o, g, w in zip(leaves, got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, msg=lambda m, o=o: f"{o}: {m}")


def test_what_is_read() -> None:
    full = Gradient.of(gate, (PRODUCT, "r"), ("D", "O"), ["D"])
    assert full.reads == ("r", "bias", "D") and not full.product
    assert Gradient.of(gate, (PRODUCT, "r"), ("D", "O"), []).product
    assert Gradient.of(gate, (PRODUCT,), ("D",), ["D"]).reads == ("r",)
    # Nothing of the forward is needed where the gradient is a sum of what comes in.
    assert Gradient.of(added, ("X",), ("X",), []).reads == ()


def test_what_has_no_derivative_is_said() -> None:
    @epilogue(O=Tile, m=RowMax)
    def extreme(acc):
        return {"O": acc * group_max(acc, 16), "m": acc}

    with pytest.raises(ProgramError, match="output 'm', a RowMax, has no derivative"):
        Gradient.of(extreme, (PRODUCT,), ("m",), [])
    with pytest.raises(ProgramError, match="group_max has no derivative"):
        Gradient.of(extreme, (PRODUCT,), ("O",), [])
