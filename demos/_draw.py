"""Random inputs of realistic size for the demonstrations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.primitives import ColIndex, ColVector, Program, RowVector, Scalar
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.resources import Tile

if TYPE_CHECKING:
    import torch

# Column vectors stand for variances, norms and sums of exponentials.
_USUAL: Mapping[type, Any] = {ColVector: "positive", ColIndex: "column", Scalar: 0.75}


def draw(
    programs: Iterable[Program],
    unusual: Mapping[str, Any],
    generator: torch.Generator,
    m: int,
    n: int,
    k: int,
) -> dict[str, Any]:
    """Draw operands, and A and B with A Bᵀ of unit variance.

    Vectors are float32, indices int64, scalars numbers, and all else bfloat16.

    Args:
        programs: What they are drawn for.
        unusual: By name how an input is drawn, or the input itself (see `coda_agent.demos`).
        generator: Draws them, on its device.
        m: Rows of A.
        n: Rows of B.
        k: Columns of both.
    """
    import torch

    how = {"B": {"scale": k**-0.5}, **unusual}
    kinds: dict[str, type[Resource]] = {x: kind for p in programs for x, kind in p.operands.items()}
    kinds |= {p.accumulated: Tile for p in programs if p.accumulated}
    shapes = {x: kind.extents(m, n) for x, kind in kinds.items()}
    drawn: dict[str, Any] = {}
    for x, shape in {"A": (m, k), "B": (n, k), **shapes}.items():
        kind = kinds.get(x, Tile)
        match how.get(x, _USUAL.get(kind, {})):
            case "positive":
                drawn[x] = 0.5 + _normal(generator, shape).abs()
            case "whole":
                drawn[x] = _normal(generator, shape).round().to(torch.bfloat16)
            case "column":
                drawn[x] = _columns(generator, m, n)
            case {**said}:
                value = _normal(generator, shape, **said)
                drawn[x] = value if kind in (ColVector, RowVector) else value.to(torch.bfloat16)
            case given:
                drawn[x] = given
    return drawn


def _normal(
    generator: torch.Generator, shape: tuple[int, ...], mean: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    import torch

    return mean + scale * torch.randn(*shape, generator=generator, device=generator.device)


def _columns(generator: torch.Generator, m: int, n: int) -> torch.Tensor:
    """Draw a column for each row; every fifth -100, PyTorch's padding."""
    import torch

    drawn = torch.randint(n, (m,), generator=generator, device=generator.device)
    drawn[4::5] = -100
    return drawn
