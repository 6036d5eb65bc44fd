"""Kernels as torch operators `coda_agent::<name>`, for torch.compile and CUDA graphs.

- The schema is the spec's inputs, then by keyword `str` static parameters and `int? block_size`.
  Scalars are `float`; in the overload `.Tensor` they are tensors of one element, which the kernel
  reads, so that nothing waits for the device.
- Variants that overwrite an input are an operator of their own, `<name>_`. It returns the other
  outputs.
- All checks happen inside, in the fake kernels too, which are `ProgramFunction.fake`.
- Plain `Library` registrations: their dispatch costs 4 us a call, `torch.library.custom_op`'s 18
  (torch 2.13 on a CPU), beside kernels of 20 us and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.function import ProgramFunction
from coda_agent.specs import Spec

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    import torch

    return torch.library.Library("coda_agent", "FRAGMENT")  # held, or torch drops the operators


def scalars(spec: Spec) -> list[str]:
    """Inputs that are single numbers."""
    return [name for name, x in spec.inputs.items() if set(x.shape.cases.values()) == {()}]


def register(
    name: str, spec: Spec, functions: Mapping[str, ProgramFunction]
) -> dict[tuple[str, ...], torch._ops.OpOverloadPacket]:
    """Register a kernel's operators: `name`, and `name_` of the variants that overwrite an input.

    Args:
        name: The first one's name.
        spec: The kernel's spec.
        functions: Its programs by variant.

    Returns:
        The operator of each choice of the static parameters.
    """
    import torch

    ops = {}
    for mutates, suffix in enumerate(("", "_")):
        bindings = [x for x in spec.bindings() if bool(spec.updated(x)) == mutates]
        if bindings:
            _define(name + suffix, spec, functions, bindings)
            op = getattr(torch.ops.coda_agent, name + suffix)
            ops |= {tuple(x.values()): op for x in bindings}
    return ops


def _define(
    name: str,
    spec: Spec,
    functions: Mapping[str, ProgramFunction],
    bindings: list[dict[str, str]],
) -> None:
    """Register the operator of `bindings`, which overwrite the same input or none; the first is the
    default."""
    import torch

    (a, b), place, defaults = spec.gemm, spec.in_place, bindings[0]
    updated = spec.updated(defaults)
    returned = [o for o in spec.outputs if o not in updated]
    variants = {tuple(x.values()): functions[spec.variant(x)] for x in bindings}

    def body(
        call: Callable[..., Any], *args: Any, block_size: int | None = None, **static: str
    ) -> Any:
        values = tuple((defaults | static).values())
        if values not in variants:
            raise LaunchError(f"coda_agent::{name} has no variant {', '.join(values)}")
        given = dict(zip(spec.inputs, args, strict=True))
        if torch.is_grad_enabled() and any(getattr(v, "requires_grad", False) for v in args):
            raise LaunchError(
                f"{spec.name} has no backward pass, but an input requires a gradient",
                hint="call it under torch.no_grad(), or detach the input",
            )
        operands = {x: v for x, v in given.items() if x not in (a, b)}
        if place and variants[values].program.accumulated:
            start = operands.pop(place.input)
            if not updated:
                start = start.clone(memory_format=torch.contiguous_format)
            operands[place.output] = start
        results = call(variants[values], given[a], given[b], operands, block_size=block_size)
        for o, x in updated.items():
            if results[o] is not given[x]:
                given[x].copy_(results[o])
        kept = tuple(results[o] for o in returned)
        return kept if len(kept) > 1 else kept[0] if kept else None

    library, numbers = _library(), scalars(spec)
    results = ", ".join(["Tensor"] * len(returned))
    keywords = ", ".join([*(f'str {p}="{v}"' for p, v in defaults.items()), "int? block_size=None"])
    for overload, scalar in ("", "float"), (".Tensor", "Tensor"):
        if overload and not numbers:
            break
        types = dict.fromkeys(spec.inputs, "Tensor") | dict.fromkeys(numbers, scalar)
        types |= dict.fromkeys(updated.values(), "Tensor(a!)")
        arguments = ", ".join(f"{kind} {x}" for x, kind in types.items())
        schema = f"{name}{overload}({arguments}, *, {keywords}) -> ({results})"
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(name + overload, partial(body, ProgramFunction.__call__), key)
        fake = partial(body, ProgramFunction.fake)
        torch.library.register_fake(f"coda_agent::{name}{overload}", fake, lib=library)
