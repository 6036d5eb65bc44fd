"""Calls in the layout that a spec declares, by views.

What no view brings into the kernel's form is packed once, by `pack`, and given packed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.specs.layout import Entry, Layout, Part, Place, halved, interleaved, ordered, shown


class Declared:
    """A spec's layout, as plain values, since torch.compile traces its calls.

    `types` are the names that stand for the type of A.

    Attributes:
        inputs: Of those that are not passed as they are, in canonical order: place, name, whether
            all of its dimensions but the last become one, whether its two change places,
            how many its columns are, and which dimensions of extent 1 it loses.
        tables: Of tables of part of the rows or columns: place, how many of their dimensions are
            over rows, which dimensions are of extent 1, and what each dimension is: of a place the
            dimension, or a number.
        numbers: Tensors of one number that are not float32: places.
        outputs: What the declared outputs of each canonical one are, by its name.
        packing: Inputs that are given packed, by name.
    """

    def __init__(self, name: str, layout: Layout, types: Container[str]) -> None:
        self.name, self.places = name, layout.inputs
        self._alternating = _alternating(layout)
        self.packing = {place.name: place for place in layout.inputs if place.packed}
        self.inputs = tuple(
            (i, place.name, part.flat, part.turned, len(part.tail), part.units)
            for i, place in enumerate(layout.inputs)
            for part in place.parts
            if not place.packed and (part.turned or part.tail or part.units)
        )
        self.tables = tuple(
            (i, part.table, tuple(e == 1 for e in shape), _alike(layout, shape))
            for i, place in enumerate(layout.inputs)
            for part in place.parts
            if part.table is not None
            for shape in [next(iter(part.shape.values()))]
        )
        self.numbers = tuple(i for i, place in enumerate(layout.inputs) if place.dtype)
        self.outputs = {place.name: _Leaving.of(place, types) for place in layout.outputs}

    @property
    def hint(self) -> str:
        """How a caller gets what is packed."""
        lines = []
        for name, place in self.packing.items():
            given = ", ".join(f"{part.name}={part.name}" for part in place.parts)
            lines.append(f"{name} = {self.name}.pack({given}), once")
        call = f"{self.name}.packed({', '.join(place.name for place in self.places)})"
        return "; ".join([*lines, call]) if lines else ""

    def whole(self, given: Mapping[str, Any]) -> list[Any]:
        """Make inputs of what the reference takes, and pack what is packed."""
        return [self._made(place, given) for place in self.places]

    def apart(self, given: Mapping[str, Any]) -> list[Any] | None:
        """Make inputs with B's even rows alone, and its odd ones behind all others.

        None where these do not lie apart: each dense.
        """
        if self._alternating is None:
            return None
        held = [given[part.name] for part in self._alternating.parts]
        plain = torch.Tensor, torch.nn.Parameter  # a subclass's numbers may be anywhere
        if any(type(x) not in plain or x.layout is not torch.strided for x in held):
            return None
        like = {(x.shape, x.dtype, x.device) for x in held}
        if len(like) > 1 or any(x.ndim != 2 or not x.is_contiguous() for x in held):
            return None
        even, odd = held if len(held) > 1 else held[0].chunk(2)
        made = [
            even if place is self._alternating else self._made(place, given)
            for place in self.places
        ]
        return [*made, odd]

    def _made(self, place: Place, given: Mapping[str, Any]) -> Any:
        if not place.packed:
            return given[place.name]
        return self.pack({part.name: given[part.name] for part in place.parts})

    def entered(self, values: Sequence[object]) -> list[Any]:
        """Make canonical inputs of a caller's."""
        found: list[Any] = [*values]
        for i, name, flat, turned, columns, units in self.inputs:
            value = found[i]
            if not hasattr(value, "shape"):
                continue  # a number, or what the kernel refuses
            value = value.flatten(0, -2) if flat and value.ndim > 2 else value
            value = value.mT if turned and value.ndim == 2 else value
            value = value.flatten(-columns) if columns and value.ndim >= columns else value
            for unit in units:
                if value.ndim < -unit or value.shape[unit] != 1:
                    raise LaunchError(
                        f"{self.name}: input {name!r} has shape {tuple(value.shape)}, expected 1 "
                        f"as its dimension {unit}"
                    )
            found[i] = value.squeeze(units) if units else value
        for i in self.numbers:
            found[i] = found[i].float() if hasattr(found[i], "shape") else found[i]
        for i, rows, units, alike in self.tables:
            if getattr(found[i], "ndim", None) == len(units):
                extents = tuple(found[i].shape)
                self._check(i, extents, alike, values)
                found[i] = found[i].reshape(math.prod(extents[:rows]), math.prod(extents[rows:]))
        return found

    def _check(
        self, i: int, extents: tuple[int, ...], alike: Sequence[_Alike], values: Sequence[Any]
    ) -> None:
        """Refuse a table of another extent, which would be repeated over what it is not of."""
        for axis, known in enumerate(alike):
            if known is None or extents[axis] == 1:
                continue
            if not isinstance(due := known, int):
                j, ndim, at = known
                if getattr(values[j], "ndim", 0) != ndim:
                    continue
                due = values[j].shape[at]
            if extents[axis] != due:
                raise LaunchError(
                    f"{self.name}: input {self.places[i].name!r} has shape {extents}, expected "
                    f"{due} as its dimension {axis}"
                )

    def left(self, names: Sequence[str], results: Any, element: torch.dtype, *, raw: bool) -> Any:
        """Make the declared outputs of canonical ones; raw partials stay."""
        values = results if isinstance(results, tuple) else () if results is None else (results,)
        found: list[torch.Tensor] = []
        for name, value in zip(names, values, strict=True):
            found += self.outputs[name].of_call(value, element, raw)
        return tuple(found) if len(found) > 1 else found[0] if found else None

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Copy declared tensors into the kernel's input in which they lie."""
        for place in self.packing.values():
            if {part.name for part in place.parts} == {*tensors}:
                break
        else:
            known = "; ".join(", ".join(p.name for p in x.parts) for x in self.packing.values())
            raise LaunchError(
                f"{self.name}: {', '.join(tensors)} are not packed, expected {known or 'nothing'}"
            )
        try:
            pieces = [part.straight(tensors[part.name]) for part in place.parts]
            parted = zip(pieces, place.shares, strict=bool(place.shares))
            units = {piece.shape[-place.axis] / share for piece, share in parted}
            if len(units) > 1:  # the outputs are parted so
                raise RuntimeError("other proportions")
            whole = torch.cat(pieces, -place.axis)  # the last one, of A with several of rows too
            whole = interleaved(whole, -place.axis) if place.halves else whole
        except (IndexError, RuntimeError):
            got = ", ".join(f"{x} {tuple(value.shape)}" for x, value in tensors.items())
            due = ", ".join(f"{p.name} {shown(p.shape[''])}" for p in place.parts)
            raise LaunchError(f"{self.name}: {got} cannot be packed, expected {due}") from None
        return whole.contiguous()

    def unpack(
        self, name: str, packed: torch.Tensor, extents: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Take a packed tensor apart: the inverse of `pack`."""
        if (place := self.packing.get(name)) is None:
            known = ", ".join(self.packing) or "none"
            raise LaunchError(f"{self.name}: {name!r} is not packed, expected one of {known}")
        axis = -place.axis
        whole = halved(packed, axis) if place.halves else packed
        if extents is None and not place.shares:
            raise LaunchError(f"{self.name}: unpack of {name!r} needs extents, one for each part")
        unit = whole.shape[axis] // (sum(place.shares) or 1)
        extents = extents or [unit * share for share in place.shares]
        try:
            pieces = whole.split([*extents], axis)
            parted = [*zip(place.parts, pieces, strict=True)]
        except (RuntimeError, TypeError, ValueError):
            raise LaunchError(
                f"{self.name}: extents are {extents!r}, expected one for each of"
                f" {', '.join(part.name for part in place.parts)}, {whole.shape[axis]} together"
            ) from None
        found = {}
        for part, piece in parted:
            value = piece / part.scale if part.scale != 1.0 else piece
            value = value.mT if part.turned else value
            value = value.unflatten(-1, part.tail) if part.tail else value
            found[part.name] = _with_units(value, part.units)
        return found


_Alike = int | tuple[int, int, int] | None


def _alike(layout: Layout, shape: Sequence[Entry]) -> list[_Alike]:
    """Find of each dimension its extent, or which dimension of an operand has it.

    Of an operand that is its place, its number of dimensions, and which one.
    """
    found: list[_Alike] = []
    for entry in shape:
        held = (
            (j, len(own), own.index(entry))
            for j, place in enumerate(layout.inputs)
            if place.name in layout.gemm and not place.packed
            for own in [next(iter(place.parts[0].shape.values()))]
            if entry in own
        )
        found.append(entry if isinstance(entry, int) else next(held, None))
    return found


def _alternating(layout: Layout) -> Place | None:
    """Find B where its rows are those of two tensors, or of the halves of one, in turn."""
    for place in layout.inputs:
        if place.name != layout.gemm[1] or not (place.packed and place.halves and place.axis == 0):
            continue
        plain = all(
            not (part.turned or part.tail or part.units or part.flat) and part.scale == 1.0
            for part in place.parts
        )
        if plain and len(place.parts) <= 2 and len({*place.shares}) <= 1:
            return place
    return None


def _with_units(value: torch.Tensor, units: tuple[int, ...]) -> torch.Tensor:
    """Add dimensions of extent 1 where they stand in the result."""
    for unit in reversed(units):
        value = value.unsqueeze(unit)
    return value


class _Leaving(NamedTuple):
    """What the declared outputs of a canonical one are.

    Attributes:
        vector: Whether it is one, so that raw partials are as they are.
        dtype: Theirs, where the kernel's is float32; "" is that of A.
        halves: Whether they are its even and its odd columns.
        shares: What each has of its columns, in proportion.
        views: Of each the declared tensor.
    """

    vector: bool
    dtype: str | None
    halves: bool
    shares: tuple[int, ...]
    views: tuple[Part, ...]

    @classmethod
    def of(cls, place: Place, types: Container[str]) -> _Leaving:
        axes = [axes for part in place.parts for axes in part.axes.values()]
        dtype = ("" if place.dtype in types else place.dtype) if place.dtype else None
        return cls(max(map(len, axes)) == 1, dtype, place.halves, place.shares, place.parts)

    def of_call(self, value: torch.Tensor, element: torch.dtype, raw: bool) -> list[torch.Tensor]:
        """View a call's output."""
        if raw and self.vector:
            return [value]
        if self.dtype is not None:
            value = value.to(getattr(torch, self.dtype) if self.dtype else element)
        pieces = [value]
        if self.halves:
            pieces = [value[..., 0::2], value[..., 1::2]]
        elif len(self.views) > 1:
            unit = value.shape[-1] // sum(self.shares)
            pieces = value.split([unit * share for share in self.shares], -1)
        found = []
        for piece, part in zip(pieces, self.views, strict=True):
            view = piece.mT if part.turned else piece
            if part.flat:
                view = view.flatten(0, -1 if self.vector else -2)
            view = view.unflatten(-1, part.tail) if part.tail else view
            found.append(ordered(_with_units(view, part.units), part.order))
        return found
