"""Right programs, which a judge must not refuse: accepted kernels, rewrites, demonstrations.

- A rewrite says the same thing otherwise: factors regrouped, a sigmoid by exp or by tanh.
- A demonstration gets a spec of its own, made of its operands' kinds, the range of its inputs and
  its reference. One that needs a table, which a spec cannot draw, is left out by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.evals.judge.edits import rewritten
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
from coda_agent.specs import Spec, load_spec

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
    """One program that is right.

    Attributes:
        name: Its name in the corpus.
        spec: Its spec.
        programs: All programs of the spec, by variant.
        variant: Which of them it is.
    """

    name: str
    spec: Spec
    programs: Mapping[str, Program]
    variant: str

    @property
    def program(self) -> Program:
        return self.programs[self.variant]

    @property
    def binding(self) -> dict[str, str]:
        """The static parameters that choose it."""
        return next(b for b in self.spec.bindings() if self.spec.variant(b) == self.variant)


def kernels(found: Iterable[Kernel]) -> list[Right]:
    """Every variant of the kernels."""
    return [Right(name, k.spec, k.programs, name) for k in found for name in k.programs]


def rewrites(right: Right) -> list[Right]:
    """A program's rewrites."""
    return [
        right._replace(
            name=f"{right.name}: {name}", programs={**right.programs, right.variant: program}
        )
        for name, program in rewritten(right.program)
    ]


def demonstrations(found: Iterable[Any]) -> tuple[list[Right], list[str]]:
    """The programs of the demonstrations (`demos.Demo`), and the names of those left out."""
    right, left_out = [], []
    for demo in found:
        kinds = {x: kind for p in demo.programs for x, kind in p.operands.items()}
        for p in demo.programs:
            if HeadTable in kinds.values():
                left_out.append(p.name)
                continue
            name = f"demonstration {p.name}"
            right.append(Right(name, _spec(demo, p, kinds), {p.name: p}, p.name))
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


def interpreted(
    spec: Spec, program: Program, inputs: Mapping[str, Any], a: Any = None, b: Any = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """`primitives.interpret.interpret` on a spec's inputs, or other A (M, K) and B (N, K)."""
    from coda_agent.primitives.interpret import interpret

    held = {o: inputs[x] for o, x in spec.updated().items()}
    a = inputs[spec.gemm[0]] if a is None else a
    b = inputs[spec.gemm[1]] if b is None else b
    return interpret(program, a, b, {**inputs, **held}, **options)
