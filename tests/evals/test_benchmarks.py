"""The benchmark page says what the evidence files say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coda_agent.evals.review import write_benchmarks


def times(median: float) -> dict:
    return {"median_us": median, "interval_us": [median, median], "rounds": 50}


EVIDENCE = {
    "kernel": "gemm_x",
    "level": "accepted",
    "machine": {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "cuda": "13.0",
        "packages": {"torch": "2.11.0"},
    },
    "gates": {"numerics": {"passed": True}, "performance": {"passed": True}},
    "refused_tiles": [
        {
            "gate": "numerics",
            "program": "gemm_x",
            "dtype": "bfloat16",
            "tile": "192x192 coop 2x1",
            "fault": "O is wrong",
        }
    ],
    "cells": [
        {
            "dtype": "bfloat16",
            "sizes": {"M": 4096, "N": 4096, "K": 4096},
            "times": {"ours": times(180.0), "gemm": times(171.0), "compile": times(207.0)},
            "of_gemm": {"ratio": 0.95, "low": 0.94, "high": 0.96},
            "over_compile": {"ratio": 1.15, "low": 1.14, "high": 1.16},
            "tflops": 763.4,
            "floor_us": 150.0,
            "tile": "128x192 pp 2x1",
        },
        {"dtype": "float16", "sizes": {"M": 1}, "error": "no tile"},
    ],
}


def test_rows_machines_and_refused_tiles(tmp_path: Path) -> None:
    folder = tmp_path / "generated" / "gemm_x"
    folder.mkdir(parents=True)
    (folder / "evidence.json").write_text(json.dumps(EVIDENCE))
    proved = {
        **EVIDENCE,
        "kernel": "gemm_y",
        "level": "proved",
        "gates": {},
        "cells": [],
        "refused_tiles": [],
    }
    (tmp_path / "generated" / "gemm_y").mkdir()
    (tmp_path / "generated" / "gemm_y" / "evidence.json").write_text(json.dumps(proved))
    page = write_benchmarks(tmp_path).read_text()
    assert (
        "| gemm_x | bfloat16 | 4096³ | 180.0 | 171.0 | 207.0 | 0.950 (0.940–0.960) | "
        "1.150 (1.140–1.160) | 763 | 150.0 | 128x192 pp 2x1 |" in page
    )
    assert "median of 50 rounds" in " ".join(page.split())
    assert "- NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11.0" in page
    assert "- gemm_x (bfloat16), tile 192x192 coop 2x1: O is wrong" in page
    assert "- gemm_y: proved, not benchmarked" in page
    assert "| float16" not in page
    fewer = json.loads(json.dumps(EVIDENCE))
    fewer["cells"][0]["times"]["ours"]["rounds"] = 38
    (folder / "evidence.json").write_text(json.dumps({**fewer, "kernel": "gemm_x"}))
    (tmp_path / "generated" / "gemm_y" / "evidence.json").write_text(json.dumps(EVIDENCE))
    assert "median of 38 to 50 rounds." in " ".join(write_benchmarks(tmp_path).read_text().split())


def test_the_steady_regime_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    evidence = json.loads(json.dumps(EVIDENCE))
    timed = evidence["cells"]
    timed.insert(1, {**timed[0], "dtype": "float16", "steady": {"error": "the device waited"}})
    file = tmp_path / "generated" / "gemm_x" / "evidence.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(evidence))
    text = write_benchmarks(tmp_path).read_text()
    assert ", steady |" not in text and "no evidence here has it yet" in text
    timed[0]["steady"] = {
        "of_gemm": {"ratio": 0.9, "low": 0.88, "high": 0.91},
        "over_compile": {"ratio": 1.2, "low": 1.19, "high": 1.22},
    }
    file.write_text(json.dumps(evidence))
    text = write_benchmarks(tmp_path).read_text()
    assert "| of GEMM, steady | over compile, steady | TFLOP/s |" in text
    ratios = "0.950 (0.940–0.960) | 1.150 (1.140–1.160)"
    assert f"| {ratios} | 0.900 (0.880–0.910) | 1.200 (1.190–1.220) | 763 |" in text
    assert f"| {ratios} | – | – | 763 |" in text
    assert "the spread of three such streams" in text


def test_warm_ratios_are_as_near_a_stream_without_a_pause_as_pages_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
    head, *lines = text[text.index("| kernel | S | idle |") :].split("\n\n")[0].splitlines()
    assert head == "| kernel | S | idle | 2 products | 8 products | no pause |" and len(lines) == 9
    rows = [[float(x) for x in line.strip("| ").split(" | ")[2:]] for line in lines[1:]]
    assert max(abs(warm - stream) for *_, warm, stream in rows) == pytest.approx(0.02, abs=5e-4)
    assert max(stream - idle for idle, *_, stream in rows) == pytest.approx(0.08, abs=5e-3)


def test_without_evidence_it_says_so(tmp_path: Path) -> None:
    assert "No evidence file holds a benchmark yet" in write_benchmarks(tmp_path).read_text()
