"""Programs of one expression, for tests that need many; what is wrong with a text, and what becomes
of a program."""

from collections.abc import Callable
from typing import Any

from coda_agent.primitives import (
    ColIndex,
    ColVector,
    Program,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    epilogue,
)
from coda_agent.primitives.errors import Fault, TextError
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.target import Tensors, compile_blind

KINDS = {
    **dict.fromkeys(("C", "D", "E"), Tile),
    **dict.fromkeys(("W", "Y", "Z"), WideTile),
    **dict.fromkeys(("p", "q", "r"), ColVector),
    **dict.fromkeys(("b", "t"), RowVector),
    **dict.fromkeys(("alpha", "beta"), Scalar),
    **dict.fromkeys(("index", "y"), ColIndex),
}
"""What an operand is, by its name."""


def faults(text: str, expected: list[str]) -> list[Fault]:
    """What is wrong with a text."""
    try:
        read_programs(text, expected)
    except TextError as error:
        return [*error.faults]
    return []


def program(function: Callable[..., Any], /, **outputs: type) -> Program:
    """The program `program` of a function of acc and of operands named in `KINDS`."""
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    function.__annotations__ = {name: KINDS[name] for name in names}
    function.__name__ = "program"
    return epilogue(**outputs)(function)


def built(
    program: Program,
    arch: str = "sm_90a",
    config: TileConfig | None = None,
    dtype: str = "bfloat16",
    stored: str = "bfloat16",
    **otherwise: str,
) -> dict[str, Any]:
    """What compiling the program without a GPU reports, by default in its default tile; outputs are
    stored in one type, but for those that are named with another."""
    elements = {ColVector: "float32", RowVector: "float32", ColIndex: "int64"}
    operands = {o: elements.get(kind, "bfloat16") for o, kind in program.operands.items()}
    outputs = dict.fromkeys(program.outputs, stored) | otherwise
    tensors = Tensors(dtype, operands, outputs)
    return compile_blind(program, config or DEFAULT_CONFIGS[arch], arch, tensors)
