"""Operations that a program brings along: a meaning of torch's, in PTX.

The text is data. It is parsed against a list of register-to-register instructions, so it cannot
touch memory, branch or synchronise, and every register is set before it is read. In float32 the
interpreter runs the instructions (`ptx_run.py`), in float64 it computes what torch says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.fast_math import assembly
from coda_agent.primitives.graph import Operand, Value, record
from coda_agent.primitives.operation import GROUPS, MOVES, OPS, PLACED, Op, Term, as_tensors
from coda_agent.primitives.ptx_run import MNEMONICS, Statement, form, forms, run

if TYPE_CHECKING:
    from cutlass import Float32

MEANINGS = {
    "asinh": 1, "atan": 1, "atan2": 2, "ceil": 1, "copysign": 2, "cosh": 1, "erfc": 1, "erfinv": 1,
    "exp2": 1, "expm1": 1, "floor": 1, "fmod": 2, "frac": 1, "hypot": 2, "log1p": 1, "log2": 1,
    "round": 1, "sign": 1, "sinh": 1, "square": 1, "tan": 1, "trunc": 1, "xlogy": 2,
}  # fmt: skip
"""Elementwise functions of torch that may be named, and how many values each takes."""

_MAX_STATEMENTS = 32
_NAME = r"[a-z][A-Za-z0-9_]{0,15}"
_FLOAT = r"0[fF][0-9a-fA-F]{8}"
_INTEGER = r"0[xX][0-9a-fA-F]{1,8}|-?(?:0|[1-9][0-9]{0,9})"
_NUMBERS = {
    "f32": rf"{_FLOAT}|-?[0-9]{{1,16}}\.[0-9]{{1,16}}",
    "b32": rf"{_FLOAT}|{_INTEGER}",
    "u32": _INTEGER,
    "s32": _INTEGER,
    "pred": "(?!)",
}
"""How ptxas takes a number where an operand of that type stands."""
_DECLARATION = re.compile(rf"\.reg \.(f32|b32|u32|s32|pred) ({_NAME}(?:, ?{_NAME})*)")
_INSTRUCTION = re.compile(
    rf"(?:@(!?{_NAME}) )?([a-z0-9]+(?:\.[A-Za-z0-9]+)+) ([\w$.-]+(?:, ?[\w$.-]+)*)"
)


def ptx(meaning: str, code: str, *args: Operand) -> Value:
    """An elementwise operation the vocabulary lacks: torch.`meaning`, in PTX of your own.

    `code` is instructions on float32 registers, each ended by `;`: `$0` is the result, `$1`, `$2` …
    the arguments in torch's order; `.reg .f32 t;` declares what is needed between. Arithmetic,
    comparison, selection and conversion only, and nothing is read before it is set. The judge
    compares the instructions with torch.`meaning` on all of float32, to 2⁻⁹ of each result, so a
    small argument has to keep its digits: log(1 + x) is no log1p. Use it for a function the
    vocabulary lacks, or where one instruction does what a composition needs several for.
    `derivative` does not see through it.

    Raises:
        ProgramError: torch's function or an instruction is not on the list, or a register is not
            declared, of another type, or read before it is set.

        return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", sqrt(absolute(acc)), acc)}
    """
    name = f"ptx {meaning}: {code}"
    if len(args) != (op := operation(name)).arity:
        raise ProgramError(f"ptx() got {len(args)} values, torch.{meaning} takes {op.arity}")
    if not any(isinstance(a, Value) for a in args):
        raise ProgramError("ptx() needs at least one value of the program")
    return record(name, *args)


def operation(name: str) -> Op:
    """Find the vocabulary's operation, or that whose PTX the name holds.

    Raises:
        ProgramError: there is none, or its PTX is refused.
    """
    known = next((table[name] for table in (OPS, MOVES, GROUPS, PLACED) if name in table), None)
    return known or _brought(name)


@lru_cache(maxsize=256)
def _brought(name: str) -> Op:
    meaning, colon, code = name.removeprefix("ptx ").partition(": ")
    if not name.startswith("ptx ") or not colon:
        raise ProgramError(f"unknown operation {name!r} in a serialised program")
    if meaning not in MEANINGS:
        known = ", ".join(MEANINGS)
        raise ProgramError(f"ptx() gives no meaning torch.{meaning}, expected one of {known}")
    arity = MEANINGS[meaning]
    statements, registers = _parsed(code, arity)
    return Op(
        name,
        _computed(meaning, statements, registers),
        _assembly(statements, registers, arity),
        arity,
        call=partial(record, name),
        flops=len(statements),
    )


def _parsed(code: str, arity: int) -> tuple[list[Statement], dict[str, str]]:
    """Parse `code` into instructions and the type of each register.

    Raises:
        ProgramError: a statement is not one of an instruction on the list and known registers of
            its types, or a register is read before it is set.
    """
    *texts, rest = (" ".join(part.split()) for part in code.split(";"))
    if rest or not 1 <= len(texts) <= _MAX_STATEMENTS:
        raise ProgramError(
            f"ptx() takes 1 to {_MAX_STATEMENTS} statements, each ended by a semicolon"
        )
    registers = {f"${i}": "f32" for i in range(arity + 1)}
    statements = []
    for text in texts:
        if declared := _DECLARATION.fullmatch(text):
            for name in re.split(r", ?", declared[2]):
                if name in registers:
                    raise ProgramError(f"ptx(): {name!r} in {text!r} is declared already")
                registers[name] = declared[1]
        else:
            statements.append(_statement(text, registers))
    _check_set(statements, registers)
    return statements, registers


def _statement(text: str, registers: Mapping[str, str]) -> Statement:
    found = _INSTRUCTION.fullmatch(text)
    known = form(found[2]) if found else None
    if found is None or known is None:
        mnemonic = found[2].partition(".")[0] if found else ""
        listed = forms(mnemonic) or [f"instructions: {', '.join(MNEMONICS)}"]
        raise ProgramError(
            f"ptx() does not take {text!r}",
            hint=f"{'; '.join(listed)}; operands: $0, $1 …, registers declared by `.reg .f32 t;`, "
            "numbers",
        )
    guard, operands = found[1] or "", re.split(r", ?", found[3])
    if len(operands) != len(known.types):
        raise ProgramError(f"ptx(): {found[2]!r} in {text!r} takes {len(known.types)} operands")
    types = [*zip(operands, known.types, strict=True)]
    types += [(guard.removeprefix("!"), "pred")] if guard else []
    for i, (operand, type) in enumerate(types):
        if operand not in registers:
            if operand[0].isalpha() or operand[0] == "$" or i == 0:
                raise ProgramError(f"ptx(): {operand!r} in {text!r} is not declared")
            if not re.fullmatch(_NUMBERS[type], operand):
                raise ProgramError(
                    f"ptx(): {operand!r} in {text!r} is no number of type {type}",
                    hint="1.0, or 0f and the eight digits of its bits, is an f32; 1 and 0x1f are "
                    "integers",
                )
        elif not _suits(registers[operand], type):
            raise ProgramError(
                f"ptx(): {operand!r} in {text!r} is declared {registers[operand]}, expected {type}",
                hint="a b32 register serves as f32, u32 and s32 too; cvt converts",
            )
    target, *sources = operands
    if target.startswith("$") and target != "$0":
        raise ProgramError(f"ptx() may write no argument: {text!r}")
    return Statement(text, guard, known, target, tuple(sources))


def _suits(declared: str, type: str) -> bool:
    """Tell whether ptxas takes a register for an operand of that type."""
    kinds = {declared, type}
    return len(kinds) == 1 or kinds == {"u32", "s32"} or ("b32" in kinds and "pred" not in kinds)


def _check_set(statements: Sequence[Statement], registers: Mapping[str, str]) -> None:
    """Refuse registers read before they are set, and a `$0` unset."""
    # Under which guards each register is set: "" under none. "p" and "!p" count while p is kept.
    under = {name: {""} for name in registers if name[0] == "$" and name != "$0"}
    hint = "under @p set it under @!p too, before p changes, or before both without a predicate"
    for s in statements:
        read = [(s.guard.removeprefix("!"), "")] if s.guard else []
        read += [(name, s.guard) for name in s.sources if name in registers]
        for name, guard in read:
            if not under.get(name, set()) & {"", guard}:
                raise ProgramError(
                    f"ptx(): {name!r} in {s.text!r} is read before it is set", hint=hint
                )
        changed = {s.target, f"!{s.target}"}
        for guards in under.values():
            guards -= changed
        held = under.setdefault(s.target, set())
        held |= {s.guard} - changed
        if {s.guard, f"!{s.guard}"} <= held or {s.guard, s.guard[1:]} <= held:
            held.add("")
    if "" not in under.get("$0", ()):
        raise ProgramError("ptx() does not set $0, the result, in every case", hint=hint)


def _computed(
    meaning: str, statements: Sequence[Statement], registers: Mapping[str, str]
) -> Callable[..., torch.Tensor]:
    """Make a call: of float32 the instructions, of float64 their meaning."""

    def call(*args: Term) -> torch.Tensor:
        tensors = as_tensors(*args)
        if tensors[0].dtype is torch.float32:
            return run(statements, registers, *tensors)
        return getattr(torch, meaning)(*tensors)

    return call


def _assembly(
    statements: Sequence[Statement], registers: Mapping[str, str], arity: int
) -> Callable[..., Float32]:
    declared = [f".reg .{type} {name}" for name, type in registers.items() if name[0] != "$"]
    texts = [*declared, *(s.text for s in statements)]
    return assembly(" ".join(f"{text};" for text in texts), arity)
