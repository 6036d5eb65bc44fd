"""Reviews say what evidence and history hold, put what needs a look on top, and escape the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent import pipeline, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.judge.provenance import sha
from coda_agent.evals import svg
from coda_agent.evals.pages import label
from coda_agent.primitives import ColVector, HalfTile, RowSum, Tile, epilogue, pairs, silu
from coda_agent.primitives.errors import SpecError

GENERATED = Path(__file__).parents[2] / "generated"
NAMES = ("gemm_rmsnorm_swiglu", "gemm_rope", "gemm_swiglu")


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    """A workspace of three accepted kernels, committed."""
    monkeypatch.chdir(tmp_path)
    found = workspace.init(tmp_path)[0]
    for name in NAMES:
        shutil.copytree(GENERATED / name, found.generated / name)
    commit(found, "one")
    return found


def commit(found: workspace.Workspace, message: str) -> None:
    who = ["-c", "user.name=U", "-c", "user.email=u@example.com"]
    for args in (["add", "-A"], [*who, "commit", "-qm", message]):
        subprocess.run(["git", *args], cwd=found.root, check=True)


def change(found: workspace.Workspace, kernel: str, edit: Any) -> dict[str, Any]:
    path = found.generated / kernel / "evidence.json"
    evidence = json.loads(path.read_text("utf-8"))
    edit(evidence)
    path.write_text(json.dumps(evidence), "utf-8")
    return evidence


def with_run(found: workspace.Workspace, kernel: str) -> list[str]:
    """Gives a kernel the run of its evidence: the tiles that it says were compiled."""
    evidence = json.loads((found.generated / kernel / "evidence.json").read_text("utf-8"))
    tiles = [f"tile {i}" for i in range(25)]
    for cell in evidence["cells"]:
        for timing in cell["times"].values():
            timing["times_us"] = [timing["median_us"] * (1 + i / 99) for i in range(9)]
    reports = {
        "compile": {"kernels": [{"program": kernel, "arch": "sm_90a", "tile": t} for t in tiles]},
        "performance": {"cells": evidence["cells"]},
    }
    whole = {"gates": [{"name": name, "data": report} for name, report in reports.items()]}
    folder = found.root / "logs" / "runs" / evidence["run"] / "artifacts"
    folder.mkdir(parents=True)
    (folder / "verdict-9.json").write_text('{"gates": []}')
    (folder / "verdict-10.json").write_text(json.dumps(whole))
    return tiles


def review(*args: str) -> Any:
    result = CliRunner().invoke(app, ["review", *args])
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return json.loads(result.stdout) if "--json" in args else result.stdout


def test_what_needs_a_look_is_on_top(where: workspace.Workspace) -> None:
    def slow(evidence: dict[str, Any]) -> None:
        evidence["cells"][0]["over_compile"].update(ratio=0.98, low=0.97)

    change(where, "gemm_swiglu", slow)
    program = where.generated / "gemm_rope" / "kernel.py"
    program.write_text(program.read_text("utf-8") + "\n# edited\n", "utf-8")
    (where.generated / "gemm_rmsnorm_swiglu" / "evidence.json").write_text('{"level": ')
    kernels = review("--json")["kernels"]
    assert [k["kernel"] for k in kernels] == ["gemm_rmsnorm_swiglu", "gemm_rope", "gemm_swiglu"]
    damaged, edited, slower = kernels
    assert damaged["level"] == "damaged" and "not readable evidence" in damaged["look"][0]
    assert edited["look"][0] == "the program was edited after it was judged"
    assert edited["stale"][0] == "candidate" and "spec" not in edited["stale"]
    assert slower["look"][0].startswith("perhaps slower than torch.compile at 4096³ bfloat16")
    lines = review().splitlines()
    assert len(lines) == 4 and [line.split()[0] for line in lines[1:]] == [
        k["kernel"] for k in kernels
    ]


def test_evidence_of_this_very_judge_is_not_stale(where: workspace.Workspace) -> None:
    from coda_agent.agent.judge.provenance import digests
    from coda_agent.agent.judge.records import VERSIONS
    from coda_agent.specs import load_spec

    kernel = where.kernel("gemm_swiglu")
    spec = load_spec(kernel.spec)
    now = digests(spec, kernel.program.read_text("utf-8"))

    def today(evidence: dict[str, Any]) -> None:
        evidence["digests"] = now
        for name, gate in evidence["gates"].items():
            gate["version"] = VERSIONS[name]

    change(where, "gemm_swiglu", today)
    assert review("gemm_swiglu", "--json")["stale"] == []
    assert review("gemm_swiglu", "--json")["look"] == []
    (where.specs / "gemm_swiglu.md").write_text(spec.text + "\nMore.\n", "utf-8")
    assert review("gemm_swiglu", "--json")["look"] == ["stale: specs/ holds another text"]

    def older(evidence: dict[str, Any]) -> None:
        evidence["gates"]["numerics"]["version"] -= 1

    change(where, "gemm_swiglu", older)
    found = review("gemm_swiglu", "--json")
    assert found["look"][1:] == ["stale: numerics; coda-agent verify gemm_swiglu judges it again"]
    assert found["stale"] == ["numerics"]
    assert [g["stale"] for g in found["tables"]["Gates"]] == ["no", "no", "yes", "no"]


def test_changes_since_the_last_version(where: workspace.Workspace) -> None:
    program = where.generated / "gemm_swiglu" / "kernel.py"
    text = program.read_text("utf-8").replace("gate, up = pairs(", "x, up = pairs(")
    text = text.replace("swiglu(gate, up)", "swiglu(x, up)") + "# more\n"
    program.write_text(text, "utf-8")

    def faster(evidence: dict[str, Any]) -> None:
        evidence["digests"]["candidate"] = sha(text)
        evidence["level"] = "verified"
        for cell in evidence["cells"]:
            cell["of_gemm"]["ratio"] *= 1.1 if cell["dtype"] == "float16" else 0.9

    change(where, "gemm_swiglu", faster)
    commit(where, "two")
    found = review("gemm_swiglu", "--json")
    since = found["since"]
    assert (since["added"], since["removed"]) == (3, 2)
    assert since["level"] == ["accepted", "verified"] and since["digests"] == ["candidate"]
    moved = {f["dtype"]: f["of_gemm"][1] / f["of_gemm"][0] for f in since["speed"]}
    assert moved == pytest.approx({"bfloat16": 0.9, "float16": 1.1})
    text = review("gemm_swiglu")
    assert "+3 −2 lines, accepted to verified, of GEMM -10.0 … +10.0 %" in text
    assert "+# more" in text and text.rstrip().endswith("coda-agent verify gemm_swiglu")
    assert "verified only: never timed" in text
    assert len(found["tables"]["Versions"]) == 2


def test_age_and_sizes() -> None:
    assert label({"K": 64, "M": 4096, "N": 128}) == "4096×128×64"
    assert label({"K": 64, "M": 64, "N": 64}) == "64³"


@pytest.mark.parametrize("commits", [True, False])
def test_verify_all(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    def verify(_: object, name: str, *args: object, **kwargs: object) -> pipeline.Outcome:
        if name == "gemm_rope":
            raise SpecError("the spec\nis gone")
        passed = name == "gemm_swiglu"
        bad = SimpleNamespace(name="numerics", findings=[SimpleNamespace(message="O is wrong")])
        verdict: Any = SimpleNamespace(
            passed=passed, level="proved", gates=[bad], model_dump=lambda mode: {}
        )
        level = "accepted" if passed else "revoked" if commits else None
        return pipeline.Outcome(name, passed, level, "accepted", None, None, Path(), verdict)

    monkeypatch.setattr(pipeline, "verify", verify)
    args = ["verify", "--all"] + ["--no-commit"] * (not commits)
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    word = "revoked" if commits else "refused"
    first, *lines = result.stdout.splitlines()
    assert "none raised above proved" in first
    assert lines == [
        f"gemm_rmsnorm_swiglu: {word}: numerics: O is wrong (run: .)",
        "gemm_rope: cannot be judged: the spec is gone",
        "gemm_swiglu: accepted, proved here, unchanged",
        "1 of 3 kernels stand",
    ]


def test_pages_hold_what_was_recorded_and_escape_it(where: workspace.Workspace) -> None:
    evil = "<script>alert(1)</script>"
    change(where, "gemm_rope", lambda e: e.update(author=evil))
    spec = where.generated / "gemm_rope" / "spec.md"
    spec.write_text(re.sub("summary: .*", f"summary: {evil}", spec.read_text("utf-8")), "utf-8")
    program = where.generated / "gemm_rope" / "kernel.py"
    program.write_text(program.read_text("utf-8") + f"# {evil}\n", "utf-8")
    tiles = with_run(where, "gemm_rmsnorm_swiglu")
    review("--html", "--out", "pages")
    pages = {p.stem: p.read_text("utf-8") for p in Path("pages").iterdir()}
    assert sorted(pages) == [*NAMES[:2], NAMES[2], "index"]
    assert not any("<script" in page for page in pages.values())
    assert pages["gemm_rope"].count("&lt;script&gt;alert(1)") >= 4  # author, summary, text, diff
    page = pages["gemm_rmsnorm_swiglu"]
    evidence = json.loads((where.generated / "gemm_rmsnorm_swiglu" / "evidence.json").read_text())
    for cell in evidence["cells"]:
        for times in cell["times"].values():
            assert f"{times['median_us']:.1f}" in page
    for tile in evidence["refused_tiles"]:
        assert tile["tile"] in page and tile["fault"] in page
    for worst in evidence["worst"].values():
        assert f"{worst['ratio']:.2f}" in page and f"{1 - worst['ratio']:.0%}" in page
    assert evidence["date"] in page and evidence["machine"]["gpu"] in page
    assert page.count(">sm_90a<") == len(tiles) and all(tile in page for tile in tiles)
    assert "Σ_k A[m, k] · B[n, k]" in page and "coda-agent verify gemm_rmsnorm_swiglu" in page
    assert evidence["digests"]["spec"] in page and page.count("<svg") == 5
    shutil.rmtree(where.root / "logs" / "runs")
    review("--html", "--out", "pages")
    page = Path("pages/gemm_rmsnorm_swiglu.html").read_text("utf-8")
    assert page.count("<svg") == 1 and ">sm_90a<" not in page  # the rest is told by evidence


class Prose(HTMLParser):
    """Collects the text of each element of a page's `div class="prose"`, and what leads elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(
            page[page.index('<div class="prose">') : page.index("<details><summary>Reference")]
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.found.append((tag, ""))
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag, text = self.found[-1]
        self.found[-1] = tag, text + data


def test_the_mathematics_of_a_page_are_set_and_not_raw(where: workspace.Workspace) -> None:
    review("--html", "--out", "pages")
    page = Path("pages/gemm_rmsnorm_swiglu.html").read_text("utf-8")
    prose = Prose(page)
    assert prose.open == [] and prose.attributes == [("class", "prose")]
    titles = [(tag, text.strip()) for tag, text in prose.found if tag in ("h3", "h4")]
    assert titles == [
        ("h3", "GEMM with a delayed RMSNorm and SwiGLU"),
        ("h4", "Mathematics"), ("h4", "Why fused"), ("h4", "Where"), ("h4", "Rounding"),
    ]  # fmt: skip
    at = [tag for tag, _ in prose.found].index("pre")
    assert prose.found[at + 1] == (
        "code",
        "D[m, n] = r[m] · Σ_k A[m, k] · B[n, k]\n"
        "G[m, j] = D[m, 2j],   U[m, j] = D[m, 2j + 1]\n"
        "O[m, j] = silu(G[m, j]) · U[m, j],   silu(x) = x / (1 + exp(−x))\n\n",
    )
    assert prose.found[at + 3][0] == "code" and prose.found[at + 3][1].startswith("r (M,) is the")
    assert not {"h1", "h2"} & {tag for tag, _ in prose.found}
    assert "## Mathematics" not in page


HOSTILE = """
###### Deep

<script>alert(1)</script> <b onclick="alert(1)">x</b>

<img src=x onerror=alert(1)>

[click](javascript:alert(1)) [there](https://example.com) <https://example.com> ![i](https://example.com/i.png)
[ref] &lt;script&gt;alert(1)&lt;/script&gt; `<i>code</i>`

[ref]: javascript:alert(1) "x"

    <script>formula</script>

```html" onclick="alert(1)
<iframe src="https://example.com"></iframe>
```
"""


def test_the_prose_of_a_spec_brings_no_html_and_no_links(where: workspace.Workspace) -> None:
    spec = where.generated / "gemm_swiglu" / "spec.md"
    text = spec.read_text("utf-8").replace("```python reference", HOSTILE + "\n```python reference")
    spec.write_text(text, "utf-8")
    review("--html", "--out", "pages")
    prose = Prose(Path("pages/gemm_swiglu.html").read_text("utf-8"))
    assert {tag for tag, _ in prose.found} <= {
        "div",
        "h3",
        "h4",
        "h6",
        "p",
        "pre",
        "code",
        "em",
        "strong",
    }
    assert {name for name, _ in prose.attributes} <= {"class"}
    shown = "".join(text for _, text in prose.found)
    for raw in ("<script>alert(1)</script>", '<b onclick="alert(1)">x</b>', "<img src=x onerror",
                "[click](javascript:alert(1))", "[ref]: javascript:alert(1)", "![i](https://example.com/i.png)",
                "<script>formula</script>", "<i>code</i>", "<iframe src="):  # fmt: skip
        assert raw in shown, raw


@epilogue(D=Tile, O=HalfTile, s=RowSum)
def drawn(acc, r: ColVector):  # type: ignore[no-untyped-def]
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": silu(gate) * up, "s": 0.5 * d * d}


def test_dataflow_shows_every_node_once_and_nothing_overlaps() -> None:
    picture = ET.fromstring(svg.dataflow(drawn, {"D": "bfloat16", "r": "float32"}))
    boxes = [tuple(float(b.get(k, "")) for k in ("x", "y", "width", "height"))
             for b in picture.findall("rect")]  # fmt: skip
    computed = [n for n in drawn.graph.nodes if n.op != "const"]
    assert len(boxes) == len(computed) + 3
    for i, (x, y, w, h) in enumerate(boxes):
        assert all(x + w <= u or u + v <= x or y + h <= p or p + q <= y
                   for u, p, v, q in boxes[:i])  # fmt: skip
        assert x >= 0 and x + w <= float(str(picture.get("viewBox")).split()[2])
    texts = [t.text for t in picture.findall("text")]
    assert {"r: ColVector", "A Bᵀ", "O: HalfTile", "s: RowSum", "(M, N/2)"} <= set(texts)
    assert "0.5 × ·" in texts or "· × 0.5" in texts
    thick = {p.get("stroke-width") for p in picture.findall("path")}
    assert thick == {"3", "2", "1"}  # tiles, halves, and the vector
    assert (
        len(picture.findall("path"))
        == sum(len({a for a in n.args if drawn.graph.nodes[a].op != "const"}) for n in computed) + 3
    )


def test_strips_show_every_round_in_proportion() -> None:
    times = {"a": {"times_us": [10.0, 20.0, 30.0], "median_us": 20.0},
             "b": {"times_us": [50.0], "median_us": 50.0}}  # fmt: skip
    picture = ET.fromstring(svg.strips("t", times))
    ticks = [p for p in picture.findall("path") if "tick" in str(p.get("class"))]
    x = [[float(v) for v in re.findall(r"M([\d.]+)", str(t.get("d")))] for t in ticks]
    assert [len(row) for row in x] == [3, 1]
    assert x[1][0] == 570 and x[0][0] == 104  # the ends of the axis
    assert x[0][1] - x[0][0] == pytest.approx((x[1][0] - x[0][0]) / 4, abs=0.11)


def test_colours_can_be_read() -> None:
    """WCAG 2.2: text 4.5 to 1 on both backgrounds, graphics 3 to 1."""
    css = (GENERATED.parent / "evals" / "templates" / "base.html.j2").read_text("utf-8")
    themes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(themes) == 2

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        for name, least in {"fg": 4.5, "dim": 4.5, "good": 4.5, "warn": 4.5, "bad": 4.5,
                            "link": 4.5, **{f"s{i}": 3.0 for i in range(6)}}.items():  # fmt: skip
            for behind in ("bg", "soft"):
                a, b = sorted((light(colours[name]), light(colours[behind])))
                assert (b + 0.05) / (a + 0.05) >= least, (name, behind)
