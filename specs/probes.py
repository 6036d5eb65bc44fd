"""What a function's values tell of its columns and products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from coda_agent.specs.defaults import TYPES
from coda_agent.specs.dims import Dims
from coda_agent.specs.front_matter import Face
from coda_agent.specs.layout import extent


def pairs(
    dims: Dims,
    outputs: Mapping[str, Face],
    first: Sequence[str],
    second: Sequence[str],
) -> list[str]:
    """Write lines that say which columns of the product go together."""
    column = dims.columns[0]
    half = f"{column}/2"
    if len(second) == 1:
        narrow = [(o, f.shape.index(half)) for o, f in outputs.items() if half in f.shape]
        if len(narrow) > 2:
            return []
        return ["pairs: halves"] * any(
            _halved(dims, o, i, second[0], alone=len(narrow) == 1) for o, i in narrow
        )
    wide = {o for o, face in outputs.items() if column in face.shape}
    by = [wide & {o for o, where in _changed(dims, x).items() if where.any()} for x in second]
    own = [o for o in outputs if sum(o in some for some in by) == 1]
    apart = len(own) == len(second)
    if len(first) > 1 or not (set[str].intersection(*by) or _unlike(dims, second, own)):
        return []
    return ["pairs: halves", *[f"split: [{', '.join(own)}]"] * apart]


def scales(dims: Dims, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Write a line of powers of two that scale the products.

    So scaled, a product of the sum does the same to the function as the first one alone.
    """
    inputs = dims.called.inputs(dims.extents(dims.distinct()), TYPES[0])
    sums = [
        next((e for e in dims.shapes[b] if e in dims.shapes[a]), None)
        for a, b in zip(first, second, strict=False)
    ]
    if len(sums) < 2 or None in sums:
        return []

    # Powers of two, of which every product is one, and rounded by no type.
    columns = [
        2.0 ** torch.randint(-1, 2, inputs[x].select(dims.shapes[x].index(sums[0]), 0).shape)
        for x in (first[0], second[0])
    ]

    def alone(i: int, scale: float = 1.0) -> list[torch.Tensor]:
        """Run with one column of one product's operands, all else 0."""
        given = inputs | {x: torch.zeros_like(inputs[x]) for x in (*first, *second)}
        for x, column, by in zip((first[i], second[i]), columns, (scale, 1.0), strict=True):
            given[x].select(dims.shapes[x].index(sums[i]), 0).copy_(column * by)
        return [*dims.called.outputs(given).values()]

    found = dict[str, float]()
    for i, x in enumerate(second):
        due = alone(i)
        powers = (sign * 2.0**n for n in sorted(range(-8, 9), key=abs) for sign in (1, -1))
        same = (s for s in powers if all(map(torch.equal, alone(0, s), due)))
        found[x] = next(same, 1.0)
    listed = ", ".join(f"{x}: {scale:g}" for x, scale in found.items() if scale != 1.0)
    return [f"scales: {{{listed}}}"] if listed else []


def _changed(dims: Dims, x: str, row: int | None = None) -> dict[str, torch.Tensor]:
    """Find where outputs change with an input, or one row of it."""
    inputs = dims.called.inputs(dims.extents(dims.distinct()), TYPES[0])
    before = dims.called.outputs(inputs)
    inputs[x] = inputs[x].clone()
    part = inputs[x]
    if row is not None:
        part = part.select(dims.shapes[x].index(dims.columns[0]), row)
    part.copy_(-2 * part.float())
    after = dims.called.outputs(inputs)
    return {o: before[o] != after[o] for o in before}


def _halved(dims: Dims, o: str, axis: int, weight: str, *, alone: bool) -> bool:
    """Tell whether a half-width output's first column needs columns 0 and N/2.

    Or, where another one has the other half, that it is not computed like that.
    """
    sizes, column = dims.distinct(), dims.columns[0]
    middle = extent(f"{column}/2", sizes)
    needs = [
        bool(_changed(dims, weight, row)[o].select(axis, at).any())
        for row, at in ((0, 0), (middle, 0), (1, 1), (middle + 1, 1))
    ]
    if alone or needs[:2] == [True, True] or not any(needs[2:]):  # the last of every other one
        return all(needs[:2])
    inputs = dims.called.inputs(dims.extents(sizes), TYPES[0])
    inputs[weight] = inputs[weight] - 1  # a product of either sign, for what bends at 0
    turned = {
        x: value.roll(middle, dims.shapes[x].index(column)) if column in dims.shapes[x] else value
        for x, value in inputs.items()
    }
    before, after = map(dims.called.outputs, (inputs, turned))
    known = before[o].float()
    near = (
        known.allclose(y.float(), 0, 0.02 * float(known.abs().max()))
        for y in after.values()
        if y.shape == known.shape
    )
    return not any(near)


def _unlike(dims: Dims, second: Sequence[str], outputs: Sequence[str]) -> bool:
    """Tell whether two outputs, of one weight each, are not computed alike.

    With weights exchanged, and vectors the same, they are not exchanged.
    """
    one, *others = (dims.shapes[x] for x in second)
    if len(second) != 2 or len(outputs) != 2 or others != [one]:
        return False
    vectors = [x for x, shape in dims.shapes.items() if shape == (dims.columns[0],)]
    inputs = dims.called.inputs(dims.extents(dims.distinct()), TYPES[0])
    inputs |= {x: inputs[vectors[0]].to(inputs[x].dtype) for x in vectors}
    signs = [inputs[x] - 1 for x in second]  # a product of either sign, for what bends at 0
    runs = (
        dims.called.outputs(inputs | dict(zip(second, weights, strict=True)))
        for weights in (signs, signs[::-1])
    )
    known, turned = ([run[o] for o in outputs] for run in runs)
    return not all(map(torch.equal, known, turned[::-1]))
