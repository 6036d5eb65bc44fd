"""The bench: a real process, its clients in other processes, and what becomes of calls when it is killed."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent import runs, workspace
from coda_agent.agent.bench import client
from coda_agent.agent.bench.client import Bench
from coda_agent.agent.log import read_events
from coda_agent.primitives.errors import MachineError

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()
START = ["read_spec", "--spec", "gemm_swiglu", "--device", "cpu"]


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[workspace.Workspace]:
    """A workspace whose bench is its own, and is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        made, _ = workspace.init(Path(folder) / "w")
        made.git("config", "user.name", "U")
        made.git("config", "user.email", "u@example.com")
        (made.root / "mine.py").write_text(RIGHT)
        monkeypatch.setenv("CODA_AGENT_BENCH", "test")
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield made
        Bench(made.root, print).stop()


def begun(where: workspace.Workspace, *args: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "coda_agent.agent", "tool", *args]

    def interruptible() -> None:  # a shell's background job, and its children, ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        command, cwd=where.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=interruptible,
    )  # fmt: skip


def run(where: workspace.Workspace, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `coda-agent tool`."""
    process = begun(where, *args)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def benches(where: workspace.Workspace) -> list[int]:
    """The processes that have the workspace's socket on their command line."""
    place = str(Bench(where.root, print).socket.parent)
    return [pid for pid in below(None) if f"bench.server\0{place}" in command_of(pid)]


def below(parent: int | None) -> list[int]:
    """Every process, or those below one."""
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    if parent is None:
        return everyone
    parents: dict[int, int] = {}
    for pid in everyone:
        try:
            stat = (Path("/proc") / str(pid) / "stat").read_text()
        except OSError:
            continue
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
    found, pending = list[int](), [parent]
    while pending:
        here = pending.pop()
        pending += (children := [pid for pid, above in parents.items() if above == here])
        found += children
    return found


def command_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(done: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.sampled(0.3)
def test_calls_of_many_processes_are_done_by_one_bench(where: workspace.Workspace) -> None:
    code, out, _ = run(where, *START, "--json")
    assert code == 0
    name = json.loads(out)["run"]
    (bench,) = benches(where)
    code, out, _ = run(where, "write_candidate", "text=@mine.py", "--json")
    assert (code, json.loads(out)["run"]) == (0, name)  # the open run
    (where.root / "wrong.py").write_text("import os\n" + RIGHT)
    run(where, "write_candidate", "text=@wrong.py", "--run", "last")
    code, out, _ = run(where, "check", "level=static")
    assert code == 1 and "FAILED at static" in out
    code, out, err = run(where, "check", "level=deep")
    assert (code, out) == (2, "") and "Input should be 'static'" in err
    run(where, "write_candidate", "text=@mine.py")
    code, out, err = run(where, "check", "level=gpu")
    assert code == 3 and "needs a Hopper GPU" in err
    code, out, err = run(where, "read_spec", "--spec", "gemm_swigl")
    assert code == 2 and "did you mean gemm_swiglu" in err
    waiting = [begun(where, "read_demo", "name=gate") for _ in range(3)]
    assert [process.wait(60) for process in waiting] == [0, 0, 0]
    assert benches(where) == [bench]
    assert len(runs.everything(where)) == 1
    assert run(where, "--stop")[1] == "the bench has ended\n"
    until(lambda: not alive(bench))
    assert run(where, "--stop")[1] == "there is no bench\n"


def test_the_client_is_thin() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys, coda_agent.agent.cli.tool; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    heavy = ("torch", "cutlass", "pydantic", "numpy", "coda_agent.agent.pipeline")
    assert not set(heavy) & set(said)


@pytest.mark.sampled(0.3)
def test_a_bench_that_is_killed_between_calls_is_replaced(where: workspace.Workspace) -> None:
    run(where, *START)
    (bench,) = benches(where)
    os.kill(bench, signal.SIGKILL)
    until(lambda: not alive(bench))
    code, _, err = run(where, "write_candidate", "text=@mine.py")
    assert code == 0 and err == f"{client._KILLED}\n"
    (another,) = benches(where)
    code, _, err = run(where, "read_demo", "name=gate")
    assert (code, err, benches(where)) == (0, "", [another])


@pytest.mark.sampled(0.3)
def test_a_bench_of_other_code_is_replaced(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    bench = Bench(where.root, notices.append)
    asked = {"tool": "read_demo", "given": {"name": "gate"}, "spec": "gemm_swiglu"}
    asked |= {"device": "cpu", "folder": str(where.root)}
    assert bench.call(asked)["code"] == 0
    (old,) = benches(where)
    monkeypatch.setattr(client, "fingerprint", lambda *_: "another")
    with pytest.raises(MachineError, match="ends before it does a call"):
        bench.call(asked)  # the new one has the old code too
    assert notices[0] == client._OTHER_CODE
    until(lambda: not alive(old))


@pytest.mark.sampled(0.3)
def test_a_client_that_leaves_interrupts_its_call(where: workspace.Workspace) -> None:
    run(where, *START)
    run(where, "write_candidate", "text=@mine.py")
    (name,) = runs.everything(where)
    process = begun(where, "submit")
    until(lambda: runs.state(name).begun)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    until(lambda: runs.state(name).failure, 30.0)
    assert runs.state(name).error == "interrupted" and runs.state(name).commit is None
    assert run(where, "read_demo", "name=gate")[0] == 0
    assert "interrupted: this call did not finish" in (name.folder / "events.jsonl").read_text()


def test_nobody_else_can_have_the_folder_of_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"coda-agent-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(MachineError, match="is not this user's alone"):
        Bench(tmp_path, print)
    folder.rmdir()
    folder.symlink_to(ROOT)
    with pytest.raises(MachineError, match="is not this user's alone"):
        Bench(tmp_path, print)


def test_a_bench_that_ends_while_it_is_asked_is_no_fault_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        bench = Bench(Path(folder), print)
        listener.bind(str(bench.socket))
        listener.listen()

        def leave() -> None:
            for _ in range(3):
                listener.accept()[0].close()

        threading.Thread(target=leave, daemon=True).start()
        with pytest.raises(MachineError, match="ends before it does a call"):
            bench.call({"tool": "write_candidate", "given": {"text": "x" * 1_000_000}})


KILLS = int(os.environ.get("CODA_TEST_KILLS", "4"))
LEAN = (
    "from coda_agent.agent.bench import server as s; s._warm = s._compile_something = int; s.main()"
)
"""A bench that does not import and compile ahead: here one of them lives for a call or two."""
DEMO: dict[str, Any] = {"tool": "read_demo", "given": {"name": "gate"}}
# Calls, and within how many seconds of being sent each is killed.
CALLS: list[tuple[dict[str, Any], float]] = [
    (DEMO, 0.02),
    ({"tool": "check", "given": {"level": "static"}}, 0.1),
    (
        {"tool": "edit_candidate", "given": {"old": "def gemm_swiglu(", "new": "def gemm_swiglu("}},
        1.5,
    ),
    ({"tool": "read_spec", "spec": "gemm_rmsnorm", "device": "cpu"}, 4.0),  # opens a run
    ({"tool": "check", "given": {"level": "interpret"}}, 6.0),  # at compile workers
]


@pytest.mark.sampled(0.3)
def test_a_kill_at_any_point_of_a_call_loses_nothing_unsaid(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def lean(self: Bench) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", LEAN, str(self.socket)]
        with self._log.open("ab") as log:
            started.append(
                subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            )
        return started[-1]

    monkeypatch.setattr(Bench, "_start", lean)
    draw, came = random.Random(20), list[str]()
    bench = Bench(where.root, lambda _: None)

    def call(asked: dict[str, Any]) -> dict[str, Any]:
        return bench.call({"folder": str(where.root), "run": about.get("run"), **asked})

    about: dict[str, Any] = {}
    opened = call({"tool": "read_spec", "spec": "gemm_swiglu", "device": "cpu"})
    about["run"] = opened["document"]["run"]
    assert call({"tool": "write_candidate", "given": {"text": RIGHT}})["code"] == 0
    # By chance, several kills in turn may all come before a call or after it.
    for i in takewhile(lambda i: i < KILLS or ("lost" not in came and i < 30), count()):
        assert call(DEMO)["code"] == 0  # the last run goes on, at a new bench
        asked, within = CALLS[i % len(CALLS)]
        if "spec" in asked:
            asked = {**asked, "run": None}
        process, delay = started[-1], draw.uniform(0.0, within)
        tree: list[int] = []

        def kill(process: Any = process, tree: list[int] = tree) -> None:
            process.send_signal(signal.SIGSTOP)  # so that it starts nothing that is not seen
            tree += [process.pid, *below(process.pid)]
            process.kill()

        killer = threading.Timer(delay, kill)
        before = {run.id for run in runs.everything(where)}
        killer.start()
        try:
            reply = call(asked)
            assert reply["code"] == 0, reply
            came.append("done")
        except client.Lost as lost:
            assert f"the bench was killed in the middle of {asked['tool']}" in lost.message
            found = {run.id for run in runs.everything(where)} - before or {about["run"]}
            name = lost.hint.removeprefix("go on with --run ")
            assert name in found or lost.hint == "call it again"
            came.append("lost" if name in found else "not begun")
        killer.join()
        process.wait(20)
        until(lambda tree=tree: not any(map(alive, tree)))
        for run in runs.everything(where):
            events = read_events(run.folder / "events.jsonl")
            calls = [e.type for e in events if e.type in ("tool.started", "tool.finished")]
            assert calls == ["tool.started", "tool.finished"] * (len(calls) // 2)
            assert events[-1].type in ("tool.finished", "run.failed", "run.resumed"), events[-1]
            state = runs.state(run)
            assert state.begun is None and state.outcome in ("running", "failed")
    assert call({"tool": "check", "given": {"level": "static"}})["code"] == 0
    print(len(came), "kills:", {kind: came.count(kind) for kind in sorted(set(came))})
    assert "lost" in came
    for _ in range(3):  # an end right after a call is no kill, and is not missed
        started[-1].terminate()
        assert started[-1].wait(10) == 0
        assert call(DEMO)["code"] == 0
