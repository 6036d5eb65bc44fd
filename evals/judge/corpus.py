"""Right programs, which a judge must not refuse: accepted kernels, rewrites, demonstrations.

- A rewrite says the same thing otherwise: factors regrouped, a sigmoid by exp or by tanh.
- A demonstration gets a spec of its own, made of its operands' kinds, the range of its inputs and
  its reference. Where such draws break what its program relies on, such as equal columns in each
  pair, or need a table, it is left out by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.evals.judge.edits import all_rewritten
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import (
    ColIndex,
    HeadTable,
    Reduction,
    RowGather,
    Scalar,
    Tile,
    dims,
)
from coda_agent.specs import Spec, draw_inputs, load_spec, run_reference

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

_SPEC = """---
name: {name}
level: compose
summary: {name}
dims: {{M: {{}}, N: {{multiple_of: 32}}, K: {{multiple_of: 8}}}}
gemm: [A, B]
inputs:
  A: {{shape: [M, K], dtype: bfloat16, draw: normal}}
  B: {{shape: [N, K], dtype: bfloat16, draw: {{normal: {{std: K**-0.5}}}}}}
{inputs}
outputs:
{outputs}
{in_place}
check_shapes:
  - {{M: 1, N: 32, K: 8}}
  - {{M: 77, N: 288, K: 64}}
  - {{M: 200, N: 352, K: 136}}
bench_shapes:
  - {{M: 4096, N: 4096, K: 4096}}
tolerance: {{multiple: 2.0}}
target: 0.9
---
```python reference
import torch


{source}


def reference({names}):
    found = demonstrated({arguments})
    return {{{casts}}}
```
"""


class Right(NamedTuple):
    """One program that is right: its name in the corpus, and where it stands."""

    name: str
    spec: Spec
    programs: Mapping[str, Program]
    variant: str


def kernels(found: Iterable[Kernel]) -> Iterator[Right]:
    """Every variant of the kernels, and every rewrite of each kernel's first one."""
    for kernel in found:
        for variant in kernel.programs:
            yield Right(variant, kernel.spec, kernel.programs, variant)
        first = kernel.spec.variant()
        for name, program in all_rewritten(kernel.programs[first]):
            programs = {**kernel.programs, first: program}
            yield Right(f"{first}: {name}", kernel.spec, programs, first)


def demonstrations(found: Iterable[Any]) -> tuple[list[Right], list[str]]:
    """The programs of the demonstrations (`demos.Demo`), and the names of those left out."""
    right, left_out = [], []
    for demo in found:
        kinds = {x: kind for p in demo.programs for x, kind in p.operands.items()}
        for program in demo.programs:
            name = f"demonstration {program.name}"
            if HeadTable in kinds.values():
                left_out.append(program.name)
                continue
            spec = _spec(demo, program, kinds)
            entry = Right(name, spec, {program.name: program}, program.name)
            right.append(entry) if _holds(entry) else left_out.append(program.name)
    return right, left_out


def _spec(demo: Any, program: Program, kinds: Mapping[str, type]) -> Spec:
    import torch

    drawn = demo.inputs(torch.Generator().manual_seed(0), 200, 352, 136)
    # An input that is added to has the output's name in a demonstration, and its own in a spec.
    inputs = {f"{x}_held" if x == program.accumulated else x: x for x in drawn}
    lines = [
        f"  {name}: {{shape: {_shape(kinds.get(x, Tile))}, dtype: {_dtype(drawn[x])}, "
        f"draw: {_draw(drawn[x], kinds.get(x, Tile))}}}"
        for name, x in inputs.items()
        if x not in "AB"
    ]
    outputs, casts = [], []
    for o, kind in program.outputs.items():
        statistic = issubclass(kind, Reduction)
        dtype = "float32" if statistic or kind is RowGather else "bfloat16"
        outputs.append(f"  {o}: {{shape: {_shape(kind)}, dtype: {dtype}}}")
        casts.append(f'"{o}": found["{o}"].to(torch.{dtype})')
    place = program.accumulated
    text = _SPEC.format(
        name=program.name,
        inputs="\n".join(lines),
        outputs="\n".join(outputs),
        in_place=f"in_place: {{output: {place}, input: {place}_held}}" if place else "",
        source=inspect.getsource(demo.reference).replace("def reference", "def demonstrated", 1),
        names=", ".join(inputs),
        arguments=", ".join(f"{x}={name}" for name, x in inputs.items()),
        casts=", ".join(casts),
    )
    return load_spec(Path(f"{program.name}.md"), text=text)


def _shape(kind: type) -> str:
    return f"[{', '.join(dims(kind))}]"


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", "torch.float32")).removeprefix("torch.")


def _draw(value: Any, kind: type) -> str:
    if kind is Scalar:
        return f"{{constant: {float(value)}}}"
    if kind is ColIndex:
        return "{integers: [0, N]}"
    low, high = float(value.double().min()), float(value.double().max())
    if low < 0:
        return f"{{normal: {{std: {float(value.double().std())}}}}}"
    return f"{{uniform: [{low}, {high}]}}"


def _holds(right: Right) -> bool:
    """Whether the program is its reference in float64, on the spec's draws."""
    import torch

    from coda_agent.primitives.interpret import interpret

    spec, program = right.spec, right.programs[right.variant]
    inputs: Any = draw_inputs(spec, spec.check_shapes[-1], {}, seed=0)
    held = {o: inputs[x] for o, x in spec.updated().items()}
    truth = run_reference(spec, inputs, exact=True)
    found = interpret(
        program, inputs["A"], inputs["B"], {**inputs, **held},
        dtypes=dict.fromkeys(program.outputs, torch.float64), compute=torch.float64,
    )  # fmt: skip
    return all(torch.allclose(found[o], t, rtol=1e-9, atol=1e-9) for o, t in truth.items())
