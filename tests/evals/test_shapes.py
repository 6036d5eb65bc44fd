"""The suite over models' shapes: what it measures, in which order, and what its page says."""

from __future__ import annotations

import itertools
import json
import shutil
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.samples import speedup
from coda_agent.evals import contest, definitions, host_time, libraries
from coda_agent.evals.contenders import Absent, called, ours
from coda_agent.evals.contest import run_contest
from coda_agent.evals.contest_page import write_shapes
from coda_agent.evals.workloads import Heads, make_workload
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs import load_spec
from tests.evals.timed import MACHINE, Clock, cell, figures, recorded

ROOT = Path(__file__).parents[2]
SHAPES = definitions.load("shapes")
BENCHMARK = SHAPES.measured()
TINY = {"tiny": {"hidden": 64, "q": 128, "kv": 64, "head": 64, "mlp": 96, "vocabulary": 160}}
SMALL = SHAPES.model_copy(
    update={"benchmark": BENCHMARK.model_copy(update={"models": TINY, "sizes": (16, 1)})}
)
OTHER = definitions.load("paper").measured().tiles[4]
TIMES = {"ours": 2e5, "gemm": 1.8e5, "compile": 2.2e5}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name in ("gemm_rmsnorm_rope", "gemm_residual_partial_rmsnorm", "gemm_fp8_rmsnorm"):
        shutil.copytree(ROOT / "generated" / name, tmp_path / "generated" / name)
    return tmp_path


def run(root: Path, clock: Clock | None = None, **options: Any) -> list[str]:
    said: list[str] = []
    options = {"machine": MACHINE, "names": ["ours"], "clock": clock or Clock(TIMES), **options}
    run_contest(root, SMALL, device="cpu", say=said.append, **options)
    return said


def cells(root: Path) -> dict[str, Any]:
    return json.loads((root / "evals/results/shapes-nvidia-h200.json").read_text())["cells"]


def test_a_part_of_the_grid_covers_every_kernel_first() -> None:
    places = list(BENCHMARK.places())
    assert len({place.key for place in places}) == len(places) == 4 * 12 * 20
    first = places[:100]
    assert {place.model for place in first} == {"llama-3-8b"}
    assert {place.kernel for place in first} == set(BENCHMARK.kernels)
    assert sorted({place.size for place in first}) == [16, 128, 512, 2048, 8192]
    assert {place.size for place in places} == {1, 16, 32, 64, *(2**i for i in range(7, 15))}


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
    for place in BENCHMARK.places(sizes=[32]):
        spec = load_spec(ROOT / "specs" / f"{place.kernel}.md")
        spec.check_sizes(sizes := place.sizes(spec))
        name, back, _ = place.product.partition("-backward")
        n, k = KNOWN[place.model][name]
        assert bool(back) == place.kernel.endswith("_bwd")
        wanted = (k, n) if back else (n, k)  # the gradient enters at the product's other side
        assert (sizes["M"], sizes["N"], sizes["K"]) == (32, *wanted), place.key


def test_cells_are_measured_once_and_in_parts(workspace: Path) -> None:
    said = run(workspace, seconds=0)
    assert said[-1] == "stopped after 0 s: 7 cells are left"
    assert list(cells(workspace)) == ["tiny gemm_rmsnorm_rope qkv 16"]
    clock = Clock(TIMES)
    run(workspace, clock)
    found = cells(workspace)
    assert clock.cells == 7 and list(found)[:5] == [
        "tiny gemm_rmsnorm_rope qkv 16", "tiny gemm_residual_partial_rmsnorm o 16",
        "tiny gemm_residual_partial_rmsnorm down 16", "tiny gemm_fp8_rmsnorm head 16",
        "tiny gemm_rmsnorm_rope qkv 1",
    ]  # fmt: skip
    down = found["tiny gemm_residual_partial_rmsnorm down 16"]
    assert (down["model"], down["product"]) == ("tiny", "down")
    regimes = [down["regime"], down["steady"]["regime"], down["loop"]["regime"]]
    assert regimes == ["warm", "steady", "loop"]
    assert down["sizes"] == {"M": 16, "N": 64, "K": 96}
    assert down["machine"]["gpu"] == MACHINE["gpu"]
    assert down["times"]["ours"] == {"median_us": 2e5, "interval_us": [2e5, 2e5]}
    assert down["rounds"] == 29 and down["of_gemm"]["ours"]["ratio"] == 0.9
    assert down["loop"]["times"]["ours"]["median_us"] > 0 and down["loop"]["absent"] == {}
    assert down["loop"]["over"]["gemm"]["ratio"] < 1  # interpreted on a CPU
    for timed in found.values():
        assert 0 < timed["errors"]["ours"] < 5e-3

    clock = Clock(TIMES)
    assert all(line.endswith("in the record") for line in run(workspace, clock))
    assert clock.cells == 0
    other = {**MACHINE, "gpu": {**MACHINE["gpu"], "driver_version": "590.1"}}
    run(workspace, clock, machine=other, kernels=["gemm_fp8_rmsnorm"], sizes=[1], models=["tiny"])
    assert clock.cells == 1


def test_other_dispatch_or_other_widths_are_measured_again(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part: dict[str, Any] = {"kernels": ["gemm_rmsnorm_rope"], "sizes": [16]}
    run(workspace, **part)
    kernel = load_kernel(workspace / "generated" / "gemm_rmsnorm_rope")
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "choose", lambda *_: OTHER)
        run(workspace, clock := Clock(TIMES), **part)
        assert clock.cells == 1
        run(workspace, clock, **part)
        assert clock.cells == 1
    monkeypatch.setitem(TINY["tiny"], "hidden", 128)
    run(workspace, clock, **part)
    assert (
        clock.cells == 2 and cells(workspace)["tiny gemm_rmsnorm_rope qkv 16"]["sizes"]["K"] == 128
    )


def test_what_is_not_there_is_refused(workspace: Path) -> None:
    for option, name in (("kernels", "gemm"), ("models", "llama"), ("names", "mine")):
        with pytest.raises(CodaError, match=f"no .* '{name}' in the suite, expected "):
            run(workspace, None, **{option: [name]})


def test_a_cell_that_does_not_fit_says_so_and_one_without_a_clock_is_left(workspace: Path) -> None:
    part: dict[str, Any] = {"kernels": ["gemm_rmsnorm_rope"], "sizes": [16]}
    clock = Clock(TIMES)
    clock.fault = MachineError
    assert run(workspace, clock, **part)[-1].endswith("qkv 16: not measured: no")
    assert not (workspace / "evals").exists()
    clock.fault = torch.OutOfMemoryError
    run(workspace, clock, **part)
    (cell,) = cells(workspace).values()
    assert cell["absent"] == {"ours": "no", "gemm": "no"} and cell["times"] == {}
    run(workspace, clock, **part)
    assert clock.cells == 2  # an answer like another


def test_a_function_that_computes_something_else_has_no_loop(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "called", lambda w: lambda i: {"D": torch.zeros(16, 256)})
    run(workspace, kernels=["gemm_rmsnorm_rope"], sizes=[16])
    (cell,) = cells(workspace).values()
    assert cell["loop"]["absent"] == {"ours": "computes something else: error 1.0e+00"}
    assert "ours" in cell["times"] and set(cell["loop"]["times"]) == {"gemm"}


@pytest.mark.parametrize(
    "name", ["gemm_rmsnorm_rope", "gemm_residual_partial_rmsnorm_bwd", "gemm_rmsnorm_swiglu",
             "gemm_fp8_rmsnorm_swiglu_quantised", "gemm_rmsnorm_partial_cross_entropy"],
)  # fmt: skip
def test_many_rows_are_checked_by_a_part_of_them(name: str) -> None:
    kernel = load_kernel(ROOT / "generated" / name)
    sizes = {"M": 1031, "N": 256, "K": 64}
    workload = make_workload(kernel, sizes, "bfloat16", "cpu", TINY["tiny"])
    summed = name == "gemm_residual_partial_rmsnorm_bwd"  # an output sums over all rows
    assert len(workload.truth["product"]) == (1031 if summed else len(range(0, 1031, 5)))
    assert set(range(0, 1031, 5)) == set(range(1031)[workload.rows]) or summed
    for run in (ours(workload, DEFAULT_CONFIGS["sm_90a"]), called(workload)):
        outputs = {o: t.clone() for o, t in run(0).items()}
        assert workload.error(outputs) < workload.limit
        assert workload.error(run(1)) > 0.1
        for o, t in outputs.items():
            t[workload.rows.step or 0] = 0
            assert workload.error({o: t}) > 0.02 or t.ndim == 1


def test_the_function_in_a_loop_leaves_the_inputs_alone() -> None:
    kernel = load_kernel(ROOT / "generated" / "gemm_residual_partial_rmsnorm_bwd")
    workload = make_workload(kernel, {"M": 16, "N": 64, "K": 32}, "bfloat16", "cpu")
    before = [x["X"].clone() for x in workload.inputs]
    run = called(workload)
    first = run(0)["O"].clone()
    assert not torch.equal(run(0)["O"], first)  # it adds to what it holds
    assert all(torch.equal(x["X"], b) for x, b in zip(workload.inputs, before, strict=True))


def test_keys_and_values_may_have_fewer_heads() -> None:
    assert Heads.of(256, TINY["tiny"]) == Heads(64, (128, 64, 64))
    assert Heads.of(768, {}) == Heads(128, (256, 256, 256))
    kernel = load_kernel(ROOT / "generated" / "gemm_rmsnorm_rope")
    workload = make_workload(kernel, {"M": 16, "N": 256, "K": 64}, "bfloat16", "cpu", TINY["tiny"])
    table = workload.inputs[0]["cs"]
    assert torch.equal(table[:, :64], table[:, 64:128])
    assert torch.equal(table[:, :64], table[:, 128:192])  # the keys'
    assert torch.equal(table[:, 192:].float(), torch.tensor([1.0, 0.0] * 32).expand(16, 64))
    for halves in (False, True):
        seen: list[tuple[int, ...]] = []

        def rope(q: Any, k: Any, table: Any, halves: bool = halves, seen: Any = seen) -> None:
            seen.append((*q.shape[1:], *k.shape[1:]))
            cos, sin = (t[:, None].float() for t in table)
            for x in (q, k):
                left, right = (x[..., :32], x[..., 32:]) if halves else (x[..., 0::2], x[..., 1::2])
                a, b = left.float(), right.float()
                left.copy_(a * cos - b * sin)
                right.copy_(b * cos + a * sin)

        library = SimpleNamespace(
            norm=lambda x, w: torch.nn.functional.rms_norm(x, (64,), w, 1e-6),
            table=lambda cos, sin: (cos, sin), rope=rope, halves=halves,
        )  # fmt: skip
        run = libraries.compose(workload, library)  # pyright: ignore[reportArgumentType]
        assert workload.error(run(0)) < 5e-3 and workload.error(run(1)) > 0.1
        assert seen[0] == (2, 64, 1, 64)
    with pytest.raises(Absent):
        fp8 = load_kernel(ROOT / "generated" / "gemm_fp8_swiglu")
        sizes = {"M": 16, "N": 32, "K": 32}
        libraries.compose(make_workload(fp8, sizes, "bfloat16", "cpu"), library)  # pyright: ignore


def test_a_loop_is_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, list[int]] = {"slow": [], "fast": []}

    def call(name: str) -> Callable[[int], None]:
        return lambda i: (counted[name].append(i), time.sleep(2e-3 if name == "slow" else 2e-4))[1]

    found = host_time.time_loops({n: call(n) for n in counted}, {"slow": 2e3, "fast": 1.0}, "cpu")
    assert 2e3 <= found["slow"].median_us < 4e3 and 200 <= found["fast"].median_us < 2e3
    assert len(counted["slow"]) == 5 + host_time.LOOPS * 10  # 20 ms at 2 ms a call
    assert len(counted["fast"]) == 5 + host_time.LOOPS * host_time.LOOP
    assert speedup(found["fast"], found["slow"]).low > 1


def synthetic(
    kernel: str, product: str, size: int, times: Mapping[str, float], **more: Any
) -> dict[str, Any]:
    about = {"model": "llama-3-8b", "product": product, "tiles": {"ours": "64x128"}}
    regimes = {"steady": figures(times), "loop": figures(times)}
    return cell(kernel, size, times, **about, **regimes, **more)


def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    found = {
        "llama-3-8b gemm_rmsnorm_rope qkv 16": synthetic(
            "gemm_rmsnorm_rope", "qkv", 16,
            {"ours": 50.0, "gemm": 30.0, "compile": 40.0, "liger": 100.0}),
        "llama-3-8b gemm_rmsnorm_rope qkv 2048": synthetic(
            "gemm_rmsnorm_rope", "qkv", 2048,
            {"ours": 100.0, "gemm": 90.0, "compile": 125.0, "liger": 110.0}),
        "llama-3-8b gemm_swiglu gate-up 16": synthetic(
            "gemm_swiglu", "gate-up", 16, {"ours": 40.0, "gemm": 30.0, "compile": 45.0}),
        "llama-3-8b gemm_rmsnorm head 16384": {
            **synthetic("gemm_rmsnorm", "head", 16384, {"ours": 1.0, "gemm": 1.0}),
            "times": {}, "over": {}, "of_gemm": {}, "absent": {"ours": "CUDA out of memory"}},
    }  # fmt: skip
    kept = recorded(tmp_path, "shapes", found)
    record, page, chart = write_shapes(tmp_path, SHAPES)
    assert record == kept
    text = page.read_text()
    rows = [[c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines()]
    # Over compile √(0.8 · 1.125), of cuBLAS √(0.6 · 0.75), the best other √(0.8 · 1.125).
    assert ["1 to 128", "2", "0.949", "0.949", "0.949", "0.671", "0.671", "0.949"] in rows
    assert ["2048 and more", "1", "1.250", "1.250", "1.250", "0.900", "0.900", "1.100"] in rows
    assert ["256 to 1024", "0", "–", "–", "–", "–", "–", "–"] in rows
    assert "In 1 of 3 cells the whole interval of the warm ratio lies below 1." in text
    assert "In a loop ours takes longer in 1 of 3 cells, 1 of 2 at up to 512 rows." in text
    slow = "- llama-3-8b, gemm_rmsnorm_rope, qkv, 16 rows: 0.800 (0.800–0.800), 64x128"
    assert slow in text and "gemm_swiglu, gate-up, 16 rows" not in text
    assert ["gemm_rmsnorm_rope, qkv", "0.80", "1.25"] in rows
    assert ["gemm_rmsnorm_rope, qkv", "0.60", "0.90"] in rows
    assert ["gemm_rmsnorm_rope, qkv", "50", "100"] in rows
    assert ["kernel", "16", "2048"] in rows
    assert "3 of the suite's 960 cells" in text
    assert "- llama-3-8b, gemm_rmsnorm, head, 16384 rows: CUDA out of memory" in text
    assert "- NVIDIA H200, driver 580.1, torch 2.11" in text
    svg = ET.fromstring(chart.read_text())
    tips = [str(tip.text) for rect in svg.iter("{http://www.w3.org/2000/svg}rect") for tip in rect]
    assert tips == [
        "rmsnorm_rope, qkv, 16: 0.800 (torch.compile)",
        "rmsnorm_rope, qkv, 2048: 1.100 (Liger)",
        "swiglu, gate-up, 16: 1.125 (torch.compile)",
    ]
    colours = [r.attrib["fill"] for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(set(colours)) == 2 and colours[1] == colours[2]


def test_without_a_record_the_page_says_so(tmp_path: Path) -> None:
    (page,) = write_shapes(tmp_path, SHAPES)
    assert "There is no record of this suite yet." in page.read_text()
    assert not any(c.isdigit() for c in page.read_text())


def test_kernels_are_compiled_before_anything_is_timed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program and tile once, however many cells dispatch it."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "coda_agent.agent.execution.executor",
        lambda: SimpleNamespace(map=lambda jobs, _: seen.extend(jobs)),
    )
    places = itertools.islice(SMALL.measured().places(kernels=["gemm_rmsnorm_rope"]), 2)
    kernel = load_kernel(workspace / "generated" / "gemm_rmsnorm_rope")
    tasks = [
        contest._task(kernel, place, SMALL.measured(), MACHINE, [], Clock(TIMES))
        for place in places
    ]
    contest._compile_ahead(tasks, SMALL.measured(), lambda _: None)
    (job,) = seen
    assert (job.dtype, job.arch, job.config) == ("bfloat16", "sm_90a", DEFAULT_CONFIGS["sm_90a"])
