"""Broken lowerings: a right program, run as a wrong kernel would run it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.evals.judge.edits import rebuild
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import (
    ColIndex,
    ColVector,
    Reduction,
    RowGather,
    RowMean,
    RowVector,
)

if TYPE_CHECKING:
    from coda_agent.primitives.tiles import TileConfig
    from coda_agent.specs import Spec

    # As the judge's own: (spec, program, inputs, config, dtypes) to final outputs.
    Runner = Callable[
        [Spec, Program, Mapping[str, Any], TileConfig, Mapping[str, Any]], dict[str, Any]
    ]


@dataclass(frozen=True)
class Launch:
    """One call of a runner, as a broken lowering sees it."""

    run: Runner
    spec: Spec
    program: Program
    inputs: Mapping[str, Any]
    config: TileConfig
    dtypes: Mapping[str, Any]

    def outputs(self, **changed: Any) -> dict[str, Any]:
        """What the right lowering gives for the inputs, some of them changed."""
        inputs = {**self.inputs, **changed}
        return self.run(self.spec, self.program, inputs, self.config, self.dtypes)

    @property
    def a(self) -> Any:
        return self.inputs[self.spec.gemm[0]]

    @property
    def b(self) -> Any:
        return self.inputs[self.spec.gemm[1]]

    def interpreted(self, a: Any, b: Any, *, raw: bool = False) -> dict[str, Any]:
        """The interpreter's outputs for other A and B, of any type."""
        from coda_agent.primitives.interpret import interpret

        place = self.spec.in_place
        held = {place.output: self.inputs[place.input]} if place else {}
        return interpret(
            self.program, a, b, {**self.inputs, **held}, dtypes=self.dtypes, raw=raw,
            block=self.config.tile_n, row_block=self.config.tile_m,
        )  # fmt: skip

    def with_a(self, a: Any) -> dict[str, Any]:
        return self.outputs(**{self.spec.gemm[0]: a})


Broken = Callable[[Launch, str], dict[str, Any]]
"""The outputs, from a launch and the name of what the fault is at."""


def _skip(first: Callable[[int], int]) -> Broken:
    """Columns of A from `first(K)` on do not enter."""

    def broken(call: Launch, _: str) -> dict[str, Any]:
        a = call.a.clone()
        a[:, first(a.shape[1]) :] = 0
        return call.with_a(a)

    return broken


def _store(change: Callable[[Any, int, int], Any]) -> Broken:
    """An output is changed: from (output, rows, columns of a tile of it)."""

    def broken(call: Launch, site: str) -> dict[str, Any]:
        outputs = call.outputs()
        out = outputs[site].clone()
        width = call.config.tile_n * out.shape[1] // len(call.b)
        return {**outputs, site: change(out, call.config.tile_m, max(width, 2))}

    return broken


def _last(extent: int, tile: int) -> slice:
    return slice((extent - 1) // tile * tile, None)


def _fill(value: float, rows: bool, columns: bool) -> Broken:
    """The last tiles hold a value."""

    def change(out: Any, height: int, width: int) -> Any:
        at = _last(len(out), height) if rows else slice(None)
        out[at, _last(out.shape[1], width) if columns else slice(None)] = value
        return out

    return _store(change)


def _neighbour(out: Any, height: int, width: int) -> Any:
    if out.shape[1] >= 2 * width:
        out[:height, : 2 * width] = out[:height, : 2 * width].roll(width, 1)
    return out


def _roll(by: int) -> Broken:
    """Columns are shifted inside each tile."""

    def change(out: Any, _: int, width: int) -> Any:
        for left in range(0, out.shape[1], width):
            out[:, left : left + width] = out[:, left : left + width].roll(by, 1)
        return out

    return _store(change)


def _swap_pairs(out: Any, *_: int) -> Any:
    import torch

    return torch.stack((out[:, 1::2], out[:, 0::2]), dim=-1).flatten(1)


def _noise(out: Any, height: int, _: int) -> Any:
    import torch

    top = random.randrange(len(out)) // height * height
    part = out[top : top + height].float()
    out[top : top + height] = (part + part.abs().mean() * torch.randn_like(part)).to(out.dtype)
    return out


def _no_nan(out: Any, *_: int) -> Any:
    return out.float().nan_to_num(nan=0.0).to(out.dtype)


def _rounded(call: Launch, _: str) -> dict[str, Any]:
    """The product is rounded to 16 bits: in place of A, with a unit matrix in place of B."""
    import torch

    product = call.a.float() @ call.b.float().mT
    eye = torch.eye(len(call.b), dtype=torch.bfloat16, device=product.device)
    return call.interpreted(product.to(torch.bfloat16), eye)


def _lost_partial(call: Launch, site: str) -> dict[str, Any]:
    """The last block of a reduction never enters."""
    from coda_agent.primitives.reductions import finalise

    program, config, kind = call.program, call.config, call.program.outputs[site]
    raw = call.interpreted(call.a, call.b, raw=True)[site]
    assert issubclass(kind, Reduction)
    extent, folded = (
        (config.tile_m, len(call.a)) if kind.over_rows else (config.tile_n, len(call.b))
    )
    if program.graph.nodes[program.graph.outputs[site]].shape is Shape.HALF:
        extent, folded = extent // 2, folded // 2
    kept = raw[:, : max(raw.shape[1] - 1, 1)]
    return {**call.outputs(), site: finalise(kept, kind, folded, extent)}


def _padded_divisor(call: Launch, site: str) -> dict[str, Any]:
    outputs, n = call.outputs(), len(call.b)
    padded = -(-n // call.config.tile_n) * call.config.tile_n
    return {**outputs, site: outputs[site] * (n / padded)}


def _other_axis(call: Launch, site: str) -> dict[str, Any]:
    import torch

    vector, by_row = call.inputs[site], call.program.operands[site] is ColVector
    length = len(call.b if by_row else call.a)
    read = vector[torch.arange(length, device=vector.device) % len(vector)]
    return dataclasses.replace(call, program=_turned(call.program, site)).outputs(**{site: read})


def _turned(program: Program, site: str) -> Program:
    """The program with a vector by row as one by column, or the reverse."""
    by_row = program.operands[site] is ColVector
    return rebuild(program, {}, {site: RowVector if by_row else ColVector})


def _next_element(call: Launch, site: str) -> dict[str, Any]:
    read = call.inputs[site].roll(-1, 0)
    read[-1] = 0  # past the end
    return call.outputs(**{site: read})


def _restrided(offset: bool, strides: bool) -> Broken:
    """A is read with its storage offset, or its strides, forgotten."""

    def broken(call: Launch, _: str) -> dict[str, Any]:
        a = call.a
        start = 0 if offset else a.storage_offset()
        shape, steps = a.shape, (a.shape[1], 1) if strides else a.stride()
        end = start + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) + 1
        if end * a.element_size() > a.untyped_storage().nbytes():
            start = 0
        return call.with_a(a.as_strided(shape, steps, start))

    return broken


def _writes(call: Launch, site: str) -> dict[str, Any]:
    outputs = call.outputs()
    call.inputs[site].view(-1)[-1:] = 0.5
    return outputs


def _memo(key: Callable[[Any], Any]) -> Callable[[], Broken]:
    """Results are kept by a key of each input, which does not hold all of it."""

    def fresh() -> Broken:
        kept: dict[Any, dict[str, Any]] = {}

        def broken(call: Launch, _: str) -> dict[str, Any]:
            tensors = [v for v in call.inputs.values() if hasattr(v, "data_ptr")]
            name = (call.config, *call.dtypes.values(), *map(key, tensors))
            if name not in kept:
                kept[name] = call.outputs()
            return {o: value.clone() for o, value in kept[name].items()}

        return broken

    return fresh


def _stale() -> Broken:
    """The last row of tiles keeps what the call before left there."""
    before: dict[Any, Any] = {}

    def broken(call: Launch, site: str) -> dict[str, Any]:
        outputs = call.outputs()
        out, at = outputs[site].clone(), _last(len(outputs[site]), call.config.tile_m)
        out[at] = before[out.shape][at] if out.shape in before else 0
        before[out.shape] = outputs[site]
        return {**outputs, site: out}

    return broken


class Lowering(NamedTuple):
    """A fault of a lowering: what it is at, what a diagnosis may call it, a maker."""

    at: str
    faults: tuple[str, ...]
    make: Callable[[], Broken]


_TILES, _STATISTICS = "tiles", "statistics"
_SITES: dict[str, Callable[[type], bool]] = {
    _TILES: lambda kind: not issubclass(kind, (Reduction, RowGather)),
    _STATISTICS: lambda kind: issubclass(kind, Reduction),
    "means": lambda kind: issubclass(kind, RowMean),
    "vectors": lambda kind: kind in (ColVector, RowVector),
    "indices": lambda kind: kind is ColIndex,
}

LOWERINGS: dict[str, Lowering] = {
    "skip the K tail": Lowering("A", ("k_tail",), lambda: _skip(lambda k: (k - 1) // 64 * 64 or k)),
    "lose half of K": Lowering("A", ("k_tail",), lambda: _skip(lambda k: k // 2)),
    "round the product": Lowering("A", ("early_rounding", "rounded_statistics"), lambda: _rounded),
    "ignore strides": Lowering("A", (), lambda: _restrided(False, True)),
    "ignore the offset": Lowering("A", (), lambda: _restrided(True, False)),
    "write an input": Lowering("A", (), lambda: _writes),
    "memo by address": Lowering("A", (), _memo(lambda x: (x.data_ptr(), x.shape))),
    "memo by shape": Lowering("A", (), _memo(lambda x: x.shape)),
    "memo by corners": Lowering(
        "A", (), _memo(lambda x: (x.shape, float(x.flatten()[0]), float(x.flatten()[-1])))
    ),
    "miss the last rows": Lowering(
        _TILES, ("unwritten",), lambda: _fill(float("nan"), True, False)
    ),
    "miss the last columns": Lowering(
        _TILES, ("unwritten",), lambda: _fill(float("nan"), False, True)
    ),
    "leave a tile zero": Lowering(_TILES, ("unwritten",), lambda: _fill(0.0, True, True)),
    "leave rows stale": Lowering(_TILES, ("unwritten", "race"), _stale),
    "swap neighbouring tiles": Lowering(_TILES, ("shifted_tile",), lambda: _store(_neighbour)),
    "shift a pair at tile edges": Lowering(_TILES, ("shifted_pair",), lambda: _roll(2)),
    "shift a column": Lowering(_TILES, ("shifted_pair",), lambda: _roll(1)),
    "swap columns of pairs": Lowering(_TILES, ("swapped_pair",), lambda: _store(_swap_pairs)),
    "a tile at random": Lowering(_TILES, ("race",), lambda: _store(_noise)),
    "swallow NaN": Lowering(_TILES, (), lambda: _store(_no_nan)),
    "statistic of rounded values": Lowering(
        _STATISTICS,
        ("rounded_statistics",),
        lambda: lambda call, site: {**call.outputs(), site: _rounded(call, site)[site]},
    ),
    "lose a partial": Lowering(
        _STATISTICS, ("wrong_statistics", "constant_factor"), lambda: _lost_partial
    ),
    "divide by the padded width": Lowering(
        "means", ("wrong_statistics", "constant_factor"), lambda: _padded_divisor
    ),
    "read along the other axis": Lowering("vectors", ("wrong_broadcast",), lambda: _other_axis),
    "read the next element": Lowering("vectors", ("shifted_pair",), lambda: _next_element),
    "gather the next column": Lowering(
        "indices",
        ("shifted_pair", "wrong_statistics"),
        lambda: lambda call, site: call.outputs(**{site: call.inputs[site] + 1}),
    ),
}


def sites(lowering: Lowering, spec: Spec, program: Program) -> list[str]:
    """The inputs or outputs that the fault can be at."""
    if lowering.at not in _SITES:
        return [spec.gemm[0]]
    tensors = {**program.operands, **program.outputs}
    outputs = lowering.at in (_TILES, _STATISTICS, "means")
    chosen = program.outputs if outputs else program.operands
    found = [x for x in chosen if _SITES[lowering.at](tensors[x])]
    return [x for x in found if lowering.at != "vectors" or _turns(program, x)]


def _turns(program: Program, site: str) -> bool:
    """Whether a vector can be read along the other axis: not where it meets half-width values."""
    try:
        _turned(program, site)
    except ProgramError:
        return False
    return True
