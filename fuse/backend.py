"""Graphs of torch calls, as Dynamo records them, each run by its plan.

Dynamo guards whatever Python reads on its way to these calls, and breaks a graph where it cannot.
All tensors are arguments of a graph. Its plan is chosen by times, so there is one for each layout
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from coda_agent.fuse.choice import chosen
from coda_agent.fuse.ran import GRAPHS, NO_PRODUCT, Ran
from coda_agent.primitives.errors import CodaError, LaunchError

_SWITCHES = ("torch.amp", "torch.autograd", "torch._functorch", "torch._C._functorch")
"""Modules whose calls in a graph change what the calls after them mean."""
_LAYOUTS, _NUMBERS = 1024, 8
"""Plans that are kept of a graph, and plans of one layout with other numbers."""


def coda(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The backend for torch.compile."""
    if not _differentiated(module, inputs):
        return _Graph(module)
    if _on_gpu(inputs):
        compiled = torch._dynamo.lookup_backend("inductor")(module, inputs)
        return _noted("torch.compile", compiled)
    return _noted("PyTorch", module.forward)


def _on_gpu(inputs: list[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)


def _noted(way: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with gradients."""
    ran = Ran(None, way, f"gradients are asked for, and {way} has them", lambda args: call(*args))

    def run(*args: Any) -> Any:
        _note(ran)
        return call(*args)

    return run


def _note(ran: Ran) -> None:
    if (noted := GRAPHS.get()) is not None:
        noted.append(ran)
        # A part of the function is done. Where Dynamo fails from here on, the rest is run as it is.
        torch._dynamo.config.suppress_errors = True


class _Graph:
    """A graph without gradients."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.numbers = _take_numbers(module)
        self.refused, (self.place, self.breaks) = _refused(module), _end(module)
        self.known: dict[Any, Ran] = {}
        self.counts: Counter[Any] = Counter()

    def __call__(self, *args: Any) -> Sequence[Any]:
        given = [x.item() if i in self.numbers else x for i, x in enumerate(args)]
        layout = tuple([(x.shape, x.stride()) for x in given if isinstance(x, torch.Tensor)])
        key = layout, *[_exact(x) for x in given if not isinstance(x, torch.Tensor)]
        ran = self.known.get(key) or self.known.get(layout)
        if ran is None:
            return self._first(given, key)
        _note(ran)
        return ran.run(given)

    def _first(self, given: list[Any], key: tuple[Any, ...]) -> Sequence[Any]:
        """The first call with a layout, or with other numbers."""
        if len(self.known) >= _LAYOUTS:
            self.known.clear()
            self.counts.clear()
        self.counts[key[0]] += 1
        if self.counts[key[0]] > _NUMBERS:
            key = key[0]
            ran = self._left("its numbers change: give them as float32 tensors of no dims")
        else:
            ran = self._planned(given)
        try:
            results = ran.run(given)
        except LaunchError as error:
            ran = self._left(error.message)
            results = ran.run(given)
        self.known[key] = ran
        _note(ran)
        return results

    def _left(self, why: str) -> Ran:
        """The graph as PyTorch runs it."""
        return Ran(None, "PyTorch", why, lambda args: self.module(*args), self.breaks)

    def _planned(self, given: list[Any]) -> Ran:
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        others: dict[int, Any] = {}

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            results = self.module(*[next(rest) if _is_tensor(x) else x for x in given])
            others.update((i, x) for i, x in enumerate(results) if not _is_tensor(x))
            return [x for x in results if _is_tensor(x)]

        if self.refused:
            return self._left(self.refused)
        try:
            plan, run, way = chosen(function, tensors)
        except CodaError as error:
            return self._left(error.message)

        def call(args: Sequence[Any]) -> list[Any]:
            with torch.no_grad():
                results = [*run(*[x for x in args if _is_tensor(x)])]
            for i, x in others.items():
                results.insert(i, x)
            return results

        why = plan.reasons or NO_PRODUCT * (not plan.kernels)
        return Ran(plan, way, why, call, self.breaks)


def _differentiated(module: torch.fx.GraphModule, inputs: list[Any]) -> bool:
    """Whether a call of the graph is made where gradients are recorded, and some input has one."""
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return False
    recorded = torch.is_grad_enabled()
    for node in module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            recorded = node.args[0]
        elif node.op.startswith("call_") and recorded:
            return True
    return False


def _refused(module: torch.fx.GraphModule) -> str:
    """Why no plan of a graph would mean the same; "" where one may."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return "autocast is on"
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).strip("_")
        if isinstance(node.target, HigherOrderOperator):
            return f"it calls {name}, which is no function of tensors alone"
        place = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and place.startswith(_SWITCHES):
            return f"{name} changes what its calls mean"
        if node.target == "requires_grad_":
            return "it asks for gradients itself"
    return ""


def _end(module: torch.fx.GraphModule) -> tuple[str, str]:
    """The name of the function where Dynamo ended a graph; and, where it could not go on, a
    sentence that says so."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.user_stack:
        return "graph", ""
    at = reason.user_stack[-1]
    said = f"Dynamo's graph ends at {at.filename}:{at.lineno}, `{at.line}`"
    return at.name, said * bool(reason.graph_break)


def _exact(x: Any) -> Any:
    """A number as what tells it from others; 0.0 and -0.0 are equal, and NaN is not itself."""
    return x.hex() if isinstance(x, float) else x


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _take_numbers(module: torch.fx.GraphModule) -> set[int]:
    """Makes numbers of those inputs that are tensors only on the way into the graph, as Dynamo has
    Python's floats; their places."""
    found = set[int]()
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    for i, node in enumerate(inputs):
        users = [*node.users]
        if (
            users
            and _is_tensor(node.meta.get("example_value"))
            and all(user.target == "item" for user in users)
        ):
            for user in users:
                user.replace_all_uses_with(node)
                module.graph.erase_node(user)
            node.meta["example_value"] = None
            found.add(i)
    module.recompile()
    return found
