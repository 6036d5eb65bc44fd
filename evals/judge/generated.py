"""PyTorch functions written at random, for the composer and beyond it.

Each is a spec. The composer refuses it in one line, or its program is the function, which two
sides say: the interpreter against the reference in float64, and the judge.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.judge.runners import replayed
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.scores import Judge, Score, recorded
from coda_agent.evals.workers import leave_with_parent
from coda_agent.primitives.errors import ProgramError, SpecError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec, draw_inputs, load_spec, run_reference
from coda_agent.specs.admission import admit

Choose = Callable[[Sequence[Any]], Any]
"""Takes one of a sequence: `random.Random(seed).choice`, or a draw of hypothesis."""

# Declared A and B, and ways to write their product; the first as often as the others together.
_ROWS = (
    "[M, K]",
    "[N, K]",
    """
A @ B.T | F.linear(A, B) | torch.mm(A, B.mT) | (B @ A.T).T | torch.einsum('mk,nk->mn', A, B)
(A.float() @ B.float().T) | torch.matmul(A, B.transpose(0, 1)) | 2 * (A @ B.T) | (A * 0.5) @ B.T
""",
)
LAYOUTS = (_ROWS,) * 3 + (
    ("[M, K]", "[K, N]", "A @ B | torch.mm(A, B) | F.linear(A, B.T)"),
    ("[K, M]", "[N, K]", "A.T @ B.T | torch.einsum('km,nk->mn', A, B)"),
    ("[S, M, K]", "[N, K]", "A @ B.T | F.linear(A, B) | torch.einsum('smk,nk->smn', A, B)"),
)
# Where a reference overflows in float64 and goes on, or names what depends on its element type, it
# has no one meaning: hence clamps before `exp`, and the numbers of `nan_to_num`.
UNARY = """
F.relu({x}) | F.silu({x}) | F.gelu({x}) | F.gelu({x}, approximate='tanh') | torch.tanh({x})
torch.sigmoid({x}) | {x}.abs() | -{x} | {x} * 0.5 | {x} + 1 | {x} / 3 | 2 - {x} | {x}.square()
{x}.clamp(-1, 2) | {x}.clamp(min=-0.5) | F.elu({x}) | F.celu({x}, 0.5) | F.softplus({x})
torch.exp(-{x}.abs()) | torch.log1p({x}.abs()) | torch.sqrt({x}.abs()) | torch.floor({x})
torch.rsqrt({x}.square() + 1) | torch.ceil(3 * {x}) | torch.round({x}) | torch.trunc({x})
torch.sin({x}) | torch.cos({x}) | torch.atan({x}) | torch.asinh({x}) | torch.erf({x})
torch.sign({x}) | F.hardswish({x}) | F.mish({x}) | F.leaky_relu({x}, 0.1) | F.leaky_relu({x}, 2.0)
F.softshrink({x}) | F.hardshrink({x}) | F.hardtanh({x}) | F.logsigmoid({x}) | F.relu6({x})
torch.expm1({x}.clamp(max=3)) | 1 / ({x}.abs() + 1) | {x} % 1.5 | {x}.frac()
{x}.nan_to_num(0.0, 9.0, -9.0) | torch.log(1 + torch.exp({x}.clamp(max=60))) | {x} ** 3
({x} > 0) * {x} | torch.where({x} < 0, {x}, 0.3) | {x}.masked_fill({x} > 1, 0.25) | F.selu({x})
{x} * torch.sigmoid({x}) | torch.exp2({x}.clamp(max=4))
({x}.abs() + 0.1) ** 1.5 | F.threshold({x}, 0.1, 0.0) | F.tanhshrink({x}) | F.softsign({x})
torch.heaviside({x}, torch.ones_like({x})) | torch.sinh({x}.clamp(-2, 2)) | {x}.float()
{x}.mT.contiguous().mT | {x}[None][0] | {x}.reshape({x}.shape) | {x}.unsqueeze(-1).squeeze(-1)
torch.sum(torch.stack([{x}, {x}]), 0) | ({x} == {x}).float() * {x} | {x}.to(A.dtype)
torch.logical_and({x} > 0, {x} < 1) * {x} | torch.addcmul({x}, {x}, {x}, value=0.5) | {x}.sinc()
{x}.to(torch.float8_e4m3fn).to({x}.dtype) | {x}.clone().mul_(2) | torch.round({x}, decimals=1)
"""
BINARY = """
{x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y}.abs() + 1) | torch.maximum({x}, {y})
torch.minimum({x}, {y}) | torch.where({x} > {y}, {x}, {y} * 2) | {x}.masked_fill({y} > 0, 0.5)
torch.hypot({x}, {y}) | torch.atan2({x}, {y}.abs() + 0.1) | torch.lerp({x}, {y}, 0.25)
torch.fmod({x}, {y}.abs() + 1) | torch.copysign({x}, {y}) | F.silu({x}) * {y} | {x} * ({y} > 0)
torch.logaddexp({x}, {y}) | torch.add({x}, {y}, alpha=2) | torch.rsub({x}, {y})
{x}.mul({y}).add({x}) | torch.xlogy({x}, {y}.abs() + 1)
torch.where(({x} > 0) & ({y} > 0), {x}, {y}) | torch.addcdiv({x}, {y}, {y}.square() + 1)
torch.div({x}, {y}.abs() + 1, rounding_mode='floor') | torch.fmax({x}, {y})
torch.clamp({x}, -{y}.abs(), {y}.abs()) | ({y}.abs() + 0.5) ** {x}.clamp(-2, 2)
"""
PAIRS = """
torch.stack((-{x}[..., 1::2], {x}[..., 0::2]), -1).flatten(-2)
{x}.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
torch.stack(({x}[..., 0::2] * 2, {x}[..., 1::2] + 1), dim=-1).reshape({x}.shape)
"""
HALVES = """
{x}[..., 0::2] | {x}[..., 1::2] | F.silu({x}[..., 0::2]) * {x}[..., 1::2]
{x}.unflatten(-1, (-1, 2)).sum(-1) | F.glu({x}.unflatten(-1, (-1, 2)), -1).squeeze(-1)
"""
UNTAKEN = """
{x}.softmax(-1) | {x}.cumsum(-1) | {x}.roll(1, -1) | {x} - {x}.mean(-1, keepdim=True)
torch.lgamma({x}.abs() + 1) | {x}.sort(-1).values | {x}.flip(-1) | F.layer_norm({x}, {x}.shape[-1:])
{x} + {x}.shape[0] | {x} * torch.arange({x}.shape[-1]) | {x} @ {x}.T @ {x} | {x}.tril()
"""
ROWS = """
{x}.sum(-1) | {x}.mean(-1) | {x}.amax(-1) | {x}.logsumexp(-1) | {x}.square().mean(-1)
torch.linalg.vector_norm({x}, dim=-1) ** 2 | {x}.abs().max(-1).values | ({x} > 0).float().sum(-1)
2 * {x}.sum(-1) | {x}.amin(-1) | {x}.gather(-1, index[..., None])[..., 0]
{x}[torch.arange({x}.shape[0]), index]
"""
COLUMNS = "{x}.sum(0) | {x}.amax(0) | {x}.abs().sum(dim=0) | ({x} * {x}).sum(0)"
INPUTS = {"C": "[M, N]", "E": "[M, N]", "r": "[M]", "b": "[N]", "index": "[M]"}
_VECTORS = (("r[..., None]", "[M]"), ("r", "[M, 1]"))
_BATCH = 100
_SPEC = """---
name: {name}
gemm: [A, B]
inputs:
{inputs}
outputs:
{outputs}
check_shapes: [{{M: 1, N: 16, K: 8{one}}}, {{M: 37, N: 48, K: 24{two}}}]
---
```python reference
import torch
import torch.nn.functional as F


def reference({names}):
{body}
```
"""


def listed(text: str) -> list[str]:
    """List what a table of this module names."""
    return [one.strip() for line in text.strip().splitlines() for one in line.split("|")]


class _Written:
    """A reference in the making: lines, and full- and half-width values."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        a, b, products = choose(LAYOUTS)
        self.batched = a.startswith("[S")
        self.row, r = choose(_VECTORS)
        self.inputs = {"A": a, "B": b, **INPUTS, "r": r}
        self.lines = [f"D = {choose(listed(products))}"]
        self.tiles, self.halves = ["D"], list[str]()

    def assign(self, values: list[str], expression: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        values.append(name)
        return name

    def other(self) -> str:
        """Choose what a full-width value is combined with."""
        return self.choose([*self.tiles, "C", "E", self.row, "b", "b[None, :]", "0.5"])

    def step(self) -> None:
        x = self.tiles[-1]
        kind = self.choose(["unary"] * 9 + ["binary"] * 8 + ["pairs", "half"])
        if kind == "half" and len(self.halves) < 2:
            self.assign(self.halves, self.choose(listed(HALVES)).format(x=x))
        elif kind == "binary":
            y = self.other()
            template = self.choose(listed(BINARY)[: 3 if y == "0.5" else None])
            self.assign(self.tiles, template.format(x=x, y=y))
        else:
            table = PAIRS if kind == "pairs" else UNARY
            self.assign(self.tiles, self.choose(listed(table)).format(x=x))

    def outputs(self) -> dict[str, tuple[str, str]]:
        """Write outputs' shapes and expressions, rarely of a wrong kind."""
        choose, last = self.choose, self.tiles[-1]
        if choose(range(12)) == 0:
            last = self.assign(self.tiles, choose(listed(UNTAKEN)).format(x=last))
        found = {"O": ("[M, N]", last)}
        if self.halves:
            x = self.halves[-1]
            for _ in range(choose(range(3))):
                x = self.assign(self.halves, choose(listed(UNARY)).format(x=x))
            found["H"] = ("[M, N/2]", x)
        if choose(range(3)) == 0:
            found["s"] = ("[M]", choose(listed(ROWS)).format(x=choose(self.tiles)))
        if choose(range(5)) == 0 and not self.batched:
            found["n"] = ("[N]", choose(listed(COLUMNS)).format(x=choose(self.tiles)))
        return found


def reference(choose: Choose, name: str = "generated") -> Spec:
    """Write a spec whose reference `choose` decides.

    Raises:
        SpecError: No kernel takes or gives what it declares.
    """
    written = _Written(choose)
    for _ in range(choose(range(1, 6))):
        written.step()
    outputs = written.outputs()
    text = "\n".join([*written.lines, *(value for _, value in outputs.values())])
    inputs = {x: s for x, s in written.inputs.items() if x in ("A", "B") or _used(x, text)}
    lead = "[S, M" if written.batched else "[M"
    declared, returned, lines = [], [], []
    for x, shape in inputs.items():
        about = f"shape: {shape.replace('[M', lead)}"
        if x == "index":
            about += ", dtype: int64, draw: {integers: [0, 16]}"
        elif x not in ("A", "B"):
            about += f", dtype: {choose(['T', 'float32'])}"
            about += choose(["", ", draw: {uniform: [0.5, 1.5]}"])
        declared.append(f"  {x}: {{{about}}}")
    for o, (shape, value) in outputs.items():
        single = shape in ("[M]", "[N]") and "index" not in value
        dtype = "float32" if single else choose(["T", "float32"]) if o != "H" else "T"
        cast = ".float()" if dtype == "float32" else ".to(A.dtype)"
        lines.append(f"  {o}: {{shape: {shape.replace('[M', lead)}, dtype: {dtype}}}")
        returned.append(f'"{o}": ({value}){cast}')
    body = [*written.lines, f"return {{{', '.join(returned)}}}"]
    spec = _SPEC.format(
        name=name, inputs="\n".join(declared), outputs="\n".join(lines), names=", ".join(inputs),
        body="\n".join(f"    {line}" for line in body),
        one=", S: 1" * written.batched, two=", S: 2" * written.batched,
    )  # fmt: skip
    return load_spec(Path(f"{name}.md"), text=spec)


def _used(x: str, text: str) -> bool:
    return re.search(rf"\b{x}\b", text) is not None


def judged(spec: Spec, judge: Judge | None, *, seed: int) -> JsonObject:
    """Say what becomes of a spec, by its "layer".

    Args:
        judge: Whose gates are asked, signature, meaning and numerics; None asks none.
        seed: What inputs are drawn from.
    """
    try:
        admit(spec)
    except SpecError as error:
        return {"layer": "not admitted", "said": error.message}
    try:
        text = Composer().write(spec, lambda *_: None)
    except ProgramError as error:
        return {"layer": "refused", "said": error.message}
    programs = read_programs(text)
    program = programs[spec.name]
    for i, sizes in enumerate(spec.check_shapes):
        inputs = draw_inputs(spec, sizes, spec.default_types(), seed=seed + i)
        truth = run_reference(spec, inputs, exact=True)
        for o, got in replayed(spec, program, inputs).items():
            off = (got - truth[o]).abs().max() / truth[o].abs().max().clamp(min=1e-300)
            if not off <= 1e-9:
                return {"layer": "wrong", "said": f"{o} is off by {float(off):.1e}"}
    if judge:
        subject = Subject(spec.name, spec, programs, {})
        if faults := judge.signature(subject):
            return {"layer": "disputed", "said": faults[0]}
        if fault := judge.numerics(subject, judge.run, seed):
            return {"layer": "disputed", "said": fault.message}
    return {"layer": "right"}


def tried(seed: int, number: int) -> JsonObject:
    """Judge the reference of that number; keep a wrong or disputed one."""
    spec = reference(random.Random(f"{seed} {number}").choice, f"generated_{number}")
    cell = judged(spec, Judge(Path(), "cpu"), seed=seed + number)
    kept = cell["layer"] in ("wrong", "disputed")
    return cell | ({"number": number, "reference": spec.reference_source} if kept else {})


def score_batches(
    judge: Judge, name: str, one: Callable[[int, int], JsonObject], count: int, *, seed: int
) -> dict[str, Score]:
    """Try numbers up to `count` on all cores, a hundred a cell.

    A cell says how many there are of each layer, how often each refusal was said, and which were
    kept with their "reference".
    """
    cores, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, initializer=_begin_worker) as pool:

        def batch(numbers: range) -> JsonObject:
            found = [*pool.map(partial(one, seed), numbers)]
            refused = Counter(_kind(c["said"]) for c in found if c["layer"] == "refused")
            layers = Counter(c["layer"] for c in found)
            faults = [c for c in found if "reference" in c]
            return {"layers": layers, "refused": refused, "faults": faults}

        starts = range(0, count, _BATCH)
        ranges = [range(i, min(i + _BATCH, count)) for i in starts]
        jobs = {f"{r.start} to {r.stop - 1}": lambda r=r: batch(r) for r in ranges}
        return recorded(judge, name, jobs, seed=seed)


def _begin_worker() -> None:
    torch.set_num_threads(1)
    leave_with_parent()


def _kind(said: str) -> str:
    """Take place and numbers out of a refusal."""
    return re.sub(r"\d[\d.e+-]*", "#", re.sub(r"^\S+: ", "", said))
