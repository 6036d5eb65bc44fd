"""Drafts: what is read off a function, against what its author would have declared. The functions
here are ours, so they run in this process; `tests/agent/test_references.py` runs what is not."""

from typing import Any

import pytest
import yaml

from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.draft import Example, draft
from coda_agent.specs.source import extracted

S = 4096
SQUARE = {"x": (S, S), "w": (S, S)}


def drafted(body: str, shapes: dict[str, Any], **types: str) -> tuple[Spec, dict[str, Any]]:
    """The spec, and its front matter as it is written."""
    names = ", ".join(shapes)
    text = f"import math\nimport torch\nimport torch.nn.functional as F\ndef f({names}):\n"
    text += "".join(f"    {line}\n" for line in body.splitlines())
    examples = {
        x: Example(axes, types.get(x, "T" if axes else "float32")) for x, axes in shapes.items()
    }
    written = draft(extracted(text, "model.py"), examples, "f")
    return load_spec("f.md", text=written), yaml.safe_load(written.split("---\n")[1])


def faces(spec: Spec) -> dict[str, tuple[Any, str]]:
    tensors = {**spec.inputs, **spec.outputs}
    return {x: (list(spec.symbolic_shape(x)), tensor.dtype) for x, tensor in tensors.items()}


def test_a_linear_layer() -> None:
    spec, front = drafted("y = torch.relu(x @ w.T + b)\nreturn y", SQUARE | {"b": (S,)})
    assert faces(spec) == {
        "x": (["M", "K"], "T"), "w": (["N", "K"], "T"), "b": (["N"], "T"), "y": (["M", "N"], "T")
    }  # fmt: skip
    assert front["gemm"] == ["x", "w"] and spec.default_types() == {"T": "bfloat16"}
    assert front["dims"] == {"M": {}, "N": {"multiple_of": 16}, "K": {"multiple_of": 8}}
    assert front["inputs"]["w"]["draw"] == {"normal": {"std": "K**-0.5"}}
    assert front["check_shapes"][1] == {"M": 77, "N": 272, "K": 64}
    assert front["bench_shapes"] == [{"M": S, "N": S, "K": S}]
    assert spec.summary == "f, as its reference computes it."


def test_equal_sizes_are_told_apart_by_what_is_computed() -> None:
    spec, _ = drafted(
        "z = (x @ w.T).float() * r[:, None] * c + t\nreturn z.to(x.dtype), z.sum(0), z.amax(-1)",
        SQUARE | {"r": (S,), "c": (S,), "t": (S, S)}, r="float32",
    )  # fmt: skip
    found = faces(spec)
    assert [found[x][0] for x in "rct"] == [["M"], ["N"], ["M", "N"]]
    assert [found[x] for x in ("out1", "out2", "out3")] == [
        (["M", "N"], "T"), (["N"], "float32"), (["M"], "float32")
    ]  # fmt: skip


def test_an_extent_that_is_twice_a_dims_is_said_so() -> None:
    """Gates and ups in turn, as the backward pass of a gate takes them."""
    spec, _ = drafted(
        "d = x @ w.T\nreturn d * F.silu(z[:, 0::2]), d * z[:, 1::2]", SQUARE | {"z": (S, 2 * S)}
    )
    assert faces(spec)["z"] == (["M", "2*N"], "T")


@pytest.mark.parametrize(
    "body", ["torch.addcmul(z, t, v)", "torch.addcdiv(z, t, v)", "torch.lerp(z, t, v)"]
)
def test_what_broadcasts_over_symbolic_sizes(body: str) -> None:
    spec, _ = drafted(f"z = x @ w.T\nreturn {body}", SQUARE | {"t": (S, S), "v": (S,)})
    assert [faces(spec)[x][0] for x in ("v", "out")] == [["N"], ["M", "N"]]


def test_dims_that_no_operation_ties_are_tried() -> None:
    body = "z = (x @ w.T).float()\nreturn z.gather(1, t[:, None]).squeeze(1), torch.logsumexp(z, 1)"
    spec, front = drafted(body, SQUARE | {"t": (S,)}, t="int64")
    assert faces(spec)["t"] == (["M"], "int64")
    assert front["inputs"]["t"]["draw"] == {"integers": [0, "N"]}


@pytest.mark.parametrize(
    ("width", "view", "unit"),
    [(128, "-1, cos.shape[1]", 128), (64, "-1, cos.shape[1]", 64), (128, "8, -1, 128", 1024)],
)
def test_a_heads_width_that_no_operation_ties_is_a_number(width: int, view: str, unit: int) -> None:
    """Queries, or those of eight groups, turned by tables of one head."""
    body = f"""q = (x @ w.T).view(x.shape[0], {view})
a, b = q.chunk(2, -1)
c, s = (t.view(-1, {"1, " * view.count(",")}t.shape[1]) for t in (cos, sin))
return (q * c + torch.cat((-b, a), -1) * s).flatten(1)"""
    spec, front = drafted(body, SQUARE | {"cos": (S, width), "sin": (S, width)})
    assert [faces(spec)[x][0] for x in ("cos", "sin")] == [["M", width]] * 2
    assert front["dims"]["N"] == {"multiple_of": unit}


def test_parts_of_columns_and_heads() -> None:
    spec, _ = drafted(
        "z = x @ w.T\nreturn F.silu(z[:, ::2]) * z[:, 1::2] + c", SQUARE | {"c": (S, S // 2)}
    )
    assert faces(spec)["c"][0] == ["M", "N/2"] == faces(spec)["out"][0]
    spec, _ = drafted("return ((x @ w.T).unflatten(-1, (-1, 96)) * g).flatten(-2)", {
        "x": (S, S), "w": (32 * 96, S), "g": (96,)
    })  # fmt: skip
    assert faces(spec)["g"][0] == [1, 96] and spec.dims["N"].multiple_of == 96


def test_several_weights_and_columns_that_are_cut() -> None:
    gate = {"x": (S, S), "wg": (S, S), "wu": (S, S)}
    _, front = drafted("return F.silu(x @ wg.T) * (x @ wu.T)", gate)
    assert (front["gemm"], front["pairs"]) == (["x", ["wg", "wu"]], "halves")
    assert front["outputs"]["out"]["shape"] == ["M", "N"] and "split" not in front
    _, front = drafted("g, u = x @ wg.T, x @ wu.T\ny = F.silu(g) * u\nreturn g, u, y", gate)
    assert (front["pairs"], front["split"]) == ("halves", ["g", "u"])
    _, front = drafted("q, k = x @ wg, x @ wu\nreturn q, k", gate)
    assert "pairs" not in front and front["inputs"]["wu"]["shape"] == ["K", "N"]
    _, front = drafted("return torch.cat([x @ wg, x @ wu], -1)", gate)
    assert "pairs" not in front and front["outputs"]["out"]["shape"] == ["M", "2*N"]
    cut = "g, u = (x @ w.T).chunk(2, -1)\nreturn g * u"
    assert drafted(cut, SQUARE)[1]["pairs"] == "halves"
    assert "pairs" not in drafted("z = x @ w.T\nreturn z[:, ::2] * z[:, 1::2]", SQUARE)[1]


def test_halves_that_are_computed_apart_are_pairs() -> None:
    cut = "a, z = (x @ w.T).chunk(2, -1)\nreturn "
    assert drafted(cut + "a, F.silu(z)", SQUARE)[1]["pairs"] == "halves"
    assert "pairs" not in drafted(cut + "F.silu(a), F.silu(z)", SQUARE)[1]
    body = "z = x @ w.T\nreturn z[:, ::2], z[:, 1::2].relu()"
    assert "pairs" not in drafted(body, SQUARE)[1]


def test_weights_of_several_widths_are_multiples_of_one_dim() -> None:
    _, front = drafted(
        "return x @ wq.T, x @ wk.T, x @ wv.T",
        {"x": (S, S)} | {"wq": (S, S), "wk": (512, S), "wv": (512, S)},
    )
    assert [front["inputs"][x]["shape"][0] for x in ("wq", "wk", "wv")] == ["8*N", "N", "N"]
    assert [front["outputs"][o]["shape"][1] for o in ("out1", "out2", "out3")] == ["8*N", "N", "N"]
    assert front["bench_shapes"] == [{"M": S, "N": 512, "K": S}]


def test_small_leading_dims_that_views_tie() -> None:
    body = "return r + F.linear(x.flatten(0, 1), w).view(r.shape)"
    _, front = drafted(body, {"x": (2, 48, 320), "w": (80, 320), "r": (2, 48, 80)})
    assert front["inputs"]["r"]["shape"] == ["B", "S", "N"]


def test_numbers_that_a_kernel_draws() -> None:
    body = "from coda_agent.primitives.placed import philox\ny = x @ w.T\n"
    body += "return y * (philox(seed, at, *y.shape, device=y.device) >= 0.1) / 0.9"
    _, front = drafted(body, SQUARE | {"seed": (), "at": ()})
    drawn = {"integers": [0, 2**24]}
    assert [front["inputs"][x]["draw"] for x in ("seed", "at")] == [drawn, drawn]


def test_a_size_that_is_held_as_a_number() -> None:
    spec, front = drafted(
        "q, k, v = (x @ w.T + b).split([128, 64, 64], dim=-1)\nreturn q, k, v",
        {"x": (2, 48, S), "w": (256, S), "b": (256,)},
    )
    assert [front["outputs"][o]["shape"] for o in "qkv"] == [
        ["B", "S", 128], ["B", "S", 64], ["B", "S", 64]
    ]  # fmt: skip
    assert front["dims"].keys() == {"B", "S", "K"} and "pairs" not in front
    assert front["inputs"]["b"]["shape"] == [256] and spec.declared.gemm == ("x", "w")


def test_a_width_that_is_held_as_a_number() -> None:
    _, front = drafted("return (x @ w.T) / math.sqrt(x.size(-1))", {"x": (S, 80), "w": (S, 80)})
    assert [front["inputs"][x]["shape"] for x in "xw"] == [["M", 80], ["N", 80]]
    assert front["inputs"]["w"]["draw"] == {"normal": {"std": "80**-0.5"}}


def test_a_number_that_is_used_as_a_tensor() -> None:
    body = "# CLIP\nreturn scale.exp() * x @ w.T"
    spec, _ = drafted(body, SQUARE | {"scale": ()})
    assert faces(spec)["scale"] == ([], "float32")
    assert "    # CLIP\n    scale = torch.as_tensor(scale)\n    return scale.exp()" in spec.text


def test_halves_of_eight_bits_are_whole_units_of_16_bytes() -> None:
    body = """z = (x.float() @ w.float().T) * s
g = F.silu(z[:, 0::2]) * z[:, 1::2]
return g.clamp(-448, 448).to(torch.float8_e4m3fn), g.abs().amax(-1)"""
    eight = dict.fromkeys("xw", "float8_e4m3fn") | {"s": "float32"}
    spec, front = drafted(body, SQUARE | {"s": (S,)}, **eight)
    assert faces(spec)["out1"] == (["M", "N/2"], "float8_e4m3fn")
    assert front["dims"] == {"M": {}, "N": {"multiple_of": 32}, "K": {"multiple_of": 16}}
    with pytest.raises(SpecError, match=r"4112; a kernel takes multiples of 32 .*pad it to 4128"):
        drafted(body, SQUARE | {"w": (4112, S), "s": (4112,)}, **eight)


def test_letters_stay_as_they_were_given() -> None:
    spec, front = drafted("return (x @ w.T).tanh()", {"x": ("tokens", "D"), "w": ("F", "D")})
    assert faces(spec)["out"] == (["tokens", "F"], "T") and "bench_shapes" not in front
    body = """q = (x @ w.T).unflatten(-1, (-1, 96))
a, b = q.chunk(2, -1)
return torch.cat([-b, a], -1).flatten(2) * s"""
    _, front = drafted(body, {"x": ("B", "T", "K"), "w": ("N", "K"), "s": ()})
    assert front["outputs"]["out"]["shape"] == ["B", "T", "N"]
    assert front["dims"]["N"] == {"multiple_of": 96}


def test_what_a_root_takes_is_positive() -> None:
    _, front = drafted("return (x @ w.T) * torch.sqrt(v)", SQUARE | {"v": (S,)})
    assert front["inputs"]["v"]["draw"] == {"uniform": [0.5, 1.5]}


def test_element_types() -> None:
    spec, front = drafted(
        "return ((x.float() @ w.float().T) * s).bfloat16()", SQUARE | {"s": ()},
        x="float8_e4m3fn", w="float8_e4m3fn",
    )  # fmt: skip
    assert faces(spec)["out"][1] == "bfloat16" and "types" not in front
    assert spec.dims["K"].multiple_of == 16 and faces(spec)["s"] == ([], "float32")
    spec, _ = drafted("return (x @ w.T).relu().bfloat16()", SQUARE)
    assert spec.types == {"T": ("bfloat16",)}


@pytest.mark.parametrize(
    ("body", "shapes", "message"),
    [
        ("return x + w", SQUARE, "model.py: f multiplies no two matrices (a kernel is a product"),
        (
            "return (x @ w.T) @ v.T", SQUARE | {"v": (64, S)},
            "model.py: the function multiplies what a product gave; a kernel has one product (give",
        ),
        (
            "return x @ w.T", {"x": (S, S), "w": (S, 128)},
            "model.py:5: the function raises RuntimeError: a and b must have same reduction dim",
        ),
        (
            "if x.sum() > 0:\n    x = -x\nreturn x @ w.T", SQUARE,
            "model.py:5: control flow, or a Python number, depends on a value of an input (use",
        ),
        (
            "a, b, c = (x @ w.T).chunk(3, -1)\nreturn a + h * c.chunk(3, -1)[0].repeat(1, 3)",
            {"x": (S, 64), "w": (576, 64), "h": (S, 192)},
            "model.py:6: at other sizes than the example's the function raises RuntimeError: The",
        ),
        ("y = x @ w.T\nreturn y, 'a'", SQUARE, "model.py: the function returns a str for out2"),
        ("y = x @ w.T\nreturn None", SQUARE, "model.py: the function returns nothing for out"),
        (
            "return (x @ w.T) / math.sqrt(x.shape[0])", SQUARE,
            "model.py: f needs a size of x to be 4096 (a kernel takes any number of rows: write",
        ),
        (
            "return x @ w.T", {"x": (S, S), "w": (50257, S)},
            "model.py: w has a size of 50257; a kernel takes multiples of 8 there (pad it to 50264)",
        ),
        (
            "return torch.bmm(x, w)", {"x": (4, S, S), "w": (4, S, S)},
            "model.py: f multiplies x with a batch of matrices, w (take one matrix as an argument",
        ),
        ("return x @ x.T", {"x": (S, S)}, "model.py: f multiplies x with itself (take one matrix"),
        ("return x @ w.T", {"x": (1, S), "w": (S, S)}, "model.py: the example of x has one row (g"),
        (
            "return x * torch.sigmoid(x @ w.T)", {"x": (4 * S, S), "w": (S, S)},
            "model.py: both extents of w are summed over, as an operand is read again (pass that",
        ),
        (
            "return x + w @ x", {"x": (S, 4 * S), "w": (S, S)},
            "model.py: both extents of w are summed over, as an operand is read again (pass that",
        ),
        (
            "return (x @ w.T).squeeze(-1)", {"x": (S, S), "w": (1, S)},
            "model.py: w has one row, so the product has one column (use torch.mv, or pad it",
        ),
        (
            "return x @ w.T > 0", SQUARE,
            "model.py: out: unknown dtype 'bool'; expected one of T, bfloat16, float16, float32, "
            "float8_e4m3fn, int32, int64; give or return numbers, and compare them in the call",
        ),
        (
            "return F.dropout(x @ w.T, 0.1)", SQUARE,
            "model.py:5: the function draws random numbers (bernoulli_) (give the numbers as an ar",
        ),
        (
            "y = x @ w.T\nreturn y + torch.rand_like(y)", SQUARE,
            "model.py:6: the function draws random numbers (rand_like) (give the numbers as an arg",
        ),
        (
            "return F.conv2d(x, w)", {"x": (2, 64, 8, 8), "w": (128, 64, 1, 1)},
            "model.py:5: the function convolves (of 1x1 write F.linear(x, w), with the channels",
        ),
        (
            "return x.transpose(1, 2).flatten(2) @ w.T", {"x": (2, 4, 48, 16), "w": (80, 64)},
            "model.py: f multiplies x in parts, or sums over several of its dims (give x as a mat",
        ),
        (
            "return x.flatten(0, 1).T @ w", {"x": (2, 48, 64), "w": (96, 80)},
            "model.py: f sums over several dims (give both as matrices, with one dim to sum over)",
        ),
        (
            "return (x * g) @ w.T", {"x": (96, 64), "w": (128, 64), "g": (64,)},
            "model.py: f multiplies what it makes of x and g (compute that in the call, and take it",
        ),
        (
            "return (x @ w.T).sum()", SQUARE,
            "model.py: out is one number; a kernel reduces over rows, or over columns (return what",
        ),
        (
            "return (x @ w.T).argmax(-1)", SQUARE,
            "model.py: out: outputs are floating-point, not int64; expected one of bfloat16, float16"
            ", float32, float8_e4m3fn; return what out is made of, and make it with torch",
        ),
        (
            "return x @ w.T", SQUARE | {"x": (10**9, S)},
            "model.py: the example's tensors take 8,192 GB (give sizes that a GPU holds: they are",
        ),
        (
            "return (x @ w.T).masked_fill(c > 1, -1e5)", SQUARE | {"c": (S, S)},
            "model.py: f: output 'out' holds 1.0e+05, which hides all else; leave such a mask to",
        ),
        ("raise ValueError", SQUARE, "model.py:5: the function raises ValueError: no message"),
        ("return (x @ w.T) * 0", SQUARE, "model.py: f: output 'out' is all zero"),
        ("z = x @ w.T\nreturn z, z[:, 4096:]", SQUARE, "model.py: out2 is empty, with an extent of 0"),
        (
            "return (x @ w.T)[:, 1:]", SQUARE,
            "model.py: out has an extent of 79 where M = 3, N = 80, K = 56, which is no part of a dim"
            " (return it as the product has it",
        ),
        (
            "return x @ w.T + b[1:]", SQUARE | {"b": (S + 1,)},
            "model.py: b has an extent of 57601 where M = 34560, N = 57600, K = 80640, which is no pa"
            "rt of a dim (take that part in the call, and give it as the argument)",
        ),
        (
            "return (x @ w.T).double()", SQUARE,
            "model.py: out: unknown dtype 'float64'; expected one of T, bfloat16, float16, float32, "
            "float8_e4m3fn, int32, int64; return it as float32, and cast it with torch",
        ),
        (
            "return x @ w.T", SQUARE | {"b": (S,)},
            "model.py: f: no output depends on 'b' by more than its tolerance; draw larger ones, or l"
            "eave it out",
        ),
    ],
)  # fmt: skip
def test_refusals_speak_of_the_function(body: str, shapes: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        drafted(body, shapes)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
