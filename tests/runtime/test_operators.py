"""Calls of a kernel after its first: found by one check, and only where the plan serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.runtime import call_cache
from coda_agent.runtime import function as function_module
from coda_agent.runtime import plan as plan_module
from coda_agent.runtime.call_cache import Calls, signature
from coda_agent.specs import draw_inputs
from tests.runtime.test_plan import Launches


def inputs() -> list[Any]:
    """A, B, two scalars that are numbers, and a vector."""
    return [torch.randn(8, 32).bfloat16(), torch.randn(16, 32).bfloat16(), 0.5, 2.0, torch.ones(16)]


def offset(t: torch.Tensor) -> torch.Tensor:
    """`t` 4 bytes off a multiple of 16."""
    return torch.cat([torch.zeros(4 // t.element_size()).to(t), t.flatten()])[
        4 // t.element_size() :
    ].view(t.shape)


class Odd(torch.Tensor):
    """A subclass of a tensor."""


SAME: dict[str, Callable[..., tuple[Any, ...]]] = {
    "other data": lambda a, b, s, t, v: (a.clone(), b.clone(), s, t, v.clone()),
    "other numbers": lambda a, b, s, t, v: (a, b, -1.5, 3, v),
    "rows of a larger A": lambda a, b, s, t, v: (torch.cat([a, a])[:8], b, s, t, v),
}
OTHER: dict[str, Callable[..., tuple[Any, ...]]] = {
    "rows": lambda a, b, s, t, v: (a[:4], b, s, t, v),
    "columns": lambda a, b, s, t, v: (a, b[:8], s, t, v[:8]),
    "a leading dimension": lambda a, b, s, t, v: (a[None], b, s, t, v),
    "strides of A": lambda a, b, s, t, v: (a.T.contiguous().T, b, s, t, v),
    "strides of B": lambda a, b, s, t, v: (a, torch.cat([b, b], 1)[:, :32], s, t, v),
    "type of A and B": lambda a, b, s, t, v: (a.half(), b.half(), s, t, v),
    "type of the vector": lambda a, b, s, t, v: (a, b, s, t, v.bfloat16()),
    "length of the vector": lambda a, b, s, t, v: (a, b, s, t, torch.ones(24)),
    "address of B": lambda a, b, s, t, v: (a, offset(b), s, t, v),
    "address of the vector": lambda a, b, s, t, v: (a, b, s, t, offset(v)),
    "a device": lambda a, b, s, t, v: (a, b, s, t, v.to("meta")),
    "scalars in memory": lambda a, b, s, t, v: (a, b, torch.tensor(s), torch.tensor(t), v),
    "one scalar in memory": lambda a, b, s, t, v: (a, b, s, torch.tensor(t), v),
    "the other": lambda a, b, s, t, v: (a, b, torch.tensor(s), t, v),
    "a parameter": lambda a, b, s, t, v: (a, torch.nn.Parameter(b, requires_grad=False), s, t, v),
    "a gradient": lambda a, b, s, t, v: (a, b.clone().requires_grad_(), s, t, v),
    "a subclass": lambda a, b, s, t, v: (a.as_subclass(Odd), b, s, t, v),
    "a view that negates": lambda a, b, s, t, v: (a, b, s, t, torch._neg_view(v)),  # pyright: ignore[reportPrivateImportUsage]
    "one tensor twice": lambda a, b, s, t, v: (a, a, s, t, v),
    "no tensor": lambda a, b, s, t, v: (None, b, s, t, v),
    "a number for the vector": lambda a, b, s, t, v: (a, b, s, t, 1.0),
    "a truth value": lambda a, b, s, t, v: (a, b, True, t, v),
    "a word": lambda a, b, s, t, v: (a, b, s, "2", v),
}


@pytest.mark.parametrize("memory", [False, True], ids=["numbers", "memory"])
@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_a_plan_serves_calls_of_its_signature_alone(change: str, memory: bool) -> None:
    calls, plan, values = Calls(0, 1, [2, 3], 5), object(), inputs()
    if memory:
        values[2:4] = torch.tensor(0.5), torch.tensor(2.0)
    calls.keep(values, None, plan)  # pyright: ignore[reportArgumentType]
    given: Any = list((SAME | OTHER)[change](*inputs()))
    if memory and "scalar" not in change and change != "the other":
        given[2:4] = [torch.tensor(float(x)) if type(x) in (int, float) else x for x in given[2:4]]
    serves = change in SAME or (memory and change == "scalars in memory")
    if serves:
        assert signature(given) == signature(values)
    assert (calls.find(given, None) is plan) == serves
    assert calls.find(values, 128) is None and calls.find(values, None) is plan


def test_what_is_not_kept_is_not_found() -> None:
    calls, plan = Calls(0, 1, [2, 3], 5), object()
    a, b, _, t, v = inputs()
    for values in ([a, offset(b), 0.5, t, v], [a, b, torch.tensor(0.5), t, v], [a, a, 0.5, t, v]):
        calls.keep(values, None, plan)  # pyright: ignore[reportArgumentType]
        assert calls.find(values, None) is None


def test_a_plan_of_a_call_without_gradients_serves_no_call_with_them() -> None:
    calls, plan, values = Calls(0, 1, [2, 3], 5), object(), inputs()
    values[1].requires_grad_()
    with torch.no_grad():
        calls.keep(values, None, plan)  # pyright: ignore[reportArgumentType]
        assert calls.find(values, None) is plan
    assert calls.find(values, None) is None


def test_few_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_SHAPES", 3)
    calls, b = Calls(0, 1, [], 2), torch.ones(16, 32)
    layouts = [torch.ones(8, 32 + 8 * i)[:, :32] for i in range(6)]
    for i, a in enumerate(layouts):
        calls.keep([a, b], None, i)  # pyright: ignore[reportArgumentType]
    assert [calls.find([a, b], None) for a in layouts] == [None, None, 2, 3, 4, 5]
    for m in range(1, 20):
        calls.keep([torch.ones(m, 32), b], None, m)  # pyright: ignore[reportArgumentType]
        assert calls.find([torch.ones(m, 32), b], None) == m and len(calls._checks) <= 3


@pytest.mark.parametrize(
    "name",
    ["gemm_bias_act", "gemm_residual_partial_rmsnorm", "gemm_residual_partial_rmsnorm_bwd"],
)
@pytest.mark.parametrize("through", ["function", "operator"])
def test_a_second_call_asks_for_no_signature(
    monkeypatch: pytest.MonkeyPatch, name: str, through: str
) -> None:
    kernel = getattr(generated, name)
    spec = kernel.spec
    sizes = dict(spec.check_shapes[0])

    def given(seed: int, static: dict[str, str]) -> list[Any]:
        about: Any = {"seed": seed, "device": "cpu", "binding": static}
        return list(draw_inputs(spec, sizes, spec.default_types(), **about).values())

    for key, op in kernel.ops.items():
        static = dict(zip(spec.parameters, key, strict=True))
        run = kernel if through == "function" else op.default
        variant = kernel.variants[key]
        monkeypatch.delitem(vars(variant.function), "calls", raising=False)
        with monkeypatch.context() as patch:
            want = [run(*(values := given(seed, static)), **static) for seed in range(3)]
            after = [t for t in values if isinstance(t, torch.Tensor)]
            patch.setattr(function_module, "supported", lambda _: True)
            patch.setattr(plan_module, "launch", Launches())
            for seed in range(3):
                got = run(*(values := given(seed, static)), **static)
                torch.testing.assert_close(got, want[seed], rtol=2**-6, atol=1e-5)
                patch.setattr(call_cache, "signature", None)
            torch.testing.assert_close(values, [*_put(values, after)], rtol=2**-6, atol=1e-5)


def _put(values: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    left = iter(tensors)
    return [next(left) if isinstance(x, torch.Tensor) else x for x in values]
