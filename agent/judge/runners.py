"""Runners of a program: the compiled kernel, or the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.records import Inputs
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec

if TYPE_CHECKING:
    Dtypes = Mapping[str, torch.dtype]
    Runner = Callable[[Spec, Program, Inputs, TileConfig, Dtypes], dict[str, torch.Tensor]]


_GUARD_BYTES = 4096
_GUARD = 0xA5


def held(spec: Spec, program: Program, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Give what in-place outputs hold before a run, by output."""
    place = spec.in_place
    return {place.output: inputs[place.input]} if place and program.accumulated else {}


def run_kernel(
    spec: Spec,
    program: Program,
    inputs: Inputs,
    config: TileConfig,
    dtypes: Dtypes,
) -> dict[str, torch.Tensor]:
    """Launch the compiled kernel, and fold reductions to final values.

    Raises:
        LaunchError: it wrote outside an output.
    """
    from coda_agent.runtime.launch import Arguments, allocate, launch
    from coda_agent.runtime.plan import finalised

    a, b = (inputs[name] for name in spec.gemm)
    outputs, bands = {}, []
    for o, like in allocate(program, a.shape[0], b.shape[0], dtypes, config, "meta").items():
        size = like.numel() * like.element_size()
        after = _GUARD_BYTES + size
        room = torch.full((after + _GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=a.device)
        outputs[o] = room[_GUARD_BYTES:after].view(like.dtype).view(like.shape)
        bands += [(o, "before", room[:_GUARD_BYTES]), (o, "after", room[after:])]
    start = held(spec, program, inputs)
    for o, tensor in outputs.items():
        tensor.copy_(start[o]) if o in start else tensor.fill_(float("nan"))
    launch(Arguments(program, a, b, inputs, outputs, config))
    spilt = torch.stack([(band != _GUARD).any() for _, _, band in bands]).tolist()
    for (o, side, _), wrong in zip(bands, spilt, strict=True):
        if wrong:
            raise LaunchError(f"{program.name} writes to memory {side} its output {o}")
    return finalised(program, outputs, a.shape[0], b.shape[0], config)


def run_interpreter(
    spec: Spec,
    program: Program,
    inputs: Inputs,
    config: TileConfig,
    dtypes: Dtypes,
    *,
    raw: bool = False,
) -> dict[str, torch.Tensor]:
    """Interpret in blocks of a tile, to outputs or raw partials."""
    blocks = {"block": config.tile_n, "row_block": config.tile_m}
    return interpreted(spec, program, inputs, dtypes=dtypes, raw=raw, **blocks)


def interpreted(
    spec: Spec, program: Program, inputs: Inputs, **options: Any
) -> dict[str, torch.Tensor]:
    """Call `primitives.interpret.interpret` on a spec's inputs."""
    from coda_agent.primitives.interpret import interpret

    a, b = (inputs[name] for name in spec.gemm)
    return interpret(program, a, b, {**inputs, **held(spec, program, inputs)}, **options)


def replayed(
    spec: Spec, program: Program, inputs: Inputs, touch: Callable[[Any], Any] = lambda value: value
) -> dict[str, torch.Tensor]:
    """Return a program's outputs in float64; `touch` as of `primitives.interpret.interpret`."""
    return interpreted(spec, program, inputs, dtypes={}, compute=torch.float64, touch=touch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in one thread."""
    # For small tensors more wait for one another, and where other processes compile they took 24 s
    # of processor time for 2.6 s of work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
