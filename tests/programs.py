"""Programs of one expression, for tests that need many."""

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

KINDS = {
    **dict.fromkeys(("C", "D", "E"), Tile),
    **dict.fromkeys(("W", "Y", "Z"), WideTile),
    **dict.fromkeys(("p", "q", "r"), ColVector),
    **dict.fromkeys(("b", "t"), RowVector),
    **dict.fromkeys(("alpha", "beta"), Scalar),
    **dict.fromkeys(("index", "y"), ColIndex),
}
"""What an operand is, by its name."""


def program(function: Callable[..., Any], /, **outputs: type) -> Program:
    """The program `program` of a function of acc and of operands named in `KINDS`."""
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    function.__annotations__ = {name: KINDS[name] for name in names}
    function.__name__ = "program"
    return epilogue(**outputs)(function)
