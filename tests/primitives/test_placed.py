"""Values of places against their definitions; on a GPU the demonstrations compare every tile."""

from __future__ import annotations

import pytest
import torch

from coda_agent.primitives import (
    RowVector,
    Scalar,
    Tile,
    column_index,
    dropout,
    epilogue,
    group_mean,
    philox_uniform,
    row_index,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.placed import _product, philox, words
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import offered

# Known answers of Random123 1.14, kat_vectors: counter, key, result.
KNOWN = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    ("243f6a8885a308d313198a2e03707344", "a4093822299f31d0", "d16cfe0994fdcceb5001e42024126ea1"),
]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    a, b, c, d = (torch.tensor([w]) for w in numbers(counter))
    got = words((a, b, c, d), numbers(key), _product)
    assert tuple(int(w) for w in got) == numbers(expected)


def test_an_element_takes_its_word() -> None:
    drawn = philox(7, 9, 3, 6)
    assert drawn.shape == (3, 6)
    for m, n in ((0, 0), (2, 3), (1, 5)):
        counter = tuple(torch.tensor([x]) for x in (m, n // 4, 9, 0))
        word = int(words(counter, (7, 0), _product)[n % 4])
        assert drawn[m, n].item() == (word >> 8) / 2**24
    wide = philox(7, 9, 64, 4096)
    assert torch.equal(wide[:3, :6], drawn)
    assert abs(wide.mean() - 0.5) < 2e-3 and wide.min() >= 0 and wide.max() < 1


@epilogue(O=Tile, R=Tile)
def dropped(acc, seed: Scalar, offset: Scalar):
    return {"O": dropout(acc, 0.25, seed, offset), "R": row_index(acc) - column_index(acc) * 2.0}


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_dropout_in_the_interpreter(compute: torch.dtype) -> None:
    a, b = torch.ones(37, 16), torch.ones(48, 16)
    operands = {"seed": 3.0, "offset": 2.0**24 - 1}
    dtypes = {"O": torch.float32, "R": torch.float32}
    got = interpret(dropped, a, b, operands, dtypes=dtypes, compute=compute)
    kept = philox(3, 2**24 - 1, 37, 48) >= 0.25
    assert torch.equal(got["O"] != 0, kept)
    torch.testing.assert_close(got["O"], kept.to(compute) * (16 / 0.75))
    assert 0.6 < kept.double().mean() < 0.9
    expected = torch.arange(37.0)[:, None] - 2 * torch.arange(48.0)
    assert torch.equal(got["R"], expected.to(compute))


def test_what_is_known_of_them() -> None:
    assert Program.from_dict(dropped.to_dict()).digest == dropped.digest
    assert not any(c.swap_ab for c in offered(dropped, [(16, 4096, 4096)]))
    assert not inspect_program(dropped, (64, 64, 64)).split_k_safe

    @epilogue(O=Tile)
    def linear(acc, seed: Scalar):
        return {"O": acc * philox_uniform(acc, seed, 0)}

    assert inspect_program(linear, (64, 64, 64)).split_k_safe


def test_what_is_refused() -> None:
    def traced(value):
        def program(acc, s: Scalar, b: RowVector):
            return {"O": acc * s * b + value(acc, s, b)}

        return epilogue(O=Tile)(program)

    refused = {
        "takes a value": lambda acc, s, b: row_index(b),
        "not computed": lambda acc, s, b: philox_uniform(acc, s * 2.0, 0),
        "whole number": lambda acc, s, b: philox_uniform(acc, s, 0.5),
        "from 0 to below": lambda acc, s, b: philox_uniform(acc, -1, 0),
        "expected a number from 0": lambda acc, s, b: dropout(acc, 1.0, 0, 0),
        "cannot take column_index": lambda acc, s, b: group_mean(column_index(acc) * acc, 16),
    }
    for message, value in refused.items():
        with pytest.raises(ProgramError, match=message):
            traced(value)
