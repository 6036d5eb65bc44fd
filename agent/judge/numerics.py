"""Gate 3: does every program compute what the reference computes?

- Truth: the reference in float64 on the same inputs. Bound: a multiple of the error PyTorch's own
  path makes on them.
- On a Hopper GPU the compiled kernel runs, in every tile configuration a tuner may pick; elsewhere
  the interpreter stands in for it.
- Inputs are drawn afresh each run from secret seeds and must be unchanged afterwards; outputs are
  poisoned with NaN before each launch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.compare import (
    BASELINE_LIMIT,
    Errors,
    bound,
    diagnose,
    measure,
    same,
    within,
)
from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.errors import CompileError, SpecError
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig

if TYPE_CHECKING:
    import torch

    from coda_agent.specs import Spec

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Case:
    """One set of inputs with its truth and bounds."""

    inputs: dict[str, Any]
    truth: dict[str, torch.Tensor]
    bounds: dict[str, Errors]
    torch_errors: dict[str, Errors]


@dataclass
class NumericsReport:
    """What the gate saw.

    Attributes:
        findings: Faults that refuse the candidate.
        worst: For each program and dtype, the largest error over bound of any output, shape and
            admitted tile.
        refused_tiles: Configurations that compiled but computed wrongly, or did not compile.
        admitted: Configurations that may be dispatched, by (program, dtype).
    """

    findings: list[Finding] = field(default_factory=list)
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused_tiles: list[dict[str, Any]] = field(default_factory=list)
    admitted: dict[tuple[str, str], list[TileConfig]] = field(default_factory=dict)


def make_case(
    spec: Spec, binding: Mapping[str, str], sizes: Mapping[str, int], element: str, device: str
) -> Case:
    """Draw inputs from a fresh seed and compute truth and bounds.

    Bounds come from what a user would run: on a GPU the spec's baseline, where it has one that
    takes the shape.

    Raises:
        SpecError: the baseline computes something else.
    """
    from coda_agent.specs import draw_inputs, run_reference

    types = dict.fromkeys(spec.types, element)
    seed = secrets.randbits(62)
    inputs = draw_inputs(spec, sizes, types, seed=seed, device=device, binding=binding)
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    try:
        plain = run_reference(spec, inputs, binding=binding, baseline=device == "cuda")
    except SpecError:
        # A baseline need not take every shape that is checked.
        plain = run_reference(spec, inputs, binding=binding)
    errors = {o: measure(plain[o], truth[o]) for o in spec.outputs}
    dtypes = {o: spec.dtype_of(o, types) for o in spec.outputs}
    bounds = {o: bound(errors[o], dtypes[o], spec.tolerance.multiple) for o in spec.outputs}
    for o in spec.outputs:
        if spec.has_baseline and errors[o].norm > BASELINE_LIMIT:
            raise SpecError(
                f"{spec.path}: the baseline's {o} is {errors[o].norm:.2e} of its norm away from "
                "the reference"
            )
    return Case(inputs, truth, bounds, errors)


def held(spec: Spec, program: Program, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What an output that is added to in place holds before a run: output to input tensor."""
    place = spec.in_place
    return {place.output: inputs[place.input]} if place and program.accumulated else {}


def run_kernel(
    spec: Spec,
    program: Program,
    inputs: Mapping[str, Any],
    config: TileConfig,
    dtypes: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Launch the compiled kernel into NaN-poisoned outputs, but for what it adds to, and fold
    reductions to final values."""
    from coda_agent.primitives.function import finalised
    from coda_agent.primitives.launch import allocate, launch

    a, b = (inputs[name] for name in spec.gemm)
    outputs = allocate(program, a.shape[0], b.shape[0], dtypes, config, a.device)
    start = held(spec, program, inputs)
    for o, tensor in outputs.items():
        tensor.copy_(start[o]) if o in start else tensor.fill_(float("nan"))
    launch(program, a, b, inputs, outputs, config)
    return finalised(program, outputs, a.shape[0], b.shape[0], config)


def run_interpreter(
    spec: Spec,
    program: Program,
    inputs: Mapping[str, Any],
    config: TileConfig,
    dtypes: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """The interpreter's outputs, reductions in blocks of the configuration's width."""
    from coda_agent.primitives.interpret import interpret

    a, b = (inputs[name] for name in spec.gemm)
    return interpret(
        program,
        a,
        b,
        {**inputs, **held(spec, program, inputs)},
        dtypes=dtypes,
        block=config.tile_n,
        row_block=config.tile_m,
    )


def check_numerics(
    spec: Spec,
    programs: Mapping[str, Program],
    tiles: Mapping[tuple[str, str], Sequence[TileConfig]],
    *,
    device: str,
    progress: Progress,
) -> NumericsReport:
    """Check every program in every dtype, shape and tile.

    Args:
        spec: The spec.
        programs: By variant name.
        tiles: Configurations to check, by (program, element type).
        device: "cuda" runs kernels, "cpu" the interpreter.
        progress: Called as (done, total, note).
    """
    report = NumericsReport()
    total = sum(len(t) for t in tiles.values()) * len(spec.check_shapes)
    done = 0
    for binding in spec.bindings():
        name = spec.variant(binding)
        program = programs[name]
        for element in sorted({e for p, e in tiles if p == name}):
            cases = [make_case(spec, binding, s, element, device) for s in spec.check_shapes]
            kept = []
            key = f"{name} {element}"
            report.worst[key] = {"ratio": 0.0}
            for config in tiles[name, element]:
                fault = None
                for sizes, case in zip(spec.check_shapes, cases, strict=True):
                    done += 1
                    progress(done, total, f"{name} {element} {config.label}")
                    fault = fault or _check_case(
                        spec, program, case, sizes, config, element, device, report.worst[key]
                    )
                if fault is None:
                    kept.append(config)
                elif device == "cuda" and config != DEFAULT_CONFIGS["sm_90a"]:
                    report.refused_tiles.append(
                        {
                            "program": name,
                            "dtype": element,
                            "tile": config.label,
                            "fault": fault.message,
                            "where": fault.where,
                        }
                    )
                else:
                    report.findings.append(fault)
            report.admitted[name, element] = kept
    return report


def _check_case(
    spec: Spec,
    program: Program,
    case: Case,
    sizes: Mapping[str, int],
    config: TileConfig,
    element: str,
    device: str,
    worst: dict[str, Any],
) -> Finding | None:
    import torch

    types = dict.fromkeys(spec.types, element)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    before = {k: v.clone() for k, v in case.inputs.items() if hasattr(v, "clone")}
    run = run_kernel if device == "cuda" else run_interpreter
    try:
        results = run(spec, program, case.inputs, config, dtypes)
        again = run(spec, program, case.inputs, config, dtypes)
    except CompileError as error:
        return Finding(message=error.message, where=_where(program, sizes, config, element))
    ratios = {}
    for o in spec.outputs:
        out, truth = results[o], case.truth[o]
        place = {"output": o, **_where(program, sizes, config, element)}
        if tuple(out.shape) != tuple(truth.shape) or out.dtype != dtypes[o]:
            return Finding(
                message=f"{o} is {tuple(out.shape)} {out.dtype}, expected "
                f"{tuple(truth.shape)} {dtypes[o]}",
                where=place,
            )
        errors, limit = measure(out, truth), case.bounds[o]
        ratios[o] = max(errors.norm / limit.norm, errors.tile / limit.tile)
        if not within(errors, limit):
            pattern, at = diagnose(out, truth)
            return Finding(
                message=f"{o} is wrong: error {errors.norm:.2e} of its norm, {errors.tile:.2e} in "
                f"the worst tile; allowed {limit.norm:.2e} and {limit.tile:.2e}; {pattern}",
                where={**place, **at},
                hint="compare the program with the spec's mathematics, output by output",
            )
        if not same(out, again[o]):
            return Finding(message=f"{o} differs between two runs on the same inputs", where=place)
    changed = [k for k, v in before.items() if not same(v, case.inputs[k])]
    if changed:
        return Finding(message=f"input {changed[0]} was changed", where={"input": changed[0]})
    top = max(ratios, key=lambda o: ratios[o])
    if ratios[top] > worst["ratio"]:
        worst.update(ratio=ratios[top], output=top, sizes=dict(sizes), config=config.label)
    return None


def _where(
    program: Program, sizes: Mapping[str, int], config: TileConfig, element: str
) -> dict[str, Any]:
    return {"program": program.name, "dtype": element, "sizes": dict(sizes), "tile": config.label}
