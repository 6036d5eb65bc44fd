"""Skips tests marked `gpu` where there is no Hopper GPU, and draws among those marked `sampled`.
Fixtures of one room are beside its tests."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator

import pytest

from coda_agent.agent.execution.pool import SIDE_BY_SIDE

# Before torch is imported: workers side by side that each take all cores wait for one another. A
# replay of 4 s took 49 beside another worker on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They share the cores with their compile workers too, each of which imports for 5 s.
os.environ.setdefault(SIDE_BY_SIDE, os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# What whoever runs the tests has tuned for himself is not to be dispatched in them.
os.environ["CODA_AGENT_TUNED"] = os.path.join(tempfile.gettempdir(), "coda-agent-nothing-tuned")


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


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real: objects of earlier runs are neither found nor left behind."""
    import quack.cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACK_ARCH", "90")
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        patch.setattr(quack.cache, "CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        yield
