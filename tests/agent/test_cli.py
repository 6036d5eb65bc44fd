"""The commands, with a judge and an author of our own; those have their own tests."""

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coda_agent import generated
from coda_agent.agent import authors, doctor, judge, pipeline, shapes, workspace
from coda_agent.agent.cli import app, basics, main, report, show, targets
from coda_agent.agent.configuration import configuration
from coda_agent.agent.execution import local
from coda_agent.agent.judge import static  # noqa: F401  # before a fake replaces it
from coda_agent.agent.judge.machine import Gpu
from coda_agent.agent.judge.records import (
    VERSIONS,
    Finding,
    PerformanceReport,
    Rates,
    Ratio,
    Timed,
    Timing,
)
from coda_agent.agent.judge.verdict import GateResult, Verdict
from coda_agent.agent.log import read_events
from coda_agent.agent.state import RunState
from coda_agent.agent.workbench import TOOLS
from coda_agent.evals import suites
from coda_agent.primitives.errors import CodaError, ProgramError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.dispatch_tables import PACKAGED
from coda_agent.runtime.tile_choice import TileChoice
from tests.commands import EXAMPLES

PROGRAM = "@epilogue(D=Tile)\ndef gemm_swiglu(acc):\n    return {'D': acc}\n"
runner = CliRunner()


def judge_candidate(spec: Any, text: str, executor: Any, *, observer: Any, **_: Any) -> Verdict:
    print("a library prints")
    os.write(1, b"and a child process, too\n")
    if "interrupt" in text:
        raise KeyboardInterrupt
    if "bug" in text:
        raise RuntimeError("oops")
    if "illegal" in text:
        raise ProgramError("no such\nthing", hint="try another")
    passed = "wrong" not in text
    observer("gate.started", {"gate": "static"})
    observer("gate.progress", {"gate": "static", "done": 1, "total": 2, "note": "[bold]"})
    finding = Finding(message="import os", where={"line": 3}, hint="use primitives")
    found = [] if passed else [finding]
    about = {"seconds": 0.1, "version": VERSIONS["static"], "findings": found}
    result = GateResult(name="static", passed=passed, **about)
    observer("gate.finished", {"gate": "static", **result.model_dump(exclude={"name"})})
    late = GateResult(name="performance", passed=True, skipped="no GPU")
    if local.here().gpu():
        times = {"ours": 10.0, "gemm": 9.7, "compile": 15.0}
        cell = Timed(
            dtype="bfloat16", sizes={"K": 4, "M": 8, "N": 16}, tflops=612.5, tile="t",
            config=DEFAULT_CONFIGS["sm_90a"], floor_us=8.0, launches=(1,), mismatches=0,
            times={n: Timing(median_us=t, interval_us=(t, t), times_us=(t,))
                   for n, t in times.items()},
            of_gemm=Ratio(ratio=0.97, low=0.96, high=0.98), finalists_us={}, gpu={},
            over_compile=Ratio(ratio=1.5, low=1.4, high=1.6), ceiling=Rates(tflops=1, gbytes_s=1),
        )  # fmt: skip
        seen = PerformanceReport(program="k", cells=(cell,))
        late = GateResult(name="performance", passed=True, data=seen)
    observer("gate.finished", {"gate": "performance", **late.model_dump(exclude={"name", "data"})})
    return Verdict(
        passed=passed,
        level="proved" if passed else None,
        gates=[result, late],
        digests={"spec": spec.digest, "candidate": f"sha256:{len(text):064x}"},
        not_shown=["Nothing ran on a GPU."],
    )


class One(authors.Kind, authors.Writer):
    """An author of one text."""

    precedence, spelling = 1, "one"

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.precedence = int(name == "composer")

    def make(self, which: str, options: Any, workspace: Any) -> authors.Author:
        return self

    def write(self, spec: Any, observer: Any) -> str:
        return self.text


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    monkeypatch.setattr(judge, "judge_candidate", judge_candidate)
    made = {"composer": One("composer", PROGRAM), "bad": One("bad", "wrong\n")}
    monkeypatch.setattr(authors, "kinds", lambda: made)
    monkeypatch.setattr(doctor, "gpus", list[Gpu])
    monkeypatch.setattr(local.Local, "_gpus", lambda _: [])
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "U")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "u@example.com")
    monkeypatch.chdir(tmp_path)
    return workspace.init(tmp_path)[0]


def run(*args: str, code: int = 0) -> Any:
    """Runs a command that ends with `code`: what it printed, or its JSON document."""
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, (result.stdout, result.stderr)
    return json.loads(result.stdout) if "--json" in args else result.stdout + result.stderr


def test_help_loads_little() -> None:
    """Modules are counted instead of seconds, which are a busy machine's."""
    code = """
import sys
from coda_agent.agent.cli import main
try:
    main()
finally:
    print(len(sys.modules), {"torch", "cutlass", "quack", "git"} & set(sys.modules))
"""
    for args, most in ((["--help"], 300), (["generate", "--help"], 600)):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=True)
        assert b"Usage" in done.stdout
        loaded, heavy = done.stdout.decode().splitlines()[-1].split(maxsplit=1)
        print(f"{args}: {loaded} modules")
        assert heavy == "set()"
        assert int(loaded) < most


def test_a_list_of_commands_says_what_each_says_itself() -> None:
    """The list reads docstrings out of the sources, and imports no command."""

    def every(group: Any) -> Iterator[Any]:
        for command in group.commands.values():
            yield from every(command) if hasattr(command, "commands") else (command,)

    found = list(every(typer.main.get_command(app)))
    assert len(found) == 25
    for command in found:
        assert command.loaded.name == command.name
        said = command.loaded.get_short_help_str(200)
        assert said and (command.hidden or command.get_short_help_str(200) == said)


def test_help_shows_every_command_once_in_its_group() -> None:
    said = run("--help")
    heads = re.findall(r"^(\S.*):$", said, re.MULTILINE)
    assert heads == ["Options", "Write a kernel", "Look", "Measure", "Ship", "Agents"]
    names = re.findall(r"^  ([a-z-]+)  ", said.partition("Write a kernel:")[2], re.MULTILINE)
    assert sorted(names) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate"], "Missing argument"),
        (["shw"], "No such command 'shw'"),
        (["explain", "gemm_rope", "--stage", "bad"], "'bad' is not one of"),
    ],
)
def test_a_misused_command_is_a_document_too(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["coda-agent", *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert ended.value.code == error["exit_code"] == 2
    assert said in error["message"] and said in shown.err


def test_a_name_without_a_kernel_says_what_to_do(where: workspace.Workspace) -> None:
    assert "it has a spec: coda-agent generate gemm_geglu" in run("show", "gemm_geglu", code=2)
    for arg in "mine.py", "mine.py:FUNCTION":
        said = run("generate", arg, code=2)
        assert "draft one first: coda-agent spec mine.py:FUNCTION" in said


def test_show_says_what_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {True: TileConfig(128, 192), False: TileConfig(1, 256, fused=False)}
    monkeypatch.setattr(
        TileChoice, "choose", lambda self, m, *_, **__: forms[m not in (2, 4, 8192)]
    )
    ((where, lines),) = show.dispatched(PACKAGED / "gemm_swiglu").items()
    assert where.startswith("bfloat16, N = 4096, K = 4096, NVIDIA ")
    assert lines == [
        "M = 1: 128x192 coop 1x1",
        "M = 2 to 4: 1x256 unfused: cuBLAS's product and one kernel are faster",
        "M = 8 to 4096: 128x192 coop 1x1",
        "M = 8192: 1x256 unfused: cuBLAS's product and one kernel are faster",
    ]


def test_generate_show_list_verify(where: workspace.Workspace) -> None:
    said = run("generate", "gemm_swiglu")
    assert "static: passed (0.1 s)" in said and "not shown: Nothing ran on a GPU." in said
    assert "performance: skipped: no GPU" in said and "gemm_swiglu: proved, commit" in said
    again = run("generate", "gemm_swiglu", "--json")
    assert (again["passed"], again["commit"], again["level"]) == (True, None, "proved")
    state = RunState.of(read_events(Path(again["run"]) / "events.jsonl"))
    assert (state.outcome, state.author) == ("passed", "composer")
    assert (Path(again["run"]) / "kernel.py").read_text() == PROGRAM

    said = run("show").splitlines()
    assert [line.split()[0] for line in said[:2]] == ["kernel", "gemm_swiglu"]
    listed = run("show", "--json")
    own = [(k["name"], k["level"]) for k in listed["kernels"] if not k["packaged"]]
    assert own == [("gemm_swiglu", "proved")]
    assert "gemm_swiglu" not in listed["specs"] and "gemm_geglu" in listed["specs"]
    assert len(said) == 2 + len(listed["kernels"])
    assert said[-1] == (
        f"{len(listed['specs'])} specs have no kernel: coda-agent show '*' lists them, too"
    )
    some = [line.split()[:2] for line in run("show", "gemm_*glu").splitlines()]
    assert ["gemm_swiglu", "proved"] in some and ["gemm_geglu", "spec"] in some
    assert all(name.endswith("glu") for name, _ in some[1:])
    assert run("show", "gemm_swiglu", "--json")["program"] == PROGRAM
    assert "proved" in run("show", "gemm_swiglu")
    assert "calls" in run("show", "gemm_swiglu") and "is not what its evidence was made for" in run(
        "show", "gemm_swiglu"
    )

    assert "unchanged" in run("verify", "--all")
    program = where.generated / "gemm_swiglu" / "kernel.py"
    program.write_text("wrong\n")
    edited = run("verify", "gemm_swiglu", "--json", code=1)["kernels"][0]
    assert (edited["before"], edited["level"], edited["commit"]) == ("proved", None, None)
    assert "git restore" in edited["remark"] and program.read_text() == "wrong\n"
    where.git("commit", "-q", "-m", "by hand", "--", str(program))
    revoked = run("verify", "gemm_swiglu", "--json", code=1)["kernels"][0]
    assert (revoked["before"], revoked["level"]) == ("proved", "revoked") and revoked["commit"]
    assert "unchanged" not in run("generate", "gemm_swiglu")


def test_what_lasts_is_told_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_SILENT_S", 600.0)
    with report.progress() as observer:
        observer("gate.started", {"gate": "compile"})
        observer("candidate.saved", {})
        monkeypatch.setattr(report, "_SILENT_S", 0.0)
        observer("gate.started", {"gate": "numerics"})  # at once after what has ended
        deadline = time.monotonic() + 5
        while not (said := capsys.readouterr()).err and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (said.out, said.err) == ("", "numerics\n")
        monkeypatch.setattr(report, "_SILENT_S", 600.0)
        observer("gate.started", {"gate": "performance"})
        observer("request.failed", {"error": "Busy: no\nmore", "wait_s": 8.2})
    assert capsys.readouterr() == ("", "Busy: no; again in 8 s\n")


def test_a_reader_takes_the_packages_kernel_where_the_workspace_has_none(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = workspace.packaged_kernels()
    listed = run("show", "--json")
    assert {k["name"] for k in listed["kernels"]} == set(packaged) == set(dir(generated))
    assert all(k["packaged"] for k in listed["kernels"])
    assert not set(packaged) & set(listed["specs"]) and "gemm_geglu" in listed["specs"]
    row = r"^gemm_swiglu +accepted +\d\.\d{3} / \d\.\d{3} +of the package$"
    assert re.search(row, run("show"), re.MULTILINE)
    text = packaged["gemm_swiglu"].program.read_text("utf-8")
    assert run("show", "gemm_swiglu", "--json")["program"] == text
    assert run("explain", "gemm_swiglu", "--json")["text"] == text
    assert run("check", "gemm_swiglu", "--json")["kernel"] == "gemm_swiglu"
    judged = run("verify", "gemm_swiglu", "--fresh", "--json")["kernels"][0]
    assert (judged["passed"], judged["commit"]) == (True, None)
    monkeypatch.setattr(local.Local, "_gpus", lambda _: [Gpu("GPU-1", "H200", "9.0", "1")])
    assert where.kernels() == []
    # What writes to a kernel's folder has the workspace's own alone.
    assert "no kernel named 'gemm_swiglu' in" in run("fit", "gemm_swiglu", code=2)
    (where.specs / "gemm_swiglu.md").write_text(
        packaged["gemm_swiglu"].spec.read_text() + "\nMine.\n"
    )
    assert targets.explainable("gemm_swiglu")[0] is None
    assert f"differs from {where.specs / 'gemm_swiglu.md'}" in run("show")
    run("generate", "gemm_swiglu")
    assert run("show", "gemm_swiglu", "--json")["program"] == PROGRAM
    assert targets.explainable("gemm_swiglu")[0] == PROGRAM


def test_refused_exits_1_and_loses_nothing(where: workspace.Workspace) -> None:
    said = run("generate", "gemm_swiglu", "--author", "bad", code=1)
    for line in ("static: FAILED", "    import os", "      at     line 3", "use primitives"):
        assert line in said
    assert where.kernels() == []
    saved = next((where.root / "logs" / "runs").glob("*-generate-gemm_swiglu-*/kernel.py"))
    assert saved.read_text() == "wrong\n"
    run("generate", "gemm_swiglu", "--no-commit", "--json")
    assert where.kernels() == []


def test_check_finds_the_spec(where: workspace.Workspace, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PROGRAM)
    assert run("check", "a.py", "--json")["kernel"] == "gemm_swiglu"
    (tmp_path / "b.py").write_text("wrong")
    assert "name it with --spec" in run("check", "b.py", code=2)
    run("check", "b.py", "--spec", "gemm_swiglu", code=1)
    (tmp_path / "spec.md").write_text(workspace.resolve_spec("gemm_swiglu", where).read_text())
    run("check", "b.py", code=1)
    run("generate", "gemm_swiglu")
    assert run("check", "gemm_swiglu", "--json")["level"] == "proved"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("illegal", 2, "no such\nthing"),
        ("interrupt", 130, "interrupted"),
        ("bug", 70, "RuntimeError: oops"),
    ],
)
def test_errors(where: workspace.Workspace, text: str, code: int, message: str) -> None:
    (where.root / "a.py").write_text(text)
    document = run("check", "a.py", "--spec", "gemm_swiglu", "--json", code=code)
    assert document["error"]["message"] == message and document["error"]["exit_code"] == code
    said = runner.invoke(app, ["check", "a.py", "--spec", "gemm_swiglu"])
    assert said.exit_code == code
    last = said.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: {' '.join(message.split())}")
    assert ("Traceback" in said.stderr) == (text == "bug")
    log = next((where.root / "logs" / "runs").glob("*/events.jsonl"))
    assert RunState.of(read_events(log)).outcome == "failed"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["show", "nope"], 2, "error: no kernel named 'nope'"),
        (["show", "nope*"], 2, "error: no kernel or spec has a name like 'nope*'"),
        (["generate", "gemm_swigl"], 2, "did you mean gemm_swiglu"),
        (["check", "nope.py"], 2, "no file at nope.py"),
        (["explain", "nope"], 2, "no kernel, spec or file named 'nope'"),
        (["explain", "nope", "--stage", "x"], 2, "'x' is not one of 'graph'"),
        (["verify"], 2, "name kernels, or give --all"),
        (["generate", "gemm_swiglu", "--device", "tpu"], 2, "tpu"),
        (
            ["check", "a.md", "--sanitize", "memcheck"],
            2,
            "a.md is a spec; --spec, --sanitize and --seed",
        ),
        (["spec", "gemm_symlog", "--name", "mine"], 2, "--shape and --name are of a function"),
        (["runs", "--html", "a.html"], 2, "--html and --format are of one run"),
        (["eval", "judge", "luck"], 2, "'luck' is not one of 'mutants'"),
        (["eval", "judge", "plans", "--device", "cuda"], 2, "plans is a score of --device cpu"),
    ],
)
def test_bad_input(where: workspace.Workspace, args: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, args)
    assert result.exit_code == code and message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "bench", "bench --suite paper", "bench --suite layers --case block", "fit --all",
        "tune gemm_swiglu --shape 128,128,128",
        "check a.py --spec gemm_swiglu --device cuda", "verify --all --device cuda",
        "generate gemm_swiglu --device cuda", "warm gemm_swiglu --shape 128,128,128",
    ],
)  # fmt: skip
def test_one_sentence_where_a_gpu_is_needed(
    where: workspace.Workspace, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    (where.root / "a.py").write_text(PROGRAM)
    said = run(*command.split(), code=3)
    assert said.startswith("error: this needs a Hopper GPU (H100, H200), and none is here (")
    from_help = runner.invoke(app, [*command.split()[:2], "--help"]).stdout
    for option in re.findall("--[a-z]+", said):
        assert option in from_help, option
    assert not (where.root / "logs" / "runs").exists()


def test_a_terminal_is_told_what_is_waited_for(where: workspace.Workspace) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "coda_agent.agent", "explain", "gemm_swiglu", "--stage=graph"]
    terminal = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, cwd=where.root, stdout=theirs, env=terminal) as process:
        os.close(theirs)
        seen = b""
        while b"graph of gemm_swiglu" not in seen:
            seen += os.read(ours, 1000)  # raises at the end
        process.kill()
    os.close(ours)
    piped = subprocess.run(command, cwd=where.root, capture_output=True, check=True)
    assert b"graph of" not in piped.stdout + piped.stderr


LONG = "x" * 10_000


UNUSABLE = [
    (["runs", "last", "--html", "missing/x.html"], "missing/x.html", "No such"),
    (["runs", "last", "--html", "folder"], "folder", "Is a directory"),
    (["runs", "last", "--html", "file/x.html"], "file/x.html", "Not a directory"),
    (["runs", "last", "--html", LONG], "x", "File name too long"),
    (["runs", LONG], "x", "File name too long"),
    (["replay", f"/{LONG}"], "/x", "File name too long"),
    (["init", "/proc/x"], "/proc/x", "No such file or directory"),
    (["init", "file/x"], "file/x", "Not a directory"),
    (["init", LONG], "x", "File name too long"),
    (["generate", f"./{LONG}.md"], "x", "File name too long"),
    (["check", f"{LONG}.py"], "x", "File name too long"),
    (["check", "file", "--spec", f"/{LONG}"], "/x", "File name too long"),
    (["explain", f"/{LONG}"], "/x", "File name too long"),
    (["tool", "read_spec", "--run", f"/{LONG}"], "/x", "File name too long"),
    (["prompt", f"/{LONG}"], "/x", "File name too long"),
    (["show", "--html", "/proc/x"], "/proc/x", "No such file or directory"),
    (["show", "--html", "file"], "file", "File exists"),
]  # fmt: skip


def test_a_path_that_cannot_be_used_is_one_line(where: workspace.Workspace) -> None:
    (where.root / "file").touch()
    (where.root / "folder").mkdir()
    run("generate", "gemm_swiglu")
    for args, place, reason in UNUSABLE:
        result = runner.invoke(app, args)
        assert (result.exit_code, result.stdout) == (2, ""), (args, result.stderr)
        if sys.version_info >= (3, 14) and "too long" in reason:
            place = reason = ""  # from then on pathlib finds nothing there, instead of raising
        assert result.stderr.startswith(f"error: {place}") and reason in result.stderr, args
        assert len(result.stderr.splitlines()) == 1 and len(result.stderr) <= 1010, args


def test_a_byte_order_mark_is_no_part_of_a_text(where: workspace.Workspace) -> None:
    """As editors of Windows begin a file; the kernel is that of the text without it."""

    def marked(name: str, text: str) -> Path:
        (path := where.root / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        return path

    spec = workspace.packaged_specs()["gemm_swiglu"].read_text("utf-8")
    marked("specs/gemm_swiglu.md", spec)
    run("generate", "gemm_swiglu")
    assert where.kernel("gemm_swiglu").spec.read_text("utf-8") == spec
    assert "differs" not in run("show")
    run("check", str(marked("a.py", PROGRAM)), "--spec", "gemm_swiglu")
    assert shapes.in_file(marked("shapes.txt", "16,64,32\n")) == [(16, 64, 32)]
    suite = (suites.FOLDER / "smoke.toml").read_text("utf-8")
    assert suites.load(str(marked("smoke.toml", suite))).name == "smoke"
    config = {**dict.fromkeys(("hidden_size", "intermediate_size"), 64), "num_attention_heads": 4}
    path = marked("config.json", json.dumps(config))
    assert configuration(path)["hidden_size"] == 64
    text = "def f(x, w):\n    return (x @ w.T).relu()\n"
    given = ["--shape", "x=64,64", "--shape", "w=64,64"]
    for function in (f"{marked('f.py', text)}:f", "-"):
        result = runner.invoke(app, ["spec", function, *given, "--force"], "\ufeff" + text)
        assert result.exit_code == 0, result.output


def test_a_spec_is_described_as_its_kernel_is_called(where: workspace.Workspace) -> None:
    (path := where.root / "f.py").write_text(
        "def f(x, w, v):\n    return (x @ w.T).sigmoid() * (x @ v.T)\n", "utf-8"
    )
    shapes = [f"--shape={x}=64,64" for x in ("x", "w", "v")]
    said = run("spec", f"{path}:f", *shapes)
    assert "x [M, K], w [N, K], v [N, K] -> out [M, N]" in said


def test_a_cache_that_cannot_be_written_is_said_first(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home := where.root / "file").touch()  # as a read-only home, and for root too
    for variable in ("XDG_CACHE_HOME", "QUACK_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(home))
    cache = f"the cache {home}/.cache/coda-agent/quack cannot be written"
    for command in ("generate gemm_swiglu", "spec gemm_swiglu", "check nope.py", "verify a"):
        said = run(*command.split(), code=3)
        assert said.startswith(f"error: {cache}: Not a directory") and len(said.splitlines()) == 1
        assert "XDG_CACHE_HOME" in said and "QUACK_CACHE_DIR" in said
    report = run("doctor", "--json", code=3)
    (found,) = (item for item in report["items"] if item["broken"])
    assert found["name"] == "cache" and found["hint"].startswith(cache)
    assert "XDG_CACHE_HOME" in found["hint"]
    script, venv = Path(__file__).parents[2] / "scripts" / "setup.sh", where.root / "venv"
    done = subprocess.run(["bash", script, sys.executable, venv, "cpu", ""], capture_output=True)
    assert done.returncode == 3 and done.stderr.startswith(f"setup: {cache}".encode())
    assert b"XDG_CACHE_HOME" in done.stderr and not venv.exists()
    monkeypatch.setenv("QUACK_CACHE_DIR", str(where.root / "cache"))
    run("generate", "gemm_swiglu")


def test_a_place_for_runs_that_is_none(where: workspace.Workspace) -> None:
    logs = where.root / "logs" / "runs"
    logs.symlink_to(where.root / "nowhere")
    assert f"error: {logs} cannot be used: File exists" in run("generate", "gemm_swiglu", code=2)
    logs.unlink()
    logs.touch()
    assert f"error: {logs} cannot be used: File exists" in run("generate", "gemm_swiglu", code=2)


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert "error: the current folder cannot be used" in run("show", code=2)


MEANINGLESS = [
    *((["--max-usd", value], "the limit usd is") for value in ("-3", "0", "nan", "inf")),
    *((["--limit", f"{key}={value}"], f"the limit {key} is {value}, expected a positive number")
      for key, value in [("steps", "0"), ("steps", "-1"), ("minutes", "nan"), ("tokens", "-5"),
                         ("gpu_minutes", "inf"), ("failures", "0")]),
    (["--limit", "steps=many"], "'steps=many' is no limit"),
    *((["--price-in", value, "--price-out", "1"], "expected USD per million tokens")
      for value in ("-1", "nan", "inf")),
    (["--price-in", "1"], "--price-in and --price-out go together"),
    *((["--tip-holdout", value], "expected a share from 0 to 1")
      for value in ("-0.1", "1.5", "nan", "inf")),
    (["--effort", "hgih"], "'hgih' is not one of"),
]  # fmt: skip


def test_a_number_that_means_nothing_is_refused_before_a_run(where: workspace.Workspace) -> None:
    for options, message in MEANINGLESS:
        assert message in run("generate", "gemm_swiglu", *options, code=2)
    for shape in ("1,2", "1,2,3,4", "0,1,1", "-1,1,1", "²,1,1", "1,nan,1", "9" * 5000):
        assert "expected M,N,K" in run("tune", "gemm_swiglu", f"--shape={shape}", code=2)
    assert not (where.root / "logs" / "runs").exists()


def test_what_became_of_a_candidate_is_one_sentence() -> None:
    finding = Finding(message="O is wrong")
    bad = GateResult(name="numerics", passed=False, findings=[finding])

    def said(level: str | None, before: str | None, commit: str | None, **more: Any) -> str:
        verdict = Verdict(
            passed=not more, level=None if more else "proved", gates=[bad] * bool(more)
        )
        about = ("k", not more, level, before, commit, Path("generated/k"), Path("run"), verdict)
        return report.sentence(pipeline.Outcome(*about, **more))  # type: ignore[arg-type]

    sha = "0123456789abcdef"
    assert said("proved", None, sha) == "k: proved, commit 0123456789ab (generated/k)"
    assert said("proved", None, None) == "k: proved, unchanged (generated/k)"
    assert said("proved", "verified", sha) == "k: proved (was verified), commit 0123456789ab"
    assert said("accepted", "accepted", None) == "k: accepted, proved here, unchanged"
    assert (
        said("revoked", "proved", sha, reason=None) == "k: revoked: numerics: O is wrong (run: run)"
    )
    over = said(None, None, None, reason="budget: 3 steps")
    assert over == "k: budget: 3 steps: numerics: O is wrong (run: run)"


def test_verify_prints_the_timings(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("generate", "gemm_swiglu")
    monkeypatch.setattr(local.Local, "_gpus", lambda _: [Gpu("GPU-1", "H200", "9.0", "1")])
    said = run("verify", "gemm_swiglu", "--fresh")
    row = next(line for line in said.splitlines() if line.startswith("bfloat16"))
    ratios = ["0.970", "(0.960–0.980)", "1.500", "(1.400–1.600)"]
    assert row.split() == ["bfloat16", "8×16×4", "10.0", "9.7", "15.0", *ratios, "612", "8.0", "t"]


def test_outside_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no git repository" in run("show", code=2)
    assert run("init", "w", "--json")["made"][0] == ".git"
    assert "(unchanged)" in run("init", "w")
    assert run("init", "my own").splitlines()[-1] == "next: cd 'my own'"
    monkeypatch.chdir("w")
    assert "cd" not in run("init").split()
    monkeypatch.chdir("..")
    assert "coda-agent" in run("--version")


def test_primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"kind": "pairwise", "signature": "swiglu(gate, up)", "summary": "Gated.", "doc": "D."}
    entry = SimpleNamespace(name="swiglu", **about)
    monkeypatch.setattr(basics, "entries", lambda: [entry])
    assert run("primitives") == "swiglu  pairwise  Gated.\n"
    assert run("primitives", "swiglu", "--json") == {"name": "swiglu", **about}
    assert run("primitives", "swigl", "--json", code=2)["error"]["hint"] == "did you mean swiglu?"


def test_doctor(where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("doctor", "--json")
    assert report["level"] == "proved"
    found = {item["name"]: item["value"] for item in report["items"]}
    assert found["git identity"] == "U <u@example.com>" and found["gpu"] is None
    assert "NVIDIA H100 80GB HBM3" in found["dispatch"]
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu("GPU-1", "Small", "8.9", "580.1")])
    report = run("doctor", "--json")
    (gpu,) = (item for item in report["items"] if item["name"] == "gpu")
    assert report["level"] == "proved" and gpu["hint"].startswith("Small is no Hopper GPU")
    monkeypatch.setattr(doctor, "package_version", lambda distribution, module: None)
    assert "nothing can be shown" in run("doctor", code=3)


@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "broken"),
    [
        ("580.65.06", "13.0", True, []),
        ("575.57.08", "13.0", False, ["driver", "torch with CUDA"]),
        ("570.1", "12.8", True, []),
        ("580.65.06", None, False, ["torch with CUDA"]),
    ],
)
def test_doctor_of_a_gpu(
    where: workspace.Workspace,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    cuda: str | None,
    usable: bool,
    broken: list[str],
) -> None:
    import torch

    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu("GPU-1", "Unmeasured", "9.0", driver)])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    report = run("doctor", "--json", code=3 if broken else 0)
    assert [item["name"] for item in report["items"] if item["broken"]] == broken
    assert report["level"] == ("proved" if broken else "accepted")
    said = next(x for x in report["items"] if x["name"].startswith("dispatch"))
    assert (said["name"], said["value"]) == ("dispatch on Unmeasured", None)
    assert "coda-agent fit --all" in said["hint"] and "unmeasured.json.xz" in said["hint"]


@pytest.mark.parametrize("last", ["base", "cu13"])
def test_doctor_of_wheels_over_each_other(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: str
) -> None:
    """Two wheels with a file of one name: the one that was unpacked first has it no more."""
    version = metadata.version("nvidia-cutlass-dsl")
    texts = {"base": "a = 1\n", "cu13": "a = 2\n"}
    for name, text in texts.items():
        about = tmp_path / f"nvidia_cutlass_dsl_libs_{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Name: nvidia-cutlass-dsl-libs-{name}\nVersion: {version}\n"
        )
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        (about / "RECORD").write_text(f"cute/ops.py,sha256={digest},{len(text)}\n")
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute" / "ops.py").write_text(texts[last])
    monkeypatch.setattr(
        doctor, "distributions", lambda: metadata.distributions(path=[str(tmp_path)])
    )
    report = run("doctor", "--json", code=3)
    (found,) = (item for item in report["items"] if item["broken"])
    first = {"base": "cu13", "cu13": "base"}[last]
    assert report["level"] is None and found["name"] == "nvidia-cutlass-dsl"
    assert found["hint"].startswith(f"nvidia-cutlass-dsl-libs-{first} {version}: not the files of")
    assert "--no-deps nvidia-cutlass-dsl-libs-" in found["hint"]


def test_a_tools_inputs_on_the_command_line(tmp_path: Path) -> None:
    from coda_agent.agent.cli.tool import read, typed

    (tmp_path / "k.py").write_text("x = 1\n")
    words = [
        f"old=@{tmp_path / 'k.py'}",
        "new=@@epilogue(O=Tile)",
        "text=1,2",
        'values={"acc": [1]}',
    ]
    texts, others = read(words)
    assert texts == {"old": "x = 1\n", "new": "@epilogue(O=Tile)"}
    assert others == {"text": "1,2", "values": '{"acc": [1]}'}
    assert typed("evaluate", others) == {"text": "1,2", "values": {"acc": [1]}}
    assert typed("edit_candidate", {"old": '{"O": X'}) == {"old": '{"O": X'}
    with pytest.raises(CodaError, match="cannot be read as text"):
        read(["old=@nothing.py"])
    with pytest.raises(CodaError, match="is not KEY=VALUE"):
        read(["old"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_ends_with_an_example(name: str) -> None:
    said = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=80).stdout
    assert said.rstrip().endswith(f"Example: coda-agent {EXAMPLES[name]}")
    assert EXAMPLES[name].startswith(name)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("show gemm_sw", ["gemm_swiglu"]),
        ("generate mi", ["mine", "mine.py"]),
        ("generate gemm_dropout", ["gemm_dropout_residual"]),
        ("tune gemm_sy", ["gemm_symlog"]),
        ("export gemm_symlog gemm_ro", ["gemm_rope"]),
        ("bench --suite pa", ["paper"]),
        ("eval run --suite smo", ["smoke"]),
        ("primitives RowS", ["RowSum"]),
    ],
)
def test_a_shell_completes_names(where: workspace.Workspace, words: str, found: list[str]) -> None:
    (where.specs / "mine.md").touch()
    (where.root / "mine.py").touch()
    asked = {
        "_CODA_AGENT_COMPLETE": "complete_bash",
        "COMP_WORDS": f"coda-agent {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    assert runner.invoke(app, [], env=asked, prog_name="coda-agent").stdout.split() == found


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_says_what_it_takes(name: str) -> None:
    said = CliRunner().invoke(app, ["tool", name, "--help"]).stdout
    assert said.startswith(f"{name}: {TOOLS[name].description}")
    for field in TOOLS[name].input.model_fields:
        assert f"  {field} " in said
    assert ("one returned dict" in said) == (name in ("write_candidate", "edit_candidate"))
    if name == "check":
        assert "static|compile|interpret|gpu" in said


def test_the_line_while_a_model_works_says_how_far_it_is() -> None:
    standing = report.Standing(0.25)
    assert standing.line("numerics") == "numerics"  # no model's run
    standing.take("run.started", {"options": {"budget": {"usd": 3.0}}})
    for usd in (0.5, 0.125):
        standing.take("response", {"usd": usd})
    gates = {"static": {"passed": True}, "compile": {"passed": True}, "numerics": {"passed": False}}
    standing.take("judged", {"number": 2, "judgement": {"gates": gates}})
    expected = "turn 3 · attempt 2 · numerics 3/8 · $0.88 of 3.00 · best: compile"
    assert standing.line("numerics 3/8") == expected
