"""Times of a region's kernel beside Inductor's code of the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from coda_agent.fuse.around import Around
from coda_agent.fuse.build import tiles_of
from coda_agent.fuse.hints import may_be_symbolic
from coda_agent.fuse.kept import kept, path_of, remembered
from coda_agent.fuse.kernels import Kernel
from coda_agent.fuse.regions import Region
from coda_agent.fuse.timing import Inductor, fastest
from coda_agent.fuse.verify import distance, drawn, operands_of
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.imports import import_quack
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.program_operator import function_of, with_tiles

_ROUNDS = 9
"""How often each of a kernel's tiles is timed."""
_SAME = 1e-2
"""How far tiles' results may be from each other; some compile, and compute something else."""


def timed(place: Around, kernel: Kernel, device: torch.device) -> Kernel | str:
    """Time a kernel, with its packing at each call, on random numbers.

    Args:
        place: What it computes, and what reads it.
        kernel: It. Where nothing was measured of its tiles, a few likely ones are tried.
        device: The GPU.

    Returns:
        The kernel with its tiles and times; where it is not faster by its whole interval, a
        sentence with both times. It is kept in the user's cache by the region, the kernel, the card
        and the versions.
    """
    known = kept(_path(place, kernel, device), partial(_timed, place, kernel, device))
    return known["loss"] or replace(kernel, text=known["text"], times=known["times"])


def untimed(place: Around, kernel: Kernel, device: torch.device) -> bool:
    """Whether a kernel is still to be timed."""
    return not remembered(_path(place, kernel, device))


def _path(place: Around, kernel: Kernel, device: torch.device) -> Path:
    card = torch.cuda.get_device_name(device)
    return path_of("times", place.described, kernel.text, card)


def _timed(place: Around, kernel: Kernel, device: torch.device) -> dict[str, str]:
    import_quack()
    text = _tiled(place.region, kernel, device)
    given = drawn(place.part, place.region, device)
    inputs = [x for x in given if isinstance(x, torch.Tensor)]
    own = _AHEAD.pop(place.described, None) or _own(place, given)
    with torch.no_grad():
        ours = _compiled(place.by_kernel(text, place.packed(given)), given)
        for call in (own, ours):  # it is compiled at its first call
            call(*inputs)
        ways = {"torch.compile": lambda: own(*inputs), "the kernel": lambda: ours(*inputs)}
        best, found = fastest(ways)
    times = "in us " + ", ".join(f"{name} {time:.1f}" for name, time in found.items())
    loss = "" if best == "the kernel" else f"gains nothing: {times}"
    return {"text": text, "loss": loss, "times": times}


def compile_ahead(place: Around, device: torch.device) -> None:
    """Compile Inductor's code of what a kernel is timed beside."""
    if (text := place.described) not in _AHEAD:
        with suppress(torch.OutOfMemoryError):  # as where it is timed
            given = drawn(place.part, place.region, device)
            own = _own(place, given)
            own.compile([x for x in given if isinstance(x, torch.Tensor)])
            _AHEAD[text] = own


_AHEAD: dict[str, Inductor] = {}


def _own(place: Around, given: Sequence[object]) -> Inductor:
    return _compiled(fx.GraphModule({}, place.plain), given)


def _compiled(call: Callable[..., object], given: Sequence[object]) -> Inductor:
    """Let Inductor compile a call, as a function of its tensors."""
    others = [None if isinstance(x, torch.Tensor) else x for x in given]

    def function(*tensors: torch.Tensor) -> object:
        rest = iter(tensors)
        return call(*(next(rest) if x is None else x for x in others))

    return Inductor(function)


def _tiled(region: Region, kernel: Kernel, device: torch.device) -> str:
    """Write down a kernel with the fastest of its likely tiles."""
    from coda_agent.agent.judge.timing import interleave
    from coda_agent.agent.judge.tuner import ranked

    function = function_of(kernel.text)
    a, b, named = operands_of(region, device)
    shape = a.shape[0], function.program.columns(b), a.shape[1]
    tiles = tiles_of(kernel, shape)
    if kernel.like:
        return _written(region, kernel.text, shape, tiles)
    runs: dict[TileConfig, Callable[[int], object]] = {}
    expected: list[torch.Tensor] = []
    for config in tiles:
        try:
            results = [*function(a, b, named, config=config).values()]
        except CodaError:  # it does not compile
            continue
        expected = expected or results
        if all(distance(x, y) < _SAME for x, y in zip(results, expected, strict=True)):
            runs[config] = lambda _, config=config: function(a, b, named, config=config)
    best = [*runs]
    if len(runs) > 1:
        clock = partial(interleave, warmup=1)
        with suppress(MachineError):  # the clocks disagree
            best = [ranked(runs, _ROUNDS, clock)[0][0]]
    return _written(region, kernel.text, shape, best)


def _written(
    region: Region, text: str, shape: tuple[int, int, int], tiles: Sequence[TileConfig]
) -> str:
    """Write down a kernel with the first of the tiles, if there is any.

    Where sizes are no symbols and one launch does it, reductions stay partials: what Inductor
    computes of their values folds them.
    """
    if not tiles:
        return text
    one = tiles[0].fused and tiles[0].split_k == 1
    reduces = bool(function_of(text).program.reductions)
    return with_tiles(
        text, shape, tiles[0], partials=one and reduces and not may_be_symbolic(region.nodes)
    )
