"""Tests of agent/review.py: what needs a look is on top, and pages escape what they show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent.cli import app
from coda_agent.agent.judge.records import VERSIONS
from coda_agent.agent.judgement import Cell
from coda_agent.agent.review import speed
from coda_agent.agent.tables import by_head
from coda_agent.agent.workspace import Workspace, init

GENERATED = Path(__file__).parents[2] / "generated"
NAMES = ("gemm_rmsnorm_swiglu", "gemm_rope", "gemm_swiglu")


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace of three accepted kernels, of which nothing is stale."""
    monkeypatch.chdir(tmp_path)
    found = init(tmp_path)[0]
    for name in NAMES:
        shutil.copytree(GENERATED / name, found.generated / name)
        change(
            found, name, lambda e: [e["gates"][g].update(version=v) for g, v in VERSIONS.items()]
        )
    return found


def change(where: Workspace, kernel: str, edit: Callable[[dict[str, Any]], object]) -> None:
    path = where.generated / kernel / "evidence.json"
    evidence = json.loads(path.read_text("utf-8"))
    edit(evidence)
    path.write_text(json.dumps(evidence), "utf-8")


def review(*args: str) -> Any:
    result = CliRunner().invoke(app, ["show", *args])
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return json.loads(result.stdout) if "--json" in args else result.stdout


def test_what_needs_a_look_is_on_top(where: Workspace) -> None:
    change(where, "gemm_swiglu", lambda e: e["cells"][0]["over_compile"].update(low=0.97))
    program = where.generated / "gemm_rope" / "kernel.py"
    program.write_text(program.read_text("utf-8") + "\n# edited\n", "utf-8")
    (where.generated / "gemm_rmsnorm_swiglu" / "evidence.json").write_text('{"level": ')
    damaged, edited, slow, *packaged = review("--json")["kernels"]
    # What a raised gate has made stale waits for a GPU.
    assert packaged and all(k["packaged"] for k in packaged)
    assert {look.partition(":")[0] for k in packaged for look in k["look"]} <= {"stale"}
    assert [damaged["name"], edited["name"], slow["name"]] == [*NAMES]
    assert damaged["level"] == "damaged" and "not readable evidence" in damaged["look"][0]
    assert edited["look"] == ["the program was edited after it was judged"]
    (said,) = slow["look"]
    assert said.startswith("perhaps slower than torch.compile at 4096³ bfloat16: from 0.970")
    lines = review().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["kernel", *NAMES]
    assert "needs a look" in review("gemm_rmsnorm_swiglu")


def revoke(evidence: dict[str, Any]) -> None:
    evidence.update(level="revoked", passed=False)
    evidence["gates"]["numerics"]["passed"] = False


@pytest.mark.parametrize(
    ("edit", "look"),
    [
        (revoke, "revoked: failed numerics"),
        (lambda e: e.update(level="verified"), "verified only: it was never timed"),
        (lambda e: e["worst"]["gemm_rope float16"].update(ratio=0.9),
         "gemm_rope float16: error is 0.90 of its bound"),
        (lambda e: e["gates"]["compile"].update(version=1),
         "stale: compile; coda-agent verify gemm_rope"),
    ],
)  # fmt: skip
def test_evidence_that_needs_a_look(
    where: Workspace, edit: Callable[[dict[str, Any]], object], look: str
) -> None:
    assert review("gemm_rope", "--json")["look"] == []
    change(where, "gemm_rope", edit)
    assert review("gemm_rope", "--json")["look"] == [look]


def test_another_text_of_the_spec_needs_a_look(where: Workspace) -> None:
    spec = where.specs / "gemm_rope.md"
    text = (where.generated / "gemm_rope" / "spec.md").read_text("utf-8")
    spec.write_text(text + "\nMore.\n", "utf-8")
    assert review("gemm_rope", "--json")["look"] == [f"its spec.md differs from {spec}"]


def test_tables_hold_the_figures_of_the_evidence(where: Workspace) -> None:
    evidence = json.loads((where.generated / "gemm_rope" / "evidence.json").read_text("utf-8"))
    tables = review("gemm_rope", "--json")["tables"]
    times = [f"{cell['times']['ours']['median_us']:.1f}" for cell in evidence["cells"]]
    assert [row["this kernel, µs"] for row in tables["Speed"]] == times
    assert [row["gate"] for row in tables["Gates"]] == [*evidence["gates"]]
    assert "Refused tiles" not in tables and not evidence["refused_tiles"]
    assert all(time in review("gemm_rope") for time in times)


def timed(**more: Any) -> Cell:
    times = {name: {"median_us": us} for name, us in (("ours", 2.0), ("gemm", 1.0), ("compile", 3))}
    ratios = {
        "of_gemm": {"ratio": 0.5, "low": 0.4, "high": 0.6},
        "over_compile": {"ratio": 1.5, "low": 1.4, "high": 1.6},
    }
    about = {"dtype": "bfloat16", "tile": "128x128", "tflops": 700.4, "floor_us": 1.25}
    sizes = {"K": 8, "M": 4, "N": 2}
    return Cell.model_validate({**about, "sizes": sizes, "times": times, **ratios, **more})


def test_speeds_show_the_steady_regime_where_it_is_there() -> None:
    untimed = Cell.model_validate({"dtype": "float16", "sizes": {"M": 1}, "error": "not timed"})
    (row,) = by_head(speed([timed(), untimed]))
    assert row["shape"] == "4×2×8" and row["of GEMM"] == "0.500 (0.400–0.600)"
    assert "of GEMM, steady" not in row
    ratio = {"ratio": 2.0, "low": 1.0, "high": 3.0}
    steady = {"of_gemm": ratio, "over_compile": ratio}
    first, second = by_head(speed([timed(steady=steady), timed(steady={"error": "late"})]))
    assert first["of GEMM, steady"] == first["over compile, steady"] == "2.000 (1.000–3.000)"
    assert second["of GEMM, steady"] == "–"


def test_what_a_file_holds_does_not_steer_a_terminal_or_end_the_command(where: Workspace) -> None:
    change(where, "gemm_rope", lambda e: e["cells"][0]["times"].pop("gemm"))
    change(where, "gemm_rope", lambda e: e.update(author="\x1b]0;mine\x07", digests={}))
    program = where.generated / "gemm_swiglu" / "kernel.py"
    program.write_bytes(b"\xff\x1b[2J")
    (where.generated / "gemm_rmsnorm_swiglu" / "tuned.json").write_text("{")
    (damaged, torn, rope), said = review("--json")["kernels"][:3], review("gemm_rope")
    assert damaged["look"][0].startswith(f"{program.parent.parent}/gemm_rmsnorm_swiglu/tuned.json")
    assert torn["look"][0].startswith(f"{program} cannot be read as text")
    assert rope["look"][0] == "the program was edited after it was judged"
    assert "\N{REPLACEMENT CHARACTER}]0;mine" in said
    assert "\x1b" not in said + review("gemm_swiglu")


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.text = list[str](), ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_pages_escape_what_they_show(where: Workspace) -> None:
    program = where.generated / "gemm_rope" / "kernel.py"
    program.write_text(program.read_text("utf-8") + "# <script>alert(1)</script>\n", "utf-8")
    folder = where.root / "build" / "review"
    assert "index.html and 3 kernels" in review("--html", str(folder))
    assert {path.stem for path in folder.iterdir()} == {"index", *NAMES}
    page = Page(folder / "gemm_rope.html")
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.text
    assert all(name in Page(folder / "index.html").text for name in NAMES)
