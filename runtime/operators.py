"""Kernels as torch operators `coda_agent::<name>`, for torch.compile and CUDA graphs.

- The schema is the spec's inputs, then by keyword `str` static parameters and `int? block_size`.
  Scalars are `float`; in the overload `.Tensor` they are tensors of one element, which the kernel
  reads, so that nothing waits for the device.
- Variants that overwrite an input are an operator of their own, `<name>_`. It returns the other
  outputs.
- All checks happen inside, in the fake kernels too, which are `Variant.fake`.
- Plain `Library` registrations: one that does nothing takes 2 us of an H200's host, and under
  torch.compile 26, where a compiled `torch.mm` takes 43 (torch 2.11). `torch.library.custom_op`
  costs 18 us a call where this costs 4 (torch 2.13 on a CPU). That an operator has gradients
  (`autograd.py`) costs its calls 4 us more there, and calls past the dispatcher nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.runtime.call_cache import CallPlan, differentiated, picked
from coda_agent.runtime.function import ProgramFunction
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.runtime.call_cache import Results


@lru_cache(maxsize=1)
def operators() -> torch.library.Library:
    """Open the library of all operators."""
    return torch.library.Library("coda_agent", "FRAGMENT")  # held, or torch drops the operators


def scalars(spec: Spec) -> list[str]:
    """List inputs that are single numbers."""
    return [name for name, x in spec.inputs.items() if set(x.shape.cases.values()) == {()}]


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with its parameters chosen, of inputs in the spec's order.

    Attributes:
        operands: Names of the program's operands, in its order.
        places: Those of A, B and the operands among the inputs.
        updated: Places of outputs that overwrite an input, and that input's.
        returned: Places of the other outputs.
    """

    name: str
    function: ProgramFunction
    operands: tuple[str, ...]
    places: tuple[int, ...]
    updated: tuple[tuple[int, int], ...]
    returned: tuple[int, ...]

    @classmethod
    def of(cls, spec: Spec, binding: Mapping[str, str], function: ProgramFunction) -> Variant:
        """Make the variant of `spec` that `binding` chooses."""
        places = {x: i for i, x in enumerate(spec.inputs)}
        updated, place = spec.updated(binding), spec.in_place
        operands = {x: i for x, i in places.items() if x not in spec.gemm}
        adds = place is not None and function.program.accumulated is not None
        if place and adds:
            operands[place.output] = operands.pop(place.input)
        # Another than the program's is refused when it is called.
        order = dict.fromkeys([*function.operands, *operands])
        operands = {o: operands[o] for o in order if o in operands}
        outputs = list(function.program.outputs)
        a, b = (places[x] for x in spec.gemm)
        return cls(
            spec.name,
            replace(function, kept=adds and not updated),
            tuple(operands),
            (a, b, *operands.values()),
            tuple((outputs.index(o), places[x]) for o, x in updated.items()),
            tuple(outputs.index(o) for o in spec.outputs if o not in updated),
        )

    def __call__(self, values: Sequence[object], block_size: int | None = None) -> Results:
        """Give the outputs that overwrite no input, a single one alone.

        They are a tuple where there are several, and None where there is none; `updated` inputs
        change.

        Raises:
            LaunchError: an input requires a gradient, or does not fit.
        """
        inputs = self.inputs(values)
        if call := self.function.calls.find(inputs, (block_size, None)):
            return self.run(call, inputs, values)
        a, b, operands = self._named(values)
        results = self.function(a, b, operands, block_size=block_size)
        return self._returned(values, [results[o] for o in self.function.program.outputs])

    def run(self, call: CallPlan, inputs: Sequence[object], values: Sequence[object]) -> Any:
        """Do the same, by a resolved call with such `inputs`."""
        return self._returned(values, call(inputs))

    def fake(self, values: Sequence[object], block_size: int | None = None) -> Results:
        """Do the same for tensors without data."""
        a, b, operands = self._named(values)
        results = self.function.fake(a, b, operands, block_size=block_size)
        return self._returned(None, [results[o] for o in self.function.program.outputs])

    def inputs(self, values: Sequence[object]) -> list[Any]:
        """Give A, B and the operands, as a resolved call takes them."""
        return [values[i] for i in self.places]

    def _named(self, values: Sequence[object]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Give A, B and the operands, which require no gradient."""
        if differentiated(values):
            why = "it overwrites an input" if self.updated else "its outputs have no gradients"
            raise LaunchError(
                f"{self.name} has no backward pass, since {why}, but an input requires a gradient",
                hint="call it under torch.no_grad(), or detach the input",
            )
        a, b, *operands = self.inputs(values)
        return a, b, dict(zip(self.operands, operands, strict=True))

    def _returned(self, values: Sequence[Any] | None, results: Sequence[torch.Tensor]) -> Results:
        if values is not None and self.updated:
            self._update(values, results)
        return picked(self.returned, results)

    def _update(self, values: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        for i, place in self.updated:
            if results[i] is not values[place]:
                values[place].copy_(results[i])
            else:  # or what autograd saved would not know
                torch.autograd.graph.increment_version(values[place])


Variants = Mapping[tuple[str, ...], Variant]
"""By the values of the static parameters."""


def register(
    name: str, spec: Spec, variants: Variants
) -> dict[tuple[str, ...], torch._ops.OpOverloadPacket]:
    """Register a kernel's operators: `name`, and `name_` where inputs are overwritten."""
    ops = {}
    for mutates, suffix in enumerate(("", "_")):
        bindings = [x for x in spec.bindings() if bool(spec.updated(x)) == mutates]
        bindings = [x for x in bindings if tuple(x.values()) in variants]
        if bindings:
            some = {key: variants[key] for key in (tuple(x.values()) for x in bindings)}
            _define(name + suffix, spec, some, bindings[0])
            ops |= dict.fromkeys(some, getattr(torch.ops.coda_agent, name + suffix))
    return ops


def _define(name: str, spec: Spec, variants: Variants, defaults: dict[str, str]) -> None:
    """Register the operator of `variants`, which overwrite the same input or none."""
    updated = spec.updated(defaults)

    def body(
        call: Callable[..., Results], *args: object, block_size: int | None = None, **static: str
    ) -> Results:
        key = tuple([static.get(p, default) for p, default in defaults.items()])
        variant = variants.get(key)
        if variant is None:
            raise LaunchError(f"coda_agent::{name} has no variant {', '.join(key)}")
        return call(variant, args, block_size)

    library, numbers = operators(), scalars(spec)
    results = ", ".join(["Tensor"] * len(next(iter(variants.values())).returned))
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
