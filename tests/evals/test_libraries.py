"""Tests of evals/libraries.py: compositions, of plain torch functions in a library's place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.evals import libraries
from coda_agent.evals.cases import Absent, Outputs, Setup
from coda_agent.evals.kernels import PAPER
from coda_agent.evals.libraries import Library, compose
from coda_agent.evals.workloads import EPS, Workload, make_workload
from coda_agent.runtime.loading import load_kernel
from tests.evals.small import ROOT


def workload(name: str, m: int = 64, n: int = 384, k: int = 128) -> Workload:
    kernel = load_kernel(ROOT / "generated" / name)
    return make_workload(kernel, {"M": m, "N": n, "K": k}, "bfloat16", "cpu")


def error(work: Workload, outputs: Outputs) -> float:
    return max(Setup({}, work.truth, work.limit, work.rows).errors(outputs).values())


def plain_torch(*, halves: bool) -> Library:
    """A library of plain torch functions, with either pairing of RoPE."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w, EPS)

    def silu_mul(d: Tensor) -> Tensor:
        gate, up = d.float().chunk(2, -1)
        return (F.silu(gate) * up).to(d.dtype)

    def rope(q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> None:
        cos, sin = (t[:, None].float() for t in table)
        for x in (q, k):
            assert x.is_contiguous() or not halves
            left, right = (x[..., :64], x[..., 64:]) if halves else (x[..., 0::2], x[..., 1::2])
            a, b = left.float(), right.float()
            left.copy_(a * cos - b * sin)
            right.copy_(b * cos + a * sin)

    return Library(
        norm=norm,
        silu_mul=silu_mul,
        add_norm=lambda x, c, w: (x + c, norm(x + c, w)),
        table=lambda cos, sin: (cos, sin),
        rope=rope,
        halves=halves,
        cross_entropy=lambda z, y: F.cross_entropy(z.float(), y, reduction="none"),
    )


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", [name for name in PAPER if not name.endswith("bwd")])
def test_a_composition_computes_what_the_kernel_does(name: str, halves: bool) -> None:
    work = workload(name)
    run = compose(work, plain_torch(halves=halves))
    assert error(work, run(0)) < 5e-3
    assert error(work, run(1)) > 0.1  # the other set: the check can fail


def test_a_library_has_nothing_for_other_kernels() -> None:
    with pytest.raises(Absent, match="has nothing for this kernel"):
        compose(workload("gemm_fp8_swiglu"), plain_torch(halves=True))
    with pytest.raises(Absent):  # nothing backward
        compose(workload("gemm_partial_swiglu_bwd"), plain_torch(halves=True))


def test_what_a_library_computes_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = SimpleNamespace(
        swiglu_fused_gate_up_forward=lambda d: (d, F.silu(d[:, 1::2]) * d[:, 0::2]),  # interleaved
        swiglu_fused_gate_up_backward=None,
    )
    ops = SimpleNamespace(LigerCrossEntropyFunction=None)
    modules = {
        "": None,
        ".ops": ops,
        ".ops.rms_norm": None,
        ".ops.swiglu": gate,
        ".ops.utils": None,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module or SimpleNamespace())  # type: ignore
    work = workload("gemm_swiglu")
    assert error(work, libraries.liger(work)(0)) > 0.1


def test_the_fastest_right_tile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that compute the right result; what a tile raises leaves it out."""
    work, seen = workload("gemm_swiglu"), list[str]()
    monkeypatch.setattr(
        libraries, "ranked", lambda runs, *_: sorted(((t, 1.0) for t in runs), key=str)
    )

    def build(tile: Any) -> Any:
        if tile == libraries.TILES[0]:
            raise ValueError("no such tile")
        seen.append(tile.label)
        wrong = tile == libraries.TILES[1]
        return work.rotating(lambda x, a, b: lambda: {"product": a @ b.t() * (1 + wrong)})

    run = libraries._fastest(work, build)
    assert seen[-1] == libraries.TILES[2].label and error(work, run(0)) < 5e-3
    monkeypatch.setattr(libraries, "TILES", libraries.TILES[:2])
    with pytest.raises(Absent, match="no tile computes the right result"):
        libraries._fastest(work, build)


def test_the_bare_product_is_right() -> None:
    work = workload("gemm_fp8_rmsnorm")
    if torch.cuda.is_available() or hasattr(torch, "_scaled_mm"):
        assert error(work, libraries.gemm(work)(0)) < 5e-3
