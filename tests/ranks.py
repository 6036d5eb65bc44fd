"""Two processes with a process group: of gloo's on a CPU, or of NCCL's on two GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing


def on_two_ranks(function: Callable[..., None], *args: Any, device: str = "cpu") -> None:
    """Run `function(mesh, *args)` on both, where new tensors are on `device`; it is found by its
    name in its module."""
    root = str(Path(__file__).parents[1])  # pytest keeps it off the path, where a process looks
    with tempfile.TemporaryDirectory() as folder, patch.object(sys, "path", [*sys.path, root]):
        torch.multiprocessing.spawn(_rank, (folder, device, function, args), nprocs=2)  # pyright: ignore


def _rank(
    rank: int, folder: str, device: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    store = f"file://{folder}/store"
    torch.distributed.init_process_group(backend, store, rank=rank, world_size=2)
    try:
        function(init_device_mesh(device, (2,)), *args)
        torch.distributed.barrier()  # who leaves first closes what the other one may still read
    finally:
        torch.distributed.destroy_process_group()
    # An interpreter that ends while threads of torch's run was seen to abort on a busy machine:
    # "terminate called without an active exception".
    os._exit(0)
