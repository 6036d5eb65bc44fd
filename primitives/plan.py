"""Calls resolved once: what a call copies, allocates, launches and folds, found by one lookup.

- A plan depends on its `signature` alone: a call with another one is checked and resolved anew.
- A plan holds no tensor. A call takes from torch's caching allocator its outputs, copies of what
  TMA cannot load, and a workspace where parts of K meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.graph import Shape
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.launch import Bound, allocate, bind
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    import torch

    Fold = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How a program runs on tensors of one signature.

    Attributes:
        bound: The launch.
        device: That of all tensors.
        elsewhere: Whether another one is current; None where there is only one.
        empty: Allocates on the current device.
        made: Name, shape, strides and dtype of each output; no shape of what is added to in place.
        ready: Operands that are not passed as they are, and what makes them so.
        gemm: The same for A and B, if for either.
        folds: By output, what follows the launch.
    """

    bound: Bound
    device: torch.device
    elsewhere: Callable[[], bool] | None
    empty: Callable[..., torch.Tensor]
    made: tuple[tuple[str, tuple[int, ...] | None, tuple[int, ...], torch.dtype], ...]
    ready: tuple[tuple[str, Fold], ...]
    gemm: tuple[Fold, Fold] | None
    folds: tuple[tuple[str, Fold], ...]

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The outputs, by name; what is added to in place is the caller's tensor."""
        if self.elsewhere is not None and self.elsewhere():
            import torch

            with torch.cuda.device(self.device):
                return self(a, b, operands)
        given = operands
        if self.gemm:
            a, b = self.gemm[0](a), self.gemm[1](b)
        if self.ready:
            operands = {**given, **{o: made(given[o]) for o, made in self.ready}}
        outputs = self.buffers(operands)
        self.bound(a, b, operands, outputs)
        for o, fold in self.folds:
            outputs[o] = fold(outputs[o])
        if (o := self.bound.program.accumulated) is not None:
            if outputs[o].data_ptr() != given[o].data_ptr():
                given[o].copy_(outputs[o].reshape(given[o].shape))
            outputs[o] = given[o]
        return outputs

    def buffers(self, operands: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the kernel writes to: new buffers, and the operand that is added to."""
        empty = self.empty
        return {
            o: operands[o] if shape is None else empty(shape, strides, dtype)
            for o, shape, strides, dtype in self.made
        }


def resolve(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    config: TileConfig,
    *,
    raw: bool,
) -> CallPlan:
    """The plan of a call whose arguments were checked.

    Args:
        program: The program.
        a: (…, M, K), M not 0.
        b: (N, K).
        operands: By name, with what is added to in place.
        dtypes: Of the outputs.
        config: The tile configuration.
        raw: Whether reductions stay partials.

    Raises:
        CompileError: as `launch`.
    """
    import torch

    lead, n = a.shape[:-1], b.shape[0]
    m = lead.numel()
    kinds: dict[str, type[Resource]] = {**program.operands}
    if o := program.accumulated:
        kinds[o] = program.outputs[o]
    ready, flat = list[tuple[str, Any]](), dict(operands)
    for o, kind in kinds.items():
        if kind.dims:
            make = partial(_flat_and_ready, kind=kind, m=m, flat=len(lead) > 1)
            if (made := make(operands[o])) is not operands[o]:
                ready.append((o, make))
                flat[o] = made
    # The tensor core reads FP8 operands along K only.
    either = a.element_size() > 1
    gemm = partial(_rows_ready, either_major=either), partial(tma_ready, either_major=either)
    first, second = gemm[0](a), gemm[1](b)
    outputs = allocate(program, m, n, dtypes, config, "meta")
    made = [
        (o, None if o == program.accumulated else tuple(t.shape), t.stride(), t.dtype)
        for o, t in outputs.items()
    ]
    if o := program.accumulated:
        outputs[o] = flat[o]
    folds = list[tuple[str, Any]](finishes(program, m, n, config, raw=raw).items())
    if len(lead) > 1:
        folds += [
            (o, partial(_with_lead, lead=lead))
            for o, kind in program.outputs.items()
            if kind.dims[:1] == ("M",) and o != program.accumulated
        ]
    several, index = torch.cuda.device_count() > 1, a.device.index
    with torch.cuda.device(a.device) if several else nullcontext():
        bound = bind(program, first, second, flat, outputs, config)
    return CallPlan(
        bound,
        a.device,
        (lambda: torch.cuda.current_device() != index) if several else None,
        _empty(a.device),
        tuple(made),
        tuple(ready),
        gemm if first is not a or second is not b else None,
        tuple(folds),
    )


def _empty(device: torch.device) -> Callable[..., torch.Tensor]:
    import torch
    from torch._C._dynamo import guards

    # What code of torch.compile calls: 1 us of an H200's host, where torch.empty takes 2.
    if device.type == "cuda" and (fast := getattr(guards, "_empty_strided_cuda", None)):
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def finishes(
    program: Program, m: int, n: int, config: TileConfig, *, raw: bool = False
) -> dict[str, Fold]:
    """By reduction, what makes of a kernel's partials what the caller wants: those over rows are
    turned to (N, blocks), and unless `raw` all are folded to their final values. What an unfused
    form leaves of one block is final."""
    found: dict[str, Any] = {}
    for o, kind in program.reductions.items():
        half = program.graph.nodes[program.graph.outputs[o]].shape is Shape.HALF
        folded, block = m if kind.over_rows else n, kind.block(config)
        if half:
            folded, block = folded // 2, block // 2
        if not config.fused and block >= folded:
            found[o] = _single
        elif not raw:
            found[o] = _Folded(kind, folded, block)
        elif kind.over_rows:
            found[o] = _turned
    return found


def finalised(
    program: Program,
    outputs: Mapping[str, torch.Tensor],
    m: int,
    n: int,
    config: TileConfig,
) -> dict[str, torch.Tensor]:
    """What a kernel wrote, with every reduction folded to its final values."""
    folds = finishes(program, m, n, config)
    return {o: folds[o](t) if o in folds else t for o, t in outputs.items()}


def tma_ready(t: torch.Tensor, *, either_major: bool = False) -> torch.Tensor:
    """`t` (1-D or 2-D), or a contiguous copy where its strides or its address do not suit the
    kernel's loads.

    Args:
        t: The tensor.
        either_major: Whether the unit stride may be the first one (GEMM operands) or must be the
            last (epilogue operands).
    """
    import torch

    step = 16 // t.element_size()
    strides = t.stride()
    suits = strides[-1] == 1 and all(s % step == 0 and s > 0 for s in strides[:-1])
    if either_major and not suits:
        suits = strides[0] == 1 and strides[1] % step == 0 and strides[1] > 0
    if suits and t.data_ptr() % 16 == 0:
        return t
    # Not `contiguous()`: that keeps any stride of a dimension of extent 1.
    return t.clone(memory_format=torch.contiguous_format)


def _flat_and_ready(t: torch.Tensor, kind: type[Resource], m: int, flat: bool) -> torch.Tensor:
    return tma_ready(kind.flat(t, m) if flat else t)


def _rows_ready(a: torch.Tensor, either_major: bool) -> torch.Tensor:
    return tma_ready(a if a.ndim == 2 else a.flatten(0, -2), either_major=either_major)


def _with_lead(t: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    return t.reshape(*lead, *t.shape[1:])


def _single(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1)


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.mT


class _Folded:
    """Final values of partials that always lie in memory as the first ones do."""

    def __init__(self, kind: type[Reduction], folded: int, block: int) -> None:
        self._kind, self._sizes = kind, (folded, block)
        self._bound: Fold | None = None

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        if self._bound is None:
            turned = t.mT if self._kind.over_rows else t
            if not t.is_cuda:
                return self._kind.finalise(turned, *self._sizes)
            self._bound = self._kind.folding(turned, *self._sizes)
        return self._bound(t)
