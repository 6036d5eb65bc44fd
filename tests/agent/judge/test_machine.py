"""Who uses the GPU: nvidia-smi's words, containers that hide ids, refusal and patience."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.judge.machine import (
    CONTENDED,
    contention,
    gpu_state,
    others,
    related,
    require_idle,
)
from coda_agent.primitives.errors import MachineError

IDLE = {"other_processes": 0, "utilization.gpu": "0"}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi that prints `apps` for processes, and notes how it was called."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f'case "$*" in *compute-apps*) cat {tmp_path}/apps;; '
        "*) echo 'NVIDIA H200, 580.1, 1980, 3201, 41, 120.50, 0x0000000000000004, 7';; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,GPU-cd")
    monkeypatch.delenv("CODA_AGENT_GPU", raising=False)
    (tmp_path / "apps").write_text("")
    return tmp_path


def test_the_state_is_what_nvidia_smi_says_of_the_visible_gpu(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)  # in a container it may be 1
    (smi / "apps").write_text(f"{os.getpid()}\n1\n")
    state = gpu_state()
    assert state["clocks.sm"] == "1980" and state["temperature.gpu"] == "41"
    assert str(state["clocks_event_reasons.active"]).endswith("4")
    assert (state["compute_processes"], state["other_processes"]) == (2, 1)
    assert all(line.startswith("-i GPU-ab ") for line in (smi / "calls").read_text().splitlines())
    assert contention(state) == "the GPU is in use: 1 other processes are on it"


def test_parent_and_child_are_not_others(smi: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert related(str(child.pid)) and related(str(os.getppid())) and related(str(os.getpid()))
        (smi / "apps").write_text(f"{child.pid}\n")
        assert gpu_state()["other_processes"] == 0
    finally:
        child.kill()
        child.wait()
    assert not related("1") or os.getppid() == 1
    assert not related("[N/A]")


@pytest.mark.parametrize(
    ("processes", "has_context", "expected"),
    [
        ([], True, 0),
        (["me"], True, 0),
        (["me", "you"], True, 1),
        (["you"], False, 1),
        (["4711"], True, 0),  # renumbered: this process
        (["[N/A]", "[N/A]"], True, 1),
        (["[N/A]"], False, 1),
    ],
)
def test_others(processes: list[str], has_context: bool, expected: int) -> None:
    assert others(processes, lambda pid: pid == "me", has_context=has_context) == expected


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({**IDLE, "utilization.gpu": "97"}, "the GPU is in use 97 % of the time"),
        ({**IDLE, "other_processes": 2}, "the GPU is in use: 2 other processes are on it"),
        ({"error": "no answer"}, "nothing says who else uses the GPU: no answer"),
    ],
)
def test_a_gpu_in_use_is_refused_unless_the_user_allows_it(
    state: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONTENDED, raising=False)
    waits: list[float] = []
    with pytest.raises(MachineError) as caught:
        require_idle(lambda: state, waits.append)
    assert caught.value.message == reason
    assert "--contended" in caught.value.hint
    assert sum(waits) == 5
    monkeypatch.setenv(CONTENDED, "1")
    require_idle(lambda: state, waits.append)
    assert sum(waits) == 5


def test_it_waits_for_what_ran_before_to_leave_the_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CONTENDED, raising=False)
    states: Iterator[Any] = iter([{**IDLE, "utilization.gpu": u} for u in ("80", "40", "10")])
    waits: list[float] = []
    require_idle(lambda: next(states), waits.append)
    assert waits == [0.5, 0.5]
    require_idle(lambda: {**IDLE, "utilization.gpu": "[N/A]"}, waits.append)
    assert len(waits) == 2


def test_a_machine_without_nvidia_smi_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert contention(gpu_state()).startswith("nothing says who else uses the GPU: nvidia-smi: ")
