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


def test_a_bench_of_other_code_is_replaced(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    bench = Bench(where.root, notices.append)
    asked = {"tool": "read_demo", "given": {"name": "gate"}, "spec": "gemm_swiglu"}
    asked |= {"device": "cpu", "folder": str(where.root)}
    assert bench.call(asked)["code"] == 0
    (old,) = benches(where)
    monkeypatch.setattr(client, "stamp", lambda: "another")
    with pytest.raises(MachineError, match="ends before it does a call"):
        bench.call(asked)  # the new one has the old code too
    assert notices[0] == client._OTHER_CODE
    until(lambda: not alive(old))


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


def test_a_kill_in_the_middle_of_a_call_loses_nothing_unsaid(where: workspace.Workspace) -> None:
    draw = random.Random(20)
    came: list[int] = []
    for _ in range(KILLS):
        opened, _, _ = run(where, *START)
        assert opened == 0
        name = max(runs.everything(where), key=lambda run: run.id)
        assert run(where, "write_candidate", "text=@mine.py", "--run", name.id)[0] == 0
        (bench,) = benches(where)
        process = begun(where, "check", "level=interpret", "--run", name.id)
        until(lambda name=name: runs.state(name).begun or runs.state(name).attempts, 60.0)
        time.sleep(draw.uniform(0.0, 2.5))
        children = below(bench)
        os.kill(bench, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        came.append(process.returncode)
        state = runs.state(name)
        if process.returncode == 0:
            assert state.begun is None and len(state.attempts) == 1
        else:
            assert process.returncode == 3
            assert "the bench was killed in the middle of check" in err and name.id in err
            assert (state.outcome, state.begun) == ("failed", None)
        assert read_events(name.folder / "events.jsonl")[-1].type in ("tool.finished", "run.failed")
        until(lambda pids=[bench, *children]: not any(map(alive, pids)))
    assert 3 in came
    code, out, _ = run(where, "check", "level=static")
    assert code == 0, out  # and the last run goes on
