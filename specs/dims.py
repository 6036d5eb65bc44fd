"""The dims of a function: equal extents, their names and multiples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from coda_agent.primitives.errors import SpecError
from coda_agent.specs.called import Called
from coda_agent.specs.defaults import TYPES, up
from coda_agent.specs.layout import Entry, extent, parts
from coda_agent.specs.tracing import Extent, Trace

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_UNITS = (1, 32, 64, 128, 256, 96, 192, 48, 80, 160, 512, 1024, 2048)
"""What sizes may have to be multiples of beside what TMA asks, such as a head's width, or the
widths of the heads of a group."""
EVEN = math.lcm(*_UNITS)
_DIVISIBLE = 11520  # by what a part of a dim is likely to be
_LARGEST = 1 << 24
"""Elements of all inputs in a run that looks for what sizes must be multiples of; one that found a
function of many dims to fail everywhere took 20 GB without a bound."""
_SEARCHED = 1 << 28
"""Elements of all these runs, some ten seconds' worth. A bound in seconds refused functions on a
machine that had other work."""
_FACTORS = range(2, 9)
"""How many times a dim's size an extent may be that is cut into parts."""
_CONSTANT = 8
"""The largest extent of its own that is tried as a number alone, and not as a dim's size before."""
_MEMORY = 141e9
"""What an H200 holds, in bytes."""


class Dims:
    """The dims of a function's inputs, named by a trace.

    Args:
        shapes: Each input's shape in numbers, of which the trace was made.
        sizes: The example's size of each dim that has a name already.

    Attributes:
        letters: The dim of each symbol of the trace.
        multiples: Multiples of one dim, where weights side by side have several sizes.
        shapes: Each input's shape in dims.
        sizes: The example's size of each dim.
        units: What each dim is declared a multiple of; `find_units` finds it.
        open: The dims that an extent may be which no operation ties to another.
        fixed: The size of each dim that the function holds as a number.
        rows, columns, inner: Dims of the product.
    """

    def __init__(
        self,
        called: Called,
        shapes: dict[str, tuple[int, ...]],
        sizes: Mapping[str, int],
        trace: Trace,
        first: Sequence[str],
        second: Sequence[str],
    ) -> None:
        self.called, self.example, self.sizes = called, shapes, {**sizes}
        self.letters: dict[Extent, str] = {}
        self.multiples: dict[Extent, str] = {}
        self.shapes: dict[str, tuple[Entry, ...]] = {}
        self.units: dict[str, int] = {}
        self.open: dict[Any, list[Entry]] = {}
        self.fixed: dict[str, int] = {}
        for name, example in called.examples.items():
            for axis, symbol in zip(example.axes, trace.shapes[name], strict=True):
                if isinstance(axis, str) and not _numeric(symbol):
                    self.letters[symbol] = axis
        inners = _summed(called, shapes, trace, first, second)
        self._fix(trace, first, second, inners)
        rows = self._rows(trace, first[0], inners)
        self.rows = [self.letters[s] for s in rows]
        extents: dict[Extent, int] = {}
        for name in (*first, *second):
            extents |= dict(zip(trace.shapes[name], shapes[name], strict=True))
        others = {1, *inners, *rows}
        columns = {s: size for s, size in extents.items() if s not in others}
        self.columns = self._columns(columns, second)
        sums = {s: size for s, size in extents.items() if s in inners}
        self.inner = [self._letter(s, inners[s]) for s in sums]
        if len(second) < len(first):
            self.inner = [self._as_multiples(sums, "K")]
        elif "K" not in inners.values():
            self.inner = self.inner[-1:]
        for name, shape in trace.shapes.items():
            for symbol, size in zip(shape, shapes[name], strict=True):
                if symbol in self.letters:
                    self.sizes.setdefault(self.letters[symbol], size)
        for name, shape in trace.shapes.items():
            entries = zip(shape, shapes[name], strict=True)
            self.shapes[name] = tuple(self._entry(trace, name, *entry) for entry in entries)

    def extents(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Give each input's shape at some sizes."""
        return {name: tuple(extent(e, sizes) for e in shape) for name, shape in self.shapes.items()}

    def distinct(self, units: Mapping[str, int] | None = None, start: int = 0) -> dict[str, int]:
        """Give each dim a size of its own; others from another `start`."""
        sizes = (units or self.units).items()
        primes = itertools.cycle(PRIMES[start:] + PRIMES[:start])
        return {
            x: unit * prime for (x, unit), prime in zip(sizes, primes, strict=False)
        } | self.fixed

    def numbers(self, shape: Sequence[Entry]) -> tuple[Entry, ...]:
        """Write dims of one size in a shape as that size."""
        return tuple(
            extent(e, self.fixed) if isinstance(e, str) and parts(e)[1] in self.fixed else e
            for e in shape
        )

    def matched(
        self, tensor: str, tried: Sequence[Mapping[str, int]], found: Sequence[int]
    ) -> Entry:
        """Read a tensor's extents at some sizes as a dim, or a number.

        Raises:
            SpecError: they are nothing of that kind.
        """
        if 0 in found:
            raise SpecError(f"{tensor} is empty, with an extent of 0", hint="leave it out")
        if len({*found}) == 1 and not any(size % found[0] == 0 for size in self.fixed.values()):
            return found[0]
        rows = (math.prod(t[x] for x in self.rows) for t in tried)
        if len(self.rows) > 1 and [*rows] == [*found]:
            return "*".join(self.rows)
        for letter in tried[0]:
            one, *others = (Fraction(e, t[letter]) for t, e in zip(tried, found, strict=True))
            if [*others] != [one] * len(others):
                continue
            factor, divisor = one.as_integer_ratio()
            front = f"{factor}*" if factor > 1 else ""
            return f"{front}{letter}" + (f"/{divisor}" if divisor > 1 else "")
        at = ", ".join(f"{x} = {size}" for x, size in tried[0].items())
        message = f"{tensor} has an extent of {found[0]} where {at}, which is no part of a dim"
        hint = "return it as the product has it; give one dim of rows where they are flattened"
        if tensor in self.example:
            hint = "take that part in the call, and give it as the argument"
        raise SpecError(message, hint=hint)

    def _fix(
        self,
        trace: Trace,
        first: Sequence[str],
        second: Sequence[str],
        inners: Mapping[Extent, str],
    ) -> None:
        """Find the sizes that the function holds as numbers."""
        for name in (*first, *second):
            for symbol, size in zip(trace.shapes[name], self.example[name], strict=True):
                if not _numeric(symbol) or size == 1:
                    continue
                twice = list(trace.shapes[name]).count(symbol) > 1
                if twice or (name in first and symbol not in inners):
                    message = f"{self.called.source.name} needs a size of {name} to be {size}"
                    hint = (
                        "a kernel takes any number of rows: write -1 in a view, or pass the number"
                    )
                    raise SpecError(message, hint=hint)
                self.fixed[self._letter(symbol, inners.get(symbol, "N"))] = size
        for name in second:  # how many parts a size has says which one it is
            for s, size in zip(trace.shapes[name], self.example[name], strict=True):
                own = (e for e in trace.equal if getattr(e[0], "free_symbols", None) == {s})
                if any(_numeric(n) and count.subs(s, 7 * size) != n for count, n in own):
                    self.fixed[self._letter(s, inners.get(s, "N"))] = size

    def _rows(self, trace: Trace, first: str, inners: Mapping[Extent, str]) -> list[Extent]:
        rows = [s for s in trace.shapes[first] if s not in inners and not _numeric(s)]
        if not rows:
            self._raise_if_square(first)
            hint = "give it more, such as 4096: the kernel takes any number of them"
            raise SpecError(f"the example of {first} has one row", hint=hint)
        wanted = ["M"] if len(rows) == 1 else ["B", *(f"S{i}" for i in range(2, len(rows))), "S"]
        for s, x in zip(rows, wanted, strict=True):
            self._letter(s, x)
        return rows

    def _raise_if_square(self, name: str) -> None:
        if min(self.example[name]) > 1:
            message = f"both extents of {name} are summed over, as an operand is read again"
            raise SpecError(message, hint="pass that operand twice, as two arguments")

    def _columns(self, columns: Mapping[Extent, int], second: Sequence[str]) -> list[str]:
        if not columns:
            self._raise_if_square(second[0])
            hint = "use torch.mv, or pad it with rows to 16"
            raise SpecError(f"{second[0]} has one row, so the product has one column", hint=hint)
        for s, size in columns.items():  # weights of one size are of one dim
            known = [x for x in columns if x in self.letters and columns[x] == size]
            self.letters.setdefault(s, self.letters[known[0]] if known else self._letter(s, "N"))
        names = list(dict.fromkeys(self.letters[s] for s in columns))
        if len(second) > 1 and len({*columns.values()}) > 1:
            return [self._as_multiples(columns, names[0])]
        return names

    def _as_multiples(self, sizes: Mapping[Extent, int], letter: str) -> str:
        """Take extents for multiples of one dim, which is returned."""
        for s in sizes:
            self.letters.pop(s, None)
        self.sizes[letter] = unit = math.gcd(*sizes.values())
        for s, size in sizes.items():
            self.multiples[s] = f"{size // unit}*{letter}".removeprefix("1*")
        return letter

    def _letter(self, symbol: Extent, wanted: str) -> str:
        taken = {*self.letters.values(), *self.called.examples}
        names = itertools.chain([wanted], (f"{wanted}{i}" for i in itertools.count(2)))
        return self.letters.setdefault(symbol, next(x for x in names if x not in taken))

    def _entry(self, trace: Trace, name: str, symbol: Any, size: int) -> Entry:
        """Write an input's extent in a dim."""
        if symbol in self.multiples:
            return self.multiples[symbol]
        if symbol in self.letters or _numeric(symbol):
            return self.letters.get(symbol) or int(symbol)
        units = dict.fromkeys(self.letters.values(), _DIVISIBLE)
        tried = [self.distinct(units), self.distinct(units, 5)]
        known = [{s: t[x] for s, x in self.letters.items()} for t in tried]
        pairs = [pair for sides in trace.equal for pair in (sides, sides[::-1])]
        for one, other in ((symbol, symbol), *pairs):
            free = getattr(other, "free_symbols", set())
            if not free or not free <= self.letters.keys():
                continue
            found = [int(other.subs(k)) for k in known]
            if one == symbol:
                return self.matched(name, tried, found)
            if getattr(one, "free_symbols", set()) == {symbol}:  # such as half of it
                for q in _FACTORS:
                    if all(one.subs(symbol, q * size) == size for size in found):
                        return self.matched(name, tried, [q * size for size in found])
        alike = [x for x in (*self.rows, *self.columns, *self.inner) if self.sizes[x] == size]
        own = ["L"] if size > _CONSTANT else []  # a head's width is a number, too
        self.open[symbol] = [*dict.fromkeys(alike), *own, size]
        return symbol


def find_units(dims: Dims) -> None:
    """Find units of dims at which function and kernel run.

    It finds, too, which dim an extent is that no operation ties to another.

    Raises:
        Exception: what the function raises at all sizes that are tried.
    """
    called, columns, inner = dims.called, dims.columns, dims.inner
    eight = any(called.dtype(x, TYPES[0]).itemsize == 1 for x in called.examples)
    least = dict.fromkeys(columns, 16) | dict.fromkeys(inner, 16 if eight else 8)
    least |= {x: 8 for x in columns if dims.sizes[x] % 16}
    given, fault, searched = dims.shapes, None, 0
    for choice in itertools.islice(itertools.product(*dims.open.values()), 64):
        own = (f"L{i}" if x == "L" else x for i, x in enumerate(choice, 1))
        chosen = dict(zip(dims.open, own, strict=True))
        dims.shapes = {n: tuple(chosen.get(e, e) for e in s) for n, s in given.items()}
        entries = [parts(e) for s in dims.shapes.values() for e in s if isinstance(e, str)]
        names = list(dict.fromkeys([*dims.letters.values(), *(dim for _, dim, _ in entries)]))
        for some, unit in itertools.product((columns, inner, names), _UNITS):
            units = {x: math.lcm(least.get(x, 1), unit if x in some else 1) for x in names}
            units |= {x: math.lcm(units[x], q) for _, x, q in entries} | dims.fixed
            shapes = dims.extents(dims.distinct(units))
            elements = sum(map(math.prod, shapes.values()))
            if fault and (elements > _LARGEST or searched + elements > _SEARCHED):
                continue
            searched += elements
            try:
                called.run(shapes, TYPES[0])
            except SpecError:
                raise
            except Exception as error:  # the function's own
                fault = fault or error
            else:
                dims.units = units
                for name, shape in dims.shapes.items():
                    for x, size in zip(shape, dims.example[name], strict=True):
                        dims.sizes.setdefault(str(x), size)
                return
    raise fault or AssertionError("one choice at least is tried")


def check_sizes(dims: Dims) -> None:
    """Refuse an example that no GPU holds, or no kernel takes; what is named has no size there."""
    axes = {name: example.axes for name, example in dims.called.examples.items()}
    elements = sum(map(math.prod, dims.example.values()))
    if 2 * elements > _MEMORY and all(isinstance(a, int) for some in axes.values() for a in some):
        message = f"the example's tensors take {2 * elements / 1e9:,.0f} GB"
        raise SpecError(message, hint="give sizes that a GPU holds: they are timed")
    for name, shape in dims.shapes.items():
        for x, size in zip(shape, axes[name], strict=True):
            if isinstance(size, int) and size % (unit := dims.units.get(str(x), 1)):
                message = f"{name} has a size of {size}; a kernel takes multiples of {unit}"
                raise SpecError(f"{message} there", hint=f"pad it to {up(size, unit)}")


def _summed(
    called: Called,
    example: Mapping[str, tuple[int, ...]],
    trace: Trace,
    first: Sequence[str],
    second: Sequence[str],
) -> dict[Extent, str]:
    """Name the symbols that products sum over."""
    inners = {left.shape[-1]: "R" for left, _ in trace.products}
    joined = len(second) < len(first)  # along K, before one weight
    if joined:
        inners |= {trace.shapes[x][-1]: "R" for x in first}
    inner = next(left.shape[-1] for left, _ in trace.products)
    inners[inner] = "K"
    if joined or inner in (of_a := trace.shapes[first[0]]):
        return inners
    if example[first[0]][:-1] != example[second[0]][:-1]:
        hint = "give both as matrices, with one dim to sum over"
        raise SpecError(f"{called.source.name} sums over several dims", hint=hint)
    trace.shapes[second[0]] = (*of_a[:-1], trace.shapes[second[0]][-1])
    return dict.fromkeys(of_a[:-1], "S") | {of_a[0]: "B"}


def _numeric(symbol: Extent) -> bool:
    return isinstance(symbol, int) or bool(symbol.is_number)
