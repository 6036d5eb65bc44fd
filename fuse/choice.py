"""Whether a graph runs by its plan, by torch.compile or by PyTorch: what is fastest on a GPU."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.cut import Kernel, Plan, cut
from coda_agent.fuse.imports import import_quack
from coda_agent.fuse.kernels import SOURCES, Composed, composed, remember, remembered
from coda_agent.fuse.rules import as_called
from coda_agent.fuse.run import Packed, Runner
from coda_agent.fuse.spell import written
from coda_agent.fuse.timing import Inductor, fastest
from coda_agent.fuse.trace import Graph, Value
from coda_agent.primitives.objects import fingerprint, user_cache

if TYPE_CHECKING:
    import torch


class Made(Packed):
    """A kernel as a step of a plan, with what is known of it."""

    def __init__(self, about: Composed, names: Sequence[str]) -> None:
        super().__init__(about.kernel, names)
        self.about = about


def planned(graph: Graph, *, judged: bool = False, kept: bool = True) -> Plan:
    """The plan of a graph, whose kernels are composed; `judged` and `kept` are as of `composed`."""

    def compose(text: str, inputs: Mapping[str, Value], a: str) -> Made:
        return Made(composed(text, inputs, a, judged=judged, kept=kept), list(inputs))

    return cut(graph, compose)


def chosen(
    graph: Graph, tensors: Sequence[torch.Tensor], *, judged: bool
) -> tuple[Plan, Runner | Inductor, str]:
    """The plan of a graph, what is fastest for these tensors, and its name: on a GPU it is timed,
    elsewhere it is the plan, or PyTorch where no kernel is in it."""
    called = as_called(graph)
    own, plan = Runner(called, called.values), planned(graph, judged=judged)
    run = Runner(plan.graph, plan.steps)
    if not tensors or not all(t.is_cuda for t in tensors):
        return (plan, run, "the plan") if plan.kernels else (plan, own, "PyTorch")
    if plan.kernels:
        import_quack()
    # What is no faster leaves the first one in its place.
    ways: dict[str, Callable[[], Any]] = {"torch.compile": lambda: Inductor(own)}
    ways |= {"the plan": lambda: run} if plan.kernels else {}
    ways["PyTorch"] = lambda: own
    best, way, us = _fastest(ways, tensors, plan)
    if plan.kernels and way != "the plan":
        plan.why[plan.kernels[0].members[0]] = f"by times of a call in us: {us}"
    return plan, best, way


def _fastest(
    ways: Mapping[str, Callable[[], Any]], tensors: Sequence[torch.Tensor], plan: Plan
) -> tuple[Any, str, str]:
    """The fastest of some ways to run a plan's graph, the first where none is faster; its name, and
    the times of all. Which it was is kept in the user's cache."""
    import torch

    layout = [(*t.shape, *t.stride(), str(t.dtype)) for t in tensors]
    where = torch.cuda.get_device_name(tensors[0].device), torch.__version__
    texts = [step.text if isinstance(step, Kernel) else written(step) for step in plan.steps]
    key = json.dumps([*ways, layout, where, texts, fingerprint(*SOURCES)])
    path = user_cache() / "plans" / f"fastest-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    known = remembered(path)
    if known.get("way") not in ways:
        runs = {name: made() for name, made in ways.items()}
        with torch.no_grad():
            for name in [name for name in runs if "torch.compile" in name]:
                try:
                    runs[name](tensors)
                except Exception:  # of Inductor, whatever it is: PyTorch runs the function as it is
                    del runs[name]
            calls = {name: functools.partial(run, tensors) for name, run in runs.items()}
            best, times = fastest(calls)
        us = ", ".join(f"{name} {found:.0f}" for name, found in times.items())
        known = {"way": best, "us": us}
        remember(path, known)
        return runs[best], best, us
    return ways[known["way"]](), known["way"], known["us"]
