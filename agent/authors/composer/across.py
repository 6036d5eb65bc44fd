"""Operations across a row or a column: reductions, norms, target select."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from coda_agent.agent.authors.composer.aten import ROW_STATISTICS, SPELLED, WHOLE_ROW
from coda_agent.agent.authors.composer.codes import Elements, Frame, Unusable
from coda_agent.agent.authors.composer.expression import REDUCTIONS, Expr, apply, make
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import WIDTHS
from coda_agent.specs.layout import interleaved


class Across:
    """Their meaning in one trace's layout, by ATen's names."""

    meaning: Mapping[str, Callable[..., object]]

    def __init__(self, layout: Layout, apply: Callable[..., Elements]) -> None:
        self.layout, self.apply = layout, apply
        self.meaning = {
            **{r.aten: partial(self.reduce, r.aten) for r in REDUCTIONS.values()},
            "max": partial(self.extreme, "amax"),
            "min": partial(self.extreme, "amin"),
            "gather": self.gather,
            "var": lambda *x, **over: self.moments(*x, **over)[0],
            "std": lambda *x, **over: self._of(_root, self.moments(*x, **over)[0]),
            "var_mean": lambda *x, **over: list(self.moments(*x, **over)),
        }

    def reduce(
        self, op: str, x: Elements, dims: Any = None, keepdim: bool = False, dtype: object = None
    ) -> Elements:
        """Reduce `x` over `dims`: whole rows, whole columns, groups or pairs."""
        codes = x.codes
        listed = [dims] if isinstance(dims, int) else dims or range(codes.ndim)
        over = sorted(d % codes.ndim for d in listed)
        shape = tuple(codes.sum(over, keepdim).shape)
        codes = codes.movedim(over, [*range(-len(over), 0)]).flatten(-len(over))
        extent = codes.shape[-1]
        if extent == self.layout.extents["2*N"] and op != "logsumexp":
            paired = self.reduce(op, Elements(codes.unflatten(-1, (-1, 2))), -1)
            return Elements(self.reduce(op, paired, -1).codes.reshape(shape))
        if extent == 2 and op != "logsumexp":
            pair = (Elements(codes[..., i]) for i in (0, 1))
            joined = self.apply(_JOINED.get(op, Expr.__add__), pair, {})
            return Elements(joined.codes.reshape(shape))
        if group := self._group(op, codes):
            return Elements(group.codes[..., ::extent].reshape(shape))
        left, value = self._whole(codes.reshape(-1, extent))
        for name, reduction in REDUCTIONS.items():
            if (reduction.aten, reduction.left) == (op, left):
                count = self.layout.count(extent)
                made = make(name, value, dims=frozenset({left}), value=count)
                return self.layout.codes.write(made, shape, Frame((left,)))
        raise ProgramError(
            "takes other than a sum or a maximum over all rows of each column",
            hint="return the tensor and reduce it with torch",
        )

    def extreme(self, op: str, x: Elements, *over: Any) -> Elements | list[Elements | Unusable]:
        """Take the maximum or minimum; over a dim with its position."""
        found = self.reduce(op, x, *over)
        if not over:
            return found
        return [found, Unusable("uses the position of a maximum or minimum", _OUTSIDE)]

    def _of(self, function: Callable[..., Expr], *args: object) -> Elements:
        return self.apply(function, args, {})

    def moments(
        self,
        x: Elements,
        dims: Sequence[int] | None = None,
        *,
        correction: float | None = 1.0,
        keepdim: bool = False,
    ) -> tuple[Elements, Elements]:
        """Variance and mean of groups of adjacent columns."""
        try:
            off = self._of(Expr.__sub__, x, self.reduce("mean", x, dims, True))
            variance = self.reduce("mean", self._of(lambda x: x * x, off), dims, keepdim)
        except ProgramError:
            raise ProgramError(WHOLE_ROW, hint=ROW_STATISTICS) from None
        count = x.codes.numel() // variance.codes.numel()
        by = count / (count - (1.0 if correction is None else correction))
        return self._of(lambda v: v * by, variance), self.reduce("mean", x, dims, keepdim)

    def _group(self, op: str, codes: Tensor) -> Elements | None:
        """A statistic over the last dim, where that is a group."""
        m, extent = self.layout.extents["M"], codes.shape[-1]
        columns = {self.layout.extents[d]: d for d in ("N", "N/2")}.get(codes.numel() // m)
        if extent not in WIDTHS or columns is None or op not in _GROUPED:
            return None
        shape, frame = (m, self.layout.extents[columns]), Frame(("M", columns))
        value = self.layout.read(Elements(codes.reshape(shape)), shape, frame)
        made = make(_GROUPED[op], value, dims=frozenset(frame.dims), value=extent)
        return self.layout.codes.write(made, shape, frame)

    def _whole(self, codes: Tensor) -> tuple[str, Expr]:
        """Which dim a matrix's rows are, and what tile it holds."""
        shape = tuple(codes.shape)
        if self.layout.in_halves(shape):
            codes = interleaved(codes, -1)  # in which order is summed does not matter
        frame = self.layout.frame(shape)
        left = _LEFT.get((frame.dims, frame.flipped)) if frame else None
        if self.layout.extents.get("K") == shape[-1]:
            raise ProgramError(
                "reduces over the columns of an operand, before the product",
                hint="do this with torch in the call, or give the statistic as an argument and "
                "scale the product's rows or columns by it",
            )
        if 1 in shape or frame is None or left is None:
            raise ProgramError(
                "reduces other than all columns of each row, or all rows of each column",
                hint=_OUTSIDE,
            )
        value = self.layout.read(Elements(codes), shape, frame)
        if len(value.dims) != 2:
            raise ProgramError(
                "reduces a value that is the same in every row or column",
                hint="multiply it by the number of rows or columns, given as an input",
            )
        return left, value

    def refusal(self, x: Elements) -> ProgramError:
        """Say why what works across `x` has no rewriting."""
        *_, width = x.codes.shape
        if width < self.layout.extents["N"]:
            return ProgramError(f"works across groups of {width} columns", hint=SPELLED)
        return ProgramError(WHOLE_ROW, hint=ROW_STATISTICS)

    def is_index(self, value: object) -> bool:
        """Whether `value` holds an integer input of the spec and nothing else."""
        return isinstance(value, Elements) and all(
            e.op == "index" for e in self.layout.codes.sources(value)
        )

    def gather(self, x: Elements, dim: int, index: Elements, **_: object) -> Elements:
        """Take one element of each row, in the column an input names."""
        if not self.is_index(index):
            raise ProgramError("takes columns by other than an integer input", hint=_BY_INPUT)
        rows, columns = (v.codes.movedim(dim, -1) for v in (x, index))
        if columns.shape[:-1] != rows.shape[:-1] or columns.shape[-1] != 1:
            raise ProgramError("takes other than one element of each row", hint=_BY_INPUT)
        left, value = self._whole(rows.reshape(-1, rows.shape[-1]))
        if left != "M" or value.dims != {"M", "N"}:
            raise ProgramError("takes elements of what is no tensor of full width", hint=_OUTSIDE)
        flat = columns.flatten()
        which = self.layout.read(Elements(flat), tuple(flat.shape), Frame(("M",)))
        made = make("gather", value, which, dims=frozenset({"M"}))
        return self.layout.codes.write(made, tuple(index.codes.shape), Frame(("M",)))

    def select(self, x: Elements, indices: Sequence[object]) -> Elements:
        """`x[arange(M), index]`, which is a gather."""
        given = [value for value in indices if isinstance(value, Elements)]
        at = [i for i, value in enumerate(given) if self.is_index(value)]
        if len(indices) == len(given) == 2 and len(at) == 1:
            (dim,) = at
            index, rows = given[dim].codes, given[1 - dim]
            counted = {e.op for e in self.layout.codes.sources(rows)} == {"row_index"}
            if counted and rows.codes.shape == index.shape == x.codes.shape[1 - dim : 2 - dim]:
                return Elements(
                    self.gather(x, dim, Elements(index.unsqueeze(dim))).codes.squeeze(dim)
                )
        raise ProgramError("takes other than one element of each row", hint=_BY_INPUT)


_root = partial(apply, "sqrt")

_OUTSIDE = "return the tensor itself, and do this with torch or in the next kernel"
_BY_INPUT = "x.gather(1, index[:, None]) takes the columns that an integer input names, one a row"

# A reduction of two values, if it is no sum.
_JOINED: dict[str, Callable[..., Expr]] = {
    "amax": partial(apply, "maximum"),
    "amin": partial(apply, "minimum"),
    "mean": lambda x, y: (x + y) * 0.5,
}
_GROUPED = {"sum": "group_sum", "mean": "group_mean", "amax": "group_max", "amin": "group_min"}
# What a reduction of each row of such a matrix leaves.
_LEFT: dict[tuple[tuple[str, ...], bool], str] = {
    (("M", "N"), False): "M",
    (("M", "N/2"), False): "M",
    (("M", "N"), True): "N",
}
