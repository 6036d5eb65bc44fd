"""What each PTX instruction that a program may bring computes, in torch.

- `_FORMS` lists the instructions with their modifiers, types and operands. What it does not list
  has no meaning here, and so is refused.
- Rounded instructions give the bits that the PTX ISA fixes, NaN in its canonical form. Approximate
  ones give the float32 nearest to their function, which a GPU misses by what the ISA allows.
- Each instruction rounds by itself. An assembler may fuse mul and add without a rounding modifier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coda_agent.primitives.deferred import torch

_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, slots=True)
class Form:
    """One instruction with its modifiers, such as `add.rn.f32`.

    Attributes:
        types: PTX types of the result and of each source.
        evaluate: The result, from `words` and the sources. A value of type f32 is float32, b32
            int32, s32 and u32 int64, pred bool.
    """

    words: tuple[str, ...]
    types: tuple[str, ...]
    evaluate: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Statement:
    """An instruction on registers and numbers.

    Attributes:
        guard: The predicate it runs under, `!` before it where that has to be false; else empty.
        sources: Names of registers, and numbers as PTX writes them.
    """

    text: str
    guard: str
    form: Form
    target: str
    sources: tuple[str, ...]


@lru_cache(maxsize=256)
def form(name: str) -> Form | None:
    """Find the instruction `name`, if it is listed."""
    mnemonic, *rest = words = tuple(name.split("."))
    for mnemonics, modifiers, types, evaluate in _FORMS:
        if mnemonic in mnemonics.split() and re.fullmatch(
            _pattern(modifiers), ".".join(["", *rest])
        ):
            named = {"D": words[-2], "T": words[-1]}
            return Form(words, tuple(named.get(t, t) for t in types.split()), evaluate)
    return None


def forms(mnemonic: str) -> list[str]:
    """List how instructions of a mnemonic are written.

    Of `{.rn|.rz}` one part or none is taken, of `(.u32|.s32)` one.
    """
    return [mnemonic + modifiers for m, modifiers, _, _ in _FORMS if mnemonic in m.split()]


def _pattern(modifiers: str) -> str:
    return modifiers.replace(".", r"\.").replace("{", "(?:").replace("}", ")?")


def run(
    statements: Sequence[Statement], registers: Mapping[str, str], *args: torch.Tensor
) -> torch.Tensor:
    """Compute what `$0` holds in the end.

    Args:
        statements: In order; each reads only what is set before it.
        args: `$1`, `$2` …: float32, shapes that broadcast.
    """
    held: dict[str, torch.Tensor] = {f"${i}": x for i, x in enumerate(args, 1)}

    def read(name: str, type: str) -> torch.Tensor:
        bits = held[name] if name in registers else _number(name, args[0].device)
        if type == "pred":
            return bits
        if type == "f32":
            return bits.view(torch.float32)
        bits = bits.view(torch.int32)
        return bits if type == "b32" else bits.long() & 0xFFFFFFFF if type == "u32" else bits.long()

    for s in statements:
        _, *types = s.form.types
        new = s.form.evaluate(s.form.words, *map(read, s.sources, types))
        if registers[s.target] != "pred":
            new = new.int() if new.dtype is torch.int64 else new
            new = new.view(torch.float32 if registers[s.target] == "f32" else torch.int32)
        if s.guard and s.target in held:
            mask = held[s.guard.removeprefix("!")]
            new = torch.where(mask ^ s.guard.startswith("!"), new, held[s.target])
        held[s.target] = new
    return torch.broadcast_tensors(held["$0"], *args)[0]


def _number(text: str, device: torch.device) -> torch.Tensor:
    """Give a number's 32 bits: a float32's, or an integer's."""
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
    elif "." in text:
        return torch.tensor(float(text), dtype=torch.float32, device=device)
    else:
        bits = int(text, 0)
    return torch.tensor(bits, dtype=torch.int64, device=device).int()


def _flushed(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Flush subnormal numbers with .ftz, to 0 of their sign."""
    return x.where(x.abs() >= _SMALLEST_NORMAL, x * 0.0) if "ftz" in words else x


def _finished(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Saturate and flush a float32 result; make NaN canonical."""
    if "sat" in words:
        return x.where(x > 0, 0.0).clamp(max=1.0)  # NaN is 0, and so is -0
    canonical = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=x.device).view(torch.float32)
    return _flushed(words, x).where(~x.isnan(), canonical)


def _narrowed(words: Sequence[str], exact: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 as the modifier says, else to nearest."""
    x = exact.float()
    up, inf = x.double(), torch.tensor(torch.inf, device=x.device)
    if "rz" in words:
        return x.where(~(up.abs() > exact.abs()), x.nextafter(torch.zeros_like(inf)))
    if "rm" in words:
        return x.where(~(up > exact), x.nextafter(-inf))
    return x.where(~(up < exact), x.nextafter(inf)) if "rp" in words else x


def _sum(words: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add in float64, rounded to odd, so that rounding again rounds once."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)  # exact (Knuth's TwoSum); NaN beside an infinity
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = (bits + away).view(torch.float64)
    total = torch.where((error.abs() > 0) & (bits & 1 == 0), odd, total)
    if "rm" in words:
        total = total.where((total != 0) | ~(x.signbit() | y.signbit()), -0.0)
    return total


def _approximate_quotient(words: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # The ISA: beyond 2^126 the quotient is 0, of an infinity NaN.
    return (x / y).where(~(y.abs() > 2.0**126) | ("full" in words), x * 0.0 * y.sign())


# On float64, which holds a product of two float32 exactly. Rounding a quotient or root twice is
# rounding it once: it is never so near to what float32 holds, or to the middle of two.
_REAL: dict[str, Callable[..., torch.Tensor]] = {
    "add": _sum,
    "sub": lambda words, x, y: _sum(words, x, -y),
    "mul": lambda _, x, y: x * y,
    "fma": lambda words, x, y, z: _sum(words, x * y, z),
    "div": lambda words, x, y: x / y if words[1][0] == "r" else _approximate_quotient(words, x, y),
    "rcp": lambda _, x: x.reciprocal(),
    "sqrt": lambda _, x: x.sqrt(),
    "rsqrt": lambda _, x: x.rsqrt(),
    "sin": lambda _, x: x.sin(),
    "cos": lambda _, x: x.cos(),
    "lg2": lambda _, x: x.log2(),
    "ex2": lambda _, x: x.exp2(),
    "tanh": lambda _, x: x.tanh(),
}


def _real(words: Sequence[str], *args: torch.Tensor) -> torch.Tensor:
    exact = _REAL[words[0]](words, *(_flushed(words, x).double() for x in args))
    return _finished(words, _narrowed(words, exact))


def _sign(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    return _flushed(words, x.abs() if words[0] == "abs" else -x)


def _extreme(words: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Take the smaller or larger; with .NaN a NaN; -0 < +0."""
    x, y = (_flushed(words, v) for v in (x, y))
    a, b = (v.view(torch.int32) for v in torch.broadcast_tensors(x, y))
    if words[0] == "min":
        equal, other = a | b, torch.minimum if "NaN" in words else torch.fmin
    else:
        equal, other = a & b, torch.maximum if "NaN" in words else torch.fmax
    return _finished(words, torch.where(x == y, equal.view(torch.float32), other(x, y)))


def _compared(words: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compare; beside NaN only names with a third letter u hold."""
    how, (x, y) = words[1], (_flushed(words, v) for v in (x, y))
    nan = x.isnan() | y.isnan()
    if how in ("num", "nan"):
        return nan if how == "nan" else ~nan
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    found = getattr(x, unsigned.get(how, how[:2]))(y)
    return found | nan if how[2:] else found & ~nan


_INTEGER: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "min": lambda x, y: x.minimum(y),
    "max": lambda x, y: x.maximum(y),
    "abs": lambda x: x.abs(),
    "neg": lambda x: -x,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    # Of 32 bits in 64; more places than 32 are as 32.
    "shl": lambda x, n: x.long() << n.clamp(max=32),
    "shr": lambda x, n: x >> n.clamp(max=32),
}


def _integer(words: Sequence[str], *args: torch.Tensor) -> torch.Tensor:
    return _INTEGER[words[0]](*args)


def _whole(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    ways = {"rni": "round", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
    return getattr(_flushed(words, x), ways.get(words[1], "clone"))()


def _to_whole(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    return _finished(words, _whole(words, x))


def _to_integer(words: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Convert to the nearest that the type holds; NaN to 0."""
    low, high = (0, 2**32 - 1) if words[-2] == "u32" else (-(2**31), 2**31 - 1)
    return _whole(words, x).double().nan_to_num(0.0).clamp(low, high).long()


_ROUND = ".rn|.rz|.rm|.rp"
_INTEGRAL = ".rni|.rzi|.rmi|.rpi"
_ORDER = ".eq|.ne|.lt|.le|.gt|.ge"
_UNORDERED = ".equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan"
_FORMS: tuple[tuple[str, str, str, Callable[..., torch.Tensor]], ...] = (
    ("add sub mul", f"{{{_ROUND}}}{{.ftz}}{{.sat}}.f32", "T T T", _real),
    ("fma", f"({_ROUND}){{.ftz}}{{.sat}}.f32", "T T T T", _real),
    ("div", f"({_ROUND}|.approx|.full){{.ftz}}.f32", "T T T", _real),
    ("rcp sqrt", f"({_ROUND}|.approx){{.ftz}}.f32", "T T", _real),
    ("rsqrt sin cos lg2 ex2", ".approx{.ftz}.f32", "T T", _real),
    ("tanh", ".approx.f32", "T T", _real),
    ("abs neg", "{.ftz}.f32", "T T", _sign),
    ("min max", "{.ftz}{.NaN}.f32", "T T T", _extreme),
    ("copysign", ".f32", "T T T", lambda _, sign, size: size.copysign(sign)),
    ("mov", "(.f32|.b32|.u32|.s32|.pred)", "T T", lambda _, x: x),
    ("selp", "(.f32|.b32|.u32|.s32)", "T T T pred", lambda _, x, y, p: x.where(p, y)),
    ("setp", f"({_ORDER}|{_UNORDERED}){{.ftz}}.f32", "pred T T", _compared),
    ("setp", f"({_ORDER}).s32", "pred T T", _compared),
    ("setp", f"({_ORDER}|.lo|.ls|.hi|.hs).u32", "pred T T", _compared),
    ("setp", "(.eq|.ne).b32", "pred T T", _compared),
    ("add sub min max", "(.u32|.s32)", "T T T", _integer),
    ("abs neg", ".s32", "T T", _integer),
    ("and or xor", "(.b32|.pred)", "T T T", _integer),
    ("not", "(.b32|.pred)", "T T", _integer),
    ("shl", ".b32", "T T u32", _integer),
    ("shr", "(.u32|.s32)", "T T u32", _integer),
    ("cvt", f"{{{_INTEGRAL}}}{{.ftz}}{{.sat}}.f32.f32", "D T", _to_whole),
    ("cvt", f"({_INTEGRAL}){{.ftz}}(.u32|.s32).f32", "D T", _to_integer),
    ("cvt", f"({_ROUND}).f32(.u32|.s32)", "D T", lambda w, x: _narrowed(w, x.double())),
)
"""Mnemonics, what follows them, the types of result and sources (`T` the last part of the name, `D`
the last but one), and what the instructions compute."""

MNEMONICS = sorted({m for mnemonics, *_ in _FORMS for m in mnemonics.split()})
