"""`out=` of a kernel's call: outputs that come to lie in the caller's tensors.

A kernel writes there itself where a buffer suits its stores; what does not suit, and a result that
takes a step behind the kernel, is copied there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.runtime.plan import CallPlan

if TYPE_CHECKING:
    import torch

    Out = Mapping[str, torch.Tensor]


def buffers(
    program: Program, plan: CallPlan, inputs: Sequence[Any], out: Out
) -> dict[int, torch.Tensor]:
    """By the place of an output, the tensors of `out` that the kernel can write to.

    Args:
        program: The program.
        plan: Of the call.
        inputs: As the plan takes them.
        out: By the program's outputs; other names are passed over.
    """
    found: dict[int, torch.Tensor] = {}
    for i, (o, kind) in enumerate(program.outputs.items()):
        t, made = out.get(o), plan.made[i]
        if t is None or made is None or issubclass(kind, Reduction):
            continue
        suits = t.dtype == made[2] and t.device == plan.device and t.is_contiguous()
        if not suits or t.numel() != math.prod(made[0]) or t.data_ptr() & 31:
            continue
        # What a thread stores over an operand of the same kind, it has loaded itself.
        kinds = dict(zip(inputs[2:], program.operands.values(), strict=False))
        memory = t.untyped_storage().data_ptr()
        beside = [x for x in inputs if hasattr(x, "data_ptr") and _memory(x) == memory]
        if all([kinds.get(x) is kind and _same(x, t) for x in beside]):
            found[i] = t.view(made[0])
    return found


def check(name: str, names: Sequence[str], out: Any) -> None:
    """Refuse an `out` that is no mapping from names of results to tensors.

    Args:
        name: The kernel's.
        names: Of its results.
        out: As a caller gave it.

    Raises:
        LaunchError: it is something else, has another name, or holds no dense tensor.
    """
    import torch

    if not isinstance(out, Mapping):
        expected = f"expected tensors by name, such as out={{{names[0]!r}: tensor}}"
        raise LaunchError(f"{name}: out is {type(out).__name__}, {expected}")
    for o, t in out.items():
        if o not in names:
            raise LaunchError(f"{name}: out has {o!r}, expected some of {', '.join(names)}")
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.is_nested:
            kind = getattr(t, "layout", type(t).__name__)
            raise LaunchError(f"{name}: out's {o} is {kind}, expected a dense tensor")


def placed(name: str, names: Sequence[str], results: Any, out: Out) -> Any:
    """A call's results, in the tensors of `out` where these name them.

    Args:
        name: The kernel's.
        names: Of the results, in order.
        results: A tuple, or a single one alone.
        out: By name.

    Raises:
        LaunchError: a tensor has another shape, dtype or device, or a result has a gradient. What
            was given is as it was, but for what the kernel wrote itself.
    """
    import torch

    made = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
    for o, t in out.items():
        if fault := _fault(made[o], t):
            raise LaunchError(f"{name}: out's {o} {fault}")
    for o, t in out.items():
        if torch.compiler.is_compiling() or made[o].data_ptr() != t.data_ptr():
            t.copy_(made[o])
        else:  # or what autograd saved would not know
            torch.autograd.graph.increment_version(t)
        made[o] = t
    return tuple(made.values()) if isinstance(results, tuple) else made[names[0]]


def _fault(result: torch.Tensor, t: torch.Tensor) -> str:
    if hasattr(result, "placements") or hasattr(t, "placements"):
        return "or its result is a DTensor, expected plain tensors: call it on .to_local() of all"
    if result.requires_grad:
        return "would lose the result's gradient: call it under torch.no_grad(), or without out"
    for what in ("shape", "dtype", "device"):
        got, wanted = getattr(t, what), getattr(result, what)
        if got != wanted:
            show = (lambda x: str(tuple(x))) if what == "shape" else str
            return f"has {what} {show(got)}, expected {show(wanted)}"
    return ""


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _same(x: torch.Tensor, t: torch.Tensor) -> bool:
    return x.data_ptr() == t.data_ptr() and x.is_contiguous() and x.numel() == t.numel()
