"""Tests of evals/functions.py: thirty functions by `fuse`, at reduced size, as right as PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.evals.functions import CASES, _shape
from tests.evals.small import measured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_function_takes_what_its_case_gives(case: Any) -> None:
    function, _, shapes, _ = case.make.args
    with torch.device("meta"):  # at their own sizes
        function(*(torch.empty(shape, dtype=torch.int64 if x == "target" else torch.bfloat16)
                   for x, shape in shapes.items()))  # fmt: skip


def test_shapes_are_read() -> None:
    assert _shape("S,3072") == (4, 1024, 3072) and _shape("M,H") == (4096, 128)
    assert _shape("5120") == (5120,) and _shape("B,16") == (4, 16)


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_is_as_right_as_pytorchs(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cells = {key[1]: cell for key, cell in measured(tmp_path, 64, case).items()}
    ratio = cells["ours"].error_ratio
    assert ratio is not None and ratio <= 1.1 and not cells["eager"].absent
    assert cells["ours"].note.startswith("widths of ")
