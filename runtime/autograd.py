"""Gradients of kernels' operators: what a call keeps, and the backward pass.

- The gradient at the accumulator and those of the operands are one operator for all kernels,
  `coda_agent::gradients`. Those of A and B are then products of PyTorch's, in the type of A.
- A call keeps what the gradients that are asked for read, and no more: A for that of B, B for that
  of A. Where these would need the product again, calls with gradients run another operator,
  `<name>_kept`, which gives a tile more.
- Nothing is differentiated twice. FP8 outputs have no gradient, FP8 operands take none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError, ProgramError
from coda_agent.primitives.gradient import KEPT, PRODUCT, Gradient, extremum, gradient_of
from coda_agent.primitives.gradient import keeping as kept_by
from coda_agent.primitives.program import Program
from coda_agent.runtime.function import Chooser, supported
from coda_agent.runtime.gradient_pass import GradientPass
from coda_agent.runtime.operators import Variant, Variants, operators, scalars
from coda_agent.specs import Spec

_A, _B = "first of the product", "second of the product"
_VARIANTS: dict[str, Variant] = {}
"""All that have gradients, by operator and static parameters."""


def differentiable(variant: Variant) -> list[str]:
    """List the outputs that can have a gradient: not FP8, no extremum."""
    outputs = variant.function.program.outputs
    return [o for o in _wide(variant) if not extremum(outputs[o])]


def keeping(
    spec: Spec, variants: Variants, choose: Callable[[Program], Chooser]
) -> dict[tuple[str, ...], Variant]:
    """Find the variants that calls with gradients run in place of `variants`.

    They are of those whose gradients need the product, with what spares it as their last output.
    `choose` chooses the tiles of a program.
    """
    found = {}
    for binding in spec.bindings():
        variant = variants[key := tuple(binding.values())]
        function = variant.function
        if variant.updated or "float8" in function.types[0]:
            continue
        program = kept_by(function.program, differentiable(variant), _wide(variant))
        if program is not None:
            function = replace(function, program=program, choose=choose(program))
            made = Variant.of(spec, binding, function)
            found[key] = replace(made, returned=(*made.returned, len(program.outputs) - 1))
    return found


def register(op: str, spec: Spec, variants: Variants) -> None:
    """Register the gradients of the operator `coda_agent::op`, where it has any."""
    bindings = [x for x in spec.bindings() if not spec.updated(x)]
    keys = (tuple(x.values()) for x in bindings)
    known = {key: variants[key] for key in keys if key in variants}
    if not any(map(differentiable, known.values())):
        return
    _operator()
    named = {key: " ".join((op, *key)) for key in known}
    _VARIANTS.update({named[key]: variant for key, variant in known.items()})

    def setup(
        ctx: Any, inputs: Sequence[Any], keyword_only_inputs: Mapping[str, Any], output: Any
    ) -> None:
        key = tuple([keyword_only_inputs[p] for p in spec.parameters])
        ctx.which, ctx.block_size = named[key], keyword_only_inputs["block_size"]
        _keep(ctx, known[key], inputs, output if isinstance(output, tuple) else (output,))

    for overload in ("", ".Tensor")[: 1 + bool(scalars(spec))]:
        name = f"coda_agent::{op}{overload}"
        torch.library.register_autograd(name, _backward, setup_context=setup, lib=operators())


def _wide(variant: Variant) -> list[str]:
    """List the outputs that are not FP8."""
    function = variant.function
    types = {o: function.dtypes.get(o) or function.types[0] for o in function.program.outputs}
    return [o for o, dtype in types.items() if "float8" not in dtype]


@lru_cache(maxsize=1024)
def _gradient(variant: Variant, wanted: tuple[str, ...], given: tuple[str, ...]) -> Gradient:
    try:
        return Gradient.of(variant.function.program, wanted, given, _wide(variant))
    except ProgramError as error:
        message = f"{variant.name} has no gradient: {error.message}"
        raise LaunchError(message, hint=error.hint) from None


_pass = lru_cache(maxsize=1024)(GradientPass.of)


class _Saving(NamedTuple):
    """What calls of a variant keep, by the inputs that require gradients.

    Attributes:
        wanted: Places among the inputs of what has a gradient, that of A for the product's.
        names: Of the outputs.
        reads: Places of what is kept, among the inputs and then the outputs.
    """

    wanted: dict[str, int]
    names: list[str]
    reads: dict[str, int]


@lru_cache(maxsize=1024)
def _saving(variant: Variant, needed: tuple[bool, ...]) -> _Saving:
    a, b, *places = variant.places
    at = dict(zip(variant.operands, places, strict=True))
    wanted = {o: i for o, i in at.items() if needed[i]}
    wanted |= {PRODUCT: a} if needed[a] or needed[b] else {}
    names = [[*variant.function.program.outputs][i] for i in variant.returned]
    able = differentiable(variant)
    given = tuple(o for o in names if o in able and o != KEPT)
    gradient = _gradient(variant, tuple(wanted), given)
    at |= {o: len(needed) + i for i, o in enumerate(names)}
    reads = {o: at[o] for o in gradient.reads}
    reads |= {_A: a} if needed[b] or gradient.product else {}
    reads |= {_B: b} if needed[a] or gradient.product else {}
    return _Saving(wanted, names, reads)


def _keep(ctx: Any, variant: Variant, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    needed, (a, b, *_) = ctx.needs_input_grad[: len(inputs)], variant.places
    for label, i in (("A", a), ("B", b)):
        if needed[i] and inputs[i].dtype.itemsize == 1:
            raise LaunchError(
                f"{variant.name}: {label} is {inputs[i].dtype}, which has no gradient",
                hint=f"detach {label}; its gradient is that of what was rounded to it",
            )
    saving, tensors = _saving(variant, needed), (*inputs, *outputs)
    kept = [tensors[i] for i in saving.reads.values()]
    for i, value in enumerate(kept):
        if not isinstance(value, torch.Tensor):
            kept[i] = torch.full((), value, device=inputs[a].device)
    ctx.saving, ctx.product = saving, (a, b)
    ctx.types = [inputs[i].dtype for i in saving.wanted.values()]
    ctx.shapes = [getattr(x, "shape", None) for x in inputs]
    ctx.save_for_backward(*kept)
    ctx.set_materialize_grads(False)
    named = zip(saving.names, outputs, strict=True)
    if never := [t for o, t in named if o == KEPT or t.dtype.itemsize == 1]:
        ctx.mark_non_differentiable(*never)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    (a, b), shapes, results = ctx.product, ctx.shapes, [None] * len(ctx.shapes)
    names, wanted = ctx.saving.names, ctx.saving.wanted
    given = {gradient_of(o): g for o, g in zip(names, grads, strict=True) if g is not None}
    if not given:
        return tuple(results)
    kept = dict(zip(ctx.saving.reads, ctx.saved_tensors, strict=True))
    tensors = kept | given
    found = torch.ops.coda_agent.gradients(
        [*tensors.values()],
        ";".join(tensors),
        ctx.which,
        ";".join(f"{o}:{str(t)[6:]}" for o, t in zip(wanted, ctx.types, strict=True)),
        math.prod(shapes[a][:-1]),
        shapes[b][0],
        ctx.block_size,
    )
    for (o, i), gradient in zip(wanted.items(), found, strict=True):
        if o != PRODUCT:
            results[i] = gradient.reshape(shapes[i])
        else:
            if ctx.needs_input_grad[a]:
                results[a] = (gradient @ kept[_B]).reshape(shapes[a])
            if ctx.needs_input_grad[b]:
                results[b] = gradient.mT @ kept[_A].reshape(-1, shapes[b][1])
    return tuple(results)


@lru_cache(maxsize=1)
def _operator() -> None:
    """Register `coda_agent::gradients`, of which a second derivative is refused."""
    library = operators()
    library.define(
        "gradients(Tensor[] tensors, str names, str kernel, str wanted, SymInt m, SymInt n, "
        "int? block_size) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        library.impl("gradients", lambda *given: _Request(*given).computed(), key)
    name = "coda_agent::gradients"
    torch.library.register_fake(name, lambda *given: _Request(*given).fake(), lib=library)
    torch.library.register_autograd(name, _twice, setup_context=_called, lib=library)


def _called(ctx: Any, inputs: Sequence[Any], output: object) -> None:
    ctx.kernel = inputs[2].split()[0]


def _twice(ctx: Any, *_: object) -> None:
    raise LaunchError(
        f"{ctx.kernel}: its gradient cannot be differentiated again",
        hint="a penalty on gradients needs the function in PyTorch's own calls",
    )


class _Request(NamedTuple):
    """A call of `coda_agent::gradients`, as its schema has it."""

    tensors: Sequence[torch.Tensor]
    names: str
    kernel: str
    wanted: str
    m: int
    n: int
    block_size: int | None

    def read(self) -> tuple[Gradient, dict[str, torch.Tensor], list[torch.dtype]]:
        """Find the gradient, the tensors by name, and the results' types."""
        known = dict(zip(self.names.split(";"), self.tensors, strict=True))
        asked = dict(x.split(":") for x in self.wanted.split(";"))
        variant = _VARIANTS[self.kernel]
        given = tuple(o for o in variant.function.program.outputs if gradient_of(o) in known)
        types = [getattr(torch, dtype) for dtype in asked.values()]
        return _gradient(variant, tuple(asked), given), known, types

    def computed(self) -> list[torch.Tensor]:
        """Compute the gradients."""
        size, (gradient, known, types) = (self.m, self.n), self.read()
        if self.m == 0:
            return [*map(torch.zeros_like, self.fake())]
        a, b = known.pop(_A, None), known.pop(_B, None)
        product = None
        if gradient.product and a is not None and b is not None:
            a = a.reshape(self.m, -1)
            if supported(a.device):
                from coda_agent.runtime.unfused import product as multiplied

                product = multiplied(a.contiguous(), b.contiguous())
            else:
                with torch.autocast(a.device.type, enabled=False):
                    product = a.float() @ b.float().mT
        device = self.tensors[0].device
        if self.block_size is None and supported(device) and (launched := _pass(gradient)):
            here = device.index == torch.cuda.current_device()
            with nullcontext() if here else torch.cuda.device(device):
                return launched(size, known, types, product)
        call = gradient.fused if self.tensors[0].is_cuda else gradient
        return call(size, known, types, product, self.block_size)

    def fake(self) -> list[torch.Tensor]:
        """Make the gradients without data."""
        gradient, known, types = self.read()
        shapes = gradient.shapes((self.m, self.n), known)
        like = self.tensors[0]
        return [like.new_empty(x, dtype=t) for x, t in zip(shapes, types, strict=True)]
