"""Calls resolved once; exports take this module: it needs torch alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from coda_agent.primitives.memory import allocator

if TYPE_CHECKING:
    import torch

    Results = torch.Tensor | tuple[torch.Tensor, ...] | None
    """What a call returns: a single output alone."""

Call = TypeVar("Call")

# Calls that are kept, some kilobytes each; whoever meets more signatures starts again. And those
# that the check in C++ finds: shapes, and of each what else differs.
_CALLS, _SHAPES, _LAYOUTS = 2048, 1024, 4
_NUMBERS = (float, int)


def differentiated(values: Sequence[object]) -> bool:
    """Tell whether a call with such inputs is to be differentiated."""
    import torch

    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values)


def traced() -> bool:
    """Tell whether calls are traced or transformed, and need an operator."""
    import torch

    known = torch._C
    return (
        torch.compiler.is_compiling()
        or known._len_torch_dispatch_stack() > 0
        or known._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def filled(values: list[Any], scalars: Sequence[int], device: torch.device) -> bool:
    """Tell whether scalars are in memory; then bring the others there."""
    import torch

    numbers = [i for i in scalars if not isinstance(values[i], torch.Tensor)]
    if len(numbers) == len(scalars):
        return False
    for i in numbers:
        values[i] = torch.full((), values[i], dtype=torch.float32, device=device)
    return True


def picked(places: Sequence[int], results: Sequence[torch.Tensor]) -> Results:
    """Pick what a call returns: a tuple, a single output, or None."""
    if len(places) == 1:
        return results[places[0]]
    return tuple([results[i] for i in places]) or None


class CallPlan:
    """How a kernel runs on tensors of one signature.

    It holds no tensor. A call takes from torch's caching allocator its outputs, copies of what TMA
    cannot load, and a workspace where parts of K meet.

    Args:
        bound: Launches on the current stream of `device`, from inputs and outputs.
        device: That of all tensors.
        made: Shape, strides and dtype of each output; None of one that is the last input, which is
            added to in place.
        ready: Places of inputs that are not passed as they are, and what makes them so.
        finish: What follows the launch, in the list of outputs; if anything.
        kept: Whether what is added to is a copy of the caller's tensor.
    """

    def __init__(
        self,
        bound: Callable[[Sequence[Any], list[torch.Tensor]], None],
        device: torch.device,
        made: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None],
        ready: Sequence[tuple[int, Callable[[Any], Any]]],
        finish: Callable[[list[torch.Tensor]], None] | None = None,
        kept: bool = False,
    ) -> None:
        import torch

        self.made, self._bound, self._device, self._kept = made, bound, device, kept
        self._ready, self._finish, self._empty = ready, finish, allocator(device)
        self._added = made.index(None) if None in made else None
        several, index = torch.cuda.device_count() > 1, device.index
        self._elsewhere = (lambda: torch.cuda.current_device() != index) if several else None

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Make the outputs; what is added to is the caller's tensor."""
        if self._elsewhere is not None and self._elsewhere():
            import torch

            with torch.cuda.device(self._device):
                return self(inputs)
        given = inputs
        if self._ready:
            inputs = list(given)
            for i, make in self._ready:
                inputs[i] = make(inputs[i])
        outputs = [inputs[-1] if made is None else self._empty(*made) for made in self.made]
        self._bound(inputs, outputs)
        if self._finish:
            self._finish(outputs)
        if self._added is not None:
            result, start = outputs[self._added], given[-1]
            if self._kept:
                outputs[self._added] = result.reshape(start.shape)
            else:
                if result.data_ptr() != start.data_ptr():
                    start.copy_(result.reshape(start.shape))
                outputs[self._added] = start
        return outputs


def launching(
    call: Callable[..., object],
    order: Sequence[Sequence[int]],
    makes: Sequence[tuple[int, Callable[[Any], Any]]],
    scheduler: tuple[object, ...],
    meet: Callable[[torch.device], tuple[torch.Tensor, ...]] | None,
) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], None]:
    """Make what launches a fused kernel on inputs and outputs.

    Args:
        call: The compiled kernel.
        order: Places of A, B, D and C, and of the epilogue's arguments, among None, the outputs,
            the inputs, and at last where parts of K meet.
        makes: Places among these that are not passed as they are, and what makes them so.
        scheduler: As quack takes it.
        meet: Makes where parts of K meet, if there are any.
    """
    gemm, epilogue = map(_getter, order)

    def enqueue(inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        values = [None, *outputs, *inputs]
        for i, make in makes:
            values[i] = make(values[i])
        if meet:
            values += meet(inputs[0].device)
        call(*gemm(values), epilogue(values), scheduler, None, None, None)

    return enqueue


def _getter(places: Sequence[int]) -> Callable[[Sequence[object]], tuple[object, ...]]:
    """Make an `itemgetter`, of one place and of none too."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


@lru_cache(maxsize=1)
def _plain() -> tuple[type, type]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def signature(values: Iterable[Any]) -> tuple[object, ...] | None:
    """Give what a launch depends on, if all values are plain.

    It is of a tensor its shape, strides, dtype, device and address mod 32, of a number nothing.
    Subclasses of tensors, and views that negate, are not plain.
    """
    tensor, parameter = _plain()
    parts: list[object] = []
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
    """

    def __init__(self, a: int, b: int, scalars: Sequence[int], count: int) -> None:
        self._a, self._b, self._scalars = a, b, scalars
        self._others = itemgetter(*[i for i in range(count) if i not in scalars])
        self._checks: dict[tuple[object, ...], list[tuple[Callable[..., bool], Call, bool]]] = {}
        self._known: dict[tuple[object, ...], Call] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, values: Sequence[Any], option: Hashable) -> Call | None:
        """Find the call with such inputs, by a check."""
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
                return call if aligned(tensors) else None
        return None

    def recall(self, values: Sequence[Any], option: Hashable) -> Call | None:
        """Find the call by signature, and next time by a check."""
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
        """Make a check, if all are tensors at multiples of 32 bytes."""
        from torch._C._dynamo import guards

        tensors = self._tensors(values)
        make = getattr(guards, "TensorGuards", None)
        if make is None or any(type(x) in _NUMBERS for x in tensors) or not aligned(tensors):
            return
        suits = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        key = option, len(tensors), values[self._a].shape, values[self._b].shape
        if len(self._checks) >= _SHAPES:
            self._checks.clear()
        requires = any(t.requires_grad for t in tensors)
        self._checks[key] = [(suits, call, requires), *self._checks.get(key, ())][:_LAYOUTS]

    def _tensors(self, values: Sequence[Any]) -> Sequence[Any]:
        """Give all inputs, or those beside scalars that are numbers."""
        for i in self._scalars:
            if type(values[i]) not in _NUMBERS:
                return values
        return self._others(values)


def aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors begin at multiples of 32 bytes."""
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return not addresses & 31
