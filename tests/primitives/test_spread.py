"""Programs that take B's even and odd rows apart, beside those that take all of it."""

import pytest
import torch

from coda_agent.primitives import (
    ColSum,
    HalfTile,
    Program,
    RowSum,
    RowVector,
    Tile,
    epilogue,
    pairs,
    silu,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.spread import exchanged, packed, spread
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, offered
from coda_agent.runtime.target import Tensors, compile_blind


@epilogue(D=Tile, O=HalfTile, s=RowSum, c=ColSum)
def gated(acc, bias: RowVector):
    """A gate with a bias, what it is made of, and sums."""
    z = acc + bias
    gate, up = pairs(z)
    out = silu(gate) * up
    return {"D": z, "O": out, "s": out, "c": z}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def run(program: Program, b: torch.Tensor, **operands: torch.Tensor) -> dict[str, torch.Tensor]:
    types = dict.fromkeys(program.outputs, torch.float64)
    double = {"compute": torch.float64, "dtypes": types}
    return interpret(program, drawn(24, 40), b, operands, **double)


def test_rows_apart_give_what_all_of_b_gives() -> None:
    b, bias = drawn(48, 40), drawn(48)
    even, odd = b[::2], b[1::2]
    expected = run(gated, b, bias=bias)
    apart = spread(gated)
    for got in (
        run(apart, even, bias=bias, odd_rows=odd),
        run(exchanged(apart), odd, bias=bias, odd_rows=even),  # the bias is not exchanged
    ):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)
    wrong = run(apart, odd, bias=bias, odd_rows=even)
    assert not torch.allclose(wrong["O"], expected["O"])


def test_where_rows_lie_is_part_of_a_program_and_crosses_processes() -> None:
    apart = spread(gated)
    assert (apart.spread, packed(apart).digest) == ("odd_rows", gated.digest)
    assert len({gated.digest, apart.digest, exchanged(apart).digest}) == 3
    assert Program.from_dict(apart.to_dict()).digest == apart.digest
    assert all(tile.fused for tile in offered(apart, [(4, 512, 512)]))


def test_authors_do_not_write_it() -> None:
    text = (
        "from coda_agent.primitives import Tile, epilogue\n\n\n"
        '@epilogue(D=Tile)\ndef f(acc, rest: OddRows):\n    return {"D": acc}\n'
    )
    with pytest.raises(ProgramError, match="OddRows"):
        read_programs(text)


@pytest.mark.parametrize("turned", [False, True])
def test_it_compiles_without_an_instruction_more(turned: bool) -> None:
    config = DEFAULT_CONFIGS["sm_90a"]
    types = {"bias": "float32"}, {"D": "bfloat16", "O": "bfloat16"}
    apart = exchanged(spread(gated)) if turned else spread(gated)
    own = Tensors("bfloat16", types[0] | {"odd_rows": "bfloat16"}, types[1])
    found = compile_blind(apart, config, "sm_90a", own)
    whole = compile_blind(gated, config, "sm_90a", Tensors("bfloat16", *types))
    assert found["instructions"] == whole["instructions"]
    assert found["local_stores"] == whole["local_stores"] == 0
