"""The composer on whole specs, on spellings of the same program, and on what no program expresses."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent import specs as specs_room
from coda_agent.agent import authors
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.authors.composer.capture import capture
from coda_agent.agent.authors.composer.emit import emit
from coda_agent.agent.authors.composer.rewrite import rewrite
from coda_agent.primitives import (
    AddTile,
    ColMax,
    ColSum,
    ColVector,
    HalfTile,
    Program,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowMin,
    RowSum,
    Scalar,
    Tile,
    WideTile,
    absolute,
    clamp,
    derivative,
    epilogue,
    gather,
    geglu,
    gelu_erf,
    gelu_tanh,
    hard_swish,
    interleave,
    leaky_relu,
    maximum,
    mish,
    pairs,
    relu,
    sigmoid,
    silu,
    softplus,
    swiglu,
    tanh,
    to_e4m3,
)
from coda_agent.primitives.errors import CodaError, ProgramError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec, draw_inputs, load_spec
from tests import written
from tests.meanings import EXPECTED, wide
from tests.programs import program

SPECS = Path(next(iter(specs_room.__path__)))
SHAPES = {
    **dict.fromkeys("CDO", "[M, N]"),
    **dict.fromkeys(("H", "half"), "[M, N/2]"),
    **dict.fromkeys("WV", "[M, 2*N]"),
    **dict.fromkeys(("r", "index", "s", "t"), "[M]"),
    **dict.fromkeys("bn", "[N]"),
    **dict.fromkeys(("alpha", "beta"), "[]"),
}


def spec(
    body: str,
    inputs: str = "",
    outputs: str = "O",
    names: dict[str, str] | None = None,
    header: str = "",
) -> Spec:
    """A spec whose reference has the lines of `body`; `D` is there when it is not assigned or stored.

    What is composed does not depend on the type; in float32 the references need no casts.
    """
    names = names or {}
    new = lambda text: re.sub(r"\w+", lambda m: names.get(m[0], m[0]), text)
    drawn = {x: "float32, draw: {uniform: [0.5, 1.5]}" for x in inputs.split()}
    drawn |= {x: "int64, draw: {integers: [0, 16]}" for x in drawn if x == "index"}
    operands = {new("A"): "[M, K]", new("B"): "[N, K]"}
    tensors = {new(x): f"{{shape: {SHAPES[x]}, dtype: {how}}}" for x, how in drawn.items()}
    made = written.spec(
        "\n".join(new(line.strip()) for line in body.strip().split(";")),
        operands | tensors,
        {new(o): f"{{shape: {SHAPES[o]}, dtype: float32}}" for o in outputs.split()},
        name=names.get("probe", "probe"),
        gemm=new("[A, B]"),
        header="dims: {M: {}, N: {multiple_of: 16}, K: {multiple_of: 8}}\n"
        f"check_shapes: [{{M: 3, N: 16, K: 8}}]\n{header}\n",
    )
    single = {x: made.inputs[x].model_copy(update={"dtype": "float32"}) for x in made.gemm}
    return made.model_copy(update={"inputs": {**made.inputs, **single}})


def compose(a_spec: Spec) -> dict[str, Program]:
    text = Composer().write(a_spec, lambda *_: None)
    names = [a_spec.variant(binding) for binding in a_spec.bindings()]
    return read_programs(text, names)


def body_of(text: str) -> str:
    return text[text.index("@epilogue") :]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_spec_composes_to_what_it_says(name: str) -> None:
    a_spec = load_spec(SPECS / f"{name}.md")
    programs = compose(a_spec)
    assert list(programs) == [a_spec.variant(b) for b in a_spec.bindings()]
    for binding in a_spec.bindings():
        drawn = draw_inputs(
            a_spec,
            {"M": 13, "N": 352, "K": 48},
            a_spec.default_types(),
            seed=3,
            binding=binding,
        )
        a, b = (drawn[k] for k in a_spec.gemm)
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        program = programs[a_spec.variant(binding)]
        held = {output: drawn[start] for output, start in a_spec.updated(binding).items()}
        got = interpret(program, a, b, {**drawn, **held}, dtypes={}, compute=torch.float64)
        expected = EXPECTED[name](wide(drawn), binding)
        assert list(got) == list(expected) == list(a_spec.outputs)
        for output, value in expected.items():
            torch.testing.assert_close(got[output], value, rtol=1e-10, atol=1e-12)


def test_the_text_reads_as_written_by_hand() -> None:
    text = Composer().write(load_spec(SPECS / "gemm_rmsnorm_swiglu.md"), lambda *_: None)
    assert body_of(text) == (
        "@epilogue(D=Tile, O=HalfTile)\n"
        "def gemm_rmsnorm_swiglu(acc, r: ColVector):\n"
        '    """D = (A Bᵀ) · r; O = silu(gate) · up; gate, up = even and odd columns of D"""\n'
        "    d = acc * r\n"
        "    gate, up = pairs(d)\n"
        '    return {"D": d, "O": swiglu(gate, up)}\n'
    )
    assert (
        "from coda_agent.primitives import ColVector, HalfTile, Tile, epilogue, pairs, swiglu\n"
        in text
    )
    assert "Composed from the PyTorch reference of the spec." in text


def test_rope_and_cross_entropy_read_as_written_by_hand() -> None:
    write = lambda name: Composer().write(load_spec(SPECS / f"{name}.md"), lambda *_: None)
    rope, entropy = write("gemm_rmsnorm_rope"), write("gemm_rmsnorm_partial_cross_entropy")
    assert rope.endswith(
        "    d = acc * r\n"
        "    even, odd = pairs(d)\n"
        "    cs_even, cs_odd = pairs(cs)\n"
        "    o = interleave(even * cs_even + odd * cs_odd, odd * cs_even - even * cs_odd)\n"
        '    return {"D": d, "O": o}\n'
    )
    assert body_of(entropy) == (
        "@epilogue(Z=Tile, z_tgt=RowGather, lse=RowLogSumExp)\n"
        "def gemm_rmsnorm_partial_cross_entropy(acc, r: ColVector, y: ColIndex):\n"
        '    """Z = (A Bᵀ) · r; z_tgt = gather(Z, y); lse = row log-sum-exp of Z"""\n'
        "    z = acc * r\n"
        '    return {"Z": z, "z_tgt": gather(z, y), "lse": z}\n'
    )


def test_backward_kernels_read_as_written_by_hand() -> None:
    write = lambda name: Composer().write(load_spec(SPECS / f"{name}.md"), lambda *_: None)
    gate, norm = write("gemm_partial_swiglu_bwd"), write("gemm_residual_partial_rmsnorm_bwd")
    assert body_of(gate) == (
        "@epilogue(dZ=WideTile, z=RowMean, O=Tile)\n"
        "def gemm_partial_swiglu_bwd(acc, Z: WideTile):\n"
        '    """dZ = interleave((A Bᵀ) · silu′(gate) · up, (A Bᵀ) · silu(gate)); gate, up = even and odd\n'
        "      columns of Z\n"
        "    z = row mean of (A Bᵀ) · silu′(gate) · up · gate + (A Bᵀ) · silu(gate) · up\n"
        "    O = silu(gate) · up\n"
        '    """\n'
        "    gate, up = pairs(Z)\n"
        "    x = acc * derivative(silu, gate) * up\n"
        "    y = silu(gate)\n"
        "    z = acc * y\n"
        '    return {"dZ": interleave(x, z), "z": x * gate + z * up, "O": y * up}\n'
    )
    in_place, out_of_place = norm.split("@epilogue")[1:]
    assert in_place.startswith("(O=AddTile, C_out=Tile, dgamma=ColSum)\n") and "X" not in in_place
    assert "O += ((A Bᵀ) · gamma - C · r · z) · r" in in_place
    assert out_of_place.startswith("(O=Tile, C_out=Tile, dgamma=ColSum)\n")
    assert '"O": (acc * gamma - x * z) * r + X' in out_of_place


def test_the_same_spec_gives_the_same_bytes_and_every_stage_is_told() -> None:
    a_spec = load_spec(SPECS / "gemm_bias_act.md")
    told: list[tuple[str, dict[str, Any]]] = []
    first = Composer().write(a_spec, lambda kind, data: told.append((kind, data)))
    assert first == Composer().write(a_spec, lambda *_: None)
    assert {kind for kind, _ in told} == {"author.progress"}
    assert [d["stage"] for _, d in told] == ["capture", "rewrite"] * 6 + ["emit"] + ["check"] * 6


def test_stages_show_the_graph_and_the_program() -> None:
    a_spec = load_spec(SPECS / "gemm_bias_act.md")
    captured = capture(a_spec, a_spec.bind({"activation": "relu", "bias_per": "row"}))
    assert "torch.ops.aten.mm.default" in str(captured)
    program = emit(a_spec, [rewrite(captured)])
    assert "def gemm_bias_act__relu__row(acc, C: Tile, bias: ColVector" in program


def test_unknown_author() -> None:
    with pytest.raises(CodaError, match="unknown author 'ghost', expected composer"):
        authors.kind_of("ghost")


def test_importing_the_authors_is_cheap() -> None:
    code = (
        "import sys, coda_agent.agent.authors.composer as c;"
        "sys.exit('torch' in sys.modules or 'cutlass' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A program written by hand, and the ways people write its reference.


def spelled(function: Callable[..., Any], outputs: dict[str, type], *bodies: str) -> list[Any]:
    """Cases: each body of a reference is a spelling of the program of the function."""
    written = program(function, **outputs)
    about = written.digest, " ".join(written.operands), " ".join(outputs)
    return [pytest.param(*about, body, id=body.removeprefix(MM)[:60]) for body in bodies]


def gated(acc):
    gate, up = pairs(acc)
    return {"H": swiglu(gate, up)}


def gelu_gated(acc):
    gate, up = pairs(acc)
    return {"H": geglu(gate, up)}


def pair_sum(acc):
    even, odd = pairs(acc)
    return {"H": even + odd}


def rotated(acc, C):
    x, y = pairs(acc)
    c, s = pairs(C)
    return {"O": interleave(x * c - y * s, x * s + y * c)}


def swapped(acc):
    x, y = pairs(acc)
    return {"O": interleave(-y, x)}


def scaled_log_sum_exp(acc, r):
    d = acc * r
    return {"D": d, "s": d}


def product_slopes(acc, W):
    gate, up = pairs(W)
    return {"V": interleave(acc * up, acc * gate)}


def gated_slopes(acc, W):
    gate, up = pairs(W)
    x, y = acc * derivative(silu, gate) * up, acc * silu(gate)
    return {"V": interleave(x, y), "s": gate * x + up * y, "O": silu(gate) * up}


def wide_largest(acc, W):
    even, odd = pairs(W)
    return {"V": interleave(acc, odd), "s": maximum(absolute(even), absolute(odd))}


def quantised(acc, alpha, r):
    gate, up = pairs(acc * alpha)
    x = swiglu(gate, up)
    return {"H": clamp(x * r, -448.0, 448.0), "s": absolute(x)}


MM = "D = A @ B.T;"
SWAP = "x = torch.empty_like(D);x[:, 0::2] = -D[:, 1::2];x[:, 1::2] = D[:, 0::2];"
GU = "g, u = D[:, 0::2], D[:, 1::2];"
MAX = "m = D.amax(-1, keepdim=True);"
VJP = MM + "_, vjp = torch.func.vjp({}, C);return {{'O': vjp(D)[0]}}"
GW = MM + "g, u = W[:, 0::2], W[:, 1::2];"
O, H, DS, DN = "O", "H", "D s", "D n"
CASES = [
    *spelled(
        lambda acc: {"O": acc},
        {"O": Tile},
        "return {'O': A @ B.T}",
        "return {'O': torch.mm(A, B.t())}",
        "return {'O': torch.einsum('mk,nk->mn', A, B)}",
        "return {'O': torch.inner(A, B)}",
        "return {'O': (B @ A.T).T}",
        "return {'O': (A.double() @ B.double().T).float().contiguous()}",
        "return {'O': 1.0 * (A @ B.T) + 0.0}",
        "x = (A @ B.T).view(A.shape[0], -1, 2);return {'O': torch.stack(x.unbind(-1), -1).flatten(-2)}",
    ),
    *spelled(
        lambda acc, r: {"O": acc * r},
        {"O": Tile},
        MM + "return {'O': D * r[:, None]}",
        MM + "return {'O': (D.T * r).T}",
        MM + "return {'O': torch.mul(D, r.view(-1, 1).expand(-1, B.shape[0]))}",
        MM + "return {'O': D.mul_(r.reshape(-1, 1))}",
        MM + "return {'O': D / (1 / r[:, None])}",
        "return {'O': (A * r[:, None]) @ B.T}",
        "return {'O': (r[:, None].float() * A.float()) @ B.float().T}",
        "return {'O': F.linear(A / r[:, None].reciprocal(), B)}",
        "return {'O': torch.einsum('m,mk,nk->mn', r, A, B)}",
        "return {'O': ((B @ A.T) * r).T}",
    ),
    *spelled(
        lambda acc, b: {"O": acc * b},
        {"O": Tile},
        MM + "return {'O': D * b}",
        "return {'O': A @ (B * b[:, None]).T}",
        "return {'O': A @ (B.T * b)}",
    ),
    *spelled(
        lambda acc: {"O": 0.5 * acc},
        {"O": Tile},
        MM + "return {'O': D / 2}",
        MM + "return {'O': D * 0.5}",
        "return {'O': (0.5 * A) @ B.T}",
        "return {'O': A @ (B / 4).T * 2}",
        MM + "return {'O': D.mul(torch.tensor(0.5))}",
        "return {'O': torch.addmm(torch.zeros_like(A @ B.T), A, B.T, alpha=0.5)}",
    ),
    *spelled(
        lambda acc, C, alpha, beta: {"O": alpha * acc + beta * C},
        {"O": Tile},
        MM + "return {'O': alpha * D + beta * C}",
        "return {'O': torch.addmm(C, A, B.T, beta=beta, alpha=alpha)}",
        "return {'O': (alpha * A) @ B.T + beta * C}",
        "return {'O': torch.add(A @ (alpha * B).T, C, alpha=beta)}",
        MM + "return {'O': D * torch.tensor(alpha) - (-beta * C)}",
    ),
    *spelled(
        lambda acc, b: {"O": acc + b},
        {"O": Tile},
        MM + "return {'O': D + b}",
        "return {'O': F.linear(A, B, b)}",
        "return {'O': torch.addmm(b, A, B.T)}",
        MM + "return {'O': D - -b}",
    ),
    *spelled(
        lambda acc, C: {"O": C - acc},
        {"O": Tile},
        MM + "return {'O': C - D}",
        MM + "return {'O': -D + C}",
        MM + "return {'O': -(D - C)}",
        "return {'O': torch.addmm(C, A, B.T, alpha=-1)}",
        "return {'O': C + (-A) @ B.T}",
    ),
    *spelled(
        lambda acc, C, r, b: {"O": acc * C * r * b},
        {"O": Tile},
        MM + "return {'O': D * C * r[:, None] * b}",
    ),
    *spelled(
        lambda acc, C, r: {"O": acc * C / r},
        {"O": Tile},
        MM + "return {'O': D * C / r[:, None]}",
        MM + "return {'O': (D / r[:, None]) * C}",
        MM + "return {'O': C * (D * r[:, None].reciprocal())}",
        MM + "return {'O': D * (C * r[:, None] ** -1)}",
    ),
    *spelled(
        lambda acc: {"O": silu(acc)},
        {"O": Tile},
        MM + "return {'O': F.silu(D)}",
        MM + "return {'O': D * torch.sigmoid(D)}",
        MM + "return {'O': D.sigmoid() * D}",
        MM + "return {'O': D / (1 + torch.exp(-D))}",
        MM + "return {'O': D * (1 / ((-D).exp() + 1))}",
    ),
    *spelled(
        lambda acc: {"O": relu(acc)},
        {"O": Tile},
        MM + "return {'O': F.relu(D)}",
        MM + "return {'O': D.relu_()}",
        MM + "return {'O': D.clamp(min=0)}",
        MM + "return {'O': torch.clamp_min(D, 0.0)}",
        MM + "return {'O': torch.maximum(D, torch.zeros_like(D))}",
        MM + "return {'O': torch.where(D > 0, D, 0.0)}",
        MM + "return {'O': torch.max(torch.tensor(0.0), D)}",
    ),
    *spelled(
        lambda acc: {"O": gelu_tanh(acc)},
        {"O": Tile},
        MM + "return {'O': F.gelu(D, approximate='tanh')}",
        MM + "c = math.sqrt(2 / math.pi);"
        "return {'O': 0.5 * D * (1 + torch.tanh(c * (D + 0.044715 * D**3)))}",
        MM + "c = math.sqrt(2 / math.pi);"
        "return {'O': D * (torch.tanh(c * D * (1 + 0.044715 * D * D)) + 1) / 2}",
    ),
    *spelled(
        lambda acc: {"O": gelu_erf(acc)},
        {"O": Tile},
        MM + "return {'O': F.gelu(D)}",
        MM + "return {'O': D * 0.5 * (1 + torch.erf(D / math.sqrt(2)))}",
    ),
    *spelled(
        lambda acc: {"O": leaky_relu(acc, 0.1)},
        {"O": Tile},
        MM + "return {'O': F.leaky_relu(D, 0.1)}",
        MM + "return {'O': torch.maximum(0.1 * D, D)}",
        MM + "return {'O': torch.where(D > 0, D, 0.1 * D)}",
        MM + "return {'O': torch.where(D < 0, D * 0.1, D)}",
    ),
    *spelled(
        lambda acc: {"O": clamp(acc, -1.0, 2.0)},
        {"O": Tile},
        MM + "return {'O': D.clamp(-1, 2)}",
        MM + "return {'O': F.hardtanh(D, -1.0, 2.0)}",
        MM + "return {'O': D.clamp_min(-1).clamp_max(2)}",
        MM + "return {'O': torch.minimum(torch.maximum(D, torch.tensor(-1.0)), torch.tensor(2.0))}",
    ),
    *spelled(
        lambda acc: {"O": hard_swish(acc)},
        {"O": Tile},
        MM + "return {'O': F.hardswish(D)}",
        MM + "return {'O': F.hardsigmoid(D) * D}",
    ),
    *spelled(
        lambda acc: {"O": mish(acc)},
        {"O": Tile},
        MM + "return {'O': F.mish(D)}",
        MM + "return {'O': D * torch.tanh(F.softplus(D))}",
    ),
    *spelled(
        lambda acc: {"O": softplus(acc)},
        {"O": Tile},
        MM + "return {'O': F.softplus(D)}",
        MM + "return {'O': torch.log(1 + torch.exp(D))}",
        MM + "return {'O': torch.log1p(D.exp())}",
        MM + "return {'O': -F.logsigmoid(-D)}",
        MM + "return {'O': torch.where(D > 20, D, D.exp().log1p())}",
    ),
    *spelled(
        lambda acc, b: {"O": tanh(acc + b)},
        {"O": Tile},
        MM + "return {'O': torch.tanh(D + b)}",
    ),
    *spelled(
        gated,
        {"H": HalfTile},
        MM + GU + "return {'H': F.silu(g) * u}",
        MM + GU + "return {'H': u * g * torch.sigmoid(g)}",
        MM
        + "x = D.view(D.shape[0], D.shape[1] // 2, 2);return {'H': F.silu(x[..., 0]) * x[..., 1]}",
        MM + "g, u = D.reshape(-1, B.shape[0] // 2, 2).split(1, -1);"
        "return {'H': (F.silu(g) * u).squeeze(-1)}",
        MM + "i = torch.arange(0, D.shape[1], 2);return {'H': F.silu(D[:, i]) * D[:, i + 1]}",
        "D = B @ A.T;g, u = D[0::2], D[1::2];return {'H': F.silu(g.T) * u.T}",
    ),
    *spelled(
        gelu_gated,
        {"H": HalfTile},
        MM + GU + "return {'H': F.gelu(g, approximate='tanh') * u}",
        MM + GU + "c = math.sqrt(2 / math.pi);"
        "return {'H': u * 0.5 * g * (1 + torch.tanh(c * (g + 0.044715 * g.pow(3))))}",
    ),
    *spelled(
        pair_sum,
        {"H": HalfTile},
        MM + GU + "return {'H': g + u}",
        MM + "return {'H': D.view(D.shape[0], -1, 2).sum(-1)}",
    ),
    *spelled(
        rotated,
        {"O": Tile},
        MM + GU + "c, s = C[:, 0::2], C[:, 1::2];"
        "return {'O': torch.stack((g * c - u * s, g * s + u * c), dim=-1).flatten(-2)}",
        MM + "x, c = D.view(D.shape[0], -1, 2), C.view(C.shape[0], -1, 2);"
        "y = torch.empty_like(x);"
        "y[..., 0] = x[..., 0] * c[..., 0] - x[..., 1] * c[..., 1];"
        "y[..., 1] = x[..., 0] * c[..., 1] + x[..., 1] * c[..., 0];"
        "return {'O': y.reshape(D.shape)}",
    ),
    *spelled(
        swapped,
        {"O": Tile},
        MM + SWAP + "return {'O': x}",
        MM + SWAP.replace("empty_like(D)", "empty(D.shape)") + "return {'O': x}",
        MM + "x = D.view(D.shape[0], -1, 2);"
        "return {'O': torch.stack((-x[..., 1], x[..., 0]), -1).reshape(D.shape)}",
        MM + "x = D.unflatten(1, (-1, 2)).flip(-1).clone();"
        "x[..., 0] *= -1;return {'O': x.flatten(1)}",
    ),
    *spelled(
        lambda acc: {"D": acc, "s": acc * acc},
        {"D": Tile, "s": RowSum},
        MM + "return {'D': D, 's': (D * D).sum(-1)}",
        MM + "return {'D': D, 's': D.square().sum(dim=1)}",
        MM + "return {'D': D, 's': torch.linalg.vector_norm(D, dim=-1) ** 2}",
        MM + "return {'D': D, 's': (D**2).view(D.shape[0], -1, 2).sum((1, 2))}",
    ),
    *spelled(
        lambda acc: {"D": acc, "s": acc * acc},
        {"D": Tile, "s": RowMean},
        MM + "return {'D': D, 's': (D * D).mean(-1)}",
        MM + "return {'D': D, 's': D.square().sum(-1) / D.shape[-1]}",
        MM + "return {'D': D, 's': D.pow(2).mean(1, True)[:, 0]}",
        MM + "return {'D': D, 's': torch.linalg.vector_norm(D, dim=-1).square() / B.shape[0]}",
    ),
    *spelled(
        lambda acc: {"D": acc, "s": absolute(acc)},
        {"D": Tile, "s": RowMax},
        MM + "return {'D': D, 's': D.abs().amax(-1)}",
        MM + "return {'D': D, 's': torch.max(D.abs(), dim=-1).values}",
        MM + "return {'D': D, 's': D.abs().max(1, keepdim=True)[0].flatten()}",
        MM + "return {'D': D, 's': torch.linalg.vector_norm(D, math.inf, dim=-1)}",
    ),
    *spelled(
        lambda acc, r: {"O": to_e4m3(acc * r) * 2.0},
        {"O": Tile},
        MM + "q = (D * r[:, None]).to(torch.float8_e4m3fn);return {'O': q.float() * 2}",
        MM + "q = (r[:, None] * D).to(dtype=torch.float8_e4m3fn).T;"
        "return {'O': 2 * q.to(D.dtype).T}",
    ),
    *spelled(
        lambda acc: {"D": acc, "s": acc},
        {"D": Tile, "s": RowMin},
        MM + "return {'D': D, 's': D.amin(-1)}",
        MM + "return {'D': D, 's': torch.min(D, dim=-1).values}",
        MM + "return {'D': D, 's': D.min(1, keepdim=True)[0].flatten()}",
    ),
    *spelled(
        lambda acc, r: {"D": acc, "s": acc * r},
        {"D": Tile, "s": RowSum},
        MM + "return {'D': D, 's': (D * r[:, None]).sum(-1)}",
        MM + "return {'D': D, 's': r * D.sum(-1)}",
    ),
    *spelled(
        lambda acc: {"D": acc, "s": acc},
        {"D": Tile, "s": RowLogSumExp},
        MM + "return {'D': D, 's': D.logsumexp(-1)}",
        MM + "return {'D': D, 's': torch.logsumexp(D.float(), dim=1, keepdim=True)[:, 0]}",
        MM + "return {'D': D, 's': D.exp().sum(-1).log()}",
        MM + MAX + "return {'D': D, 's': (D - m).exp().sum(-1).log() + m.squeeze(-1)}",
        MM
        + MAX
        + "e = torch.sub(D, m).exp();return {'D': D, 's': (m + e.sum(1, True).log())[:, 0]}",
        MM + "m = D.max(-1).values;"
        "return {'D': D, 's': m + torch.log(torch.exp(D - m[:, None]).sum(-1))}",
    ),
    *spelled(
        scaled_log_sum_exp,
        {"D": Tile, "s": RowLogSumExp},
        "D = (A @ B.T) * r[:, None];return {'D': D, 's': D.logsumexp(-1)}",
        "D = (A * r[:, None]) @ B.T;return {'D': D, 's': D.logsumexp(-1)}",
        "D = r[:, None] * (A @ B.T);" + MAX + "s = torch.exp(D - m).sum(-1).log() + m[:, 0];"
        "return {'D': D, 's': s}",
    ),
    *spelled(
        lambda acc, index: {"D": acc, "s": gather(acc, index)},
        {"D": Tile, "s": RowGather},
        MM + "return {'D': D, 's': D.gather(1, index[:, None])[:, 0]}",
        MM + "return {'D': D, 's': D.float().gather(1, index.long().view(-1, 1)).flatten()}",
        MM + "return {'D': D, 's': torch.take_along_dim(D, index[:, None], dim=1)[:, 0]}",
        MM + "return {'D': D, 's': D[torch.arange(D.shape[0]), index]}",
        MM + "return {'D': D, 's': (B @ A.T).gather(0, index[None])[0]}",
    ),
    *spelled(
        lambda acc, index, r: {"D": acc, "s": gather(acc * r, index)},
        {"D": Tile, "s": RowGather},
        MM + "return {'D': D, 's': (D * r[:, None]).gather(1, index[:, None])[:, 0]}",
        MM + "return {'D': D, 's': D.gather(1, index[:, None])[:, 0] * r}",
        MM + "return {'D': D, 's': (D.gather(1, index[:, None]) * r[:, None]).squeeze(-1)}",
    ),
    *spelled(
        lambda acc, C: {"D": acc, "n": acc * C},
        {"D": Tile, "n": ColSum},
        MM + "return {'D': D, 'n': (D * C).sum(0)}",
        MM + "return {'D': D, 'n': (C * D).sum(dim=-2, keepdim=True)[0]}",
        MM + "return {'D': D, 'n': (D.T * C.T).sum(1)}",
        MM + "return {'D': D, 'n': (D * C).view(D.shape[0], -1, 2).sum(0).flatten()}",
        MM + "return {'D': D, 'n': -(-D * C).sum(0)}",
    ),
    *spelled(
        lambda acc, b: {"D": acc, "n": acc * b},
        {"D": Tile, "n": ColSum},
        MM + "return {'D': D, 'n': (D * b).sum(0)}",
        MM + "return {'D': D, 'n': D.sum(0) * b}",
    ),
    *spelled(
        lambda acc: {"D": acc, "n": absolute(acc)},
        {"D": Tile, "n": ColMax},
        MM + "return {'D': D, 'n': D.abs().amax(0)}",
        MM + "return {'D': D, 'n': D.abs().max(dim=0).values}",
        MM + "return {'D': D, 'n': torch.linalg.vector_norm(D, math.inf, dim=0)}",
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(silu, C)},
        {"O": Tile},
        VJP.format("F.silu"),
        MM + "s = C.sigmoid();return {'O': D * (s + C * s * (1 - s))}",
        MM + "s = C.sigmoid();return {'O': s * D * (1 + C * (1 - s))}",
        MM + "s = torch.sigmoid(C);return {'O': D * (s + C * (s - s * s))}",
        MM + "s, o = torch.sigmoid(C), F.silu(C);return {'O': (s + o - o * s) * D}",
        MM + "s = 1 / (1 + torch.exp(-C));return {'O': D * s * (1 + C - C * s)}",
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(sigmoid, C)},
        {"O": Tile},
        VJP.format("torch.sigmoid"),
        MM + "s = torch.sigmoid(C);return {'O': D * s * (1 - s)}",
        MM + "s = torch.sigmoid(C);return {'O': D * (s - s.square())}",
        MM + "return {'O': torch.sigmoid(C) * D * torch.sigmoid(-C)}",
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(tanh, C)},
        {"O": Tile},
        VJP.format("torch.tanh"),
        MM + "return {'O': (1 - torch.tanh(C) ** 2) * D}",
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(relu, C)},
        {"O": Tile},
        VJP.format("F.relu"),
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(gelu_erf, C)},
        {"O": Tile},
        VJP.format("F.gelu"),
        MM + "density = torch.exp(-C * C / 2) / math.sqrt(2 * math.pi);"
        "return {'O': D * (0.5 * (1 + torch.erf(C / math.sqrt(2))) + C * density)}",
    ),
    *spelled(
        lambda acc, C: {"O": acc * derivative(gelu_tanh, C)},
        {"O": Tile},
        VJP.format("lambda x: F.gelu(x, approximate='tanh')"),
        MM + "k = math.sqrt(2 / math.pi);t = torch.tanh(k * (C + 0.044715 * C**3));"
        "inner = k * (1 + 3 * 0.044715 * C**2);"
        "return {'O': 0.5 * D * (1 + t + C * (1 - t * t) * inner)}",
    ),
    *spelled(
        product_slopes,
        {"V": WideTile},
        GW + "return {'V': torch.stack((D * u, D * g), dim=-1).flatten(-2)}",
        GW + "x = torch.empty_like(W);x[:, 0::2] = D * u;x[:, 1::2] = D * g;return {'V': x}",
        MM + "x = W.view(W.shape[0], -1, 2).flip(-1) * D[..., None];return {'V': x.flatten(1)}",
        MM + "_, vjp = torch.func.vjp(lambda w: w[:, 0::2] * w[:, 1::2], W);"
        "return {'V': vjp(D)[0]}",
    ),
    *spelled(
        gated_slopes,
        {"V": WideTile, "s": RowMean, "O": Tile},
        GW + "s, o = torch.sigmoid(g), F.silu(g);x, y = D * u * (s + o * (1 - s)), D * o;"
        "v = torch.stack((x, y), -1).flatten(-2);"
        "return {'V': v, 's': (g * x + u * y).mean(-1), 'O': o * u}",
        GW + "s = torch.sigmoid(g);x, y = u * s * (1 + g * (1 - s)) * D, D * F.silu(g);"
        "v = torch.stack((x, y), -1).reshape(W.shape);"
        "return {'V': v, 's': (v * W).sum(-1) / D.shape[1], 'O': u * g * s}",
        MM + "x = W.view(W.shape[0], -1, 2);"
        "o, vjp = torch.func.vjp(lambda w: F.silu(w[..., 0]) * w[..., 1], x);v = vjp(D)[0];"
        "return {'V': v.flatten(1), 's': 2 * (v * x).mean((1, 2)), 'O': o}",
    ),
    *spelled(
        wide_largest,
        {"V": WideTile, "s": RowMax},
        MM + "x = W.clone();x[:, ::2] = D;return {'V': x, 's': W.abs().amax(-1)}",
        GW + "x = torch.stack((D, u), -1).view(W.shape);"
        "return {'V': x, 's': torch.maximum(g.abs(), u.abs()).amax(-1)}",
        MM + "x = W.clone();x[:, ::2] = D;return {'V': x, 's': W.abs().max(-1).values}",
    ),
    *spelled(
        quantised,
        {"H": HalfTile, "s": RowMax},
        "D = (A @ B.T) * alpha;" + GU + "x = F.silu(g) * u;"
        "return {'H': (x * r[:, None]).clamp(-448, 448), 's': x.abs().amax(-1)}",
        "D = (alpha * A.float()) @ B.T;" + GU + "x = g * u * g.sigmoid();"
        "return {'H': torch.clamp(r[:, None] * x, max=448.0).clamp(min=-448.0),"
        " 's': torch.linalg.vector_norm(x, math.inf, dim=-1)}",
    ),
]


@pytest.mark.parametrize(("digest", "inputs", "outputs", "body"), CASES)
def test_spellings_of_one_program(digest: str, inputs: str, outputs: str, body: str) -> None:
    assert compose(spec(body, inputs, outputs))["probe"].digest == digest


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        ("C r b alpha", "D O s", MM + "D = D + C * r[:, None];O = F.silu(D) * b;"
         "return {'D': D, 'O': O, 's': (alpha * O).abs().amax(-1)}"),
        ("r", "D H", "D = (A @ B.T) * r[:, None];" + GU + "return {'D': D, 'H': F.gelu(u) * g}"),
        ("C b", "O", MM + GU + "x = torch.stack((-u, g), -1).flatten(-2);return {'O': D * C + x * b}"),
    ],
)  # fmt: skip
def test_new_names_change_only_names(inputs: str, outputs: str, body: str) -> None:
    renamed = {
        "A": "tokens",
        "B": "weight",
        "C": "res",
        "r": "rstd",
        "b": "shift",
        "alpha": "factor",
    }
    renamed |= {"D": "hidden", "O": "result", "H": "act", "s": "stat", "probe": "other"}
    first = spec(body, inputs, outputs)
    second = spec(body, inputs, outputs, renamed)
    mine, other = compose(first)["probe"], compose(second)["other"]
    assert mine.digest == other.digest
    text = body_of(Composer().write(first, lambda *_: None))
    lower = {k.lower(): v for k, v in renamed.items() if k in ("D", "O")}
    there = re.sub(r"\w+", lambda m: {**lower, **renamed}.get(m[0], m[0]), text)
    # Longer names may wrap differently.
    squash = lambda t: re.sub(r"[\s(),;]+", "", t.replace("weightᵀ", "Bᵀ"))
    assert squash(there.replace("Bᵀ", "weightᵀ")) == squash(
        body_of(Composer().write(second, lambda *_: None))
    )


def test_symbolic_scalars_stay_operands() -> None:
    program = compose(
        spec(MM + "return {'O': D.clamp(max=alpha) * (alpha * beta) ** 2}", "alpha beta")
    )["probe"]
    assert list(program.operands.values()) == [Scalar, Scalar]
    acc = torch.tensor([[1.0, -4.0, 9.0, 0.0]], dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)
    scalars = {"alpha": 2.0, "beta": 3.0}
    got = interpret(program, acc, eye, scalars, dtypes={}, compute=torch.float64)
    assert got["O"].tolist() == [[36.0, -144.0, 72.0, 0.0]]


def test_a_long_chain_of_shared_values_stays_short() -> None:
    a_spec = spec(MM + "D = [D := D * (D + i) for i in range(40)][-1];return {'O': D}")
    # Values grow beyond any float, so only the text is looked at, not the self-check.
    text = emit(a_spec, [rewrite(capture(a_spec, {}))])
    assert len(text) < 10_000
    assert read_programs(text)["probe"].graph.outputs == {
        "O": 118
    }  # acc, 39 constants, 39 sums, 40 products


def test_a_shared_value_is_computed_once() -> None:
    text = Composer().write(
        spec("D = (A @ B.T + C) * r[:, None];return {'D': D, 'O': D * b, 's': D.square().sum(-1)}",
             "C r b", "D O s"),
        lambda *_: None,
    )  # fmt: skip
    assert "    d = (acc + C) * r\n" in text
    assert '    return {"D": d, "O": d * b, "s": d * d}\n' in text


REFUSED = [
    ("", O, "return {'O': torch.ones(A.shape[0], B.shape[0])}", "depends on no input"),
    ("C", O, "return {'O': C * 2}", r"no output needs the product of A and B"),
    ("C", O, MM + "return {'O': D @ C.T @ C}", r"probe.md:22: `return .*`: mm: is a second GEMM; a kernel has one"),
    ("", O, "return {'O': A @ B.T + A @ A.T @ A @ B.T}", "mm: is not the product of A with B"),
    ("", O, "return {'O': A @ (B * B).T}", "B enters the GEMM through 'mul'"),
    ("", O, "return {'O': F.silu(A) @ B.T}", "A enters the GEMM through 'mul'"),
    ("", O, "return {'O': F.rms_norm(A, A.shape[-1:]) @ B.T}", "mean: reduces over the columns of an operand, before"),
    ("", O, MM + "return {'O': torch.softmax(D, -1)}", "21: `.*`: softmax: needs a whole row"),
    ("r", DS, MM + "return {'D': D, 's': r * D.logsumexp(-1)}", "mul: scales a log-sum-exp"),
    ("", DS, MM + "return {'D': D, 's': -D.logsumexp(-1)}", "neg: uses a row reduction again"),
    ("", DN, MM + "return {'D': D, 'n': D.logsumexp(0)}", "logsumexp: takes other than a sum or a maximum over"),
    ("", H, MM + "return {'H': D.view(D.shape[0], -1, 2).logsumexp(-1)}", "reduces other than all columns of each row"),
    ("", DN, MM + "return {'D': D, 'n': D.sum(0) / D.shape[0]}", "uses a size as a number"),
    ("", O, MM + "return {'O': D / D.norm(dim=0)}", "div: uses a row reduction again"),
    ("", DS, MM + "return {'D': D, 's': D.sum()[None].expand(D.shape[0])}", "reduces other than all columns"),
    ("", O, MM + "return {'O': (D - D.amax(-1, True)).exp()}", "'O' uses a row reduction again"),
    ("", O, MM + "return {'O': D / D.norm(dim=-1, keepdim=True)}", "div: uses a row reduction again"),
    ("", O, MM + "s = D.square().mean(-1, keepdim=True);return {'O': D * torch.rsqrt(s + 1e-6)}",
     r"probe.md:22: `.*`: add: uses a row reduction again in the same kernel"),
    ("", O, MM + "return {'O': D - D.amax(-1, keepdim=True)}", "uses a row reduction again"),
    ("", DS, MM + "return {'D': D, 's': D.norm(dim=-1)}", "output 's' is computed by 'sqrt'"),
    ("r", DS, MM + "return {'D': D, 's': r * D.amax(-1)}", "scales a maximum or minimum by other than a pos"),
    ("", "D s", MM + "return {'D': D, 's': D[:, 0]}", "'s' moves values|is computed by"),
    ("index", O, MM + "return {'O': D.gather(1, index[:, None].expand_as(D))}",
     "gather: takes other than one element of each row"),
    ("index", DS, MM + "return {'D': D, 's': D[:, 0::2].gather(1, index[:, None])[:, 0]}",
     "takes elements of what is no tensor of full width"),
    ("index b", DS, MM + "return {'D': D, 's': b.expand_as(D).gather(1, index[:, None])[:, 0]}",
     "gather: reduces a value that is the same|takes elements of what is no tensor of full width"),
    ("r", DS, MM + "return {'D': D, 's': D.gather(1, r[:, None].long())[:, 0]}", "casts to torch.int64"),
    ("index", O, MM + "return {'O': D * index[:, None]}", "mul: computes with 'index'"),
    ("index", DS, MM + "return {'D': D, 's': D.gather(1, index[:, None] + 1)[:, 0]}",
     "add: computes with 'index', and an index only selects columns"),
    ("index", O, "return {'O': (A * index[:, None]) @ B.T}", "computes with 'index'"),
    ("index", DS, MM + "s = D[index, index];return {'D': D, 's': s}", "index: takes other than one element of each row"),
    ("index", O, MM + "return {'O': D[index]}", "index: takes other than one element of each row"),
    ("index", O, MM + "return {'O': D - D.gather(1, index[:, None])}", "uses a gathered element again"),
    ("index", DS, MM + "s = D.logsumexp(-1) - D.gather(1, index[:, None])[:, 0];"
     "return {'D': D, 's': s}", "sub: uses a row reduction again"),
    ("", O, MM + "return {'O': D.roll(1, -1)}", "output 'O' moves values between rows or columns"),
    ("", H, MM + "g, u = D.chunk(2, -1);return {'H': F.silu(g) * u}",
     r"mul: takes half of the product's columns, as `chunk` does .declare `pairs: halves`"),
    ("W", "V", MM + "g, u = W.chunk(2, -1);return {'V': torch.cat((D * u, D * g), -1)}",
     "mul: moves values between rows or columns"),
    ("W", O, GW + "return {'O': D * g + u}", "1 WideTile operands and 0 outputs, expected one of each"),
    ("W", "V", MM + "return {'V': torch.softmax(W, -1) * D.repeat_interleave(2, -1)}", "softmax: needs a whole row"),
    ("", O, MM + "return {'O': D + torch.empty(D.shape)}", "cannot hold the constant nan"),
    ("", O, MM + "return {'O': F.dropout(D, 0.5)}", "bernoulli: draws random numbers"),
    ("", O, MM + "return {'O': D.int().float()}", r"to_copy: casts to torch.int32"),
    ("", O, MM + "return {'O': torch.lgamma(D)}", "lgamma: has no counterpart among the primitives"),
    ("", O, MM + "return {'O': D * torch.linspace(0, 1, D.shape[1])}", "computes with a table of constants"),
    ("alpha", O, MM + "return {'O': D if alpha > 1 else -D}", "probe.md:22: `.*`: control flow"),
    ("", O, MM + "return {'O': D + D.shape[1]}", "'O' is off by .*the reference uses a size"),
    ("C", O, MM + "C.add_(1);return {'O': D + C}", "copy_: writes to an input in place"),
    ("r", "D O", MM + "return {'D': D, 'O': r[:, None].expand_as(D)}", "'O' is the same in every row or column"),
    ("", O, "return {'O': A @ B}", "probe.md:20: `.*`: the reference raises at sizes that the spec allows \\(M = 7, N"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "outputs", "body", "message"), REFUSED)
def test_what_no_program_expresses_is_refused(
    inputs: str, outputs: str, body: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=message) as raised:
        Composer().write(spec(body, inputs, outputs), lambda *_: None)
    assert raised.value.hint and "\n" not in str(raised.value)


IN_PLACE = "in_place: {output: O, input: C}"


@epilogue(O=AddTile)
def added(acc: Any, r: ColVector) -> Any:
    return {"O": acc * r}


@pytest.mark.parametrize(
    "body",
    [
        MM + "return {'O': C + D * r[:, None]}",
        "D = (A * r[:, None]) @ B.T;D += C;return {'O': D}",
        "return {'O': torch.addmm(C, A * r[:, None], B.T)}",
        MM + "return {'O': C - r[:, None] * -D}",
        MM + "return {'O': (C - (C - D * r[:, None])) + C}",
    ],
)
def test_an_output_updated_in_place_is_what_is_added(body: str) -> None:
    assert compose(spec(body, "C r", header=IN_PLACE))["probe"].digest == added.digest


@pytest.mark.parametrize(
    ("outputs", "body"),
    [
        (O, "return {'O': D}"),
        (O, "return {'O': 2 * C + D}"),
        (O, "return {'O': C * r[:, None] + D}"),
        (O, "return {'O': F.silu(C + D)}"),
        ("O D", "return {'O': C + D, 'D': C * D}"),
        ("O s", "O = C + D;return {'O': O, 's': O.square().sum(-1)}"),
    ],
)
def test_what_needs_the_overwritten_value_is_refused(outputs: str, body: str) -> None:
    with pytest.raises(ProgramError, match="needs 'C', which 'O' overwrites; a kernel only adds"):
        compose(spec(MM + body, "C r", outputs, header=IN_PLACE))


def test_only_full_tiles_are_updated_in_place() -> None:
    header = "in_place: {output: H, input: half}"
    with pytest.raises(ProgramError, match=r"'H': a kernel updates only \[M, N\] in place"):
        compose(spec(MM + GU + "return {'H': g + u}", "half", H, header=header))


def test_one_index_may_select_from_several_values() -> None:
    program = compose(
        spec(MM + "i = index[:, None];s = D.gather(1, i)[:, 0];"
             "return {'D': D, 's': s, 't': F.silu(D * C).gather(1, i)[:, 0]}", "index C", "D s t")
    )["probe"]  # fmt: skip
    assert [kind.__name__ for kind in program.operands.values()] == ["ColIndex", "Tile"]
    assert list(program.outputs.values()) == [Tile, RowGather, RowGather]


def test_an_input_may_have_the_name_of_a_primitive_that_the_program_does_without() -> None:
    scaled = spec(MM + "return {'O': D * r[:, None]}", "r", "O", {"r": "tanh"})
    assert [*compose(scaled)["probe"].operands] == ["tanh"]
    with pytest.raises(ProgramError, match=r"'tanh' has a name that the program needs \(rename it"):
        compose(spec(MM + "return {'O': D.tanh() * r[:, None]}", "r", "O", {"r": "tanh"}))
