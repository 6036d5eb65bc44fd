"""Accepted kernels as functions: arguments, variants, tuned tiles, and numbers against PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coda_agent.generated.kernel import Kernel, load_kernel
from coda_agent.primitives.errors import LaunchError, WorkspaceError
from coda_agent.primitives.tiles import TileConfig

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
    target.mkdir()
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
    with pytest.raises(LaunchError, match="no tile has block_size 100, expected one of 128"):
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
    with pytest.raises(LaunchError, match="input 'gamma' is missing"):
        kernel(*values[:3])
    with pytest.raises(LaunchError, match="takes 4 inputs, got 5"):
        kernel(*values, 1)
    with pytest.raises(LaunchError, match="unexpected or repeated argument 'A'"):
        kernel(*values, A=1)
    with pytest.raises(LaunchError, match="unexpected or repeated argument 'weight'"):
        kernel(*values, weight=1)


def test_the_nearest_measured_shape_gives_the_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = TileConfig(128, 256, 2, 1), TileConfig(128, 192, 2, 1, True)
    entries = [
        {"m": s, "n": s, "k": s, "config": c.to_dict()} for s, c in ((4096, small), (8192, large))
    ]
    tuned = {"some GPU": {"bfloat16": entries}}
    kernel = make(tmp_path, "gemm_residual_partial_rmsnorm", RESIDUAL, tuned)
    monkeypatch.setattr("coda_agent.generated.kernel._gpu_name", lambda: "some GPU")
    assert kernel._choose(4000, 4096, 5000, "bfloat16") == small
    assert kernel._choose(16384, 8192, 4096, "bfloat16") == large
    assert kernel._choose(4096, 4096, 4096, "float16") == TileConfig(128, 128, 2, 1, True)
    monkeypatch.setattr("coda_agent.generated.kernel._gpu_name", lambda: "another GPU")
    assert kernel._choose(4096, 4096, 4096, "bfloat16") == TileConfig(128, 128, 2, 1, True)


def test_a_folder_without_a_kernel(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"holds no kernel\.py"):
        load_kernel(tmp_path)


def test_an_unknown_name_says_what_there_is() -> None:
    import coda_agent.generated as generated

    with pytest.raises(AttributeError, match="no accepted kernel named 'gemm_nothing'"):
        generated.gemm_nothing  # noqa: B018
