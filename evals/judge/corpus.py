"""Right programs, which a judge must not refuse: accepted kernels, rewrites, demonstrations.

- A rewrite says the same thing in another way: factors are regrouped, a sigmoid is made of exp.
- A demonstration gets a spec of its own, made of its operands' kinds, the range of its inputs and
  its reference. A demonstration that needs a table, which a spec cannot draw, is left out by name.
"""

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from coda_agent.agent.judge.records import JsonObject
from coda_agent.demos import Demo
from coda_agent.evals.judge.edits import rewritten
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import ColIndex, HeadTable, RowGather, Scalar, Tile
from coda_agent.primitives.tables import Table
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import Spec, load_spec

_SHAPE = {"m": 200, "n": 352, "k": 136}
_SPEC = """---
name: {name}
level: compose
summary: {name}
dims: {{M: {{}}, N: {{multiple_of: {unit}}}, K: {{multiple_of: 8}}}}
gemm: [A, B]
inputs:
{inputs}
outputs:
{outputs}
{held}check_shapes:
  - {{M: 1, N: {unit}, K: 8}}
  - {{M: 77, N: {few}, K: 64}}
  - {{M: {m}, N: {n}, K: {k}}}
bench_shapes: [{{M: 4096, N: 4096, K: 4096}}]
tolerance: {{multiple: 2.0}}
target: 0.9
---
```python reference
import torch


{source}

def reference({names}):
    found = demonstrated({given})
    return {{{found}}}
```
"""


@dataclass(frozen=True)
class Subject:
    """One program to judge, of `binding`, among its spec's by variant."""

    name: str
    spec: Spec
    programs: Mapping[str, Program]
    binding: Mapping[str, str]

    @property
    def variant(self) -> str:
        return self.spec.variant(self.binding)

    @property
    def is_default(self) -> bool:
        """Whether its static parameters are the spec's defaults."""
        return self.variant == self.spec.variant()

    @property
    def program(self) -> Program:
        return self.programs[self.variant]

    def with_program(self, program: Program, name: str = "") -> Self:
        """Put another program in its place."""
        programs = {**self.programs, self.variant: program}
        return replace(self, name=name or self.name, programs=programs)


def kernels(found: Iterable[Kernel]) -> list[Subject]:
    """List every variant of the kernels."""
    return [
        Subject(k.spec.variant(binding), k.spec, k.programs, binding)
        for k in found
        for binding in k.spec.bindings()
    ]


def rewrites(right: Subject) -> list[Subject]:
    """List a program's rewrites."""
    return [
        right.with_program(program, f"{right.name}: {name}")
        for name, program in rewritten(right.program)
    ]


def demonstrations(found: Iterable[Demo]) -> tuple[list[Subject], list[str]]:
    """List the demonstrations' programs, and the names of those left out."""
    right, left_out = [], []
    for demo in found:
        kinds = {x: kind for p in demo.programs for x, kind in p.operands.items()}
        for p in demo.programs:
            # A spec in bfloat16 takes a cast to bfloat16 for a user's own rounding, and means none.
            own = any(node.op == "to_bfloat16" for node in p.graph.nodes)
            if own or any(issubclass(kind, (HeadTable, Table)) for kind in kinds.values()):
                left_out.append(p.name)
                continue
            spec = _spec(demo, p, kinds)
            right.append(Subject(f"demonstration {p.name}", spec, {p.name: p}, {}))
    return right, left_out


def _spec(demo: Demo, program: Program, kinds: Mapping[str, type]) -> Spec:
    drawn = demo.inputs(torch.Generator().manual_seed(0), **_SHAPE)
    place = program.accumulated
    # An input that is added to has the output's name in a demonstration, and its own in a spec.
    names = {x: f"{x}_held" if x == place else x for x in drawn}
    inputs, outputs = {}, {}
    for x, value in drawn.items():
        kind = kinds.get(x, Tile)
        dtype = str(getattr(value, "dtype", "torch.float32")).removeprefix("torch.")
        inputs[names[x]] = {"shape": [*kind.dims], "dtype": dtype, "draw": _draw(value, kind)}
    inputs["A"] |= {"shape": ["M", "K"], "draw": "normal"}
    inputs["B"] |= {"shape": ["N", "K"], "draw": {"normal": {"std": "K**-0.5"}}}
    for o, kind in program.outputs.items():
        single = issubclass(kind, Reduction) or kind is RowGather
        outputs[o] = {"shape": [*kind.dims], "dtype": "float32" if single else "bfloat16"}
    unit = math.lcm(32, *(p.group or 1 for p in demo.programs))  # they share a reference
    sizes = {**_SHAPE, "unit": unit, "few": -(-288 // unit) * unit, "n": -(-352 // unit) * unit}
    source = inspect.getsource(demo.reference).replace("def reference", "def demonstrated", 1)
    held = f"in_place: {{output: {place}, input: {names[place]}}}\n" if place else ""
    text = _SPEC.format(
        name=program.name, held=held, source=source, names=", ".join(names.values()),
        inputs="\n".join(f"  {x}: {json.dumps(about)}" for x, about in inputs.items()),
        outputs="\n".join(f"  {x}: {json.dumps(about)}" for x, about in outputs.items()),
        given=", ".join(f"{x}={name}" for x, name in names.items()),
        found=", ".join(f'"{o}": found["{o}"].to(torch.{x["dtype"]})' for o, x in outputs.items()),
        **sizes,
    )  # fmt: skip
    return load_spec(Path(f"{program.name}.md"), text=text)


def _draw(value: Any, kind: type) -> JsonObject:
    """Make a spec's draw of values like these."""
    if kind is Scalar:
        return {"constant": float(value)}
    if kind is ColIndex:
        return {"integers": [0, "N"]}
    low, high = float(value.double().min()), float(value.double().max())
    # Rounding errors beside positive numbers, such as the low parts of `rotary`'s turns, are no
    # sign: drawn with one, the two parts of a turn would cancel where neither is small.
    low = max(low, 0.0) if -low < 2.0**-20 * high else low
    if low < 0:
        return {"normal": {"std": float(value.double().std())}}
    return {"uniform": [low, high]}
