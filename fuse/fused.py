"""`fuse`: torch.compile by the backend `coda`, and what it makes of calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from coda_agent.primitives.deferred import torch

if TYPE_CHECKING:
    from torch import nn

    from coda_agent.fuse.show import Shown

_Module = TypeVar("_Module", bound="nn.Module")
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


@overload
def fuse(function: _Module, **options: Any) -> _Module: ...


@overload
def fuse(function: Callable[_Takes, _Gives], **options: Any) -> Callable[_Takes, _Gives]: ...


@overload
def fuse(**options: Any) -> Callable[[Callable[_Takes, _Gives]], Callable[_Takes, _Gives]]: ...


def fuse(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function of tensors, or a module, with kernels that pay.

    Args:
        function: It. Left out, `fuse` is a decorator.
        options: Those of torch.compile, such as `dynamic` and `mode`.

    Returns:
        What `torch.compile(function, backend="coda", **options)` gives. Gradients come by kernels,
        too.

    Raises:
        TypeError: what is given cannot be called.
    """
    from coda_agent.fuse.backend import coda

    if function is None:
        return functools.partial(fuse, **options)
    if not callable(function):
        raise TypeError(f"fuse takes a function or a module, not {type(function).__name__}")
    return torch.compile(function, backend=coda, **options)


def explain(function: Callable[..., Any], *args: object, **kwargs: object) -> list[Shown]:
    """Call a function or module compiled anew; say how graphs were cut.

    Args:
        function: It, compiled or not; options are those that it is compiled with.
        args: What it is called with; where gradients are recorded, graphs are of both passes.
        kwargs: The same by name.

    Returns:
        An entry for each graph, with its `steps` (kernels, and calls of PyTorch with the reason),
        the cost of each call `apart`, and its `kernels` as text and as data.
    """
    from torch._inductor import config

    from coda_agent.fuse.joint import SEEN

    plain = getattr(function, "_torchdynamo_orig_callable", None)
    plain = plain or getattr(function, "_orig_mod", function)
    seen: list[Shown] = []
    ways = [fuse(plain)] if plain is function else [function, fuse(plain)]
    token = SEEN.set(seen)
    try:
        torch._dynamo.reset()
        with config.patch(force_disable_caches=True):  # or the passes do not run
            for call in ways:  # what is compiled by another backend shows nothing
                if not seen:
                    call(*args, **kwargs)
    finally:
        SEEN.reset(token)
    return seen


def mm(product: Callable[..., Any], sides: Sequence[Any], epilogue: Callable[..., Any]) -> Any:
    """Compute an epilogue of a product, in FlexGEMM's spelling.

    Args:
        product: Such as torch.mm.
        sides: What it multiplies, such as two matrices.
        epilogue: A function of the product.

    Returns:
        What `epilogue(product(*sides))` gives, by `fuse`.
    """
    inner = epilogue.func if isinstance(epilogue, functools.partial) else epilogue
    return _applied(getattr(inner, "__code__", type(inner)))(product, sides, epilogue)


@functools.lru_cache(maxsize=256)
def _applied(_: object) -> Any:
    return fuse(anew(lambda product, sides, epilogue: epilogue(product(*sides))))


def anew(function: types.FunctionType) -> types.FunctionType:
    """Copy a function with code of its own, by which torch.compile counts recompilations."""
    code, about = function.__code__.replace(), (function.__name__, function.__defaults__)
    return types.FunctionType(code, function.__globals__, *about, function.__closure__)
