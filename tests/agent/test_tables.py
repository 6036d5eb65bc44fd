"""Tests of agent/tables.py: the same rows for a terminal, as Markdown and as data."""

from typing import Any

from coda_agent.agent.tables import by_head, columns, machine_text, markdown, shape_text, speed


def test_rows_are_aligned_escaped_and_named() -> None:
    rows = [("kernel", "why"), ("a_b", "x | <b>\n`y`"), ("longer", "")]
    assert columns(rows).splitlines()[0] == "kernel  why"
    assert columns(rows).splitlines()[-1] == "longer"
    assert markdown(rows).splitlines() == [
        "| kernel | why |",
        "|---|---|",
        r"| a\_b | x \| &lt;b&gt; \`y\` |",
        "| longer |  |",
    ]
    assert by_head(rows)[0] == {"kernel": "a_b", "why": "x | <b>\n`y`"}


def timed(**more: Any) -> dict[str, Any]:
    times = {name: {"median_us": us} for name, us in (("ours", 2.0), ("gemm", 1.0), ("compile", 3))}
    ratios = {
        "of_gemm": {"ratio": 0.5, "low": 0.4, "high": 0.6},
        "over_compile": {"ratio": 1.5, "low": 1.4, "high": 1.6},
    }
    sizes = {"K": 8, "M": 4, "N": 2}
    about = {"dtype": "bfloat16", "tile": "128x128", "tflops": 700.4, "floor_us": 1.25}
    return {**about, "sizes": sizes, "times": times, **ratios, **more}


def test_speeds_show_the_steady_regime_where_it_is_there() -> None:
    (row,) = by_head(speed([timed(), {"dtype": "float16", "error": "not timed"}]))
    assert row["shape"] == "4×2×8" and row["of GEMM"] == "0.500 (0.400–0.600)"
    assert "of GEMM, steady" not in row
    steady = {"of_gemm": {"ratio": 2.0, "low": 1.0, "high": 3.0}, "over_compile": None}
    first, second = by_head(speed([timed(steady=steady), timed(steady={"error": "late"})]))
    assert first["of GEMM, steady"] == "2.000 (1.000–3.000)"
    assert first["over compile, steady"] == second["of GEMM, steady"] == "–"


def test_shapes_and_machines_have_short_names() -> None:
    assert shape_text({"K": 4096, "M": 4096, "N": 4096}) == "4096³"
    gpu = {"name": "NVIDIA H200", "driver_version": "580.1"}
    about = {"gpu": gpu, "cuda": "13.0", "packages": {"torch": "2.11", "liger-kernel": None}}
    assert machine_text(about) == "NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11"
    assert machine_text({"device": "cpu"}) == "cpu"
