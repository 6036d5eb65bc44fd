"""Accepted kernels as functions: arguments, variants, tuned tiles, and numbers against PyTorch."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.agent.judge.compare import same
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import dispatch_tables as tables
from coda_agent.runtime import function as function_module
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import draw_inputs

SPECS = Path(__file__).parents[2] / "specs"
RESIDUAL = """
from coda_agent.primitives import RowMean, RowVector, Tile, epilogue

@epilogue(D=Tile, O=Tile, s=RowMean)
def gemm_residual_partial_rmsnorm(acc, C: Tile, gamma: RowVector):
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}
"""
BIAS = "from coda_agent.primitives import ColVector, RowVector, Scalar, Tile, epilogue, gelu_tanh, relu, silu\n"
for _act in ("gelu_tanh", "relu", "silu"):
    for _per, _kind in (("column", "RowVector"), ("row", "ColVector")):
        BIAS += f"""
@epilogue(O=Tile)
def gemm_bias_act__{_act}__{_per}(acc, C: Tile, bias: {_kind}, alpha: Scalar, beta: Scalar):
    return {{"O": {_act}(alpha * acc + beta * C + bias)}}
"""


def make(folder: Path, name: str, program: str, tuned: dict | None = None) -> Kernel:
    target = folder / name
    target.mkdir(parents=True)
    (target / "kernel.py").write_text(program)
    (target / "spec.md").write_text((SPECS / f"{name}.md").read_text())
    if tuned is not None:
        (target / "tuned.json").write_text(json.dumps(tuned))
    return load_kernel(target)


@pytest.fixture
def operands() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    m, n, k = 37, 208, 64
    return {
        name: torch.randn(*shape, generator=g).bfloat16()
        for name, shape in {"A": (m, k), "B": (n, k), "C": (m, n), "gamma": (n,)}.items()
    }


def test_outputs_in_spec_order_and_final(tmp_path: Path, operands: dict[str, torch.Tensor]) -> None:
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    d, o, s = kernel(*operands.values())
    a, b, c, gamma = (t.double() for t in operands.values())
    exact = a @ b.T + c
    assert d.dtype == o.dtype == torch.bfloat16 and s.dtype == torch.float32
    torch.testing.assert_close(d.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(o.double(), exact * gamma, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(s.double(), exact.square().mean(-1), rtol=1e-5, atol=0)


def test_raw_partials_of_a_block_size(tmp_path: Path, operands: dict[str, torch.Tensor]) -> None:
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    a, b, c, _ = (t.double() for t in operands.values())
    exact = (a @ b.T + c).square()
    for block in (128, 192):
        _, _, partials = kernel(**operands, block_size=block)
        assert partials.shape == (37, 2)
        expected = torch.stack([exact[:, :block].sum(1), exact[:, block:].sum(1)], 1) / block
        torch.testing.assert_close(partials.double(), expected, rtol=1e-5, atol=0)
    with pytest.raises(LaunchError, match="no tile has block_size 100, expected one of 64"):
        kernel(**operands, block_size=100)


def test_static_parameters_choose_the_program(
    tmp_path: Path, operands: dict[str, torch.Tensor]
) -> None:
    kernel = make(tmp_path, "gemm_bias_act", BIAS)
    a, b, c = operands["A"], operands["B"], operands["C"]
    row = torch.randn(37, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = kernel(a, b, c, row, 0.5, 2.0, activation="relu", bias_per="row")
    exact = (0.5 * (a.double() @ b.double().T) + 2 * c.double() + row.double()[:, None]).relu()
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    with pytest.raises(LaunchError, match="activation is 'mish', expected one of gelu_tanh"):
        kernel(a, b, c, row, 0.5, 2.0, activation="mish")
    with pytest.raises(LaunchError, match=r"operand 'bias' has shape \(37,\), expected \(208,\)"):
        kernel(a, b, c, row, 0.5, 2.0)


def test_wrong_arguments_are_named(tmp_path: Path, operands: dict[str, torch.Tensor]) -> None:
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    values = list(operands.values())
    with pytest.raises(TypeError, match="input 'gamma' is missing"):
        kernel(*values[:3])
    with pytest.raises(LaunchError, match="takes 4 inputs, got 5"):
        kernel(*values, 1)
    with pytest.raises(TypeError, match="unexpected or repeated argument 'A'"):
        kernel(*values, A=1)
    with pytest.raises(LaunchError, match="unexpected or repeated argument 'weight'"):
        kernel(*values, weight=1)


def test_a_measured_shape_gives_the_tile_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = TileConfig(128, 256, 2, 1), TileConfig(128, 192, 2, 1, True)
    entries = [
        {
            "m": s, "n": s, "k": s, "median_us": 1.0,
            "config": c.to_dict(), "blocks": {str(c.tile_n): c.to_dict()},
        }
        for s, c in ((4096, small), (8192, large))
    ]  # fmt: skip
    shapes = [(m, n, k) for m in (16, 4000, 16384) for n in (4096, 8192) for k in (2048, 8192)]
    chosen = []
    for tuned in ({}, {"some GPU": {"bfloat16": entries}}):
        kernel = make(tmp_path / str(len(tuned)), "gemm_residual_partial_rmsnorm", RESIDUAL, tuned)
        monkeypatch.setattr("coda_agent.runtime.tile_choice._gpu_name", lambda: "some GPU")
        chosen.append([kernel.tiles.choose(*shape, "bfloat16") for shape in shapes])
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 2
    assert kernel.tiles.choose(4096, 4096, 4096, "bfloat16") == small
    assert kernel.tiles.choose(8192, 8192, 8192, "bfloat16") == large
    assert kernel.tiles.choose(8192, 8192, 8192, "bfloat16", 192) == large
    other = kernel.tiles.choose(4096, 4096, 4096, "bfloat16", 128)
    assert other is not None and other.tile_n == 128
    assert kernel.tiles.choose(4096, 4096, 4096, "bfloat16", 100) is None
    monkeypatch.setattr("coda_agent.runtime.tile_choice._gpu_name", lambda: "")
    assert kernel.tiles.choose(4096, 4096, 4096, "float16") is None


def test_a_refused_tile_is_never_dispatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the model, nor as a measured one in another rasterisation order."""
    monkeypatch.setattr("coda_agent.runtime.tile_choice._gpu_name", lambda: "some GPU")
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    best = kernel.tiles.choose(4096, 4096, 4096, "bfloat16")
    assert best is not None
    line = {"m": 64, "n": 64, "k": 64, "config": replace(best, swizzle=2).to_dict()}
    kernel.tiles.tuned = {"some GPU": {"bfloat16": [line]}}
    assert kernel.tiles.choose(64, 64, 64, "bfloat16") == replace(best, swizzle=2)
    kernel.tiles.refused = frozenset({best.label})
    for shape in ((4096, 4096, 4096), (64, 64, 64)):
        assert kernel.tiles.choose(*shape, "bfloat16") not in (None, best, replace(best, swizzle=2))


def test_a_tile_that_spills_by_the_evidence_is_not_the_priors_pick(tmp_path: Path) -> None:
    about = (8192, 4096, 4096), "bfloat16", "some GPU"
    plain = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    best = plain.tiles.ranked(*about)[0]
    evidence = {"compiled": {"spills": {best.label: 900}}}
    folder = tmp_path / "gemm_residual_partial_rmsnorm"
    (folder / "evidence.json").write_text(json.dumps(evidence))
    ranked = load_kernel(folder).tiles.ranked(*about)
    assert ranked[0] != best and best in ranked
    assert plain.tiles.ranked(*about)[0] == best


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="no accepted kernel named 'gemm_nothing'"):
        generated.gemm_nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="named 'gemm_swigl', did you mean gemm_swiglu"):
        from coda_agent.generated import gemm_swigl  # noqa: F401  # pyright: ignore
    assert not hasattr(generated, "gemm_swigl")


def test_a_star_imports_every_kernel() -> None:
    scope: dict[str, object] = {}
    exec("from coda_agent.generated import *", scope)
    assert {*dir(generated)} == {*scope} - {"__builtins__"} and len(scope) == 20


def test_a_kernel_pickles_by_its_name_or_its_folder(tmp_path: Path) -> None:
    kernel = generated.gemm_rmsnorm_rope
    assert pickle.dumps(kernel).count(b"gemm_rmsnorm_rope") == 1
    less = kernel.without("D")
    own = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    kernels = kernel, less, own, own.without("s"), own.without("s").without("D")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert all(pickle.loads(pickle.dumps(x, protocol)) is x for x in kernels)
    # As a worker of another process has it, which knows none of them.
    code = "import pickle, sys; print(*pickle.load(sys.stdin.buffer), sep='\\n')"
    command, given = [sys.executable, "-c", code], pickle.dumps(kernels)
    done = subprocess.run(command, input=given, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "<kernel gemm_rmsnorm_rope>",
        "<kernel gemm_rmsnorm_rope.without('D')>",
        "<kernel gemm_residual_partial_rmsnorm>",
        "<kernel gemm_residual_partial_rmsnorm.without('s')>",
        "<kernel gemm_residual_partial_rmsnorm.without('s', 'D')>",
    ]
    made = Kernel(own.spec, own.programs, "made_here")
    for x in (*kernels, made):
        assert copy.copy(x) is x and copy.deepcopy([x])[0] is x
    with pytest.raises(TypeError, match="partial_rmsnorm> cannot be pickled: it was made here"):
        pickle.dumps(made)


NOT_DENSE = {
    "torch.sparse_coo": lambda t: t.float().to_sparse().to(t.dtype),
    "torch.sparse_csr": lambda t: t.to_sparse_csr(),
    "torch._mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested")
def test_a_tensor_that_is_not_dense_is_refused(kind: str) -> None:
    a, b = torch.ones(8, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    other = NOT_DENSE[kind]
    for name, given in (("A", (other(a), b)), ("B", (a, other(b)))):
        with pytest.raises(LaunchError, match=f"input '{name}' is {kind}, expected a dense"):
            generated.gemm_swiglu(*given)
    with pytest.raises(LaunchError, match=f"input 'B' is {kind}, expected a dense"):
        generated.gemm_swiglu(a.requires_grad_(), other(b))


@pytest.mark.parametrize("index", [128, -1, -100])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_target_that_is_no_column_is_refused(index: int, differentiated: bool) -> None:
    kernel = generated.gemm_partial_cross_entropy
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(x, 64, generator=g).bfloat16() for x in (9, 128))
    y = torch.arange(9, dtype=torch.int32) * 15
    a.requires_grad_(differentiated)
    with pytest.raises(LaunchError, match=f"'y' holds {index}, expected columns from 0 to 127"):
        kernel(a, b, y.index_fill(0, torch.tensor(4), index))
    target = kernel(a, b, y.index_fill(0, torch.tensor(4), 127))[1]
    expected = (a.double() @ b.double().T)[range(9), [0, 15, 30, 45, 127, 75, 90, 105, 120]]
    torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-5)
    assert "y: (M,) int64, from 0 to N - 1: a CPU refuses another" in str(kernel.__doc__)


def test_help_says_what_a_kernel_computes_and_takes() -> None:
    text = str(generated.gemm_swiglu.__doc__)
    assert (
        "    O[m, j] = silu(G[m, j]) · U[m, j]," in text
        and "`B` interleave the two weights" in text
    )
    assert "Why fused" not in text and "PyTorch rounds" not in text
    assert text.endswith(
        "Sizes:\n    N: a multiple of 16\n    K: a multiple of 8\n\n"
        "Gradients:\n    by autograd, once; none of FP8 tensors, maxima and what is overwritten\n\n"
        "Also:\n    gemm_swiglu.without('D'): a kernel that neither computes nor stores it\n\n"
        "Example:\n    D, O = gemm_swiglu(A, B)"
    )
    assert "block_size=128: " in (generated.gemm_rmsnorm_partial_cross_entropy.__doc__ or "")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, coda_agent.generated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_warning_names_the_line_that_called_the_kernel(
    tmp_path: Path, operands: dict[str, Any]
) -> None:
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    function_module._say_interpreted.cache_clear()
    with pytest.warns(UserWarning, match="no Hopper GPU behind tensors on cpu") as caught:
        kernel(**operands)
    assert [w.filename for w in caught] == [__file__]


# Operators. `opcheck` compares the schema, the fake kernel and a traced run with a real one.


def given(kernel: Kernel, binding: dict[str, str] | None = None) -> list[Any]:
    """The kernel's inputs, drawn as its spec says, at the second check shape: a ragged one."""
    spec = kernel.spec
    sizes, types = spec.check_shapes[1], spec.default_types()
    return list(draw_inputs(spec, sizes, types, seed=9, binding=binding).values())


def compiled(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


def assert_same(got: Any, want: Any) -> None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert same(x, y) and x.dtype == y.dtype
        assert x.stride() == y.stride()


OPCHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("name", dir(generated))
@pytest.mark.one_in(3)
def test_operators_of_a_public_kernel(name: str) -> None:
    kernel = getattr(generated, name)
    firsts = {op: key for key, op in reversed(kernel.ops.items())}
    for op, key in firsts.items():
        values = tuple(given(kernel, dict(zip(kernel.spec.parameters, key, strict=True))))
        for keywords in ({}, {"block_size": 128}):
            # torch's own schema test multiplies what it is given, which 8-bit floats cannot.
            narrow = any(v.dtype is torch.float8_e4m3fn for v in values if hasattr(v, "dtype"))
            tests = ("test_faketensor", "test_autograd_registration") if narrow else OPCHECK
            torch.library.opcheck(op.default, values, keywords, test_utils=tests)
        assert str(op).removesuffix("_") == f"coda_agent.{name}"
    assert_same(compiled(kernel)(*given(kernel)), kernel(*given(kernel)))


def test_schema_follows_the_spec() -> None:
    assert str(generated.gemm_bias_act.ops["gelu_tanh", "column"].default._schema) == (
        "coda_agent::gemm_bias_act(Tensor A, Tensor B, Tensor C, Tensor bias, float alpha, float beta, *, "
        'str activation="gelu_tanh", str bias_per="column", int? block_size=None) -> Tensor'
    )
    with pytest.raises(LaunchError, match="gemm_bias_act has no variant mish, column"):
        torch.ops.coda_agent.gemm_bias_act(*given(generated.gemm_bias_act), activation="mish")


@pytest.mark.parametrize("block", [None, 192], ids=str)
def test_compiled_with_dynamic_shapes_and_leading_dimensions(block: int | None) -> None:
    kernel = generated.gemm_residual_partial_rmsnorm

    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gamma: torch.Tensor) -> Any:
        return kernel(a * 2, b, gamma=gamma, C=c, block_size=block)

    f = compiled(run, dynamic=True)
    for lead in ((3, 8), (5, 9), (2, 4)):
        g = torch.Generator().manual_seed(lead[0])
        a, c = (torch.randn(*lead, x, generator=g).bfloat16() for x in (64, 208))
        b, gamma = (torch.randn(*x, generator=g).bfloat16() for x in ((208, 64), (208,)))
        with torch.compiler.set_stance("fail_on_recompile" if lead[0] == 2 else "default"):
            got = f(a, b, c, gamma)
        assert got[2].shape == (lead if block is None else (*lead, 2))
        assert_same(got, run(a, b, c, gamma))


def test_compiled_on_a_number_of_rows_known_at_run_time_only() -> None:
    a, b, r = given(generated.gemm_rmsnorm_swiglu)

    def run(mask: torch.Tensor) -> Any:
        rows = mask.nonzero()[:, 0]
        return generated.gemm_rmsnorm_swiglu(a[rows], b, r[rows])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(run)
        for mask in (torch.arange(len(a)) % 3 == 0, torch.zeros(len(a), dtype=torch.bool)):
            assert_same(f(mask), run(mask))


def test_no_rows() -> None:
    kernel = generated.gemm_residual_partial_rmsnorm
    a, b, c, gamma = given(kernel)
    d, o, s = kernel(a[:0], b, c[:0], gamma)
    assert d.shape == o.shape == c[:0].shape and s.shape == (0,)


def test_tensors_for_scalars() -> None:
    kernel = generated.gemm_bias_act
    *others, _, _ = given(kernel)
    want = kernel(*others, alpha=0.5, beta=2.0)
    for alpha, beta in ((torch.tensor(0.5), torch.tensor([2.0])), (torch.tensor(0.5), 2.0)):
        assert_same(kernel(*others, alpha=alpha, beta=beta), want)
        assert_same(compiled(kernel)(*others, alpha, beta), want)
    op = torch.ops.coda_agent.gemm_bias_act.Tensor
    torch.library.opcheck(
        op, (*others, torch.tensor(0.5), torch.tensor(2.0)), {"activation": "relu"}
    )
    with pytest.raises(LaunchError, match="input 'alpha' is str, expected a number or tensor"):
        kernel(*others, alpha="1", beta=2.0)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="input 'A' is float, expected a tensor"):
        kernel(1.0, *others[1:], alpha=1.0, beta=2.0)  # type: ignore[arg-type]


IN_PLACE = """
---
name: gemm_accumulate
level: compose
summary: A product added to what is there.
types: {T: [bfloat16, float16]}
dims: {M: {}, N: {multiple_of: 8}, K: {multiple_of: 8}}
gemm: [A, B]
parameters: {update: [in_place, out_of_place]}
inputs:
  A: {shape: [M, K], dtype: T}
  B: {shape: [N, K], dtype: T}
  X: {shape: [M, N], dtype: T}
  alpha: {shape: [], dtype: float32}
outputs:
  s: {shape: [M], dtype: float32}
  O: {shape: [M, N], dtype: T}
in_place: {output: O, input: X, when: {update: in_place}}
check_shapes: [{M: 8, N: 8, K: 8}]
bench_shapes: [{M: 8, N: 8, K: 8}]
tolerance: {multiple: 2.0}
target: 0.9
---
```python reference
def reference(A, B, X, alpha, update):
    D = (A @ B.T).float()
    return {"s": D.sum(-1), "O": (X + alpha * D).to(X.dtype)}
```
""".lstrip()
IMPORTS = "from coda_agent.primitives import AddTile, RowSum, Scalar, Tile, epilogue\n"
ADDS = READS = IMPORTS
for _update in ("in_place", "out_of_place"):
    ADDS += f"""
@epilogue(s=RowSum, O=AddTile)
def gemm_accumulate__{_update}(acc, alpha: Scalar):
    return {{"s": acc, "O": alpha * acc}}
"""
    READS += f"""
@epilogue(s=RowSum, O=Tile)
def gemm_accumulate__{_update}(acc, X: Tile, alpha: Scalar):
    return {{"s": acc, "O": X + alpha * acc}}
"""


@pytest.mark.parametrize("program", [ADDS, READS], ids=["adds", "reads"])
def test_an_output_that_overwrites_an_input(
    tmp_path: Path, program: str, operands: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "spec.md").write_text(IN_PLACE)
    (tmp_path / "kernel.py").write_text(program)
    kernel = load_kernel(tmp_path)
    a, b, c = (operands[x] for x in "ABC")
    product = a.float() @ b.float().T
    want = (c.double() + 0.5 * product.double()).bfloat16()

    x = c.clone()
    s, o = kernel(a, b, x, 0.5, update="out_of_place")
    assert torch.equal(x, c)
    torch.testing.assert_close(o, want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(s, product.sum(-1), rtol=1e-5, atol=1e-4)
    for run in (kernel, compiled(lambda *args: kernel(*args))):
        for alpha in (0.5, torch.tensor(0.5)):
            x = c.clone()
            s, found = run(a, b, x, alpha)
            assert torch.equal(x, o) and torch.equal(found, o)
            torch.testing.assert_close(s, product.sum(-1), rtol=1e-5, atol=1e-4)
    x = c.clone()
    before = x._version
    assert kernel(a, b, x, 0.5)[1] is x
    assert x._version > before  # or a backward pass would take what was overwritten

    out, inside = kernel.ops["out_of_place",], kernel.ops["in_place",]
    assert str(inside) == f"{out}_"
    assert "Tensor(a!) X" in str(inside.default._schema)
    for op in (out, inside):
        torch.library.opcheck(op.default, (a, b, c.clone(), 0.5))
    with pytest.raises(LaunchError, match="has no variant in_place"):
        out(a, b, c, 0.5, update="in_place")


class Odd(torch.Tensor):
    """A subclass of a tensor."""


def test_only_plain_tensors_pass_by_the_dispatcher(
    tmp_path: Path, operands: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL)
    a, b, c, gamma = operands.values()
    want = kernel(a, b, c, gamma)
    seen: list[str] = []
    op = kernel.ops[()]

    class Watched:
        def default(self, *args: Any, **keywords: Any) -> Any:
            seen.append(type(args[0]).__name__)
            return op.default(*args, **keywords)

    monkeypatch.setitem(kernel.ops, (), Watched())
    assert_same(kernel(a, torch.nn.Parameter(b, requires_grad=False), c, gamma=gamma), want)
    with torch.no_grad():
        assert_same(kernel(a, torch.nn.Parameter(b), c, gamma), want)
    assert seen == []
    assert all(x.requires_grad for x in kernel(a, torch.nn.Parameter(b), c, gamma))
    seen.clear()
    assert_same(kernel(a.as_subclass(Odd), b, c, gamma), want)
    fake = kernel(*(t.to("meta") for t in (a, b, c, gamma)))
    assert [t.device.type for t in fake] == ["meta"] * 3
    with torch._subclasses.FakeTensorMode() as mode:
        found = kernel(*(mode.from_tensor(t) for t in (a, b, c, gamma)))
    assert [t.shape for t in found] == [t.shape for t in want]
    # Reads as gamma, and holds its negative.
    minus = torch._neg_view(-gamma)  # pyright: ignore[reportPrivateImportUsage]
    assert_same(kernel(a, b, c, minus), want)
    assert seen == ["Odd", "FakeTensor", "Tensor"]


def test_the_table_that_comes_with_the_package() -> None:
    """Of the programs as they are, and near the fastest where it was not fitted."""
    table = tables.read(tables.PACKAGED, "NVIDIA H200")
    assert table is not None
    names = [path.parent.name for path in tables.PACKAGED.glob("*/kernel.py")]
    assert sorted(table.kernels) == sorted(names)
    for name, entry in table.kernels.items():
        kernel = getattr(generated, name)
        assert entry.program == next(iter(kernel.programs.values())).digest
        assert entry.regret.shapes >= 60 and entry.regret.mean <= 1.03
        chosen = {
            m: kernel.tiles.choose(m, 4096, 4096, entry.dtype, gpu="NVIDIA H200")
            for m in (16, 5000)
        }
        assert chosen[16] != chosen[5000] and {c.label for c in chosen.values()}.isdisjoint(
            kernel.tiles.refused
        )
