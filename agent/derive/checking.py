"""What was derived, run beside autograd of the forward reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from coda_agent.agent.derive.backward import Backward
from coda_agent.agent.derive.kernel import named
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs import Spec, draw_inputs, load_spec, run_reference

Tensors = Mapping[str, torch.Tensor]
Run = Callable[[Spec, dict[str, Any]], Tensors]

TOLERANCE = 1e-9
EPSILON = 1e-6
"""Of the next layer's norm."""
_WIDTH = 48
"""Columns of the next product."""


def exactly(spec: Spec, inputs: dict[str, Any]) -> Tensors:
    """A kernel as what its reference says, in float64."""
    return run_reference(spec, inputs, exact=True)


def check(derived: Backward) -> None:
    """Compare the derived gradients with autograd's, in float64.

    Raises:
        ProgramError: one is off by more than the order of sums; names it.
    """
    spec = derived.spec
    sizes = dict(spec.check_shapes[len(spec.check_shapes) // 2])
    _, n, _ = spec.gemm_dims  # a kernel of half the columns takes multiples of 16, too
    if not spec.dims[n].only:
        unit = math.lcm(32, spec.dims[n].multiple_of)
        sizes[n] = -(-sizes[n] // unit) * unit
    found, expected = gradients(derived, sizes, spec.default_types(), torch.float64, exactly)
    for name, truth in expected.items():
        off = (found[name] - truth).abs().max() / truth.abs().max().clamp(min=1e-300)
        if not off <= TOLERANCE:
            raise ProgramError(
                f"{spec.name}: the derived gradient of {name!r} is off by {off:.1e} of autograd's "
                f"largest value at {dict(sizes)}",
                hint="the mathematics is right where autograd's is: report this",
            )


def gradients(
    derived: Backward, sizes: Mapping[str, int], types: Mapping[str, str],
    dtype: torch.dtype, run: Run, seed: int = 0,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """The derived gradients and autograd's, of one draw.

    Args:
        derived: The backward pass.
        sizes: Of the forward spec's dims.
        types: The forward spec's element types.
        dtype: What derived gradients and autograd compute in: float64, or the type that `types`
            chooses.
        run: What a kernel gives of a spec and its canonical inputs.
        seed: Of everything that is drawn.
    """
    spec, asked, exact = derived.spec, derived.asked, dtype is torch.float64
    generator = torch.Generator().manual_seed(seed + 1)

    def drawn(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype if exact else kind)

    inputs: dict[str, Any] = {}
    for name, value in draw_inputs(spec, sizes, types, seed=seed, binding=derived.binding).items():
        tensor = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if tensor.is_floating_point():
            wide = exact or tensor.ndim == 0
            tensor = (tensor.double() if wide else tensor.clone()).requires_grad_()
        inputs[name] = tensor
    outputs = run_reference(spec, inputs, binding=derived.binding, exact=exact)
    given: dict[str, Any] = {}
    losses: list[torch.Tensor] = []
    for name, value in outputs.items():
        if name not in (asked.into, asked.norm, *asked.kept):
            gradient = drawn(tuple(value.shape), value.dtype)
            losses.append((value * gradient).sum(dtype=torch.float64))
            given[f"d{name}"] = gradient
    if asked.into:
        entering = outputs[asked.into]
        columns = entering.shape[1]
        weight = drawn((_WIDTH, columns), entering.dtype) / columns**0.5
        y = entering @ weight.mT
        if asked.norm:
            r = torch.rsqrt(outputs[asked.norm] + EPSILON)
            y = (y * r[:, None]).to(y.dtype)
            given[named(spec, "r")] = r.detach()
        dy = drawn(tuple(y.shape), y.dtype)
        losses.append((y * dy).sum(dtype=torch.float64))
        given |= {named(spec, "dY"): dy, named(spec, "W"): weight}
        if asked.norm:
            z = (y * dy).sum(-1, dtype=torch.float64) / columns
            given[named(spec, "z")] = z.detach().to(given[named(spec, "r")].dtype)
    floating = {x: t for x, t in inputs.items() if t.requires_grad}
    total = torch.stack(losses).sum()
    truth = torch.autograd.grad(total, [*floating.values()], allow_unused=True)
    plain = {x: t.detach() if t.ndim else t.item() for x, t in inputs.items()}
    known = {x: t.detach() for x, t in outputs.items()}
    for name, text in derived.files.items():
        if name.endswith("_fwd"):
            tiles = {x: eval(said, {**plain}) for x, said in derived.tables.items()}
            known |= run(load_spec(Path(f"{name}.md"), text=text), plain | tiles)
    found = _backward(derived, run, exact)(**_taken(derived, {**plain, **known, **given}))
    expected = dict(zip(floating, truth, strict=True))
    return (
        {x: torch.as_tensor(found[x], dtype=torch.float64) for x in found},
        {
            x: torch.zeros_like(floating[x], dtype=torch.float64) if t is None else t.double()
            for x, t in expected.items()
            if x in found
        },
    )


def _taken(derived: Backward, known: Mapping[str, Any]) -> dict[str, Any]:
    line = derived.code[derived.code.index("def backward(") :]
    names = line[line.index("(") + 1 : line.index(")")].split(", ")
    return {name: known[name] for name in names}


def _backward(derived: Backward, run: Run, exact: bool) -> Callable[..., dict[str, Any]]:
    """`backward` with each kernel as what `run` gives."""
    space: dict[str, Any] = {}
    for name, text in derived.files.items():
        spec = load_spec(Path(f"{name}.md"), text=text)

        def call(spec: Spec = spec, **inputs: Any) -> Tensors:
            turned = dict(inputs) | {x: inputs[x].mT for x in spec.gemm[1:] if "B" in spec.turned}
            return run(spec, turned)

        space[name] = call
    code = derived.code.replace(".float()", ".double()") if exact else derived.code
    exec(compile(code, "<backward>", "exec"), space)
    return space["backward"]
