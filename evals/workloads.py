"""Workloads: a kernel at one size, with inputs and truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from coda_agent.agent.judge.records import Inputs
from coda_agent.evals.cases import Call, Outputs
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import draw_inputs, run_reference

Function = Callable[..., Any]
EPS = 1e-6
# bf16 code that rounds more often than ours errs by 5e-3, and rounding to e4m3 alone by 3e-2. A
# wrong or missing term comes to 1e-1.
LIMIT, LIMIT_8_BIT = 1e-2, 5e-2
_CHECKED = 256
"""About so many rows are checked where each row of every output is its own."""


@dataclass(frozen=True)
class Workload:
    """One kernel at one size: two sets of inputs, the first's truth.

    Three names of the truth are not the spec's: `product` = A Bᵀ, `loss` = lse - z_tgt, and
    `normed`, a finished RMSNorm.

    Attributes:
        rows: Of which rows the truth is; all, where an output sums over rows.
        head, columns: Of a projection with RoPE: the width of a head, and the columns of queries,
            keys and values.
    """

    kernel: Kernel
    inputs: tuple[Inputs, Inputs]
    truth: Outputs
    rows: slice
    head: int
    columns: tuple[int, int, int]

    @property
    def name(self) -> str:
        return self.kernel.spec.name

    def operands(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Give A (M, K) and B (N, K) of a set."""
        a, b = self.kernel.spec.gemm
        return x[a], x[b]

    @property
    def mnk(self) -> tuple[int, int, int]:
        a, b = self.operands(self.inputs[0])
        return a.shape[0], b.shape[0], a.shape[1]

    @property
    def dtype(self) -> str:
        """The element type of A and B."""
        a, _ = self.operands(self.inputs[0])
        return str(a.dtype).removeprefix("torch.")

    @property
    def limit(self) -> float:
        """The error up to which an output is right."""
        narrow = any("float8" in output.dtype for output in self.kernel.spec.outputs.values())
        return LIMIT_8_BIT if narrow else LIMIT

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make a buffer, in A's element type unless told otherwise."""
        a, _ = self.operands(self.inputs[0])
        return a.new_empty(shape, dtype=dtype)

    def product(self) -> torch.Tensor:
        """Make a buffer for A Bᵀ, (M, N)."""
        return self.new(*self.mnk[:2])

    def rotating(self, build: Callable[[Inputs, torch.Tensor, torch.Tensor], Function]) -> Call:
        """Build a call for each set, and take them in turn."""
        calls = [build(x, *self.operands(x)) for x in self.inputs]
        return lambda i: calls[i % 2]()


def make_workload(
    kernel: Kernel,
    sizes: Mapping[str, int],
    dtype: str,
    device: str,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> Workload:
    """Draw both sets by the spec, as a Transformer would pass them.

    A forward `r` is the row scale of A. A backward `z` is the row mean of its gradient times its
    norm's output. `cs` is one table for all heads, with the identity for the values. Scales of
    whole tensors are the same in both sets, since torch.compile specialises on numbers.
    """
    spec = kernel.spec
    types = dict.fromkeys(spec.types, dtype)
    over_rows, over_columns, _ = spec.gemm_dims
    m, n = sizes[over_rows], sizes[over_columns]
    # Without a model's widths, thirds of heads of 128.
    q, kv, head = widths.get("q", n // 3), widths.get("kv", n // 3), widths.get("head", 128)
    sets: list[dict[str, Any]] = []
    for seed in (0, 1):
        x: dict[str, Any] = draw_inputs(spec, sizes, types, seed=seed, device=device)
        a, b = (x[g] for g in spec.gemm)
        if spec.name.startswith("gemm_rmsnorm"):
            x["r"] = torch.rsqrt(a.float().square().mean(-1) + EPS)
        if {"C", "r", "gamma", "z"} <= x.keys():
            gradient = (a @ b.t()).float() * x["gamma"].float()
            x["z"] = (gradient * x["C"].float()).mean(-1) * x["r"]
        if "cs" in x:
            table = x["cs"].view(m, -1, head)
            rotated = (n - kv) // head
            table[:, :rotated] = table[:, :1].clone()
            table[:, rotated:] = torch.tensor([1, 0] * (head // 2), device=device)
        if sets:
            x |= {name: value for name, value in sets[0].items() if isinstance(value, float)}
        sets.append(x)
    tensors = (*spec.inputs, *spec.outputs)
    by_rows = {t for t in tensors if spec.symbolic_shape(t)[:1] == (over_rows,)}
    alone = m > _CHECKED and by_rows.issuperset(spec.outputs)
    rows = slice(None, None, m // _CHECKED | 1 if alone else 1)  # odd: rows of all kinds in a tile
    few = {name: x[rows] if name in by_rows else x for name, x in sets[0].items()}
    truth = dict(run_reference(spec, few, exact=True))
    truth["product"] = few[spec.gemm[0]].double() @ few[spec.gemm[1]].double().t()
    if {"lse", "z_tgt"} <= truth.keys():
        truth["loss"] = truth["lse"] - truth["z_tgt"]
    if {"D", "O", "s"} <= truth.keys():
        truth["normed"] = truth["O"] * torch.rsqrt(truth["s"] + EPS)[:, None]
    return Workload(kernel, (sets[0], sets[1]), truth, rows, head, (q, kv, kv))
