"""Calls resolved once: what one copies, allocates, launches and folds.

A plan depends on its `signature` alone: a call with another one is checked and resolved anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, NamedTuple

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.memory import tma_ready
from coda_agent.primitives.operation import Term
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import OddRows
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.call_cache import CallPlan
from coda_agent.runtime.launch import Arguments, allocate, launch

if TYPE_CHECKING:
    from coda_agent.primitives.fold import Folds

    View = Callable[[torch.Tensor], torch.Tensor]


class Wanted(NamedTuple):
    """What a call shall give.

    Attributes:
        raw: Whether reductions stay partials.
        kept: Whether what is added to is copied first.
    """

    dtypes: Mapping[str, torch.dtype]
    raw: bool
    kept: bool = False


def resolve(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Term],
    config: TileConfig,
    wanted: Wanted,
) -> CallPlan:
    """Plan a call whose arguments were checked.

    Args:
        a: (…, M, K), M not 0.
        b: (N, K), or its even rows.
        operands: By name, with what is added to in place.
    """
    lead, n = a.shape[:-1], program.columns(b)
    m = lead.numel()
    kinds: dict[str, type[Resource]] = {**program.operands}
    if added := program.accumulated:
        kinds[added] = program.outputs[added]
    kept = wanted.kept and added is not None
    makes = _makes(a, kinds, m)
    if kept:
        makes[-1] = partial(_copied, m=m)
    given = [a, b, *(operands[o] for o in kinds)]
    flat = [make(x) if make else x for make, x in zip(makes, given, strict=True)]
    ready = [(i, make) for i, make in enumerate(makes) if make and flat[i] is not given[i]]
    outputs = allocate(program, m, n, wanted.dtypes, config, "meta")
    made = [
        None if o == added else (tuple(t.shape), t.stride(), t.dtype) for o, t in outputs.items()
    ]
    if added:
        outputs[added] = flat[-1]
    with torch.cuda.device(a.device) if torch.cuda.device_count() > 1 else nullcontext():
        named = dict(zip(kinds, flat[2:], strict=True))
        bound = launch(Arguments(program, flat[0], flat[1], named, outputs, config), run=False)
    finish = Finish(program, m, n, config, raw=wanted.raw, lead=lead)
    return CallPlan(bound, a.device, made, ready, finish if finish.steps else None, kept)


def _makes(a: torch.Tensor, kinds: Mapping[str, type[Resource]], m: int) -> list[View | None]:
    """Find what readies A, B and tensors of these kinds for TMA."""
    # The tensor core reads FP8 operands along K only.
    either, several = a.element_size() > 1, a.ndim > 2
    return [
        partial(_rows_ready, either_major=either),
        _dense if OddRows in kinds.values() else partial(tma_ready, either_major=either),
        *(
            _dense
            if kind is OddRows
            else partial(_flat_and_ready, kind=kind, m=m, flat=several)
            if kind.dims and kind.by_tma
            else None
            for kind in kinds.values()
        ),
    ]


def reduced(program: Program, o: str, m: int, n: int, config: TileConfig) -> tuple[int, int]:
    """Count the elements that a reduction folds, and those of a partial."""
    kind = program.reductions[o]
    extent, block = m if kind.over_rows else n, kind.block(config)
    half = program.graph.nodes[program.graph.outputs[o]].shape is Shape.HALF
    return (extent // 2, block // 2) if half else (extent, block)


class Finish:
    """What makes the caller's outputs of a kernel's, in their list.

    Partials over rows are turned to (N, blocks), and unless `raw` all are folded to their final
    values, in one launch. What an unfused form leaves of one block is final. Outputs of rows get
    the leading dimensions `lead` of A, if it has several.
    """

    def __init__(
        self,
        program: Program,
        m: int,
        n: int,
        config: TileConfig,
        *,
        raw: bool = False,
        lead: tuple[int, ...] = (),
    ) -> None:
        self._folded: list[tuple[int, type[Reduction], int, int]] = []
        self._views: list[tuple[int, View]] = []
        self._bound: Folds | None = None
        for i, (o, kind) in enumerate(program.outputs.items()):
            if issubclass(kind, Reduction):
                extent, block = reduced(program, o, m, n, config)
                if not config.fused and block >= extent:
                    self._views.append((i, methodcaller("reshape", -1)))
                elif not raw:
                    self._folded.append((i, kind, extent, block))
                elif kind.over_rows:
                    self._views.append((i, attrgetter("mT")))
            if len(lead) > 1 and kind.dims[:1] == ("M",) and o != program.accumulated:
                self._views.append((i, partial(_with_lead, lead=lead)))

    @property
    def steps(self) -> int:
        return len(self._folded) + len(self._views)

    def __call__(self, outputs: list[torch.Tensor]) -> None:
        """Finish a call, by a launch that the first one's layouts bind."""
        if self._folded:
            raws = [outputs[i] for i, *_ in self._folded]
            fold = self._bound or self._bind(raws)
            for (i, *_), t in zip(self._folded, fold(raws), strict=True):
                outputs[i] = t
        for i, view in self._views:
            outputs[i] = view(outputs[i])

    def _bind(self, raws: list[torch.Tensor]) -> Folds:
        def turned(raws: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            parts = zip(self._folded, raws, strict=True)
            return [t.mT if kind.over_rows else t for (_, kind, *_), t in parts]

        if raws[0].device.type == "cpu":
            self._bound = lambda raws: [
                kind.finalise(t, *sizes)
                for (_, kind, *sizes), t in zip(self._folded, turned(raws), strict=True)
            ]
        else:
            from coda_agent.primitives.fold import folding

            ways = [kind.way(*sizes) for _, kind, *sizes in self._folded]
            self._bound = folding(turned(raws), ways)
        return self._bound


def finalised(
    program: Program,
    outputs: Mapping[str, torch.Tensor],
    m: int,
    n: int,
    config: TileConfig,
) -> dict[str, torch.Tensor]:
    """Fold every reduction of a kernel's outputs to its final values."""
    results = [outputs[o] for o in program.outputs]
    Finish(program, m, n, config)(results)
    return dict(zip(program.outputs, results, strict=True))


def _flat_and_ready(t: torch.Tensor, kind: type[Resource], m: int, flat: bool) -> torch.Tensor:
    return tma_ready(kind.flat(t, m) if flat else t)


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Ready one half of B's rows, whose strides are those of the other."""
    return tma_ready(t.contiguous())


def _copied(t: torch.Tensor, m: int) -> torch.Tensor:
    # Not by `contiguous()`: that keeps any stride of a dimension of extent 1.
    return t.clone(memory_format=torch.contiguous_format).reshape(m, -1)


def _rows_ready(a: torch.Tensor, either_major: bool) -> torch.Tensor:
    return tma_ready(a if a.ndim == 2 else a.flatten(0, -2), either_major=either_major)


def _with_lead(t: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    return t.reshape(*lead, *t.shape[1:])
