"""Kernels of DTensors on two ranks: the results and gradients of whole tensors, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.generated import (
    gemm_bias_act,
    gemm_residual_partial_rmsnorm,
    gemm_residual_partial_rmsnorm_bwd,
    gemm_rmsnorm_partial_cross_entropy,
    gemm_rmsnorm_rope,
    gemm_swiglu,
)
from coda_agent.primitives.errors import LaunchError
from tests.ranks import on_two_ranks

M, N, K = 16, 64, 32


def test_dtensors() -> None:
    on_two_ranks(_dtensors)


def _dtensors(mesh: Any) -> None:
    rows_and_columns(mesh)
    _refusals(mesh)


def _normal(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")


def drawn() -> dict[str, Tensor]:
    """Operands with a batch of two, by what they are called here."""
    g = torch.Generator("cpu").manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cpu").bfloat16()

    return {
        "A": draw(2, M, K),
        "B": draw(N, K) / 5,
        "C": draw(2, M, N),
        "row": draw(N),
        "r": torch.rand(2, M, generator=g, device="cpu") + 0.5,
        "alpha": torch.tensor(0.7),
        "beta": torch.tensor(0.3),
    }


def rows_and_columns(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    on, whole = mesh.device_type, Replicate()
    known = {name: t.to(on) for name, t in drawn().items()}

    def same(found: Tensor, expected: Tensor, bound: float = 0.0, about: Any = None) -> None:
        """Hold that they are the same; on a GPU other shapes may be added in another order."""
        bound = max(bound, 0.0 if on == "cpu" else 0.004)
        assert found.shape == expected.shape and found.dtype == expected.dtype, about
        error = (found.double() - expected.double()).norm()
        assert error <= bound * expected.double().norm(), about
        assert bound or torch.equal(found, expected), about

    def hold(call: Callable[..., Any], placed: dict[str, Any], out: int) -> None:
        """Hold a call on DTensors so placed against that on whole tensors."""
        plain: list[Any] = [known[x].clone().requires_grad_() for x in placed]
        parts: Any = [distribute_tensor(known[x], mesh, [p]) for x, p in placed.items()]
        parts = [t.detach().requires_grad_() for t in parts]
        ours, theirs = ((t,) if type(t := call(*x)) is not tuple else t for x in (parts, plain))
        g = [_normal(t.shape).to(on) for t in theirs]
        torch.stack(
            [(t.full_tensor() * x).sum() for t, x in zip(ours, g, strict=True)]
        ).sum().backward()
        torch.stack([(t * x).sum() for t, x in zip(theirs, g, strict=True)]).sum().backward()
        for t, expected in zip(ours, theirs, strict=True):
            assert t.placements == (Shard(out),)
            same(t.full_tensor(), expected)
        for name, t, expected in zip(placed, parts, plain, strict=True):
            # What is whole gets a gradient of each rank, rounded and then summed.
            bound = 0.01 if placed[name] == whole else 0.0
            same(t.grad.full_tensor(), expected.grad, bound, (name, placed))

    rows, columns = Shard(1), Shard(2)
    hold(gemm_swiglu, {"A": whole, "B": Shard(0)}, out=2)
    hold(gemm_swiglu, {"A": rows, "B": whole}, out=1)
    hold(gemm_swiglu, {"A": Shard(0), "B": whole}, out=0)
    placed = {"A": whole, "B": Shard(0), "r": whole, "C": columns}
    hold(gemm_rmsnorm_rope, placed, out=2)
    placed = {"A": rows, "B": whole, "C": rows, "row": whole}  # a statistic of whole rows
    hold(gemm_residual_partial_rmsnorm, placed, out=1)
    placed = {"A": whole, "B": Shard(0), "C": columns, "row": Shard(0)}
    hold(gemm_bias_act, placed | {"alpha": whole, "beta": whole}, out=2)
    compiled: Any = torch.compile(gemm_swiglu, backend="aot_eager", fullgraph=True)
    hold(compiled, {"A": whole, "B": Shard(0)}, out=2)

    names = ["A", "B", "C", "r", "row", "r", "C"]  # flat, and in place
    flat = [known[x] if x in ("B", "row") else known[x][0] for x in names]
    last = flat[-1].clone()
    expected = gemm_residual_partial_rmsnorm_bwd(*flat[:-1], last, update="in_place")
    places = [whole, Shard(0), Shard(1), whole, Shard(0), whole, Shard(1)]
    given = [distribute_tensor(t.clone(), mesh, [p]) for t, p in zip(flat, places, strict=True)]
    found: Any = gemm_residual_partial_rmsnorm_bwd(*given, update="in_place")
    assert found[0] is given[-1] and not torch.equal(last, flat[-1])
    assert [t.placements[0] for t in found] == [Shard(1), Shard(1), Shard(0)]
    for t, e in zip(found, expected, strict=True):
        same(t.full_tensor(), e)


def _refusals(mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    known, whole = drawn(), Replicate()
    known["y"] = torch.zeros(2, M, dtype=torch.int64)
    known["odd"], known["odd C"] = known["A"][:, :15], known["C"][:, :15]

    def refused(said: str, kernel: Any, **placed: Any) -> None:
        names = [x.replace("_", " ") for x in placed]
        values: list[Any] = []
        for x, p in zip(names, placed.values(), strict=True):
            values.append(known[x] if p is None else distribute_tensor(known[x], mesh, [p]))
        with pytest.raises(LaunchError, match=re.escape(said)):
            kernel(*values)

    refused("A is a plain tensor beside DTensors", gemm_swiglu, A=None, B=Shard(0))
    refused("has A as S(2) and B as S(1), of which no", gemm_swiglu, A=Shard(2), B=Shard(1))
    refused("has A as P(sum) and B as R", gemm_swiglu, A=Partial(), B=whole)
    refused("A has 15 along its sharded dimension", gemm_swiglu, odd=Shard(1), B=whole)
    kernel = gemm_residual_partial_rmsnorm
    said = "does not run on sharded columns: its output 's' reduces over columns"
    refused(said, kernel, A=whole, B=Shard(0), C=Shard(2), row=Shard(0))
    said = "C is (R), expected (S(1)) beside A (S(1)) and B (R)"
    refused(said, kernel, A=Shard(1), B=whole, C=whole, row=whole)
    kernel = gemm_rmsnorm_partial_cross_entropy
    refused("reduces over columns", kernel, A=whole, B=Shard(0), r=whole, y=whole)
    o = torch.empty(2, M, N // 2, dtype=torch.bfloat16)
    a, b = (distribute_tensor(known[x], mesh, [whole]) for x in "AB")
    with pytest.raises(LaunchError, match="out's O or its result is a DTensor"):
        gemm_swiglu(a, b, out={"O": o})
