"""Any program as a torch operator: `coda_agent::kernel`, which graphs of torch.compile hold.

The call carries its program as text, so that a compiled graph that was cached, or exported, needs
no other file of the process that made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import ColIndex
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.call_cache import CallPlan, aligned
from coda_agent.runtime.function import UNASKED, Chooser, ProgramFunction
from coda_agent.runtime.loading import load_kernel
from coda_agent.runtime.operators import operators
from coda_agent.runtime.plan import reduced
from coda_agent.runtime.tile_choice import TileChoice, fused_by, scheduled

if TYPE_CHECKING:
    Tensors = Sequence[torch.Tensor] | None


def program_text(program: Program, stored: Mapping[str, str | None], dtype: str, like: str) -> str:
    """Write down a kernel for `coda_agent::kernel`.

    Args:
        stored: The element type of each output; none of a reduction.
        dtype: That of A and B.
        like: The folder of the accepted kernel whose tiles it takes; "" for those that a model of
            times chooses, as where there is no such folder any more.
    """
    known = {"program": program.to_dict(), "stored": dict(stored), "dtype": dtype, "like": like}
    return json.dumps(known, separators=(",", ":"))


def with_tiles(
    text: str, shape: tuple[int, int, int], config: TileConfig, *, partials: bool = False
) -> str:
    """Write down a kernel with its tiles at one shape.

    Args:
        shape: M, N and K.
        partials: Whether it leaves partials of reductions, which `folds_of` says how to fold. It is
            called at this shape alone then, by one launch.
    """
    known = json.loads(text) | {"tiles": [shape, config.to_dict()]}
    known |= {"partials": True} if partials else {}
    return json.dumps(known, separators=(",", ":"))


@lru_cache(maxsize=1024)
def folds_of(text: str) -> Mapping[str, tuple[str, float]]:
    """Say how partials that a kernel leaves are combined, and what they are multiplied by then.

    They lie in the last dimension, and are those of these outputs; none where values are final.
    """
    known, function = json.loads(text), function_of(text)
    if not function.partials:
        return {}
    m, n, k = known["tiles"][0]
    config = function.choose(m, n, k, known["dtype"], None)
    assert config
    return {
        o: kind.way(*reduced(function.program, o, m, n, config))[:2]
        for o, kind in function.program.reductions.items()
    }


@lru_cache(maxsize=1024)
def function_of(text: str) -> ProgramFunction:
    """Make what calls the kernel that a text writes down."""
    known = json.loads(text)
    program = Program.from_dict(known["program"])
    tiles = likely = TileChoice("", program)
    if known["like"] and Path(known["like"], "kernel.py").is_file():
        tiles = load_kernel(Path(known["like"])).tiles
    choose = fused_by(tiles.choose, likely.choose) if program.spread else tiles.choose
    if "tiles" in known:
        shape, config = known["tiles"]
        choose = _chosen_at(shape, config, choose)
    return ProgramFunction(
        program,
        known["stored"],
        lru_cache(maxsize=256)(choose),
        (known["dtype"],),
        tiles.refused,
        tuple(x for x, kind in program.operands.items() if kind is ColIndex),
        partials=known.get("partials", False),
    )


def _chosen_at(shape: list[int], config: dict[str, Any], elsewhere: Chooser) -> Chooser:
    tiles = TileConfig(**config)

    def choose(m: int, n: int, k: int, dtype: str, block: int | None) -> TileConfig | None:
        measured = block is None and [m, n, k] == shape
        found = tiles if measured else elsewhere(m, n, k, dtype, block)
        return found and scheduled(found, m, n)

    return choose


def _call(
    a: torch.Tensor, b: torch.Tensor, operands: Tensors, *, program: str
) -> list[torch.Tensor]:
    function, values = function_of(program), (a, b, *(operands or ()))
    if call := function.calls.find(values, UNASKED):  # the usual call, without names
        return call(values)
    return _results(function, ProgramFunction.__call__, a, b, operands)


class CallSite:
    """A place in code of torch.compile that calls a program, past PyTorch's dispatcher.

    Args:
        program: It, as the operator takes it.
        fixed: Whether the tensors have the same sizes and strides at each call. Then only their
            addresses are asked about.
    """

    def __init__(self, program: str, fixed: bool) -> None:
        self._program, self._fixed = program, fixed
        self._plan: CallPlan | None = None
        self._profiler = torch.autograd.profiler

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute the outputs of the program on a bᵀ."""
        if self._profiler._is_profiler_enabled:  # which sees the operator
            with self._profiler.record_function("coda_agent::kernel"):
                return _call(a, b, operands, program=self._program)
        values = (a, b, *operands)
        if self._plan is not None and aligned(values):
            return self._plan(values)
        results = _call(a, b, operands, program=self._program)
        if self._fixed:
            self._plan = function_of(self._program).calls.find(values, UNASKED)
        return results


def _fake(
    a: torch.Tensor, b: torch.Tensor, operands: Tensors, *, program: str
) -> list[torch.Tensor]:
    return _results(function_of(program), ProgramFunction.fake, a, b, operands)


def _results(
    function: ProgramFunction, call: Callable[..., dict], a: object, b: object, operands: Tensors
) -> list[torch.Tensor]:
    operands = operands or ()  # torch 2.13's AOTInductor gives None for a list of no tensors
    results = call(function, a, b, dict(zip(function.program.operands, operands, strict=True)))
    return [results[x] for x in function.program.outputs]


def _flops(a: Sequence[int], b: Sequence[int], *_: object, program: str, **__: object) -> int:
    halves = 2 if function_of(program).program.spread else 1
    return 2 * a[0] * a[1] * b[0] * halves


@lru_cache(maxsize=1)
def kernel_operator() -> torch._ops.OpOverloadPacket:
    """Register `coda_agent::kernel`, once; the operator."""
    from torch.utils.flop_counter import register_flop_formula

    library = operators()
    schema = "kernel(Tensor a, Tensor b, Tensor[] operands, *, str program) -> Tensor[]"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl("kernel", _call, key)
    torch.library.register_fake("coda_agent::kernel", _fake, lib=library)
    operator = torch.ops.coda_agent.kernel
    register_flop_formula(operator)(_flops)  # of what an activation budget weighs
    return operator
