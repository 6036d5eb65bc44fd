"""The leaderboard: verdicts make the scores, ties are ties, pages stand alone and fit a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent import judge, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.judge import provenance
from coda_agent.agent.judge.records import VERSIONS, GateResult, Ratio, Verdict
from coda_agent.agent.judgement import Cell, Gate, Judgement, Machine, Median
from coda_agent.agent.state import Spent
from coda_agent.evals import comparison, metrics
from coda_agent.evals.definitions import Suite
from coda_agent.evals.leaderboard import Board, boards
from coda_agent.evals.leaderboard_page import Overview
from coda_agent.evals.record_files import file_name, read_records, write_definition, write_record
from coda_agent.evals.records import Audit, RunRef, SpecRef, Step, SuiteRef, TrialRecord

EVIL = "<script>alert('x')</script>"
SPECS = ("gemm_swiglu", "gemm_rope", "gemm_rmsnorm", "gemm_bias_act",
         "gemm_rmsnorm_swiglu", "gemm_rmsnorm_rope", "gemm_partial_cross_entropy")  # fmt: skip
SUITE = Suite(name="tiny", title="", specs=SPECS, goal="accepted")


def digest(text: str) -> str:
    return provenance.sha(text)


def trial(spec: str, author: str, number: int = 1, *, speed: float = 1.0, **changes: Any) -> Any:
    """A record; `speed` beside the GEMM, 0 for a refusal."""
    program = changes.pop("program", f"# {author} {number}\n")
    level = "accepted" if speed else None
    digests = {"spec": digest(spec), "candidate": digest(program)}
    cells = [
        Cell(dtype=t, sizes={"M": 4096, "N": 4096, "K": 4096}, times={"ours": Median(median_us=100 / speed)}, floor_us=50,
             of_gemm=Ratio(ratio=speed * x, low=0.1, high=9),
             over_compile=Ratio(ratio=2 * speed * x, low=0.1, high=9), tile="t")
        for t, x in (("bfloat16", 0.5), ("float16", 2.0))
        if speed
    ]  # fmt: skip
    verdict = Judgement(passed=bool(speed), level=level, digests=digests, cells=tuple(cells),
                        gates={"numerics": Gate(passed=bool(speed))})  # fmt: skip
    spent = Spent(usd=0.5, tokens=1000, wall_s=60, gpu_s=5)
    steps = [Step(attempt=2, submitted=True, level="accepted", roofline=speed / 2,
                  **spent.model_dump())]  # fmt: skip
    start = datetime(2026, 11, 20, tzinfo=UTC)
    name = f"run-{spec}-{number}"
    fields: dict[str, Any] = dict(
        suite=SuiteRef(name=SUITE.name, digest=SUITE.digest),
        spec=SpecRef(name=spec, digest=digest(spec), level="compose"), author=author, trial=number,
        goal="accepted", started=start, finished=start + timedelta(minutes=1),
        outcome=level or "refused", verdict=verdict, program=program, attempts=2, spent=spent,
        steps=tuple(steps) if speed else (), machine=Machine(device="cuda", gpu="NVIDIA H200"),
        run=RunRef(id=name, log=f"logs/runs/{name}/events.jsonl"),
    )  # fmt: skip
    return TrialRecord(**{**fields, **changes})


def board(records: Iterable[TrialRecord], stale: Any = lambda _: []) -> Board:
    (found,) = boards(records, stale)
    return found


def rows(found: Board) -> dict[str, dict[str, str]]:
    head, *rest = ([str(cell) for cell in row] for row in found.ranking)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rest}


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    monkeypatch.chdir(tmp_path)
    return workspace.init(tmp_path)[0]


def store(where: workspace.Workspace, records: Iterable[TrialRecord]) -> Path:
    folder = where.root / "evals" / "results" / "trials" / SUITE.name
    write_definition(folder, SUITE.definition)
    for record in records:
        write_record(folder, record)
    return folder


def run(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["eval", *args])
    assert result.exit_code == code, (result.stdout, result.stderr)
    said = result.stderr if code else result.stdout
    return json.loads(said) if "--json" in args else said


def test_ranks_follow_the_interval_of_the_difference() -> None:
    records = [trial(s, a, n, speed=v and x) for s in SPECS for a, n, v, x in (
        ("best", 1, 1, 1.2), ("best", 2, 1, 1.2), ("even", 1, 1, 0.6), ("even", 2, 1, 0.6),
        ("worst", 1, 0, 1), ("worst", 2, int(s == SPECS[0]), 1))]  # fmt: skip
    found = board(records)
    table = rows(found)
    assert {a: (r["rank"], r["by speed"]) for a, r in table.items()} == {
        "best": ("1", "1"), "even": ("1", "2"), "worst": ("3", "3")}  # fmt: skip
    assert list(table) == ["best", "even", "worst"]
    assert found.first.startswith("Tied for first: best, even.")
    assert table["worst"]["solved@1"].startswith("0.07 (0.00–")  # 1 of 14
    assert table["worst"]["pass@k"] == "0.14 of 2"  # 1 of 7 specs
    assert table["best"]["roofline score"] == "0.60 (0.60–0.60)"
    assert table["best"]["faster than compile"] == "1.00" and table["even"]["than GEMM"] == "0.00"
    assert table["worst"]["USD"] == "7.00" and table["best"]["USD"] == "0.50"  # 14 × 0.50 for 1
    only = board([r for r in records if r.author != "even"])
    assert only.first == "best solves most."
    untimed = trial(SPECS[0], "a", speed=0.0)
    assert (
        rows(board([untimed]))["a"]["roofline score"]
        == "–"
        == rows(board([untimed]))["a"]["by speed"]
    )
    assert board(records[:2]).first == "best is the only author."
    few = board([trial(s, a, speed=x) for s in SPECS[:2] for a, x in (("a", 0.9), ("z", 1.0))])
    assert list(few.ranks.items()) == [("z", (1, 1)), ("a", (1, 1))]  # tied; the better mean first


def test_the_first_page_is_authors_by_suites(where: workspace.Workspace) -> None:
    def harder(record: TrialRecord) -> TrialRecord:
        spec = record.spec.model_copy(update={"level": "extend"})
        return record.model_copy(update={"spec": spec})

    old = SuiteRef(name="tiny", digest=digest("old"))
    hidden = Spent(usd=None, tokens=None, wall_s=60, received=9000)
    records = [
        trial("gemm_rope", "composer", speed=0.5),
        harder(trial("gemm_swiglu", "composer", speed=0.0)),
        trial("gemm_rope", "composer", 2, suite=old, started=datetime(2026, 11, 1, tzinfo=UTC),
              finished=datetime(2026, 11, 2, tzinfo=UTC)),
        trial("gemm_rope", "composer", machine=Machine(device="cpu"), goal="proved"),
        trial("gemm_rope", "replay:a"), trial("gemm_rope", "replay:b", speed=2.0),
        harder(trial("gemm_swiglu", "mcp:some agent", spent=hidden)),
    ]  # fmt: skip
    folder = store(where, [r for r in records if r.suite.digest == SUITE.digest])
    (where.root / "evals" / "suites").mkdir()
    (where.root / "evals" / "suites" / "tiny.toml").write_text(
        'title = "A few"\nspecs = ["gemm_rope"]\ngoal = "accepted"\n'
    )
    overview = run("leaderboard", "--json")["overview"]
    assert overview["matrix"] == [
        {"author": "composer", "tiny, CPU": "1/1, 1.00× GEMM (compose 1/1)",
         "tiny, GPU": "1/2, 0.50× GEMM (compose 1/1, extend 0/1)"},
        {"author": "mcp:some agent", "tiny, CPU": "–", "tiny, GPU": "1/1, 1.00× GEMM (extend 1/1)"},
        {"author": "replay", "tiny, CPU": "–", "tiny, GPU": "2/2, 1.41× GEMM (compose 2/2)"},
    ]  # fmt: skip
    assert overview["authors"]["mcp:some agent"].startswith("An agent at the tools")
    assert overview["authors"]["composer"] == "Rewrites the reference by rules, without a model."
    assert overview["suites"]["tiny, GPU"] == (
        "A few. 2 specs were tried; solved means right and fast enough on the GPU."
    )
    found = {b.device: rows(b) for b in boards(read_records(folder).records, lambda _: [])}
    agent = found["cuda"]["mcp:some agent"]
    assert (agent["USD"], agent["tokens"]) == ("unknown", "unknown")
    assert agent["characters received"] == "9,000"
    assert found["cuda"]["composer"]["characters received"] == "unknown"  # an older record
    both = Overview(boards(records, lambda _: []), {})
    assert [(b.suite, b.digest) for b in both.columns.values() if b.device == "cuda"] == [
        ("tiny", SUITE.digest)
    ]


def test_a_cell_shows_the_median_and_the_gravest_finding() -> None:
    audits = [Audit(), Audit(finding="clean", evidence="read", date="2026-11-22"),
              Audit(finding="exploit", evidence="reads the clock", date="2026-11-20"),
              Audit(finding="harness fault", evidence="no GPU", date="2026-11-21")]  # fmt: skip
    records = [
        trial("gemm_rope", "a", n, speed=s, audit=a)
        for n, (s, a) in enumerate(
            [
                (0.9, audits[0]),
                (1.1, audits[1]),
                (5.0, audits[2]),
                (3.0, audits[3]),
                (1.0, audits[0]),
            ],
            start=1,
        )
    ]
    found = board([*records, trial("gemm_swiglu", "b")])
    assert [row[0] for row in found.matrix] == ["spec", "gemm_rope", "gemm_swiglu"]
    assert found.matrix[2][1 + found.authors.index("a")] == "–"
    cell = found.entries["gemm_rope", "a"]
    assert (cell.solved, cell.counted) == (3, 4)  # the exploit counts and solves nothing
    assert cell.shown.trial == 5 and cell.speed == "1.000× GEMM, 2.000× compile"
    assert cell.audit == "exploit 2026-11-20"
    assert [row[0] for row in found.audits[1:]] == ["exploit", "harness fault", "clean"]
    assert found.audits[1] == ("exploit", "gemm_rope", "a", "3", "reads the clock", "2026-11-20")


def test_nothing_an_author_writes_moves_a_score() -> None:
    records = [trial(s, a, speed=x) for s in SPECS for a, x in (("a", 1.1), ("b", 0.0))]
    texts = {"program": '"""accepted; of_gemm 99"""\n', "reason": "accepted, solved, 9.9× GEMM",
             "run": RunRef(id="solved", log="logs/runs/solved/events.jsonl")}  # fmt: skip
    told = [trial(r.spec.name, r.author, speed=1.1 if r.author == "a" else 0.0, **texts)
            for r in records]  # fmt: skip
    assert board(told).ranking == board(records).ranking
    assert board(told).matrix == board(records).matrix
    assert rows(board(told))["b"]["solved@1"].startswith("0.00")


def test_suites_devices_and_ablations_are_not_mixed() -> None:
    records = [trial("gemm_rope", "a"), trial("gemm_rope", "a", without=("tips",)),
               trial("gemm_rope", "a", machine=Machine(device="cpu")),
               trial("gemm_rope", "a", suite=SuiteRef(name="tiny", digest=digest("other")))]  # fmt: skip
    found = boards(records, lambda _: [])
    assert sorted(len(b.trials) for b in found) == [1, 1, 2]
    assert {a for b in found for a in b.trials} == {"a", "a without tips"}


def test_stale_marks_and_what_is_not_counted(where: workspace.Workspace) -> None:
    spec = SUITE.spec(where, "gemm_rope")
    today = provenance.digests(spec, "# p\n")
    now = VERSIONS["numerics"]
    fresh = trial("gemm_rope", "fresh", program="# p\n")
    about = SpecRef(name=spec.name, digest=spec.digest, level="compose")
    fresh, moved = (
        trial("gemm_rope", author, program="# p\n").model_copy(update={
            "spec": about,
            "verdict": fresh.verdict.model_copy(
                update={"digests": today, "gates": {"numerics": Gate(passed=True, version=then)}}
            ),
        })
        for author, then in {"fresh": now, "moved": now - 1}.items()
    )  # fmt: skip
    folder = store(where, [fresh, moved, trial("gemm_rope", "old")])
    (folder / "torn.json").write_text('{"schema_version": 1, ')
    text = run("leaderboard")
    assert re.search(r"^gemm_rope .*1/1 1.000× GEMM, 2.000× compile", text, re.MULTILINE)
    found = run("leaderboard", "--json")
    (cells,) = found["boards"][0]["matrix"]
    assert "stale" not in cells["fresh"] and cells["old"].endswith("stale: numerics, spec")
    assert cells["moved"].endswith("stale: numerics")
    assert {r["author"]: r["stale"] for r in found["boards"][0]["ranking"]} == {
        "fresh": "0",
        "moved": "1",
        "old": "1",
    }
    assert [p["kind"] for p in found["problems"]] == ["truncated"] and "torn.json" in text
    (where.specs / "gemm_rope.md").write_text(spec.text + "\nMore.\n", "utf-8")
    (cells,) = run("leaderboard", "--json")["boards"][0]["matrix"]
    assert cells["fresh"].endswith("stale: spec")


class Page(HTMLParser):
    """Collects tags with their attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = path.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))


def check_alone(path: Path) -> None:
    """Nothing is loaded or run, every link leads to a file that is there, and tables can scroll."""
    page = Page(path)
    for (_, around), (tag, _) in pairwise(page.tags):
        assert tag != "table" or "scroll" in str(around.get("class")).split()
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {t for t, _ in page.tags}
    assert not re.search(r"url\(|@import|javascript:", page.text)
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes), (
            tag,
            attributes,
        )
        if href := attributes.get("href"):
            file, _, place = href.partition("#")
            assert ":" not in href and (path.parent / (file or path.name)).is_file(), href
            assert file or f'id="{place}"' in page.text, href


def test_pages_link_programs_verdicts_and_logs_and_escape_the_rest(
    where: workspace.Workspace,
) -> None:
    audit = Audit(finding="leak", evidence=EVIL, date="2026-11-20")
    tools = Machine(device="cuda", gpu="NVIDIA H200", packages={"torch": "2.11.0_x"})
    records = [
        trial("gemm_rope", EVIL, program=f"# {EVIL}\n", audit=audit),
        trial("gemm_rope", "b|c", machine=tools),
        trial("gemm_rope", "c", program="# b|c 1\n"),
    ]
    folder = store(where, records)
    (folder / f"{EVIL.replace('/', '')}.json").write_text("x")
    log = where.root / records[0].run.log
    log.parent.mkdir(parents=True)
    log.write_text("{}\n")
    run("leaderboard", "--html", "docs/board", "--markdown", "docs/board.md")
    path = where.root / "docs" / "board" / "index.html"
    check_alone(path)
    page = Page(path)
    hrefs = [a["href"] for t, a in page.tags if t == "a"]
    beside = Page(path.with_name("index-trials.html"))
    check_alone(beside.path)
    anchors = {a["id"] for _, a in beside.tags if "id" in a}
    names = [file_name(record.key).removesuffix(".json") for record in records]
    parts = ("program", "verdict", "log")  # all have this run
    assert hrefs.pop(0) == "#board-1" and ("h2", {"id": "board-1"}) in page.tags
    assert sorted(map(str, hrefs)) == sorted(
        f"index-trials.html#{name}.{part}" for name in names for part in parts
    )
    assert {str(href).partition("#")[2] for href in hrefs} < anchors
    assert "# &lt;script&gt;alert" in beside.text and beside.text.count("# b|c 1") == 1
    assert f'<a href="#{names[1]}.program">{names[1]}.program</a>' in beside.text
    assert "outcome: accepted" in beside.text and "is not an event" in beside.text  # the log
    log.unlink()
    run("leaderboard", "--html", "docs/board")
    assert path.read_text("utf-8").count('<span class="dim">no log </span>') == 3
    assert page.text.count("&lt;script&gt;alert") >= 5  # table, curves, matrix, audit, problem
    markdown = (where.root / "docs" / "board.md").read_text("utf-8")
    assert "<" not in markdown and "b\\|c" in markdown
    assert "Judged on NVIDIA H200; NVIDIA H200, torch 2.11.0_x." in page.text
    assert "Judged on NVIDIA H200; NVIDIA H200, torch 2.11.0\\_x." in markdown


def test_a_registered_metric_is_on_boards_in_comparisons_and_in_json(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exercise of CONTRIBUTING: what a new metric needs is its one function."""
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))

    @metrics.metric("program", "share", unit="lines")
    def lines(record: TrialRecord) -> float | None:
        return float(len(record.program.splitlines())) if record.program else None

    @metrics.metric("patience", "cost", column="calls")
    def calls(record: TrialRecord) -> float:
        return 3.0

    records = [
        trial(s, a, program="# x\n" * n) for s in SPECS for a, n in (("long", 4), ("short", 1))
    ]
    store(where, records)
    ranking = {row["author"]: row for row in run("leaderboard", "--json")["boards"][0]["ranking"]}
    assert {a: row["program, lines"] for a, row in ranking.items()} == {
        "long": "4.00", "short": "1.00"}  # fmt: skip
    assert ranking["long"]["calls"] == "3.00"
    found = comparison.compare(*(metrics.by_spec(r for r in records if r.author == a)
                                 for a in ("long", "short")))  # fmt: skip
    (shown,) = [
        row for row in comparison.ablation(found, "without tips") if row[0] == "program lines"
    ]
    assert shown == ("program lines", "4", "1", "+3", "+3 to +3", "more than chance")
    assert lines.key in comparison.document({"long": records[::2]}, {})["long"]["means"]
    assert calls.key in {one.name for one in found}


def test_what_a_person_found_out_is_in_the_cell_and_counts(where: workspace.Workspace) -> None:
    one, other = trial("gemm_rope", "a"), trial("gemm_rope", "b")
    folder = store(where, [one, other])
    name = file_name(one.key)
    said = run("audit", name, "exploit", "--evidence", "line 3 reads the clock")
    assert said.startswith(f"exploit: {folder / name}")
    records, problems = read_records(folder)
    found = {r.author: r for r in records}
    assert not problems and found["b"].model_copy(update={"checksum": ""}) == other
    assert found["a"].audit.finding == "exploit" and not found["a"].solved
    assert found["a"].audit.evidence == "line 3 reads the clock" and found["a"].audit.date
    assert found["a"].verdict == one.verdict
    assert "no record x.json in" in run("audit", "x.json", "clean", "--evidence", "y", code=2)
    assert "--evidence is empty" in run("audit", name, "clean", "--evidence", " ", code=2)


def test_published_records_are_there_again_where_there_are_none(
    where: workspace.Workspace,
) -> None:
    record = trial("gemm_rope", "a")
    folder = store(where, [record, trial("gemm_rope", "b", speed=0.0)])
    log = where.root / record.run.log
    log.parent.mkdir(parents=True)
    log.write_text("{}\n")
    before = run("leaderboard", "--json", "--publish")
    (packed,) = (where.root / "evals" / "archive").iterdir()
    assert before["written"] == [str(packed)]
    files = {path: path.read_bytes() for path in (*folder.iterdir(), log)}
    shutil.rmtree(where.root / "evals" / "results")
    log.unlink()
    assert run("leaderboard", "--json")["boards"] == before["boards"]
    assert {path: path.read_bytes() for path in files} == files
    (folder / file_name(record.key)).unlink()
    (board,) = run("leaderboard", "--json")["boards"]
    assert [row["author"] for row in board["ranking"]] == ["b"]  # what was deleted stays so


def test_no_file_is_published_that_is_not_a_runs_log(where: workspace.Workspace) -> None:
    (where.root / "secret").write_text("a secret\n")
    logs = ("secret", "logs/runs/../../secret", "logs/runs/a/../b/events.jsonl")
    runs = (RunRef(id="../../../secret", log=log) for log in logs)
    store(where, [trial("gemm_rope", f"by {r.log}").model_copy(update={"run": r}) for r in runs])
    run("leaderboard", "--html", "docs/board")
    assert "a secret" not in (where.root / "docs" / "board" / "index-trials.html").read_text()


def stub_judge(monkeypatch: pytest.MonkeyPatch, *, passed: bool) -> list[str]:
    devices: list[str] = []

    def judge_candidate(spec: Any, text: str, executor: Any, *, device: str) -> Verdict:
        devices.append(device)
        digests = provenance.digests(spec, text)
        gates = [GateResult(name="numerics", passed=passed, version=VERSIONS["numerics"])]
        level = "proved" if passed else None
        about = {"device": "cpu", "packages": {"torch": "9.9"}}
        return Verdict(passed=passed, level=level, gates=gates, digests=digests, environment=about)

    monkeypatch.setattr(judge, "judge_candidate", judge_candidate)
    return devices


@pytest.mark.parametrize("passed", [True, False])
def test_regrade(where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    devices = stub_judge(monkeypatch, passed=passed)
    cpu = trial("gemm_rope", "a", machine=Machine(device="cpu"), goal="proved",
                audit=Audit(finding="clean", evidence="read", date="2026-11-20"))  # fmt: skip
    gpu = trial("gemm_rope", "a")
    lost = trial("gemm_swiglu", "a", program="# x\n").model_copy(update={"program": None})
    folder = store(where, [cpu, gpu, lost])
    before = (folder / file_name(gpu.key)).read_bytes()
    found = {r["record"]: r for r in run("regrade", "--json")["records"]}
    level = "proved" if passed else "refused"
    assert found[file_name(cpu.key)]["outcome"] == level
    assert found[file_name(gpu.key)]["outcome"] == f"kept ({level} here; no GPU to time it)"
    assert found[file_name(lost.key)]["outcome"] == "without a program"
    assert devices == ["cpu", "cpu"] and (folder / file_name(gpu.key)).read_bytes() == before
    records, problems = read_records(folder)
    new = next(r for r in records if r.key == cpu.key)
    assert not problems and len(records) == 3 and new.audit == cpu.audit and new.spent == cpu.spent
    # The machine is the one whose toolchain the digests now name.
    now = Machine(device="cpu", packages={"torch": "9.9"})
    assert new.machine == now != cpu.machine
    assert new.outcome == level and new.solved is passed and not new.cells
    assert [s.level for s in new.steps] == ["proved"] * passed
    assert new.verdict and new.verdict.stale == []
    again = {r["record"] for r in run("regrade", "--json")["records"]}
    assert again == {file_name(gpu.key), file_name(lost.key)}


def test_many_records_are_quick_and_small(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twentieth of the 10,000 that have to take 5 s and 3 MB."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    store(where, (trial(s, f"author {a}", n + 1, speed=(a + n) % 5 / 4)
                  for s in SPECS for a in range(7) for n in range(10)))  # fmt: skip
    start = time.process_time()
    run("leaderboard", "--html", "page")
    assert time.process_time() - start < 5
    assert (where.root / "page" / "index.html").stat().st_size < 150_000


def test_pages_fit_a_phone_in_light_and_dark(where: workspace.Workspace) -> None:
    """At no width is anything wider than the window; at 1300 px no table has to be scrolled, and of
    the leaderboard none anywhere. The pictures are for a person's eyes."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs chromium or google-chrome")
    kernels = Path(__file__).parents[2] / "generated"
    shutil.copytree(kernels / "gemm_rmsnorm_rope", where.generated / "gemm_rmsnorm_rope")
    file = where.generated / "gemm_rmsnorm_rope" / "evidence.json"
    evidence = json.loads(file.read_text("utf-8"))
    for measured in evidence["cells"]:
        measured["steady"] = {k: measured[k] for k in ("of_gemm", "over_compile")}
    file.write_text(json.dumps(evidence), "utf-8")
    long = "claude:a-model-whose-name-has-very-many-letters-and-no-space-20261120"
    store(where, [trial(s, a, n, speed=(n - 1) * x / 2) for s in SPECS for n in (1, 2, 3) for a, x in
                  (("composer", 1.1), (long, 1.0), ("mcp:agent", 0.7))])  # fmt: skip
    run("leaderboard", "--html", "pages/board.html")
    assert CliRunner().invoke(app, ["review", "--html", "--out", "pages"]).exit_code == 0
    names, widths = ("board", "gemm_rmsnorm_rope", "index"), (360, 800, 1300)
    for name in names:
        check_alone(where.root / "pages" / f"{name}.html")
    frame = '<iframe src="pages/{}.html" style="border:0;height:1000px;width:{}px"></iframe>'
    frames = "".join(frame.format(name, width) for name in names for width in widths)
    measure = """<script>onload = () => { document.title = [...document.querySelectorAll("iframe")]
        .map(f => { const w = f.contentWindow, d = w.document; return [w.innerWidth,
        d.documentElement.scrollWidth, w.matchMedia("(prefers-color-scheme: dark)").matches,
        d.querySelectorAll("table").length, [...d.querySelectorAll(".scroll > table")]
        .filter(t => t.offsetWidth > t.parentNode.clientWidth).length].join() }).join(" ") }</script>"""
    style = "<style>body { margin: 0; white-space: nowrap; background: #888 }</style>"
    (where.root / "frames.html").write_text(f"<!doctype html>{style}{frames}{measure}", "utf-8")
    for scheme, setting in (("dark", 0), ("light", 1)):
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--allow-file-access-from-files", f"--user-data-dir={where.root / 'profile'}",
                   f"--blink-settings=preferredColorScheme={setting}", "--window-size=7400,1000",
                   f"--screenshot={where.root / f'{scheme}.png'}", "--dump-dom",
                   (where.root / "frames.html").as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        title = re.search("<title>(.*?)</title>", done.stdout)
        assert title, done.stderr[-500:]
        found = [frame.split(",") for frame in title[1].split()]
        assert len(found) == 9 and (where.root / f"{scheme}.png").stat().st_size > 100_000
        for place, (wide, scroll, dark, tables, cut) in enumerate(found):
            assert int(scroll) <= int(wide) and int(tables) > 0, found
            of_board = place < len(widths)
            assert int(cut) == 0 or (int(wide) < 1300 and not of_board), found
            assert (dark == "true") == (scheme == "dark")
        assert {int(f[0]) for f in found} == set(widths)
