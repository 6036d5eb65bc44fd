"""A spec out of a function and example shapes.

The function is run, so this belongs into a child: on symbolic sizes, which tell the
product and the dims, and at small ragged sizes, which tell what it returns. What is written has
passed the parser and admission.
"""

from __future__ import annotations

import itertools
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from coda_agent.primitives.errors import SpecError
from coda_agent.specs import probes
from coda_agent.specs.admission import admit
from coda_agent.specs.called import FILE, Called, Elsewhere
from coda_agent.specs.defaults import TYPES
from coda_agent.specs.dims import EVEN, PRIMES, Dims, check_sizes, find_units
from coda_agent.specs.format import DTYPES
from coda_agent.specs.front_matter import Face, Front, sizes_listed
from coda_agent.specs.layout import extent
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Example, Source, with_tensors
from coda_agent.specs.tracing import Trace, operands, traced

_VALUES = re.compile("DataDependent|data-dependent|meta tensor", re.IGNORECASE)
"""What errors say where a value is asked of a tensor that has none."""
_DRAWS = ("normal", "{uniform: [0.5, 1.5]}", "{integers: [0, 2]}")
"""How what is no operand of the product is drawn: the second suits roots and logarithms, the third
masks."""


def draft(source: Source, examples: Mapping[str, Example], name: str) -> str:
    """Write the text of a spec for the function.

    Args:
        examples: By argument, in the function's order; what is left out stays at its default.

    Raises:
        SpecError: The function cannot be run on these, multiplies nothing, does something beside
            computing, or is refused by the parser or by admission.
    """
    with _blaming(source):
        try:
            return _Draft(source, examples, name).text()
        except (AttributeError, TypeError, Elsewhere) as error:
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
        lines = [frame.lineno or 0 for frame in frames if frame.filename == FILE]
        said = (str(error).strip().splitlines() or ["no message"])[0]
        hint = ""
        if isinstance(error, SpecError):
            said, hint = error.message, error.hint
            if found := re.fullmatch(rf"{FILE}(?::(\d+))?: (.*)", said):
                lines, said = [int(found[1] or 0)], found[2]
        elif isinstance(error, Elsewhere):
            said = f"at other sizes than the example's the function raises {said}"
            hint = "a kernel takes others: take numbers that depend on them from shapes"
        elif isinstance(error, OSError) or "cannot be opened" in said:
            said = "the function opens a file or a connection; a reference only computes"
        else:
            said = f"the function raises {type(error).__name__}: {said}"
        line = next((source.lines[n - 1] for n in reversed(lines) if 0 < n <= len(source.lines)), 0)
        where = f"{source.where}:{line}" if line else source.where
        raise SpecError(f"{where}: {said}", hint=hint) from None


class _Draft:
    """What is known of a function so far."""

    def __init__(self, source: Source, examples: Mapping[str, Example], name: str) -> None:
        self.source, self.examples, self.name = source, examples, name
        self.called = Called(source, examples)
        letters = {a for e in examples.values() for a in e.axes if isinstance(a, str)}
        # Sizes that no other has, since a size that is met twice could be one dim; in whole heads.
        self.sizes = {x: EVEN * p for x, p in zip(sorted(letters), PRIMES, strict=False)}
        self.example = {
            name: tuple(self.sizes[a] if isinstance(a, str) else a for a in e.axes)
            for name, e in examples.items()
        }

    def text(self) -> str:
        """Write the spec; it is admitted."""
        trace = self._traced()
        first, second = operands(trace, self.source.name)
        dims = Dims(self.called, self.example, self.sizes, trace, first, second)
        find_units(dims)
        check_sizes(dims)
        try:
            outputs, types = _cut(dims)
        except SpecError as fault:  # it may cut columns by numbers, such as y[:, 256:]
            outputs, types = self._with_fixed_columns(dims, fault)
        _align(dims, outputs)
        lines = probes.pairs(dims, outputs, first, second)
        lines += probes.scales(dims, first, second)
        faults: list[SpecError] = []
        for choices, draw in itertools.product(dict.fromkeys([types, types[:1]]), _DRAWS):
            front = self._front(dims, (first, second), outputs, choices, draw, lines)
            head = f"# {self.name}\n\nDrafted from `{self.source.name}` of {self.source.where}."
            text = f"---\n\n{head}\n\n```python reference\n{self.source.block}```\n"
            # The check shapes that are the default are written, to be seen and changed.
            checks = load_spec(FILE, text=f"---\n{front}{text}").declared.check_shapes
            front += sizes_listed("check_shapes", checks)
            spec = load_spec(FILE, text=(text := f"---\n{front}{text}"))
            try:
                admit(spec)
                return text
            except SpecError as error:
                # Its lines are those of the text; those of the block are what the source has.
                line = re.match(rf"{FILE}:(\d+)", error.message)
                number = str(int(line[1]) - spec.reference_line + 1) if line else ""
                said = error.message.replace(line[1], number, 1) if line else error.message
                faults.append(SpecError(said, hint=error.hint))
        raise faults[0]

    @staticmethod
    def _with_fixed_columns(
        dims: Dims, fault: SpecError
    ) -> tuple[dict[str, Face], tuple[str, ...]]:
        """Cut the outputs where the product has the example's columns; else raise `fault`."""
        dims.fixed |= {x: dims.sizes[x] for x in dims.columns}
        try:
            find_units(dims)
            outputs, types = _cut(dims)
        except Exception:  # the function's own, too
            raise fault from None
        widths = [face.shape[-1] for face in outputs.values() if len(face.shape) > 1]
        whole = sum(extent(x, dims.fixed) for x in widths)
        if whole != sum(dims.fixed[x] for x in dims.columns):
            raise fault
        return outputs, types

    def _front(
        self,
        dims: Dims,
        product: tuple[Sequence[str], Sequence[str]],
        outputs: Mapping[str, Face],
        types: tuple[str, ...],
        draw: str,
        lines: Sequence[str],
    ) -> str:
        first, second = product
        given = {x: example.dtype for x, example in self.examples.items()}
        eight = given[first[0]] != "T"
        inputs: dict[str, Face] = {}
        for x, shape in dims.shapes.items():
            drawn = "normal" if x in first or x in second else draw
            if x in second and not eight:
                k = dims.fixed.get(dims.inner[0], dims.inner[0])
                drawn = f"{{normal: {{std: {k}**-0.5}}}}"
            if given[x].startswith("int"):
                drawn = f"{{integers: [0, {dims.columns[0]}]}}"
            elif not shape and re.search(rf"\bphilox\([^,()]*,?\s*{x}\b", self.source.block):
                drawn = "{integers: [0, 16777216]}"  # a seed, or an offset
            inputs[x] = Face(dims.numbers(shape), given[x], drawn)
        outputs = {o: face._replace(shape=dims.numbers(face.shape)) for o, face in outputs.items()}
        units = {x: unit for x, unit in dims.units.items() if x not in dims.fixed}
        front = Front(
            self.name, self.source.summary, () if eight else types, units, product,
            lines, inputs, outputs,
        ).text()  # fmt: skip
        if all(isinstance(a, int) for e in self.examples.values() for a in e.axes):
            front += sizes_listed("bench_shapes", [{x: dims.sizes[x] for x in units}])
        return front

    def _traced(self) -> Trace:
        alike: dict[str, list[tuple[str, int]]] = {}
        for name, example in self.examples.items():
            for i, axis in enumerate(example.axes):
                if isinstance(axis, str):
                    alike.setdefault(axis, []).append((name, i))
        dtypes = {name: self.called.dtype(name, TYPES[0]) for name in self.examples}
        try:
            return traced(self.called.function, self.example, dtypes, alike)
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
        """Find what the function raises at the example's sizes, as numbers."""
        try:
            with torch.device("meta"):
                self.called.function(**self.called.inputs(self.example, TYPES[0], "meta"))
        except Exception as own:  # the function is foreign code
            given = ", ".join(f"{n} {list(s)}" for n, s in self.example.items())
            own.args = (f"{(str(own).strip().splitlines() or ['no message'])[0]}, with {given}",)
            return own
        return error


def _cut(dims: Dims) -> tuple[dict[str, Face], tuple[str, ...]]:
    """Find the outputs; if need be of columns that three divides."""
    try:
        return _outputs(dims)
    except SpecError as fault:
        units = dict(dims.units)
        dims.units |= {x: 3 * units[x] for x in dims.columns if x not in dims.fixed}
        try:
            check_sizes(dims)
            return _outputs(dims)
        except SpecError:
            raise fault from None


def _align(dims: Dims, outputs: Mapping[str, Face]) -> None:
    """Make rows of half the columns units of 16 bytes, in which TMA moves them."""
    eight = [face.shape for face in outputs.values() if DTYPES.get(face.dtype) == 1]
    halved = [x for x in dims.columns if any(f"{x}/2" in shape for shape in eight)]
    dims.units |= {x: math.lcm(dims.units[x], 32) for x in halved if x not in dims.fixed}
    check_sizes(dims)


def _outputs(dims: Dims) -> tuple[dict[str, Face], tuple[str, ...]]:
    """Find each output's shape and element type, and T's choices."""
    tried = [dims.distinct(), dims.distinct(start=5)]
    shapes = [dims.extents(sizes) for sizes in tried]
    one, two = (dims.called.run(x, TYPES[0]) for x in shapes)
    types = TYPES
    try:
        other = {o: value.dtype for o, value in dims.called.run(shapes[0], TYPES[1]).items()}
    except RuntimeError:  # it names a type that only the first goes with
        other = {o: value.dtype for o, value in one.items()}
    found: dict[str, Face] = {}
    for o, value in one.items():
        extents = zip(value.shape, two[o].shape, strict=True)
        shape = tuple(dims.matched(o, tried, pair) for pair in extents)
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype == TYPES[0]:
            dtype, types = ("T", types) if other[o] != value.dtype else ("T", TYPES[:1])
        found[o] = Face(shape, dtype)
    return found, types
