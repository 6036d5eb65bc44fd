"""`fuse`: a function of tensors that runs by its plan."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from coda_agent.agent.plans.choice import chosen
from coda_agent.agent.plans.cut import Plan
from coda_agent.agent.plans.operation import NUMBERS, PLANNED, Planned, register
from coda_agent.agent.plans.trace import Unplanned, record
from coda_agent.generated.recent import differentiated

if TYPE_CHECKING:
    import torch


_LAYOUTS = 4
"""Calls that are kept of some shapes, which differ in what else they are found by."""


class Fused:
    """A function that runs by its plan, one for each set of its arguments' shapes and types.

    Numbers, and whatever else Python reads on the way, are those of the first call with such
    arguments. Parameters and buffers of modules are read anew at each call.

    Attributes:
        function: The function as it was.
        why: Why the last call, or part of it, was left to PyTorch; "" where nothing was.
    """

    def __init__(self, function: Callable[..., Any], *, judged: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.judged, self.why = function, judged, ""
        self._plans: dict[Any, Planned | str] = {}
        self._last: Planned | None = None
        self._recent: dict[Any, list[tuple[Callable[..., bool], Planned, bool]]] = {}
        register()

    @functools.cached_property
    def _roots(self) -> dict[str, Any]:
        """At the first call: what a function reaches may be made after it."""
        return _roots(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_flatten

        if torch.compiler.is_compiling():
            return self._compiled(args, kwargs)
        if (last := self._last) and args and not kwargs:
            tensors = [*args, *self._held(last)]
            if known := self._again(tensors, last):
                self._last, self.why = known, known.why
                return known.returned(known.run(tensors))
        if _changed():
            self.why = "autocast, or a transform of torch.func, is on"
            return self.function(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        known = self.planned(leaves, structure)
        if known is None:
            return self.function(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors += self._held(known)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            results = torch.ops.coda_agent.planned(tensors, known.number)
        else:
            with torch.no_grad():
                results = known.run(tensors)
        if len(leaves) == len(args) and all(type(t) in _plain() for t in (*leaves, *tensors)):
            self._keep(tensors, known)
        return known.returned(results)

    def _again(self, tensors: Sequence[Any], last: Planned) -> Planned | None:
        """What was planned for tensors like these, of a call that has no gradient.

        One check in C++ finds it, that of torch.compile's guards: types, shapes, strides, devices,
        and what else dispatch goes by, such as autocast.
        """
        for suits, known, requires in self._recent.get(self._key(tensors, last), ()):
            if suits(*tensors):
                # The check does not go by the grad mode: without, such tensors have no gradient.
                return None if requires and differentiated(tensors) else known
        return None

    def _keep(self, tensors: Sequence[torch.Tensor], known: Planned) -> None:
        from torch._C._dynamo import guards

        if make := getattr(guards, "TensorGuards", None):
            suits = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            requires = any(t.requires_grad for t in tensors)
            kept = self._recent.setdefault(self._key(tensors, known), [])
            kept[_LAYOUTS - 1 :] = []
            kept.insert(0, (suits, known, requires))

    def _key(self, tensors: Sequence[Any], known: Planned) -> tuple[Any, ...]:
        return known.held, *self._modes(), *[getattr(t, "shape", None) for t in tensors]

    def _held(self, known: Planned) -> list[torch.Tensor]:
        """What is taken beside the arguments, as it is now."""
        return [_held(self._roots, path) for path in known.held]

    def _modes(self) -> list[bool]:
        """Whether each module is in training."""
        return [root.training for root in self._roots.values() if hasattr(root, "training")]

    def __get__(self, instance: Any, owner: Any = None) -> Fused:
        """Of a method the one of an object, which keeps it: it reads that object's modules."""
        if instance is None or not isinstance(self.function, FunctionType):
            return self
        kept = vars(instance).setdefault("_fused", _Methods())
        if self not in kept:
            kept[self] = Fused(self.function.__get__(instance), judged=self.judged)
        return kept[self]

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        return Fused(copy.deepcopy(self.function, memo), judged=self.judged)

    def plan(self, *args: Any, **kwargs: Any) -> Plan | None:
        """The plan of such a call; None where PyTorch runs the function, and `why` says why."""
        from torch.utils._pytree import tree_flatten

        known = self.planned(*tree_flatten((args, kwargs)))
        return known and known.plan

    def forget(self) -> None:
        """Packs weights anew at the next call: after a write that PyTorch does not count, such as
        one by way of `.data`."""
        for known in self._plans.values():
            for kernel in known.plan.kernels if isinstance(known, Planned) else ():
                kernel.made.forget()  # type: ignore[attr-defined]

    def planned(self, leaves: Sequence[Any], structure: Any) -> Planned | None:
        """What calls with such arguments run; None where PyTorch runs the function."""
        import torch

        key = (
            structure,
            *(
                (x.shape, x.stride(), x.dtype, x.device, type(x) in _plain())
                if isinstance(x, torch.Tensor)
                else (type(x), x)
                for x in leaves
            ),
            *self._modes(),
        )
        try:
            known = self._plans.get(key)
        except TypeError:
            self.why = "an argument that is no tensor cannot be compared with that of a later call"
            return None
        if known is None:
            try:
                known = self._anew(leaves, structure)
            except Unplanned as error:
                known = error.message
            self._plans[key] = known
        self.why = known if isinstance(known, str) else known.why
        self._last = known if isinstance(known, Planned) else None
        return self._last

    def _anew(self, leaves: Sequence[Any], structure: Any) -> Planned:
        from torch.utils._pytree import tree_unflatten

        args, kwargs = tree_unflatten(list(leaves), structure)
        graph = record(self.function, args, kwargs, _names(self.function, args))
        paths = _paths(self._roots)
        if missing := [t for t in graph.held if id(t) not in paths]:
            shape = list(missing[0].shape)
            raise Unplanned(f"it takes a tensor {shape} that is neither an argument nor a module's")
        held = tuple(paths[id(t)] for t in graph.held)
        tensors = [x for x in leaves if hasattr(x, "is_meta")] + graph.held
        plan, own, run = chosen(graph, tensors, judged=self.judged)
        known = Planned(plan, own, run, graph.structure, held, next(NUMBERS))
        PLANNED[known.number] = known
        return known

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same as one operator, where torch.compile traces it; a call that was not planned
        before is traced as the function is."""
        import torch

        known, tensors = self._last, [*args]
        if known is None or kwargs or not all([isinstance(x, torch.Tensor) for x in args]):
            return self.function(*args, **kwargs)
        tensors += self._held(known)
        if not known.suits(tensors):
            return self.function(*args)
        results = torch.ops.coda_agent.planned(tensors, known.number)
        if known.structure.is_leaf():
            return results[0]
        return tuple(results) if known.structure.type is tuple else results


class _Methods(dict[Fused, Fused]):
    """What an object keeps of its methods; a copy of the object has none yet."""

    def __reduce__(self) -> Any:
        return _Methods, ()


def fuse(function: Callable[..., Any] | None = None, *examples: Any, judged: bool = True) -> Any:
    """A function that computes what `function` does, by kernels where they pay.

    Args:
        function: A function of tensors, or a module. Left out, `fuse` is a decorator.
        examples: Arguments to plan for now; other shapes are planned when they are met.
        judged: Whether a kernel that is new is judged before it runs. It takes a minute or two; the
            verdict is kept.

    Returns:
        A `Fused`. Its `why` says what of the last call was left to PyTorch, and why; its gradients
        are PyTorch's own, of the function computed again, and so are theirs.

    Raises:
        TypeError: what is given cannot be called.
    """
    if function is None:
        return functools.partial(fuse, judged=judged)
    if not callable(function):
        raise TypeError(f"fuse takes a function or a module, not {type(function).__name__}")
    fused = Fused(function, judged=judged)
    if examples:
        fused.plan(*examples)
    return fused


def mm(product: Callable[..., Any], sides: Sequence[Any], epilogue: Callable[..., Any]) -> Any:
    """FlexGEMM's call: `epilogue` of a product such as torch.mm of two matrices."""
    return _after(product, epilogue)(*sides)


@functools.lru_cache(maxsize=64)
def _after(product: Callable[..., Any], epilogue: Callable[..., Any]) -> Fused:
    return fuse(lambda *given: epilogue(product(*given)), judged=False)


def _changed() -> bool:
    """Whether calls mean something else here than what was recorded."""
    import torch

    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return casts or torch._C._are_functorch_transforms_active()


@functools.lru_cache(maxsize=1)
def _plain() -> tuple[type, type]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def _names(function: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Names of the arguments, as far as each is one tensor."""
    code = getattr(function, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code else []
    plain = all(hasattr(x, "is_meta") for x in args)
    return names if plain and "self" not in names else []


def _roots(function: Callable[..., Any]) -> dict[str, Any]:
    """Modules and tensors that a function reaches beside its arguments, by where they are."""
    import torch

    kinds = (torch.nn.Module, torch.Tensor)
    found: dict[str, Any] = {}
    owner = getattr(function, "__self__", None)
    for place, x in (("", function), ("", owner)):
        if isinstance(x, kinds):
            found[place] = x
    code = getattr(function, "__code__", None)
    for name, cell in zip(
        code.co_freevars if code else (), getattr(function, "__closure__", None) or (), strict=True
    ):
        if isinstance(cell.cell_contents, kinds):
            found[name] = cell.cell_contents
    for name in code.co_names if code else ():
        x = getattr(function, "__globals__", {}).get(name)
        if isinstance(x, kinds):
            found.setdefault(name, x)
    return found


def _paths(roots: Mapping[str, Any]) -> dict[int, str]:
    """Where each parameter, buffer and tensor is, by its identity."""
    import torch

    found: dict[int, str] = {}
    for name, root in roots.items():
        if isinstance(root, torch.Tensor):
            found[id(root)] = name
            continue
        for path, t in (*root.named_parameters(), *root.named_buffers()):
            found.setdefault(id(t), f"{name}:{path}")
    return found


def _held(roots: Mapping[str, Any], path: str) -> Any:
    root, _, rest = path.partition(":")
    x = roots[root]
    for part in rest.split(".") if rest else ():
        x = getattr(x, part)
    return x
