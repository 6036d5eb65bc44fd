"""Plans of earlier calls, found again. Exports take this module as it is: it needs torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

Plan = TypeVar("Plan")

# What is kept of a variant's calls: shapes, and of each what else differs.
_SHAPES, _LAYOUTS = 1024, 4
_NUMBERS = (float, int)


def differentiated(values: Sequence[Any]) -> bool:
    """Whether a call with such inputs is to be differentiated."""
    import torch

    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values)


class Recent(Generic[Plan]):
    """Plans of earlier calls, found by one check of a call's tensors in C++.

    The check is torch.compile's own: types, shapes, strides, dtypes, devices, whether a gradient is
    required, what else dispatch goes by, and that no two are the same. It takes a third of what
    `signature` and a look-up take.

    Args:
        a, b: Places of the GEMM's operands among the inputs.
        scalars: Places of inputs that may be numbers.
        count: How many inputs there are.
    """

    def __init__(self, a: int, b: int, scalars: Sequence[int], count: int) -> None:
        self._a, self._b, self._scalars = a, b, scalars
        self._others = itemgetter(*[i for i in range(count) if i not in scalars])
        self._kept: dict[Any, list[tuple[Callable[..., bool], Plan, bool]]] = {}

    def find(self, values: Sequence[Any], block_size: int | None) -> Plan | None:
        """The plan of an earlier call with such inputs."""
        tensors = self._tensors(values) if self._scalars else values
        try:
            key = block_size, len(tensors), values[self._a].shape, values[self._b].shape
        except (AttributeError, RuntimeError):  # no tensors, or nested ones
            return None
        for suits, plan, requires in self._kept.get(key, ()):
            if suits(*tensors):
                # The check does not go by the grad mode: without, such tensors have no gradient.
                if requires and differentiated(tensors):
                    return None
                return plan if _aligned(tensors) else None
        return None

    def keep(self, values: Sequence[Any], block_size: int | None, plan: Plan) -> None:
        """Keep the plan of a call whose inputs have a `signature`; not where a number is beside
        scalars in memory, or an address is no multiple of 32 bytes."""
        from torch._C._dynamo import guards

        tensors = self._tensors(values)
        make = getattr(guards, "TensorGuards", None)
        if make is None or any(type(x) in _NUMBERS for x in tensors) or not _aligned(tensors):
            return
        suits = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        key = block_size, len(tensors), values[self._a].shape, values[self._b].shape
        if len(self._kept) >= _SHAPES:
            self._kept.clear()
        requires = any(t.requires_grad for t in tensors)
        self._kept[key] = [(suits, plan, requires), *self._kept.get(key, ())][:_LAYOUTS]

    def _tensors(self, values: Sequence[Any]) -> Sequence[Any]:
        """All inputs, or those beside the scalars where these are numbers."""
        for i in self._scalars:
            if type(values[i]) not in _NUMBERS:
                return values
        return self._others(values)


def _aligned(tensors: Sequence[Any]) -> bool:
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return not addresses & 31
