"""Skips tests marked `gpu` where there is no Hopper GPU, draws among those marked `sampled`, and runs
those of confinement in each tier of sandbox. Other fixtures belong to each room's tests."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter

import pytest

from coda_agent.agent import sandbox
from coda_agent.agent.execution.pool import SIDE_BY_SIDE

# Before torch is imported: workers side by side that each take all cores wait for one another. A
# replay of 4 s took 49 beside another worker on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They share the cores with their compile workers too, each of which imports for 5 s.
os.environ.setdefault(SIDE_BY_SIDE, os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# What whoever runs the tests has tuned for himself is not to be dispatched in them.
os.environ["CODA_AGENT_TUNED"] = os.path.join(tempfile.gettempdir(), "coda-agent-nothing-tuned")
# A bench for each test would be a process that stays; tests/agent/test_bench.py starts its own.
os.environ["CODA_AGENT_BENCH"] = "off"


@pytest.fixture(scope="session", params=sandbox.TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    """Each tier of sandbox that works here, however strong the others are."""
    return request.param


@pytest.fixture
def locked_down(tier: str) -> None:
    """For what a candidate is refused by the tier, and in tier process by what the kernel lets any
    process give up (`launcher.lock_down`)."""
    if tier == "process" and (reason := sandbox.unavailable("landlock")):
        pytest.skip(f"tier process promises limits only on this kernel: {reason}")


def _has_hopper() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    major, _ = torch.cuda.get_device_capability()
    return major == 9


def _sampled(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to other runs all but a share of what is marked `sampled`: of a hundred functions each
    is tested as the next one is, and `make test` runs often. Outside of it all run. Tests that are
    marked with one name are drawn together, where what is shared between them takes the time.
    Of neighbours with a share of a third every third is drawn, wherever the count begins, so that
    all runs take about as long."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # all workers of a run draw the same
    if run is None or os.environ.get("CODA_TEST_ALL"):
        return
    count, draws = random.Random(run).random(), dict[str, bool]()
    left = list[pytest.Item]()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            share, drawn = mark.args[0], (*mark.args, item.nodeid)[1]
            if drawn not in draws:
                before, count = count, count + share
                draws[drawn] = int(count) > int(before)
            if not draws[drawn]:
                left.append(item)
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sampled(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if tier := item.callspec.params.get("tier"):
                item.user_properties.append(("tier", tier))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skipped here and not in the fixture, so that the summary folds all of a tier into one line.
    for name, tier in item.user_properties:
        if name == "tier" and (reason := sandbox.unavailable(str(tier))):
            pytest.skip(f"tier {tier}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each tier of sandbox: how many of its tests ran, or why none could."""
    counts = {
        outcome: Counter(
            value
            for report in terminalreporter.stats.get(outcome, [])
            for name, value in getattr(report, "user_properties", [])
            if name == "tier"
        )
        for outcome in ("passed", "failed", "error", "skipped")
    }
    if not any(counts.values()):
        return
    for tier in sandbox.TIERS:
        said = ", ".join(f"{n[tier]} {outcome}" for outcome, n in counts.items() if n[tier])
        reason = sandbox.unavailable(tier)
        terminalreporter.write_line(
            f"sandbox tier {tier}: " + (f"not run: {reason}" if reason else said or "no test")
        )
