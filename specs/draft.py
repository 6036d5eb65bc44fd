"""A spec out of a function and example shapes.

The function is run, so this belongs into a child: on symbolic sizes, which tell the
product and the dims, and at small ragged sizes, which tell what it returns. What is written has
passed the parser and admission.
"""

from __future__ import annotations

import itertools
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch

from coda_agent.primitives.errors import SpecError
from coda_agent.specs.admission import admit
from coda_agent.specs.defaults import TYPES, up
from coda_agent.specs.front_matter import Face, front_matter, sizes_listed
from coda_agent.specs.layout import Entry, extent, parts
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Example, Source, with_tensors
from coda_agent.specs.tracing import Trace, operands, traced

_FILE = "<reference>"
_UNITS = (1, 32, 64, 128, 256, 96, 192, 48, 80, 160)
"""What sizes may have to be multiples of beside what TMA asks, such as a head's width."""
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_DIVISIBLE = 11520  # by what a part of a dim is likely to be
_LARGEST = 1 << 24
"""Elements of all inputs in a run that looks for what sizes must be multiples of; one that found a
function of many dims to fail everywhere took 20 GB without a bound."""
_SEARCH_S = 5.0
"""How long it is looked for."""
_FACTORS = range(2, 9)
"""How many times a dim's size an extent may be that is cut into parts."""
_CONSTANT = 8
"""The largest extent of its own that is taken for a number rather than for a dim's size."""
_MEMORY = 141e9
"""What an H200 holds, in bytes."""
_VALUES = re.compile("DataDependent|data-dependent|meta tensor", re.IGNORECASE)
"""What errors say where a value is asked of a tensor that has none."""
_DRAWS = ("normal", "{uniform: [0.5, 1.5]}", "{integers: [0, 2]}")
"""How what is no operand of the product is drawn: the second suits roots and logarithms, the third
masks."""


def draft(source: Source, examples: Mapping[str, Example], name: str) -> str:
    """The text of a spec for the function.

    Args:
        source: The function.
        examples: By argument, in the function's order; what is left out stays at its default.
        name: Of the spec.

    Raises:
        SpecError: The function cannot be run on these, multiplies nothing, does something beside
            computing, or is refused by the parser or by admission.
    """
    with _blaming(source):
        try:
            return _Draft(source, examples, name).text()
        except (AttributeError, TypeError, _Elsewhere) as error:
            # A reference is called with numbers as floats, which have no methods of tensors.
            numbers = [x for x, example in examples.items() if not example.axes]
            if not numbers or "float" not in str(error):
                raise
            source = with_tensors(source, numbers)
            return _Draft(source, examples, name).text()


@contextmanager
def _blaming(source: Source) -> Iterator[None]:
    """Say where in the user's own file a fault lies."""
    try:
        yield
    except Exception as error:  # the function is foreign code: anything may come out of it
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno or 0 for frame in frames if frame.filename == _FILE]
        said = (str(error).strip().splitlines() or ["no message"])[0]
        hint = ""
        if isinstance(error, SpecError):
            said, hint = error.message, error.hint
            if found := re.fullmatch(rf"{_FILE}(?::(\d+))?: (.*)", said):
                lines, said = [int(found[1] or 0)], found[2]
        elif isinstance(error, _Elsewhere):
            said = f"at other sizes than the example's the function raises {said}"
            hint = "a kernel takes others: take numbers that depend on them from shapes"
        elif isinstance(error, OSError) or "cannot be opened" in said:
            said = "the function opens a file or a connection; a reference only computes"
        else:
            said = f"the function raises {type(error).__name__}: {said}"
        line = next((source.lines[n - 1] for n in reversed(lines) if 0 < n <= len(source.lines)), 0)
        where = f"{source.where}:{line}" if line else source.where
        raise SpecError(f"{where}: {said}", hint=hint) from None


class _Elsewhere(RuntimeError):
    """What the function raises at sizes that the example does not have."""


class _Draft:
    """What is known of the function so far.

    Attributes:
        example: Each input's shape in numbers.
        letters: The dim of each symbol of the trace.
        multiples: Multiples of one dim, where weights side by side have several sizes.
        shapes: Each input's shape in dims.
        sizes: The example's size of each dim.
        units: What each dim is declared a multiple of.
        open: The dims that an extent may be which no operation ties to another.
        fixed: The size of each dim that the function holds as a number.
    """

    def __init__(self, source: Source, examples: Mapping[str, Example], name: str) -> None:
        self.source, self.examples, self.name = source, examples, name
        space: dict[str, Any] = {}
        exec(compile(source.block, _FILE, "exec"), space)
        self.function: Callable[..., Any] = space["reference"]
        letters = {a for e in examples.values() for a in e.axes if isinstance(a, str)}
        # Sizes that no other has, since a size that is met twice could be one dim.
        self.sizes = {x: 1024 * p for x, p in zip(sorted(letters), _PRIMES, strict=False)}
        self.example = {
            name: tuple(self.sizes[a] if isinstance(a, str) else a for a in e.axes)
            for name, e in examples.items()
        }
        self.letters: dict[Any, str] = {}
        self.multiples: dict[Any, str] = {}
        self.shapes: dict[str, tuple[Entry, ...]] = {}
        self.units: dict[str, int] = {}
        self.open: dict[Any, list[Entry]] = {}
        self.fixed: dict[str, int] = {}

    def text(self) -> str:
        trace = self._traced()
        first, second = operands(trace, self.source.name)
        self._name_dims(trace, first, second)
        self._find_units()
        self._check_sizes()
        outputs, types = self._cut()
        pairs = self._pairs(outputs, first, second) + self._scales(first, second)
        faults: list[SpecError] = []
        for choices, draw in itertools.product(dict.fromkeys([types, types[:1]]), _DRAWS):
            front = self._front(first, second, outputs, choices, draw, pairs)
            head = f"# {self.name}\n\nDrafted from `{self.source.name}` of {self.source.where}."
            text = f"---\n\n{head}\n\n```python reference\n{self.source.block}```\n"
            # The check shapes that are the default are written, to be seen and changed.
            checks = load_spec(_FILE, text=f"---\n{front}{text}").declared.check_shapes
            front += sizes_listed("check_shapes", checks)
            spec = load_spec(_FILE, text=(text := f"---\n{front}{text}"))
            try:
                admit(spec)
                return text
            except SpecError as error:
                # Its lines are those of the text; those of the block are what the source has.
                line = re.match(rf"{_FILE}:(\d+)", error.message)
                number = str(int(line[1]) - spec.reference_line + 1) if line else ""
                said = error.message.replace(line[1], number, 1) if line else error.message
                faults.append(SpecError(said, hint=error.hint))
        raise faults[0]

    def _front(
        self,
        first: Sequence[str],
        second: Sequence[str],
        outputs: Mapping[str, Face],
        types: tuple[str, ...],
        draw: str,
        pairs: Sequence[str],
    ) -> str:
        given = {x: example.dtype for x, example in self.examples.items()}
        eight = given[first[0]] != "T"
        inputs: dict[str, Face] = {}
        for x, shape in self.shapes.items():
            drawn = "normal" if x in first or x in second else draw
            if x in second and not eight:
                k = self.fixed.get(self.inner[0], self.inner[0])
                drawn = f"{{normal: {{std: {k}**-0.5}}}}"
            if given[x].startswith("int"):
                drawn = f"{{integers: [0, {self.columns[0]}]}}"
            elif not shape and re.search(rf"\bphilox\([^,()]*,?\s*{x}\b", self.source.block):
                drawn = "{integers: [0, 16777216]}"  # a seed, or an offset
            inputs[x] = Face(self._numbers(shape), given[x], drawn)
        outputs = {o: face._replace(shape=self._numbers(face.shape)) for o, face in outputs.items()}
        units = {x: unit for x, unit in self.units.items() if x not in self.fixed}
        front = front_matter(
            self.name, self.source.summary, () if eight else types, units, (first, second),
            pairs, inputs, outputs,
        )  # fmt: skip
        if all(isinstance(a, int) for e in self.examples.values() for a in e.axes):
            front += sizes_listed("bench_shapes", [{x: self.sizes[x] for x in units}])
        return front

    def _numbers(self, shape: Sequence[Entry]) -> tuple[Entry, ...]:
        """A shape with dims of one size as that size."""
        return tuple(
            extent(e, self.fixed) if isinstance(e, str) and parts(e)[1] in self.fixed else e
            for e in shape
        )

    def _dtype(self, name: str, chosen: str) -> torch.dtype:
        dtype = self.examples[name].dtype
        return getattr(torch, chosen if dtype == "T" else dtype)

    def _traced(self) -> Trace:
        """The trace at the example's sizes."""
        alike: dict[str, list[tuple[str, int]]] = {}
        for name, example in self.examples.items():
            for i, axis in enumerate(example.axes):
                if isinstance(axis, str):
                    alike.setdefault(axis, []).append((name, i))
        dtypes = {name: self._dtype(name, TYPES[0]) for name in self.examples}
        try:
            return traced(self.function, self.example, dtypes, alike)
        except SpecError:
            raise
        except Exception as error:
            said = self._own_fault(error)
            if _VALUES.search(f"{type(said).__name__} {said}"):
                fault = SpecError(
                    "control flow, or a Python number, depends on a value of an input",
                    hint="use torch.where, or pass the number as an argument with a default",
                )
                raise fault.with_traceback(error.__traceback__) from None
            raise said from None

    def _own_fault(self, error: Exception) -> Exception:
        """What the function raises at the example's sizes as numbers, rather than as symbols."""
        try:
            with torch.device("meta"):
                self.function(**self._inputs(self.example, TYPES[0], "meta"))
        except Exception as own:  # the function is foreign code
            given = ", ".join(f"{n} {list(s)}" for n, s in self.example.items())
            own.args = (f"{(str(own).strip().splitlines() or ['no message'])[0]}, with {given}",)
            return own
        return error

    def _name_dims(self, trace: Trace, first: Sequence[str], second: Sequence[str]) -> None:
        for name, example in self.examples.items():
            for axis, symbol in zip(example.axes, trace.shapes[name], strict=True):
                if isinstance(axis, str) and not _numeric(symbol):
                    self.letters[symbol] = axis
        inners = {left.shape[-1]: "R" for left, _ in trace.products}
        joined = len(second) < len(first)  # along K, before one weight
        if joined:
            inners |= {trace.shapes[x][-1]: "R" for x in first}
        inner = next(left.shape[-1] for left, _ in trace.products)
        inners[inner] = "K"
        if not joined and inner not in (of_a := trace.shapes[first[0]]):  # of several dims
            inners = dict.fromkeys(of_a[:-1], "S") | {of_a[0]: "B"}
            if self.example[first[0]][:-1] != self.example[second[0]][:-1]:
                hint = "give both as matrices, with one dim to sum over"
                raise SpecError(f"{self.source.name} sums over several dims", hint=hint)
            trace.shapes[second[0]] = (*of_a[:-1], trace.shapes[second[0]][-1])
        for name in (*first, *second):
            for symbol, size in zip(trace.shapes[name], self.example[name], strict=True):
                if not _numeric(symbol) or size == 1:
                    continue
                if list(trace.shapes[name]).count(symbol) > 1 or (
                    name in first and symbol not in inners
                ):
                    message = f"{self.source.name} needs a size of {name} to be {size}"
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
        rows = [s for s in trace.shapes[first[0]] if s not in inners and not _numeric(s)]
        if not rows:
            hint = "give it more, such as 4096: the kernel takes any number of them"
            raise SpecError(f"the example of {first[0]} has one row", hint=hint)
        wanted = ["M"] if len(rows) == 1 else ["B", *(f"S{i}" for i in range(2, len(rows))), "S"]
        self.rows = [self._letter(s, x) for s, x in zip(rows, wanted, strict=True)]
        extents: dict[Any, int] = {}
        for name in (*first, *second):
            extents |= dict(zip(trace.shapes[name], self.example[name], strict=True))
        others = {1, *inners, *rows}
        columns = {s: size for s, size in extents.items() if s not in others}
        if not columns:
            hint = "use torch.mv, or pad it with rows to 16"
            raise SpecError(f"{second[0]} has one row, so the product has one column", hint=hint)
        for s, size in columns.items():  # weights of one size are of one dim
            known = [x for x in columns if x in self.letters and columns[x] == size]
            self.letters.setdefault(s, self.letters[known[0]] if known else self._letter(s, "N"))
        self.columns = list(dict.fromkeys(self.letters[s] for s in columns))
        if len(second) > 1 and len({*columns.values()}) > 1:
            self.columns = [self._as_multiples(columns, self.columns[0])]
        sums = {s: size for s, size in extents.items() if s in inners}
        self.inner = [self._letter(s, inners[s]) for s in sums]
        if joined:
            self.inner = [self._as_multiples(sums, "K")]
        elif inner not in inners:
            self.inner = self.inner[-1:]
        for name, shape in trace.shapes.items():
            for symbol, size in zip(shape, self.example[name], strict=True):
                if symbol in self.letters:
                    self.sizes.setdefault(self.letters[symbol], size)
        for name, shape in trace.shapes.items():
            sizes = zip(shape, self.example[name], strict=True)
            self.shapes[name] = tuple(self._entry(trace, symbol, size) for symbol, size in sizes)

    def _as_multiples(self, sizes: Mapping[Any, int], letter: str) -> str:
        """Take extents for multiples of one dim, which is returned."""
        for s in sizes:
            self.letters.pop(s, None)
        self.sizes[letter] = unit = math.gcd(*sizes.values())
        for s, size in sizes.items():
            self.multiples[s] = f"{size // unit}*{letter}".removeprefix("1*")
        return letter

    def _letter(self, symbol: Any, wanted: str) -> str:
        taken = {*self.letters.values(), *self.examples}
        names = itertools.chain([wanted], (f"{wanted}{i}" for i in itertools.count(2)))
        return self.letters.setdefault(symbol, next(x for x in names if x not in taken))

    def _entry(self, trace: Trace, symbol: Any, size: int) -> Entry:
        """An input's extent, in a dim."""
        if symbol in self.multiples:
            return self.multiples[symbol]
        if symbol in self.letters or _numeric(symbol):
            return self.letters.get(symbol) or int(symbol)
        units = dict.fromkeys(self.letters.values(), _DIVISIBLE)
        tried = [self._distinct(units), self._distinct(units, 5)]
        known = [{s: t[x] for s, x in self.letters.items()} for t in tried]
        pairs = [pair for sides in trace.equal for pair in (sides, sides[::-1])]
        for one, other in ((symbol, symbol), *pairs):
            free = getattr(other, "free_symbols", set())
            if not free or not free <= self.letters.keys():
                continue
            found = [int(other.subs(k)) for k in known]
            if one == symbol:
                return self._matched(tried, found)
            if getattr(one, "free_symbols", set()) == {symbol}:  # such as half of it
                for q in _FACTORS:
                    if all(one.subs(symbol, q * size) == size for size in found):
                        return self._matched(tried, [q * size for size in found])
        alike = [x for x in (*self.rows, *self.columns, *self.inner) if self.sizes[x] == size]
        self.open[symbol] = [*dict.fromkeys(alike), size if size <= _CONSTANT else "L"]
        return symbol

    def _distinct(self, units: Mapping[str, int] | None = None, start: int = 0) -> dict[str, int]:
        """A size for each dim, all of them different; others from another `start`."""
        sizes = (units or self.units).items()
        primes = itertools.cycle(_PRIMES[start:] + _PRIMES[:start])
        return {
            x: unit * prime for (x, unit), prime in zip(sizes, primes, strict=False)
        } | self.fixed

    def _matched(self, tried: Sequence[Mapping[str, int]], found: Sequence[int]) -> Entry:
        """Extents at some sizes as a dim, a part or a multiple of one, or a number.

        Raises:
            SpecError: They are nothing of that kind.
        """
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
        message = f"an extent of {found[0]} where {at} is no dim, nor a part of one"
        hint = "return it as the product has it; give one dim of rows where they are flattened"
        raise SpecError(message, hint=hint)

    def _run(self, sizes: Mapping[str, int], chosen: str) -> dict[str, torch.Tensor]:
        """The outputs at `sizes`, by name.

        Raises:
            _Elsewhere: The function raises there.
        """
        extents = self._extents(sizes)
        inputs = self._inputs(extents, chosen)
        try:
            returned = self.function(**inputs)
        except (SpecError, OSError):
            raise
        except Exception as error:  # the function is foreign code
            said = (str(error).splitlines() or ["no message"])[0]
            given = ", ".join(f"{name} {list(shape)}" for name, shape in extents.items())
            fault = _Elsewhere(f"{type(error).__name__}: {said}, with {given}")
            raise fault.with_traceback(error.__traceback__) from None
        return self._named(returned)

    def _extents(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(extent(e, sizes) for e in shape) for name, shape in self.shapes.items()}

    def _inputs(
        self, shapes: Mapping[str, tuple[int, ...]], chosen: str, device: str = "cpu"
    ) -> dict[str, Any]:
        """Values in [0.5, 1.5]; of integers 1."""
        draws = torch.Generator("cpu").manual_seed(0) if device == "cpu" else None
        inputs: dict[str, Any] = {}
        for name, shape in shapes.items():
            dtype = self._dtype(name, chosen)
            values = torch.rand(shape, generator=draws, device=device) + 0.5
            values = values if dtype.is_floating_point else values.fill_(1)
            inputs[name] = values.to(dtype) if shape else 0.75
        return inputs

    def _named(self, returned: Any) -> dict[str, torch.Tensor]:
        if isinstance(returned, dict):
            found = {str(name): value for name, value in returned.items()}
        else:
            values = [*returned] if isinstance(returned, tuple | list) else [returned]
            names = self.source.returned
            if len(names) != len(values) or {*names} & {*self.shapes}:
                stem = next(x for x in ("out", "result", "returned") if x not in self.shapes)
                names = [f"{stem}{i + 1}" for i in range(len(values))] if values[1:] else [stem]
            found = dict(zip(names, values, strict=True))
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                what = "nothing" if value is None else f"a {type(value).__name__}"
                hint = "return a tensor, a tuple of tensors or a dict of them"
                raise SpecError(f"the function returns {what} for {name}", hint=hint)
            if not value.ndim:
                message = f"{name} is one number; a kernel reduces over rows, or over columns"
                raise SpecError(message, hint="return what it is made of, and reduce it with torch")
        return found

    def _find_units(self) -> None:
        """What dims must be multiples of, so that a kernel takes them and the function runs; and
        which dim an extent is that no operation ties to another."""
        eight = any(self._dtype(x, TYPES[0]).itemsize == 1 for x in self.examples)
        least = dict.fromkeys(self.columns, 16) | dict.fromkeys(self.inner, 16 if eight else 8)
        least |= {x: 8 for x in self.columns if self.sizes[x] % 16}
        given, fault, end = self.shapes, None, time.monotonic() + _SEARCH_S
        for choice in itertools.islice(itertools.product(*self.open.values()), 64):
            own = (f"L{i}" if x == "L" else x for i, x in enumerate(choice, 1))
            chosen = dict(zip(self.open, own, strict=True))
            self.shapes = {n: tuple(chosen.get(e, e) for e in s) for n, s in given.items()}
            entries = [parts(e) for s in self.shapes.values() for e in s if isinstance(e, str)]
            dims = list(dict.fromkeys([*self.letters.values(), *(dim for _, dim, _ in entries)]))
            for some, unit in itertools.product((self.columns, self.inner, dims), _UNITS):
                units = {x: math.lcm(least.get(x, 1), unit if x in some else 1) for x in dims}
                units |= {x: math.lcm(units[x], q) for _, x, q in entries} | self.fixed
                extents = self._extents(sizes := self._distinct(units)).values()
                late = time.monotonic() > end or sum(map(math.prod, extents)) > _LARGEST
                if fault and late:
                    continue
                try:
                    self._run(sizes, TYPES[0])
                except SpecError:
                    raise
                except Exception as error:  # the function's own
                    fault = fault or error
                else:
                    self.units = units
                    for name, shape in self.shapes.items():
                        for x, size in zip(shape, self.example[name], strict=True):
                            self.sizes.setdefault(str(x), size)
                    return
        raise fault or AssertionError("one choice at least is tried")

    def _check_sizes(self) -> None:
        elements = sum(map(math.prod, self.example.values()))
        if 2 * elements > _MEMORY:
            message = f"the example's tensors take {2 * elements / 1e9:,.0f} GB"
            raise SpecError(message, hint="give sizes that a GPU holds: they are timed")
        for name, shape in self.shapes.items():
            for x, size in zip(shape, self.example[name], strict=True):
                if size % (unit := self.units.get(str(x), 1)):
                    message = f"{name} has a size of {size}; a kernel takes multiples of {unit}"
                    raise SpecError(f"{message} there", hint=f"pad it to {up(size, unit)}")

    def _cut(self) -> tuple[dict[str, Face], tuple[str, ...]]:
        """The outputs, where need be of columns that three divides, as `chunk(3)` cuts them."""
        try:
            return self._outputs()
        except SpecError as fault:
            units = dict(self.units)
            self.units |= {x: 3 * units[x] for x in self.columns if x not in self.fixed}
            try:
                self._check_sizes()
                return self._outputs()
            except SpecError:
                raise fault from None

    def _outputs(self) -> tuple[dict[str, Face], tuple[str, ...]]:
        """Shape and element type of each output, and the choices of T."""
        tried = [self._distinct(), self._distinct(start=5)]
        one, two = (self._run(sizes, TYPES[0]) for sizes in tried)
        types = TYPES
        try:
            other = {o: value.dtype for o, value in self._run(tried[0], TYPES[1]).items()}
        except RuntimeError:  # it names a type that only the first goes with
            other = {o: value.dtype for o, value in one.items()}
        found: dict[str, Face] = {}
        for o, value in one.items():
            extents = zip(value.shape, two[o].shape, strict=True)
            shape = tuple(self._matched(tried, pair) for pair in extents)
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype == TYPES[0]:
                dtype, types = ("T", types) if other[o] != value.dtype else ("T", TYPES[:1])
            found[o] = Face(shape, dtype)
        return found, types

    def _changed(self, x: str, row: int | None = None) -> dict[str, torch.Tensor]:
        """Where outputs change with input `x`, or with one of its rows over columns."""
        inputs = self._inputs(self._extents(self._distinct()), TYPES[0])
        before = self._named(self.function(**inputs))
        inputs[x] = inputs[x].clone()
        part = inputs[x]
        if row is not None:
            part = part.select(self.shapes[x].index(self.columns[0]), row)
        part.copy_(-2 * part.float())
        after = self._named(self.function(**inputs))
        return {o: before[o] != after[o] for o in before}

    def _halved(self, o: str, axis: int, weight: str, *, alone: bool) -> bool:
        """Whether an output of half the columns needs columns 0 and N/2 for its first; or, where
        another one has the other half, is not computed like that."""
        sizes = self._distinct()
        middle = extent(f"{self.columns[0]}/2", sizes)
        needs = [
            bool(self._changed(weight, row)[o].select(axis, at).any())
            for row, at in ((0, 0), (middle, 0), (1, 1), (middle + 1, 1))
        ]
        if alone or needs[:2] == [True, True] or not any(needs[2:]):  # the last of every other one
            return all(needs[:2])
        inputs = self._inputs(self._extents(sizes), TYPES[0])
        inputs[weight] = inputs[weight] - 1  # a product of either sign, for what bends at 0
        turned = {
            x: value.roll(middle, self.shapes[x].index(self.columns[0]))
            if self.columns[0] in self.shapes[x] else value
            for x, value in inputs.items()
        }  # fmt: skip
        before, after = (self._named(self.function(**given)) for given in (inputs, turned))
        known = before[o].float()
        near = (
            known.allclose(y.float(), 0, 0.02 * float(known.abs().max()))
            for y in after.values()
            if y.shape == known.shape
        )
        return not any(near)

    def _pairs(
        self, outputs: Mapping[str, Face], first: Sequence[str], second: Sequence[str]
    ) -> list[str]:
        """Lines of the front matter that say which columns of the product go together."""
        half = f"{self.columns[0]}/2"
        if len(second) == 1:
            narrow = [(o, f.shape.index(half)) for o, f in outputs.items() if half in f.shape]
            if len(narrow) > 2:
                return []
            return ["pairs: halves"] * any(
                self._halved(o, i, second[0], alone=len(narrow) == 1) for o, i in narrow
            )
        wide = {o for o, face in outputs.items() if self.columns[0] in face.shape}
        by = [wide & {o for o, where in self._changed(x).items() if where.any()} for x in second]
        own = [o for o in outputs if sum(o in some for some in by) == 1]
        apart = len(own) == len(second)
        if len(first) > 1 or not (set[str].intersection(*by) or self._unlike(second, own)):
            return []
        return ["pairs: halves", *[f"split: [{', '.join(own)}]"] * apart]

    def _unlike(self, second: Sequence[str], outputs: Sequence[str]) -> bool:
        """Whether two outputs, of one weight each, are not computed alike: with weights exchanged,
        and vectors the same, they are not exchanged."""
        one, *others = (self.shapes[x] for x in second)
        if len(second) != 2 or len(outputs) != 2 or others != [one]:
            return False
        vectors = [x for x, shape in self.shapes.items() if shape == (self.columns[0],)]
        inputs = self._inputs(self._extents(self._distinct()), TYPES[0])
        inputs |= {x: inputs[vectors[0]].to(inputs[x].dtype) for x in vectors}
        signs = [inputs[x] - 1 for x in second]  # a product of either sign, for what bends at 0
        runs = (
            self._named(self.function(**inputs | dict(zip(second, weights, strict=True))))
            for weights in (signs, signs[::-1])
        )
        known, turned = ([run[o] for o in outputs] for run in runs)
        return not all(map(torch.equal, known, turned[::-1]))

    def _scales(self, first: Sequence[str], second: Sequence[str]) -> list[str]:
        """A line of the front matter that says by which power of two the function multiplies each
        product of a sum but the first: so scaled, it does the same to the first one alone."""
        inputs = self._inputs(self._extents(self._distinct()), TYPES[0])
        sums = [
            next((e for e in self.shapes[b] if e in self.shapes[a]), None)
            for a, b in zip(first, second, strict=False)
        ]
        if len(sums) < 2 or None in sums:
            return []

        # Powers of two, of which every product is one, and rounded by no type.
        columns = [
            2.0 ** torch.randint(-1, 2, inputs[x].select(self.shapes[x].index(sums[0]), 0).shape)
            for x in (first[0], second[0])
        ]

        def alone(i: int, scale: float = 1.0) -> list[torch.Tensor]:
            """The outputs where all but one column of one product's operands is 0."""
            given = inputs | {x: torch.zeros_like(inputs[x]) for x in (*first, *second)}
            for x, column, by in zip((first[i], second[i]), columns, (scale, 1.0), strict=True):
                given[x].select(self.shapes[x].index(sums[i]), 0).copy_(column * by)
            return [*self._named(self.function(**given)).values()]

        found = dict[str, float]()
        for i, x in enumerate(second):
            due = alone(i)
            powers = (sign * 2.0**n for n in sorted(range(-8, 9), key=abs) for sign in (1, -1))
            same = (s for s in powers if all(map(torch.equal, alone(0, s), due)))
            found[x] = next(same, 1.0)
        listed = ", ".join(f"{x}: {scale:g}" for x, scale in found.items() if scale != 1.0)
        return [f"scales: {{{listed}}}"] if listed else []


def _numeric(symbol: Any) -> bool:
    return isinstance(symbol, int) or bool(symbol.is_number)
