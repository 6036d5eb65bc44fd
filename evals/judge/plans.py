"""Functions of several products written at random, and what their plans compute.

A plan is right, or its function is left to PyTorch by name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.check import call_exactly, run_exactly
from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.judge.records import JsonObject
from coda_agent.evals.judge.generated import listed
from coda_agent.fuse.nodes import PRODUCTS
from coda_agent.fuse.record import recorded
from coda_agent.fuse.regions import Cut, Region, cut, order
from coda_agent.fuse.rules import prepare
from coda_agent.fuse.verify import WORSE, distance
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.rounding import ROUNDINGS

M, N = 6, 32

ELEMENTWISE = """
F.silu({x}) | F.gelu({x}, approximate='tanh') | torch.tanh({x}) | {x} * 0.5 | 1 - {x} | {x} + r
{x} * r | {x} + b | F.relu({x}).float() | ({x} * c[:, None]) | {x}.clamp(-2, 2) | {x} * g | -{x}
torch.sigmoid({x}) * {x} | {x}.float() / (1 + {x}.abs()) | {x}.view(-1, {x}.shape[-1])
torch.cat([F.silu({x}[..., ::2]) * {x}[..., 1::2]] * 2, -1)
torch.stack({x}.chunk(2, -1), -1).flatten(-2)
{x}.unflatten(-1, (2, -1)).flatten(-2) | {x}.mT.contiguous().mT | {x} + h0
"""
# A value that is needed after its own reduction.
AFTER = """
{x} * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + 1e-5) * g
F.rms_norm({x}, ({x}.shape[-1],), g, 1e-5) | F.rms_norm({x}, ({x}.shape[-1],), None, 1e-5)
F.softmax({x}.float(), -1) | {x} / {x}.float().norm(dim=-1, keepdim=True) | {x} - {x}.mean(-1, True)
F.layer_norm({x}, ({x}.shape[-1],), g, b) | {x} * {x}.sum() | {x} - {x}.amax(-1, keepdim=True)
{x} / (1 + {x}.abs().amax(-1, keepdim=True)) * g | {x}.cumsum(-1)
{x} + {x}.logsumexp(-1)[:, None]
g * ({x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 0.1))
{x} / {x}.float().std(-1, keepdim=True)
"""
PRODUCT = """
F.linear({x}, w) | {x} @ w.T | torch.mm({x}, w.T) | F.linear({x}, w, b) | {x} @ u
torch.addmm(b, {x}, u)
F.silu(F.linear({x}, w)) * F.linear({x}, v) | F.linear({x}, w) + F.linear({x}, v) * c[:, None]
torch.cat([F.linear({x}, w), F.linear({x}, v)], -1)[..., ::2]
"""
REDUCED = """
{x}.sum(-1) | {x}.float().logsumexp(-1) | {x}.float().square().mean(-1, keepdim=True) | {x}.amax(-1)
{x}.sum(0) | {x}.gather(1, t[:, None]) | F.cross_entropy({x}.float(), t) | {x}.float().mean()
F.cross_entropy({x}.float(), t, reduction='sum')
"""


def function(seed: int) -> str:
    """Write the text of `function`, of two or three products."""
    pick = random.Random(seed)
    lines, known = [], ["x"]

    def say(ways: str, of: str) -> str:
        name = f"y{len(lines)}"
        lines.append(f"    {name} = ({pick.choice(listed(ways)).format(x=of)}).to(x.dtype)")
        known.append(name)
        return name

    value = "x"
    for n in range(pick.choice((2, 2, 3))):
        value = say(PRODUCT, value)
        for _ in range(pick.randrange(3)):
            value = say(ELEMENTWISE, value)
        if pick.random() < 0.8 or n == 0:
            value = say(AFTER, value)
        if pick.random() < 0.3:
            say(ELEMENTWISE, value)
    if pick.random() < 0.6:
        value = say(REDUCED, value)
    results = [value, *(y for y in known[1:-1] if pick.random() < 0.15)]
    head = "def function(x, w, v, u, r, b, c, g, h0, t):"
    return "\n".join([head, *lines, f"    return {', '.join(results)}"])


def tensors(seed: int) -> list[torch.Tensor]:
    """Draw what `function` takes; all products are square in the columns.

    They are in bfloat16: A, three weights, a tile, a bias, a column, a norm's weight, another tile;
    and an index.
    """
    made = torch.Generator().manual_seed(seed)
    shapes = [(M, N), (N, N), (N, N), (N, N), (M, N), (N,), (M,), (N,), (M, N)]
    floats = [torch.randn(s, generator=made).bfloat16() for s in shapes]
    return [*floats, torch.randint(0, N, (M,), generator=made)]


def fault(text: str, args: list[torch.Tensor], known: Cut) -> str:
    """Say what is wrong with a cut; "" where nothing is.

    Every number is a double on both sides, but where a program rounds what it stores and sums. What
    follows may make much of that: as where kernels are compared, it may be off by twice what
    PyTorch is in the function's types, and by a rounding; or by what comes of inputs that are
    rounded once more.
    """
    rounds = any(_rounds(region.local) for region in known.regions)
    inside = {node for region in known.regions for node in region.nodes}
    products = [n for n in known.graph.nodes if n.target in PRODUCTS and n not in inside]
    if lost := [node for node in products if node not in known.why]:
        return f"{lost[0].name} is left to PyTorch without a reason"
    wide = [a.double() if a.is_floating_point() else a for a in args]
    module = recorded(called(text), args)
    expected, near = run_exactly(module, wide), run_exactly(module, [*map(_moved, wide)])
    got = run_cut(known, wide)
    if [x.shape for x in got] != [x.shape for x in expected]:
        return f"{len(got)} results for {len(expected)}, or of other shapes"
    largest = max(float(x.abs().nan_to_num(posinf=0.0).max()) for x in (*wide, *expected))
    own = called(text)(*args)
    plain = own if isinstance(own, tuple) else (own,)
    every = zip(expected, got, plain, near, strict=True)
    for i, (want, have, theirs, moved) in enumerate(every):
        if not (want.isfinite() == have.isfinite()).all():
            return f"result {i} is finite elsewhere"
        if rounds:
            limit = max(WORSE * distance(theirs, want), distance(moved, want))
            limit += torch.finfo(torch.bfloat16).eps
            off, of = distance(have, want), "norm"
        else:
            limit, off, of = 1e-9, _off(have, want, largest), "largest value"
        if not off < limit:
            return f"result {i} is off by {off:.1e} of its {of}"
    return ""


def _moved(x: torch.Tensor) -> torch.Tensor:
    """Move numbers by up to what bfloat16 rounds off."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
    return x * (1 + parts * torch.finfo(torch.bfloat16).eps) if x.is_floating_point() else x


def _off(have: torch.Tensor, want: torch.Tensor, largest: float) -> float:
    """Measure an error by the largest value.

    A sum that is 0 has an error all the same, of what it is a sum of.
    """
    scale = want.abs().max().clamp(min=1e-4 * largest)
    return float(((want - have).abs() / scale).nan_to_num().max())


def run_cut(known: Cut, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph by its regions' programs, in float64."""
    steps, values = [*order(known)], dict[fx.Node, torch.Tensor]()
    (end,) = (node for node in known.graph.nodes if node.op == "output")
    places = [node for node in known.graph.nodes if node.op == "placeholder"]
    values |= dict(zip(places, inputs, strict=True))
    for step in steps:
        if isinstance(step, Region):
            values |= _interpreted(step.composition, values)
        elif step.op == "call_function":
            if step.target is torch.ops.aten.view.default:  # a kernel's strides may be no view's
                step.target = torch.ops.aten.reshape.default
            values[step] = call_exactly(step, values)
    return [values[node] for node in end.args[0]]


def _interpreted(
    composition: Composition, values: Mapping[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    def of(port: Port) -> torch.Tensor:
        return port.canonical(*(values[node] for node in port.nodes))

    program = composition.program
    results = interpret(
        program,
        of(composition.a),
        of(composition.b),
        {name: of(port) for name, port in composition.operands.items()},
        dtypes=dict.fromkeys(program.outputs, torch.float64),
        compute=torch.float64,
    )
    outputs = composition.outputs.values()
    if _rounds(composition):  # what it reduces is what it stores
        stored = [port for port in outputs if port.name not in program.reductions]
        results |= {p.name: results[p.name].to(p.dtype).to(results[p.name].dtype) for p in stored}
    return {node: port.restored(results[port.name]) for port in outputs for node in port.nodes}


def _rounds(composition: Composition) -> bool:
    ops = {node.op for node in composition.program.graph.nodes}
    return not ops.isdisjoint(ROUNDINGS.values())


def tried(seed: int, number: int) -> JsonObject:
    """Cut the function of that number; "layer" is right, refused or wrong."""
    number += 10_000 * seed
    text, args = function(number), tensors(number)
    known = None
    try:
        known = cut_function(text, args)
        said = fault(text, args, known)
    except Exception as error:  # a cut that raises is as bad as one that is wrong
        said = f"{type(error).__name__}: {error}"
    if said or not known:
        return {"layer": "wrong", "said": said, "number": number, "reference": text}
    if not known.regions:
        return {"layer": "refused", "said": next(iter(known.why.values()))}
    return {"layer": "right"}


def cut_function(text: str, args: list[torch.Tensor]) -> Cut:
    """Cut the function of a text into regions."""
    graph = recorded(called(text), args).graph
    prepare(graph)
    return cut(graph)


def called(text: str) -> Any:
    """Make the function of a text."""
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(text, space)
    return next(v for k, v in space.items() if k.startswith("function"))
