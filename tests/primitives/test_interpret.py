"""The interpreter against expectations written here: torch.nn.functional, and loops over Python floats."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import coda_agent.primitives as vocabulary
from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColMax,
    ColSum,
    ColVector,
    HalfTile,
    HeadTable,
    Program,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowMin,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    clamp,
    epilogue,
    exp,
    gather,
    interleave,
    leaky_relu,
    maximum,
    minimum,
    pairs,
    relu,
    sigmoid,
    silu,
    softplus,
)
from coda_agent.primitives.interpret import interpret
from tests.meanings import BINARY, GRID, UNARY, domain
from tests.programs import program

M, N, K = 5, 40, 8
Unary = Callable[[Any], Any]

SPELT: dict[str, tuple[Unary, Unary]] = {
    "clamp": (lambda x: clamp(x, -0.5, 0.75), lambda x: x.clamp(-0.5, 0.75)),
    "leaky_relu 0.2": (lambda x: leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2)),
    "maximum, number first": (lambda x: maximum(0.25, x), lambda x: x.clamp(min=0.25)),
    "minimum, number last": (lambda x: minimum(x, 0.25), lambda x: x.clamp(max=0.25)),
    "neg": (lambda x: -x, torch.neg),
    "softplus above 20": (lambda x: softplus(x * 40.0), lambda x: F.softplus(x * 40.0)),
    "divided by a number": (lambda x: x / 3, lambda x: x / 3),
    "number divided": (lambda x: 3 / x, lambda x: 3 / x),
    "number minus": (lambda x: 3 - x, lambda x: 3 - x),
    # Its slope is that of x; its value is the angle within half a turn.
    "wrapped": (vocabulary.wrapped, lambda x: x - 2 * math.pi * torch.round(x / (2 * math.pi))),
}


def matrices(seed: int = 0, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(M, K, generator=generator)
    b = torch.randn(n, K, generator=generator) * K**-0.5
    return a.bfloat16(), b.bfloat16()


def rows(value: torch.Tensor) -> list[list[float]]:
    return value.double().tolist()


def exact(
    program: Program, a: torch.Tensor, b: torch.Tensor, /, **operands: Any
) -> dict[str, torch.Tensor]:
    return interpret(program, a, b, operands, dtypes={}, compute=torch.float64)


@pytest.mark.parametrize("name", {**UNARY, **SPELT})
def test_elementwise(name: str) -> None:
    ours, theirs = SPELT.get(name) or (getattr(vocabulary, name), UNARY[name])
    x, one = domain(name)[:, None], torch.ones(1, 1)
    got = exact(program(lambda acc: {"O": ours(acc)}, O=Tile), x, one)["O"]
    torch.testing.assert_close(got, theirs(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", BINARY)
def test_elementwise_of_two(name: str) -> None:
    ours = getattr(vocabulary, name)
    x, y = domain(name)[:, None], GRID.flip(0)[:, None] * 0.9 + 0.0007
    made = program(lambda acc, C: {"O": ours(acc, C)}, O=Tile)
    got = exact(made, x, torch.ones(1, 1), C=y)["O"]
    torch.testing.assert_close(got, BINARY[name](x, y), rtol=1e-12, atol=1e-14)


def test_functions_of_the_vocabulary_take_tensors_too() -> None:
    x = torch.tensor([-1.5, 0.0, 2.0])
    torch.testing.assert_close(silu(x), F.silu(x))
    assert torch.equal(maximum(x, 1.0), torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.parametrize("function", [relu, leaky_relu, lambda x: clamp(x, -1.0, 1.0)])
def test_nan_stays_nan(function: Unary) -> None:
    assert function(torch.tensor([math.nan])).isnan().all()


def test_operands_broadcast_along_their_axis() -> None:
    @epilogue(O=Tile)
    def program(acc, C: Tile, r: ColVector, b: RowVector, alpha: Scalar):
        return {"O": alpha * acc * r + b - C}

    square = 8  # M = N: the axis must come from the annotation, not from the shape
    generator = torch.Generator().manual_seed(3)
    a, w, c = (torch.randn(square, square, generator=generator) for _ in range(3))
    r, b = torch.randn(square, generator=generator), torch.randn(square, generator=generator)
    got = rows(exact(program, a, w, C=c, r=r, b=b, alpha=0.5)["O"])
    A, W, C, R, B = rows(a), rows(w), rows(c), r.tolist(), b.tolist()
    for m in range(square):
        for n in range(square):
            acc = math.fsum(x * y for x, y in zip(A[m], W[n], strict=True))
            assert got[m][n] == pytest.approx(0.5 * acc * R[m] + B[n] - C[m][n], abs=1e-13)


def test_interleave_puts_values_side_by_side() -> None:
    @epilogue(O=Tile)
    def program(acc, t: RowVector):
        x, y = pairs(acc)
        c, s = pairs(t)
        return {"O": interleave(x * c - y * s, x + 1.0)}

    a, b = matrices()
    t = torch.randn(N, generator=torch.Generator().manual_seed(1))
    got = rows(exact(program, a, b, t=t)["O"])
    acc, T = rows(a.double() @ b.double().T), t.tolist()
    for m in range(M):
        for j in range(0, N, 2):
            x, y = acc[m][j], acc[m][j + 1]
            assert got[m][j] == pytest.approx(x * T[j] - y * T[j + 1], abs=1e-13)
            assert got[m][j + 1] == pytest.approx(x + 1.0, abs=1e-13)


def test_interleave_takes_a_vector_or_a_scalar_on_one_side() -> None:
    @epilogue(O=Tile, P=Tile)
    def program(acc, r: ColVector, alpha: Scalar):
        x, _ = pairs(acc)
        return {"O": interleave(r, x), "P": interleave(x, alpha)}

    a, b = matrices()
    r = torch.arange(M).double()
    got = exact(program, a, b, r=r, alpha=2.5)
    acc = a.double() @ b.double().T
    assert torch.equal(got["O"][:, 0::2], r[:, None].expand(M, N // 2))
    assert torch.equal(got["O"][:, 1::2], acc[:, 0::2])
    assert torch.equal(got["P"][:, 0::2], acc[:, 0::2])
    assert (got["P"][:, 1::2] == 2.5).all()


@epilogue(D=Tile, total=RowSum, mean=RowMean, top=RowMax)
def reductions(acc, b: RowVector):
    d = acc + b
    return {"D": d, "total": d, "mean": d * d, "top": d}


@epilogue(O=HalfTile, total=RowSum, mean=RowMean, top=RowMax)
def half_reductions(acc, b: RowVector):
    gate, up = pairs(acc + b)
    o = gate * up
    return {"O": o, "total": o, "mean": o * o, "top": o}


def expected_partials(value: list[list[float]], width: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {"total": [], "mean": [], "top": []}
    for row in value:
        blocks = [row[i : i + width] for i in range(0, len(row), width)]
        found["total"].append([math.fsum(block) for block in blocks])
        found["mean"].append([math.fsum(x * x for x in block) / width for block in blocks])
        found["top"].append([max(block) for block in blocks])
    return found


@pytest.mark.parametrize("program", [reductions, half_reductions], ids=lambda p: p.name)
@pytest.mark.parametrize(("columns", "block", "blocks"), [(40, 16, 3), (32, 16, 2), (24, 128, 1)])
def test_raw_partials_and_final_values(
    program: Program, columns: int, block: int, blocks: int
) -> None:
    a, w = matrices(n=columns)
    b = torch.linspace(-1.0, 3.0, columns)
    acc = a.double() @ w.double().T + b.double()
    half = program is half_reductions
    value = rows(acc[:, 0::2] * acc[:, 1::2] if half else acc)
    want = expected_partials(value, block // 2 if half else block)
    options: dict[str, Any] = {
        "dtypes": {},
        "block": block,
        "row_block": block,
        "compute": torch.float64,
    }
    raw = interpret(program, a, w, {"b": b}, raw=True, **options)
    final = interpret(program, a, w, {"b": b}, **options)
    width = len(value[0])
    for o in ("total", "mean", "top"):
        assert raw[o].shape == (M, blocks)
        torch.testing.assert_close(raw[o], torch.tensor(want[o]).double(), rtol=1e-6, atol=1e-6)
        assert final[o].shape == (M,)
    for m, row in enumerate(value):
        assert final["total"][m].item() == pytest.approx(math.fsum(row), abs=1e-12)
        mean = math.fsum(x * x for x in row) / width
        assert final["mean"][m].item() == pytest.approx(mean, abs=1e-12)
        assert final["top"][m].item() == pytest.approx(max(row), abs=1e-12)


def test_partials_of_a_ragged_row_by_hand() -> None:
    value = torch.tensor([[1.0, 2.0, 3.0, 4.0, -5.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    assert RowSum.partials(value, 2).tolist() == [[3.0, 7.0, -5.0], [-3.0, -7.0, -5.0]]
    assert RowMean.partials(value, 2).tolist() == [[1.5, 3.5, -2.5], [-1.5, -3.5, -2.5]]
    assert RowMax.partials(value, 2).tolist() == [[2.0, 4.0, -5.0], [-1.0, -3.0, -5.0]]
    assert RowMin.partials(value, 2).tolist() == [[1.0, 3.0, -5.0], [-2.0, -4.0, -5.0]]
    value[0, 1] = math.nan
    for kind in (RowMin, RowMax):
        assert kind.partials(value, 2).isnan().tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RowSum, [5.0, -15.0]),
        (RowMean, [1.0, -3.0]),
        (RowMax, [4.0, -1.0]),
        (RowMin, [-5.0, -5.0]),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_finalise_is_exact(kind: Any, expected: list[float], width: int) -> None:
    value = torch.tensor([[1.0, 2.0, 3.0, 4.0, -5.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    partials = kind.partials(value.double(), width)
    got = kind.finalise(partials, 5, width)
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=1e-15, atol=0.0)


def test_documented_identity_of_mean_partials() -> None:
    a, w = matrices()
    raw = interpret(
        reductions,
        a,
        w,
        {"b": torch.zeros(N)},
        dtypes={},
        block=16,
        raw=True,
        compute=torch.float64,
    )
    acc = a.double() @ w.double().T
    torch.testing.assert_close(raw["mean"].sum(-1) * 16 / N, acc.square().mean(-1))


def test_values_are_rounded_at_stores_only() -> None:
    @epilogue(D=Tile, O=Tile, s=RowSum)
    def program(acc):
        d = acc * 1.1
        return {"D": d, "O": (d - acc) * 64.0, "s": d}

    a, b = matrices()
    kind = torch.bfloat16
    got = interpret(program, a, b, {}, dtypes={"D": kind, "O": kind})
    acc = a.float() @ b.float().T
    d = acc * 1.1
    assert torch.equal(got["D"], d.to(kind))
    assert torch.equal(got["O"], ((d - acc) * 64.0).to(kind))
    torch.testing.assert_close(got["s"], d.sum(-1), rtol=1e-6, atol=1e-6)
    early = d.to(kind).float()
    assert not torch.equal(got["O"], ((early - acc) * 64.0).to(kind))
    assert (got["s"] - early.sum(-1)).abs().max() > 1e-4


def test_each_output_has_its_dtype() -> None:
    a, b = matrices()
    got = interpret(
        half_reductions, a, b, {"b": torch.zeros(N)}, dtypes={"O": torch.float16}, raw=True
    )
    assert got["O"].dtype == torch.float16
    assert {got[o].dtype for o in ("total", "mean", "top")} == {torch.float32}


def test_float64_leaves_outputs_unrounded() -> None:
    a, b = matrices()
    got = exact(reductions, a, b, b=torch.zeros(N))
    assert {t.dtype for t in got.values()} == {torch.float64}
    torch.testing.assert_close(got["D"], a.double() @ b.double().T, rtol=1e-13, atol=1e-13)


def test_an_output_may_be_an_operand_or_an_outer_product() -> None:
    @epilogue(O=Tile, P=Tile, Q=Tile)
    def program(acc, C: Tile, r: ColVector, b: RowVector):
        return {"O": acc, "P": C, "Q": r * b}

    a, w = matrices()
    c, r, b = torch.ones(M, N), torch.arange(M).float(), torch.arange(N).float()
    got = exact(program, a, w, C=c, r=r, b=b)
    assert torch.equal(got["P"], c.double())
    assert torch.equal(got["Q"], torch.outer(r, b).double())


def test_atoms_take_scalar_operands_and_numbers() -> None:
    @epilogue(O=Tile)
    def program(acc, alpha: Scalar):
        return {"O": acc * sigmoid(alpha) + maximum(alpha, 0.5) * exp(1.0)}

    a, b = matrices()
    got = exact(program, a, b, alpha=0.25)["O"]
    want = (a.double() @ b.double().T) / (1 + math.exp(-0.25)) + 0.5 * math.e
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def log_sum_exp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(math.fsum(math.exp(x - top) for x in values))


@epilogue(Z=Tile, lse=RowLogSumExp)
def full_lse(acc, b: RowVector, alpha: Scalar):
    z = alpha * acc + b
    return {"Z": z, "lse": z}


@epilogue(O=HalfTile, lse=RowLogSumExp)
def half_lse(acc, b: RowVector, alpha: Scalar):
    x, y = pairs(alpha * acc + b)
    return {"O": x - y, "lse": x - y}


@pytest.mark.parametrize("program", [full_lse, half_lse], ids=lambda p: p.name)
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(("columns", "block", "blocks"), [(40, 16, 3), (32, 16, 2), (24, 128, 1)])
def test_log_sum_exp(program: Program, scale: float, columns: int, block: int, blocks: int) -> None:
    a, w = matrices(n=columns)
    operands = {"b": torch.linspace(-1.0, 3.0, columns) * scale, "alpha": scale}
    acc = scale * (a.double() @ w.double().T) + operands["b"].double()
    half = program is half_lse
    value = rows(acc[:, 0::2] - acc[:, 1::2] if half else acc)
    width = block // 2 if half else block
    for compute, relative in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        options: dict[str, Any] = {
            "dtypes": {o: torch.float32 for o in program.outputs},
            "block": block,
            "compute": compute,
        }
        raw = interpret(program, a, w, operands, raw=True, **options)["lse"]
        final = interpret(program, a, w, operands, **options)["lse"]
        assert raw.shape == (M, blocks) and final.shape == (M,)
        assert raw.dtype == final.dtype == compute
        for m, row in enumerate(value):
            parts = [log_sum_exp(row[i : i + width]) for i in range(0, len(row), width)]
            # Rounding of Z, not of the reduction, is what float32 adds at a large scale.
            slack = relative * max(1.0, scale)
            assert raw[m].tolist() == pytest.approx(parts, rel=relative, abs=slack)
            assert final[m].item() == pytest.approx(log_sum_exp(row), rel=relative, abs=slack)


def test_log_sum_exp_stays_finite_at_both_extremes() -> None:
    value = torch.tensor([[1e4, -1e4, 1e4, -1e4, -1e4], [-1e4, -1e4, -1e4, -1e4, -1e4]])
    for width in (1, 2, 5, 8):
        raw = RowLogSumExp.partials(value, width)
        assert raw.isfinite().all()
        got = RowLogSumExp.finalise(raw, 5, width)
        want = torch.tensor([1e4 + math.log(2.0), -1e4 + math.log(5.0)])
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-3)
    assert RowLogSumExp.partials(value, 2)[1, 2].item() == -1e4  # one element, no padding


@epilogue(D=Tile, g=ColSum, top=ColMax)
def columns_reduced(acc, r: ColVector, b: RowVector):
    d = acc + r * b
    return {"D": d, "g": d * acc, "top": d}


@pytest.mark.parametrize(
    ("height", "block", "blocks"), [(5, 2, 3), (6, 2, 3), (5, 8, 1), (37, 16, 3)]
)
def test_reductions_over_rows(height: int, block: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(height)
    a = torch.randn(height, K, generator=generator).bfloat16()
    _, w = matrices()
    r, b = torch.randn(height, generator=generator), torch.linspace(-4.0, 1.0, N)
    acc = a.double() @ w.double().T
    d = acc + r.double()[:, None] * b.double()
    options: dict[str, Any] = {
        "dtypes": {},
        "block": block,
        "row_block": block,
        "compute": torch.float64,
    }
    raw = interpret(columns_reduced, a, w, {"r": r, "b": b}, raw=True, **options)
    final = interpret(columns_reduced, a, w, {"r": r, "b": b}, **options)
    products, values = rows((d * acc).T), rows(d.T)
    for o in ("g", "top"):
        assert raw[o].shape == (N, blocks)
        assert final[o].shape == (N,)
    for n in range(N):
        cut = [slice(i, i + block) for i in range(0, height, block)]
        sums = [math.fsum(products[n][c]) for c in cut]
        assert raw["g"][n].tolist() == pytest.approx(sums, abs=1e-12)
        assert raw["top"][n].tolist() == pytest.approx([max(values[n][c]) for c in cut], abs=1e-12)
        assert final["g"][n].item() == pytest.approx(math.fsum(products[n]), abs=1e-12)
        assert final["top"][n].item() == pytest.approx(max(values[n]), abs=1e-12)


def test_partials_over_ragged_rows_by_hand() -> None:
    value = torch.tensor([[1.0, -1.0], [2.0, -2.0], [-5.0, -3.0]])
    assert ColSum.partials(value, 2).tolist() == [[3.0, -5.0], [-3.0, -3.0]]
    assert ColMax.partials(value, 2).tolist() == [[2.0, -5.0], [-1.0, -3.0]]
    assert ColMax.finalise(ColMax.partials(value, 2), 3, 2).tolist() == [2.0, -1.0]
    nan = torch.tensor([[math.nan], [1.0]])
    assert ColMax.partials(nan, 2).tolist() == [[1.0]]  # NaN is passed over


def test_reductions_over_rows_and_over_columns_together() -> None:
    @epilogue(D=Tile, s=RowSum, g=ColSum)
    def program(acc, r: ColVector):
        return {"D": acc, "s": acc * r, "g": acc * r}

    a, w = matrices()
    r = torch.arange(M).double()
    raw = interpret(
        program, a, w, {"r": r}, dtypes={}, block=2, row_block=2, raw=True, compute=torch.float64
    )
    assert raw["s"].shape == (M, N // 2)
    assert raw["g"].shape == (N, 3)
    got = exact(program, a, w, r=r)
    torch.testing.assert_close(got["s"].sum(), got["g"].sum())


def test_an_outer_product_is_reduced_over_all_rows() -> None:
    @epilogue(D=Tile, g=ColSum)
    def program(acc, r: ColVector, b: RowVector):
        return {"D": acc, "g": r * b}

    a, w = matrices()
    r, b = torch.arange(M).double(), torch.arange(N).double()
    torch.testing.assert_close(exact(program, a, w, r=r, b=b)["g"], r.sum() * b)


@epilogue(Z=Tile, target=RowGather, doubled=RowGather, swapped=RowGather)
def gathering(acc, y: ColIndex, b: RowVector):
    even, odd = pairs(acc)
    return {
        "Z": acc,
        "target": gather(acc, y),
        "doubled": gather(2.0 * acc + b, y),
        "swapped": gather(interleave(odd, even), y),
    }


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("index", [[0, 39, 17, 2, 1], [-1, 40, -100, 39, 2**31 - 1]])
def test_gather(kind: torch.dtype, index: list[int]) -> None:
    a, w = matrices()
    b = torch.arange(N).float()
    y = torch.tensor(index, dtype=kind)
    got = exact(gathering, a, w, y=y, b=b)
    acc = rows(a.double() @ w.double().T)
    for m, n in enumerate(index):
        inside = 0 <= n < N
        want = acc[m][n] if inside else 0.0
        assert got["target"][m].item() == pytest.approx(want, abs=1e-13)
        assert got["doubled"][m].item() == pytest.approx(2 * want + (n if inside else 0), abs=1e-13)
        other = acc[m][n ^ 1] if inside else 0.0
        assert got["swapped"][m].item() == pytest.approx(other, abs=1e-13)
    assert y.tolist() == index


def test_gathered_values_are_taken_before_rounding() -> None:
    a, w = matrices()
    operands = {"y": torch.arange(M), "b": torch.zeros(N)}
    dtypes = {o: torch.bfloat16 for o in gathering.outputs}
    got = interpret(gathering, a, w, operands, dtypes={**dtypes, "target": torch.float32})
    assert got["Z"].dtype == torch.bfloat16
    assert got["target"].shape == (M,)
    assert got["target"].dtype == torch.float32
    acc = (a.float() @ w.float().T)[range(M), range(M)]
    assert torch.equal(got["target"], acc)
    assert not torch.equal(got["target"], got["Z"].float()[range(M), range(M)])
    # In 16 bits it is rounded once, at the store: 2·acc from acc in fp32.
    assert torch.equal(got["doubled"], (2.0 * acc).bfloat16())


def test_gather_passes_over_what_is_not_finite_elsewhere() -> None:
    @epilogue(Z=Tile, t=RowGather)
    def program(acc, y: ColIndex, b: RowVector):
        return {"Z": acc, "t": gather(acc + b, y)}

    a, w = matrices()
    b = torch.full((N,), math.nan)
    b[3] = 0.5
    got = exact(program, a, w, y=torch.tensor([3, 3, -1, 3, N]), b=b)["t"]
    want = (a.double() @ w.double().T)[:, 3] + 0.5
    assert got[2] == got[4] == 0.0
    torch.testing.assert_close(got[[0, 1, 3]], want[[0, 1, 3]])


def test_a_gathered_infinity_is_taken_as_torch_takes_it() -> None:
    @epilogue(Z=Tile, t=RowGather)
    def program(acc, y: ColIndex, b: RowVector):
        return {"Z": acc, "t": gather(acc + b, y)}

    a, w = matrices()
    b, y = torch.zeros(N), torch.tensor([3, 4, 3, -1, N])
    b[3], b[4] = -math.inf, math.inf
    got = exact(program, a, w, y=y, b=b)
    taken = (a.double() @ w.double().T + b).gather(1, y[:3, None].expand(-1, 1))[:, 0]
    assert got["t"][:3].tolist() == taken.tolist() == [-math.inf, math.inf, -math.inf]
    assert got["t"][3:].tolist() == [0.0, 0.0]


@epilogue(dZ=WideTile, O=Tile, s=RowSum)
def gate_backward(acc, Z: WideTile, b: RowVector):
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up, acc * gate + b), "O": gate - up, "s": acc * up}


def test_a_wide_tile_holds_two_numbers_for_each_element() -> None:
    a, w = matrices()
    Z = torch.randn(M, 2 * N, generator=torch.Generator().manual_seed(1))
    b = torch.arange(N).float()
    got = exact(gate_backward, a, w, Z=Z, b=b)
    acc, z = rows(a.double() @ w.double().T), rows(Z)
    assert got["dZ"].shape == (M, 2 * N) and got["O"].shape == (M, N)
    for m in range(M):
        ups = [z[m][2 * n + 1] for n in range(N)]
        products = [x * up for x, up in zip(acc[m], ups, strict=True)]
        assert got["s"][m].item() == pytest.approx(math.fsum(products))
        for n in range(N):
            gate, up = z[m][2 * n], z[m][2 * n + 1]
            assert got["dZ"][m, 2 * n].item() == pytest.approx(acc[m][n] * up, abs=1e-13)
            assert got["dZ"][m, 2 * n + 1].item() == pytest.approx(acc[m][n] * gate + n, abs=1e-12)
            assert got["O"][m, n].item() == pytest.approx(gate - up, abs=1e-13)
    raw = interpret(
        gate_backward, a, w, {"Z": Z, "b": b}, dtypes={}, block=16, raw=True, compute=torch.float64
    )
    assert raw["s"].shape == (M, 3)  # blocks are of the accumulator's N columns, not of 2N


@epilogue(X=AddTile, D=Tile)
def accumulating(acc, r: ColVector):
    return {"X": acc * r, "D": acc}


def test_what_is_added_is_rounded_before_the_sum_and_the_sum_again() -> None:
    a, w = matrices()
    r = torch.linspace(0.3, 1.7, M)
    held = torch.randn(M, N, generator=torch.Generator().manual_seed(2)).bfloat16()
    kept = held.clone()
    added = (a.float() @ w.float().T) * r[:, None]
    kind = torch.bfloat16
    got = interpret(accumulating, a, w, {"X": held, "r": r}, dtypes={"X": kind, "D": kind})["X"]
    assert got.dtype == kind
    assert torch.equal(got, (held.float() + added.to(kind).float()).to(kind))
    assert not torch.equal(got, (held.float() + added).to(kind))
    assert torch.equal(held, kept)  # the interpreter returns the sum; who calls it writes it back


def test_accumulation_is_exact_in_float64() -> None:
    a, w = matrices()
    r, held = torch.linspace(0.3, 1.7, M), torch.linspace(-9.0, 9.0, M * N).reshape(M, N).bfloat16()
    got = exact(accumulating, a, w, X=held, r=r)
    added = (a.double() @ w.double().T) * r.double()[:, None]
    assert got["X"].dtype == torch.float64
    assert torch.equal(got["X"], held.double() + added)


@pytest.mark.parametrize(("height", "width"), [(2, 8), (M, N), (7, 4), (3, 40)])
def test_a_head_table_repeats_over_rows_and_columns(height: int, width: int) -> None:
    @epilogue(O=Tile, R=Tile)
    def program(acc, cs: HeadTable):
        x, y = pairs(acc)
        cosine, sine = pairs(cs)
        return {"O": acc + cs, "R": interleave(x * cosine, y - sine)}

    a, w = matrices()
    table = torch.randn(height, width, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = exact(program, a, w, cs=table)
    acc, cs = rows(a.double() @ w.double().T), rows(table)
    for m in range(M):
        for n in range(N):
            here = cs[m % height][n % width]
            turned = acc[m][n] - here if n % 2 else acc[m][n] * here
            assert got["O"][m, n].item() == pytest.approx(acc[m][n] + here, abs=1e-13)
            assert got["R"][m, n].item() == pytest.approx(turned, abs=1e-13)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_scalar_may_be_a_tensor_of_one_element(shape: tuple[int, ...]) -> None:
    @epilogue(O=Tile, P=Tile, s=RowSum)
    def program(acc, alpha: Scalar):
        x, _ = pairs(acc)
        return {"O": alpha * acc, "P": interleave(alpha, x), "s": acc + alpha}

    a, w = matrices()
    got = exact(program, a, w, alpha=torch.full(shape, 0.75))
    want = exact(program, a, w, alpha=0.75)
    for o in want:
        assert torch.equal(got[o], want[o]), o


def test_e4m3_operands_and_outputs() -> None:
    kind = torch.float8_e4m3fn

    @epilogue(O=HalfTile, D=Tile)
    def program(acc, alpha: Scalar):
        x, y = pairs(acc * alpha)
        return {"O": x * y, "D": acc * alpha}

    a, w = (t.to(kind) for t in matrices())
    got = interpret(program, a, w, {"alpha": 0.5}, dtypes={"O": kind, "D": torch.bfloat16})
    d = (a.float() @ w.float().T) * 0.5
    assert (got["O"].dtype, got["D"].dtype) == (kind, torch.bfloat16)
    assert torch.equal(got["O"].float(), (d[:, 0::2] * d[:, 1::2]).to(kind).float())
    assert torch.equal(got["D"], d.bfloat16())
    # As the GPU's conversion: saturated where torch's own gives NaN; NaN stays.
    large = interpret(program, a, w, {"alpha": 1e6}, dtypes=dict.fromkeys("OD", kind))["D"].float()
    assert large.abs().max() == 448.0 and not large.isnan().any()
    assert torch.equal(large.sign(), d.sign())
    bad = interpret(program, a, w, {"alpha": math.nan}, dtypes=dict.fromkeys("OD", kind))
    assert bad["D"].float().isnan().all()
