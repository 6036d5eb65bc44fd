"""Tests of evals/tables.py: the page says what the records say, and the committed one is of today."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.tables import by_head
from coda_agent.evals import tables
from coda_agent.evals.cases import Case, Setup, Suite
from coda_agent.evals.cells import FOLDER, Cell, append, card, read
from coda_agent.primitives.errors import MachineError
from tests.evals.small import ROOT
from tests.evals.test_cells import cell

CASES = [Case(name, ("ours",), lambda *_: Setup({})) for name in ("b 1", "a 1", "a 2")]
SUITE = Suite("tiny", "", CASES, group=lambda case: case[0])


def timed(case: str, regime: str = "warm", **ratios: float) -> list[Cell]:
    """Cells of a case that ours takes 100 us for; each other one so many times as long."""
    about = {"regime": regime, "error": 0.01, "error_ratio": 0.5, "peak_mib": 7}
    found = [
        cell(case, time_us=100.0, ratio=1.0, ratio_interval=(1.0, 1.0), note="a tile", **about)
    ]
    for name, ratio in ratios.items():
        interval = (ratio - 0.1, ratio + 0.1)
        found.append(
            cell(case, name, time_us=1.0, ratio=ratio, ratio_interval=interval, regime=regime)
        )
    return found


CELLS = [*timed("a 1", gemm=0.5, compile=1.25), *timed("a 2", compile=0.8), *timed("b 1", gemm=2.0),
         *timed("a 1", "steady", compile=1.5)]  # fmt: skip


def test_means_are_geometric_and_say_of_how_many() -> None:
    rows = {(row[""], row["regime"]): row for row in by_head(tables.means(SUITE, CELLS))}
    assert rows["a", "warm"] == {"": "a", "regime": "warm", "cases": 2, "over gemm": "0.500 (1)",
                                 "over compile": "1.000"}  # fmt: skip
    assert rows["a", "steady"]["over compile"] == "1.500"
    assert (rows["b", "warm"]["over gemm"], rows["b", "warm"]["over compile"]) == ("2.000", "–")
    errors = [cell("a 1", "ours", regime="untimed", error=0.01, error_ratio=0.5),
              cell("a 2", "ours", regime="untimed", error=0.01, error_ratio=2.0),
              cell("a 1", "eager", regime="untimed", error=0.02, error_ratio=1.0)]  # fmt: skip
    (row,) = by_head(tables.means(SUITE, errors))
    assert (
        row["error, of eager: ours"] == "1.000 (0.500–2.000)" and row["error: eager"] == "2.00e-02"
    )


def test_each_case_is_a_row_with_its_commit() -> None:
    rows = {(row["case"], row["regime"]): row for row in by_head(tables.detail(CELLS))}
    assert rows["a 1", "warm"] == {
        "case": "a 1", "regime": "warm", "ours, µs": "100.0", "over gemm": "0.500 (0.400–0.600)",
        "over compile": "1.250 (1.150–1.350)", "error": "1.0e-02", "of eager": "0.500",
        "peak MiB": "ours 7", "ours ran": "a tile", "commit": "abc1234",
    }  # fmt: skip
    assert rows["a 2", "warm"]["over gemm"] == "–"
    plain = by_head(tables.detail([cell("a", time_us=1.0)]))
    assert plain == [{"case": "a", "regime": "warm", "ours, µs": "1.0", "commit": "abc1234"}]


def test_the_slowest_are_named_and_counted() -> None:
    rows, count = tables.slowest(CELLS)
    assert count == "1 of 2 cells" and [row[0] for row in rows[1:]] == ["a 1", "a 2"]


def test_what_others_leave_out_or_lack_is_said() -> None:
    cells = [*timed("a 1"), cell("a 1", "liger", note="without D"),
             cell("a 2", "liger", note="without D"), cell("a 1", "quack", absent="no tile")]  # fmt: skip
    assert tables.notes(cells) == ["liger: without D (2 cases)", "quack: absent: no tile (a 1)"]


def test_a_page_has_what_is_recorded(tmp_path: Path) -> None:
    append(tmp_path / FOLDER / "fuse.jsonl", timed("gelu", eager=2.0))
    append(tmp_path / FOLDER / "fuse.jsonl", timed("gelu", eager=1.5))
    text = tables.write(tmp_path).read_text()
    fuse = text.partition("## fuse\n")[2].partition("## gradients")[0]
    assert "Measured 2026-11-25 on a GPU." in fuse and "| forward | warm | 1 | 1.500 |" in fuse
    assert text.count("Not measured yet.") == 7 and "## kernels" not in text


def test_each_card_has_its_own_tables(tmp_path: Path) -> None:
    """Cells of a second GPU neither replace those of the first nor join their means."""
    cells = [
        cell.model_copy(update={"machine": f"{name}, driver 1"})
        for name, ratio in (("H200", 2.0), ("H100", 1.5))
        for cell in timed("gelu", eager=ratio)
    ]
    append(tmp_path / FOLDER / "fuse.jsonl", cells)
    text = tables.write(tmp_path).read_text()
    fuse = text.partition("## fuse\n")[2].partition("## gradients")[0]
    assert fuse.index("### H100") < fuse.index("| 1.500 |") < fuse.index("### H200")
    assert fuse.index("### H200") < fuse.index("| 2.000 |")


def test_the_committed_page_is_of_the_records(tmp_path: Path) -> None:
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    said = "`coda-agent bench --table` writes it"
    assert tables.write(tmp_path).read_text() == (ROOT / tables.PAGE).read_text(), said


def test_a_figure_is_drawn_or_what_it_needs_is_said(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MachineError, match="a figure needs matplotlib"):
            tables.draw(CELLS, path)
    else:
        assert "<svg" in tables.draw(CELLS, path).read_text()


def test_the_readme_gives_the_means_of_the_records() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())

    def mean(suite: str, chosen: Any) -> str:
        found = [
            c.ratio
            for c in read(ROOT / FOLDER / f"{suite}.jsonl", Cell).values()
            if chosen(c) and card(c.machine) == "NVIDIA H100 80GB HBM3"
        ]
        return f"{math.prod(r for r in found if r) ** (1 / len(found)):.2f}"

    def paper(contender: str, size: int) -> str:
        return mean("paper", lambda c: (c.contender, c.regime) == (contender, "warm")
                    and c.case.endswith(f" {size}"))  # fmt: skip

    gemm, compiled = ([paper(name, size) for size in (4096, 8192)] for name in ("gemm", "compile"))
    assert (
        f"{gemm[0]} of the speed of the bare cuBLAS product at 4096, and {gemm[1]} at 8192" in text
    )
    assert f"{compiled[0]} and {compiled[1]} times as fast as torch.compile" in text


def test_the_readmes_picture_shows_the_recorded_step() -> None:
    picture = (ROOT / "docs/step.svg").read_text()
    found = [c for c in read(ROOT / FOLDER / "layers.jsonl", Cell).values()
             if (c.case, card(c.machine)) == ("train-1b of 4 sequences", "NVIDIA H100 80GB HBM3")]  # fmt: skip
    assert len(found) == 4
    for one in found:
        assert one.time_us and one.peak_mib
        time, memory = one.time_us / 1e3, f"{one.peak_mib / 1024:.1f}"
        assert {f">{time:.1f}<", f">{memory}<"} <= {*re.findall(r">[\d.]+<", picture)}


def test_the_readme_tabulates_models_of_the_records(tmp_path: Path) -> None:
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(re.sub(r"(?s)\n\|.model.*?\n<!--", "\n\n<!--", text))
    assert tables.write_models(tmp_path).read_text() == text
    step, *_ = (x for x in text.splitlines() if x.startswith("| Llama-3.2-1B, training"))
    found = {c.contender: c for c in read(ROOT / FOLDER / "layers.jsonl", Cell).values()
             if (c.case, card(c.machine)) == ("train-1b of 4 sequences", "NVIDIA H100 80GB HBM3")}  # fmt: skip
    ours, fair, plain = (found[x] for x in ("ours", "compile, mask folded", "compile"))
    assert ours.peak_mib and fair.peak_mib and fair.ratio and plain.ratio
    assert f"| {fair.ratio:.2f} | {ours.peak_mib / fair.peak_mib:.2f} | H100 |" in step
    assert f"takes torch.compile {plain.ratio:.2f} times as long as ours" in " ".join(text.split())
