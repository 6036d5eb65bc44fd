"""Tests of evals/workloads.py: inputs as a Transformer passes them, and truths of some rows."""

from __future__ import annotations

import pytest
import torch

from coda_agent.evals.cases import Setup
from coda_agent.evals.kernels import _ours
from coda_agent.evals.workloads import make_workload
from coda_agent.runtime.loading import load_kernel
from tests.evals.small import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
TINY = {"hidden": 64, "q": 128, "kv": 64, "head": 64, "mlp": 96, "vocabulary": 160}


@pytest.mark.parametrize(
    "name", ["gemm_rmsnorm_rope", "gemm_residual_partial_rmsnorm_bwd", "gemm_rmsnorm_swiglu",
             "gemm_fp8_rmsnorm_swiglu_quantised", "gemm_rmsnorm_partial_cross_entropy"],
)  # fmt: skip
def test_many_rows_are_checked_by_a_part_of_them(name: str) -> None:
    kernel = load_kernel(ROOT / "generated" / name)
    workload = make_workload(kernel, {"M": 1031, "N": 256, "K": 64}, "bfloat16", "cpu", TINY)
    summed = name == "gemm_residual_partial_rmsnorm_bwd"  # an output sums over all rows
    assert len(workload.truth["product"]) == (1031 if summed else len(range(0, 1031, 5)))
    setup = Setup({}, workload.truth, workload.limit, workload.rows)
    run = _ours(workload)
    outputs = {o: t.clone() for o, t in run(0).items()}
    assert max(setup.errors(outputs).values()) < workload.limit
    assert max(setup.errors(run(1)).values()) > 0.1  # the other set: the check can fail
    for o, t in outputs.items():
        t[workload.rows.step or 0] = 0
        assert setup.errors({o: t})[o] > 0.02 or t.ndim == 1


def test_keys_and_values_may_have_fewer_heads() -> None:
    kernel = load_kernel(ROOT / "generated" / "gemm_rmsnorm_rope")
    whole = make_workload(kernel, {"M": 16, "N": 768, "K": 64}, "bfloat16", "cpu")
    assert (whole.head, whole.columns) == (128, (256, 256, 256))
    workload = make_workload(kernel, {"M": 16, "N": 256, "K": 64}, "bfloat16", "cpu", TINY)
    assert (workload.head, workload.columns) == (64, (128, 64, 64))
    table = workload.inputs[0]["cs"]
    assert torch.equal(table[:, :64], table[:, 64:128])
    assert torch.equal(table[:, :64], table[:, 128:192])  # the keys'
    assert torch.equal(table[:, 192:].float(), torch.tensor([1.0, 0.0] * 32).expand(16, 64))
