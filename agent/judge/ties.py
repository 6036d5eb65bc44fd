"""Cases on the jumps of a function: halves that are rounded, thresholds that are met, signs of 0.

Elsewhere a difference at a jump is excused, since errors of arithmetic decide to which side a value
falls. Here there are none: rows of A pick single elements of B, and these, like all other inputs,
are halves of whole numbers. Elements count where float32 and float64 give the same number, for the
reference as for the program. So a difference is one of the functions themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.runners import interpreted
from coda_agent.agent.judge.structures import base_shape
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.program import Program

if TYPE_CHECKING:
    import torch

    from coda_agent.specs import Spec

_DRAWS = 3
_NEAR = 1e-9


def tie_draws(
    spec: Spec, program: Program, binding: Mapping[str, str], seed: int
) -> Iterator[dict[str, Any]]:
    """Draw inputs of halves; none for a program with constants that float32 rounds."""
    import torch

    from coda_agent.specs import draw_inputs

    constants = [n.value for n in program.graph.nodes if n.op == "const"]
    if not all(map(_short, constants)):
        return
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor(sorted(_values(program.graph)), dtype=torch.float64)
    a, b = spec.gemm
    for i in range(_DRAWS):
        inputs = draw_inputs(
            spec, base_shape(spec), spec.default_types(), seed=seed + i, binding=binding
        )
        for x, value in inputs.items():
            tensor, value = spec.inputs[x], torch.as_tensor(value).double()
            if tensor.draw.kind == "integers":
                continue
            if x == a:
                index = torch.randint(value.shape[1], (len(value), 1), generator=generator)
                inputs[x] = torch.zeros_like(value).scatter_(1, index, 1.0)
                continue
            if tensor.domain is None and (x == b or value.ndim == 2):
                place = torch.randint(len(pool), value.shape, generator=generator)
                drawn = pool[place]
            else:
                low, high = tensor.domain or (0.0, math.inf)
                powers = [p for p in (0.5, 1.0, 2.0) if low <= p <= high] or [low]
                place = torch.randint(len(powers), value.shape, generator=generator)
                drawn = torch.tensor(powers, dtype=torch.float64)[place]
            inputs[x] = drawn if drawn.ndim else float(drawn)
        yield inputs


def differing(
    spec: Spec, program: Program, binding: Mapping[str, str], inputs: Mapping[str, Any], o: str,
    out: torch.Tensor, truth: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Find the elements of an output that are exact in both and not equal."""
    import torch

    from coda_agent.specs import run_reference

    wide = run_reference(spec, inputs, binding=binding, exact=True, wide=torch.float32)[o]
    dtypes = dict.fromkeys(program.outputs, torch.float32)
    single = interpreted(spec, program, dict(inputs), dtypes=dtypes)[o]
    exact = (wide.double() == truth) & (single.double() == out) & truth.isfinite()
    return exact & ~((out - truth).abs() <= _NEAR * truth.abs())


def _short(value: float) -> bool:
    """Whether a number has at most eight bits, as a person means it exactly."""
    mantissa, _ = math.frexp(value)
    return math.isfinite(value) and mantissa * 256 == round(mantissa * 256)


def _values(graph: Graph) -> set[float]:
    """List halves around 0, around the ends of 8 bits, and around the constants of a graph."""
    centres = {0.0, 127.0, -128.0} | {n.value for n in graph.nodes if n.op == "const"}
    both = {sign * c for c in centres for sign in (1, -1) if abs(c) < 2**15}
    return {c + i / 2 for c in both for i in range(-9, 10)}
