"""Real git repositories throughout: what is promised is what git itself then says."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coda_agent.agent import execution, pipeline, publish, references, tune, verify
from coda_agent.agent import workspace as workspaces
from coda_agent.agent.accept import accept, raise_or_revoke, store_tuned
from coda_agent.agent.cli.report import told
from coda_agent.agent.events import RunStarted
from coda_agent.agent.judge.machine import Gpu
from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import VERSIONS, Finding, NumericsReport, WorstError
from coda_agent.agent.judge.verdict import GateResult, Verdict
from coda_agent.agent.publish import FILES, check_place, remark
from coda_agent.agent.workspace import GitError, Workspace
from coda_agent.primitives.errors import SpecError, WorkspaceError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

SPEC: Any = SimpleNamespace(name="gemm_x", summary="D = A B", text="# spec\nå\n")


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def verdict(level: str | None = "proved", candidate: str = "1", **more: Any) -> Verdict:
    digests = {"spec": sha("s"), "candidate": sha(candidate)}
    worst = {"k": WorstError(seed=1, ratio=float("inf"))}
    seen = NumericsReport(ran="interpreter", shapes=(), worst=worst)
    about: dict[str, Any] = {"name": "numerics", "version": VERSIONS["numerics"], "data": seen}
    gate = GateResult(passed=level is not None, **about)
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
    config = DEFAULT_CONFIGS["sm_90a"].to_dict()
    about = {"m": m, "n": 8, "k": 8, "config": config, "blocks": {}}
    return {"bfloat16": [{**about, "median_us": float(time_us)}]}


def test_users_work_is_untouched(where: Workspace) -> None:
    before = work(where.root)
    commit = run_accept(where, level="proved", tuned={"z": measured(1)})
    assert commit == git(where.root, "rev-parse", "HEAD").strip()
    assert work(where.root) == before
    assert committed(where.root) == PATHS
    assert git(where.root, "symbolic-ref", "HEAD").startswith("refs/heads/")
    message = git(where.root, "show", "-s", "--format=%B").strip().splitlines()
    assert message[0] == "Store gemm_x (proved): D = A B"
    trailers = git(where.root, "show", "-s", "--format=%(trailers)").split("\n")
    assert trailers[:4] == [
        f"Spec-Digest: {sha('s')}",
        f"Candidate-Digest: {sha('1')}",
        "Level: proved",
        "Author: composer",
    ]
    folder = where.generated / "gemm_x"
    assert (folder / "kernel.py").read_text() == "x = 1\n"
    assert (folder / "spec.md").read_text() == SPEC.text
    evidence = json.loads((folder / "evidence.json").read_text())
    assert list(evidence)[:4] == ["schema_version", "kernel", "level", "author"]
    assert evidence["worst"]["k"]["ratio"] == "inf"
    assert evidence["gates"]["numerics"]["version"] == VERSIONS["numerics"]
    assert sorted(os.listdir(folder)) == sorted(FILES) and remark(where, "HEAD") == ""


def test_detached_head(where: Workspace) -> None:
    branch = git(where.root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    git(where.root, "checkout", "--detach")
    before, tip = work(where.root), git(where.root, "rev-parse", branch)
    assert run_accept(where)
    assert work(where.root) == before
    assert git(where.root, "rev-parse", branch) == tip
    assert committed(where.root) == PATHS
    assert remark(where, "HEAD").startswith("committed on a detached HEAD")


@pytest.mark.parametrize(
    ("command", "end"),
    [("merge", "--abort"), ("rebase", "--abort"), ("cherry-pick", "--abort")],
)
def test_what_git_has_not_finished_is_refused_before(
    tmp_path: Path, command: str, end: str
) -> None:
    made, _ = workspaces.init(tmp_path / "w")
    identify(made.root)
    git(made.root, "symbolic-ref", "HEAD", "refs/heads/main")
    for text, branch in (("a", []), ("b", ["-b", "side"]), ("c", ["main"])):
        if branch:
            git(made.root, "checkout", "-q", *branch)
        (made.root / "f").write_text(text)
        git(made.root, "add", "-A")
        git(made.root, "commit", "-q", "-m", text)
    with pytest.raises(subprocess.CalledProcessError):
        git(made.root, command, "side")
    before = work(made.root)
    for attempt in (check_place, lambda *_: run_accept(made)):
        with pytest.raises(WorkspaceError, match=f"in the middle of a {command}") as caught:
            attempt(made, "gemm_x")
        assert f"git {command} --continue" in caught.value.hint
    assert work(made.root) == before and not (made.generated / "gemm_x").exists()
    git(made.root, command, "--abort")
    assert run_accept(made)


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
    # Lost from the working tree, even staged: the program and the spec come back.
    (where.generated / "gemm_x" / "kernel.py").unlink()
    git(where.root, "rm", "-q", "generated/gemm_x/spec.md")
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
    assert json.loads((folder / "evidence.json").read_text())["digests"] == digests


def test_raise_and_revoke(where: Workspace) -> None:
    assert run_accept(where)
    before = work(where.root)
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r2") is None
    assert raise_or_revoke(where, "gemm_x", verdict("accepted"), run_id="r2")
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r3") is None
    assert where.kernel("gemm_x").level == "accepted"
    assert where.kernel("gemm_x").evidence.author == "composer"
    assert raise_or_revoke(where, "gemm_x", verdict(None), run_id="r4")
    assert where.kernel("gemm_x").level == "revoked"
    assert "Revoke gemm_x (revoked)" in git(where.root, "show", "-s", "--format=%s")
    assert raise_or_revoke(where, "gemm_x", verdict("verified"), run_id="r4")
    assert raise_or_revoke(where, "gemm_x", verdict(None), run_id="r4")
    assert where.kernel("gemm_x").level == "revoked"
    subject = git(where.root, "show", "-s", "--format=%s").strip()
    assert subject == "Revoke gemm_x (revoked): failed numerics"
    assert raise_or_revoke(where, "gemm_x", verdict(None), run_id="r5") is None
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r6")
    where.kernel("gemm_x").program.write_text("y\n")
    assert raise_or_revoke(where, "gemm_x", verdict("proved", "2"), run_id="r7", text="y\n")
    assert where.kernel("gemm_x").evidence.author == "composer, edited by hand"
    assert where.kernel("gemm_x").program.read_text() == "y\n"
    assert work(where.root) == before


def test_evidence_of_an_earlier_gate_stays_until_as_much_is_shown_again(where: Workspace) -> None:
    assert run_accept(where, level="verified")
    file = where.generated / "gemm_x" / "evidence.json"
    old = json.loads(file.read_text())
    old["gates"]["numerics"]["version"] = 1
    file.write_text(json.dumps(old))
    git(where.root, "commit", "-q", "-m", "old", "--", str(file))
    assert where.kernel("gemm_x").level == "verified"
    assert where.kernel("gemm_x").stale == ["numerics"]
    assert raise_or_revoke(where, "gemm_x", verdict("proved"), run_id="r2") is None
    assert json.loads(file.read_text()) == old
    assert raise_or_revoke(where, "gemm_x", verdict("verified"), run_id="r3")
    assert where.kernel("gemm_x").level == "verified" and where.kernel("gemm_x").stale == []


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


def as_stranger(function: Callable[[], object]) -> int:
    """The exit code of `function` in a process that may not do whatever it likes."""

    def child() -> None:
        # PATH may find git in a folder that a stranger cannot search.
        os.environ["PATH"] = str(Path(shutil.which("git") or "git").resolve().parent)
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        function()

    return in_child(child)


def owned_by_file(where: Workspace, *, tracked: bool) -> None:
    (where.generated / "gemm_x").write_text("mine")
    if tracked:
        git(where.root, "add", "-f", "generated/gemm_x")
        git(where.root, "commit", "-q", "-m", "mine", "--", "generated/gemm_x")
        (where.generated / "gemm_x").unlink()


def moved_aside(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.rename(folder, folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda w: owned_by_file(w, tracked=False), "generated/gemm_x is no folder"),
        (lambda w: owned_by_file(w, tracked=True), "not committed: generated/gemm_x"),
        (lambda w: moved_aside(w.generated), "generated is a symbolic link"),
        (lambda w: moved_aside(w.generated / "gemm_x"), "gemm_x is a symbolic link"),
        (lambda w: git(w.root, "config", "--unset", "user.email"), "does not know who you are"),
    ],
)
def test_what_would_stop_the_commit_is_found_before(
    where: Workspace, prepare: Callable[[Workspace], object], message: str
) -> None:
    check_place(where, "gemm_x")
    prepare(where)
    before, head = work(where.root), git(where.root, "rev-parse", "HEAD")
    for attempt in (check_place, lambda *_: run_accept(where)):
        with pytest.raises(WorkspaceError, match=message) as caught:
            attempt(where, "gemm_x")
        assert caught.value.hint and "\n" not in str(caught.value)
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)


@pytest.mark.parametrize("folder", [".git", "generated"])
def test_folders_that_cannot_be_written_to_are_found_before(folder: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        made, _ = workspaces.init(Path(name) / "w")
        identify(made.root)
        run_accept(made)
        (made.root / folder).chmod(0o555)
        if os.geteuid() == 0:
            for path in (Path(name), *Path(name).rglob("*")):
                os.chown(path, 65534, 65534)

        def refused() -> None:
            with pytest.raises(WorkspaceError, match=f"/{folder} cannot be written to"):
                check_place(made, "gemm_x")

        assert as_stranger(refused) == 0


def edit_staged(where: Workspace, kernel: Path) -> None:
    kernel.write_text("mine")
    git(where.root, "add", "-f", str(kernel))


def delete_staged(where: Workspace, kernel: Path) -> None:
    edit_staged(where, kernel)
    kernel.unlink()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("edit", [lambda w, k: k.write_text("mine"), edit_staged, delete_staged])
@pytest.mark.one_in(3)
def test_what_is_not_committed_is_not_overwritten(
    where: Workspace, edit: Callable[[Workspace, Path], object], again: bool, ignored: bool
) -> None:
    kernel = where.generated / "gemm_x" / "kernel.py"
    if ignored:
        (where.root / ".git" / "info" / "exclude").write_text("generated/\n")
    if again:
        assert run_accept(where)
    kernel.parent.mkdir(exist_ok=True)
    edit(where, kernel)
    before = work(where.root)
    for attempt in (check_place, lambda *_: run_accept(where, "x = 2\n", candidate="2")):
        with pytest.raises(
            WorkspaceError, match="not committed: generated/gemm_x/kernel"
        ) as caught:
            attempt(where, "gemm_x")
    assert work(where.root) == before and "\n" not in str(caught.value)
    if edit is not delete_staged:
        git(
            where.root, "reset", "-q", "intended.txt"
        )  # git stash fails at entries that are intended
        subprocess.run(caught.value.hint.partition("aside: ")[2], shell=True, check=True)
        assert run_accept(where, "x = 2\n", candidate="2")
        assert "mine" in git(where.root, "stash", "show", "-p", "-u")


def test_a_program_that_is_judged_as_it_stands_may_be_edited(where: Workspace) -> None:
    assert run_accept(where)
    kernel = where.kernel("gemm_x").program
    kernel.write_text("y\n")
    check_place(where, "gemm_x", "y\n")
    git(where.root, "add", "generated/gemm_x/kernel.py")
    check_place(where, "gemm_x", "y\n")
    kernel.write_text("z\n")  # two texts, of which one would be lost
    for text in ("y\n", "z\n"):
        with pytest.raises(WorkspaceError, match="not committed"):
            check_place(where, "gemm_x", text)


def test_nothing_is_judged_for_a_place_that_is_not_fit(
    where: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = where.specs / "gemm_swiglu.md"
    spec.write_bytes(workspaces.packaged_specs()["gemm_swiglu"].read_bytes())
    runs = where.root / "logs" / "runs"
    monkeypatch.setattr(references, "admitted", lambda _: None)
    with pipeline.opened(where, spec, RunStarted(author="a"), lambda *_: None) as bench:
        run = bench.run
    swiglu: Any = SimpleNamespace(name="gemm_swiglu", summary="D", text=spec.read_text())
    accept(where, swiglu, "x = 1\n", verdict(), author="composer", run_id="r")
    (where.generated / "gemm_swiglu" / "tuned.json").write_text("{ }")
    monkeypatch.setattr(verify, "_judged", lambda *_: pytest.fail("it was judged"))
    for attempt in (
        lambda: pipeline.opened(where, spec, RunStarted(author="a"), lambda *_: None).__enter__(),
        lambda: pipeline.reopened(where, run, lambda *_: None).__enter__(),
        lambda: verify.verify(where, "gemm_swiglu", lambda *_: None),
        lambda: tune.tune(
            where.kernel("gemm_swiglu"),
            [(8, 8, 8)],
            lambda *_: None,
            new_run=lambda: pytest.fail("a run began"),
            commit=where,
        ),
    ):
        with pytest.raises(WorkspaceError, match=r"not committed: generated/gemm_swiglu/tuned"):
            attempt()
    assert list(runs.iterdir()) == [run.folder]
    assert json.loads((run.folder / "events.jsonl").read_text().splitlines()[-1])["type"] == (
        "spec.admitted"
    )
    with pipeline.opened(where, spec, RunStarted(author="a", commit=False), lambda *_: None):
        pass  # nothing is to be committed


def test_tuning_refuses_a_shape_that_the_function_refuses(
    where: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = workspaces.packaged_specs()["gemm_rmsnorm"].read_text("utf-8")
    text = text.replace("{multiple_of: 16}", "{multiple_of: 4}")
    spec: Any = SimpleNamespace(name="gemm_rmsnorm", summary="D", text=text)
    accept(where, spec, "x = 1\n", verdict(), author="composer", run_id="r")
    monkeypatch.setattr(execution, "hopper", lambda: Gpu("GPU-1", "H200", "9.0"))
    with pytest.raises(SpecError, match="N=20: a kernel of these types takes multiples of 8"):
        tune.tune(
            where.kernel("gemm_rmsnorm"), [(64, 20, 64)], lambda *_: None,
            new_run=lambda: pytest.fail("a run began"),
        )  # fmt: skip


def test_a_remark_is_said_on_a_line_of_its_own() -> None:
    outcome = pipeline.Outcome(
        "k", True, "proved", None, "0" * 40, None, Path("run"), None, remark="on the moon"
    )
    assert told(outcome).splitlines()[1:] == ["on the moon"]


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_LOCK_WAIT_S", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", ["index", "HEAD"])
def test_a_lock_that_stays_is_named_before_and_changes_nothing(
    where: Workspace, again: bool, name: str
) -> None:
    if again:
        assert run_accept(where)
    before, head = work(where.root), git(where.root, "rev-parse", "HEAD")
    lock = where.root / ".git" / f"{name}.lock"
    lock.touch()
    for attempt in (check_place, lambda *_: run_accept(where, "x = 2\n", candidate="2")):
        with pytest.raises(GitError) as caught:
            attempt(where, "gemm_x")
        assert str(caught.value).startswith(f"{lock} is in git's way")
        assert caught.value.hint.endswith(f"rm {lock}") and "\n" not in str(caught.value)
    lock.unlink()
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)
    assert run_accept(where, "x = 2\n", candidate="2")


def test_a_lock_taken_during_the_commit_is_named_whole(where: Workspace) -> None:
    """Git's own words end in "remove the file manually to continue."."""
    lock = where.root / ".git" / "HEAD.lock"
    lock.touch()
    with pytest.raises(GitError) as caught:
        where.git("update-ref", "HEAD", "HEAD~0")
    assert str(lock) in caught.value.message
    lock.unlink()
    with pytest.raises(GitError, match="git cat-file failed: fatal: invalid object name 'nowhere'"):
        where.git("cat-file", "-p", "nowhere:x")


@pytest.mark.parametrize("again", [True, False])
def test_where_git_refuses_all_is_as_it_was(where: Workspace, again: bool) -> None:
    """The lock of the branch is seen by `git commit` alone, after the files were written."""
    if again:
        assert run_accept(where)
    before, old = work(where.root), sorted(where.generated.rglob("*"))
    head = git(where.root, "rev-parse", "HEAD")
    branch = git(where.root, "symbolic-ref", "--short", "HEAD").strip()
    lock = where.root / ".git" / "refs" / "heads" / f"{branch}.lock"
    lock.touch()
    with pytest.raises(GitError, match="is in git's way") as caught:
        run_accept(where, "x = 2\n", candidate="2")
    assert str(lock) in caught.value.message and "\n" not in str(caught.value)
    lock.unlink()
    assert (work(where.root), git(where.root, "rev-parse", "HEAD")) == (before, head)
    assert sorted(where.generated.rglob("*")) == old
    assert run_accept(where, "x = 2\n", candidate="2")


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("again", [True, False])
def test_a_full_disk_leaves_all_as_it_was(
    where: Workspace, monkeypatch: pytest.MonkeyPatch, again: bool, n: int
) -> None:
    if again:
        assert run_accept(where)
    before, old = work(where.root), sorted(where.generated.rglob("*"))
    left, real = [n], os.fsync

    def fill(file: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fill)
        with pytest.raises(WorkspaceError, match="No space left on device"):
            run_accept(where, "x = 2\n", candidate="2")
    assert work(where.root) == before and sorted(where.generated.rglob("*")) == old


def in_child(function: Callable[[], object]) -> int:
    """The exit code of `function` in a fork; 1 where it raised."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.one_in(2)
def test_killed_anywhere(where: Workspace, tmp_path: Path, again: bool) -> None:
    """Kills a real process before its n-th step, for every n: HEAD holds the old kernel or the new
    one, whole, what is staged beside it stays so, git shows what else is in its place, and the same
    call again ends in the same commit."""
    if again:
        run_accept(where)
    staged = git(where.root, "diff", "--cached", "--binary")

    def attempt(made: Workspace, n: int) -> None:
        left = [n]

        def stepped(function: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return function(*args, **kwargs)

            return step

        os.replace, Workspace.git = stepped(os.replace), stepped(Workspace.git)
        run_accept(made, "x = 2\n", candidate="2")

    seen, code, n = set[tuple[str, bool]](), 9, 0
    for n in range(40):
        root = Path(shutil.copytree(where.root, tmp_path / f"{n}", symlinks=True))
        code = in_child(lambda n=n, root=root: attempt(Workspace(root, root), n))
        held = git(root, "ls-tree", "-r", "--name-only", "HEAD", "generated/gemm_x").split()
        program = git(root, "show", "HEAD:generated/gemm_x/kernel.py") if held else ""
        assert held in ([], PATHS) and program in (("x = 1\n" if again else ""), "x = 2\n")
        shown = git(root, "status", "--porcelain", "-uall", "--", "generated")
        file = root / "generated" / "gemm_x" / "kernel.py"
        assert (file.read_text() if file.exists() else "") == program or "kernel.py" in shown
        second = run_accept(Workspace(root, root), "x = 2\n", candidate="2")
        assert (second is None) == (program == "x = 2\n")
        assert git(root, "log", "--format=%s").count("Store") == 1 + again
        assert sorted(os.listdir(root / "generated" / "gemm_x")) == sorted(FILES)
        assert not git(root, "status", "--porcelain", "-uall", "--", "generated")
        assert git(root, "diff", "--cached", "--binary") == staged
        seen.add((program, bool(shown)))
        if not code:
            break
    assert code == 0 and n > 8
    assert seen == {("x = 1\n" * again, False), ("x = 1\n" * again, True), ("x = 2\n", False)}
