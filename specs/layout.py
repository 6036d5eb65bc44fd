"""How a spec's declared tensors lie in those of a kernel.

Programs, the lowering and the judge know one form: A (M, K), B (N, K), tiles (M, N), vectors (M,)
and (N,), and pairs of adjacent columns. A spec may speak in another one. A `Layout` says of each
tensor where its elements are in that form: each is in one place, and none is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError

Entry = int | str
Axes = tuple[tuple[Entry, ...], ...]
"""For each axis of a canonical tensor, the declared entries that are flattened into it."""

ENTRY = re.compile(r"(?:([1-9]\d*)\*)?([A-Za-z_]\w*)(?:/([1-9]\d*))?")


def parts(entry: str) -> tuple[int, str, int]:
    """Read factor, dim and divisor of a shape's entry."""
    factor, dim, divisor = ENTRY.findall(entry)[0]
    return int(factor or 1), dim, int(divisor or 1)


def shown(value: object) -> str:
    """Write a value of the front matter as it stands there."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(x)}' for key, x in value.items())}}}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def factors(entry: str) -> list[str]:
    """List an entry, or the dims of a product such as "B*S"."""
    found = entry.split("*")
    return [entry] if found[0].isdigit() else found


def extent(entry: Entry, sizes: Mapping[str, int]) -> int:
    """Compute a shape's entry at `sizes`."""
    if isinstance(entry, int):
        return entry
    if len(found := factors(entry)) > 1:
        return math.prod(sizes[x] for x in found)
    factor, dim, divisor = parts(entry)
    return factor * sizes[dim] // divisor


def _letters(entries: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(parts(e)[1] for e in entries if isinstance(e, str)))


@dataclass(frozen=True)
class Part:
    """A declared tensor.

    Attributes:
        shape: As declared, by the value of `parameter`; by "" where it depends on none.
        axes: What of it each canonical axis holds, by the same values.
        parameter: The static parameter that its shape depends on, if any.
        turned: Whether the axes stand in the other order in it.
        tail: Its trailing dimensions, -1 for what is not a number, where its columns are several.
        units: Its dimensions of extent 1 that the canonical tensor lacks, the last one being -1.
        table: Of a table of part of the rows or columns, which is canonical with one dimension of
            each, how many of its dimensions are over rows; else None.
        order: Of an output whose dimensions over rows and over columns are mixed, which one in
            order, from the last, -1, each of its last dimensions is.
        flat: Whether an output has one dimension of rows, "B*S", where A has several; or an operand
            several of what is summed, which are one in the canonical one.
        scale: What an operand is multiplied by as it is packed; a power of two, which loses no bit.
    """

    name: str
    shape: Mapping[str, tuple[Entry, ...]]
    axes: Mapping[str, Axes]
    parameter: str = ""
    turned: bool = False
    tail: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    table: int | None = None
    order: tuple[int, ...] = ()
    flat: bool = False
    scale: float = 1.0

    def straight(self, value: torch.Tensor) -> torch.Tensor:
        """View a declared tensor with canonical axes; copy only to scale."""
        value = value * self.scale if self.scale != 1.0 else value
        value = value.flatten(0, -2) if self.flat else value
        value = value.mT if self.turned else value
        value = value.flatten(-len(self.tail)) if self.tail else value
        return value.squeeze(self.units) if self.units else value


@dataclass(frozen=True)
class Place:
    """What a canonical tensor is made of.

    Attributes:
        parts: What lies side by side along `axis`.
        shares: What each part has of the axis, in proportion; empty where sizes alone tell.
        halves: Whether entries 2j and 2j + 1 along the axis are entries j and j + n/2 of the parts.
        dtype: The declared type of an output that is computed in float32, or of a tensor of one
            number, which a kernel takes in float32; empty where it is the canonical one.
        packed: Whether a caller has to bring it into canonical form, because a view cannot.
    """

    name: str
    parts: tuple[Part, ...]
    axis: int = 0
    shares: tuple[int, ...] = ()
    halves: bool = False
    dtype: str = ""
    packed: bool = False

    def apart(
        self, tensor: Any, sizes: Mapping[str, int], binding: Mapping[str, str], **number: Any
    ) -> dict[str, Any]:
        """Take a canonical tensor apart into the declared ones.

        Of a number they have the dtype and the device `number`.
        """
        tensor = halved(tensor, self.axis) if self.halves else tensor
        found, start = dict[str, Any](), 0
        for part in self.parts:
            case = binding.get(part.parameter, "")
            shape = [extent(e, sizes) for e in part.shape[case]]
            if not shape:
                found[part.name] = tensor
                continue
            if not isinstance(tensor, torch.Tensor):
                found[part.name] = torch.full(shape, tensor, **number)
                continue
            piece = tensor
            if len(self.parts) > 1:
                along = math.prod(extent(e, sizes) for e in part.axes[case][self.axis])
                piece = tensor.narrow(self.axis, start, along)
                start += along
            piece = piece / part.scale if part.scale != 1.0 else piece
            found[part.name] = (piece.mT if part.turned else piece).reshape(shape)
        return found

    def together(
        self, tensors: Mapping[str, Any], sizes: Mapping[str, int], binding: Mapping[str, str]
    ) -> torch.Tensor:
        """Make the canonical tensor of declared ones: the inverse of `apart`."""
        pieces = []
        for part in self.parts:
            axes = part.axes[binding.get(part.parameter, "")]
            shape = [math.prod(extent(e, sizes) for e in axis) for axis in axes]
            value = ordered(tensors[part.name], part.order, back=True)
            value = value.reshape(shape[::-1] if part.turned else shape)
            value = value.mT if part.turned else value
            pieces.append(value * part.scale if part.scale != 1.0 else value)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)
        return interleaved(whole, self.axis) if self.halves else whole


def ordered(value: torch.Tensor, order: Sequence[int], *, back: bool = False) -> torch.Tensor:
    """View the last dimensions in an `order`, or `back` from it.

    It is as a `Part`'s. A call on fewer dimensions of rows lacks the first ones.
    """
    if not order:
        return value
    order = [i for i in order if i >= -value.ndim]
    kept = value.ndim - len(order)
    whole = [*range(kept), *(value.ndim + i for i in order)]
    return value.permute(sorted(range(value.ndim), key=whole.__getitem__) if back else whole)


def interleaved(whole: torch.Tensor, axis: int) -> torch.Tensor:
    """Take the entries of two halves along `axis` in turn."""
    first, second = whole.movedim(axis, 0).chunk(2)
    return torch.stack([first, second], 1).flatten(0, 1).movedim(0, axis)


def halved(whole: torch.Tensor, axis: int) -> torch.Tensor:
    """Undo `interleaved`."""
    moved = whole.movedim(axis, 0)
    return torch.cat([moved[0::2], moved[1::2]]).movedim(0, axis)


@dataclass(frozen=True)
class Layout:
    """A spec's own form beside the canonical one.

    Attributes:
        gemm: Names of the canonical A and B.
        dims: Names of the canonical M, N and K.
        rows: Declared entries whose product is M.
        columns: Declared entries whose sum is N.
        inner: Declared entries whose sum is K.
        multiples: What each declared dim is a multiple of.
        known: Declared sizes that stand for their canonical ones, the first one first.
    """

    gemm: tuple[str, str]
    dims: tuple[str, str, str]
    rows: tuple[Entry, ...]
    columns: tuple[Entry, ...]
    inner: tuple[Entry, ...]
    multiples: Mapping[str, int]
    known: tuple[Mapping[str, int], ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def turned(self) -> str:
        """Those of A and B that a call gets as transposed views."""
        places = {place.name: place for place in self.inputs}
        found = zip("AB", (places[name] for name in self.gemm), strict=True)
        return "".join(x for x, p in found if p.parts[0].turned and not p.packed)

    @property
    def halves(self) -> bool:
        """Whether declared columns j and j + N/2 are a pair."""
        return any(place.halves for place in self.inputs if place.name == self.gemm[1])

    def extents(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Compute canonical sizes of declared ones."""
        m = math.prod(extent(e, sizes) for e in self.rows)
        n, k = (sum(extent(e, sizes) for e in some) for some in (self.columns, self.inner))
        return dict(zip(self.dims, (m, n, k), strict=True))

    def sizes(self, canonical: Mapping[str, int]) -> dict[str, int]:
        """Find declared sizes of canonical ones: known, or some that fit."""
        given = {dim: canonical[dim] for dim in self.dims}
        for known in self.known:
            if self.extents(known) == given:
                return dict(known)
        m, n, k = given.values()
        found = dict(self.known[0])
        for total, entries in ((n, self.columns), (k, self.inner)):
            if len(several := factors(str(entries[0]))) > 1:
                found |= self._factors(total, several)
            else:
                found |= self._summed(total, entries, found)
        return found | self._factors(m, self.rows)

    def _summed(
        self, total: int, entries: Sequence[Entry], known: Mapping[str, int]
    ) -> dict[str, int]:
        """Find sizes at which `entries` have this sum, most as known."""
        letters = _letters(entries)
        if not letters:
            return {}
        share = {x: max(1, total // len(entries) // self.multiples[x]) for x in letters[1:]}
        found = {x: min(known[x], n * self.multiples[x]) for x, n in share.items()}
        unit = self.multiples[letters[0]]
        none = extent_sum(entries, {**found, letters[0]: 0})
        step = extent_sum(entries, {**found, letters[0]: unit}) - none
        return found | {letters[0]: max(1, (total - none) // step) * unit}

    def _factors(self, total: int, entries: Sequence[Entry]) -> dict[str, int]:
        """Find sizes at which `entries` have this product, none 1 if possible."""
        letters, found = _letters(entries), dict[str, int]()
        left = total // math.prod(e for e in entries if isinstance(e, int))
        for i, letter in enumerate(letters[:-1]):
            unit = self.multiples[letter]
            rest = math.prod(self.multiples[x] for x in letters[i + 1 :])
            fits = [d for d in range(unit, math.isqrt(left) + 1, unit) if left % (d * rest) == 0]
            found[letter] = fits[-1] if fits else unit
            left //= found[letter]
        return found | {letters[-1]: left} if letters else found

    def declared(
        self,
        inputs: Mapping[str, Any],
        binding: Mapping[str, str],
        *,
        number: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Make declared inputs of canonical ones; numbers' dtype is `number`, or own."""
        sizes, found = self._sizes_of(inputs), dict[str, Any]()
        element, device = inputs[self.gemm[0]].dtype, inputs[self.gemm[0]].device
        for place in self.inputs:
            own = getattr(torch, place.dtype or "float32", None)
            dtype = number or (own if isinstance(own, torch.dtype) else element)
            found |= place.apart(inputs[place.name], sizes, binding, dtype=dtype, device=device)
        return found

    def canonical(
        self,
        outputs: Mapping[str, torch.Tensor],
        inputs: Mapping[str, Any],
        binding: Mapping[str, str],
    ) -> dict[str, torch.Tensor]:
        """Make canonical outputs of declared ones, by the canonical inputs.

        Raises:
            SpecError: An output has another shape than declared.
        """
        sizes = self._sizes_of(inputs)
        for part in (part for place in self.outputs for part in place.parts):
            declared = part.shape[binding.get(part.parameter, "")]
            due, got = tuple(extent(e, sizes) for e in declared), tuple(outputs[part.name].shape)
            if got != due:
                message = f"output {part.name!r} is {shown(got)}; expected {shown(due)}"
                hint = "change one of the two"
                raise SpecError(f"{message}, as {shown(declared)} is declared", hint=hint)
        found = {p.name: p.together(outputs, sizes, binding) for p in self.outputs}
        for place in self.outputs:
            if place.dtype and found[place.name].element_size() == 2:
                found[place.name] = found[place.name].float()
        return found

    def _sizes_of(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        a, b = (inputs[name] for name in self.gemm)
        return self.sizes(dict(zip(self.dims, (a.shape[0], b.shape[0], a.shape[1]), strict=True)))


def extent_sum(entries: Iterable[Entry], sizes: Mapping[str, int]) -> int:
    """Add entries at `sizes`."""
    return sum(extent(e, sizes) for e in entries)
