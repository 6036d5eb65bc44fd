"""Whether a graph runs by its plan, by torch.compile or by PyTorch: what is fastest on a GPU."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coda_agent.agent.authors.composer.check import run_exactly
from coda_agent.fuse.imports import import_quack
from coda_agent.fuse.plan import Plan, planned
from coda_agent.fuse.timing import Inductor, fastest
from coda_agent.primitives.objects import fingerprint, user_cache, write_whole

Run = Callable[..., Sequence[torch.Tensor]]
SOURCES = "fuse", "agent/authors", "primitives", "runtime", "generated"
"""The folders that compose and run a kernel, by which a verdict holds."""
_WORSE = 2.0
"""How many times PyTorch's own error a kernel's result may have, beside a rounding."""


def chosen(function: Run, tensors: Sequence[torch.Tensor]) -> tuple[Plan, Run, str]:
    """Plan a function, and find what runs it fastest, with its name.

    On a GPU ways are timed with these tensors; elsewhere it is the plan, or PyTorch where no kernel
    is in it.

    Raises:
        Exception: whatever the function raises.
    """
    plan = planned(function, tensors)
    if plan.kernels and (fault := wrong(plan, function, tensors)):
        plan.kernels.clear()
        plan.why["numbers"] = fault
    if not tensors or not all(t.is_cuda for t in tensors):
        return (plan, plan.module, "the plan") if plan.kernels else (plan, function, "PyTorch")
    ways: dict[str, Callable[[], Run]] = {"torch.compile": lambda: Inductor(function)}
    if plan.kernels:
        ways["the plan"] = lambda: plan.module
    ways["PyTorch"] = lambda: function
    best, way, us = _fastest(ways, tensors, plan)
    if plan.kernels and way != "the plan":
        plan.why["times"] = f"of a call in us: {us}"
    return plan, best, way


def wrong(plan: Plan, function: Run, tensors: Sequence[torch.Tensor]) -> str:
    """Say what is wrong with a plan's numbers beside PyTorch's own, against float64."""
    if all(t.is_cuda for t in tensors):
        import_quack()
    with torch.no_grad():
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        exact, own, got = (
            run_exactly(plan.original, wide),
            function(*tensors),
            plan.module(*tensors),
        )
        for i, (x, y, z) in enumerate(zip(exact, own, got, strict=True)):
            if not x.is_floating_point():
                continue
            finite = x.isfinite()
            x, y, z = (v.double().where(finite, 0) for v in (x, y, z))
            scale = x.norm().clamp(min=1e-30)
            errors = [float((v - x).norm() / scale) for v in (y, z)]
            if not errors[1] <= _WORSE * errors[0] + torch.finfo(own[i].dtype).eps:
                return f"result {i} is off by {errors[1]:.1e}, and PyTorch's by {errors[0]:.1e}"
    return ""


def _fastest(
    ways: Mapping[str, Callable[[], Any]], tensors: Sequence[torch.Tensor], plan: Plan
) -> tuple[Any, str, str]:
    """The fastest of some ways to run a plan's graph, the first where none is faster; its name, and
    the times of all. Which it was is kept in the user's cache."""
    layout = [(*t.shape, *t.stride(), str(t.dtype)) for t in tensors]
    where = torch.cuda.get_device_name(tensors[0].device), torch.__version__
    digests = [region.composition.program.digest for region in plan.regions]
    parts = [*ways], layout, where, str(plan.original.graph), digests, fingerprint(*SOURCES)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    path = user_cache() / "plans" / f"fastest-{digest}.json"
    known = remembered(path)
    if known.get("way") not in ways:
        runs = {name: make() for name, make in ways.items()}
        with torch.no_grad():
            for name in [name for name in runs if "torch.compile" in name]:
                try:
                    runs[name](*tensors)
                except Exception:  # of Inductor, whatever it is: PyTorch runs the function as it is
                    del runs[name]
            calls = {name: functools.partial(run, *tensors) for name, run in runs.items()}
            best, times = fastest(calls)
        us = ", ".join(f"{name} {time:.0f}" for name, time in times.items())
        remember(path, {"way": best, "us": us})
        return runs[best], best, us
    return ways[known["way"]](), known["way"], known["us"]


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
