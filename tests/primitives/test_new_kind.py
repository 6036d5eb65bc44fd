"""An operand and an output kind added to the language: the class and its entry are all that is needed."""

from typing import Any

import pytest
import torch

from coda_agent.primitives import Program, RowVector, Tile, epilogue
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.resources import OPERAND_KINDS, OUTPUT_KINDS
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.target import Tensors, compile_blind


class RowTable(RowVector):
    """An operand of two rows of length N, of which the first counts."""

    dims = ("2", "N")

    @classmethod
    def extents(cls, m: int, n: int) -> tuple[int, ...]:
        return 2, n

    @classmethod
    def lifted(cls, value: Any, acc: torch.Tensor) -> torch.Tensor:
        return super().lifted(value, acc)[0]


class SingleTile(Tile):
    """An output stored in float32 alone."""

    stored = ("float32",)
    element_bytes = 4


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setitem(OPERAND_KINDS, "RowTable", RowTable)
    monkeypatch.setitem(OUTPUT_KINDS, "SingleTile", SingleTile)

    @epilogue(O=SingleTile)
    def scaled(acc, s: RowTable):
        return {"O": acc * s}

    return Program.from_dict(scaled.to_dict())


def test_it_is_read_and_written(program: Program) -> None:
    a, b, s = torch.randn(6, 8), torch.randn(32, 8), torch.randn(2, 32)
    got = interpret(program, a, b, {"s": s}, dtypes={"O": torch.float32})["O"]
    torch.testing.assert_close(got, a @ b.mT * s[0])


def test_it_is_checked(program: Program) -> None:
    a, b = (torch.randn(*shape).bfloat16() for shape in ((6, 8), (32, 8)))
    function = ProgramFunction(program, {"O": None}, untuned)
    with pytest.raises(LaunchError, match=r"operand 's' has shape \(32,\), expected \(2, 32\)"):
        function(a, b, {"s": torch.randn(32)})


def test_it_costs_what_it_moves(program: Program) -> None:
    facts = inspect_program(program, (64, 32, 16))
    assert facts.bytes_moved == 2 * (64 * 16 + 32 * 16) + 2 * 32 * 4 + 64 * 32 * 4
    assert facts.bytes_written == 64 * 32 * 4


def test_it_is_lowered(program: Program) -> None:
    config = DEFAULT_CONFIGS["sm_90a"]
    types = {"s": "float32", "O": "float32"}
    tensors = Tensors("bfloat16", types, types)
    assert compile_blind(program, config, "sm_90a", tensors)["registers"] > 0
