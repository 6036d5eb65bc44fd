"""Whether a region's kernel pays: it is timed beside what Inductor makes of the same calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from coda_agent.fuse.regions import Region, described
from coda_agent.fuse.timing import Inductor, fastest
from coda_agent.fuse.verify import drawn, with_kernel
from coda_agent.primitives.objects import fingerprint, user_cache, write_whole

SOURCES = "fuse", "agent/authors", "primitives", "runtime", "generated"
"""The folders that compose and run a kernel, by which a verdict holds."""


def loss(region: Region, text: str, device: torch.device) -> str:
    """Time a kernel, with the packing that it needs, on numbers drawn at random.

    Args:
        region: What it computes.
        text: The kernel, as the operator takes it.
        device: The GPU.

    Returns:
        A sentence with both times where the kernel is not faster by its whole interval; "" where it
        is. It is kept in the user's cache by the region, the kernel, the card and the versions.
    """
    where = torch.cuda.get_device_name(device), torch.__version__
    parts = described(region.part), text, where, fingerprint(*SOURCES)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    path = user_cache() / "regions" / f"{digest}.json"
    known = remembered(path)
    if "loss" not in known:
        known = {"loss": _timed(region, text, device)}
        remember(path, known)
    return known["loss"]


def _timed(region: Region, text: str, device: torch.device) -> str:
    given = drawn(region, device)
    inputs = [x for x in given if isinstance(x, torch.Tensor)]

    def compiled(call: Callable[..., Any]) -> Inductor:
        def function(*tensors: torch.Tensor) -> Any:
            rest = iter(tensors)
            return call(*(next(rest) if isinstance(x, torch.Tensor) else x for x in given))

        return Inductor(function)

    own, ours = compiled(fx.GraphModule({}, region.part)), compiled(with_kernel(region, text))
    with torch.no_grad():
        for call in (own, ours):  # it is compiled at its first call
            call(*inputs)
        ways = {"torch.compile": lambda: own(*inputs), "the kernel": lambda: ours(*inputs)}
        best, times = fastest(ways)
    if best == "the kernel":
        return ""
    us = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    return f"gains nothing: in us {us}"


def remembered(path: Path) -> dict[str, str]:
    """What was kept in a file; nothing where there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def remember(path: Path, known: Mapping[str, str]) -> None:
    """Keep it in a file for `remembered`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(known))
