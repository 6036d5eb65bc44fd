"""What a composed program computes beside its graph, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_map

from coda_agent.agent.authors.composer.calls import CASTS, name_of
from coda_agent.agent.authors.composer.problem import Problem, Refusal
from coda_agent.agent.authors.composer.retrace import MEANINGS
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.structures import base_shape
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.placed import philox
from coda_agent.primitives.program import Program
from coda_agent.primitives.rounding import rounded
from coda_agent.specs import Spec, draw_inputs, run_reference

# Both sides are exact but for the order of float64 sums.
TOLERANCE = 1e-9


def check_numbers(
    problem: Problem, program: Program, parts: Mapping[str, tuple[str, int, int]]
) -> None:
    """Compare a program with its graph; `parts` as of `Rewritten`.

    Raises:
        Refusal: an output differs; names it.
    """
    for positive in (False, True):
        inputs = _drawn(problem, positive=positive)
        expected = run_exactly(problem.module, inputs.values(), problem.rounds)
        straight = {x: problem.inputs[x].straight(value) for x, value in inputs.items()}
        a, b = (straight[x] for x in problem.gemm)
        operands = {x: straight[x] for x in program.operands}
        dtypes = dict.fromkeys(program.outputs, torch.float64)
        got = interpret(program, a, b, operands, dtypes=dtypes, compute=torch.float64)
        for name, slot in problem.outputs.items():
            value = slot.straight(expected[name])
            of, start, stop = parts.get(name, (name, 0, None))
            result = got[of][:, start:stop] if name in parts else got[of]
            if problem.narrow(dtype := getattr(torch, slot.dtype)):  # the store rounds
                result, value = rounded(result, dtype), rounded(value, dtype)
            off = difference(result, value)
            if not off <= TOLERANCE:
                message = f"output {name!r} would be off by {off:.1e} of its largest value"
                raise Refusal(message, output=name)


def run_exactly(
    module: fx.GraphModule,
    inputs: Iterable[torch.Tensor],
    rounds: Callable[[fx.Node], bool] = lambda _: False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Run a graph in another type, float64, rounding at some casts alone."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    last = {x: node for node in module.graph.nodes for x in node.all_input_nodes}
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(given)
            case "get_attr":
                values[node] = getattr(module, node.target)
            case "output":
                results: Any = torch.fx.map_arg(node.args, values.__getitem__)
                return results[0]
            case _:
                values[node] = call_exactly(node, values, rounds, dtype)
        for x in node.all_input_nodes:
            if last[x] is node:
                del values[x]
    return None


def call_exactly(
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    rounds: Callable[[fx.Node], bool] = lambda _: False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Call in float64, or another type, what a node calls."""
    found: Any = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = found
    target = cast("Callable[..., Any]", node.target)
    target = MEANINGS.get(target, target)
    own = getattr(node.meta.get("val"), "dtype", None)
    if name_of(node) in CASTS and own is not None and own.is_floating_point:
        x = args[0]
        return (x.to(own) if rounds(node) else x).to(dtype)
    if name_of(node) == "philox":  # the operator is there to be recorded
        return philox(*args[1:])
    wide = lambda x: dtype if isinstance(x, torch.dtype) and x.is_floating_point else x
    found = target(*tree_map(wide, args), **tree_map(wide, kwargs))
    if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
        return found.to(dtype)  # a constant, or what whole numbers make
    return found


def _drawn(problem: Problem, *, positive: bool) -> dict[str, torch.Tensor]:
    """Inputs in order: about 1 in size, or in [0.1, 1)."""
    generator = torch.Generator().manual_seed(int(positive))
    inputs: dict[str, torch.Tensor] = {}
    places = [n for n in problem.module.graph.nodes if n.op == "placeholder"]
    for name, node in zip(problem.inputs, places, strict=True):
        value = node.meta["val"]
        if not value.is_floating_point():
            high = 2 if value.dtype is torch.bool else problem.extents["N"]
            x = torch.randint(high, value.shape, generator=generator)
            inputs[name] = x.to(value.dtype)
            continue
        x = torch.empty(value.shape, dtype=torch.float64)
        x = x.uniform_(0.1, 1, generator=generator) if positive else x.normal_(generator=generator)
        scale = problem.extents["K"] ** -0.5 if name == problem.gemm[1] else 1.0
        inputs[name] = x * scale
    return inputs


def differences(spec: Spec, program: Program, binding: Mapping[str, str]) -> dict[str, float]:
    """Measure how far a program is off a spec's reference, by output."""
    types, sizes = spec.default_types(), base_shape(spec)
    inputs = draw_inputs(spec, sizes, types, seed=0, binding=binding)
    got = replayed(spec, program, inputs)
    due = run_reference(spec, inputs, binding=binding, exact=True)
    return {name: difference(got[name], due[name]) for name in program.outputs}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Measure the largest difference, as a share of the largest expected number."""
    got, expected = (x.double() if x.dtype is torch.bool else x for x in (got, expected))
    finite = expected.isfinite()
    if not (finite | (got == expected) | (got.isnan() & expected.isnan())).all():
        return math.inf
    off = (got - expected).abs()[finite]
    return float(off.max() / expected.abs()[finite].max().clamp(min=1e-300)) if off.numel() else 0.0
