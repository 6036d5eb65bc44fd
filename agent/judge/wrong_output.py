"""A wrong output beside the exact one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.judge.records import Inputs, JsonObject
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program

if TYPE_CHECKING:
    Reference = Callable[[Inputs], torch.Tensor]

_EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}
_BESIDE = 4  # rows shown beside the worst element, its own among them


class Origin(NamedTuple):
    """What an output was computed from.

    Attributes:
        inputs: By name.
        gemm: Names of the operands A (M, K) and B (N, K) among them.
        reference: Inputs to this output in float64.
        paired: Whether the program takes columns apart.
    """

    inputs: Inputs
    gemm: tuple[str, str]
    reference: Reference
    paired: bool = False


def is_paired(program: Program) -> bool:
    """Whether a program takes columns apart."""
    return any(node.op == "even" for node in program.graph.nodes)


class WrongOutput:
    """One output and what speaks of its fault.

    Args:
        out: The output, (M,), (N,), (M, N), (M, N/2) or (M, 2N), as stored; in float64 where
            nothing was rounded.
        truth: The exact one, float64.
        origin: What it was computed from.
        tile: Rows and columns of a CTA tile of the product.
        allowed: What each element may err. The worst element is the one that exceeds it most, or
            by default the one that is off most.

    Attributes:
        out, truth: Got and due, as matrices in float64.
        flat: Whether it is a vector; `by_column` one of columns.
        single, exact: Whether it was stored in float32 or more; in float64, where nothing rounds.
        inputs, gemm, reference, paired: As of `Origin`.
        tile, allowed: For elements of the matrix.
        difference: What is off, where both are finite.
        subtle: Whether nothing exceeds rounding by much.
        wrong: What counts.
    """

    def __init__(
        self, out: torch.Tensor, truth: torch.Tensor, origin: Origin,
        tile: tuple[int, int] = (128, 128), allowed: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.flat = out.ndim == 1
        self.single = out.dtype in (torch.float32, torch.float64)
        self.exact = out.dtype is torch.float64
        self.out = out.double()[:, None] if self.flat else out.double()
        self.truth = truth[:, None] if self.flat else truth
        # 0 is allowed where a value is exact.
        self.allowed = 1.0 if allowed is None else allowed.reshape(self.truth.shape) + 1e-30
        self.inputs, self.gemm, self.reference, self.paired = origin
        rows, columns = self.truth.shape
        m, n = (self.inputs[name].shape[0] for name in self.gemm)
        self.by_column = self.flat and rows == n != m
        height = tile[1] if self.by_column else tile[0]
        self.tile = (height, 1 if self.flat else max(1, tile[1] * columns // n))
        fit = self.out.isfinite() & self.truth.isfinite()
        self.difference = torch.where(fit, self.out - self.truth, 0.0)
        eps = _EPS.get(str(out.dtype).removeprefix("torch."), 2.0**-12)
        scale = torch.where(fit, self.truth, 0.0).square().mean().sqrt()
        visible = self.difference.abs() > eps * (4 * self.truth.abs() + scale)
        energy = self.difference.square()
        # Where nothing exceeds rounding by much, everything counts: a factor of 1.01 is a fault.
        self.subtle = bool((energy * visible).sum() < 0.5 * energy.sum())
        # Equal elements stay out: with a median difference of 0, anything would explain all of it.
        self.wrong = fit & (visible | (self.subtle & (energy > 0)))

    def beyond(self) -> tuple[str, torch.Tensor]:
        """Say where no number is, though one or an infinity is due, and at which elements."""
        beyond, due = ~self.out.isfinite() & self.truth.isfinite(), "a number"
        if not bool(beyond.any()):
            beyond, due = self.out.isnan() & self.truth.isinf(), "an infinity"
        what = "infinite" if bool(self.out[beyond].isinf().all()) else "NaN"
        return f"{self.region(beyond)} is {what} where {due} is due", beyond

    def by_tile(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over each tile, in float64."""
        (rows, columns), (height, width) = x.shape, self.tile
        padded = torch.nn.functional.pad(x.double(), (0, -columns % width, 0, -rows % height))
        return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).sum((1, 3))

    def where(self, fault: str, mask: torch.Tensor) -> JsonObject:
        """Describe the worst element of a mask, as `Diagnosis.where` has it."""
        off = (self.out - self.truth).abs() / self.allowed
        size = off.nan_to_num(nan=torch.inf, posinf=torch.inf)
        row, column = divmod(int(torch.where(mask, size, -1.0).argmax()), self.truth.shape[1])
        where: JsonObject = {"fault": fault, "column" if self.by_column else "row": row}
        where |= {} if self.flat else {"column": column}
        where["at_tile"] = [row // self.tile[0], column // self.tile[1]][: 1 if self.flat else 2]
        odd = mask.nonzero()[:, 1] % 2
        if len(odd) > 1 and (odd == odd[0]).all() and self.truth.shape[1] > 1:
            where["parity"] = ("even", "odd")[int(odd[0])]
        where["got"] = float(self.out[row, column])
        where["expected"] = float(self.truth[row, column])
        where["there"] = self.there(row, column)
        first = max(0, min(row - _BESIDE // 2, len(self.truth) - _BESIDE))
        where["rows"] = [
            [i, float(self.out[i, column]), float(self.truth[i, column])]
            for i in range(first, min(first + _BESIDE, len(self.truth)))
        ]
        return where

    def there(self, row: int, column: int) -> dict[str, float | list[float]]:
        """Give what the program reads at an element, by name.

        That is the accumulator where it is one or a pair, and each input that has a value there.
        """
        a, b = (self.inputs[x].double() for x in self.gemm)
        m, n, width = len(a), len(b), self.truth.shape[1]
        rows, columns = slice(row, row + 1), slice(0, 0)
        if self.by_column:
            rows, columns = columns, rows
        elif not self.flat:  # of half width an element is made of a pair, of double width half one
            at = column * n // width
            at -= at % 2 if self.paired else 0
            columns = slice(at, at + max(1 + self.paired, n // width))
        found: dict[str, Any] = {"acc": a[rows] @ b[columns].mT}
        for x, v in self.inputs.items():
            if x in self.gemm:
                continue
            shape = tuple(getattr(v, "shape", ()))
            places = {(m,): rows, (n,): columns, (m, n): (rows, columns)} if m != n else {}
            double = slice(2 * columns.start, 2 * columns.stop) if columns.stop else columns
            places |= {(): ..., (m, 2 * n): (rows, double)}
            if shape in places:
                found[x] = v if not shape else v[places[shape]]
        lists = {x: getattr(v, "flatten", lambda v=v: [v])() for x, v in found.items()}
        numbers = {x: [float(y) for y in v] for x, v in lists.items() if len(v)}
        for x in [x for x, v in numbers.items() if len(v) > _BESIDE]:  # a group's
            most = sorted(numbers.pop(x), reverse=True)[:_BESIDE]
            numbers[f"{x}, the largest of {n // width}"] = most
        return {x: v if len(v) > 1 else v[0] for x, v in numbers.items()}

    def region(self, mask: torch.Tensor) -> str:
        """Say a mask in words: its share and its bounding box."""
        share, places = float(mask.double().mean()), mask.nonzero()
        if not 0.0 < share < 1.0:  # 0: nothing stands out where all is infinite
            return "all of it"
        (top, left), (bottom, right) = places.amin(0).tolist(), places.amax(0).tolist()
        box = f"rows {top} to {bottom}, columns {left} to {right}"
        return f"{share:.1%} of it ({f'elements {top} to {bottom}' if self.flat else box})"
