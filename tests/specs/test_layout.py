"""Specs in layouts other than the kernel's own, from the text to a call on the user's tensors.

Each reference is plain PyTorch on tensors as a user has them, and the call has to give what it gives.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.compare import same
from coda_agent.agent.judge.compile_gate import jobs_for
from coda_agent.agent.judge.imported import check_imported, imported
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.structures import structures
from coda_agent.agent.workbench.reading import programs_to_define
from coda_agent.primitives.errors import LaunchError, ProgramError, SpecError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.runtime import function
from coda_agent.runtime import kernel as module
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.user_layout import Declared
from coda_agent.specs import Spec, admit, as_declared, draw_inputs, run_reference
from tests.written import spec

FLOAT = "dtype: float32"
product = partial(spec, gemm="[x, w]")


LAYOUTS: dict[str, Any] = {
    "B is (K, N)": lambda: product(
        "return F.gelu(x @ w + b)", {"x": "[M, K]", "w": "[K, N]", "b": "[N]"}, {"y": "[M, N]"}
    ),
    "A is (K, M)": lambda: product(
        "return torch.relu(x.T @ w)", {"x": "[K, M]", "w": "[K, N]"}, {"y": "[M, N]"}
    ),
    "the result transposed": lambda: product(
        "return torch.tanh(w @ x.T)", {"x": "[M, K]", "w": "[N, K]"}, {"y": "[N, M]"}
    ),
    "a batch": lambda: product(
        "return res + F.linear(x, w)",
        {"x": "[B, T, K]", "w": "[N, K]", "res": "[B, T, N]"},
        {"y": "[B, T, N]"},
    ),
    "a batch in extents of 1": lambda: product(
        "h = x @ w * r + b; s = h.float().square().sum(-1, keepdim=True); "
        "return h.to(x.dtype), s, h.float().sum((0, 1), keepdim=True)",
        {"x": "[B, T, K]", "w": "[K, N]", "r": f"{{shape: [B, T, 1], {FLOAT}}}", "b": "[1, 1, N]"},
        {
            "y": "[B, T, N]",
            "s": f"{{shape: [B, T, 1], {FLOAT}}}",
            "c": f"{{shape: [1, 1, N], {FLOAT}}}",
        },
    ),
    "K is N": lambda: product(
        "return res + F.linear(x, w, b)",
        {"x": "[M, K]", "w": "[K, K]", "res": "[M, K]", "b": "[K]"},
        {"y": "[M, K]"},
    ),
    "M is N": lambda: product(
        "z = (q @ k.T).float() * r + b; return z.to(q.dtype), z.amax(-1)",
        {"q": "[S, D]", "k": "[S, D]", "r": f"{{shape: [S, 1], {FLOAT}}}", "b": "[S]"},
        {"y": "[S, S]", "top": f"{{shape: [S], {FLOAT}}}"},
        gemm="[q, k]",
    ),
    "M, N and K are one": lambda: product(
        "return res + F.linear(x, w, b)",
        {"x": "[S, S]", "w": "[S, S]", "res": "[S, S]", "b": "[S]"},
        {"y": "[S, S]"},
    ),
    "extents of 1": lambda: product(
        "h = (F.linear(x, w) * r + b) * s; return h.to(x.dtype), h.float().mean(-1, keepdim=True)",
        {
            "x": "[M, K]",
            "w": "[N, K]",
            "r": f"{{shape: [M, 1], {FLOAT}}}",
            "b": "[1, N]",
            "s": f"{{shape: [1], {FLOAT}}}",
        },
        {"y": "[M, N]", "m": f"{{shape: [M, 1], {FLOAT}}}"},
    ),
    "heads": lambda: product(
        "return F.linear(x, w, b).unflatten(-1, (-1, 64))",
        {"x": "[B, T, K]", "w": "[N, K]", "b": "[N]"},
        {"y": "[B, T, N/64, 64]"},
    ),
    "sums of 16 bits": lambda: product(
        "y = F.linear(x, w); z = y.float(); "
        "return y, z.square().mean(-1, keepdim=True).to(x.dtype), z.amax(0).to(x.dtype)",
        {"x": "[M, K]", "w": "[N, K]"},
        {"y": "[M, N]", "s": "[M, 1]", "c": "[N]"},
    ),
    "gate and up as halves": lambda: product(
        "h = F.linear(x, w, b) * r; gate, up = h.chunk(2, dim=-1); "
        "return (F.silu(gate) * up).to(x.dtype), h.float().square().mean(-1)",
        {
            "x": "[B, T, K]",
            "w": "[2*F, K]",
            "b": "[2*F]",
            "r": f"{{shape: [B, T, 1], {FLOAT}}}",
        },
        {"y": "[B, T, F]", "s": f"{{shape: [B, T], {FLOAT}}}"},
        header="pairs: halves\n",
    ),
    "gate and up as two weights": lambda: product(
        "gate, up = x @ w_gate + b_gate, x @ w_up + b_up; return gate, up, F.silu(gate) * up",
        {"x": "[M, K]", "w_gate": "[K, F]", "w_up": "[K, F]", "b_gate": "[F]", "b_up": "[F]"},
        {"gate": "[M, F]", "up": "[M, F]", "y": "[M, F]"},
        gemm="[x, [w_gate, w_up]]",
        header="pairs: halves\nsplit: [gate, up]\n",
    ),
    "queries, keys and values of three weights": lambda: product(
        "d = lambda w: F.linear(x, w).unflatten(-1, (-1, 64)); return d(wq), d(wk), d(wv)",
        {"x": "[B, T, K]", "wq": "[4*H, K]", "wk": "[H, K]", "wv": "[H, K]"},
        {"q": "[B, T, H/16, 64]", "k": "[B, T, H/64, 64]", "v": "[B, T, H/64, 64]"},
        gemm="[x, [wq, wk, wv]]",
    ),
    "queries, keys and values of one": lambda: product(
        "return F.linear(x, w, b).chunk(3, -1)",
        {"x": "[M, K]", "w": "[3*N, K]", "b": "[3*N]"},
        {"q": "[M, N]", "k": "[M, N]", "v": "[M, N]"},
    ),
    "a sum of two products": lambda: product(
        "return F.gelu(F.linear(x, w) + F.linear(xa, b) + bias)",
        {"x": "[M, K]", "xa": "[M, R]", "w": "[N, K]", "b": "[N, R]", "bias": "[N]"},
        {"y": "[M, N]"},
        gemm="[[x, xa], [w, b]]",
    ),
    "FP8 with scales of rows and columns": lambda: product(
        "return ((x.float() @ w.float()) * sx * sw).bfloat16()",
        {
            "x": "{shape: [M, K], dtype: float8_e4m3fn}",
            "w": "{shape: [K, N], dtype: float8_e4m3fn}",
            "sx": f"{{shape: [M, 1], {FLOAT}, draw: {{uniform: [0.5, 1.5]}}}}",
            "sw": f"{{shape: [1, N], {FLOAT}, draw: {{uniform: [0.5, 1.5]}}}}",
        },
        {"y": "{shape: [M, N], dtype: bfloat16}"},
    ),
    "columns that are numbers": lambda: product(
        "return F.linear(x, w, b).split([128, 64, 64], dim=-1)",
        {"x": "[M, K]", "w": "[256, K]", "b": "[256]"},
        {"q": "[M, 128]", "k": "[M, 64]", "v": "[M, 64]"},
    ),
    "a gate of each sample": lambda: product(
        "y = x + keep * gate * (1 + scale.unsqueeze(1)) * F.linear(h, w); "
        "return y / (2 + torch.tanh(p.view(-1, 1, 1)))",
        {
            "x": "[B, T, N]",
            "h": "[B, T, K]",
            "w": "[N, K]",
            "scale": "[B, N]",
            "gate": "[B, 1, N]",
            "keep": "[B, 1, 1]",
            "p": "[B]",
        },
        {"y": "[B, T, N]"},
        gemm="[h, w]",
    ),
    "a position embedding": lambda: product(
        "return F.linear(x, w) * (2 + q) + p",
        {"x": "[B, T, K]", "w": "[N, K]", "p": "[T, N]", "q": "[1, T, 1]"},
        {"y": "[B, T, N]"},
    ),
    "a norm and a slope of each head": lambda: product(
        "q = F.linear(x, w).unflatten(-1, (-1, 64)); r = q.float().pow(2).mean(-1, keepdim=True); "
        "q = q * torch.rsqrt(r + 1e-6) * (1 + g); "
        "q = q + (slope * pos[..., None])[..., None]; "
        "return (q * (1 + of[:, None, :, None])).to(x.dtype)",
        {
            "x": "[B, T, K]",
            "w": "[64*H, K]",
            "g": "[64]",
            "slope": "[H]",
            "of": "[B, H]",
            "pos": "[B, T]",
        },
        {"q": "[B, T, H, 64]"},
    ),
    "cosines of each pair": lambda: product(
        "q = F.linear(x, w).view(*x.shape[:2], -1, 32, 2); a, b = q.unbind(-1); "
        "c, s = cos[:, None], sin[:, None]; "
        "return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)",
        {"x": "[B, T, K]", "w": "[64*H, K]", "cos": "[T, 32]", "sin": "[T, 32]"},
        {"q": "[B, T, H, 64]"},
    ),
    "rotation of halves": lambda: product(
        "q = F.linear(x, w).view(*x.shape[:2], -1, 64); cos = cos.unsqueeze(2); "
        "a, b = q.chunk(2, -1); turned = torch.cat([-b, a], dim=-1); "
        "return q * cos + turned * sin.unsqueeze(2)",
        {"x": "[B, T, K]", "w": "[64*H, K]", "cos": "[B, T, 64]", "sin": "[B, T, 64]"},
        {"y": "[B, T, H, 64]"},
    ),
    "rotation of halves by tables of half a head": lambda: product(
        "q = F.linear(x, w, bias).unflatten(-1, (-1, 64)); c, s = cos[:, None], sin[:, None]; "
        "q = q.float(); r = torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6); q = q * r; "
        "a, b = q[..., :32], q[..., 32:]; "
        "return torch.cat([a * c - b * s, b * c + a * s], -1).flatten(-2).to(x.dtype)",
        {"x": "[B, T, K]", "w": "[H, K]", "bias": "[H]", "cos": "[T, 32]", "sin": "[T, 32]"},
        {"y": "[B, T, H]"},
        header="dims: {B: {}, T: {}, K: {multiple_of: 8}, H: {multiple_of: 64}}\n",
    ),
    "a layer norm of each head": lambda: product(
        "q = F.linear(x, w).unflatten(-1, (-1, 64)); "
        "return F.layer_norm(q, (64,), g, b, 1e-5).flatten(-2)",
        {"x": "[B, T, K]", "w": "[64*H, K]", "g": "[64]", "b": "[64]"},
        {"q": "[B, T, 64*H]"},
    ),
    "a tensor of half the columns": lambda: product(
        "a, b = F.linear(x, w).unflatten(-1, (-1, 2)).unbind(-1); return d * F.silu(a) * b",
        {"x": "[B, T, K]", "w": "[2*N, K]", "d": "[B, T, N]"},
        {"y": "[B, T, N]"},
    ),
    "heads first, of three weights": lambda: product(
        "q, k, v = (F.linear(x, w).unflatten(-1, (-1, 32)) for w in (wq, wk, wv)); "
        "return q.transpose(1, 2), k.permute(0, 2, 3, 1), v.permute(2, 0, 1, 3)",
        {"x": "[B, T, K]", "wq": "[2*N, K]", "wk": "[N, K]", "wv": "[N, K]"},
        {"q": "[B, N/16, T, 32]", "k": "[B, N/32, 32, T]", "v": "[N/32, B, T, 32]"},
        gemm="[x, [wq, wk, wv]]",
        header="dims: {B: {}, T: {}, K: {multiple_of: 8}, N: {multiple_of: 32}}\n",
    ),
    "rows as one dim": lambda: product(
        "y = F.linear(x.flatten(0, 1), w); h = torch.tanh(y).unflatten(-1, (-1, 16)); "
        "return y, h.transpose(0, 1), y.float().sum(-1)",
        {"x": "[B, T, K]", "w": "[N, K]"},
        {"y": "[B*T, N]", "h": "[N/16, B*T, 16]", "s": f"{{shape: [B*T], {FLOAT}}}"},
    ),
    "a sum of products, one of them scaled": lambda: product(
        "return F.silu(F.linear(x, w) - 4 * F.linear(xa, b))",
        {"x": "[M, K]", "xa": "[M, R]", "w": "[N, K]", "b": "[N, R]"},
        {"y": "[M, N]"},
        gemm="[[x, xa], [w, b]]",
        header="scales: {b: -4}\n",
    ),
    "operands side by side before one weight": lambda: product(
        "return F.silu(F.linear(torch.cat([x, y], -1), w, b))",
        {"x": "[B, T, K]", "y": "[B, T, 2*K]", "w": "[N, 3*K]", "b": "[N]"},
        {"z": "[B, T, N]"},
        gemm="[[x, y], w]",
    ),
    "a sum over several dims": lambda: product(
        "return dy.flatten(0, 1).T @ x.flatten(0, 1)",
        {"dy": "[B, T, M]", "x": "[B, T, N]"},
        {"dw": "[M, N]"},
        gemm="[dy, x]",
        header="dims: {B: {}, T: {multiple_of: 8}, M: {multiple_of: 8}, N: {multiple_of: 16}}\n",
    ),
    "a tensor of one number": lambda: product(
        "return F.prelu(F.linear(x, w), a)",
        {"x": "[M, K]", "w": "[N, K]", "a": "[1]"},
        {"y": "[M, N]"},
    ),
    "a K that is held as a number": lambda: product(
        "return torch.tanh(q @ k.T / q.size(-1) ** 0.5)",
        {"q": "[B, T, 64]", "k": "[S, 64]"},
        {"y": "[B, T, S]"},
        gemm="[q, k]",
    ),
}


JUDGED = "cosines of each pair"
OF_HEADS = {
    "a layer norm of each head",
    "a norm and a slope of each head",
    "rotation of halves",
    JUDGED,
}
"""Whose columns are whole groups of heads: they are checked at 17408 of them, for 10 s and more."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(x, marks=[pytest.mark.slow] * (x in OF_HEADS - {JUDGED})) for x in LAYOUTS
    ],
)
def composed(request: pytest.FixtureRequest) -> tuple[Spec, Program]:
    made = LAYOUTS[request.param]()
    return made, read_programs(Composer().write(made, lambda *_: None))["probe"]


def drawn(made: Spec, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """The user's tensors, by no means of the layout's own."""
    generator, found = torch.Generator().manual_seed(7), {}
    for name, tensor in made.declared.inputs.items():
        shape = [e if isinstance(e, int) else _extent(e, sizes) for e in tensor.shape.cases[""]]
        value = torch.randn(shape, generator=generator)
        found[name] = value.to(dtype if tensor.dtype == "T" else getattr(torch, tensor.dtype))
    return found


def _extent(entry: str, sizes: Mapping[str, int]) -> int:
    """ "4*N", "N/2" and "N" at `sizes`."""
    return eval(entry.replace("/", "//"), dict(sizes))


def called(kernel: Kernel, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What a call gives: of what the reference takes, and of what is packed the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        direct = kernel(*given.values())
    direct = direct if isinstance(direct, tuple) else (direct,)
    for name, place in kernel.packing.items():
        own = {part.name: given.pop(part.name) for part in place.parts}
        given[name] = kernel.pack(**own)
        assert f"    {name} = probe.pack(" in (kernel.__doc__ or "")
        assert f"    probe.unpack({name!r}, {name}.grad): gradients" in (kernel.__doc__ or "")
        assert name in (kernel.__doc__ or "").rpartition("probe.packed(")[2]
        extents = None if place.shares else [x.shape[-place.axis] for x in own.values()]
        back = kernel.unpack(name, given[name], extents)
        assert all(same(back[x], value) for x, value in own.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = kernel.packed(**given)
    found = found if isinstance(found, tuple) else (found,)
    assert all(map(same, direct, found))
    return direct


def namespace(made: Spec) -> Any:
    space: dict[str, Any] = {}
    exec(made.reference_source, space)
    return space["reference"]


def test_a_call_takes_and_gives_what_the_reference_does(composed: tuple[Spec, Program]) -> None:
    made, program = composed
    admit(made)
    kernel = Kernel(made, {"probe": program}, f"layout_{made.digest[7:19]}")
    small = {"B": 3, "M": 40, "H": 16}
    sizes = {d: max(small.get(d, 64), dim.multiple_of) for d, dim in made.declared.dims.items()}
    given = drawn(made, sizes, torch.bfloat16)
    narrow = [x for x, value in given.items() if value.element_size() == 1]
    # No product reads 8 bits along N.
    assert kernel.packing.keys() & narrow == ({"w"} if narrow else set())
    exact = namespace(made)(**{x: v.double() for x, v in given.items()})
    plain = namespace(made)(**given)
    exact, plain = (x if isinstance(x, tuple) else (x,) for x in (exact, plain))
    for out, due, like in zip(called(kernel, dict(given)), exact, plain, strict=True):
        assert (out.shape, out.dtype) == (like.shape, like.dtype)
        allowed = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-20
        assert (out.double() - due.double()).norm() <= allowed * due.double().norm()


@pytest.mark.parametrize(
    "composed",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in OF_HEADS)) for x in LAYOUTS],
    indirect=True,
)
@pytest.mark.one_in(2)
def test_the_judge_agrees(composed: tuple[Spec, Program]) -> None:
    made, program = composed
    assert not check_meaning(made, {"probe": program}, seed=1)
    assert not check_imported(
        imported(made, {"probe": program}), ["bfloat16"], device="cpu", seed=1
    )


def test_canonical_inputs_are_given_in_the_declared_layout(composed: tuple[Spec, Program]) -> None:
    made, program = composed
    kernel = Kernel(made, {"probe": program}, f"given_{made.digest[7:19]}")
    inputs = draw_inputs(made, made.check_shapes[2], made.default_types(), seed=1)
    exact = list(run_reference(made, inputs, exact=True).values())
    given = as_declared(made, inputs)
    args = [inputs[x] if x in kernel.packing else given[x] for x in made.inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = kernel.packed(*args)
    found = found if isinstance(found, tuple) else (found,)
    assert sum(x.numel() for x in found) == sum(x.numel() for x in exact)
    norms = [sum(float(x.double().square().sum()) for x in some) for some in (found, exact)]
    assert abs(norms[0] / norms[1] - 1) < 0.01


def test_no_element_is_lost_or_doubled(composed: tuple[Spec, Program]) -> None:
    """Declared inputs and back again are the canonical ones, bit for bit."""
    made, _ = composed
    layout = made.layout
    assert layout is not None
    for sizes in made.check_shapes:
        inputs = draw_inputs(made, sizes, made.default_types(), seed=1)
        own = layout.sizes(sizes)
        assert layout.extents(own) == dict(sizes)
        declared = layout.declared(inputs, {})
        for place in layout.inputs:
            value = inputs[place.name]
            if isinstance(value, torch.Tensor):
                assert same(place.together(declared, own, {}), value)
            else:
                assert declared[place.name].item() == value


def test_other_sizes_have_declared_ones_too() -> None:
    """The judge takes M, N and K that no shape of the spec has."""
    layout = LAYOUTS["a batch"]().layout
    for m, n, k in ((129, 272, 8), (4096, 16, 2056), (7, 16, 8)):
        own = layout.sizes({"M": m, "N": n, "K": k})
        assert (own["B"] * own["T"], own["N"], own["K"]) == (m, n, k)
    assert layout.sizes({"M": 4096, "N": 16, "K": 8})["B"] > 1


def test_a_user_has_what_is_drawn_compiled_and_timed() -> None:
    """Where a call gets transposed views, the judge's tensors are such too."""
    made = LAYOUTS["A is (K, M)"]()
    first, second = (
        draw_inputs(made, sizes, made.default_types(), seed=1) for sizes in made.check_shapes[1:3]
    )
    strides = [[torch.as_tensor(x).stride() for x in found.values()] for found in (first, second)]
    assert strides == [[(64, 1), (1, 272)], [(1, 200), (1, 336)]]  # TMA cannot load rows of 77
    program = read_programs(Composer().write(made, lambda *_: None))["probe"]
    jobs = jobs_for(made, {"probe": program}, ["bfloat16"], newer=True)
    assert {job.arch for job in jobs} == {"sm_90a", "sm_100a", "sm_120a"}
    assert {job.turned for job in jobs} == {"AB"}
    straight = jobs[0].model_copy(update={"turned": ""})
    assert jobs[0].run().object != straight.run().object


def test_a_packed_weight_has_the_rows_of_a_pair_side_by_side() -> None:
    made = LAYOUTS["gate and up as two weights"]()
    program = read_programs(Composer().write(made, lambda *_: None))["probe"]
    kernel = Kernel(made, {"probe": program}, "layout_pairs")
    gate, up = torch.randn(8, 32), torch.randn(8, 32)
    packed = kernel.pack(w_gate=gate, w_up=up)
    assert packed.is_contiguous()
    assert torch.equal(packed[0::2], gate.mT)
    assert torch.equal(packed[1::2], up.mT)
    with pytest.raises(LaunchError, match="takes 3 inputs, got 6") as caught:
        kernel.packed(*[gate] * 6)
    assert caught.value.hint.startswith("w_gate_w_up = probe.pack(w_gate=w_gate, w_up=w_up), once")
    with pytest.raises(
        LaunchError, match=r"w_up \(8, 3\) cannot be packed, expected w_gate \[K, F\]"
    ):
        kernel.pack(w_gate=gate, w_up=up[:, :3])
    with pytest.raises(LaunchError, match="w_gate are not packed, expected w_gate, w_up; b_gate"):
        kernel.pack(w_gate=gate)
    with pytest.raises(LaunchError, match="'x' is not packed, expected one of w_gate_w_up, b_gate"):
        kernel.unpack("x", packed)
    for extents in ([32], [32, 64], {"w_gate": 32, "w_up": 32}):
        with pytest.raises(
            LaunchError, match=r"expected one for each of w_gate, w_up, 64 together"
        ):
            kernel.unpack("w_gate_w_up", packed, extents)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gemm", "inputs", "outputs", "header", "message"),
    [
        ("[x, w]", {"w": "[N, Q]"}, {}, "", r"gemm: shapes x \[M, K\] and w \[N, Q\] share"),
        ("[x, [w, v]]", {"w": "[N, K]", "v": "[N, Q]"}, {}, "", "gemm: x and w, v do not fit; expect"),
        ("[x, [w, v]]", {"w": "[N, K]", "v": "[Q, K]"}, {}, "", "name them as multiples of one dim"),
        ("[x, w]", {"w": "[K, N]", "c": "[M, 3]"}, {}, "", r"c: shape \[M, 3\] is not over rows"),
        ("[x, w]", {"w": "[N, K]", "c": "[M, N]"}, {}, "pairs: halves\n", "only a vector can be"),
        ("[x, w]", {"w": "[N, K]", "c": "[N, M]"}, {"y": "[N, M]"},
         "in_place: {output: y, input: c}\n", "in_place: a kernel adds to c as"),
        ("[x, w]", {"w": "[N, K]"}, {"z": "[M, N]"}, "pairs: halves\n", "name them in `split`"),
        ("[x, [w, v]]", {"w": "[N, K]", "v": "{shape: [N, K], draw: {uniform: [0, 1]}}"}, {}, "",
         "w, v are one tensor of the kernel; declare them alike"),
    ],
)  # fmt: skip
def test_what_has_no_layout_is_refused(
    gemm: str, inputs: dict[str, str], outputs: dict[str, str], header: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        product(
            "pass", {"x": "[M, K]", **inputs}, outputs or {"y": "[M, N]"}, gemm=gemm, header=header
        )


GATES = {
    "two weights": ("[x, [gate, up]]", {"gate": "[F, K]", "up": "[F, K]"}, "F"),
    "halves of one": ("[x, w]", {"w": "[F, K]"}, "F/2"),
}


class Wrapped(torch.Tensor):
    """A tensor whose numbers a caller keeps elsewhere, for all that a kernel knows."""


def of_gates(which: str) -> tuple[Spec, Program]:
    gemm, weights, width = GATES[which]
    code = "gate, up = x @ gate.T, x @ up.T; "
    if len(weights) == 1:
        code = "gate, up = (x @ w.T).chunk(2, -1); "
    code += "return torch.tanh(gate) * up"
    inputs = {"x": "[B, T, K]", **weights}
    outputs = {"y": f"[B, T, {width}]"}
    made = product(code, inputs, outputs, gemm=gemm, header="pairs: halves\n")
    return made, read_programs(Composer().write(made, lambda *_: None))["probe"]


@pytest.mark.parametrize("which", GATES)
def test_rows_that_are_paired_are_read_where_they_lie(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, program = of_gates(which)
    kernel: Any = Kernel(made, {"probe": program}, f"layout_apart_{which.split()[0]}")
    ran, (_, *names) = list[Program](), made.declared.inputs

    def interpreted(program: Program, *args: Any, **options: Any) -> Any:
        ran.append(program)
        return interpret(program, *args, **options)

    monkeypatch.setattr(function, "interpret", interpreted)
    monkeypatch.setattr(module, "supported", lambda _: True)
    x, w = torch.randn(2, 3, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    weights = [w] if which == "halves of one" else [*w.chunk(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kernel(x, *weights)
        packed = kernel.packed(x, kernel.pack(**dict(zip(names, weights, strict=True))))
        turned = kernel(x, *(v.mT.contiguous().mT for v in weights))
        raised = kernel(x, *(v.requires_grad_() for v in weights))
        if which == "two weights":
            for one, other in ((weights[0].half(), weights[1]), (weights[0][:, :32], weights[1])):
                with pytest.raises(LaunchError):
                    kernel(x, one.detach().contiguous(), other.detach())
        wrapped = kernel(x, *(v.detach().as_subclass(Wrapped) for v in weights))
    assert torch.equal(wrapped, packed)
    assert torch.equal(found, packed)
    assert torch.equal(found, turned)
    assert torch.equal(found, raised)
    assert [bool(p.spread) for p in ran] == [True, False, False, False, False]
    raised.float().sum().backward()
    exact = [v.detach().double().requires_grad_() for v in weights]
    reference = namespace(made)(x.double(), *exact)
    for one, other in zip(weights, torch.autograd.grad(reference.sum(), exact), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other, atol=0.2, rtol=0.05)


def test_two_weights_whose_columns_meet_are_halves() -> None:
    made = product(
        "return F.linear(x, w).sigmoid() * F.linear(x, v)",
        {"x": "[M, K]", "w": "[N, K]", "v": "[N, K]"},
        {"y": "[M, N]"},
        gemm="[x, [w, v]]",
    )
    assert "y=HalfTile" in Composer().write(made, lambda *_: None)
    said = programs_to_define(made)
    assert "- w_v (N_all, K); w, v side by side; entries 2j and 2j + 1 are entries j and" in said
    assert "- y (M, N_all/2)" in said


def test_an_extent_that_is_a_number_stays_it() -> None:
    made = LAYOUTS["a K that is held as a number"]()
    assert all(case.sizes["K"] == 64 for case in structures(made, {}, "bfloat16"))
    with pytest.raises(SpecError, match="K=128; this reference is for 64 alone"):
        draw_inputs(made, {"M": 8, "S": 16, "K": 128}, made.default_types(), seed=0)


def test_cases_of_a_parameter_have_layouts_of_their_own() -> None:
    made = product(
        'return x @ w + (v if per == "column" else v[..., None])',
        {
            "x": "[B, T, K]",
            "w": "[K, N]",
            "v": "{shape: {parameter: per, column: [N], row: [B, T]}}",
        },
        {"y": "[B, T, N]"},
        header="parameters: {per: [column, row]}\n",
        arguments="x, w, v, per",
    )
    admit(made)
    programs = read_programs(Composer().write(made, lambda *_: None))
    assert not check_meaning(made, programs, seed=1)
    assert not check_imported(imported(made, programs), ["bfloat16"], device="cpu", seed=1)


def test_torch_compile_sees_one_operator_and_views() -> None:
    made = LAYOUTS["queries, keys and values of three weights"]()
    program = read_programs(Composer().write(made, lambda *_: None))["probe"]
    kernel = Kernel(made, {"probe": program}, "layout_compiled")
    x, w = torch.randn(2, 3, 64).bfloat16(), torch.randn(384, 64).bfloat16()
    compiled = torch.compile(kernel.packed, backend="eager", fullgraph=True)
    whole = torch.compile(kernel, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs, plain = compiled(x, w), kernel.packed(x, w)
        parts = whole(x, *w.split([256, 64, 64]))
    assert all(map(torch.equal, parts, plain))
    assert [tuple(out.shape) for out in outs] == [(2, 3, 4, 64), (2, 3, 1, 64), (2, 3, 1, 64)]
    assert all(torch.equal(out, same) for out, same in zip(outs, plain, strict=True))
    assert len({out.untyped_storage().data_ptr() for out in plain}) == 1
    sparse = x.float().to_sparse().bfloat16()
    with pytest.raises(LaunchError, match=r"input 'x' is torch\.sparse_coo, expected a dense"):
        kernel.packed(sparse, w)


def test_a_table_is_read_where_it_lies() -> None:
    made = LAYOUTS["a gate of each sample"]()
    program = read_programs(Composer().write(made, lambda *_: None))["probe"]
    declared = Kernel(made, {"probe": program}, "layout_strided")._declared
    assert declared is not None
    slices = torch.randn(2, 6 * 32).bfloat16().chunk(6, dim=1)
    given = {x: torch.randn(2, 3, 32).bfloat16() for x in made.inputs}
    given |= {"scale": slices[1], "gate": slices[2][:, None], "p": slices[0][:, 0]}
    given["keep"] = slices[3][:, None, :1]
    entered = dict(zip(given, declared.entered([*given.values()]), strict=True))
    for x, shape in (("scale", (2, 32)), ("gate", (2, 32)), ("p", (2, 1))):
        assert tuple(entered[x].shape) == shape
        assert entered[x].data_ptr() == given[x].data_ptr()


def test_a_table_of_other_rows_or_columns_is_refused() -> None:
    """It would be repeated over what it is not of, where the reference raises."""
    made = LAYOUTS["rotation of halves"]()
    assert made.layout
    declared = Declared(made.name, made.layout, ("bfloat16",))

    def entered(*shape: int) -> None:
        table = torch.randn(shape)
        declared.entered([torch.randn(2, 48, 8), torch.randn(256, 8), table, table])

    for fits in ((2, 48, 64), (1, 48, 64), (2, 1, 64), (1, 1, 64)):
        entered(*fits)
    for shape, due, axis in (
        ((2, 24, 64), 48, 1), ((1, 96, 64), 48, 1), ((4, 48, 64), 2, 0), ((2, 48, 128), 64, 2)
    ):  # fmt: skip
        wrong = f"'cos' has shape {shape}, expected {due} as its dimension {axis}"
        with pytest.raises(LaunchError, match=re.escape(wrong)):
            entered(*shape)


@pytest.mark.parametrize(
    ("body", "inputs", "columns", "gemm", "said"),
    [
        (
            "return torch.tanh(x @ w)",
            {"x": "[M, K]", "w": "[K, K]"},
            "K",
            "[x, w]",
            r"the reference raises at sizes .*w is read as \[N, K\]; where it is \[K, N\], name its",
        ),
        (
            "a, b = F.linear(x, w).chunk(2, -1); return F.silu(a) * b",
            {"x": "[M, K]", "w": "[N, K]"},
            "N/2",
            "[x, w]",
            "declare `pairs: halves`",
        ),
        (
            "return F.linear(x, w) + 2 * F.linear(xa, b)",
            {"x": "[M, K]", "xa": "[M, R]", "w": "[N, K]", "b": "[N, R]"},
            "N",
            "[[x, xa], [w, b]]",
            "does not add the products of x, xa alike",
        ),
    ],
)
def test_what_is_declared_otherwise_than_it_is_computed_is_refused(
    body: str, inputs: dict[str, str], columns: str, gemm: str, said: str
) -> None:
    made = product(body, inputs, {"y": f"[M, {columns}]"}, gemm=gemm)
    with pytest.raises(ProgramError, match=said):
        Composer().write(made, lambda *_: None)


def test_a_reference_that_gives_another_shape_is_refused() -> None:
    made = product(
        "return F.linear(x, w).transpose(0, 1)",
        {"x": "[B, T, K]", "w": "[N, K]"},
        {"y": "[B, T, N]"},
    )
    with pytest.raises(
        SpecError, match=r"^probe.md:11: output 'y' is \[77, 2, 272\]; expected \[2, 7"
    ):
        admit(made)


def test_parts_in_another_proportion_are_not_packed() -> None:
    made = LAYOUTS["heads first, of three weights"]()
    assert made.layout
    declared = Declared(made.name, made.layout, ("bfloat16",))
    right = {x: torch.randn(n, 8) for x, n in {"wq": 128, "wk": 64, "wv": 64}.items()}
    assert torch.equal(declared.pack(right), torch.cat([*right.values()]))
    with pytest.raises(LaunchError, match=r"wk \(32, 8\).* cannot be packed, expected wq \[2\*N"):
        declared.pack({**right, "wk": torch.randn(32, 8)})
