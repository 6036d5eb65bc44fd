"""`fuse`: a function of tensors whose calls run by plans."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.ran import GRAPHS, Call
from coda_agent.specs.recording import quiet

if TYPE_CHECKING:
    from coda_agent.fuse.plan import Plan

_NONE = "Dynamo records no call of torch in it, or has recorded its code too often"


class Fused:
    """A function whose calls run by kernels where they pay.

    torch.compile's Dynamo records what a call does, and looks again at each call at what Python
    read on the way. The methods of a class, and os.environ, it takes as they were.

    Attributes:
        function: The function as it was.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._owner: tuple[Any, ...] = ()
        self._last, self._refused = [Call()], [""]  # which methods of all objects share
        self._compiled: dict[bool | None, Callable[..., Any]] = {}

    @property
    def why(self) -> str:
        """What of the last call was left to PyTorch, and why; "" where nothing was."""
        return self._last[0].why

    @property
    def way(self) -> str:
        """What ran the last call: "the plan", "PyTorch" or "torch.compile"."""
        return self._last[0].way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        args = *self._owner, *args
        if torch.compiler.is_dynamo_compiling():
            return self.function(*args, **kwargs)
        if why := _changed():
            self._last[0] = Call(refused=why)
            return self.function(*args, **kwargs)
        return self._run(args, kwargs)[0]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Call]:
        """The result of a call, and what ran it."""
        from coda_agent.fuse.dynamo import of_dynamo, strict

        call = self._last[0] = Call(refused=self._refused[0])
        if not call.refused:
            token = GRAPHS.set(call.graphs)
            try:
                with quiet(), strict():
                    result = self._by_dynamo(args, kwargs)(*args, **kwargs)
                if not call.graphs:
                    call.refused = _NONE
                return result, call
            except Exception as error:
                if call.graphs or not of_dynamo(error):
                    raise
                call.refused = f"Dynamo: {(str(error).splitlines() or ['no message'])[0]}"
            finally:
                GRAPHS.reset(token)
        result = self.function(*args, **kwargs)  # where it raises, the error is its own
        self._refused[0] = call.refused
        return result, call

    def _by_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The function with our backend. Sizes are symbols, but where gradients are asked for: then
        it is to be as fast as torch.compile makes it."""
        import torch

        from coda_agent.fuse.backend import coda

        dynamic = None if self._differentiated(args, kwargs) else True
        if dynamic not in self._compiled:
            self._compiled[dynamic] = torch.compile(self.function, backend=coda, dynamic=dynamic)
        return self._compiled[dynamic]

    def _differentiated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether gradients are asked for, as far as that can be seen from outside."""
        import torch
        from torch.utils._pytree import tree_leaves

        if not torch.is_grad_enabled():
            return False
        owner = getattr(self.function, "__self__", None)
        for x in tree_leaves((args, kwargs, self.function, owner)):
            if isinstance(x, torch.nn.Module) and any(p.requires_grad for p in x.parameters()):
                return True
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
        return False

    @property
    def __signature__(self) -> inspect.Signature:
        own = MethodType(self.function, *self._owner) if self._owner else self.function
        return inspect.signature(own)

    def __get__(self, instance: Any, owner: Any = None) -> Fused:
        """Of a method the one of an object."""
        if instance is None or not isinstance(self.function, FunctionType):
            return self
        bound = object.__new__(Fused)
        vars(bound).update(vars(self), _owner=(instance,))
        return bound

    def __getattr__(self, name: str) -> Any:
        """What a module has; what of it returns the module, such as `eval`, returns this."""
        if "function" not in vars(self):
            raise AttributeError(name)
        found = getattr(self.function, name)
        if not isinstance(found, MethodType):
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return self if result is self.function else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what is a module's; private names, and those of the class, are this one's own."""
        own = name.startswith("_") or name == "function"
        module = not own and hasattr(self.function, "named_parameters")
        (setattr if module else object.__setattr__)(self.function if module else self, name, value)

    def __reduce__(self) -> Any:
        """By its name where that is this, else as the function."""
        if self._owner:
            return getattr, (*self._owner, self.function.__name__)
        name = vars(self).get("__qualname__", "")
        with contextlib.suppress(AttributeError, KeyError):
            if operator.attrgetter(name)(sys.modules[self.__module__]) is self:
                return name
        return Fused, (self.function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        copied = Fused(copy.deepcopy(self.function, memo))
        copied._owner = copy.deepcopy(self._owner, memo)
        return copied

    def plan(self, *args: Any, **kwargs: Any) -> Plan | None:
        """Calls the function without gradients; its plan, or where Dynamo broke its graph the one
        with most kernels. None where no kernel ran, and `why` says why."""
        import torch

        with torch.no_grad():
            return self._run((*self._owner, *args), kwargs)[1].plan

    def forget(self) -> None:
        """Packs weights anew, of all functions: after a write that PyTorch does not count, such as
        one by way of `.data`."""
        from coda_agent.fuse.kernels import PACKED

        PACKED.clear()


def _changed() -> str:
    """Why a call means something else than what Dynamo records, where it does not see that."""
    import torch
    from torch.nn.modules.module import _has_any_global_hook

    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is on"
    return "a hook is on all modules" if _has_any_global_hook() else ""


def fuse(function: Callable[..., Any] | None = None, *examples: Any) -> Any:
    """A function that computes what `function` does, by kernels where they pay.

    Args:
        function: A function of tensors, or a module. Left out, `fuse` is a decorator.
        examples: Arguments that it is called with now, so that kernels for them are made. Those
            for other shapes are made when they are met.

    Returns:
        A `Fused`. Its `why` says what of the last call was left to PyTorch, and why. Where
        gradients are asked for, that is all: torch.compile runs it on a GPU, PyTorch elsewhere.

    Raises:
        TypeError: what is given cannot be called.
    """
    if function is None:
        return fuse
    if not callable(function):
        raise TypeError(f"fuse takes a function or a module, not {type(function).__name__}")
    fused = Fused(function)
    if examples:
        fused.plan(*examples)
    return fused


def mm(product: Callable[..., Any], sides: Sequence[Any], epilogue: Callable[..., Any]) -> Any:
    """FlexGEMM's call: `epilogue` of a product such as torch.mm of two matrices."""
    return _applied()(product, sides, epilogue)


@functools.lru_cache(maxsize=1)
def _applied() -> Fused:
    return fuse(lambda product, sides, epilogue: epilogue(product(*sides)))
