"""Operations that a program brings along: meaning by a name of torch's, lowering in PTX.

The text is data. It is parsed against a list of register-to-register instructions on float32, so it
cannot touch memory, branch or synchronise, and the interpreter never runs it: there an operation is
what torch says. That the two agree is for the judge to find on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import OPS, Op, Operand, Value, record

MEANINGS = {
    "asinh": 1, "atan": 1, "atan2": 2, "ceil": 1, "copysign": 2, "cosh": 1, "erfc": 1, "exp2": 1,
    "expm1": 1, "floor": 1, "fmod": 2, "frac": 1, "hypot": 2, "log1p": 1, "log2": 1, "round": 1,
    "sign": 1, "sinh": 1, "square": 1, "tan": 1, "trunc": 1, "xlogy": 2,
}  # fmt: skip
"""Elementwise functions of torch that may be named, and how many values each takes."""

_INSTRUCTIONS = (
    "abs", "add", "and", "copysign", "cos", "cvt", "div", "ex2", "fma", "lg2", "max", "min", "mov",
    "mul", "neg", "not", "or", "rcp", "rsqrt", "selp", "setp", "shl", "shr", "sin", "sqrt", "sub",
    "tanh", "xor",
)  # fmt: skip
_MAX_STATEMENTS = 32
_NUMBER = r"-?(?:0[fF][0-9a-fA-F]{8}|0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?)"
_REGISTER = r"(?:[a-z]\w{0,15}|\$\d)"
_DECLARATION = re.compile(r"\.reg \.(?:f32|b32|u32|s32|pred) ([a-z]\w{0,15}(?:, ?[a-z]\w{0,15})*)")
_INSTRUCTION = re.compile(
    rf"(?:@!?([a-z]\w{{0,15}}) )?([a-z0-9]+)(?:\.[a-z0-9]+)+ "
    rf"({_REGISTER}(?:, ?(?:{_REGISTER}|{_NUMBER}))*)"
)


def ptx(meaning: str, code: str, *args: Operand) -> Value:
    """An elementwise operation the vocabulary lacks: torch.`meaning`, in PTX of your own.

    `code` is instructions on float32 registers, each ended by `;`: `$0` is the result, `$1`, `$2` …
    the arguments in torch's order; `.reg .f32 t;` declares what is needed between. Arithmetic,
    comparison, selection and conversion only. The interpreter computes torch.`meaning`; the judge
    compares the compiled kernel with the spec, so the error of an approximation counts as yours.
    Use it for a function the vocabulary lacks, or where one instruction does what a composition
    needs several for. `derivative` does not see through it.

    Raises:
        ProgramError: torch's function or an instruction is not on the list, or a register is not
            declared.

        return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", log(absolute(acc) + 1.0), acc)}
    """
    name = f"ptx {meaning}: {code}"
    if len(args) != (op := operation(name)).arity:
        raise ProgramError(f"ptx() got {len(args)} values, torch.{meaning} takes {op.arity}")
    if not any(isinstance(a, Value) for a in args):
        raise ProgramError("ptx() needs at least one value of the program")
    return record(name, *args)


def operation(name: str) -> Op:
    """The vocabulary's operation of that name in a graph, or the one whose PTX the name holds.

    Raises:
        ProgramError: there is none, or its PTX is refused.
    """
    if name in OPS:
        return OPS[name]
    return _brought(name)


@lru_cache(maxsize=256)
def _brought(name: str) -> Op:
    meaning, colon, code = name.removeprefix("ptx ").partition(": ")
    if not name.startswith("ptx ") or not colon:
        raise ProgramError(f"unknown operation {name!r} in a serialised program")
    if meaning not in MEANINGS:
        known = ", ".join(MEANINGS)
        raise ProgramError(f"ptx() gives no meaning torch.{meaning}, expected one of {known}")
    arity = MEANINGS[meaning]
    count = _check(code, arity)
    return Op(name, _torch(meaning), _assembly(code, arity), arity, flops=count)


def _check(code: str, arity: int) -> int:
    """Number of instructions in `code`.

    Raises:
        ProgramError: a statement is not one of an instruction on the list and known registers.
    """
    *statements, rest = (" ".join(part.split()) for part in code.split(";"))
    if rest or not 1 <= len(statements) <= _MAX_STATEMENTS:
        raise ProgramError(
            f"ptx() takes 1 to {_MAX_STATEMENTS} statements, each ended by a semicolon"
        )
    known = {f"${i}" for i in range(arity + 1)}
    count, written = 0, False
    for statement in statements:
        if declared := _DECLARATION.fullmatch(statement):
            known |= set(re.split(r", ?", declared[1]))
            continue
        found = _INSTRUCTION.fullmatch(statement)
        if found is None or found[2] not in _INSTRUCTIONS:
            raise ProgramError(
                f"ptx() does not take {statement!r}",
                hint=f"instructions: {', '.join(_INSTRUCTIONS)}; operands: $0, $1 …, registers "
                "declared by `.reg .f32 t;`, numbers",
            )
        target, *sources = re.split(r", ?", found[3])
        used = [found[1] or "$0", target, *(s for s in sources if re.fullmatch(_REGISTER, s))]
        if unknown := [u for u in used if u not in known]:
            raise ProgramError(f"ptx(): {unknown[0]!r} in {statement!r} is not declared")
        if target.startswith("$") and target != "$0":
            raise ProgramError(f"ptx() may write no argument: {statement!r}")
        written |= target == "$0"
        count += 1
    if not written:
        raise ProgramError("ptx() never writes $0, the result")
    return count


def _torch(meaning: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        import torch

        like = next(a for a in args if isinstance(a, torch.Tensor))
        return getattr(torch, meaning)(
            *(torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in args)
        )

    return call


def _assembly(code: str, arity: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        from cutlass import Float32
        from cutlass._mlir.dialects import llvm

        values = [Float32(a).ir_value() for a in args]
        constraints = "=f" + ",f" * arity
        # Free of side effects, so that equal ones are computed once and unused ones not at all.
        return Float32(
            llvm.inline_asm(
                Float32.mlir_type, values, f"{{ {code} }}", constraints,
                has_side_effects=False, is_align_stack=False,
            )
        )  # fmt: skip

    return call
