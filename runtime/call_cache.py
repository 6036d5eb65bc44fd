"""Calls resolved once, found again. Exports take this module as it is: it needs torch alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

Call = TypeVar("Call")

# Calls that are kept, some kilobytes each; whoever meets more signatures starts again. And those
# that the check in C++ finds: shapes, and of each what else differs.
_CALLS, _SHAPES, _LAYOUTS = 2048, 1024, 4
_NUMBERS = (float, int)


def differentiated(values: Sequence[Any]) -> bool:
    """Whether a call with such inputs is to be differentiated."""
    import torch

    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values)


@lru_cache(maxsize=1)
def _plain() -> tuple[type, type]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def signature(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """What a launch depends on: of a tensor its shape, strides, dtype, device and address mod 32,
    of a number nothing. None where a value is neither, a subclass of a tensor, or a view that
    negates."""
    tensor, parameter = _plain()
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is tensor or kind is parameter:
            if value.is_neg():
                return None
            offset = value.data_ptr() & 31
            parts += (value.shape, value.stride(), value.dtype, value.device, offset)
        elif kind is float or kind is int:
            parts.append(None)
        else:
            return None
    return tuple(parts)


class Calls(Generic[Call]):
    """The resolved calls of a function, one for each signature and option.

    `find` knows the usual ones by one check of the tensors in C++, torch.compile's own: types,
    shapes, strides, dtypes, devices, whether a gradient is required, what else dispatch goes by,
    and that no two are the same. It takes a third of what `signature` and a look-up take, by which
    `recall` knows the others.

    Args:
        a, b: Places of the GEMM's operands among the inputs.
        scalars: Places of inputs that may be numbers.
        count: How many inputs there are.
    """

    def __init__(self, a: int, b: int, scalars: Sequence[int], count: int) -> None:
        self._a, self._b, self._scalars = a, b, scalars
        self._others = itemgetter(*[i for i in range(count) if i not in scalars])
        self._checks: dict[Any, list[tuple[Callable[..., bool], Call, bool]]] = {}
        self._known: dict[Any, Call] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, values: Sequence[Any], option: Hashable) -> Call | None:
        """The call with such inputs, if a check finds it."""
        tensors = self._tensors(values) if self._scalars else values
        try:
            key = option, len(tensors), values[self._a].shape, values[self._b].shape
        except (AttributeError, RuntimeError):  # no tensors, or nested ones
            return None
        for suits, call, requires in self._checks.get(key, ()):
            if suits(*tensors):
                # The check does not go by the grad mode: without, such tensors have no gradient.
                if requires and differentiated(tensors):
                    return None
                return call if _aligned(tensors) else None
        return None

    def recall(self, values: Sequence[Any], option: Hashable) -> Call | None:
        """The call with inputs of their signature; `find` finds it next time."""
        parts = signature(values)
        call = None if parts is None else self._known.get((option, parts))
        if call is not None:
            self._check(values, option, call)
        return call

    def keep(self, values: Sequence[Any], option: Hashable, call: Call) -> None:
        """Keep the call with such inputs, if they have a signature."""
        if (parts := signature(values)) is not None:
            if len(self._known) >= _CALLS:
                self._known.clear()
            self._known[option, parts] = call
            self._check(values, option, call)

    def _check(self, values: Sequence[Any], option: Hashable, call: Call) -> None:
        """Make a check; none where a number is beside scalars in memory, or an address is no
        multiple of 32 bytes."""
        from torch._C._dynamo import guards

        tensors = self._tensors(values)
        make = getattr(guards, "TensorGuards", None)
        if make is None or any(type(x) in _NUMBERS for x in tensors) or not _aligned(tensors):
            return
        suits = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        key = option, len(tensors), values[self._a].shape, values[self._b].shape
        if len(self._checks) >= _SHAPES:
            self._checks.clear()
        requires = any(t.requires_grad for t in tensors)
        self._checks[key] = [(suits, call, requires), *self._checks.get(key, ())][:_LAYOUTS]

    def _tensors(self, values: Sequence[Any]) -> Sequence[Any]:
        """All inputs, or those beside the scalars where these are numbers."""
        for i in self._scalars:
            if type(values[i]) not in _NUMBERS:
                return values
        return self._others(values)


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return not addresses & 31
