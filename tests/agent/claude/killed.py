"""Runs the author and kills it, again and again: `killed.py FOLDER KILLS SEED...`, driven by a test.

One process has everything imported and forks; each child starts or resumes a run and is killed by
SIGKILL, either while it writes an event (after a random part of the line), or at a random time. When a
run has come to its end it is checked, and the next begins, until there were enough kills. Each seed has
a process of its own for that, and leaves its report in FOLDER.
"""

import functools
import gc
import json
import os
import random
import shutil
import signal
import ssl
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import bench

from coda_agent.agent import judge, log
from coda_agent.agent.authors import Options
from coda_agent.agent.budget import Budget
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import GitError, Workspace

LONGEST_S = 0.15
"""Random times are up to this; a whole run takes about as long."""


def kill_while_writing(count: int, share: float) -> None:
    """From now on, the event number `count` of this process is its last: a part of its line."""
    plain, left = log.RunLog.append, [count]

    def append(self: Any, event: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return plain(self, event)
        file, real = self._file, os.fsync

        def torn(handle: int) -> None:
            size = os.fstat(handle).st_size
            os.ftruncate(handle, before + round(share * (size - before)))
            real(handle)
            os.kill(os.getpid(), signal.SIGKILL)

        before = os.fstat(file.fileno()).st_size
        os.fsync = torn
        return plain(self, event)

    log.RunLog.append = append


def child(where: Workspace) -> None:
    """Starts or resumes the run of a workspace."""
    os.environ.setdefault("ANTHROPIC_API_KEY", bench.KEY)
    who = bench.author(Options(budget=Budget(steps=10_000, usd=1e6, tokens=10**12)))
    logs = list((where.root / "logs" / "runs").glob("*/events.jsonl"))
    if not logs or not log.read_events(logs[0]):
        shutil.rmtree(where.root / "logs" / "runs", ignore_errors=True)
        bench.generate(where, who)
    else:
        bench.resume(where, who)


def spawn(where: Workspace, draw: random.Random | None) -> int:
    """Runs `child` in a process of its own; its exit status, or the signal that ended it, negated."""
    # Each is to die, half of them of either cause: one that comes to its end takes three times as
    # long as one that is killed.
    writing = draw is not None and draw.random() < 0.5
    pid = os.fork()
    if not pid:
        status = 70
        try:
            if draw and writing:
                kill_while_writing(draw.randint(1, 12), draw.random())
            child(where)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if draw and not writing:
        time.sleep(draw.uniform(0.0, LONGEST_S))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def ended(where: Workspace) -> bool:
    logs = list((where.root / "logs" / "runs").glob("*/events.jsonl"))
    found = log.read_events(logs[0]) if logs else []
    return bool(found) and found[-1].type == "run.finished"


def check(where: Workspace) -> JsonObject:
    """What a finished run left: its commits, its program, and whether the log is whole."""
    events = bench.log_of(where)
    try:
        commits = where.git("log", "--format=%s").splitlines()
    except GitError:
        commits = []
    evidence = json.loads(where.git("show", "HEAD:generated/gemm_swiglu/evidence.json"))
    return {
        "commits": commits,
        "tree": where.git("ls-tree", "-r", "--name-only", "HEAD").splitlines(),
        "program": where.git("rev-parse", "HEAD:generated/gemm_swiglu/kernel.py"),
        "spec": where.git("rev-parse", "HEAD:generated/gemm_swiglu/spec.md"),
        "digests": evidence["digests"],
        "level": evidence["level"],
        "status": where.git("status", "--porcelain", "--untracked-files=no"),
        "contiguous": [event.seq for event in events] == list(range(len(events))),
        "outcome": RunState.of(events).outcome,
        "folders": sorted(path.name for path in where.generated.iterdir()),
    }


def kill(folder: Path, template: Path, kills: int, seed: int) -> None:
    """Runs until there were enough kills; writes report-SEED.json."""
    draw, done, finished, faults = random.Random(seed), 0, list[Any](), list[str]()
    while done < kills and not faults:
        root = folder / f"{seed}-{len(finished)}"
        shutil.copytree(template, root)
        where = Workspace(root, root)
        while not ended(where):
            code = spawn(where, random.Random(draw.random()) if done < kills else None)
            done += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL):
                faults.append(f"exit code {code} in {root}")
                break
        else:
            finished.append(check(where))
            shutil.rmtree(root)
    report = {"kills": done, "runs": finished, "faults": faults}
    (folder / f"report-{seed}.json").write_text(json.dumps(report))


def main(folder: Path, kills: int, seeds: list[int]) -> None:
    judge.judge_candidate = bench.quick_judge
    # Reading the certificates takes 0.04 s of the 0.2 s of a child, none of which needs any.
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    # One run that nobody kills: what the others are compared with, and all that is lazy is done.
    undisturbed = bench.make_workspace(folder / "undisturbed")
    child(undisturbed)
    report = {"kills": 0, "runs": [check(undisturbed)], "faults": []}
    (folder / "report-undisturbed.json").write_text(json.dumps(report))
    template = bench.make_workspace(folder / "template").root
    gc.freeze()  # a collection in a child would touch, and so copy, all of the parent's memory
    started: list[int] = []
    for seed in seeds:
        pid = os.fork()
        if not pid:
            status = 70
            try:
                kill(folder, template, kills, seed)
                status = 0
            finally:
                os._exit(status)
        started.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in started]):
        sys.exit("a process that kills ended with a fault")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])
