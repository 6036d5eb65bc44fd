"""Kernels read from folders: what is refused, and which of one name is which."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.primitives.errors import LaunchError, WorkspaceError
from coda_agent.runtime.loading import load_kernel
from tests.runtime.test_kernel import RESIDUAL, SPECS, make, operands

__all__ = ["operands"]


def test_a_folder_without_a_kernel(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"holds no kernel\.py"):
        load_kernel(tmp_path)


def test_kernels_of_one_name_do_not_mix(tmp_path: Path, operands: dict[str, Any]) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    public = generated.gemm_residual_partial_rmsnorm
    first = make(tmp_path / "a", "gemm_residual_partial_rmsnorm", RESIDUAL)
    other = make(
        tmp_path / "b", "gemm_residual_partial_rmsnorm", RESIDUAL.replace("acc + C", "acc - C")
    )
    again = make(tmp_path / "c", "gemm_residual_partial_rmsnorm", RESIDUAL)
    assert again is first and first is not other
    assert len({str(k.ops[()]) for k in (public, first, other)}) == 3
    d, negated = first(**operands)[0], other(**{**operands, "C": -operands["C"]})[0]
    assert torch.equal(d, negated) and torch.equal(d, public(**operands)[0])
    assert not torch.equal(d, other(**operands)[0])


def test_a_revoked_kernel_is_not_loaded_and_an_unjudged_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gemm_rope"
    shutil.copytree(SPECS.parent / "generated" / "gemm_rope", folder)
    evidence = folder / "evidence.json"
    evidence.write_text(evidence.read_text().replace('"level": "accepted"', '"level": "revoked"'))
    with pytest.raises(WorkspaceError, match="is revoked: the judge refuses this kernel"):
        load_kernel(folder)
    evidence.unlink()
    with pytest.warns(UserWarning, match=r"nobody judged .*gemm_rope"):
        load_kernel(folder)


SCALED = """---
name: scaled
types: {T: [bfloat16]}
dims: {M: {}, N: {multiple_of: 16}}
gemm: [x, w]
inputs:
  x: {shape: [M, 256], dtype: T, draw: normal}
  w: {shape: [N, 256], dtype: T, draw: {normal: {std: 0.06}}}
  g: {shape: [N], dtype: T, draw: normal}
outputs:
  y: {shape: [M, N], dtype: T}
---

```python reference
def reference(x, w, g):
    return (x @ w.T) * x.shape[1] ** -0.5 * g
```
"""


def test_a_size_that_the_reference_has_as_a_number_is_asked_at_the_call(tmp_path: Path) -> None:
    (tmp_path / "spec.md").write_text(SCALED)
    (tmp_path / "kernel.py").write_text(
        "from coda_agent.primitives import RowVector, Tile, epilogue\n\n\n@epilogue(y=Tile)\n"
        'def scaled(acc, g: RowVector):\n    return {"y": 0.0625 * acc * g}\n'
    )
    with pytest.warns(UserWarning, match="nobody judged"):
        kernel = load_kernel(tmp_path)
    x, w, g = (torch.randn(*shape).bfloat16() for shape in ((4, 256), (32, 256), (32,)))
    due = (x.double() @ w.double().T) / 16 * g.double()
    got = kernel(x, w, g)
    assert isinstance(got, torch.Tensor) and (got.double() - due).norm() < 5e-3 * due.norm()
    with pytest.raises(LaunchError, match=r"'x' is \(4, 128\) .* expected 256 as its dimension -1"):
        kernel(x[:, :128], w[:, :128], g)


@pytest.mark.parametrize("file", ["kernel.py", "spec.md"])
def test_what_the_judge_did_not_see_is_not_loaded(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "gemm_rope"
    shutil.copytree(SPECS.parent / "generated" / "gemm_rope", folder)
    assert load_kernel(folder).spec.name == "gemm_rope"
    with (folder / file).open("a") as text:
        text.write("\n# one more line\n")
    with pytest.raises(WorkspaceError, match=rf"{file} is not what its evidence was made for"):
        load_kernel(folder)


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("evidence.json", "", "not readable evidence: Invalid JSON"),
        ("evidence.json", "[" * 9999, "not readable evidence: Invalid JSON: recursion"),
        ("evidence.json", "[]", "not readable evidence: Input should be an object"),
        ("evidence.json", '{"refused_tiles": [{"tile": [1]}]}', r"evidence: refused_tiles\.0\.tile"),
        ("evidence.json", '{"compiled": {"spills": {"t": -1}}}', r"compiled\.spills\.t: Input"),
        ("tuned.json", "9" * 5000, "not hold measured tiles: Invalid JSON: number out"),
        ("tuned.json", '{"H": {"float16": [{}]}}', r"measured tiles: H\.float16\.0\.m: Field"),
        ("tuned.json", '{"H": 1}', "measured tiles: H: Input should be an object"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str, fault: str) -> None:
    folder = tmp_path / "gemm_rope"
    shutil.copytree(SPECS.parent / "generated" / "gemm_rope", folder)
    (folder / file).write_text(text)
    with pytest.raises(WorkspaceError, match=rf"^\S*{file} .*{fault}") as caught:
        load_kernel(folder)
    assert "git checkout -- " in caught.value.hint and "\n" not in str(caught.value)
