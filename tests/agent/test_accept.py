"""Real git repositories throughout: what is promised is what git itself then says."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coda_agent.agent import accept as acceptance
from coda_agent.agent import workspace as workspaces
from coda_agent.agent.accept import FILES, accept, raise_or_revoke, store_tuned
from coda_agent.agent.judge.records import Finding, GateResult, Verdict
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import WorkspaceError

SPEC: Any = SimpleNamespace(name="gemm_x", summary="D = A B", text="# spec\nå\n")


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def verdict(level: str | None = "proved", candidate: str = "1", **more: Any) -> Verdict:
    digests = {"spec": "sha256:s", "candidate": f"sha256:{candidate}", "judge": "sha256:j"}
    gate = GateResult(name="static", passed=level is not None, data={"b": float("inf"), "a": 1})
    gate.findings = [] if level else [Finding(message="no")]
    fields = {"tuned": None, "environment": {"python": "3"}, "not_shown": ["No GPU."], **more}
    return Verdict.model_validate(
        {"passed": level is not None, "level": level, "gates": [gate], "digests": digests, **fields}
    )


def run_accept(where: Workspace, text: str = "x = 1\n", **more: Any) -> str | None:
    return accept(where, SPEC, text, verdict(**more), author="composer", run_id="r1")


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_") or name == "EMAIL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def identify(folder: Path) -> None:
    git(folder, "config", "user.name", "U")
    git(folder, "config", "user.email", "u@example.com")


@pytest.fixture
def where(tmp_path: Path) -> Workspace:
    """A workspace with one commit and every kind of unfinished work in it."""
    made, _ = workspaces.init(tmp_path / "w")
    identify(made.root)
    for name in ("staged.txt", "edited.txt", "deleted.txt", "renamed.txt", "both.txt"):
        (made.root / name).write_text(f"{name}\n")
    git(made.root, "add", "-A")
    git(made.root, "commit", "-m", "first")
    (made.root / "staged.txt").write_text("staged\n")
    (made.root / "both.txt").write_text("staged\n")
    (made.root / "new.txt").write_text("new\n")
    git(made.root, "add", "staged.txt", "both.txt", "new.txt")
    git(made.root, "rm", "deleted.txt")
    git(made.root, "mv", "renamed.txt", "moved.txt")
    (made.root / "both.txt").write_text("and edited\n")
    (made.root / "edited.txt").write_text("edited\n")
    (made.root / "untracked.txt").write_text("untracked\n")
    (made.root / "intended.txt").write_text("later\n")
    git(made.root, "add", "-N", "intended.txt")
    return made


def work(folder: Path) -> tuple[str, ...]:
    return (
        git(folder, "status", "--porcelain=v2", "-uall"),
        git(folder, "diff"),
        git(folder, "diff", "--cached", "--binary"),
    )


def committed(folder: Path, commit: str = "HEAD") -> list[str]:
    return git(folder, "show", "--name-only", "--format=", commit).split()


PATHS = sorted(f"generated/gemm_x/{file}" for file in FILES)


def measured(time_us: int, m: int = 4096) -> dict[str, Any]:
    """One GPU's part of tuned.json."""
    return {"bfloat16": [{"m": m, "n": 8, "k": 8, "median_us": time_us}]}


def test_users_work_is_untouched(where: Workspace) -> None:
    before = work(where.root)
    commit = run_accept(where, level="proved", tuned={"z": measured(1)})
    assert commit == git(where.root, "rev-parse", "HEAD").strip()
    assert work(where.root) == before
    assert committed(where.root) == PATHS
    assert git(where.root, "symbolic-ref", "HEAD").startswith("refs/heads/")
    message = git(where.root, "show", "-s", "--format=%B").strip().splitlines()
    assert message[0] == "Accept gemm_x (proved): D = A B"
    trailers = git(where.root, "show", "-s", "--format=%(trailers)").split("\n")
    assert trailers[:5] == [
        "Spec-Digest: sha256:s",
        "Candidate-Digest: sha256:1",
        "Judge-Digest: sha256:j",
        "Level: proved",
        "Author: composer",
    ]
    folder = where.generated / "gemm_x"
    assert (folder / "kernel.py").read_text() == "x = 1\n"
    assert (folder / "spec.md").read_text() == SPEC.text
    evidence = json.loads((folder / "evidence.json").read_text())
    assert list(evidence)[:5] == ["schema", "kernel", "level", "digests", "author"]
    assert list(evidence)[-1] == "date"
    assert evidence["gates"][0]["data"] == {"a": 1, "b": "inf"}
    assert not list(where.generated.glob(".*.new-*"))


def test_detached_head(where: Workspace) -> None:
    branch = git(where.root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    git(where.root, "checkout", "--detach")
    before, tip = work(where.root), git(where.root, "rev-parse", branch)
    assert run_accept(where)
    assert work(where.root) == before
    assert git(where.root, "rev-parse", branch) == tip
    assert committed(where.root) == PATHS


def test_unborn_head(tmp_path: Path) -> None:
    made, _ = workspaces.init(tmp_path / "w")
    identify(made.root)
    git(made.root, "add", "README.md")
    before = work(made.root)
    assert run_accept(made)
    assert committed(made.root) == PATHS
    assert work(made.root)[1] == before[1]
    assert git(made.root, "diff", "--cached", "--name-status") == "A\tREADME.md\n"


def test_workspace_below_the_top_and_worktree(where: Workspace, tmp_path: Path) -> None:
    inner, _ = workspaces.init(where.root / "deep" / "er")
    before = work(where.root)
    assert run_accept(inner)
    assert work(where.root) == before
    assert committed(where.root) == [f"deep/er/{path}" for path in PATHS]

    git(where.root, "worktree", "add", "-b", "side", str(tmp_path / "side"), "HEAD~1")
    side, _ = workspaces.init(tmp_path / "side")
    here, there = work(where.root), work(side.root)
    head = git(where.root, "rev-parse", "HEAD")
    assert run_accept(side)
    assert (work(where.root), work(side.root)) == (here, there)
    assert git(where.root, "rev-parse", "HEAD") == head
    assert committed(side.root, "side") == PATHS


def test_no_identity_writes_nothing(where: Workspace) -> None:
    git(where.root, "config", "--unset", "user.email")
    before, head = work(where.root), git(where.root, "rev-parse", "HEAD")
    with pytest.raises(WorkspaceError, match="does not know who you are") as caught:
        run_accept(where)
    assert "git config user.name" in caught.value.hint and "user.email" in caught.value.hint
    assert "\n" not in str(caught.value)
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)
    assert not (where.generated / "gemm_x").exists()


def test_hooks_do_not_run_and_ignored_or_filtered_paths_are_kept(where: Workspace) -> None:
    hooks = where.root / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction"):
        (hooks / name).write_text("#!/bin/sh\ntouch hook-ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    git(where.root, "config", "commit.gpgSign", "true")
    git(where.root, "config", "core.autocrlf", "true")
    (where.root / ".git" / "info" / "exclude").write_text("generated/\n")
    before = work(where.root)
    assert run_accept(where)
    assert not (where.root / "hook-ran").exists()
    assert work(where.root) == before
    assert committed(where.root) == PATHS


def test_unchanged_then_restored(where: Workspace) -> None:
    first = run_accept(where)
    kept = (where.generated / "gemm_x" / "evidence.json").read_bytes()
    before = work(where.root)
    assert run_accept(where, not_shown=[]) is None
    assert work(where.root) == before
    # Edited or lost in the working tree, even staged: what was accepted comes back.
    (where.generated / "gemm_x" / "kernel.py").write_text("edited")
    git(where.root, "rm", "-q", "--cached", "generated/gemm_x/spec.md")
    assert run_accept(where) is None
    assert work(where.root) == before
    assert (where.generated / "gemm_x" / "evidence.json").read_bytes() == kept
    assert git(where.root, "rev-parse", "HEAD").strip() == first


def test_what_supersedes(where: Workspace) -> None:
    assert run_accept(where, level="verified", tuned={"sm_90": measured(1)})
    assert run_accept(where, level="proved") is None  # a laptop contradicts nothing
    assert where.kernel("gemm_x").level == "verified"
    assert run_accept(where, level="verified", tuned={"sm_90": measured(2)}) is None
    assert run_accept(where, level="accepted")
    more = {"sm_90": measured(3), "sm_100": measured(4)}  # a GPU more
    assert run_accept(where, level="accepted", tuned=more)
    folder = where.generated / "gemm_x"
    kept = {"sm_90": measured(1), "sm_100": measured(4)}
    assert json.loads((folder / "tuned.json").read_text()) == kept
    assert store_tuned(where, "gemm_x", {"sm_90": measured(5, m=64)})  # a shape more
    (small, large) = measured(5, m=64)["bfloat16"] + measured(1)["bfloat16"]
    kept["sm_90"] = {"bfloat16": [small, large]}
    assert json.loads((folder / "tuned.json").read_text()) == kept
    assert store_tuned(where, "gemm_x", {"sm_90": measured(5, m=64)}) is None
    digests = json.loads((folder / "evidence.json").read_text())["digests"]
    assert run_accept(where, "x = 2\n", level="proved", candidate="2")
    assert where.kernel("gemm_x").level == "proved"
    assert json.loads((folder / "tuned.json").read_text()) == {}
    assert run_accept(where, candidate="1", level="accepted")
    text = (folder / "evidence.json").read_text()
    assert f'"digests": {{ {json.dumps(digests)[1:-1]} }},' in text


def test_raise_and_revoke(where: Workspace) -> None:
    assert run_accept(where)
    before = work(where.root)
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r2") is None
    assert raise_or_revoke(where, "gemm_x", verdict("accepted"), run_id="r2")
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r3") is None
    assert where.kernel("gemm_x").level == "accepted"
    assert where.kernel("gemm_x").evidence["author"] == "composer"
    slow = verdict("verified").model_copy(update={"passed": False})
    assert raise_or_revoke(where, "gemm_x", slow, run_id="r4")
    assert where.kernel("gemm_x").level == "verified"
    assert raise_or_revoke(where, "gemm_x", verdict(None), run_id="r4")
    assert where.kernel("gemm_x").level == "revoked"
    subject = git(where.root, "show", "-s", "--format=%s").strip()
    assert subject == "Revoke gemm_x (revoked): failed static"
    assert raise_or_revoke(where, "gemm_x", verdict(None), run_id="r5") is None
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r6")
    assert raise_or_revoke(where, "gemm_x", verdict("proved", "2"), run_id="r7", text="y\n")
    assert where.kernel("gemm_x").evidence["author"] == "composer, edited by hand"
    assert where.kernel("gemm_x").program.read_text() == "y\n"
    assert work(where.root) == before


def test_refused_is_not_acceptable(where: Workspace) -> None:
    with pytest.raises(ValueError, match="refused"):
        run_accept(where, level=None)


def test_other_files_of_the_folder_stay(where: Workspace) -> None:
    assert run_accept(where)
    (where.generated / "gemm_x" / "notes.txt").write_text("mine")
    before = work(where.root)
    assert run_accept(where, "x = 2\n", candidate="2")
    assert (where.generated / "gemm_x" / "notes.txt").read_text() == "mine"
    assert work(where.root) == before


def test_conflicted_entries_are_refused(where: Workspace) -> None:
    assert run_accept(where)
    blob = git(where.root, "hash-object", "-w", "README.md").strip()
    lines = "".join(f"100644 {blob} {n}\tgenerated/gemm_x/kernel.py\n" for n in (1, 2, 3))
    subprocess.run(
        ["git", "update-index", "--index-info"],
        input=f"0 {'0' * 40}\tgenerated/gemm_x/kernel.py\n{lines}", text=True,
        cwd=where.root, check=True,
    )  # fmt: skip
    with pytest.raises(WorkspaceError, match="merge conflicts"):
        run_accept(where, "x = 2\n", candidate="2")
    assert (where.generated / "gemm_x" / "kernel.py").read_text() == "x = 1\n"


def test_locked_index_rolls_back(where: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_accept(where)
    before, head = work(where.root), git(where.root, "rev-parse", "HEAD")
    monkeypatch.setattr(acceptance, "_LOCK_WAIT_S", 0.2)
    (where.root / ".git" / "index.lock").touch()
    with pytest.raises(WorkspaceError, match="update-index failed"):
        run_accept(where, "x = 2\n", candidate="2")
    (where.root / ".git" / "index.lock").unlink()
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)
    assert (where.generated / "gemm_x" / "kernel.py").read_text() == "x = 1\n"


@pytest.mark.parametrize("again", [True, False])
def test_failed_update_ref_rolls_back(
    where: Workspace, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    if again:
        assert run_accept(where)
    before, head = work(where.root), git(where.root, "rev-parse", "HEAD")
    branch = git(where.root, "symbolic-ref", "HEAD").strip()
    lock = where.root / ".git" / f"{branch}.lock"
    lock.touch()
    with pytest.raises(WorkspaceError, match="update-ref failed"):
        run_accept(where, "x = 2\n", candidate="2")
    lock.unlink()
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)


def test_someone_commits_meanwhile(where: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    real, raced = Workspace.git, []

    def slow(self: Workspace, *args: str, **more: Any) -> str:
        if args[0] == "commit-tree" and not raced:
            raced.append(git(self.top, "commit", "--allow-empty", "-m", "theirs", "--only"))
        return real(self, *args, **more)

    monkeypatch.setattr(Workspace, "git", slow)
    assert run_accept(where)
    assert git(where.root, "log", "--format=%s").splitlines()[:2] == [
        "Accept gemm_x (proved): D = A B",
        "theirs",
    ]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "notes.txt"}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_killed_anywhere(
    where: Workspace, monkeypatch: pytest.MonkeyPatch, again: bool, exchange: bool
) -> None:
    """Kills a real process before its n-th step, for every n: old or new, and the next run ends."""
    if again:
        run_accept(where)
    real_git, target = Workspace.git, where.generated / "gemm_x"
    user = work(where.root)

    def attempt(n: int) -> bool:
        """Forks; the child accepts and dies at step n. Whether it came to its end."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        left = [n]

        def step(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return function(*args, **kwargs)

            return counted

        Workspace.git = step(real_git)
        os.rename, os.fsync = step(os.rename), step(os.fsync)
        acceptance.shutil.rmtree = step(acceptance.shutil.rmtree)
        acceptance._exchange = step(acceptance._exchange if exchange else lambda one, other: False)
        run_accept(where, "x = 2\n", candidate=str(n + 2))
        os._exit(0)

    old = contents(target) if again else None
    done, n = False, 0
    for n in range(100):
        done = attempt(n)
        acceptance._clean(where.generated)  # what the next run does first
        if target.exists():
            now = contents(target)
            assert sorted(now) == sorted(FILES)
            marks = (now["kernel.py"], json.loads(now["evidence.json"])["digests"]["candidate"])
            assert now == old or marks == ("x = 2\n", f"sha256:{n + 2}")
            old = now
        else:
            assert old is None
        assert git(where.root, "diff", "--cached", "--name-only", "--diff-filter=D") in (
            "deleted.txt\n",
        )
        if done:
            break
    assert done and n > 15
    assert work(where.root) == user
    assert not list(where.generated.glob(".*"))[1:]


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_failing_renames_keep_the_old_kernel(
    where: Workspace, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    run_accept(where)
    before, calls, real = work(where.root), [0], os.rename

    def rename(one: Path, other: Path) -> None:
        calls[0] += 1
        if calls[0] - 1 == fail_at:
            raise OSError("disk on fire")
        real(one, other)

    monkeypatch.setattr(acceptance, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="on fire"):
        run_accept(where, "x = 2\n", candidate="2")
    monkeypatch.setattr(os, "rename", real)
    text = (where.generated / "gemm_x" / "kernel.py").read_text()
    assert text == ("x = 2\n" if fail_at == 2 else "x = 1\n")
    assert fail_at == 2 or work(where.root) == before
    assert run_accept(where, "x = 2\n", candidate="2")
    assert work(where.root) == before
