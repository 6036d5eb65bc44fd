import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test files are imported by path (importmode=importlib), so helpers beside them are not found.
sys.path.insert(0, str(Path(__file__).parent))

import bench
import server

from coda_agent.agent import judge
from coda_agent.agent.keys import KEYS
from coda_agent.agent.workspace import Workspace


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr(judge, "judge_candidate", bench.quick_judge)
    return bench.make_workspace(tmp_path / "workspace")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., server.Server]]:
    """Starts a server with a script, or with a list of replies, and points the SDK at it."""
    started: list[server.Server] = []

    def start(script: Any) -> server.Server:
        made = server.Server(script if callable(script) else lambda _, number: script[number])  # type: ignore[arg-type]
        started.append(made)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", made.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", bench.KEY)
        monkeypatch.setattr(KEYS, "_held", {})
        return made

    yield start
    for made in started:
        made.shutdown()
        made.server_close()
