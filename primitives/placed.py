"""Values of an element's place alone: its row, its column, random numbers.

Philox4x32-10 (Salmon et al., 2011) is counter-based: the numbers of an element depend on the seed,
the offset and its place, on no tile and no launch, so a backward pass can draw them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Node, Operand, Shape, Value
from coda_agent.primitives.operation import PLACED, Degree, Edge, Op, Term, untraced

if TYPE_CHECKING:
    from cutlass import Uint32

__all__ = ["column_index", "dropout", "philox_uniform", "row_index"]

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
_WORD = 0xFFFFFFFF

Word = TypeVar("Word", "torch.Tensor", "Uint32")
"""A number of 32 bits: a tensor of such, or an unsigned register."""


def row_index(x: Value) -> Value:
    """The row of each element of x (M, N), from 0; a float32, so exact below 2²⁴.

    Costs an addition. Use it with `column_index` for triangular masks.

        return {"O": where(greater_equal(row_index(acc), column_index(acc)), acc, 0.0)}
    """
    return _placed("row_index", x)


def column_index(x: Value) -> Value:
    """The column of each element of x (M, N), from 0; see `row_index`.

    return {"O": acc * column_index(acc)}
    """
    return _placed("column_index", x)


def philox_uniform(x: Value, seed: Operand, offset: Operand) -> Value:
    """A random number in [0, 1) for each element of x (M, N), of 24 bits, by Philox4x32-10.

    `seed` and `offset` are numbers or `Scalar`s, whole and below 2²⁴. The key is (seed, 0) and the
    counter (row, column // 4, offset, 0), of which the element takes word column % 4. So the same
    seed, offset and place give the same number in any tile. `philox(seed, offset, rows, columns)`
    of `coda_agent.primitives.placed` gives them all in torch. Cost: 40 integer instructions an
    element.

        return {"O": acc + philox_uniform(acc, 7, 0)}
    """
    return _placed("philox_uniform", x, seed, offset)


def dropout(x: Value, p: float, seed: Operand, offset: Operand) -> Value:
    """x (M, N) with each element 0 with probability `p`, and else divided by 1 - p.

    Kept are the elements whose `philox_uniform` is at least `p`, a number below 1. The numbers are
    not those of torch.nn.functional.dropout, whose order follows its launch.

        return {"O": dropout(acc, 0.1, 7, 0)}
    """
    from coda_agent.primitives.ops import step

    if not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ProgramError(f"dropout(): p is {p!r}, expected a number from 0 to below 1")
    # The least number of 24 bits that is kept: exact in float32, where p need not be.
    least = math.ceil(p * 2**24) / 2**24
    dropped = step(least - philox_uniform(x, seed, offset))
    return x * ((1.0 - dropped) * (1.0 / (1.0 - p)))


def _placed(op: str, x: Value, *numbers: Operand) -> Value:
    if not isinstance(x, Value) or x.shape is not Shape.TILE:
        raise ProgramError(f"{op}() takes a value (M, N), of whose elements it tells the place")
    found = [n if isinstance(n, Value) else x.graph.const(_whole(op, n)) for n in numbers]
    for value in found:
        if value.shape is not Shape.SCALAR or value.graph.nodes[value.index].args:
            raise ProgramError(f"{op}() takes seed and offset as they are given, not computed")
    acc = x.graph.add(Node("acc", (), Shape.TILE))
    return x.graph.add(Node(op, (acc.index, *(v.index for v in found)), Shape.TILE))


def _whole(op: str, number: object) -> float:
    if not isinstance(number, (int, float)) or number != int(number) or not 0 <= number < 2**24:
        raise ProgramError(f"{op}() got {number!r}, expected a whole number from 0 to below 2²⁴")
    return float(number)


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give high and low words of a product, on int64 tensors."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = (low >> 16) + high
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def words(
    counter: tuple[Word, ...],
    key: tuple[Any, ...],
    product: Callable[[Word, int], tuple[Word, Word]],
    word: Callable[[Any], Any] = lambda number: number,
) -> list[Word]:
    """Compute Philox4x32-10's four words, by a `product` and constants of `word`."""
    a, b, c, d = counter
    for i in range(ROUNDS):
        if i:
            key = tuple(_sum(k, w, word) for k, w in zip(key, WEYL, strict=True))
        first, second = map(word, key)
        (high, low), (upper, lower) = product(a, MULTIPLIERS[0]), product(c, MULTIPLIERS[1])
        a, b, c, d = upper ^ b ^ first, lower, high ^ d ^ second, low
    return [a, b, c, d]


def _sum(key: Any, weyl: int, word: Callable[[Any], Any]) -> Any:
    if isinstance(key, int):
        return (key + weyl) & _WORD
    return (key + word(weyl)) & word(_WORD)


def philox(
    seed: float, offset: float, rows: int, columns: int, device: torch.device | None = None
) -> torch.Tensor:
    """Compute what `philox_uniform` gives for (rows, columns), in float64.

    The reference of a spec may call it.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is None and isinstance(rows, torch.SymInt):  # of sizes alone
        return torch.empty(rows, columns, dtype=torch.float64, device=device)
    if get_proxy_mode() is not None:  # in a trace it stays what it is
        operator, _ = _traced()
        # Without a tensor among its arguments a trace takes it for a constructor of constants.
        return operator(torch.empty(0, device=device), seed, offset, rows, columns)
    row = torch.arange(rows, device=device)[:, None]
    fourth = torch.arange(-(-columns // 4), device=device)[None]
    zero = torch.zeros_like(row + fourth)
    seed, offset = (int(x) & _WORD for x in (seed, offset))
    counter = row + zero, fourth + zero, zero + offset, zero
    drawn = torch.stack(words(counter, (zero + seed, 0), _product), -1)
    return (drawn.flatten(-2)[:, :columns] >> 8).double() * 2.0**-24


@lru_cache(maxsize=1)
def _traced() -> tuple[torch._ops.OpOverloadPacket, torch.library.Library]:
    """Make `philox` an operator of torch that traces record; and its library."""
    library = torch.library.Library("coda_agent_placed", "DEF")
    given = "Tensor like, Scalar seed, Scalar offset, SymInt rows, SymInt columns"
    library.define(f"philox({given}) -> Tensor")
    library.impl("philox", _shaped, "CompositeExplicitAutograd")
    return torch.ops.coda_agent_placed.philox, library


def _shaped(
    like: torch.Tensor, seed: object, offset: object, rows: int, columns: int
) -> torch.Tensor:
    return like.new_empty(rows, columns, dtype=torch.float64)


def _uniform(x: torch.Tensor, seed: Term, offset: Term) -> torch.Tensor:
    return philox(float(seed), float(offset), *x.shape, device=x.device).to(x.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return _columns(x.mT).mT


def _columns(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device).to(x.dtype).expand(x.shape)


for _name, _torch, _call, _flops in (
    ("row_index", _rows, row_index, 0),
    ("column_index", _columns, column_index, 0),
    ("philox_uniform", _uniform, philox_uniform, 40),
):
    PLACED[_name] = Op(
        _name,
        _torch,
        untraced,
        arity=3 if _flops else 1,
        call=_call,
        flops=_flops,
        edge=lambda *_: Edge(False, True),
        degree=lambda *_: Degree.CONSTANT,
    )
