"""Faults of candidates and of compile workers: each is a clear error of its job, the next job on the
same pool is answered rightly, and no process and no descriptor is left. In each sandbox tier."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.execution.child import Limits
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.sandbox import Sandbox, launcher
from coda_agent.primitives.errors import CompileError

HERE = str(Path(__file__).parent)
GOOD = "from coda_agent.primitives import Tile, epilogue\n@epilogue(O=Tile)\ndef k(acc):\n    return {'O': acc}\n"
# What no static gate would admit: the modules of the interpreter, through a function's globals.
ESCAPE = (
    "from coda_agent.primitives import epilogue\n"
    "get = epilogue.__globals__['__builtins__']['__import__']\n"
    "b, os, sys = get('builtins'), get('os'), get('sys')\n"
)
Fault = Callable[..., str]


@dataclass(frozen=True)
class Marked(Sandbox):
    """A tier whose processes, forks too, carry a mark in their command line."""

    mark: str = ""

    def wrap(self, command: list[str]) -> list[str]:
        return super().wrap([*command, self.mark])


def marked(mark: str) -> list[int]:
    """The live processes with the mark, of whatever parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended
            continue
    return found


@pytest.fixture(scope="module")
def pools(tier: str) -> Iterator[tuple[CompilePool, CompilePool, str]]:
    """A pool of the real worker, one of the faulty child, and the mark of both; one worker each."""
    mark = f"coda-test-{secrets.token_hex(8)}"
    where = Marked(tier, {}, mark)
    limits = Limits(address_space_bytes=4 << 30, file_bytes=8 << 20, open_files=256)
    with (
        CompilePool(1, sandbox=where) as real,
        CompilePool(
            1, sandbox=where, module="faulty_child", limits=limits, environment={"PYTHONPATH": HERE}
        ) as faulty,
    ):
        yield real, faulty, mark
    assert marked(mark) == []


@pytest.fixture
def candidate(pools: tuple[CompilePool, CompilePool, str]) -> Iterator[Fault]:
    """Runs a hostile text past the static gate and returns the error."""
    pool = pools[0]

    def run(body: str, timeout_s: float = 20) -> str:
        with pytest.raises(CompileError) as caught:
            pool.run({"kind": "load", "text": ESCAPE + body}, timeout_s)
        return str(caught.value)

    yield from _and_the_next_job(
        run, lambda: pool.run({"kind": "load", "text": GOOD})["k"]["name"], "k"
    )


@pytest.fixture
def fault(pools: tuple[CompilePool, CompilePool, str]) -> Iterator[Fault]:
    """Runs a fault of the worker itself and returns the error."""
    pool, mark = pools[1], pools[2]

    def run(kind: str, timeout_s: float = 20, **more: Any) -> str:
        with pytest.raises(CompileError) as caught:
            pool.run({"kind": kind, **more}, timeout_s)
        assert [
            p for p in marked(mark) if b"faulty" in Path(f"/proc/{p}/cmdline").read_bytes()
        ] == []
        return str(caught.value)

    yield from _and_the_next_job(run, lambda: pool.run({"kind": "echo", "value": 7}, 20), 7)


def _and_the_next_job(run: Fault, job: Callable[[], Any], answer: Any) -> Iterator[Fault]:
    assert job() == answer
    before = len(os.listdir("/proc/self/fd"))
    yield run
    assert job() == answer
    assert len(os.listdir("/proc/self/fd")) == before


# What a candidate does; tests/exploits/test_traced_child.py has what it tries.


def test_ways_to_end(candidate: Fault) -> None:
    assert "exit status 0" in candidate("os._exit(0)")
    assert "exit status 3" in candidate("os._exit(3)")
    assert "killed by SIGSEGV" in candidate("get('ctypes').string_at(0)")
    assert "exit status 1" in candidate("sys.exit(0)")
    assert "RecursionError" in candidate("f = lambda: f()\nf()")


def test_no_descriptor_leads_to_the_judge(candidate: Fault) -> None:
    forged = '{"nonce": "", "answer": {"kind": "ok", "result": {}}}\\n'
    body = f"for fd in b.range(3, 300):\n    try: os.write(fd, b'{forged}')\n    except b.OSError: pass\n"
    said = candidate(f"{body}raise b.ValueError('done')")
    assert "no JSON" in said  # its only descriptor is that of its own answer, now spoilt
    body = "raise b.ValueError([(fd, os.readlink(f'/proc/self/fd/{fd}').split(':')[0]) for fd in b.range(9) if os.path.lexists(f'/proc/self/fd/{fd}')])"
    assert "[(0, '/dev/null'), (1, 'pipe'), (2, 'pipe'), (3, 'pipe')]" in candidate(body)


# Elsewhere than in tier landlock, which shows a process no map of its memory; what is in the memory
# does not depend on the tier.
@pytest.mark.parametrize("tier", ["bubblewrap", "process"], indirect=True)
def test_the_nonce_is_nowhere_in_its_memory(
    candidate: Fault, pools: tuple[CompilePool, CompilePool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nonce, canary = secrets.token_hex(16), secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda _: nonce)
    # Digests, so that what is looked for is not put there by looking for it.
    body = (
        f"canary = '{canary}'\n"
        "re, hashlib, string_at = get('re'), get('hashlib'), get('ctypes').string_at\n"
        "found = b.set()\n"
        "for line in b.open('/proc/self/maps').read().splitlines():\n"
        "    if ' rw' in line and '[vvar' not in line:\n"
        "        start, end = (b.int(x, 16) for x in line.split()[0].split('-'))\n"
        "        for token in re.findall(rb'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', string_at(start, end - start)):\n"
        "            found.add(hashlib.sha256(token).hexdigest())\n"
        "raise b.ValueError(' '.join(found))\n"
    )
    found = set(re.findall("[0-9a-f]{64}", candidate(body)))
    assert hashlib.sha256(canary.encode()).hexdigest() in found
    assert hashlib.sha256(nonce.encode()).hexdigest() not in found


# What a worker does; in one tier where a tier does not matter.

any_tier = pytest.mark.parametrize("tier", ["process"], indirect=True)


def test_a_tree_of_processes_dies_with_its_job(fault: Fault) -> None:
    assert "no answer within 0.3 s" in fault("daemon and hang", 0.3)
    assert "no answer within 0.5 s" in fault("bomb", 0.5, depth=6)


@any_tier
def test_limits_of_memory_and_files(
    fault: Fault, pools: tuple[CompilePool, CompilePool, str]
) -> None:
    assert "MemoryError" in fault("allocate")
    assert pools[1].run({"kind": "fill"}, 20) == f"OSError {8 << 20}"


@any_tier
def test_a_compile_worker_gives_way_to_what_is_timed(candidate: Fault) -> None:
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    assert f"{nice} it is" in candidate("raise b.RuntimeError(f'{os.getpriority(0, 0)} it is')\n")


@any_tier
def test_a_worker_that_ends(fault: Fault) -> None:
    assert "died: exit status 0" in fault("exit", status=0)
    assert "died: exit status 1: RuntimeError: what went wrong" in fault("raise")


def test_a_worker_killed_from_outside(fault: Fault) -> None:
    def strike() -> None:
        for pid in launcher.below(os.getpid()):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if line[1:4] == [b"-P", b"-m", b"faulty_child"]:
                os.kill(pid, signal.SIGKILL)

    threading.Timer(0.2, strike).start()
    assert "died: killed by SIGKILL" in fault("hang", 20)


@any_tier
def test_a_launcher_killed_from_outside(fault: Fault) -> None:
    def strike() -> None:
        for pid in launcher.below(os.getpid()):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"supervise" in line and b"faulty_child" in line:
                os.kill(pid, signal.SIGKILL)

    threading.Timer(0.2, strike).start()
    assert "the same mathematics written otherwise may compile" in fault("hang", 20)


@any_tier
def test_records_that_are_none(fault: Fault) -> None:
    assert "closed its results" in fault("close", 20)
    assert "does not carry the nonce" in fault("forge")
    assert "does not carry the nonce" in fault("forge no record")
    assert "more than once" in fault("twice")
    assert "no JSON" in fault("nest")
    assert "exceeds 16777216 bytes" in fault("flood results")


@any_tier
def test_output_does_not_matter(pools: tuple[CompilePool, CompilePool, str]) -> None:
    assert pools[1].run({"kind": "flood", "value": 3}, 20) == 3


@any_tier
def test_an_idle_worker_that_spoke_unasked_is_replaced(
    pools: tuple[CompilePool, CompilePool, str],
) -> None:
    pool = pools[1]
    assert pool.run({"kind": "late record", "value": 4}, 20) == 4
    time.sleep(0.3)  # the record comes between the jobs
    assert pool.run({"kind": "echo", "value": 5}, 20) == 5


def test_all_dies_with_a_judge_that_is_killed(tier: str) -> None:
    code = (
        "import sys\n"
        "from coda_agent.agent.execution.child import Child\n"
        "from coda_agent.agent.sandbox import Sandbox\n"
        "tier, here, mark = sys.argv[1:]\n"
        "wrap = lambda command: Sandbox(tier, {}).wrap([*command, mark])\n"
        "child = Child('faulty_child', environment={'PYTHONPATH': here}, wrap=wrap)\n"
        "said = lambda _: print('started', flush=True)\n"
        "child.call({'kind': 'daemon and hang'}, timeout_s=600, progress=said)\n"
    )
    mark = f"coda-test-{secrets.token_hex(8)}"
    command = [sys.executable, "-c", code, tier, HERE, mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as judge:
        assert judge.stdout is not None and judge.stdout.readline() == b"started\n"
        assert len(marked(mark)) >= 4  # the judge, the launcher, the worker, the daemon
        judge.kill()
    deadline = time.monotonic() + 5
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marked(mark) == []
