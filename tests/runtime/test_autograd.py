"""Gradients of accepted kernels, beside autograd of their references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from coda_agent import generated
from coda_agent.primitives.errors import LaunchError
from coda_agent.runtime import function as function_module
from coda_agent.runtime import plan as plan_module
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import Spec, draw_inputs, run_reference
from tests.runtime.test_kernel import ADDS, IN_PLACE, READS
from tests.runtime.test_plan import Launches

NAMES = dir(generated)
REFUSED = {
    "gemm_fp8_rmsnorm_swiglu_quantised": "its outputs have no gradients",
    "gemm_fp8_swiglu_quantised": "its outputs have no gradients",
    "in_place": "it overwrites an input",
}
CASES = [
    pytest.param(name, binding, id=" ".join((name, *binding.values())))
    for name in NAMES
    for binding in getattr(generated, name).spec.bindings()
]
SWIGLU = generated.gemm_rmsnorm_swiglu


def leaves(spec: Spec, binding: dict[str, str], *, exact: bool) -> dict[str, Any]:
    """One draw, the same in both precisions; whatever can requires a gradient."""
    sizes, types = dict(spec.check_shapes[1]), spec.default_types()
    found = {}
    for name, value in draw_inputs(spec, sizes, types, seed=1, binding=binding).items():
        t = torch.as_tensor(value, dtype=torch.float32 if isinstance(value, float) else None)
        if t.is_floating_point():
            able = t.element_size() > 1
            t = (t.double() if exact else t.clone()).requires_grad_(able)
        found[name] = t
    return found


def gradients(
    outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of a random sum of the outputs, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    drawn = {o: torch.randn(t.shape, generator=generator) for o, t in outputs.items()}
    terms = [(t.double() * drawn[o].to(t.device)).sum() for o, t in outputs.items()]
    loss = torch.stack(terms).sum()
    wanted = {x: t for x, t in inputs.items() if t.requires_grad}
    found = torch.autograd.grad(loss, [*wanted.values()])
    return {x: g.double().cpu() for x, g in zip(wanted, found, strict=True)}


@pytest.mark.parametrize(("name", "binding"), CASES)
def test_gradients_err_as_pytorchs_own(name: str, binding: dict[str, str]) -> None:
    hold(name, binding, "cpu")


def hold(name: str, binding: dict[str, str], device: str) -> None:
    """Hold the gradients of a kernel on a device to its reference's."""
    kernel = getattr(generated, name)
    spec = kernel.spec
    ours, theirs = (leaves(spec, binding, exact=False) for _ in range(2))
    ours = {x: t.detach().to(device).requires_grad_(t.requires_grad) for x, t in ours.items()}
    for word in (name, *binding.values()):
        if word in REFUSED:
            with pytest.raises(LaunchError, match=REFUSED[word]):
                kernel(**ours, **binding)
            return
    exact = leaves(spec, binding, exact=True)
    truth = gradients(run_reference(spec, exact, binding=binding, exact=True), exact)
    base = gradients(run_reference(spec, theirs, binding=binding), theirs)
    results = kernel(**ours, **binding)
    results = results if isinstance(results, tuple) else (results,)
    assert all(t.requires_grad for t in results)
    found = gradients(dict(zip(spec.outputs, results, strict=True)), ours)
    assert {*found} == {x for x, t in ours.items() if t.dtype.is_floating_point and t.requires_grad}
    for x, want in truth.items():
        size = want.norm()
        ours_off, base_off = (found[x] - want).norm(), (base[x] - want).norm()
        assert ours_off <= 2.0 * base_off + 2**-9 * size, (x, ours_off / size, base_off / size)
        assert size > 0 and base_off < size / 5


MIXED = """
---
name: gemm_mixed
level: compose
summary: A product, in FP8 too, and its largest value.
types: {T: [bfloat16, float16]}
dims: {M: {}, N: {multiple_of: 16}, K: {multiple_of: 8}}
gemm: [A, B]
inputs:
  A: {shape: [M, K], dtype: T}
  B: {shape: [N, K], dtype: T}
outputs:
  D: {shape: [M, N], dtype: T}
  Q: {shape: [M, N], dtype: float8_e4m3fn}
  top: {shape: [M], dtype: float32}
check_shapes: [{M: 8, N: 16, K: 8}]
bench_shapes: [{M: 8, N: 16, K: 8}]
tolerance: {multiple: 2.0}
target: 0.9
---
```python reference
def reference(A, B):
    D = (A @ B.T).float()
    return {"D": D.to(A.dtype), "Q": D.to(torch.float8_e4m3fn), "top": D.amax(-1)}
```
""".lstrip()
STORES = """
from coda_agent.primitives import RowMax, Tile, epilogue

@epilogue(D=Tile, Q=Tile, top=RowMax)
def gemm_mixed(acc):
    return {"D": acc, "Q": acc, "top": acc}
"""


def loaded(folder: Path, spec: str, program: str) -> Kernel:
    (folder / "spec.md").write_text(spec)
    (folder / "kernel.py").write_text(program)
    return load_kernel(folder)


def test_outputs_without_a_gradient_beside_one_that_has(tmp_path: Path) -> None:
    kernel = loaded(tmp_path, MIXED, STORES)
    a, b = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (8, 16))
    d, q, top = kernel(a, b)
    assert d.requires_grad and not q.requires_grad
    grad = torch.autograd.grad(d.float().sum(), a, retain_graph=True)[0]
    torch.testing.assert_close(grad, b.sum(0).expand(8, -1), rtol=2**-6, atol=2**-6)
    with pytest.raises(LaunchError, match="output 'top', a RowMax, has no derivative"):
        top.sum().backward()


@pytest.mark.parametrize("program", [ADDS, READS], ids=["adds", "reads"])
def test_what_is_added_to_has_a_gradient_out_of_place(tmp_path: Path, program: str) -> None:
    kernel = loaded(tmp_path, IN_PLACE, program)
    a, b = (torch.randn(8, 8).bfloat16().requires_grad_() for _ in "ab")
    x, alpha = torch.randn(8, 8).bfloat16().requires_grad_(), torch.tensor(0.5).requires_grad_()
    weights = torch.randn(8), torch.randn(8, 8).bfloat16()

    def found(*outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()
        return torch.autograd.grad(total, (a, b, x, alpha))

    d = (a @ b.mT).float()
    want = found(d.sum(-1), (x + alpha * d).bfloat16())
    got = found(*kernel(a, b, x, alpha, update="out_of_place"))
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-4)
    with pytest.raises(LaunchError, match="it overwrites an input"):
        kernel(a, b, x, alpha, update="in_place")


def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(2, 40, 64).bfloat16(), (torch.randn(96, 64) / 8).bfloat16()
    return [x.requires_grad_() for x in (a, b, torch.rand(2, 40).add(0.5))]


def loss(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    d, o = SWIGLU(a, b, r)
    return o.float().square().sum() + d.float().sin().sum()


def same(function: Callable[..., torch.Tensor]) -> None:
    values = given()
    want = torch.autograd.grad(loss(*values), values)
    got = torch.autograd.grad(function(*values), values)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients_under_torch_compile(dynamic: bool) -> None:
    same(torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager"))


def test_numbers_that_change_under_torch_compile() -> None:
    a, b, c, bias = (torch.randn(*x).bfloat16() for x in ((8, 64), (96, 64), (8, 96), (96,)))
    a.requires_grad_()

    def call(alpha: float) -> torch.Tensor:
        out: Any = generated.gemm_bias_act(a, b, c, bias, alpha, 1.0, activation="silu")
        return out.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for alpha in (0.5, 0.7, 0.9):
        want, got = (torch.autograd.grad(f(alpha), a)[0] for f in (call, compiled))
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing(reentrant: bool) -> None:
    values, again = given(), given()
    checkpoint(loss, *values, use_reentrant=reentrant).backward()
    loss(*again).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(values, again, strict=True))  # type: ignore[arg-type]


def test_operators_have_gradients_by_themselves() -> None:
    values = given()
    torch.library.opcheck(torch.ops.coda_agent.gemm_rmsnorm_swiglu.default, tuple(values))
    a = torch.randn(8, 64).bfloat16()
    others = torch.randn(96, 64).bfloat16(), torch.randn(8, 96).bfloat16(), torch.randn(96)
    scalars = torch.tensor(0.5).requires_grad_(), torch.tensor(2.0).requires_grad_()
    inputs = (a.requires_grad_(), others[0], others[1], others[2].bfloat16(), *scalars)
    torch.library.opcheck(torch.ops.coda_agent.gemm_bias_act.Tensor, inputs)
    plain = torch.ops.coda_agent.gemm_bias_act.default(*inputs[:4], 0.5, 2.0)
    alike = torch.ops.coda_agent.gemm_bias_act.Tensor(*inputs)
    found = [torch.autograd.grad(x.float().square().sum(), a)[0] for x in (plain, alike)]
    assert torch.equal(*found)


def test_raw_partials_have_gradients() -> None:
    kernel = generated.gemm_rmsnorm_partial_cross_entropy
    inputs = leaves(kernel.spec, {}, exact=False)
    z, target, lse = kernel(**inputs)
    want = torch.autograd.grad((lse - target).sum() + z.float().sum(), inputs["A"])[0]
    z, target, partials = kernel(**inputs, block_size=128)
    assert partials.shape == (len(z), -(-z.shape[1] // 128))
    total = partials.logsumexp(-1)
    got = torch.autograd.grad((total - target).sum() + z.float().sum(), inputs["A"])[0]
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-8)


def test_a_call_without_gradients_does_not_detach_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant, values = SWIGLU.variants[()], given()
    monkeypatch.delitem(vars(variant.function), "calls", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(function_module, "supported", lambda _: True)
        patch.setattr(plan_module, "launch", Launches())
        for _ in range(2):
            with torch.no_grad():
                assert not any(t.requires_grad for t in SWIGLU(*values))
            # By the operator: the launches here are PyTorch's, which have gradients of their own.
            assert all("coda_agent" in str(t.grad_fn) for t in SWIGLU(*values))


def test_no_rows_have_gradients_of_zero() -> None:
    for name in (
        "gemm_rmsnorm_swiglu",
        "gemm_partial_cross_entropy",
        "gemm_residual_partial_rmsnorm",
    ):
        inputs = leaves(getattr(generated, name).spec, {}, exact=False)
        rows = {x: t[:0].detach().requires_grad_(t.requires_grad) for x, t in inputs.items()}
        rows |= {x: inputs[x] for x in ("B", "gamma") if x in inputs}
        outputs = dict(zip("abc", getattr(generated, name)(**rows), strict=False))
        for x, g in gradients(outputs, rows).items():
            assert g.shape == rows[x].shape and not g.any(), x


def test_a_call_keeps_what_is_read() -> None:
    a, b, r = given()
    frozen = b.detach()
    d, _ = SWIGLU(a, frozen, r)
    kept = d.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert {t.data_ptr() for t in kept} == {x.data_ptr() for x in (frozen, r, d)}
    with torch.no_grad():
        assert not SWIGLU(a, b, r)[0].requires_grad
    assert SWIGLU(a, b, r)[0].requires_grad


def test_a_call_with_gradients_stores_what_spares_the_product() -> None:
    kernel = generated.gemm_bias_act
    inputs = leaves(kernel.spec, {"activation": "silu", "bias_per": "column"}, exact=False)
    inputs |= {x: float(inputs[x].detach()) for x in ("alpha", "beta")}
    out: Any = kernel(**inputs, activation="silu")
    z = inputs["alpha"] * (inputs["A"] @ inputs["B"].mT).float() + inputs["bias"]
    z = (z + inputs["beta"] * inputs["C"]).bfloat16()
    kept = [t for t in out.grad_fn.saved_tensors if t.shape == z.shape]
    assert len(kept) == 1
    torch.testing.assert_close(kept[0], z, rtol=2**-6, atol=2**-6)
    with torch.no_grad():
        plain: Any = kernel(**inputs, activation="silu")
    assert torch.equal(plain, out)


def test_what_is_not_differentiated_is_refused() -> None:
    values = given()
    slope = torch.autograd.grad(loss(*values), values[2], create_graph=True)[0]
    with pytest.raises(LaunchError, match="cannot be differentiated again"):
        slope.sum().backward()
    plain = [x.detach() for x in values]
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(LaunchError, match=r"by torch\.autograd alone"):
            transform(loss)(*plain)
    with forward_ad.dual_level(), pytest.raises(LaunchError, match="not in forward mode"):
        loss(forward_ad.make_dual(plain[0], plain[0]), *plain[1:])
    fp8 = leaves(generated.gemm_fp8_rmsnorm.spec, {}, exact=False)
    fp8["A"].requires_grad_()
    with pytest.raises(LaunchError, match=r"A is torch\.float8_e4m3fn, which has no gradient"):
        generated.gemm_fp8_rmsnorm(**fp8)


def test_vmap_of_what_is_differentiated_after() -> None:
    def outer(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x, y: SWIGLU(x, b, y)[1])(a, r).float().square().sum()

    values = given()
    got = torch.autograd.grad(outer(*values), [values[0], values[2]])
    whole = SWIGLU(*values)[1].float().square().sum()
    want = torch.autograd.grad(whole, [values[0], values[2]])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_autocast_casts_as_for_a_linear_layer() -> None:
    a, b, r = given()
    wide = a.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        d, _ = SWIGLU(wide, b.float(), r)
        again, _ = SWIGLU(a, b, r)
    assert (
        d.dtype is torch.bfloat16 and torch.equal(d, SWIGLU(a, b, r)[0]) and torch.equal(d, again)
    )
    assert torch.autograd.grad(d.float().sum(), wide)[0].dtype is torch.float32
    kernel = generated.gemm_residual_partial_rmsnorm_bwd
    inputs = leaves(kernel.spec, {"update": "in_place"}, exact=False)
    inputs = {x: t.detach() for x, t in inputs.items()} | {"X": inputs["X"].detach().float()}
    with torch.autocast("cpu"), pytest.raises(LaunchError, match=r"'O' is torch\.float32"):
        kernel(**inputs, update="in_place")
