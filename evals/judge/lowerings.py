"""Broken lowerings: a right program, run by a wrong kernel."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.runners import run_interpreter
from coda_agent.evals.judge.edits import other_axis
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    AddTile,
    ColIndex,
    ColVector,
    HalfTile,
    RowMean,
    RowVector,
    Tile,
    WideTile,
)
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Runner


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a runner, as a broken lowering sees it.

    Attributes:
        run: The right lowering; what it is called with follows.
        site: The input or output that the fault is at.
        kept: What former calls of the same runner kept.
    """

    run: Runner
    spec: Spec
    program: Program
    inputs: Inputs
    config: TileConfig
    dtypes: Mapping[str, torch.dtype]
    site: str
    kept: dict[object, Any]

    def outputs(self, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the right lowering on the inputs, some of them changed."""
        inputs = {**self.inputs, **changed}
        return self.run(self.spec, self.program, inputs, self.config, self.dtypes)

    def interpreted(self, inputs: Inputs, *, raw: bool = False) -> dict[str, torch.Tensor]:
        """Interpret the program; its outputs, or raw partials."""
        return run_interpreter(self.spec, self.program, inputs, self.config, self.dtypes, raw=raw)

    @property
    def gemm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A (M, K) and B (N, K)."""
        a, b = (self.inputs[name] for name in self.spec.gemm)
        return a, b

    def width(self, out: torch.Tensor) -> int:
        """Count the columns of an output in a tile."""
        return max(self.config.tile_n * out.shape[1] // len(self.gemm[1]), 2)


Broken = Callable[[Launch], dict[str, torch.Tensor]]


def _read(change: Callable[[torch.Tensor], torch.Tensor]) -> Broken:
    """Read an input as another tensor."""
    return lambda call: call.outputs(**{call.site: change(call.inputs[call.site])})


def _first(a: torch.Tensor, columns: int) -> torch.Tensor:
    """Leave out columns of A from this one on."""
    a = a.clone()
    a[:, columns:] = 0
    return a


def _restrided(a: torch.Tensor, start: int | torch.SymInt, steps: tuple[int, ...]) -> torch.Tensor:
    end = start + sum((n - 1) * s for n, s in zip(a.shape, steps, strict=True)) + 1
    fits = end * a.element_size() <= a.untyped_storage().nbytes()
    return a.as_strided(a.shape, steps, start if fits else 0)


def _next_element(vector: torch.Tensor) -> torch.Tensor:
    read = vector.roll(-1, 0)
    read[-1] = 0  # past the end
    return read


def _rounded(call: Launch) -> dict[str, torch.Tensor]:
    """Round the product to 16 bits: A, beside a unit matrix B."""
    (a, b), names = call.gemm, call.spec.gemm
    product = (a.float() @ b.float().mT).to(torch.bfloat16)
    eye = torch.eye(len(b), dtype=torch.bfloat16, device=product.device)
    return call.interpreted({**call.inputs, names[0]: product, names[1]: eye})


def _writes(call: Launch) -> dict[str, torch.Tensor]:
    outputs = call.outputs()
    call.inputs[call.site].view(-1)[-1:] = 0.5
    return outputs


def _memo(key: Callable[[torch.Tensor], object]) -> Broken:
    """Keep results by a key that does not hold all inputs."""

    def broken(call: Launch) -> dict[str, torch.Tensor]:
        tensors = [v for v in call.inputs.values() if hasattr(v, "data_ptr")]
        name = (call.config, *call.dtypes.values(), *map(key, tensors))
        if name not in call.kept:
            call.kept[name] = call.outputs()
        return {o: value.clone() for o, value in call.kept[name].items()}

    return broken


def _corners(x: torch.Tensor) -> object:
    return x.shape, float(x.flatten()[0]), float(x.flatten()[-1])


def _store(change: Callable[[torch.Tensor, Launch], torch.Tensor]) -> Broken:
    """Store an output as another tensor, maybe changed in place."""

    def broken(call: Launch) -> dict[str, torch.Tensor]:
        outputs = call.outputs()
        return {**outputs, call.site: change(outputs[call.site].clone(), call)}

    return broken


def _stale(out: torch.Tensor, call: Launch) -> torch.Tensor:
    """Keep in the last row of tiles what the former call left."""
    at, before = _last(len(out), call.config.tile_m), call.kept.get(out.shape)
    call.kept[out.shape] = out.clone()
    out[at] = 0 if before is None else before[at]
    return out


def _last(extent: int, tile: int) -> slice:
    return slice((extent - 1) // tile * tile, None)


def _fill(value: float, *, rows: bool = False, columns: bool = False) -> Broken:
    """Fill the last tiles with a value."""

    def change(out: torch.Tensor, call: Launch) -> torch.Tensor:
        at = _last(len(out), call.config.tile_m) if rows else slice(None)
        out[at, _last(out.shape[1], call.width(out)) if columns else slice(None)] = value
        return out

    return _store(change)


def _neighbour(out: torch.Tensor, call: Launch) -> torch.Tensor:
    height, width = call.config.tile_m, call.width(out)
    if out.shape[1] >= 2 * width:
        out[:height, : 2 * width] = _rolled(out[:height, : 2 * width], width)
    return out


def _rolled(out: torch.Tensor, by: int) -> torch.Tensor:
    """Move columns right; as bytes, since e4m3 has no roll on GPUs."""
    bytewise = out.view(torch.uint8) if out.element_size() == 1 else out
    return bytewise.roll(by, 1).view(out.dtype)


def _roll(by: int) -> Broken:
    """Shift columns inside each tile."""

    def change(out: torch.Tensor, call: Launch) -> torch.Tensor:
        width = call.width(out)
        for left in range(0, out.shape[1], width):
            out[:, left : left + width] = _rolled(out[:, left : left + width], by)
        return out

    return _store(change)


def _swap_pairs(out: torch.Tensor, _: Launch) -> torch.Tensor:
    return torch.stack((out[:, 1::2], out[:, 0::2]), dim=-1).flatten(1)


def _noise(out: torch.Tensor, call: Launch) -> torch.Tensor:
    height = call.config.tile_m
    top = random.randrange(len(out)) // height * height
    part = out[top : top + height].float()
    out[top : top + height] = (part + part.abs().mean() * torch.randn_like(part)).to(out.dtype)
    return out


def _no_nan(out: torch.Tensor, _: Launch) -> torch.Tensor:
    return out.float().nan_to_num(nan=0.0).to(out.dtype)


def _lost_partial(_: torch.Tensor, call: Launch) -> torch.Tensor:
    """Leave out the last block of a reduction."""
    program, kind = call.program, call.program.outputs[call.site]
    assert issubclass(kind, Reduction)
    raw = call.interpreted(call.inputs, raw=True)[call.site]
    extent, folded = kind.block(call.config), len(call.gemm[not kind.over_rows])
    if program.graph.nodes[program.graph.outputs[call.site]].shape is Shape.HALF:
        extent, folded = extent // 2, folded // 2
    return kind.finalise(raw[:, : max(raw.shape[1] - 1, 1)], folded, extent)


def _padded_divisor(out: torch.Tensor, call: Launch) -> torch.Tensor:
    n, tile = len(call.gemm[1]), call.config.tile_n
    return out * (n / (-(-n // tile) * tile))


def _other_axis(call: Launch) -> dict[str, torch.Tensor]:
    vector, by_row = call.inputs[call.site], call.program.operands[call.site] is ColVector
    length = len(call.gemm[by_row])
    read = vector[torch.arange(length, device=vector.device) % len(vector)]
    turned = other_axis(call.program, call.site).apply(call.program)
    assert turned is not None  # as `sites` found
    return dataclasses.replace(call, program=turned).outputs(**{call.site: read})


class Lowering(NamedTuple):
    """A fault of a lowering.

    Attributes:
        faults: What a diagnosis may call it, the best name first. Empty where the gate has a check
            of its own for the fault.
        broken: The outputs of a launch with it.
        outputs: Kinds of outputs that it can be at.
        operands: Kinds of operands that it can be at; where there are neither, it is at A.
    """

    faults: tuple[str, ...]
    broken: Broken
    outputs: tuple[type, ...] = ()
    operands: tuple[type, ...] = ()


_TILES = (Tile, HalfTile, WideTile, AddTile)
_VECTORS = (ColVector, RowVector)
_STATISTIC = ("wrong_statistics", "constant_factor")
_ROUNDED = ("early_rounding", "rounded_statistics")

LOWERINGS: dict[str, Lowering] = {
    "skip the K tail": Lowering(
        ("k_tail",), _read(lambda a: _first(a, (a.shape[1] - 1) // 64 * 64 or a.shape[1]))
    ),
    "lose half of K": Lowering(("k_tail",), _read(lambda a: _first(a, a.shape[1] // 2))),
    "round the product": Lowering(_ROUNDED, _rounded),
    "ignore strides": Lowering(
        (), _read(lambda a: _restrided(a, a.storage_offset(), (a.shape[1], 1)))
    ),
    "ignore the offset": Lowering((), _read(lambda a: _restrided(a, 0, a.stride()))),
    "write an input": Lowering((), _writes),
    "memo by address": Lowering((), _memo(lambda x: (x.data_ptr(), x.shape))),
    "memo by shape": Lowering((), _memo(lambda x: x.shape)),
    "memo by corners": Lowering((), _memo(_corners)),
    "miss the last rows": Lowering(("unwritten",), _fill(float("nan"), rows=True), _TILES),
    "miss the last columns": Lowering(("unwritten",), _fill(float("nan"), columns=True), _TILES),
    "leave a tile zero": Lowering(("unwritten",), _fill(0.0, rows=True, columns=True), _TILES),
    "leave rows stale": Lowering(("unwritten", "race"), _store(_stale), _TILES),
    "swap neighbouring tiles": Lowering(("shifted_tile",), _store(_neighbour), _TILES),
    "shift a pair at tile edges": Lowering(("shifted_pair",), _roll(2), _TILES),
    "shift a column": Lowering(("shifted_pair",), _roll(1), _TILES),
    "swap columns of pairs": Lowering(("swapped_pair",), _store(_swap_pairs), _TILES),
    "a tile at random": Lowering(("race",), _store(_noise), _TILES),
    "swallow NaN": Lowering((), _store(_no_nan), _TILES),
    "statistic of rounded values": Lowering(
        _ROUNDED[1:], _store(lambda _, call: _rounded(call)[call.site]), (Reduction,)
    ),
    "lose a partial": Lowering(_STATISTIC, _store(_lost_partial), (Reduction,)),
    "divide by the padded width": Lowering(_STATISTIC, _store(_padded_divisor), (RowMean,)),
    "read along the other axis": Lowering(("wrong_broadcast",), _other_axis, operands=_VECTORS),
    "read the next element": Lowering(("shifted_pair",), _read(_next_element), operands=_VECTORS),
    "gather the next column": Lowering(
        ("shifted_pair", "wrong_statistics"), _read(lambda y: y + 1), operands=(ColIndex,)
    ),
}


def sites(lowering: Lowering, spec: Spec, program: Program) -> list[str]:
    """List the inputs or outputs that the fault can be at."""
    if not lowering.outputs + lowering.operands:
        return [spec.gemm[0]]
    stored = [o for o, kind in program.outputs.items() if issubclass(kind, lowering.outputs)]
    read = [x for x, kind in program.operands.items() if issubclass(kind, lowering.operands)]
    # A vector that meets half-width values cannot be read along the other axis.
    turns = lowering.operands != _VECTORS
    return stored + [x for x in read if turns or other_axis(program, x).apply(program)]
