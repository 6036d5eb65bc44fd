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
    clamp,
    epilogue,
    exchange,
    gather,
    group_max,
    group_sum,
    interleave,
    pairs,
    relu,
    rotate_half,
    silu,
    swiglu,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.gradient import KEPT, PRODUCT, Gradient, gradient_of, keeping
from coda_agent.primitives.interpret import evaluate, interpret
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import gradient_pass
from coda_agent.runtime.gradient_pass import GradientPass

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
    return {"O": x * x, "s": group_sum(acc * exchange(acc * p, 4), 16)}


@epilogue(X=AddTile, s=RowSum)
def added(acc, alpha: Scalar, beta: Scalar, r: ColVector):
    return {"X": alpha * acc * r, "s": acc + beta * r}


@epilogue(dZ=WideTile, z=RowMean)
def wide(acc, Z: WideTile):
    x, y = pairs(Z)
    return {"dZ": interleave(acc * silu(x), acc * y), "z": acc * x}


@epilogue(s=RowSum, c=ColSum)
def moved(acc):
    return {"s": rotate_half(acc, 8), "c": exchange(acc, 2) + group_sum(acc, 4)}


PROGRAMS = [gate, head, tables, added, wide, moved]
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


def standing_in(self: GradientPass, config: TileConfig, types: Any) -> Any:
    """What the kernel writes, by the interpreter."""
    program = self.program

    def kernel(given: tuple[torch.Tensor, ...]) -> None:
        assert types == tuple(t.dtype for t in given)
        assert all(t.stride(-1) == 1 for t in given)
        acc, *values = (t.double() for t in given[: 1 + len(program.operands)])
        named = zip(program.operands.items(), values, strict=True)
        lifted = {o: kind.lifted(t, acc) for (o, kind), t in named}
        values = evaluate(program.graph, acc, lifted)
        outputs = program.outputs.items()
        for (o, kind), t in zip(outputs, given[1 + len(program.operands) :], strict=True):
            value = values[program.graph.outputs[o]]
            if not issubclass(kind, Reduction):
                t.copy_(value)
            else:
                half = program.graph.nodes[program.graph.outputs[o]].shape.half_width
                value = value.expand(M, N // 2 if half else N)
                made = kind.partials(value, kind.block(config) // (2 if half else 1))
                t.copy_(made.mT if kind.over_rows else made)

    return kernel


@pytest.mark.parametrize("program", [gate, head, added, wide], ids=lambda p: p.name)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "product"])
def test_one_kernel_computes_all_gradients(
    program: Program, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    acc = torch.randn(M, N, generator=generator, dtype=torch.float64)
    operands = drawn(program, generator)
    results = interpret(
        program, acc, torch.eye(N).double(), operands, dtypes={}, compute=torch.float64
    )
    wanted = (PRODUCT, *(o for o, t in operands.items() if t.is_floating_point()))
    gradient = Gradient.of(program, wanted, tuple(results), [*results] if stored else [])
    known: dict[str, Any] = operands | results
    tensors = {o: known[o] for o in gradient.reads}
    for o, t in results.items():
        tensors[gradient_of(o)] = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        if o in "OX":  # as of a sum: one place in memory for all
            tensors[gradient_of(o)] = tensors[gradient_of(o)][:1, :1].expand(t.shape)
    types = [torch.float64] * len(wanted)
    want = gradient((M, N), tensors, types, acc)
    monkeypatch.setattr(GradientPass, "_kernel", standing_in)
    kernel = GradientPass.of(gradient)
    assert kernel is not None and (kernel.first == PRODUCT) == gradient.product
    for rows, columns in ((32, 1024), (8, 16)):
        monkeypatch.setattr(gradient_pass, "_SUMMED_ROWS", rows)
        monkeypatch.setattr(gradient_pass, "_COLUMNS", columns)
        vars(kernel).pop("calls", None)
        got = kernel((M, N), tensors, types, acc if gradient.product else None)
        for o, g, w in zip(wanted, got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-4, msg=lambda m, o=o: f"{o}: {m}")


def test_what_the_kernel_does_not_carry() -> None:
    leaves = tuple(o for o in tables.operands)
    assert GradientPass.of(Gradient.of(tables, leaves, ("O",), [])) is None
    assert GradientPass.of(Gradient.of(tables, (PRODUCT,), ("s",), [])) is None
    assert GradientPass.of(Gradient.of(tables, (PRODUCT,), ("O",), [])) is not None


def test_what_is_read() -> None:
    full = Gradient.of(gate, (PRODUCT, "r"), ("D", "O"), ["D"])
    assert full.reads == ("r", "bias", "D") and not full.product
    assert Gradient.of(gate, (PRODUCT, "r"), ("D", "O"), []).product
    assert Gradient.of(gate, (PRODUCT,), ("D",), ["D"]).reads == ("r",)
    # Nothing of the forward is needed where the gradient is a sum of what comes in.
    assert Gradient.of(added, ("X",), ("X",), []).reads == ()


def test_a_tile_more_is_kept_where_the_product_would_be_needed() -> None:
    @epilogue(O=Tile)
    def activated(acc, C: Tile, bias: RowVector, alpha: Scalar):
        return {"O": silu(alpha * acc + C + bias)}

    @epilogue(O=Tile)
    def rectified(acc, bias: RowVector):
        return {"O": relu(acc + bias)}

    @epilogue(O=Tile)
    def limited(acc, bias: RowVector):
        return {"O": clamp(acc + bias, -1.0, 1.0)}

    more = keeping(activated, ["O"], ["O"])
    assert more is not None
    acc, c = torch.randn(2, M, N, dtype=torch.float64)
    bias, alpha = torch.randn(N, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    operands = {"C": c, "bias": bias, "alpha": alpha}
    found = interpret(more, acc, torch.eye(N).double(), operands, dtypes={}, compute=torch.float64)
    torch.testing.assert_close(found[KEPT], 0.5 * acc + c + bias)
    torch.testing.assert_close(found["O"], torch.nn.functional.silu(found[KEPT]))
    gradient = Gradient.of(more, (PRODUCT, "C", "bias"), ("O",), ["O", KEPT])
    assert gradient.reads == ("alpha", KEPT) and not gradient.product
    assert Gradient.of(more, (PRODUCT, "alpha"), ("O",), ["O", KEPT]).product
    # Where the result is 0 tells what was below 0; at another bound it may have been rounded to.
    assert keeping(rectified, ["O"], ["O"]) is None and keeping(gate, ["D", "O"], ["D"]) is None
    assert Gradient.of(rectified, (PRODUCT, "bias"), ("O",), ["O"]).reads == ("O",)
    bounded = keeping(limited, ["O"], ["O"])
    assert bounded and bounded.graph.nodes[bounded.graph.outputs[KEPT]].op == "add"


def test_what_has_no_derivative_is_said() -> None:
    @epilogue(O=Tile, m=RowMax)
    def extreme(acc):
        return {"O": acc * group_max(acc, 16), "m": acc}

    with pytest.raises(ProgramError, match="output 'm', a RowMax, has no derivative"):
        Gradient.of(extreme, (PRODUCT,), ("m",), [])
    with pytest.raises(ProgramError, match="group_max has no derivative"):
        Gradient.of(extreme, (PRODUCT,), ("O",), [])
