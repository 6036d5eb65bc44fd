"""Plans of functions written at random: whatever the composer refuses, what is left is right.

`CODA_AGENT_FUNCTIONS=2000 pytest tests/agent/test_plans_generated.py` asks the real composer of so
many; the suite asks one that refuses by chance, which costs no drafts.
"""

import os
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from coda_agent.agent.plans.cut import Plan, cut
from coda_agent.agent.plans.run import Runner
from coda_agent.agent.plans.trace import Value, record
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs.reference import _widened

COUNT = int(os.environ.get("CODA_AGENT_FUNCTIONS", "0"))
M, N = 6, 32

ELEMENTWISE = """
F.silu({x}) | F.gelu({x}, approximate='tanh') | torch.tanh({x}) | {x} * 0.5 | 1 - {x} | {x} + r
{x} * r | {x} + b | F.relu({x}).float() | ({x} * c[:, None]) | {x}.clamp(-2, 2) | {x} * g | -{x}
torch.sigmoid({x}) * {x} | {x}.float() / (1 + {x}.abs()) | {x}.view(-1, {x}.shape[-1])
torch.cat([F.silu({x}[..., ::2]) * {x}[..., 1::2]] * 2, -1) | torch.stack({x}.chunk(2, -1), -1).flatten(-2)
{x}.unflatten(-1, (2, -1)).flatten(-2) | {x}.mT.contiguous().mT | {x} + h0
"""
# A value that is needed after its own reduction.
AFTER = """
{x} * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + 1e-5) * g
F.rms_norm({x}, ({x}.shape[-1],), g, 1e-5) | F.rms_norm({x}, ({x}.shape[-1],), None, 1e-5)
F.softmax({x}.float(), -1) | {x} / {x}.float().norm(dim=-1, keepdim=True) | {x} - {x}.mean(-1, True)
F.layer_norm({x}, ({x}.shape[-1],), g, b) | {x} * {x}.sum() | {x} - {x}.amax(-1, keepdim=True)
{x} / (1 + {x}.abs().amax(-1, keepdim=True)) * g | {x}.cumsum(-1) | {x} + {x}.logsumexp(-1)[:, None]
g * ({x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 0.1)) | {x} / {x}.float().std(-1, keepdim=True)
"""
PRODUCT = """
F.linear({x}, w) | {x} @ w.T | torch.mm({x}, w.T) | F.linear({x}, w, b) | {x} @ u | torch.addmm(b, {x}, u)
F.silu(F.linear({x}, w)) * F.linear({x}, v) | F.linear({x}, w) + F.linear({x}, v) * c[:, None]
torch.cat([F.linear({x}, w), F.linear({x}, v)], -1)[..., ::2]
"""
REDUCED = """
{x}.sum(-1) | {x}.float().logsumexp(-1) | {x}.float().square().mean(-1, keepdim=True) | {x}.amax(-1)
{x}.sum(0) | {x}.gather(1, t[:, None]) | F.cross_entropy({x}.float(), t) | {x}.float().mean()
F.cross_entropy({x}.float(), t, reduction='sum')
"""


def choices(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\||\n", text.strip())]


def function(seed: int) -> str:
    """The text of a function of two or three products."""
    pick = random.Random(seed)
    lines, known = [], ["x"]

    def say(ways: str, of: str) -> str:
        name = f"y{len(lines)}"
        lines.append(f"    {name} = ({pick.choice(choices(ways)).format(x=of)}).to(x.dtype)")
        known.append(name)
        return name

    value = "x"
    for product in range(pick.choice((2, 2, 3))):
        value = say(PRODUCT, value)
        for _ in range(pick.randrange(3)):
            value = say(ELEMENTWISE, value)
        if pick.random() < 0.8 or product == 0:
            value = say(AFTER, value)
        if pick.random() < 0.3:
            say(ELEMENTWISE, value)
    if pick.random() < 0.6:
        value = say(REDUCED, value)
    results = [value, *(y for y in known[1:-1] if pick.random() < 0.15)]
    head = "def function(x, w, v, u, r, b, c, g, h0, t):"
    return "\n".join([head, *lines, f"    return {', '.join(results)}"])


def tensors(seed: int) -> list[torch.Tensor]:
    """Of bfloat16: A, three weights, a tile, a bias, a column, a norm's weight, another tile; and
    an index. All products are square in the columns, so that any may follow any."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(M, N), (N, N), (N, N), (N, N), (M, N), (N,), (M,), (N,), (M, N)]
    floats = [torch.randn(s, generator=made).bfloat16() for s in shapes]
    return [*floats, torch.randint(0, N, (M,), generator=made)]


def exactly(call: Any, *args: Any) -> list[torch.Tensor]:
    """What it returns where every number is a double."""
    wide = [a.double() if a.is_floating_point() else a for a in args]
    with _widened(torch.float64, lambda _: False, None):
        found = call(*wide)
    return [*found] if isinstance(found, tuple | list) else [found]


class Written:
    """A step as its text says."""

    def __init__(self, text: str) -> None:
        space: dict[str, Any] = {}
        exec(text, space)
        self.function = next(
            v for k, v in space.items() if callable(v) and k.startswith("function")
        )

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: Any = self.function(*args)
        return found if isinstance(found, tuple) else (found,)


def run_exactly(plan: Plan, args: list[torch.Tensor]) -> list[torch.Tensor]:
    for kernel in plan.kernels:
        kernel.made = Written(kernel.text)
    return exactly(lambda *x: _runner(plan)(x), *args)


def _runner(plan: Plan) -> Any:
    return Runner(plan.graph, plan.steps)


def check(text: str, args: list[torch.Tensor], plan: Plan) -> None:
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(text, space)
    expected, got = exactly(space["function"], *args), run_exactly(plan, args)
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        assert want.shape == have.shape, text
        scale = want.abs().max().clamp(min=1e-4)  # a sum that is 0 has an error all the same
        assert (want.isfinite() == have.isfinite()).all(), text
        assert float(((want - have).abs() / scale).nan_to_num().max()) < 1e-9, text


def planned(text: str, args: list[torch.Tensor], compose: Any) -> Plan:
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(text, space)
    names = space["function"].__code__.co_varnames
    return cut(record(space["function"], tuple(args), {}, names), compose)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_right_whatever_the_composer_refuses(seed: int) -> None:
    text, args, chance = function(seed), tensors(seed), random.Random(seed)

    def compose(text: str, inputs: Mapping[str, Value], a: str) -> Written:
        lines = text.splitlines()
        if chance.random() < 0.4:
            at = chance.randrange(5, len(lines) + 1)
            raise ProgramError(f"plan:{at}: `{lines[at - 1].strip()}`: refused by chance")
        return Written(text)

    check(text, args, planned(text, args, compose))


@pytest.mark.parametrize("seed", range(10_000, 10_000 + COUNT))
def test_a_plan_by_the_real_composer_is_right(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from coda_agent.agent.plans.kernels import composed

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, args = function(seed), tensors(seed)
    plan = planned(text, args, lambda *x: composed(*x, judged=False))
    check(text, args, plan)
