"""Suites: what is measured, kept, resumed and said. The clock is handed in; the rest is real."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coda_agent.agent.judge import tuner
from coda_agent.evals import contenders, definitions, libraries
from coda_agent.evals.contenders import contender
from coda_agent.evals.contest import run_contest
from coda_agent.evals.contest_page import write_page
from coda_agent.evals.workloads import EPS, Rotation, Workload, make_workload
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.launch import Arguments
from tests.evals.timed import MACHINE, Clock, cell, recorded

ROOT = Path(__file__).parents[2]
PAPER = definitions.load("paper")
MEASURED = PAPER.measured()
SMALL = PAPER.model_copy(update={"benchmark": MEASURED.model_copy(update={"sizes": (128, 256)})})
TIMES = {"ours": 200.0, "gemm": 190.0}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name in ("gemm_swiglu", "gemm_rope"):
        shutil.copytree(ROOT / "generated" / name, tmp_path / "generated" / name)
    return tmp_path


def run(root: Path, clock: Clock, **options: Any) -> list[str]:
    said: list[str] = []
    options = {"names": ["ours"], "machine": MACHINE, **options}
    run_contest(
        root,
        SMALL,
        clock=clock,
        rounds=20,
        device="cpu",
        say=said.append,
        **options,
    )
    return said


def cells(root: Path) -> dict[str, Any]:
    file = root / "evals" / "results" / "paper-nvidia-h200.json"
    return json.loads(file.read_text())["cells"]


@pytest.mark.sampled(0.3)
def test_cells_are_kept_and_skipped_until_something_changes(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workspace, Clock(TIMES))
    found = cells(workspace)
    assert list(found) == ["gemm_rope 128", "gemm_rope 256", "gemm_swiglu 128", "gemm_swiglu 256"]
    cell = found["gemm_rope 256"]
    assert cell["sizes"] == {"M": 256, "N": 768, "K": 256}
    assert cell["of_gemm"]["ours"] == {"ratio": 0.95, "low": 0.95, "high": 0.95}
    assert cell["times"]["ours"]["median_us"] == 200.0
    assert 0 < cell["errors"]["ours"] < 4e-3  # interpreted, but computed
    assert cell["steady"]["of_gemm"]["ours"] == {"ratio": 0.76, "low": 0.76, "high": 0.76}
    assert cell["steady"]["over"]["gemm"]["ratio"] == 0.76 and cell["steady"]["absent"] == {}

    again = Clock(TIMES)
    assert all(line.endswith("in the record") for line in run(workspace, again))
    assert again.cells == 0

    kernel = load_kernel(workspace / "generated" / "gemm_swiglu")
    monkeypatch.setattr(kernel, "choose", lambda *_: MEASURED.tiles[0])
    again = Clock(TIMES)
    run(workspace, again)
    assert again.cells == 2
    again = Clock(TIMES)
    run(workspace, again, names=["ours", "quack"], kernels=["gemm_rope"], sizes=[128])
    assert again.cells == 1  # a contender that the cell has no answer for
    assert "quack" in cells(workspace)["gemm_rope 128"]["absent"]  # no GPU here
    again = Clock(TIMES)
    run(workspace, again, kernels=["gemm_rope"], sizes=[128])
    assert again.cells == 0  # what was there is kept
    if find_spec("flashinfer") is None:
        run(workspace, again, names=["ours", "flashinfer"], kernels=["gemm_rope"], sizes=[128])
        assert again.cells == 0
    other = {**MACHINE, "gpu": {**MACHINE["gpu"], "driver_version": "590.1"}}
    run(workspace, again, kernels=["gemm_rope"], sizes=[128], machine=other)
    assert again.cells == 1


def test_a_contender_without_a_steady_figure_keeps_its_warm_one(workspace: Path) -> None:
    clock = Clock(TIMES)
    clock.stalled = {"gemm": "the device waited for the host"}
    run(workspace, clock, kernels=["gemm_rope"], sizes=[128])
    cell = cells(workspace)["gemm_rope 128"]
    assert cell["of_gemm"]["ours"]["ratio"] == 0.95
    steady = cell["steady"]
    assert steady["absent"] == {"gemm": "the device waited for the host"}
    assert steady["of_gemm"] == {} and list(steady["over"]) == list(steady["times"]) == ["ours"]


def test_a_cell_without_a_steady_regime_is_measured_again(workspace: Path) -> None:
    run(workspace, Clock(TIMES), kernels=["gemm_rope"])
    file = workspace / "evals" / "results" / "paper-nvidia-h200.json"
    record = json.loads(file.read_text())
    del record["cells"]["gemm_rope 128"]["steady"]
    file.write_text(json.dumps(record))
    again = Clock(TIMES)
    run(workspace, again, kernels=["gemm_rope"])
    assert again.cells == 1 and "steady" in cells(workspace)["gemm_rope 128"]


def test_an_interruption_loses_one_cell(workspace: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(workspace, Clock(TIMES, cells=3))
    assert len(cells(workspace)) == 3
    rest = Clock(TIMES)
    run(workspace, rest)
    assert rest.cells == 1
    assert len(cells(workspace)) == 4


def test_a_contender_is_one_definition(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command, record and page know it by that: what CONTRIBUTING says of adding one."""

    @contender("Toy's GEMM", package=("toy-kernels", "toy_kernels"))
    def toy(workload: Workload) -> Rotation:
        return workload.rotating(lambda x, a, b: lambda: {"product": a @ b.t()})

    monkeypatch.setattr(libraries, "toy", toy, raising=False)
    run(
        workspace, Clock({**TIMES, "toy": 380.0}), names=["toy"], kernels=["gemm_rope"], sizes=[128]
    )
    (cell,) = cells(workspace).values()
    assert cell["of_gemm"]["toy"]["ratio"] == 0.5
    assert cell["machine"]["packages"]["toy-kernels"] is None  # it is not installed
    page = write_page(workspace, SMALL)[1].read_text().splitlines()
    table = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in page)}
    column = table["kernel"].index("Toy's GEMM")
    assert table["gemm_rope (N = 384)"][column] == "0.500"


def test_a_missing_or_wrong_library_is_said_and_not_timed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = SimpleNamespace(
        swiglu_fused_gate_up_forward=lambda d: (d, F.silu(d[:, 1::2]) * d[:, 0::2]),  # interleaved
        swiglu_fused_gate_up_backward=None,
    )
    ops = SimpleNamespace(LigerCrossEntropyFunction=None)
    utils = SimpleNamespace(calculate_settings=None)
    modules = {".ops": ops, ".ops.rms_norm": None, ".ops.swiglu": gate, ".ops.utils": utils}
    for name, module in {"": None, **modules}.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module or SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    clock = Clock(TIMES)
    options = {"kernels": ["gemm_swiglu"], "sizes": [128]}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run(workspace, clock, names=["liger", "flashinfer"], **options)
    cell = cells(workspace)["gemm_swiglu 128"]
    assert cell["absent"]["liger"].startswith("computes something else: error ")
    assert cell["absent"]["flashinfer"].startswith("not installed: ")
    assert set(cell["times"]) == {"ours", "gemm"}


def plain_torch(*, halves: bool) -> libraries.Library:
    """A library of plain torch functions, with either pairing of RoPE."""

    def norm(x: Any, w: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],), w, EPS)

    def silu_mul(d: Any) -> Any:
        gate, up = d.float().chunk(2, -1)
        return (F.silu(gate) * up).to(d.dtype)

    def rope(q: Any, k: Any, table: Any) -> None:
        cos, sin = (t[:, None].float() for t in table)
        for x in (q, k):
            assert x.is_contiguous() or not halves
            left, right = (x[..., :64], x[..., 64:]) if halves else (x[..., 0::2], x[..., 1::2])
            a, b = left.float(), right.float()
            left.copy_(a * cos - b * sin)
            right.copy_(b * cos + a * sin)

    return libraries.Library(
        norm=norm,
        silu_mul=silu_mul,
        add_norm=lambda x, c, w: (x + c, norm(x + c, w)),
        table=lambda cos, sin: (cos, sin),
        rope=rope,
        halves=halves,
        cross_entropy=lambda z, y: F.cross_entropy(z.float(), y, reduction="none"),
    )


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    "name", [k for k in MEASURED.kernels if (ROOT / "generated" / k).is_dir() and k[-3:] != "bwd"]
)
def test_a_composition_computes_what_the_kernel_does(name: str, halves: bool) -> None:
    kernel = load_kernel(ROOT / "generated" / name)
    workload = make_workload(kernel, {"M": 64, "N": 384, "K": 128}, "bfloat16", "cpu")
    run = libraries.compose(workload, plain_torch(halves=halves))
    assert run is not None
    assert workload.error(run(0)) < 5e-3
    assert workload.error(run(1)) > 0.1  # the other set: the check can fail


def test_a_fixed_block_measures_partials_and_checks_their_sum() -> None:
    kernel = load_kernel(ROOT / "generated" / "gemm_residual_partial_rmsnorm")
    workload = make_workload(kernel, {"M": 64, "N": 400, "K": 128}, "bfloat16", "cpu")
    outputs = contenders.ours(workload, MEASURED.tiles[0], raw=True)(0)
    assert workload.error(outputs) < 4e-3
    assert workload.error({**outputs, "s": outputs["s"] * 1.1}) == pytest.approx(0.1, rel=0.01)


def test_what_is_launched_in_turn_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, with raw partials of the interpreter in place of a launch."""

    def launch(given: Arguments) -> None:
        program, a, b, inputs, outputs, config = given
        dtypes = {name: out.dtype for name, out in outputs.items()}
        block: Any = {"block": config.tile_n, "row_block": config.tile_m}
        for name, out in interpret(program, a, b, inputs, dtypes=dtypes, raw=True, **block).items():
            outputs[name].copy_(out)

    monkeypatch.setattr(tuner, "launch", launch)
    kernel = load_kernel(ROOT / "generated" / "gemm_residual_partial_rmsnorm")
    workload = make_workload(kernel, {"M": 64, "N": 384, "K": 128}, "bfloat16", "cpu")
    program = kernel.programs[kernel.spec.variant()]
    dtypes = {"D": torch.bfloat16, "O": torch.bfloat16, "s": torch.float32}
    run = tuner.Launched(kernel.spec, program, workload.inputs, dtypes, MEASURED.tiles[0])
    assert run.outputs["s"].shape == (64, 3)  # a partial for each block
    run.restore(0)
    assert workload.error(run(0)) < 4e-3
    assert workload.error(run(1)) > 0.1  # the other set


def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    found = [
        cell("gemm_swiglu", 4096, {"ours": 200.0, "gemm": 192.0, "compile": 220.0}),
        cell(
            "gemm_rope", 4096, {"ours": 600.0, "gemm": 570.0, "compile": 750.0, "liger": 900.0},
            notes={"liger": "without D"}, absent={"flashinfer": "not installed: No module"},
        ),
    ]  # fmt: skip
    recorded(tmp_path, "paper", dict(enumerate(found)))
    recorded(tmp_path, "paper", {}, gpu="nvidia-h100", date="2026-01-01")
    _, page, chart = write_page(tmp_path, PAPER)
    text = page.read_text()
    assert (
        "| gemm_rope (N = 12288) | 128x192 pp 2x1 | 570.0 | 600.0 | 0.950 (0.950–0.950) |" in text
    )
    assert "0.760 | 0.633 [1] |" in text  # 570 / 750 and 570 / 900
    assert "1. Liger: without D" in text
    # √(0.96 · 0.95), and over compile √(1.1 · 1.25); one of two kernels has Liger
    assert "| **geometric mean** |  |  |  | 0.955 | 0.814 | 0.633 of 1 |" in text
    assert "| 4096 | 2 | 1.173 | – |" in text
    assert "steady" not in text.lower() and "independent" not in text  # nothing was measured
    assert "`gemm_rmsnorm_rope`" in text.split("## Missing")[1]
    assert "`gemm_swiglu`" not in text.split("## Missing")[1]
    assert "- NVIDIA H200, driver 580.1, torch 2.11" in text

    svg = ET.fromstring(chart.read_text())
    named = {
        str(tip.text): rect
        for rect in svg.iter("{http://www.w3.org/2000/svg}rect")
        for tip in rect
        if tip.text
    }
    assert set(named) == {
        "swiglu, ours: 0.960", "swiglu, torch.compile: 0.873",
        "rope, ours: 0.950", "rope, torch.compile: 0.760",
    }  # fmt: skip
    high = {name: float(rect.attrib["height"]) for name, rect in named.items()}
    assert high["rope, torch.compile: 0.760"] == pytest.approx(
        high["rope, ours: 0.950"] * 0.24 / 0.05, rel=0.02
    )


def test_the_page_shows_the_steady_regime_where_it_was_measured(tmp_path: Path) -> None:
    times = {"ours": 200.0, "gemm": 192.0, "compile": 220.0}
    slower = cell("gemm_swiglu", 4096, {**times, "ours": 240.0})
    steady = {key: slower[key] for key in ("times", "of_gemm", "over")} | {"absent": {}}
    found = [cell("gemm_swiglu", 4096, times, steady=steady), cell("gemm_rope", 4096, times)]
    recorded(tmp_path, "paper", dict(enumerate(found)))
    text = write_page(tmp_path, PAPER)[1].read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    last = {row[0].strip("| "): row[-1].strip("| ") for row in rows[:4]}
    assert last["kernel"] == "ours, steady"
    assert last["gemm_swiglu (N = 12288)"] == "0.800 (0.800–0.800)"  # 192 / 240
    assert last["gemm_rope (N = 12288)"] == "–"
    assert last["**geometric mean**"] == "0.800 of 1"
    assert "| 4096 | 2 | 1.100 | – | 0.917 of 1 |" in text  # 220 / 200; 220 / 240


# Shares of cuBLAS's speed, raw, final and the paper's, as they were handed over with the rows.
MEANS = {
    "idle": {4096: (0.947, 0.944, 0.947), 8192: (1.014, 1.021, 1.005)},
    "warm": {4096: (0.958, 0.956, 0.954), 8192: (1.025, 1.035, 1.011)},
    "steady": {4096: (0.959, 0.966, 0.939), 8192: (0.988, 0.994, 0.986)},
}


def test_what_the_independent_clock_saw_is_shown_as_measured(tmp_path: Path) -> None:
    file = ROOT / "evals" / "results" / "independent-paper.json"
    measured = json.loads(file.read_text())
    path = recorded(tmp_path, "paper", {0: cell("gemm_rope", 4096, {"ours": 2.0, "gemm": 1.0})})
    shutil.copy(file, path.parent)
    text = write_page(tmp_path, PAPER)[1].read_text()
    rows = [[c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines()]
    heads = {row[0]: i for i, row in enumerate(rows) if row[1:2] == ["S"]}
    beside = [r for r in rows[heads["kernel"] + 2 :] if len(r) == 5]
    assert [r[0] for r in beside] == [*MEASURED.kernels, "**geometric mean**"] * 2
    for row in beside[:10] + beside[11:21]:
        known = next(
            r for r in measured["beside_paper"] if [r["kernel"], str(r["size"])] == row[:2]
        )
        assert row[2:] == [" / ".join(f"{x:.3f}" for x in known[g]) for g in MEANS]
    for block in (beside[:11], beside[11:22]):
        size = int(block[0][1])
        for column, regime in enumerate(MEANS, start=2):
            shares = [[float(x) for x in row[column].strip("*").split(" / ")] for row in block]
            logs = [sum(map(math.log, s)) / 10 for s in zip(*shares[:10], strict=True)]
            # Rows and means are rounded to a thousandth.
            assert shares[10] == pytest.approx([math.exp(x) for x in logs], abs=6e-4)
            assert shares[10] == pytest.approx(MEANS[regime][size], abs=1.1e-3)
    ahead = [r for r in rows if len(r) == 6 and r[1] in MEANS]
    for size, regime, raw, least, most, final in ahead:
        ours_raw, ours_final, paper = MEANS[regime][int(size)]
        assert float(raw) == pytest.approx(ours_raw / paper, abs=2e-3)
        assert float(final) == pytest.approx(ours_final / paper, abs=2e-3)
        assert float(least.split()[0]) < float(raw) < float(most.split()[0])
    assert ["4096", "warm", "1.004", "0.964 (gemm_residual_partial_rmsnorm_bwd)",
            "1.065 (gemm_partial_swiglu_bwd)", "1.002"] in ahead  # fmt: skip
    assert "slower than torch.compile at 14 of 21 shapes of up to 512 rows, and at 3 of 14" in text
    assert (
        "| gemm_residual_partial_rmsnorm_bwd | 16×4096×28672 | 128x128 pp 1x2 | 69.18 | 0.449 | "
        "0.48 | 0.48 | 245 / 100 / 22 |" in text
    )
    assert len([r for r in rows if len(r) == 8 and r[1].count("×") == 2]) == 36  # with the head


def test_the_readme_gives_the_means_of_the_records() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    results = ROOT / "evals" / "results"
    found = json.loads((results / "paper-nvidia-h200.json").read_text())["cells"].values()

    def mean(values: list[float]) -> str:
        assert len(values) == 10
        return f"{math.prod(values) ** 0.1:.2f}"

    of_gemm, over = (
        [mean([c[figure][name]["ratio"] for c in found if c["size"] == s]) for s in (4096, 8192)]
        for figure, name in (("of_gemm", "ours"), ("over", "compile"))
    )
    assert f"{of_gemm[0]} (M = N = K = 4096) and {of_gemm[1]} (8192) of the speed" in text
    assert f"are {over[0]} and {over[1]} times as fast as torch.compile" in text
    independent = json.loads((results / "independent-paper.json").read_text())
    cells = json.loads((results / "shapes-nvidia-h200.json").read_text())["cells"].values()
    few, more = (
        [c["over"]["compile"]["ratio"] for c in cells if (c["sizes"]["M"] <= 512) == is_few]
        for is_few in (True, False)
    )
    few_mean, more_mean = (f"{math.prod(r) ** (1 / len(r)):.2f}" for r in (few, more))
    assert f"{few_mean} times as fast as torch.compile at up to 512 rows" in text
    assert f"and {more_mean} times at 1024 and more" in text
    slower = [c for c in cells if c["over"]["compile"]["high"] < 1]
    assert len(slower) == 4 and f"Four of these {len(cells)} cells are slower" in text
    rows = independent["beside_paper"]
    for regime in MEANS:
        final = [mean([r[regime][1] for r in rows if r["size"] == s]) for s in (4096, 8192)]
        assert re.search(rf"{final[0]} and {final[1]} \*?{regime}\b", text), (regime, final)


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match=r"no suite 'nope', expected one of .*paper"):
        definitions.load("nope")
    with pytest.raises(CodaError, match="no record of suite paper"):
        write_page(tmp_path, PAPER)
    clock = Clock({})
    with pytest.raises(CodaError, match="no contender 'mine' in the suite"):
        run(tmp_path, clock, names=["mine"])
