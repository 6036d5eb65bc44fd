"""The spec parser: what it reads, and the one line it says about each kind of bad spec."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.format import evaluate

SPECS = Path(load_spec.__code__.co_filename).parent

GOOD = """\
---
name: scaled
level: compose
summary: A scaled product.
types: {T: [bfloat16, float16]}
dims:
  M: {}
  N: {multiple_of: 16}
  K: {multiple_of: 8}
gemm: [A, B]
parameters:
  per: [column, row]
  act: [none, relu]
inputs:
  A: {shape: [M, K], dtype: T}
  B: {shape: [N, K], dtype: T, draw: {normal: {std: K**-0.5}}}
  v: {shape: {parameter: per, column: [N], row: [M]}, dtype: float32, draw: {uniform: [0, 1]}}
  x: {shape: [], dtype: float32, draw: {constant: 2}}
  y: {shape: [M, 3], dtype: int64, draw: {integers: [0, N]}}
outputs:
  D: {shape: [M, N/2], dtype: T}
check_shapes:
  - {M: 3, N: 16, K: 8}
bench_shapes:
  - {M: 4096, N: 4096, K: 4096}
tolerance: {multiple: 2.0}
target: 0.97
---

# Scaled

Some mathematics.

```python
this = "is not the reference"
```

```python reference
import torch


def reference(A, B, v, x, y, per, act):
    return {"D": (A @ B.T)[:, ::2]}
```

A last remark.
"""


def parse(*edits: tuple[str, str]) -> Spec:
    text = GOOD
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return load_spec("here/scaled.md", text=text)


def test_reads_every_field() -> None:
    spec = parse()
    assert (spec.name, spec.level, spec.summary) == ("scaled", "compose", "A scaled product.")
    assert spec.gemm == ("A", "B") and spec.gemm_dims == ("M", "N", "K")
    assert spec.dims["M"].multiple_of == 1 and spec.dims["N"].multiple_of == 16
    assert spec.default_types() == {"T": "bfloat16"}
    assert spec.tolerance.multiple == 2.0 and spec.target == 0.97
    assert spec.check_shapes == ({"M": 3, "N": 16, "K": 8},)
    assert [spec.inputs[name].draw for name in "ABvxy"] == [
        ("normal", (1.0,)),
        ("normal", ("K**-0.5",)),
        ("uniform", (0, 1)),
        ("constant", (2,)),
        ("integers", (0, "N")),
    ]
    assert spec.prose.startswith("# Scaled") and spec.prose.endswith("A last remark.\n")
    assert "is not the reference" in spec.prose and "def reference" not in spec.prose
    assert spec.reference_source.startswith("import torch\n")
    assert spec.text.splitlines()[spec.reference_line - 1] == "import torch"


def test_shapes_and_dtypes() -> None:
    spec, sizes = parse(), {"M": 3, "N": 32, "K": 8}
    assert spec.shape_of("D", sizes) == (3, 16)
    assert spec.shape_of("x", sizes) == ()
    assert spec.shape_of("y", sizes) == (3, 3)
    assert spec.shape_of("v", sizes) == (32,)
    assert spec.shape_of("v", sizes, {"per": "row"}) == (3,)
    assert spec.symbolic_shape("D") == ("M", "N/2")
    assert spec.dtype_of("A", {"T": "float16"}) == "float16"
    assert spec.dtype_of("y", {}) == "int64"


def test_a_shape_may_be_twice_a_dim() -> None:
    spec = parse(
        ("shape: [M, N/2]", "shape: [M, 2*N]"), ("y: {shape: [M, 3]", "y: {shape: [3*N/8]")
    )
    assert spec.symbolic_shape("D") == ("M", "2*N")
    assert spec.shape_of("D", {"M": 3, "N": 32, "K": 8}) == (3, 64)
    assert spec.shape_of("y", {"M": 3, "N": 32, "K": 8}) == (12,)


IN_PLACE = ("gemm: [A, B]", "gemm: [A, B]\nin_place: {output: D, input: y, when: {act: relu}}")
SAME_FACE = (
    "y: {shape: [M, 3], dtype: int64, draw: {integers: [0, N]}}",
    "y: {shape: [M, N/2], dtype: T}",
)


def test_an_output_may_overwrite_an_input_in_some_variants() -> None:
    spec = parse(IN_PLACE, SAME_FACE)
    assert [spec.updated(binding) for binding in spec.bindings()] == [{}, {"D": "y"}] * 2
    assert spec.updated({"act": "relu"}) == {"D": "y"} and spec.updated() == {}
    always = parse((IN_PLACE[0], IN_PLACE[1].replace(", when: {act: relu}", "")), SAME_FACE)
    assert always.updated() == {"D": "y"}
    assert parse().updated({"act": "relu"}) == {}


def test_a_baseline_is_found() -> None:
    assert not parse().has_baseline
    assert parse(("def reference", "def baseline(A):\n    pass\n\n\ndef reference")).has_baseline


def test_bindings_and_variants() -> None:
    spec = parse()
    assert spec.bindings()[0] == {"per": "column", "act": "none"} == spec.bind()
    assert [spec.variant(binding) for binding in spec.bindings()] == [
        "scaled__column__none",
        "scaled__column__relu",
        "scaled__row__none",
        "scaled__row__relu",
    ]
    assert spec.variant({"act": "relu"}) == "scaled__column__relu"
    plain = load_spec(SPECS / "gemm_swiglu.md")
    assert plain.bindings() == [{}] and plain.variant() == "gemm_swiglu"


def test_digest_ignores_line_ends_only() -> None:
    unix, dos = parse(), load_spec("other.md", text=GOOD.replace("\n", "\r\n"))
    assert unix.digest == dos.digest and unix.digest.startswith("sha256:")
    assert unix.digest != parse(("A last", "The last")).digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "B: {shape: [N, K], dtype: T",
            "B: {shape: [N, K], dtype: int32",
            "gemm: A is bfloat16 and B int32; expected one type for both, of bfloat16, float16, float8",
        ),
        ("B: {shape: [N, K], dtype: T", "B: {shape: [N, K], dtype: bfloat16", "A is float16 and B bf"),
        ("[bfloat16, float16]", "[bfloat16, float32]", "gemm: A is float32 and B float32; expected one"),
        (
            "types: {T: [bfloat16, float16]}",
            "types: {T: [bfloat16, float16], S: [float32]}",
            "types: S is not the type of A, by which a kernel chooses all others; expected a concrete",
        ),
        ("[M, N/2], dtype: T", "[M, N/2], dtype: int64", "D: outputs are floating-point, not int64; exp"),
        ("[M, N/2], dtype: T", "[M], dtype: float8_e4m3fn", "D: reductions are stored in float32, not float8_e4m3fn"),
        ("[M, N/2], dtype: T", "[N], dtype: float8_e4m3fn", "D: reductions are stored in float32, not float8_e4m3fn"),
        ("---\nname", "name", "no front matter; expected YAML between two `---` lines"),
        ("gemm: [A, B]", "gemm: [A, B", "line 1"),
        ("gemm: [A, B]", "gemm: [A, B]\ngemm: [B, A]", "line 2: front matter is not YAML: key"),
        ("---\nname: scaled", "---\n- a\n---\nname: x", "front matter is a list; expected keys"),
        ("target: 0.97", "target: 0.97\nowner: me", "unknown key 'owner'; expected name, level"),
        ("N: {multiple_of: 16}", "N: {multiple: 16}", "unknown key 'dims.N.multiple'; expected multiple_of, only"),
        ("gemm: [A, B]\n", "", "missing key 'gemm'; expected gemm: [A, B]"),
        ("level: compose", "level: hard", "line 3: level: expected one of 'compose', 'repar"),
        ("target: 0.97", "target: -1", "target: expected a number greater than 0, got -1"),
        ("tolerance: {multiple: 2.0}", "tolerance: 2", "tolerance: expected keys and values"),
        ("N: {multiple_of: 16}", "N: {multiple_of: 0}", "expected a number of at least 1, got 0"),
        ("N: {multiple_of: 16}", "N: {multiple_of: x}", "N.multiple_of: expected a whole number"),
        ("  - {M: 3, N: 16", "  - {M: a, N: 16", "line 23: check_shapes.0.M: expected a whole"),
        ("inputs:\n", "inputs:\n  1: [M]\n", "line 15: inputs.1: expected text, got 1"),
        ("{T: [bfloat16, float16]}", "{T: bfloat16}", "types.T: expected a list, got bfloat16"),
        ("name: scaled", "name: scaled-gemm", "name 'scaled-gemm' must be a Python identifier"),
        ("[none, relu]", "[a__b, relu]", "name 'a__b' must be a Python identifier"),
        ("[none, relu]", "[é, relu]", "name 'é' must be a Python identifier of ASCII letters"),
        ("inputs:\n", "inputs:\n  self: [M]\n", "name 'self' is one that a kernel's own call has"),
        ("inputs:\n", "inputs:\n  block_size: [M]\n", "name 'block_size' is one that a kernel's"),
        ("[none, relu]", "[relu, relu]", "'act' lists [relu, relu]; expected"),
        ("[bfloat16, float16]", "[bfloat16, half]", "type T: unknown dtype 'half'; expected one"),
        ("[M, K], dtype: T", "[M, K], dtype: S", "A: unknown dtype 'S'; expected one of T, bfloat"),
        ("[M, 3]", "[M, Q]", "y: dim 'Q' is not declared; expected one of M, N, K"),
        ("[M, N/2]", "[M, Z/2]", "D: dim 'Z' is not declared"),
        (*IN_PLACE, "in_place: D and y are not an output and an input of one shape and dtype; expected"),
        ("gemm: [A, B]\n", "gemm: [A, B]\nin_place: {output: D}\n", "missing key 'in_place.input'; expected input: NAME"),
        ("[M, N/2]", "[M, N*2]", "outputs.D.shape: expected a list of dims, DIM/INT, INT*DIM"),
        ("[M, N/2]", "[M, N/3]", "D: N/3 needs dim N to be declared multiple_of: 3"),
        ("[M, 3]", "[M, 0]", "inputs.y.shape: expected a list of dims"),
        ("parameter: per, ", "", "inputs.v.shape: a shape by cases needs `parameter: NAME`"),
        ("row: [M]", "line: [M]", "v: shape cases column, line are not the values of 'per'"),
        ("gemm: [A, B]", "gemm: [A, W]", "gemm: 'W' is not an input; expected two of A, B, v, x"),
        ("gemm: [A, B]", "gemm: [A, v]", "gemm: shapes A [M, K] and v []; expected [M, K]"),
        ("B: {shape: [N, K]", "B: {shape: [K, N]", "y: shape [M, 3] is not over rows [M], over"),
        ("gemm: [A, B]", "gemm: [A]", "line 10: gemm: expected two inputs, each of which may be"),
        ("  D: {", "  A: {", "name 'A' is declared twice among inputs, outputs and parameters; rename one"),
        ("  - {M: 3, N: 16", "  - {M: 3, N: 17", "N=17; expected a positive multiple of 16"),
        ("  - {M: 3, N: 16", "  - {M: 0, N: 16", "M=0; expected a positive multiple of 1"),
        ("  - {M: 3, N: 16", "  - {M: 3", "sizes are given for M, K; expected M, N, K"),
        ("K: 4096}", "K: 4097}", "K=4097; expected a positive multiple of 8"),
        ("{constant: 2}", "{gamma: 2}", "inputs.x.draw: expected `normal`"),
        ("{uniform: [0, 1]}", "{uniform: [1, 1]}", "inputs.v.draw: expected LO < HI"),
        ("K**-0.5", "-K", "inputs.B.draw: expected a positive std"),
        ("K**-0.5", "Q**2", "'Q**2' has no value (Q is not allowed); expected numbers, dims"),
        ("```python reference", "```python", "one closed ```python reference block, found 0"),
        ("A last", "```python reference\n```\nA last", "reference block, found 2"),
        ("def reference(A", "def reference((A", "line {line}: reference has a syntax error"),
        ("def reference", "def other", "defines reference 0 times; expected `def reference(A,"),
        ("reference(A, B", "reference(B, A", "takes (B, A, v, x, y, per, act); expected (A, B, v"),
        ("per, act):", "per):", "reference takes (A, B, v, x, y, per); expected (A, B, v, x, y"),
        ("per, act):", "per, /, act):", "reference takes (A, B, v, x, y, per, /, act)"),
    ],
)  # fmt: skip
def test_bad_specs(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse((old, new))
    said = str(caught.value)
    line = GOOD[: GOOD.index("def reference")].count("\n") + 1
    assert said.startswith("here/scaled.md: ") and message.replace("{line}", str(line)) in said
    assert "\n" not in said and not re.search(r"Input should|\['|pydantic|=\[", said)


def test_a_vector_gathered_by_an_index_may_have_16_bits() -> None:
    spec = parse(("[M, N/2], dtype: T", "[M], dtype: T"), ("y: {shape: [M, 3]", "y: {shape: [M]"))
    assert spec.symbolic_shape("D") == ("M",)


# A row of 16 bytes or a multiple: of A and B in K; of each output in N, where half width counts.
@pytest.mark.parametrize(
    ("element", "shape", "dtype", "steps"),
    [
        ("bfloat16", "[M, N]", "bfloat16", (8, 8)),
        ("float16", "[M, N/2]", "float16", (16, 8)),
        ("float8_e4m3fn", "[M, N]", "bfloat16", (8, 16)),
        ("float8_e4m3fn", "[M, N]", "float8_e4m3fn", (16, 16)),
        ("bfloat16", "[M, N/2]", "float8_e4m3fn", (32, 8)),
    ],
)
def test_shapes_that_a_kernel_refuses(
    element: str, shape: str, dtype: str, steps: tuple[int, int]
) -> None:
    edits = [
        ("[bfloat16, float16]", f"[{element}]"),
        ("[M, N/2], dtype: T", f"{shape}, dtype: {dtype}"),
        ("N: {multiple_of: 16}", "N: {multiple_of: 2}"),
        ("K: {multiple_of: 8}", "K: {}"),
    ]
    n, k = steps
    spec = parse(*edits, ("{M: 3, N: 16, K: 8}", f"{{M: 3, N: {3 * n}, K: {5 * k}}}"))
    assert spec.steps() == steps
    for name, step, sizes in (("N", n, (3 * n + n // 2, k)), ("K", k, (n, k + k // 2))):
        for old in ("{M: 3, N: 16, K: 8}", "{M: 4096, N: 4096, K: 4096}"):
            shapes = [(old, "{{M: 3, N: {}, K: {}}}".format(*sizes))]
            if "4096" in old:
                shapes.append(("{M: 3, N: 16, K: 8}", f"{{M: 3, N: {n}, K: {k}}}"))
            with pytest.raises(SpecError) as caught:
                parse(*edits, *shapes)
            said = f"takes multiples of {step}, since TMA moves rows in units of 16 bytes"
            assert said in str(caught.value) and f"declare {name}: {{multiple_of: {step}}}" in str(
                caught.value
            )


def test_annotated_reference_is_accepted() -> None:
    assert parse(("reference(A, B", "reference(A: torch.Tensor, B")).name == "scaled"


@pytest.mark.parametrize("more", ["act, eps=1e-6):", "act='none'):", "*, act, eps=1e-6):"])
def test_what_has_a_default_need_not_be_declared(more: str) -> None:
    assert parse(("act):", more)).name == "scaled"


SHORTEST = """\
---
name: ffn
gemm: [x, w]
inputs: {x: [M, K], w: [N, K], i: {shape: [M], dtype: int32}}
outputs: {y: [M, N/2]}
---
```python reference
import torch

def reference(x, w, i, eps=1e-6):
    return torch.relu(x @ w.T)[:, ::2] + eps
```
"""


def test_what_a_short_spec_leaves_out() -> None:
    assert len(SHORTEST.splitlines()) == 12
    spec = load_spec("ffn.md", text=SHORTEST)
    assert (spec.level, spec.target, spec.tolerance.multiple) == ("compose", 0.97, 2.0)
    assert spec.summary == "torch.relu(x @ w.T)[:, ::2] + eps"
    assert spec.types == {"T": ("bfloat16", "float16")} and spec.inputs["x"].dtype == "T"
    assert {name: dim.multiple_of for name, dim in spec.dims.items()} == {"M": 1, "N": 16, "K": 8}
    draws = ("normal", (1.0,)), ("normal", ("K**-0.5",)), ("integers", (0, "N"))
    assert tuple(spec.inputs[name].draw for name in "xwi") == draws
    assert spec.check_shapes[:2] == ({"M": 1, "N": 16, "K": 8}, {"M": 77, "N": 272, "K": 64})
    assert spec.bench_shapes[0] == {"M": 4096, "N": 4096, "K": 4096}
    odd = SHORTEST.replace("name: ffn", "name: ffn\ntypes: {T: [float8_e4m3fn]}")
    odd = odd.replace("N/2]", "N/3]").replace("def ref", '@torch.no_grad()\ndef ref').replace(
        "    return", '    """A third.\n\n    Of it."""\n    return'
    )  # fmt: skip
    spec = load_spec("ffn.md", text=odd)
    assert {name: dim.multiple_of for name, dim in spec.dims.items()} == {"M": 1, "N": 48, "K": 16}
    assert spec.check_shapes[1] == {"M": 77, "N": 288, "K": 64} and spec.summary == "A third."
    assert spec.inputs["w"].draw == ("normal", (1.0,))


def test_heads_are_as_many_less() -> None:
    """N = 64 H is as large as any N; it was 64 times that, and took 11 GB to judge."""
    heads = SHORTEST.replace("w: [N, K]", "w: [64*H, K]").replace("[M, N/2]", "[M, H, 64]")
    spec = load_spec("ffn.md", text=heads)
    assert [sizes["H"] for sizes in spec.declared.check_shapes] == [1, 4, 5, 8]
    assert [sizes["H"] for sizes in spec.declared.bench_shapes] == [64, 128]
    assert spec.declared.dims["H"].multiple_of == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("gemm: [x, w]", "gemm: [x, v]"), "gemm: 'v' is not an input; expected two of x, w, i"),
        (("w: [N, K]", "w: [N, Q]"), "gemm: shapes x [M, K] and w [N, Q] share no dim"),
        (("y: [M, N/2]", "y: M"), "line 5: outputs.y: expected keys and values, got M"),
        (("def reference", "def other"), "block defines reference 0 times"),
        (("def reference", "def"), "line 10: reference has a syntax error"),
    ],
)
def test_a_bad_short_spec(edit: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("ffn.md", text=SHORTEST.replace(*edit))
    assert message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"absent\.md cannot be read as text: No such file.*a spec in Markdown"
    ):
        load_spec(tmp_path / "absent.md")
    (tmp_path / "binary.md").write_bytes(b"---\n\xff\n---\n")
    with pytest.raises(
        SpecError, match=r"binary\.md cannot be read as text: 'utf-8.*' codec can't decode"
    ):
        load_spec(tmp_path / "binary.md")
    with pytest.raises(SpecError, match="Is a directory"):
        load_spec(tmp_path)


def test_methods_refuse_what_the_spec_does_not_declare() -> None:
    spec, sizes = parse(), {"M": 3, "N": 16, "K": 8}
    with pytest.raises(SpecError, match="no tensor 'Z'; expected one of A, B, v, x, y, D"):
        spec.shape_of("Z", sizes)
    with pytest.raises(SpecError, match="no act=tanh; expected per: column, row; act: none, relu"):
        spec.variant({"act": "tanh"})
    with pytest.raises(SpecError, match="type T is float32; expected bfloat16, float16"):
        spec.dtype_of("A", {"T": "float32"})
    with pytest.raises(SpecError, match="type T is None"):
        spec.dtype_of("A", {})
    with pytest.raises(SpecError, match="sizes are given for M, N, K, L; expected M, N, K"):
        spec.check_sizes({**sizes, "L": 1})
    with pytest.raises(SpecError, match="K=-8; expected a positive multiple of 8"):
        spec.check_sizes({**sizes, "K": -8})


@pytest.mark.parametrize(
    ("expression", "value"),
    [(0.5, 0.5), ("1e-3", 1e-3), ("K**-0.5", 0.25), ("-(K + 2*N) / 4", -6.0), ("N - K", -12.0)],
)
def test_expressions(expression: float | str, value: float) -> None:
    assert evaluate(expression, {"K": 16, "N": 4}) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "K.real", "K if K else 1", "9**9**9**9", "(-1)**0.5", "1/0", "1e999", "",
     "(" * 200, "1 +" * 60 + "1", "'a'"],
)  # fmt: skip
def test_expressions_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="has no value"):
        evaluate(expression, {"K": 16})


def test_import_and_load_stay_free_of_torch() -> None:
    code = (
        "import sys, coda_agent.specs as s;"
        f"s.load_spec({str(SPECS / 'gemm_rmsnorm.md')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
