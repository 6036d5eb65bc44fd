"""Operations that look across a row or a column: reductions, norms and target select."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from coda_agent.agent.authors.composer.aten import REDUCTIONS
from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.agent.authors.composer.layout import Elements, Frame, Layout, Unusable
from coda_agent.primitives.errors import ProgramError


class Across:
    """Their meaning, by ATen's name.

    Args:
        layout: Of the trace.
        apply: Meaning of an elementwise operation.
    """

    meaning: Mapping[str, Callable[..., Any]]

    def __init__(self, layout: Layout, apply: Callable[..., Any]) -> None:
        self.layout, self.builder, self.apply = layout, layout.builder, apply
        self.meaning = {
            op: lambda *args, op=op, **kwargs: self.reduce(op, *args, **kwargs)
            for op in REDUCTIONS["M"]
        }
        self.meaning |= {"linalg_vector_norm": self.norm, "norm": self.norm, "gather": self.gather}

    def reduce(
        self, op: str, x: Elements, dims: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Any:
        """`x` reduced over `dims`: all columns of each row, all rows of each column, or a pair."""
        codes = x.codes
        rank = codes.ndim
        listed = [dims] if isinstance(dims, int) else dims
        over = sorted(d % rank for d in listed) if listed else list(range(rank))
        kept = [d for d in range(rank) if d not in over]
        shape = tuple(
            1 if d in over else s for d, s in enumerate(codes.shape) if keepdim or d not in over
        )
        extent = math.prod(codes.shape[d] for d in over)
        moved = Elements(codes.permute(*kept, *over).reshape(*(codes.shape[d] for d in kept), -1))
        if extent == self.layout.extents["W"] and op != "logsumexp":
            each = "amax" if op == "max" else op
            paired = self.reduce(each, Elements(moved.codes.unflatten(-1, (-1, 2))), -1)
            out = Elements(self.reduce(each, paired, -1).codes.reshape(shape))
        elif extent == 2 and op != "logsumexp":
            first, second = (Elements(moved.codes[..., i]) for i in (0, 1))
            joined = self.apply("maximum" if "max" in op else "add", (first, second), {})
            joined = self.apply("mul", (joined, 0.5), {}) if op == "mean" else joined
            out = Elements(joined.codes.reshape(shape))
        else:
            left, value = self._whole(moved.codes.reshape(-1, extent))
            if op not in REDUCTIONS[left]:
                raise ProgramError(
                    "only a sum or a maximum over all rows of each column is available"
                )
            made = self.builder.make(REDUCTIONS[left][op], value, dims=frozenset({left}))
            out = self.layout.write(made, shape, Frame((left,)))
        if op == "max" and dims is not None:
            return [out, Unusable("the position of a maximum is not available")]
        return out

    def _whole(self, codes: Any) -> tuple[str, Expr]:
        """Which dim the rows of a matrix are, and the full tile, or half of one, that it holds."""
        shape = tuple(codes.shape)
        frame = self.layout.frame(shape)
        if 1 in shape or frame is None or (frame.dims, frame.flipped) not in _WHOLE:
            raise ProgramError(
                "only a reduction over all columns of each row, or all rows of each column, is"
                " available"
            )
        value = self.layout.read(Elements(codes), shape, frame)
        if len(value.dims) != 2:
            raise ProgramError("reduces a value that is the same in every row or column")
        return _WHOLE[frame.dims, frame.flipped], value

    def norm(
        self, x: Elements, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> Any:
        """A norm, as far as a reduction computes it."""
        if order in (1, math.inf):
            sizes = self.apply("abs", (x,), {})
            return self.reduce("sum" if order == 1 else "amax", sizes, dims, keepdim)
        if order != 2:
            raise ProgramError(f"takes a norm of order {order}; expected 1, 2 or inf")
        squares = self.apply("square", (x,), {})
        return self.apply("sqrt", (self.reduce("sum", squares, dims, keepdim),), {})

    def is_index(self, value: Any) -> bool:
        """Whether `value` holds an integer input of the spec and nothing else."""
        return isinstance(value, Elements) and all(
            e.op == "index" for e in self.layout.sources(value)
        )

    def gather(self, x: Elements, dim: int, index: Any, **_: Any) -> Elements:
        """One element of each row, in the column that an integer input names."""
        if not self.is_index(index):
            raise ProgramError("takes columns from other than an integer input [M] of the spec")
        rows, columns = (v.codes.movedim(dim, -1) for v in (x, index))
        if columns.shape[:-1] != rows.shape[:-1] or columns.shape[-1] != 1:
            raise ProgramError("only one element of each row can be taken")
        left, value = self._whole(rows.reshape(-1, rows.shape[-1]))
        if left != "M" or value.dims != {"M", "N"}:
            raise ProgramError("only one element of each full-width row can be taken")
        flat = columns.flatten()
        which = self.layout.read(Elements(flat), tuple(flat.shape), Frame(("M",)))
        made = self.builder.make("gather", value, which, dims=frozenset({"M"}))
        return self.layout.write(made, tuple(index.codes.shape), Frame(("M",)))

    def select(self, x: Elements, indices: Any) -> Elements:
        """`x[arange(M), index]`, which is a gather."""
        import torch

        at = [i for i, value in enumerate(indices) if isinstance(value, Elements)]
        others = [value for value in indices if isinstance(value, torch.Tensor)]
        if len(indices) == 2 and len(at) == len(others) == 1:
            (dim,), (rows,), index = at, others, indices[at[0]].codes
            counted = torch.arange(x.codes.shape[1 - dim])
            if rows.ndim == index.ndim == 1 and torch.equal(rows, counted):
                return Elements(
                    self.gather(x, dim, Elements(index.unsqueeze(dim))).codes.squeeze(dim)
                )
        raise ProgramError("only one element of each row can be taken, x[arange(M), index]")


_WHOLE: dict[tuple[tuple[str, ...], bool], str] = {
    (("M", "N"), False): "M",
    (("M", "H"), False): "M",
    (("M", "N"), True): "N",
}
