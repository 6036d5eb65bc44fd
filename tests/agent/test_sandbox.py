"""Sandbox tiers: what a child in each can reach, how a tier is chosen, and where it is recorded."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent import sandbox
from coda_agent.agent.cli import app
from coda_agent.agent.execution.environment import environment
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.sandbox import Sandbox
from coda_agent.primitives.errors import CodaError, MachineError

ROOT = Path(__file__).parents[2]
HERE = str(Path(__file__).parent)
SIGNALS_ARE_SCOPED = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6  # Landlock's version


strong = pytest.mark.parametrize("tier", ["bubblewrap", "landlock"], indirect=True)


def pool(tier: str) -> CompilePool:
    where = Sandbox(tier, {})
    return CompilePool(1, sandbox=where, module="faulty_child", environment={"PYTHONPATH": HERE})


@pytest.fixture
def no_bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A machine without bubblewrap; gives the reason that is recorded."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(str(shutil.which("git")))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(sandbox.VARIABLE, raising=False)
    sandbox.unavailable.cache_clear()
    yield "bwrap was not found (the package bubblewrap has it)"
    sandbox.unavailable.cache_clear()


@strong
@pytest.mark.parametrize(
    "home", [Path.home(), ROOT.parent], ids=["at home", "a repository at home"]
)
def test_what_a_sandboxed_child_can_reach(
    tier: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "secret").write_text("secret")
    disk = next((f"/dev/{d}" for d in os.listdir("/sys/block") if Path(f"/dev/{d}").exists()), "-")
    mine, secret = os.getpid(), str(tmp_path / "secret")
    job = {"root": str(ROOT), "home": str(home), "judge": mine, "secret": secret}
    with pool(tier) as workers:
        can = workers.run({"kind": "probe", "disk": disk, **job}, 20)
    for folder in (ROOT, ROOT / ".git", home):
        left = list(folder.glob("probe-*")) if folder.is_dir() else []
        for path in left:
            path.unlink()
        assert left == [], folder
    allowed = {name for name, answer in can.items() if answer == "yes"}
    if tier == "bubblewrap":  # what is written there is nowhere, and all it sees is its own
        allowed -= {"write .git", "write the home", "list processes", "list its launcher's files"}
    elif not SIGNALS_ARE_SCOPED:
        allowed -= {"signal its parent"}
    assert allowed == {"write the cache", "write its TMPDIR", "start a tool"}, can


def test_the_environment_is_scrubbed(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "2")
    with pool(tier) as workers:
        found = workers.run({"kind": "environment"}, 20)
        private = Path(found["TMPDIR"])
        assert found["CUDA_VISIBLE_DEVICES"] == ""
        assert not {"ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(found)
        if tier == "process":
            assert private.is_dir()
        else:
            assert found["HOME"] == found["TMPDIR"]
    assert tier == "bubblewrap" or not private.exists()  # there it is the child's own /tmp
    assert not list(Path(tempfile.gettempdir()).glob("coda-agent-probe*"))


def test_the_strongest_that_works_is_chosen_and_what_is_missing_recorded(no_bwrap: str) -> None:
    chosen = sandbox.choose()
    assert chosen.missing["bubblewrap"] == no_bwrap
    expected = "process" if sandbox.unavailable("landlock") else "landlock"
    assert chosen.tier == expected
    assert environment("cpu")["sandbox"] == {"tier": chosen.tier, "missing": chosen.missing}


def test_a_demand_that_is_not_met_is_an_error(
    no_bwrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sandbox.VARIABLE, "bubblewrap")
    with pytest.raises(MachineError, match=r"must be bubblewrap or stronger.*bwrap was not found"):
        CompilePool(1)
    monkeypatch.setenv(sandbox.VARIABLE, "jail")
    with pytest.raises(CodaError, match="no sandbox 'jail'"):
        CompilePool(1)
    monkeypatch.setenv(sandbox.VARIABLE, "")  # as if unset
    assert sandbox.choose().tier in sandbox.TIERS


def test_on_the_command_line(no_bwrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sandbox.VARIABLE, "process")  # so that what --sandbox sets is undone
    kernel = str(ROOT / "generated" / "gemm_swiglu" / "kernel.py")
    result = CliRunner().invoke(app, ["check", kernel, "--sandbox", "bubblewrap"])
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1 and no_bwrap in result.stderr
    assert CliRunner().invoke(app, ["check", kernel, "--sandbox", "jail"]).exit_code == 2
    monkeypatch.setenv(sandbox.VARIABLE, "")
    missing = CliRunner().invoke(app, ["check", "nowhere.py"])
    assert "no sandbox" not in missing.stderr and "nowhere.py" in missing.stderr
    items = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["items"]
    found = {item["name"]: item for item in items}
    assert found["sandbox bubblewrap"]["value"] is None
    assert found["sandbox bubblewrap"]["hint"] == no_bwrap


@strong
def test_a_tier_that_stops_nothing_does_not_count(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_wrapped", lambda tier, command: command)
    sandbox.unavailable.cache_clear()
    reason = sandbox.unavailable(tier)
    sandbox.unavailable.cache_clear()
    assert reason is not None
    for what in ("reading files of others", "a look at other processes", "sockets"):
        assert f"it does not stop {what}" in reason


def test_no_sandbox_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with CompilePool(1, sandbox=Sandbox("process", {"landlock": "no kernel"})):
        pass
    assert "candidates are compiled without a sandbox" in caplog.text and "no kernel" in caplog.text


def test_no_candidate_runs_in_the_judging_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JUDGED, str(ROOT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["level"] == "proved" and said["gates"] == ["static", "compile", "numerics"]
    # The static gate parses the text, and nothing else is ever made of it here.
    assert said["judging"] == ["compile <unknown>"]
    # What the hook would have seen, had it been run.
    assert said["control"] == ["compile <candidate>", "exec <candidate>"]


JUDGED = """
import json, sys
from pathlib import Path
seen = []
def hook(event, arguments):
    if event == "compile" and MARK in str(arguments[0]):
        seen.append(f"compile {arguments[1]}")
    elif event == "exec" and MARK in str(arguments[0].co_consts):
        seen.append(f"exec {arguments[0].co_filename}")
    elif event in ("code.__new__", "marshal.loads") and MARK in str(arguments):
        seen.append(event)

from coda_agent.agent.execution import executor
from coda_agent.agent.judge import judge_candidate
from coda_agent.agent.execution.compile_worker import load_programs
from coda_agent.specs import load_spec
root = Path(sys.argv[1])
spec = load_spec(root / "specs" / "gemm_rmsnorm.md")
spec = spec.model_copy(update={"check_shapes": spec.check_shapes[:1]})
MARK = "a mark of this candidate"
text = (root / "generated" / "gemm_rmsnorm" / "kernel.py").read_text()
text = text.replace("gemm_rmsnorm: ", MARK + " ", 1)  # in the module's docstring
assert text.count(MARK) == 1
sys.addaudithook(hook)
verdict = judge_candidate(
    spec, text, executor(), device="cpu", types=["bfloat16"], gates=("static", "compile", "numerics")
)
judging = [*seen]
load_programs(text)
print(json.dumps({
    "level": verdict.level, "gates": [gate.name for gate in verdict.gates],
    "judging": judging, "control": seen[len(judging):],
}))
"""
