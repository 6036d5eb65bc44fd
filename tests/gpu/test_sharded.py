"""Two GPUs and NCCL: patched models under FSDP2, and kernels of DTensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.layers import test_sharded as models
from tests.ranks import on_two_ranks
from tests.runtime import test_sharded as kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("held", [models.near, models.late, models.in_fp8, models.head])
def test_patched_models(held: Callable[[Any], None]) -> None:
    on_two_ranks(held, device="cuda")


def test_state_dicts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(models.states, folder, device="cuda")


def test_kernels_of_dtensors() -> None:
    on_two_ranks(kernels.rows_and_columns, device="cuda")
