"""Tests of evals/kernels.py: the kernels of the paper, of models' layers, and of a workspace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from coda_agent.agent.shapes import PLACES, place_sizes
from coda_agent.evals import kernels
from coda_agent.evals.cases import Absent, Case
from coda_agent.evals.kernels import MODELS, RAW, _contender, own, paper, shapes
from coda_agent.evals.workloads import make_workload
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import load_spec
from tests.evals.small import ROOT, measured

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
# The (N, K) of each product as the models' configurations give them.
KNOWN = {
    "llama-3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096),
                   "down": (4096, 14336), "head": (128256, 4096)},
    "llama-3-70b-tp8": {"qkv": (1280, 8192), "o": (8192, 1024), "gate-up": (7168, 8192),
                        "down": (8192, 3584), "head": (16032, 8192)},
    "qwen2.5-7b": {"qkv": (4608, 3584), "o": (3584, 3584), "gate-up": (37888, 3584),
                   "down": (3584, 18944), "head": (152064, 3584)},
    "tinyllama-1.1b": {"qkv": (2560, 2048), "o": (2048, 2048), "gate-up": (11264, 2048),
                       "down": (2048, 5632), "head": (32000, 2048)},
}  # fmt: skip


def test_products_have_the_shapes_of_their_models() -> None:
    for model, widths in MODELS.items():
        for kernel, places in PLACES.items():
            for place in places:
                load_spec(ROOT / "specs" / f"{kernel}.md").check_sizes(
                    sizes := place_sizes(place, widths, 32)
                )
                name, back, _ = place.partition("-backward")
                n, k = KNOWN[model][name]
                assert bool(back) == kernel.endswith("_bwd")
                wanted = (k, n) if back else (n, k)  # the gradient enters at the other side
                assert (sizes["M"], sizes["N"], sizes["K"]) == (32, *wanted)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", paper(ROOT).cases[::3], ids=lambda case: case.name)
def test_a_kernel_of_the_paper_is_right(tmp_path: Path, case: Case) -> None:
    cells = measured(tmp_path, 16, case)
    ours, gemm = cells[case.name, "ours"], cells[case.name, "gemm"]
    assert 0 < (ours.error or 0) < 4e-3 and 0 < (gemm.error or 0) < 4e-3
    assert cells[case.name, "compile"].absent == "needs a GPU"
    raw = cells[case.name, RAW]
    assert raw.absent == "has nothing for this kernel" or (raw.note or "").startswith("without ")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [c for c in shapes(ROOT).cases if c.name.startswith("tinyllama") and c.name.endswith(" 128")],
    ids=lambda case: case.name,
)
def test_a_kernel_in_a_layer_is_right(tmp_path: Path, case: Case) -> None:
    error = measured(tmp_path, 8, case)[case.name, "ours"].error or 0
    assert 0 < error < (5e-2 if "quantised" in case.name else 5e-3)


def test_a_workspace_has_its_own_kernels_and_the_packages(tmp_path: Path) -> None:
    name = "gemm_symlog"
    folder = shutil.copytree(ROOT / "generated" / name, tmp_path / "generated" / name)
    case = next(case for case in own(tmp_path).cases if case.name == "gemm_symlog 4096³")
    assert 0 < (measured(tmp_path, 32, case)["gemm_symlog 4096³", "ours"].error or 0) < 4e-3
    spec = (folder / "spec.md").read_text("utf-8")
    (folder / "spec.md").write_text(spec.replace("8192", "1024"), "utf-8")
    names = {case.name for case in own(tmp_path).cases}
    assert {"gemm_symlog 4096³", "gemm_symlog 1024³", "gemm_rope 4096×12288×4096"} < names
    assert "gemm_symlog 8192³" not in names and len(names) == 38
    assert kernels.load(tmp_path, "gemm_rope").spec.name == "gemm_rope"


def test_a_case_has_the_job_that_compiles_its_kernel() -> None:
    case = next(c for c in shapes(ROOT).cases if c.name == "qwen2.5-7b gemm_rmsnorm_rope qkv 16")
    assert case.job and (job := case.job()).arch == "sm_90a" and job.dtype == "bfloat16"
    assert torch.cuda.is_available() or job.config == DEFAULT_CONFIGS["sm_90a"]


def test_groups_are_of_models_and_rows() -> None:
    group = shapes(ROOT).group
    assert group("qwen2.5-7b gemm_rope qkv 128") == "qwen2.5-7b, 1 to 128 rows"
    assert group("qwen2.5-7b gemm_rope qkv 16384") == "qwen2.5-7b, 2048 to 16384 rows"


def test_ours_leaves_the_inputs_alone_and_notes_what_it_lacks() -> None:
    kernel = load_kernel(ROOT / "generated" / "gemm_residual_partial_rmsnorm_bwd")
    workload = make_workload(kernel, {"M": 16, "N": 64, "K": 32}, "bfloat16", "cpu")
    before = [x["X"].clone() for x in workload.inputs]
    ours = _contender(workload, "ours")
    first = {name: x.clone() for name, x in ours.checked().items()}
    assert not torch.equal(ours.call(0)["O"], first["O"])  # it adds to what it holds
    assert all(torch.equal(x["X"], b) for x, b in zip(workload.inputs, before, strict=True))
    assert ours.note() == ""
    raw = _contender(workload, RAW)
    assert {*raw.checked()} == {"O", "C_out"} and raw.note() == "without dgamma"
    plain = make_workload(load_kernel(ROOT / "generated" / "gemm_rope"), dict(M=16, N=384, K=32),
                          "bfloat16", "cpu")  # fmt: skip
    with pytest.raises(Absent, match="has nothing for this kernel"):
        _contender(plain, RAW)
