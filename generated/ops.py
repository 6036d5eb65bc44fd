"""Kernels as torch operators `coda_agent::<name>`, for torch.compile and CUDA graphs.

- The schema is the spec's inputs, then by keyword `str` static parameters and `int? block_size`.
  Scalars are `float`; in the overload `.Tensor` they are tensors of one element, which the kernel
  reads, so that nothing waits for the device.
- Variants that overwrite an input are an operator of their own, `<name>_`. It returns the other
  outputs.
- All checks happen inside, in the fake kernels too, which are `Variant.fake`.
- Plain `Library` registrations: their dispatch costs 4 us a call, `torch.library.custom_op`'s 18
  (torch 2.13 on a CPU), beside kernels of 20 us and more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with its static parameters chosen, as a function of inputs in the spec's order.

    Attributes:
        name: The kernel's.
        function: Its program.
        gemm: Places of A and B.
        operands: The program's other operands and their places.
        kept: Of them, what is added to in a program's output but must not change: it is copied.
        updated: Outputs that overwrite an input, and its place.
        returned: The other outputs.
    """

    name: str
    function: ProgramFunction
    gemm: tuple[int, int]
    operands: tuple[tuple[str, int], ...]
    kept: str | None
    updated: tuple[tuple[str, int], ...]
    returned: tuple[str, ...]

    @classmethod
    def of(cls, spec: Spec, binding: Mapping[str, str], function: ProgramFunction) -> Variant:
        """The variant of `spec` that `binding` chooses."""
        places = {x: i for i, x in enumerate(spec.inputs)}
        updated, place = spec.updated(binding), spec.in_place
        operands = {x: i for x, i in places.items() if x not in spec.gemm}
        kept = None
        if place and function.program.accumulated:
            operands[place.output] = operands.pop(place.input)
            kept = None if updated else place.output
        a, b = spec.gemm
        return cls(
            spec.name,
            function,
            (places[a], places[b]),
            tuple(operands.items()),
            kept,
            tuple((o, places[x]) for o, x in updated.items()),
            tuple(o for o in spec.outputs if o not in updated),
        )

    def __call__(
        self, values: Sequence[Any], block_size: int | None = None, key: Hashable = None
    ) -> Any:
        """The outputs that overwrite no input: a tuple, a single one alone, None if there is none.

        Args:
            values: The inputs; `updated` ones change.
            block_size: As a kernel's.
            key: The `signature` of `values`, if the caller has made it.

        Raises:
            LaunchError: an input requires a gradient, or does not fit.
        """
        import torch

        a, b = self.gemm
        operands = self.named(values)
        key = None if key is None else (block_size, key)
        plan = self.function.plans.get(key)
        if plan is not None:
            results = plan(values[a], values[b], operands)
        else:
            results = self.function(values[a], values[b], operands, block_size=block_size, key=key)
        for o, i in self.updated:
            if results[o] is not values[i]:
                values[i].copy_(results[o])
            elif key is not None:  # past the dispatcher: what autograd saved would not know
                torch.autograd.graph.increment_version(values[i])
        return self._returned(results)

    def fake(self, values: Sequence[Any], block_size: int | None = None) -> Any:
        """The same for tensors without data."""
        a, b = self.gemm
        operands = self.named(values)
        return self._returned(
            self.function.fake(values[a], values[b], operands, block_size=block_size)
        )

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The program's operands, of inputs that require no gradient."""
        import torch

        if torch.is_grad_enabled():
            for value in values:
                if getattr(value, "requires_grad", False):
                    raise LaunchError(
                        f"{self.name} has no backward pass, but an input requires a gradient",
                        hint="call it under torch.no_grad(), or detach the input",
                    )
        operands = {o: values[i] for o, i in self.operands}
        if o := self.kept:
            operands[o] = operands[o].clone(memory_format=torch.contiguous_format)
        return operands

    def _returned(self, results: Mapping[str, torch.Tensor]) -> Any:
        returned = tuple([results[o] for o in self.returned])
        return returned if len(returned) > 1 else returned[0] if returned else None


Variants = Mapping[tuple[str, ...], Variant]
"""By the values of the static parameters."""


def register(
    name: str, spec: Spec, variants: Variants
) -> dict[tuple[str, ...], torch._ops.OpOverloadPacket]:
    """Register a kernel's operators: `name`, and `name_` of the variants that overwrite an input.

    Returns:
        The operator of each variant.
    """
    import torch

    ops = {}
    for mutates, suffix in enumerate(("", "_")):
        bindings = [x for x in spec.bindings() if bool(spec.updated(x)) == mutates]
        if bindings:
            some = {key: variants[key] for key in (tuple(x.values()) for x in bindings)}
            _define(name + suffix, spec, some, bindings[0])
            ops |= dict.fromkeys(some, getattr(torch.ops.coda_agent, name + suffix))
    return ops


def _define(name: str, spec: Spec, variants: Variants, defaults: dict[str, str]) -> None:
    """Register the operator of `variants`, which overwrite the same input or none."""
    import torch

    updated = spec.updated(defaults)

    def body(
        call: Callable[..., Any], *args: Any, block_size: int | None = None, **static: str
    ) -> Any:
        key = tuple((defaults | static).values())
        if key not in variants:
            raise LaunchError(f"coda_agent::{name} has no variant {', '.join(key)}")
        return call(variants[key], args, block_size)

    library, numbers = _library(), scalars(spec)
    results = ", ".join(["Tensor"] * (len(spec.outputs) - len(updated)))
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
            library.impl(name + overload, partial(body, Variant.__call__), key)
        fake = partial(body, Variant.fake)
        torch.library.register_fake(f"coda_agent::{name}{overload}", fake, lib=library)
