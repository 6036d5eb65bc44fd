"""Name the most likely fault of a wrong output.

- A fault is a hypothesis that predicts the whole wrong output. Some predict it from the truth
  alone: a factor, a swap, a shift.
- Others run the exact reference on changed inputs: an operand left out or read along the other
  axis, a K tail of zeros, a rounded product. That covers any epilogue, since the reference carries
  its nonlinearities.
- The prediction that explains most of the difference wins, and its share is the confidence. Among
  equals the simpler one wins, which is tried first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.judge import repairs
from coda_agent.agent.judge.approximation import approximation
from coda_agent.agent.judge.records import Inputs, JsonObject
from coda_agent.agent.judge.replaying import Mistake, is_small, lost_digits
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    import torch

    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec

    Rows = torch.Tensor | slice
    Reference = Callable[[Inputs], torch.Tensor]

FAULTS = {
    "race": "differs between two runs",
    "unwritten": "a region never written, or stale",
    "constant_factor": "a constant factor, or sign, on the output or on one term",
    "swapped_pair": "even and odd columns swapped",
    "shifted_pair": "columns shifted by one, or by one pair",
    "shifted_tile": "a tile at its neighbour's place",
    "missing_operand": "an operand left out",
    "doubled_operand": "an operand applied twice",
    "swapped_operands": "two operands in each other's place",
    "wrong_broadcast": "a vector read along the other axis",
    "k_tail": "a part of K skipped",
    "early_rounding": "rounded to 16 bits where float32 was due",
    "rounded_statistics": "a statistic of rounded values",
    "wrong_statistics": "another statistic, axis, divisor or extent",
    "approximated": "a function computed nearly",
    "wrong_function": "none of these: another activation, term or order of operations",
    **repairs.FAULTS,
}
_EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}
_ROWS = 128  # rows the reference is run on: the worst ones
_CLAIM, _CLAIM_FACTOR = 0.85, 0.97  # least share that a fault, and a factor, must explain
_CLAIM_EXACT = 0.999  # where nothing was rounded
_CERTAIN = 0.9995  # share that ends the search
_FEW = 4  # elements that any factor explains
_PARTS = (16, 32, 64, 128)  # K extents of one mainloop step
_BESIDE = 4  # rows shown beside the worst element, its own among them
_ALL = slice(None)
# What digits that the program itself loses may be taken for.
_VAGUE = ("early_rounding", "rounded_statistics", "wrong_function", "wrong_statistics")


@dataclass(frozen=True)
class Diagnosis:
    """What is most likely wrong with an output.

    Attributes:
        fault: A key of `FAULTS`.
        text: One sentence.
        where: fault, row, column (or row alone), got, expected of the worst element; at_tile, its
            tile's coordinates; parity where only even or odd columns are wrong; there, the inputs
            of the worst element by name, `acc` and what its columns read; rows, a few neighbours
            as [row, got, expected].
        confidence: Share of the squared difference that the fault explains, 0 to 1.
    """

    fault: str
    text: str
    where: JsonObject
    confidence: float


class _Suspect(NamedTuple):
    """A fault and the output that it predicts, of some rows."""

    fault: str
    text: str
    predicted: torch.Tensor
    rows: Rows = _ALL


def diagnose(
    out: torch.Tensor, truth: torch.Tensor, *, inputs: Inputs, gemm: tuple[str, str],
    tile: tuple[int, int], reference: Reference, again: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> Diagnosis:  # fmt: skip
    """The most likely fault of `out`.

    Args:
        out: The wrong output: (M,), (N,), (M, N), (M, N/2) or (M, 2N), as stored; in float64 where
            nothing was rounded.
        truth: The exact one, float64.
        inputs: What it was computed from, by name.
        gemm: Names of the operands A (M, K) and B (N, K) among them.
        tile: Rows and columns of a CTA tile of the product.
        reference: Inputs to this output in float64.
        again: The output of a second run on the same inputs.
        allowed: What each element may err. The worst element is the one that exceeds it most, or
            by default the one that is off most.
    """
    return _WrongOutput(out, truth, inputs, gemm, tile, reference, allowed).diagnosis(again)


def diagnosed(
    spec: Spec, binding: Mapping[str, str], inputs: Inputs, o: str, out: torch.Tensor,
    truth: torch.Tensor, *, program: Program, others: Iterable[Inputs] = (),
    tile: tuple[int, int] = (128, 128), again: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> Diagnosis:  # fmt: skip
    """`diagnose` of output `o` of a spec, by its reference.

    In float64 the program is wrong by what it says, and `others` are further inputs on which a
    mistake found in it is tried. Else it may lose digits.
    """
    from coda_agent.specs import run_reference

    def reference(changed: Inputs) -> torch.Tensor:
        return run_reference(spec, {**changed}, binding=binding, exact=True)[o]

    a, b = spec.gemm
    wrong = _WrongOutput(out, truth, inputs, (a, b), tile, reference, allowed)
    wrong.paired = any(node.op == "even" for node in program.graph.nodes)
    if wrong.exact:
        sets = ((x, reference(x)) for x in others)
        found = repairs.mistake(spec, program, o, itertools.chain([(inputs, truth)], sets))
        if found:
            return wrong.named(found)
        seen = wrong.diagnosis(wrong.out)
        if seen.fault == "wrong_function":
            found = approximation(spec, program, o, inputs, out, truth, reference)
        return wrong.named(found) if found else seen
    seen = wrong.diagnosis(out if again is None else again)
    if seen.fault in _VAGUE and (found := lost_digits(spec, program, inputs, o, out, truth)):
        return wrong.named(found)
    return seen


def read_at(
    spec: Spec, program: Program, inputs: Inputs, out: torch.Tensor, place: tuple[int, ...]
) -> Iterable[tuple[str, float | list[float]]]:
    """What a program reads at the element `place` of an output, by name."""
    a, b = spec.gemm
    about = _WrongOutput(out, out.double(), inputs, (a, b), (128, 128), lambda _: out, None)
    about.paired = any(node.op == "even" for node in program.graph.nodes)
    return about.there(*place, *[0] * (2 - len(place))).items()


class _WrongOutput:
    """The hypotheses about one output, and what speaks for each."""

    def __init__(
        self, out: torch.Tensor, truth: torch.Tensor, inputs: Inputs,
        gemm: tuple[str, str], tile: tuple[int, int], reference: Reference,
        allowed: torch.Tensor | None,
    ) -> None:  # fmt: skip
        import torch

        self.flat = out.ndim == 1
        self.single = out.dtype in (torch.float32, torch.float64)
        self.exact = out.dtype is torch.float64
        self.out = out.double()[:, None] if self.flat else out.double()
        self.truth = truth[:, None] if self.flat else truth
        # 0 is allowed where a value is exact.
        self.allowed = 1.0 if allowed is None else allowed.reshape(self.truth.shape) + 1e-30
        self.inputs, self.gemm, self.reference = inputs, gemm, reference
        rows, columns = self.truth.shape
        m, n = (inputs[name].shape[0] for name in gemm)
        self.paired = False  # whether the program takes columns apart
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

    def named(self, found: Mistake) -> Diagnosis:
        lost = ~self.out.isfinite() & self.truth.isfinite()
        return self._answer(found.fault, found.text, 1.0, self.wrong | lost)

    def diagnosis(self, again: torch.Tensor) -> Diagnosis:
        out, truth, second = self.out, self.truth, again.double().reshape(self.out.shape)
        moved = (second != out) & ~(second.isnan() & out.isnan())
        if moved.any():
            text = f"{self._region(moved)} differs between two runs on the same inputs"
            return self._answer("race", text, 1.0, moved)
        nan = out.isnan() & ~truth.isnan()
        if nan.any():
            text = f"{self._region(nan)} is NaN or was never written"
            return self._answer("unwritten", text, 1.0, nan)
        lost = ~truth.isfinite() & ~((out == truth) | out.isnan())
        if lost.any():
            text = "NaN or an infinity of the inputs does not reach it"
            return self._answer("wrong_function", text, 1.0, lost)
        empty = self.wrong & (out == 0)
        most = int(empty.sum()) > 0.95 * int(self.wrong.sum())
        if most and not self.subtle and not self.exact:
            text = f"{self._region(empty)} is zero: never written, or its partial was lost"
            return self._answer("unwritten", text, 1.0, empty)
        best, share = None, 0.0
        suspects = itertools.chain(self._structural(), self._counterfactual())
        for suspect in suspects if truth.numel() >= _FEW else ():
            explained = self._explained(suspect)
            # Among equals the first wins: a later one must leave under a quarter of what is left.
            if 1 - explained < (1 - share) / 4 or (share < _CLAIM <= explained):
                best, share = suspect, explained
            if share > _CERTAIN:
                break
        # A factor must explain nearly all: any statistic is roughly another times something.
        claim = _CLAIM_FACTOR if best and best.fault == "constant_factor" else _CLAIM
        if best and share >= (_CLAIM_EXACT if self.exact else claim):
            return self._answer(best.fault, best.text, share, self.wrong)
        return self._answer(*self._leftover(), 1.0 - share, self.wrong)

    def _explained(self, suspect: _Suspect) -> float:
        """The share of the squared difference that the suspect explains. A difference beyond three
        times the median counts as that much, so that no few elements decide."""
        wrong, out, difference = (t[suspect.rows] for t in (self.wrong, self.out, self.difference))
        size = difference[wrong].abs()
        cap = 3 * size.median()
        left = (out - suspect.predicted)[wrong].abs().minimum(cap).square().sum()
        share = 1 - float(left / size.minimum(cap).square().sum().clamp_min(1e-300))
        return share if share == share else 0.0

    def _leftover(self) -> tuple[str, str]:
        """What it is when no hypothesis explains it."""
        small = self.single and is_small(self.difference, self.truth)
        if not self.exact and (self.subtle or small):
            truth, left = self.truth[self.wrong], self.difference[self.wrong]
            energy = truth.square().sum().clamp_min(1e-300)
            factor, noise = float((left * truth).sum() / energy), left.square().mean() / energy
            if abs(factor) > max(6 * float(noise.sqrt()), 2e-3):
                text = f"on average it is the expected value times {1 + factor:.3g}"
                return "constant_factor", text
            text = "it is off by roundings: something was rounded to 16 bits before its last use"
            return ("rounded_statistics" if self.flat else "early_rounding"), text
        counts, sizes = self._by_tile(self.wrong), self._by_tile(self.wrong | True)
        touched = counts > 0
        filled = float(counts.sum() / sizes[touched].sum().clamp_min(1))
        if not (self.flat or self.exact or bool(touched.all())) and filled > 0.9:
            return "unwritten", f"{self._region(self.wrong)} holds something else: stale, or lost"
        if self.flat and self.single:
            return "wrong_statistics", (
                "the statistic is another one: check what is reduced, the kind of reduction, its "
                "divisor, and that every block enters"
            )
        return "wrong_function", (
            "no simple fault explains it: check the activation, each term and the order of "
            "operations against the spec's mathematics"
        )

    def _by_tile(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over each tile, float64."""
        import torch

        (rows, columns), (height, width) = x.shape, self.tile
        padded = torch.nn.functional.pad(x.double(), (0, -columns % width, 0, -rows % height))
        return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).sum((1, 3))

    # What shows in the output and the truth alone.

    def _structural(self) -> Iterator[_Suspect]:
        out, truth, wrong = self.out, self.truth, self.wrong
        factor = float((out * truth)[wrong].sum() / truth[wrong].square().sum().clamp_min(1e-300))
        if abs(factor - 1) > 2e-3:
            which = "it" if bool(wrong.all()) else self._region(wrong)
            fault, text = "constant_factor", f"{which} is the expected value times {factor:.4g}"
            if self.flat and self.single and not 0.1 < abs(factor) < 10:
                fault, text = "wrong_statistics", f"{text}: check the divisor of the reduction"
            yield _Suspect(fault, text, factor * truth)
        if truth.shape[1] % 2 == 0:
            yield _Suspect("swapped_pair", "even and odd columns are swapped", _swapped(truth))
        what, axis = ("elements", 0) if self.flat else ("columns", 1)
        for by in (1, -1, 2, -2):
            if truth.shape[axis] > 4:
                text = f"{what} are shifted by {by}" + " (one pair)" * (abs(by) == 2)
                yield _Suspect("shifted_pair", text, truth.roll(by, axis))
        yield self._neighbours()

    def _neighbours(self) -> _Suspect:
        """Each tile is what belongs into one of its neighbours, or right."""
        import torch

        (rows, columns), (height, width) = self.truth.shape, self.tile
        best, least = self.truth, None
        steps = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))
        for i, j in steps:
            moved = self.truth.roll((i * height, j * width), (0, 1))
            left = self._by_tile(torch.where(self.wrong, self.out - moved, 0.0).square())
            spread = left.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
            best = best if least is None else torch.where(spread < least, moved, best)
            least = spread if least is None else torch.minimum(spread, least)
        text = "tiles hold what belongs into a tile beside them: check the tile's coordinates"
        return _Suspect("shifted_tile", text, best)

    # What the reference gives on changed inputs.

    def _counterfactual(self) -> Iterator[_Suspect]:
        rows = self._worst_rows()
        for fault, text, changed in self._changes(rows):
            predicted = self._predict(changed, rows)
            if predicted is not None:
                yield _Suspect(fault, text, predicted, rows)

    def _worst_rows(self) -> Rows:
        """The rows to run the reference on; all, where rows cannot be told apart."""
        m, n = (self.inputs[x].shape[0] for x in self.gemm)
        sizes = {v.shape[0] for x, v in self.inputs.items() if x not in self.gemm and _is_array(v)}
        if m == n or not sizes <= {m, n} or len(self.truth) != m or m <= _ROWS:
            return _ALL
        return (self.difference * self.wrong).square().sum(1).topk(_ROWS).indices.sort().values

    def _predict(self, changed: Inputs, rows: Rows) -> torch.Tensor | None:
        m = self.inputs[self.gemm[0]].shape[0]
        values = {
            x: v[rows] if x != self.gemm[1] and _is_array(v) and len(v) == m else v
            for x, v in {**self.inputs, **changed}.items()
        }
        try:
            found = self.reference(values)
        except CodaError:  # the reference takes no such shape: not this fault
            return None
        shape = self.truth[rows].shape
        return found.reshape(shape) if found.numel() == shape.numel() else None

    def _changes(self, rows: Rows) -> Iterator[tuple[str, str, Inputs]]:
        """Faults, in words, and the inputs that they come to."""
        import torch

        a_name, b_name = self.gemm
        a, b = self.inputs[a_name].double(), self.inputs[b_name].double()
        (m, k), n = a.shape, b.shape[0]
        others = {
            x: v.double() if isinstance(v, torch.Tensor) else v
            for x, v in self.inputs.items()
            if x not in self.gemm and (not isinstance(v, torch.Tensor) or v.is_floating_point())
        }
        for x, v in others.items():
            yield "missing_operand", f"{x} is left out", {x: v * 0}
            yield "missing_operand", f"{x} is left out", {x: v * 0 + 1}
            yield "doubled_operand", f"{x} enters twice", {x: v * 2}
            yield "doubled_operand", f"{x} is multiplied in twice", {x: v * v}
            yield from self._factor_changes(x, v, rows)
        yield from self._factor_changes(a_name, a, rows)
        tails = [(first, k) for u in _PARTS if (first := (k - 1) // u * u)]
        for first, last in dict.fromkeys([*tails, (k // 2, k), (0, k // 2), (0, min(k, 64))]):
            cut = a.clone()
            cut[:, first:last] = 0
            text = f"columns {first} to {last - 1} of {a_name} and {b_name} are skipped"
            yield "k_tail", text, {a_name: cut}
        for (x, v), (y, w) in itertools.combinations(others.items(), 2):
            if getattr(v, "shape", None) == getattr(w, "shape", None):
                yield "swapped_operands", f"{x} and {y} change places", {x: w, y: v}
        acc, eye = a.new_zeros(m, n), torch.eye(n, dtype=a.dtype, device=a.device)
        acc[rows] = a[rows] @ b.mT
        for x, v in others.items():
            if _is_array(v) and v.ndim == 1 and len(v) in (m, n):
                by_row = len(v) == m
                own = v[:, None] if by_row else v[None]
                read = v[torch.arange(n if by_row else m, device=v.device) % len(v)]
                other = read[None] if by_row else read[:, None]
                text = f"{x} is read along the {('rows', 'columns')[by_row]}"
                yield "wrong_broadcast", text, {x: other}
                yield "wrong_broadcast", text, {a_name: acc / own * other, b_name: eye}
                for by in (1, -1):
                    yield "shifted_pair", f"elements of {x} are shifted by {by}", {x: v.roll(by, 0)}
        wide = {
            x: v for x, v in others.items() if getattr(v, "ndim", 0) == 2 and v.shape[1] % 2 == 0
        }
        for x, v in {a_name: acc, **wide}.items():
            what, product = (x, {}) if x in wide else ("the product", {b_name: eye})
            text = f"even and odd columns of {what} are swapped"
            yield "swapped_pair", text, {x: _swapped(v), **product}
            for by in (1, -1, 2, -2):
                text = f"columns of {what} are shifted by {by}"
                yield "shifted_pair", text, {x: v.roll(by, 1), **product}
        swapped = {x: _swapped(v) for x, v in others.items() if _is_array(v) and v.shape[-1] == n}
        text = "the even and odd columns enter in each other's place, such as gate and up"
        yield "swapped_pair", text, {a_name: _swapped(acc), b_name: eye, **swapped}
        text = "the product was rounded to 16 bits before the epilogue"
        fault = "rounded_statistics" if self.flat else "early_rounding"
        for dtype in () if self.exact else (torch.bfloat16, torch.float16):
            yield fault, text, {a_name: acc.to(dtype).double(), b_name: eye}

    def _factor_changes(self, x: str, value: Any, rows: Rows) -> Iterator[tuple[str, str, Inputs]]:
        """The factor on input `x` that fits best, by least squares along 2 · x."""
        doubled = self._predict({x: value * 2}, rows)
        if doubled is None:
            return
        wrong, difference, truth = (t[rows] for t in (self.wrong, self.difference, self.truth))
        step = (doubled - truth)[wrong]
        factor = 1 + float((difference[wrong] * step).sum() / step.square().sum().clamp_min(1e-300))
        for c in sorted({-1.0, round(factor, 3)} - {1.0}) if abs(factor) < 1e3 else ():
            fault = "constant_factor" if c else "missing_operand"
            yield fault, f"{x} enters times {c:g}", {x: value * c}

    # Where.

    def _answer(self, fault: str, text: str, confidence: float, mask: torch.Tensor) -> Diagnosis:
        import torch

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
        return Diagnosis(fault, text, where, round(max(0.0, min(1.0, confidence)), 3))

    def there(self, row: int, column: int) -> dict[str, float | list[float]]:
        """What the program reads at an element, by name: the accumulator where it is one or a pair,
        and each input that has a value there."""
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

    def _region(self, mask: torch.Tensor) -> str:
        """The mask in words: its share and its bounding box."""
        share, places = float(mask.double().mean()), mask.nonzero()
        if not 0.0 < share < 1.0:  # 0: nothing stands out where all is infinite
            return "all of it"
        (top, left), (bottom, right) = places.amin(0).tolist(), places.amax(0).tolist()
        box = f"rows {top} to {bottom}, columns {left} to {right}"
        return f"{share:.1%} of it ({f'elements {top} to {bottom}' if self.flat else box})"


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _is_array(x: object) -> bool:
    return getattr(x, "ndim", 0) > 0
