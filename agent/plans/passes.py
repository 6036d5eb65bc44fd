"""The forward and the backward pass of a function, each by a plan of its own.

AOTAutograd records both at once, in ATen's calls, and parts them. What is cheap is computed again
in the backward pass and not kept: a normalised matrix that is kept would be a result of the forward
pass, and a norm's factor could not be carried past the next product then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.agent.plans.choice import chosen
from coda_agent.agent.plans.run import Runner
from coda_agent.agent.plans.trace import Unplanned, plain, record
from coda_agent.agent.plans.training import for_training

if TYPE_CHECKING:
    import torch


def by_passes(function: Callable[..., Any], *, judged: bool = True) -> Callable[..., Any]:
    """A function of tensors that computes what `function` does, and its gradients, by plans.

    Args:
        function: Takes tensors, returns a tensor or several. Rows in one dim are planned best: what
            AOTAutograd records of several names their extents in numbers, and kernels take any.
        judged: As of `fuse`.

    Returns:
        It plans anew for other shapes, layouts, types, and tensors that require gradients.
    """
    import torch
    import torch._functorch.config as config
    from functorch.compile import aot_function, min_cut_rematerialization_partition
    from torch._decomp import get_decompositions

    aten, made = torch.ops.aten, dict[Any, Callable[..., Any]]()
    spread: Any = get_decompositions([
        aten.silu_backward, aten.gelu_backward, aten.native_layer_norm,
        aten.native_layer_norm_backward, aten.threshold_backward, aten.tanh_backward,
        aten.slice_backward, aten.select_backward,
    ])  # fmt: skip

    def call(*tensors: torch.Tensor) -> Any:
        wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        key = *((t.shape, t.stride(), t.dtype, t.device) for t in tensors), *wanted
        if key in made:
            return made[key](*tensors)
        compiled: Any = lambda module, _: _Pass(module, judged=judged)
        made[key] = aot_function(
            _for_training(function, tensors), compiled, compiled,
            min_cut_rematerialization_partition, spread,
        )  # fmt: skip
        with config.patch(aggressive_recomputation=True):
            return made[key](*tensors)

    return call


def _for_training(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """The function by what `for_training` makes of its graph."""
    from torch.utils._pytree import tree_unflatten

    try:
        graph = record(function, tuple(tensors), {})
    except Unplanned:
        return function
    changed = for_training(graph)
    run = Runner(changed, changed.values)
    return lambda *given: tree_unflatten(run([*given, *graph.held]), graph.structure)


class _Pass:
    """One pass, planned at its first call."""

    _boxed_call = True  # AOTAutograd's word for taking a list that may be emptied

    def __init__(self, module: Any, *, judged: bool) -> None:
        self.module, self.judged = module, judged
        self.run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]] = self._first

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        import torch

        given = [t.detach() for t in args]
        args.clear()
        with torch.no_grad():
            return self.run(given)

    def _first(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        from torch.utils._python_dispatch import _disable_current_modes

        # AOTAutograd watches a first call by a mode, in which ways could be neither timed nor
        # compiled.
        with _disable_current_modes():
            self.run = self._planned(given)
            return self.run(given)

    def _planned(self, given: Sequence[torch.Tensor]) -> Any:
        from torch.fx import Interpreter

        class Spelled(Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                return _spelled(target, args, kwargs)(*args, **kwargs)

        places, count = list[int](), 0
        interpreter = Spelled(self.module)

        def planned_pass(*tensors: torch.Tensor) -> list[torch.Tensor]:
            nonlocal places, count
            results = interpreter.run(*tensors)
            places, count = [i for i, x in enumerate(results) if x is not None], len(results)
            return [results[i] for i in places]

        names = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        try:
            graph = record(planned_pass, tuple(given), {}, names)
        except Unplanned:
            return lambda tensors: self.module(*tensors)
        held = graph.held
        _, _, run = chosen(graph, [*given, *held], judged=self.judged, training=True)

        def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            found: list[torch.Tensor | None] = [None] * count
            for i, x in zip(places, run([*tensors, *held]), strict=True):
                found[i] = x
            return found

        return call


def _spelled(target: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """One of ATen's calls as that of torch which plans know; what has none stays."""
    import torch
    import torch.nn.functional as F

    name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
    if name == "_to_copy" and kwargs.get("device", args[0].device) == args[0].device:
        return lambda x, **kept: x.to(kept.get("dtype", x.dtype))
    if name == "slice":
        return _sliced
    if name == "addmm" and not kwargs and args[0].ndim == 1:
        return lambda bias, a, b: F.linear(a, b.t(), bias)  # whose bias a rule can part from it
    if kwargs and name in ("add", "sub"):
        return getattr(torch, name)
    signs = {"mul": operator.mul, "add": operator.add, "sub": operator.sub, "div": operator.truediv}
    methods = {"expand": "expand", "t": "t"}
    if name in ("view", "_unsafe_view"):
        return _viewed
    if name in signs and len(args) == 2:
        return signs[name]
    if name in methods:
        return getattr(torch.Tensor, methods[name])
    if name == "detach":
        return lambda x: x
    return F.silu if name == "silu" else getattr(torch, name, target) if name else target


def _viewed(x: Any, sizes: Sequence[int]) -> Any:
    """A view by what it does to dims, where that names no number of rows or columns."""
    given, sizes = [plain(extent) for extent in x.shape], [*sizes]
    if given[:-2] == sizes[:-1]:
        return x.flatten(-2)
    if given[:-1] == sizes[:-2]:
        return x.unflatten(-1, (-1, sizes[-1]))
    if len(given) > 2 and len(sizes) == 2 and given[-1] == sizes[-1]:
        return x.flatten(0, -2)
    return x.view(sizes)


def _sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1):
    return x[(*[slice(None)] * (dim % x.ndim), slice(start, end, step))]
