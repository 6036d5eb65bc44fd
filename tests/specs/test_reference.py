"""References: against expectations written here, in float64, and in the types a user runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec, admit, draw_inputs, load_spec, reference_callable, run_reference
from tests.meanings import EXPECTED, wide
from tests.written import spec as written

SPECS = Path(load_spec.__code__.co_filename).parent
NAMES = (
    "gemm_bias_act",
    "gemm_residual_partial_rmsnorm",
    "gemm_rmsnorm",
    "gemm_rmsnorm_swiglu",
    "gemm_swiglu",
)
SIZES = {"M": 5, "N": 16, "K": 8}
BF16 = {"T": "bfloat16"}


def spec_of(name: str) -> Spec:
    return load_spec(SPECS / f"{name}.md")


def tensors(inputs: dict[str, torch.Tensor | float]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


CASES = [(name, binding) for name in EXPECTED for binding in spec_of(name).bindings()]


@pytest.mark.parametrize(("name", "binding"), CASES)
def test_exact_run_is_float64(name: str, binding: dict[str, str]) -> None:
    spec = spec_of(name)
    sizes = {"M": 5, "N": 192, "K": 32}
    inputs = draw_inputs(spec, sizes, spec.default_types(), seed=3, binding=binding)
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    wanted = EXPECTED[name](wide(inputs), binding)
    assert list(truth) == list(spec.outputs) == list(wanted)
    for output, value in truth.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, wanted[output], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "binding"), [case for case in CASES if case[0] in NAMES])
def test_rounded_run_is_near_the_exact_one(name: str, binding: dict[str, str], dtype: str) -> None:
    spec = spec_of(name)
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    for sizes in spec.check_shapes:
        types = {"T": dtype}
        inputs = draw_inputs(spec, sizes, types, seed=4, binding=binding)
        rounded = run_reference(spec, inputs, binding=binding)
        truth = run_reference(spec, inputs, binding=binding, exact=True)
        for output, value in rounded.items():
            assert str(value.dtype) == f"torch.{spec.dtype_of(output, types)}"
            assert tuple(value.shape) == spec.shape_of(output, sizes, binding)
            error = (value.double() - truth[output]).norm() / truth[output].norm()
            assert 0 < error < 2 * epsilon
            # Rounding happened: the exact run is not merely the rounded one upcast.
            assert not torch.equal(value.double(), truth[output])


def test_row_statistics_come_from_the_unrounded_sum() -> None:
    spec = spec_of("gemm_residual_partial_rmsnorm")
    inputs = draw_inputs(spec, {"M": 64, "N": 256, "K": 64}, BF16, seed=5)
    out = run_reference(spec, inputs)
    given = tensors(inputs)
    unrounded = (given["A"] @ given["B"].T).double() + given["C"].double()
    s = unrounded.square().mean(-1)
    of_rounded = out["D"].double().square().mean(-1)
    assert (out["s"] - s).abs().max() < 1e-6 < (out["s"] - of_rounded).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_specs_are_admitted(name: str) -> None:
    admit(spec_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_references_compile_whole(name: str) -> None:
    spec = spec_of(name)
    inputs = draw_inputs(spec, SIZES, BF16, seed=6)
    compiled = torch.compile(reference_callable(spec), backend="eager", fullgraph=True)
    for output, value in run_reference(spec, inputs).items():
        assert torch.equal(compiled(**inputs)[output], value)


# A spec small enough to break in every way, and to hold any reference body.
TEMPLATE = """\
---
name: toy
level: extend
summary: For tests.
types: {{T: {types}}}
dims: {{M: {{}}, N: {{}}, K: {{}}}}
gemm: [A, B]
inputs:
  A: {{shape: [M, K], dtype: T}}
  B: {{shape: [N, K], dtype: T, draw: {{normal: {{std: K**-0.5}}}}}}
  y: {{shape: [M], dtype: int64, draw: {{integers: [2, N]}}}}
  u: {{shape: [M], dtype: float32, draw: {{uniform: [3, 4]}}}}
  k: {{shape: [], dtype: float32, draw: {{constant: 0.1}}}}
outputs: {{O: {{shape: {shape}, dtype: {dtype}}}}}
check_shapes: [{{M: 8, N: 16, K: 32}}, {{M: 1, N: 16, K: 16}}]
bench_shapes: [{{M: 64, N: 64, K: 64}}]
tolerance: {{multiple: 2.0}}
target: 0.9
---
```python reference
import torch
import torch.nn.functional as F


def reference(A, B, y, u, k):
    {body}
```
"""
TOY = {"M": 400, "N": 16, "K": 256}
BODY_LINE = TEMPLATE.split("{body}")[0].count("\n") + 1


def toy(body: str, *, shape: str = "[M, N]", dtype: str = "T", types: str = "[bfloat16]") -> Spec:
    text = TEMPLATE.format(body=body.replace("\n", "\n    "), shape=shape, dtype=dtype, types=types)
    return load_spec("toy.md", text=text)


def test_draws_follow_the_spec() -> None:
    spec = toy("return {'O': A @ B.T}", types="[float8_e4m3fn]")
    inputs = draw_inputs(spec, TOY, {"T": "float8_e4m3fn"}, seed=0)
    a, b, y, u = (tensors(inputs)[name] for name in "AByu")
    dtypes = [t.dtype for t in (a, b, y, u)]
    assert dtypes == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.int64, torch.float32]
    assert abs(a.double().std() - 1) < 0.02 and abs(b.double().std() * 16 - 1) < 0.05
    assert set(y.tolist()) == set(range(2, 16))
    assert u.min() >= 3 and u.max() < 4 and u.std() > 0.2
    # A scalar is a float32 value, as the kernel receives it, held in a Python float.
    assert inputs["k"] == float(torch.tensor(0.1)) != 0.1


def test_draws_are_seeded() -> None:
    spec = spec_of("gemm_bias_act")
    first, again, other = (draw_inputs(spec, SIZES, BF16, seed=seed) for seed in (1, 1, 2))
    for name in first:
        value, same, different = (torch.as_tensor(run[name]) for run in (first, again, other))
        assert torch.equal(value, same) and not torch.equal(value, different)
    row = draw_inputs(spec, SIZES, BF16, seed=1, binding={"bias_per": "row"})["bias"]
    assert isinstance(row, torch.Tensor) and row.shape == (5,)
    with pytest.raises(SpecError, match="type T is None; expected bfloat16, float16"):
        draw_inputs(spec, SIZES, {}, seed=1)
    with pytest.raises(SpecError, match="N=17; expected a positive multiple of 16"):
        draw_inputs(spec, {**SIZES, "N": 17}, BF16, seed=1)


@pytest.mark.parametrize(
    "cast",
    [
        "x.to(torch.bfloat16)", "x.to('cpu', torch.float32)", "x.to(u)", "x.half()", "x.float()",
        "x.type(torch.float16)", "torch.sum(x[..., None], -1, dtype=torch.float32)",
        "x * torch.ones(16)", "x.cumsum(1, dtype=torch.float16).diff(dim=1, prepend=torch.zeros(8, 1))",
        "x * (n / 7) / n * 7", "x * n.sqrt() ** 2 / n", "x * torch.where(x > 1e9, 1.0, 0.1) * 10",
        "x * torch.add(n, n, alpha=2) / (3 * n)",
    ],
)  # fmt: skip
def test_every_cast_is_exact(cast: str) -> None:
    body = "x, n = A.float() @ B.float().T, torch.arange(1, 17)"
    spec = toy(f"{body}\nreturn {{'O': {cast}}}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=1)
    a, b = tensors(inputs)["A"], tensors(inputs)["B"]
    defaults = set[torch.dtype]()
    noted = lambda func, args, result: defaults.add(torch.get_default_dtype()) or result
    got = run_reference(spec, inputs, exact=True, touch=noted)["O"]
    torch.testing.assert_close(got, a.double() @ b.double().T, rtol=1e-12, atol=1e-13)
    assert defaults == {torch.float32}  # which is one for all threads


def test_a_baseline_runs_in_place_of_the_reference() -> None:
    plain = toy("return {'O': (A.float() @ B.float().T).bfloat16()}")
    baseline = "def baseline(A, B, u, y, k):\n    return {'O': A @ B.T + k}\n\n\ndef reference"
    spec = load_spec("toy.md", text=plain.text.replace("def reference", baseline))
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=1)
    a, b = tensors(inputs)["A"], tensors(inputs)["B"]
    assert torch.equal(run_reference(spec, inputs)["O"], (a.float() @ b.float().T).bfloat16())
    got = run_reference(spec, inputs, baseline=True)["O"]
    assert torch.equal(got, a @ b.T + inputs["k"])
    assert reference_callable(plain, baseline=True) is reference_callable(plain)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*_fp8_*.md")), ids=lambda p: p.stem)
def test_fp8_baselines_compute_what_the_reference_does(path: Path) -> None:
    spec = load_spec(path)
    assert spec.has_baseline
    inputs = draw_inputs(spec, spec.check_shapes[1], {}, seed=4)
    truth = run_reference(spec, inputs, exact=True)
    for baseline in (False, True):
        got = run_reference(spec, inputs, baseline=baseline)
        for name, value in got.items():
            assert str(value.dtype) == f"torch.{spec.outputs[name].dtype}"
            # Each value rounded to bfloat16 a few times, or to three bits.
            least = 2**-4 if value.dtype == torch.float8_e4m3fn else 2**-7
            assert (value.double() - truth[name]).norm() < least * truth[name].norm()
    # Both sets of scalars, in one graph each, with nothing but the product's launch for the scales.
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []
    seen = lambda graph, _: graphs.append(graph) or graph.forward
    compiled = torch.compile(reference_callable(spec, baseline=True), backend=seen, dynamic=False)
    for values in (inputs, draw_inputs(spec, spec.check_shapes[1], {}, seed=5)):
        plain = run_reference(spec, values, baseline=True)
        for name, value in compiled(**values).items():
            assert torch.equal(value.view(torch.uint8), plain[name].view(torch.uint8))
    assert len(graphs) <= 2
    for graph in graphs:
        called = [str(n.target) for n in graph.graph.nodes if n.op.startswith("call")]
        assert sum("scaled_mm" in c for c in called) == 1
        assert not any("tensor" in c or "full" in c for c in called)


def test_the_backward_of_a_norm_is_what_autograd_finds() -> None:
    spec = spec_of("gemm_residual_partial_rmsnorm_bwd")
    drawn = tensors(draw_inputs(spec, {"M": 5, "N": 16, "K": 8}, BF16, seed=3))
    v = {name: value.double() for name, value in drawn.items()}
    x, gamma = v["C"].requires_grad_(), v["gamma"].requires_grad_()
    y = x * x.square().mean(-1, keepdim=True).rsqrt() * gamma
    g = v["A"] @ v["B"].T
    dx, dgamma = torch.autograd.grad(y, (x, gamma), g)
    with torch.no_grad():
        # The saved statistic, and the inner product of the norm's output with its gradient.
        given: dict[str, torch.Tensor | float] = {
            **v,
            "r": x.square().mean(-1).rsqrt(),
            "z": (y * g).mean(-1),
        }
        got = run_reference(spec, given, exact=True)
    torch.testing.assert_close(got["O"], v["X"] + dx)
    torch.testing.assert_close(got["C_out"], y.detach())
    torch.testing.assert_close(got["dgamma"], dgamma)


@pytest.mark.parametrize(
    "returned", ["z.relu(), z.sum(0).float()", "[z.relu(), z.sum(0).float()]", "both(z)"]
)
def test_a_tuple_gets_the_names_of_the_outputs(returned: str) -> None:
    text = (SPECS / "gemm_symlog.md").read_text("utf-8")
    head, _ = text.split("```python reference")
    head = head.replace(
        "  O: {shape: [M, N], dtype: T}", "  O: [M, N]\n  s: {shape: [N], dtype: float32}"
    )
    source = "def both(z):\n    return z.relu(), z.sum(0).float()\n\n\ndef reference(A, B, bias, scale=2):\n"
    source += f"    z = scale * (A @ B.T) + bias\n    return {returned}\n"
    spec = load_spec("toy.md", text=f"{head}```python reference\n{source}```\n")
    v = tensors(draw_inputs(spec, spec.check_shapes[1], BF16, seed=0))
    z = 2 * (v["A"].double() @ v["B"].double().T) + v["bias"].double()
    compiled = torch.compile(reference_callable(spec), backend="eager", fullgraph=True)
    wide = {name: value.double() for name, value in v.items()}
    for got in (run_reference(spec, v, exact=True), compiled(**wide)):
        assert [*got] == ["O", "s"]
        torch.testing.assert_close(got["O"], z.clamp(min=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run_reference(spec, v, exact=True)["s"], z.sum(0))


def test_softmax_dtype_keyword_is_exact() -> None:
    spec = toy("return {'O': F.softmax(A @ B.T, -1, dtype=torch.float32).to(A.dtype)}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=1)
    z = tensors(inputs)["A"].double() @ tensors(inputs)["B"].double().T
    want = z.exp() / z.exp().sum(-1, keepdim=True)
    got = run_reference(spec, inputs, exact=True)["O"]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_integers_keep_their_type_in_the_exact_run() -> None:
    # `^` takes no floating-point numbers.
    spec = toy("z = A @ B.T\nreturn {'O': z * (z.argmax(-1) ^ y)[:, None]}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=1)
    a, b, y = (tensors(inputs)[name] for name in "ABy")
    z = (a.double() @ b.double().T).tolist()
    want = [
        [x * (row.index(max(row)) ^ i) for x in row] for row, i in zip(z, y.tolist(), strict=True)
    ]
    got = run_reference(spec, inputs, exact=True)["O"]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass\nreturn {'O': A @ B}", f"toy.md:{BODY_LINE + 1}: reference raised RuntimeError: "),
        ("raise ValueError", f"toy.md:{BODY_LINE}: reference raised ValueError: no message"),
        ("return np.eye(3)", f"toy.md:{BODY_LINE}: reference raised NameError: name 'np'"),
        ("return None", "toy.md: the reference returns None; expected the tensors O, as a dict by"),
        ("return A, A", "the reference returns 2 values; expected the tensors O"),
        ("return {'Z': A}", "the reference returns a dict with Z, a Tensor; expected"),
        ("return {'O': A, 'Z': A}", "a dict with O, a Tensor, Z, a Tensor; expected the tensors O"),
        ("return {'O': 1.0}", "the reference returns a dict with O, a float; expected the tens"),
    ],
)
def test_faulty_references(body: str, message: str) -> None:
    spec = toy(body)
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=0)
    for exact in (False, True):
        with pytest.raises(SpecError) as caught:
            run_reference(spec, inputs, exact=exact)
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cast", ["x.view(torch.int16)", "x.type('torch.HalfTensor')"])
def test_casts_without_an_exact_counterpart_are_refused(cast: str) -> None:
    spec = toy(f"x = A @ B.T\nreturn {{'O': {cast}}}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=0)
    with pytest.raises(SpecError, match=r"use \.to\(dtype\) instead"):
        run_reference(spec, inputs, exact=True)


def test_an_output_that_left_float64_is_refused() -> None:
    spec = toy("with torch._C.DisableTorchFunction():\n    return {'O': (A @ B.T).float()}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=0)
    with pytest.raises(SpecError, match=r"is torch\.float32 in the exact run"):
        run_reference(spec, inputs, exact=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return {'O': torch.zeros_like(A @ B.T)}",
            "'O' is all zero; draw what moves it, or leave it out",
        ),
        (
            "return {'O': torch.ones_like(A @ B.T)}",
            "'O' is constant; draw what moves it, or leave it",
        ),
        ("return {'O': (A @ B.T * 0 + 1 + 1e-4 * u[:, None]).bfloat16()}", "'O' is constant"),
        ("return {'O': torch.eye(8, 16, dtype=A.dtype)}", "is constant: it depends on no input"),
        ("return {'O': A[:, :16] * 1}", "no output depends on both GEMM operands, A and B"),
        ("return {'O': B[:, :8].T * 1}", "no output depends on both GEMM operands, A and B"),
        ("return {'O': (A @ B.T).log()}", "output 'O' has non-finite values"),
        ("return {'O': A @ B.T / 0}", "output 'O' has infinite values"),
        (
            "return {'O': B @ A.T}",
            "[16, 8]; expected bfloat16 [8, 16], as it is declared: change one",
        ),
        ("return {'O': (A @ B.T).float()}", "output 'O' is float32 [8, 16]; expected bfloat16"),
        ("return {'O': A.mul_(2) @ B.T}", "the reference changes its input 'A' in place"),
    ],
)
def test_degenerate_specs_are_refused(body: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        admit(toy(body))
    said = str(caught.value)
    assert said.startswith("toy.md: toy: ") and message in said and "\n" not in said


def test_an_output_beyond_its_type_is_refused_by_either_type() -> None:
    """A second type's overflow was the first program's fault."""
    large = written("return {'O': (4 * (A @ B.T).float()).exp().to(A.dtype)}", {})
    with pytest.raises(
        SpecError, match=r"'O' reaches [\d.]+e\+\d+ on .*, and float16 ends at 6.55e\+04"
    ):
        admit(large)
    admit(written("return {'O': (A @ B.T).float().exp().to(A.dtype)}", {}))


@pytest.mark.parametrize(("ends", "sound"), [("", False), (".to(A.dtype)", True)])
def test_a_sum_has_the_type_that_is_declared(ends: str, sound: bool) -> None:
    """A program has sums in float32, whatever the declared one is."""
    body = f"y = torch.relu(A @ B.T); return y, y.float().sum(-1){ends}"
    declared = written(body, outputs={"O": "[M, N]", "s": "[M]"})
    if sound:
        admit(declared)
        return
    with pytest.raises(SpecError, match="output 's' is float32; expected bfloat16, as it is decl"):
        admit(declared)


def test_a_spec_with_a_primitives_name_is_refused() -> None:
    text = toy("return {'O': (A @ B.T + k).relu()}").text.replace("name: toy", "name: relu")
    with pytest.raises(SpecError, match=r"relu\.md: name 'relu' is a primitive's.*gemm_relu"):
        load_spec("relu.md", text=text)


def test_a_sound_toy_is_admitted() -> None:
    admit(toy("return {'O': (k * (A @ B.T) * u[:, None] * y[:, None]).to(A.dtype)}"))
    # (M,) outputs: the one-row check shape alone would look constant.
    largest = "((A @ B.T).float() * u[:, None] * y[:, None]).amax(-1)"
    admit(toy(f"return {{'O': {largest}}}", shape="[M]", dtype="float32"))


SCALES = "k * u[:, None] * y[:, None]"
E4M3 = "torch.float8_e4m3fn"
ROUNDED_ON = {
    "into a buffer": f"q = torch.empty(8, 16, dtype={E4M3})\nq[:, ::2] = z[:, 1::2]\nO = q.bfloat16()",
    "arithmetic in a type that the spec does not know": "O = (z.half() * 2).to(A.dtype)",
    "the type of another tensor": f"O = z.to(A.to({E4M3})).to(A.dtype)",
    "a comparison": f"O = z * (z.to({E4M3}) != 1)",
}


@pytest.mark.parametrize("name", ROUNDED_ON)
def test_a_rounding_that_no_program_does_is_refused(name: str) -> None:
    body = f"z = (A @ B.T * {SCALES}).to(A.dtype)\n{ROUNDED_ON[name]}\nreturn {{'O': O}}"
    line = BODY_LINE + body[: body.index("O = ")].count("\n")
    kind = "float16" if "half" in body else "float8_e4m3fn"
    with pytest.raises(SpecError) as caught:
        admit(toy(body))
    said = str(caught.value)
    assert said.startswith(f"toy.md:{line}: the reference rounds to {kind} and computes on with ")


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (f"x.to({E4M3}).to(A.dtype)", torch.float8_e4m3fn),
        (f"torch.stack([x.to(dtype={E4M3}).T] * 2)[1].mT.float()", torch.float8_e4m3fn),
        ("x.to(torch.float8_e5m2).double()", torch.float8_e5m2),
        ("x.half().float()", torch.float16),
        ("x.bfloat16().float()", None),  # the spec's own type: noise
    ],
)
def test_a_rounding_that_is_computed_on_is_part_of_the_truth(cast: str, dtype: Any) -> None:
    spec = toy(f"x = A @ B.T * {SCALES}\nreturn {{'O': ({cast} * 3).to(A.dtype)}}")
    admit(spec)
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=0)
    wide: dict[str, Any] = {
        x: v.double() if isinstance(v, torch.Tensor) else v for x, v in inputs.items()
    }
    x = wide["A"] @ wide["B"].T * wide["k"] * wide["u"][:, None] * wide["y"][:, None]
    expected = x if dtype is None else x.float().to(dtype).double()
    assert dtype is None or not torch.equal(expected, x)
    torch.testing.assert_close(
        run_reference(spec, inputs, exact=True)["O"], expected * 3, rtol=1e-14, atol=0.0
    )


def test_what_is_stored_in_eight_bits_stays_exact_in_the_truth() -> None:
    body = f"q = (A @ B.T * {SCALES}).to({E4M3})\nreturn {{'O': q}}"
    spec, plain = toy(body, dtype="float8_e4m3fn"), toy(f"return {{'O': A @ B.T * {SCALES}}}")
    inputs = draw_inputs(spec, spec.check_shapes[0], BF16, seed=0)
    exact = (run_reference(s, inputs, exact=True)["O"] for s in (spec, plain))
    assert torch.equal(*exact)


def test_roundings_at_stores_and_to_the_own_type_are_admitted() -> None:
    z = f"(A @ B.T * {SCALES})"
    admit(toy(f"return {{'O': {z}.to({E4M3}).T.contiguous().T}}", dtype="float8_e4m3fn"))
    own = f"return {{'O': ({z}.to(A.dtype).float() * 2).to(A.dtype)}}"
    admit(toy(own, types="[bfloat16, float16]"))
    # In the second type this is a rounding to another.
    fixed = toy(own.replace("A.dtype", "torch.bfloat16", 1), types="[bfloat16, float16]")
    with pytest.raises(SpecError, match="the reference rounds to bfloat16 and computes on"):
        admit(fixed)


def test_each_element_type_has_to_give_what_is_declared() -> None:
    spec = toy(f"return {{'O': (A @ B.T * {SCALES}).bfloat16()}}", types="[bfloat16, float16]")
    with pytest.raises(SpecError, match=r"output 'O' is bfloat16 \[8, 16\]; expected float16"):
        admit(spec)


NO_GEMM = {
    "(z * u[:, None]).sum(-1) * k * y": ("[M]", "A @ B.sum(0)"),
    "(z * torch.arange(16)).mean(-1).mul(u * y * k).tanh()": ("[M]", "A @ B.sum(0)"),
    f"(z * {SCALES}).sum(0)": ("[N]", "B @ A.sum(0)"),
    f"(z * {SCALES}).mean(0).exp()": ("[N]", "B @ A.sum(0)"),
}


@pytest.mark.parametrize("result", NO_GEMM)
def test_a_reduction_of_the_product_itself_needs_no_gemm(result: str) -> None:
    shape, instead = NO_GEMM[result]
    body = f"z = A.float() @ B.float().T\nreturn {{'O': {result}}}"
    with pytest.raises(SpecError) as caught:
        admit(toy(body, shape=shape, dtype="float32"))
    assert f"no output needs a GEMM: a product with a vector, like {instead}," in str(caught.value)


@pytest.mark.parametrize(
    "result", ["z.square().mean(-1)", "z.logsumexp(-1)", "(z + B[:, 0]).relu().sum(-1)"]
)
def test_other_reductions_need_one(result: str) -> None:
    body = f"z = A.float() @ B.float().T\nreturn {{'O': {result} * u * y * k}}"
    admit(toy(body, shape="[M]", dtype="float32"))


def test_a_plain_sum_beside_an_output_that_needs_the_product_is_admitted() -> None:
    body = f"z = A.float() @ B.float().T * {SCALES}\nreturn {{'s': z.sum(-1), 'O': z.to(A.dtype)}}"
    text = toy(body).text.replace("outputs: {O", "outputs: {s: {shape: [M], dtype: float32}, O")
    admit(load_spec("toy.md", text=text))
