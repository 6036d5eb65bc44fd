"""`out=`: outputs that come to lie in the caller's tensors, by the kernel's own stores where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.generated import gemm_partial_swiglu_bwd as kernel
from coda_agent.generated import gemm_residual_partial_rmsnorm_bwd as updating
from coda_agent.primitives.errors import LaunchError
from coda_agent.runtime import function as function_module
from coda_agent.runtime import plan as plan_module
from coda_agent.runtime.launch import Arguments, Bound
from coda_agent.specs import draw_inputs
from tests.runtime.test_plan import Launches

M, F, K = 32, 48, 64
WAYS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "contiguous": (torch.empty_like, True),
    "turned": (lambda t: torch.empty_like(t.mT.contiguous()).mT, False),
    "off 32 bytes": (lambda t: t.new_empty(t.numel() + 8)[8:].view(t.shape), False),
    "every other column": (lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2], False),
}


def given(*lead: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = (*lead, K), (F, K), (*lead, 2 * F)
    return [torch.randn(s, generator=made).bfloat16() for s in shapes]


class Stores(Launches):
    """Launches, and where the last one stored its first output."""

    at = 0

    def __call__(self, given: Arguments) -> Bound:
        bound = super().__call__(given)

        def enqueue(inputs: Any, outputs: Any) -> None:
            self.at = outputs[0].data_ptr()
            bound.enqueue(inputs, outputs)

        return Bound(bound.program, bound.config, enqueue)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    found = Stores()
    for variant in kernel.variants.values():
        monkeypatch.delitem(vars(variant.function), "calls", raising=False)
    monkeypatch.setattr(function_module, "supported", lambda _: True)
    monkeypatch.setattr(plan_module, "bind", found)
    yield found


@pytest.mark.parametrize("lead", [(M,), (2, M)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_an_output_lies_where_it_is_told(stores: Stores, way: str, lead: tuple[int, ...]) -> None:
    values, (make, direct) = given(*lead), WAYS[way]
    want = kernel(*values)
    for _ in range(2):
        into, rows = make(want[0]), torch.empty(lead)
        got = kernel(*values, out={"dZ": into, "z": rows})
        assert got[0] is into and got[1] is rows
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert (stores.at == into.data_ptr()) == direct


def test_an_output_may_overwrite_the_input_that_its_threads_read(stores: Stores) -> None:
    values = given(M)
    want = kernel(*values)
    *others, z = values
    version = z._version
    got = kernel(*others, z, out={"dZ": z})
    assert got[0] is z and stores.at == z.data_ptr() and z._version > version
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("start", [0, 32], ids=["A, which all threads read", "part of Z"])
def test_an_output_over_what_others_read_is_copied(stores: Stores, start: int) -> None:
    held = torch.randn(2 * M * F * 4).bfloat16()
    a, b, z = given(M)
    if start:
        z = held[: z.numel()].view(z.shape).copy_(z)
    else:
        a = held[: a.numel()].view(a.shape).copy_(a)
    want = kernel(a, b, z)
    into = held[start : start + z.numel()].view(z.shape)
    got = kernel(a, b, z, out={"dZ": into})
    assert stores.at != into.data_ptr()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_on_a_cpu_and_under_torch_compile() -> None:
    values = given(M)
    want = kernel(*values)
    into = [torch.empty_like(want[0]) for _ in range(2)]
    assert kernel(*values, out={"dZ": into[0]})[0] is into[0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def traced(*values: Tensor) -> Any:
        *given, into = values
        return kernel(*given, out={"dZ": into})[0] + 1

    torch.testing.assert_close(traced(*values, into[1]), want[0] + 1)
    assert all(torch.equal(t, want[0]) for t in into)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dz", torch.ones(M, 2 * F).bfloat16(), "out has 'dz', expected some of dZ, z, O"),
        ("dZ", torch.ones(M, 2 * F), "out's dZ has dtype torch.float32, expected torch.bfloat16"),
        ("O", torch.ones(M, 2).bfloat16(), r"out's O has shape \(32, 2\), expected \(32, 48\)"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        kernel(*given(M), out={name: value})
    assert (value == 1).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            torch.ones(M, 2 * F),
            "out is Tensor, expected tensors by name, such as out={'dZ': tensor}",
        ),
        ((torch.ones(M, 2 * F),), "out is tuple, expected tensors by name"),
        (3, "out is int, expected tensors by name"),
        ({"dZ": 3}, "out's dZ is int, expected a dense tensor"),
        ({"dZ": None}, "out's dZ is NoneType, expected a dense tensor"),
        ({"dZ": torch.ones(2, 2).to_sparse()}, "out's dZ is torch.sparse_coo, expected a dense"),
    ],
)
def test_another_form_of_out_is_refused(out: Any, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        kernel(*given(M), out=out)
    assert message in str(caught.value)


def test_a_gradient_and_what_is_overwritten_already_are_refused() -> None:
    a, b, z = given(M)
    message = "has no backward pass|would lose the result's gradient"
    with pytest.raises(LaunchError, match=message):
        kernel(a.requires_grad_(), b, z, out={"dZ": z})
    spec = updating.spec
    sizes, types = dict(spec.check_shapes[0]), spec.default_types()
    values: Any = draw_inputs(spec, sizes, types, seed=0, device="cpu")
    with pytest.raises(LaunchError, match="out has 'O', expected some of C_out, dgamma"):
        updating(**values, update="in_place", out={"O": torch.ones(1)})
