"""What PyTorch moves for the gradients of single calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from coda_agent.agent.plans.trace import Value, mapped, plain
from coda_agent.primitives.inspect import datasheet

_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1}
"""ATen's products, and which argument is the first operand."""


class Moved(NamedTuple):
    """Bytes, launches, and the least seconds that an H200 takes."""

    bytes: int = 0
    launches: int = 0
    seconds: float = 0.0

    def less(self, other: Moved) -> Moved:
        return Moved(
            self.bytes - other.bytes, self.launches - other.launches, self.seconds - other.seconds
        )


def moved(bytes: int, flops: int = 0, launches: int = 1) -> Moved:
    """What one call moves, at the roofline of 16-bit products."""
    peak = datasheet(2)
    return Moved(bytes, launches, max(bytes / peak.bytes_s, flops / peak.flops_s))


def total(parts: Iterable[Moved]) -> Moved:
    """All of them together."""
    each = [*parts]
    bytes, launches = sum(x.bytes for x in each), sum(x.launches for x in each)
    return Moved(bytes, launches, sum(x.seconds for x in each))


def pulled_back(calls: Iterable[Value], constant: frozenset[str]) -> dict[Value, Moved]:
    """What each call's gradients move, where each of ATen's calls is one by itself.

    Args:
        calls: In order.
        constant: Inputs that have no gradient.
    """
    found: dict[Value, Moved] = {}
    varies: dict[Value, bool] = {}

    def wanted(x: Value) -> bool:
        if x.func is None:
            return x.name not in constant and x.tensor and x.meta.is_floating_point()
        return varies.get(x, False)

    for call in calls:
        varies[call] = any(map(wanted, call.inputs)) and not (
            call.tensor and not call.meta.is_floating_point()
        )
        if varies[call] and call.tensor and not call.view:
            found[call] = _gradients(call, {x for x in call.inputs if wanted(x)})
    return found


def _gradients(call: Value, wanted: set[Value]) -> Moved:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    parts: list[Moved] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if not any(r.alias_info for r in func._schema.returns):
                both = (tree_leaves((args, kwargs)), tree_leaves(result))
                tensors = [t for side in both for t in side if isinstance(t, torch.Tensor)]
                at = _PRODUCTS.get(func.overloadpacket.__name__)
                inner = 0 if at is None else args[at].shape[-1]
                flops = 2 * result.numel() * inner if inner else 0
                parts.append(moved(sum(t.numel() * t.itemsize for t in tensors), flops))
            return result

    made: dict[Value, torch.Tensor] = {}

    def entered(x: Any) -> Any:
        if not isinstance(x, Value):
            return plain(x)
        if x not in made:
            like = torch.empty(x.shape, dtype=x.meta.dtype, device="meta")
            made[x] = like.requires_grad_(x in wanted)
        return made[x]

    with torch.enable_grad():
        args, kwargs = mapped((call.args, call.kwargs), entered)
        result = call.func(*args, **kwargs)  # type: ignore[misc]
        leaves = [t for t in made.values() if t.requires_grad]
        gradient = torch.empty_like(result)
        with Counted():
            torch.autograd.grad(result, leaves, gradient, allow_unused=True)
    return total(parts)


def product(m: int, n: int, k: int, more: int = 0) -> Moved:
    """(m, k) times (k, n) in 16 bits, with so many bytes more."""
    return moved(2 * (m * k + k * n + m * n) + more, 2 * m * n * k)
