"""Instructions evaluated on tensors, against exact arithmetic, Python's own and what PTX fixes."""

import math
import operator
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coda_agent.primitives.ptx import operation
from coda_agent.primitives.ptx_run import _FORMS, MNEMONICS, form, forms

TOP = Fraction(2**24 - 1) * 2**104
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000,
    0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x40400000, 0x4B800001, 0xCB7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF,
]  # fmt: skip


def evaluate(code: str, *bits: int | np.ndarray, arity: int = 2) -> Any:
    """Bits of `$0`; `code` reads `$1`, `$2` with these bits."""
    arrays = np.broadcast_arrays(*bits, *[0] * (arity - len(bits)))
    args = [torch.from_numpy(a.astype(np.uint32).view(np.float32)) for a in arrays]
    name = {1: "log1p", 2: "atan2"}[arity]
    out = operation(f"ptx {name}: {code}").torch(*args)
    return out.numpy().view(np.uint32)


def value(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def rounded(exact: Fraction, mode: str, zero: int = 0) -> int:
    """Bits of `exact` in float32, by integers alone; `zero` those of an exact 0."""
    if exact == 0:
        return zero
    negative, size = exact < 0, abs(exact)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    half = Fraction(1, 2)
    units, rest = divmod(size / Fraction(2) ** (exponent - 23), 1)
    up = {
        "rn": rest > half or (rest == half and units % 2),
        "rz": False,
        "rm": negative and rest,
        "rp": rest,
    }[mode]
    up = bool(up) and not (mode == "rp" and negative)
    size = (units + up) * Fraction(2) ** (exponent - 23)
    sign = 0x80000000 if negative else 0
    if size > TOP:
        away = mode == "rn" or (mode == "rp" and not negative) or (mode == "rm" and negative)
        return sign | (0x7F800000 if away else 0x7F7FFFFF)
    return sign | struct.unpack("<I", struct.pack("<f", float(size)))[0]


def samples(count: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of finite float32's bits: edges, near ones, and of any exponents."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, count, dtype=np.uint64)
    far = rng.integers(0, 2**32, count, dtype=np.uint64)
    near = (x + rng.integers(0, 1 << 26, count, dtype=np.uint64)) ^ (far & 0x80000000)
    pairs = [*product(EDGES, EDGES), *zip(x, far, strict=True), *zip(x, near % 2**32, strict=True)]
    finite = [(int(a), int(b)) for a, b in pairs]
    return [p for p in finite if all(b & 0x7F800000 != 0x7F800000 for b in p)]


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "rcp": lambda x, y: 1 / x,
    "fma": lambda x, y: x * y + y,
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_rounds_once_as_exact_arithmetic_does(name: str, mode: str) -> None:
    pairs = samples(300, 1)
    if name in ("div", "rcp"):
        pairs = [(x, y) for x, y in pairs if value(y if name == "div" else x)]
    operands = {"rcp": "$1", "fma": "$1, $2, $2"}.get(name, "$1, $2")
    x, y = np.array(pairs).T
    got = evaluate(f"{name}.{mode}.f32 $0, {operands};", x, y)
    for (a, b), bits in zip(pairs, got.tolist(), strict=True):
        sign_a, sign_b = a & 0x80000000, b & 0x80000000
        opposite = 0x80000000 if mode == "rm" else 0
        match name:  # the sign of an exact 0
            case "add" | "sub":
                other = sign_b ^ (0x80000000 if name == "sub" else 0)
                zero = sign_a if sign_a == other else opposite
            case "fma":
                zero = sign_b if sign_a ^ sign_b == sign_b else opposite
            case _:
                zero = sign_a ^ sign_b
        want = rounded(EXACT[name](value(a), value(b)), mode, zero)
        assert bits == want, f"{name}.{mode} of {a:08x}, {b:08x}: {bits:08x}, expected {want:08x}"


def test_a_fused_sum_that_two_roundings_get_wrong() -> None:
    """2⁻²⁴(1 - 2⁻⁴⁴) beside 1 + 2⁻²³: float64 rounds to the middle of two float32, and from there
    to the even one, which is further away."""
    x, y, one = 0x39800002, 0x397FFFFC, 0x3F800001
    assert rounded(value(x) * value(y) + value(one), "rn") == one
    assert evaluate("fma.rn.f32 $0, $1, $2, 0f3F800001;", x, y) == one


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_a_root_rounds_once(mode: str) -> None:
    x = np.array([b for pair in samples(200, 2) for b in pair if 0 < b < 0x7F800000])
    got = evaluate(f"sqrt.{mode}.f32 $0, $1;", x, arity=1)
    with localcontext() as context:
        context.prec = 80
        for bits, found in zip(x.tolist(), got.tolist(), strict=True):
            exact = value(bits)
            root = Decimal(exact.numerator) / Decimal(exact.denominator)
            assert found == rounded(Fraction(root.sqrt()), mode), f"{bits:08x}"


NAN, CANONICAL, INF, ONE = 0x7FC00000, 0x7FFFFFFF, 0x7F800000, 0x3F800000
FIXED = [
    # NaN, infinities and the sign of 0. What ptxas folds constants to agrees.
    ("add.f32 $0, $1, $2;", (INF, INF | 1 << 31), CANONICAL),
    ("mul.f32 $0, $1, $2;", (INF, 0), CANONICAL),
    ("fma.rn.f32 $0, $1, $2, $1;", (INF, 1 << 31 | ONE), CANONICAL),
    ("fma.rn.f32 $0, $1, $2, $2;", (0x7F7FFFFF, INF), INF),
    ("add.f32 $0, $1, $2;", (0x7F7FFFFF, 0x7F7FFFFF), INF),
    ("sqrt.rn.f32 $0, $1;", (1 << 31, 0), 1 << 31),
    ("sqrt.approx.f32 $0, $1;", (1 << 31 | ONE, 0), CANONICAL),
    ("rsqrt.approx.f32 $0, $1;", (1 << 31, 0), 1 << 31 | INF),
    ("rcp.approx.f32 $0, $1;", (1 << 31, 0), 1 << 31 | INF),
    ("lg2.approx.f32 $0, $1;", (1 << 31, 0), 1 << 31 | INF),
    ("lg2.approx.f32 $0, $1;", (1, 0), 0xC3150000),  # -149
    ("lg2.approx.ftz.f32 $0, $1;", (1, 0), 1 << 31 | INF),
    ("ex2.approx.ftz.f32 $0, $1;", (0xC3000000, 0), 0),  # 2⁻¹²⁸ is subnormal
    ("ex2.approx.f32 $0, $1;", (0xC3000000, 0), 0x00200000),
    ("sin.approx.f32 $0, $1;", (INF, 0), CANONICAL),
    ("div.approx.f32 $0, $1, $2;", (ONE, 0x7F000000), 0),  # above 2¹²⁶
    ("div.approx.f32 $0, $1, $2;", (ONE, 0x7E800000), 0x00800000),
    ("div.approx.f32 $0, $1, $2;", (INF, 0x7F000000), CANONICAL),
    ("div.full.f32 $0, $1, $2;", (0x7F7FFFFF, 0x7F7FFFFF), ONE),
    # A number before NaN, unless .NaN; -0 below +0.
    ("min.f32 $0, $1, $2;", (1 << 31, 0), 1 << 31),
    ("max.f32 $0, $1, $2;", (1 << 31, 0), 0),
    ("min.f32 $0, $1, $2;", (NAN, ONE), ONE),
    ("max.f32 $0, $1, $2;", (ONE, NAN), ONE),
    ("max.f32 $0, $1, $2;", (NAN, NAN), CANONICAL),
    ("max.NaN.f32 $0, $1, $2;", (NAN, ONE), CANONICAL),
    ("min.NaN.f32 $0, $1, $2;", (ONE, NAN), CANONICAL),
    ("max.f32 $0, $1, 2.5;", (ONE, 0), 0x40200000),
    # .sat and .ftz
    ("add.sat.f32 $0, $1, $2;", (ONE, ONE), ONE),
    ("add.sat.f32 $0, $1, $2;", (1 << 31, 1 << 31), 0),
    ("mul.sat.f32 $0, $1, $2;", (INF, 0), 0),
    ("cvt.sat.f32.f32 $0, $1;", (NAN, 0), 0),
    ("add.ftz.f32 $0, $1, $2;", (0x80000001, 1 << 31), 1 << 31),
    ("mul.ftz.f32 $0, $1, $2;", (0x00800000, 0xBF000000), 1 << 31),
    ("mul.f32 $0, $1, $2;", (0x00800000, 0xBF000000), 0x80400000),
    ("abs.ftz.f32 $0, $1;", (0x80000001, 0), 0),
    ("neg.f32 $0, $1;", (0x00000001, 0), 0x80000001),
    ("copysign.f32 $0, $1, $2;", (1 << 31, 0x40000000), 0xC0000000),
    ("mov.f32 $0, 16777217.0;", (0, 0), 0x4B800000),  # a decimal is rounded to even
    # Integers: truncated literals, shifts beyond 31, the ends.
    ("mov.b32 $0, 5000000000;", (0, 0), 5000000000 % 2**32),
    (".reg .b32 b; shl.b32 b, $1, 33; mov.b32 $0, b;", (1, 0), 0),
    (".reg .b32 b; shl.b32 b, $1, 31; mov.b32 $0, b;", (1, 0), 1 << 31),
    (".reg .s32 s; mov.s32 s, -8; shr.s32 s, s, 40; mov.b32 $0, s;", (0, 0), 0xFFFFFFFF),
    (".reg .u32 u; mov.b32 u, $1; shr.u32 u, u, 31; mov.b32 $0, u;", (0x80000005, 0), 1),
    (".reg .b32 n, b; mov.b32 n, $1; shl.b32 b, 1, n; mov.b32 $0, b;", (0xFFFFFFFF, 0), 0),
    (".reg .s32 s; mov.b32 s, $1; abs.s32 s, s; mov.b32 $0, s;", (1 << 31, 0), 1 << 31),
    (".reg .s32 s; mov.b32 s, $1; add.s32 s, s, 1; mov.b32 $0, s;", (0x7FFFFFFF, 0), 1 << 31),
    (".reg .u32 u; mov.b32 u, $1; min.u32 u, u, 7; mov.b32 $0, u;", (0xFFFFFFFF, 0), 7),
    (".reg .s32 s; mov.b32 s, $1; min.s32 s, s, 7; mov.b32 $0, s;", (0xFFFFFFFF, 0), 0xFFFFFFFF),
    (".reg .s32 s; cvt.rni.s32.f32 s, $1; mov.b32 $0, s;", (NAN, 0), 0),
    (".reg .s32 s; cvt.rzi.s32.f32 s, $1; mov.b32 $0, s;", (0x7F000000, 0), 0x7FFFFFFF),
    (".reg .s32 s; cvt.rzi.s32.f32 s, $1; mov.b32 $0, s;", (INF | 1 << 31, 0), 1 << 31),
    (".reg .u32 u; cvt.rzi.u32.f32 u, $1; mov.b32 $0, u;", (0xC0000000, 0), 0),
    (".reg .u32 u; cvt.rpi.u32.f32 u, $1; mov.b32 $0, u;", (INF, 0), 0xFFFFFFFF),
    (".reg .u32 u; mov.b32 u, $1; cvt.rz.f32.u32 $0, u;", (0xFFFFFFFF, 0), 0x4F7FFFFF),
    (".reg .s32 s; mov.b32 s, $1; cvt.rn.f32.s32 $0, s;", (0xFFFFFFFF, 0), 0xBF800000),
    ("and.b32 $0, $1, 0x7fffffff;", (0xC0000000, 0), 0x40000000),
    ("xor.b32 $0, $1, $2;", (0xC0000000, 0x40000001), 0x80000001),
    ("or.b32 $0, $1, 0f80000000;", (ONE, 0), 1 << 31 | ONE),
    ("not.b32 $0, $1;", (0xC0000000, 0), 0x3FFFFFFF),
    # Predicates: a write where they hold, and logic on them.
    (".reg .pred p; setp.gt.f32 p, $1, $2; mov.f32 $0, $2; @p mov.f32 $0, $1;", (ONE, 0), ONE),
    (".reg .pred p; setp.gt.f32 p, $1, $2; mov.f32 $0, $2; @!p mov.f32 $0, $1;", (ONE, 0), 0),
    (".reg .pred p, q; setp.eq.f32 p, $1, $1; not.pred q, p; selp.f32 $0, 1.0, $2, q;", (NAN, 5),
     ONE),
    (".reg .pred p, q; setp.eq.b32 p, $1, $2; mov.pred q, p; @q setp.ne.f32 q, $1, $2; "
     "selp.b32 $0, 1, 2, q;", (NAN, NAN), 2),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bits", "want"), FIXED)
def test_what_ptx_fixes(code: str, bits: tuple[int, int], want: int) -> None:
    got = int(evaluate(code, *bits))
    assert got == want, f"{got:08x}, expected {want:08x}"


@pytest.mark.parametrize("how", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_beside_nan_and_of_integers(how: str) -> None:
    bits = [0, 1 << 31, ONE, 1 << 31 | ONE, INF, NAN, 1]
    x, y = np.array([*product(bits, bits)]).T
    fx, fy = (v.astype(np.uint32).view(np.float32) for v in (x, y))
    compare, nan = getattr(operator, how), np.isnan(fx) | np.isnan(fy)
    for name, kind, want in (
        (how, "f32", compare(fx, fy) & ~nan),
        (f"{how}u", "f32", compare(fx, fy) | nan),
        ("num", "f32", ~nan),
        ("nan", "f32", nan),
        (how, "u32", compare(x, y)),
        (
            how,
            "s32",
            compare(x.astype(np.uint32).view(np.int32), y.astype(np.uint32).view(np.int32)),
        ),
    ):
        np.testing.assert_array_equal(compared(f"{name}.{kind}", x, y), want, f"{name}.{kind}")
    unsigned = {"lt": "lo", "le": "ls", "gt": "hi", "ge": "hs"}
    if how in unsigned:
        np.testing.assert_array_equal(compared(f"{unsigned[how]}.u32", x, y), compare(x, y))


def compared(how: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    code = (
        ".reg .pred p; .reg .b32 a, b; mov.b32 a, $1; mov.b32 b, $2;"
        f"setp.{how} p, a, b; selp.f32 $0, 1.0, 0.0, p;"
    )
    return evaluate(code, x, y).view(np.float32) == 1


@pytest.mark.parametrize(
    ("how", "numpy"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_conversions_to_integers(how: str, numpy: Any) -> None:
    x = np.concatenate([np.arange(-5, 5, 0.25), [1e9, -1e9, 2.0**23 + 1, -0.3]]).astype(np.float32)
    bits = x.view(np.uint32)
    got = evaluate(f"cvt.{how}.f32.f32 $0, $1;", bits, arity=1)
    np.testing.assert_array_equal(got, numpy(x).view(np.uint32))  # the sign of 0 too
    code = f".reg .s32 s; cvt.{how}.s32.f32 s, $1; mov.b32 $0, s;"
    np.testing.assert_array_equal(
        evaluate(code, bits, arity=1).view(np.int32), numpy(x).astype(np.int32)
    )


@pytest.mark.parametrize(("name", "function"), [
    ("ex2", lambda x: 2.0**x), ("lg2", math.log2), ("sin", math.sin), ("cos", math.cos),
    ("tanh", math.tanh), ("rsqrt", lambda x: 1 / math.sqrt(x)), ("rcp", lambda x: 1 / x),
])  # fmt: skip
def test_approximations_are_the_nearest_float32(name: str, function: Callable[..., float]) -> None:
    x = np.exp(np.random.default_rng(3).uniform(-12, 4, 500)).astype(np.float32)
    got = evaluate(f"{name}.approx.f32 $0, $1;", x.view(np.uint32), arity=1).view(np.float32)
    want = np.array([np.float32(function(float(v))) for v in x])
    np.testing.assert_array_equal(got, want)


def test_shapes_broadcast_and_arguments_stay() -> None:
    op = operation("ptx atan2: mov.f32 $0, $1; add.f32 $0, $0, $2;")
    x, y = torch.arange(3.0)[:, None], torch.arange(4.0)
    got = op.torch(x, y)
    assert torch.equal(got, x + y) and torch.equal(x, torch.arange(3.0)[:, None])
    assert op.torch(x, 2.0).shape == (3, 1)
    constant = operation("ptx atan2: mov.f32 $0, 1.0;").torch(x, y)
    assert constant.shape == (3, 4) and bool((constant == 1).all())


def spelled(modifiers: str) -> Iterator[str]:
    parts = re.findall(r"\{([^}]*)\}|\(([^)]*)\)|([^{(]+)", modifiers)
    choices = [["", *a.split("|")] if a else b.split("|") if b else [c] for a, b, c in parts]
    return ("".join(choice) for choice in product(*choices))


def test_every_listed_instruction_is_one_of_ptx(tmp_path: Path) -> None:
    """ptxas assembles them all, with operands of the types that are said to be theirs."""
    import triton

    lines = []
    for mnemonics, modifiers, _, _ in _FORMS:
        for mnemonic, rest in product(mnemonics.split(), spelled(modifiers)):
            found = form(mnemonic + rest)
            assert found is not None and rest, mnemonic + rest
            operands = [f"{t}x{i}" for i, t in enumerate(found.types)]
            lines.append(f"{mnemonic}{rest} {', '.join(operands)};")
    registers = " ".join(
        f".reg .{t} {', '.join(f'{t}x{i}' for i in range(4))};"
        for t in ("f32", "b32", "u32", "s32", "pred")
    )
    body = "\n".join(lines)
    (tmp_path / "all.ptx").write_text(
        f".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() {{\n{registers}\n{body}\nret; }}\n"
    )
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    ran = subprocess.run(
        [ptxas, "-arch", "sm_90a", tmp_path / "all.ptx", "-o", tmp_path / "all.o"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert {line.split(".")[0] for line in lines} == set(MNEMONICS)


def test_how_an_instruction_is_written_can_be_asked() -> None:
    assert forms("copysign") == ["copysign.f32"]
    assert forms("shr") == ["shr(.u32|.s32)"]
    assert forms("bra") == [] and form("bra.uni") is None
    for name in ("tanh.approx.ftz.f32", "add.f64", "add", "fma.f32", "mov.u64", "add.ftz.rn.f32"):
        assert form(name) is None, name
