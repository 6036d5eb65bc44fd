"""Random inputs of realistic size for the demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def gemm(generator: torch.Generator, m: int, n: int, k: int) -> dict[str, torch.Tensor]:
    """A (M, K) and B (N, K) in bfloat16, such that A Bᵀ has unit variance."""
    return {"A": tile(generator, m, k), "B": tile(generator, n, k, scale=k**-0.5)}


def tile(
    generator: torch.Generator, rows: int, columns: int, *, scale: float = 1.0
) -> torch.Tensor:
    """A normal (rows, columns) matrix in bfloat16."""
    import torch

    return vector(generator, rows, columns, scale=scale).to(torch.bfloat16)


def vector(
    generator: torch.Generator, *shape: int, mean: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    """Normal float32 values."""
    import torch

    return mean + scale * torch.randn(*shape, generator=generator, device=generator.device)


def positive(generator: torch.Generator, length: int) -> torch.Tensor:
    """Float32 values of at least 0.5, such as a variance, a norm or a sum of exponentials."""
    return 0.5 + vector(generator, length).abs()


def index(generator: torch.Generator, length: int, columns: int) -> torch.Tensor:
    """A column for each row, int64; every fifth row has -100, PyTorch's mark for padding."""
    import torch

    drawn = torch.randint(columns, (length,), generator=generator, device=generator.device)
    drawn[4::5] = -100
    return drawn
