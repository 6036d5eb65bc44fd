"""Skips tests marked `gpu` where there is no Hopper GPU, marks cases `slow` of tests marked `one_in`,
and fixes the seeds of every test. Fixtures of one room are beside its tests."""

from __future__ import annotations

import gc
import os
import random
import secrets
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest

from coda_agent.agent.execution.pool import SIDE_BY_SIDE

# Before torch is imported: workers side by side that each take all cores wait for one another. A
# replay of 4 s took 49 beside another worker on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They share the cores with their compile workers too, each of which imports for 5 s.
os.environ.setdefault(SIDE_BY_SIDE, os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Without bytecode each of the processes that tests start compiles the package again, and pytest all
# of the tests: 10 s at the start of a worker.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What is imported while tests are collected stays: looking through it took 3 s of the 15 s.
gc.disable()
# What whoever runs the tests has tuned for himself is not to be dispatched in them.
os.environ["CODA_AGENT_TUNED"] = os.path.join(tempfile.gettempdir(), "coda-agent-nothing-tuned")

# What the judge draws its inputs by, which no author may know, is fixed in tests.
_judge = random.Random()
secrets.randbits = _judge.getrandbits


def _has_hopper() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    major, _ = torch.cuda.get_device_capability()
    return major == 9


def _seed(name: str) -> None:
    """Draw what follows by a test's name: the same at each run, in any order, on any worker."""
    import torch

    _judge.seed(name)
    random.seed(name)
    torch.manual_seed(zlib.crc32(name.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed(item.nodeid.partition("::")[0])  # a fixture of the module, whichever test asks first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed(item.nodeid)


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks which are `slow`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = Counter[str]()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker("slow")
            cases[test] += 1
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20)  # graphs have many small objects: 6 % of a compilation's time


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real: objects of earlier runs are neither found nor left behind."""
    import quack.cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACK_ARCH", "90")
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        patch.setattr(quack.cache, "CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        yield
