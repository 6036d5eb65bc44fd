"""The suite of layers, in FP8: blocks' forward passes beside PyTorch's.

All quantise alike, in front: each row of a weight by its own maximum (query, key and value by one
in all), each token by its own, and SwiGLU's values by one static scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from coda_agent.evals.cases import Case, Contender, Setup, differentiated
from coda_agent.evals.float8 import E4M3_MAX, e4m3, quantised, scaled_product
from coda_agent.evals.layers import (
    BLOCKS,
    TOKENS,
    Ops,
    Values,
    Widths,
    compiled,
    values,
    wide,
)
from coda_agent.fuse.backend import coda

LIMIT = 0.1


def cases() -> list[Case]:
    """List the blocks."""
    contenders = "ours", "gemm", "eager", "compile", "compile, scales behind"
    return [
        Case(f"block {name} fp8 forward", contenders, partial(_block, widths))
        for name, widths in BLOCKS.items()
        if not widths.bias
    ]


class Fp8Ops(Ops):
    """A block with products in FP8 by `torch._scaled_mm`, which scales rows and columns.

    Args:
        behind: Whether products have a scale of one, which runs cuBLAS instead of CUTLASS, and the
            passes behind them scale.
        inner: The static scale of SwiGLU's values.
    """

    def __init__(self, t: Values, cos: Tensor, sin: Tensor, inner: float, behind: bool) -> None:
        super().__init__(cos, sin)
        self.behind, self.inner, self.one = behind, inner, torch.ones((), device=cos.device)
        groups: list[tuple[str, ...]] = [("wo",), ("gate", "up"), ("down",), ("q", "k", "v")]
        self.weights = {g: quantised(torch.cat([t[n] for n in g]), g[0] == "q") for g in groups}

    def products(self, t: Values, x: Tensor, *names: str) -> Sequence[Tensor]:
        weight, columns = self.weights[names]
        if names == ("down",):
            narrow = e4m3((x / self.inner).clamp(-E4M3_MAX, E4M3_MAX))
            rows = torch.full((len(x),), self.inner, device=x.device)
        else:
            narrow, rows = quantised(x)
        if self.behind:
            y = scaled_product(narrow, weight, self.one, self.one).float()
            y = (y * rows[:, None] * columns).bfloat16()
        else:
            y = scaled_product(narrow, weight, rows[:, None], columns[None])
        return y.split([len(t[name]) for name in names], dim=1)


def _block(widths: Widths, device: str, shrink: int) -> Setup:
    w = widths.shrunk(shrink)
    t, cos, sin = values(w, TOKENS // shrink, device)
    plain = Ops(cos, sin)
    with torch.no_grad():
        x = t["x"] + plain.products(t, t["a"], "wo")[0]
        act = plain.gate(*plain.products(t, plain.norm(x, t["gamma"]), "gate", "up"))
        inner = float(act.abs().max()) / E4M3_MAX
        truth = differentiated(plain.block, wide(t), "forward")(0)
    scaled, behind = (Fp8Ops(t, cos, sin, inner, late) for late in (False, True))

    def bare() -> Contender:
        narrow = [(quantised(t["a"])[0], "wo"), (quantised(t["x"])[0], "gate")]
        narrow += [(e4m3(act / inner), "down"), (quantised(t["x"])[0], "q")]
        weights = {names[0]: weight for names, (weight, _) in scaled.weights.items()}
        one = scaled.one
        return Contender(
            lambda _: [scaled_product(a, weights[n], one, one) for a, n in narrow], lambda: {}
        )

    makers = {
        "ours": lambda: compiled(scaled.block, t, "forward", coda),
        "gemm": bare,
        "eager": lambda: Contender(differentiated(scaled.block, t, "forward")),
        "compile": lambda: compiled(scaled.block, t, "forward"),
        "compile, scales behind": lambda: compiled(behind.block, t, "forward"),
    }
    return Setup(makers, truth, LIMIT)
