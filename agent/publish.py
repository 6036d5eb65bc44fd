"""One commit of a kernel's files alone, by `git commit --only`.

- One process at a time commits, under a lock that its death gives back.
- `check_place` finds before a trial what would stop the commit after it. What git does not hold is
  never overwritten, and what is staged beside the kernel stays staged.
- Where git refuses, the files are put back. A kill leaves the commit before or the new one; the
  next process that takes the lock puts back what was written and not committed (`_UNDO`).
- No hook runs and nothing is signed: the commit is the machine's, and a hook or a passphrase
  prompt written for people has no place in it.
"""

import contextlib
import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from coda_agent.agent.workspace import GitError, Workspace, lock_error, run_git
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.objects import write_whole

FILES = ("kernel.py", "spec.md", "evidence.json", "tuned.json")

_LOCK_WAIT_S = 10.0
_UNDO = "coda-agent.undo"
"""File of git's folder, there while a commit is under way: texts before it and in it, by path."""
_UNFINISHED = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}
"""What git keeps in its folder while it is in the middle of something."""


def check_identity(workspace: Workspace) -> None:
    """Refuse a repository in which git could not say who commits.

    Raises:
        WorkspaceError: name or e-mail is not configured; names the two commands.
    """
    try:
        for who in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
            # Without useConfigOnly git makes an address up from the host's name on some machines.
            workspace.git("-c", "user.useConfigOnly=true", "var", who)
    except GitError as error:
        hint = 'git config user.name "Your Name" && git config user.email you@example.com'
        raise WorkspaceError("git does not know who you are", hint=hint) from error


def check_place(workspace: Workspace, name: str, text: str | None = None) -> None:
    """Refuse what would stop a kernel's commit, before anything is spent.

    `text` is the program to be committed, which kernel.py may be though git does not hold it.

    Raises:
        WorkspaceError: no git identity, something else in the kernel's place, changes of its files
            that are not committed, a merge or rebase that is not finished, a folder that cannot be
            written to, or a lock that stays.
    """
    with exclusive(workspace, name, text):
        pass


@contextlib.contextmanager
def exclusive(workspace: Workspace, name: str, text: str | None = None) -> Iterator[int]:
    """Give a kernel's place, fit for a commit, to this process alone.

    Yields the lock's descriptor. Git inherits it, so that a git whose parent was killed still holds
    the lock. Raises as `check_place`.
    """
    check_identity(workspace)
    git, folders = workspace.git_folder, (workspace.generated, workspace.generated / name)
    for folder in folders:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            what = "a symbolic link" if folder.is_symlink() else "no folder"
            hint = "a kernel's files go there: move it away"
            raise WorkspaceError(f"{folder} is {what}", hint=hint)
    for folder in (git, *folders):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            hint = "acceptance writes there: see its owner and mode, and how it is mounted"
            raise WorkspaceError(f"{folder} cannot be written to", hint=hint)
    with (git / "coda-agent.lock").open("a") as file:

        def take() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        if not _wait(take):
            raise WorkspaceError(f"another coda-agent is committing in {workspace.top}")
        for lock in (git / "index.lock", git / "HEAD.lock"):
            if not _wait(lambda lock=lock: not lock.exists()):
                raise lock_error(lock)
        _undo_killed(workspace)
        _check_changes(workspace, name, text)
        yield file.fileno()


def edited(workspace: Workspace, name: str) -> bool:
    """Whether git holds a kernel's program, and another than is on disk."""
    program = f"{_spelled(workspace, name)}/kernel.py"
    return b"M" in run_git(workspace.top, "status", "--porcelain", "--", program)[:2]


def remark(workspace: Workspace, commit: str | None) -> str:
    """Say where a commit went that is on no branch; else nothing."""
    with contextlib.suppress(GitError):
        if commit is None or workspace.git("symbolic-ref", "--quiet", "HEAD"):
            return ""
    return "committed on a detached HEAD: git branch NAME gives it a branch"


def publish(
    workspace: Workspace, name: str, files: Mapping[str, str], message: str, lock: int
) -> str | None:
    """Write and commit a kernel's files; inside `exclusive`, which gave `lock`.

    Returns:
        The commit, or None where HEAD held them already.

    Raises:
        WorkspaceError: git refused, or a file could not be written; the files are as they were.
    """
    spelled, undo = _spelled(workspace, name), workspace.git_folder / _UNDO
    before = {f"{spelled}/{file}": _text(workspace.generated / name / file) for file in files}
    after = {f"{spelled}/{file}": text for file, text in files.items()}
    try:
        write_whole(undo, json.dumps({"before": before, "after": after}))
        for path, text in after.items():
            write_whole(workspace.top / path, text)
        workspace.git("add", "--force", "--", *after, lock=lock)
        if not workspace.git("status", "--porcelain", "--", *after):
            return None
        about = ("--only", "--quiet", "--no-gpg-sign", "--cleanup=verbatim", "-m", message)
        workspace.git("commit", *about, "--", *after, lock=lock)
        return workspace.git("log", "-1", "--format=%H", "--", *after)
    except (GitError, OSError) as error:
        _put_back(workspace, before, after)
        if isinstance(error, GitError):
            raise
        raise WorkspaceError(f"{name} could not be written: {error}") from error
    finally:
        undo.unlink(missing_ok=True)


def _undo_killed(workspace: Workspace) -> None:
    """Put back what a process wrote that was killed before its commit."""
    undo = workspace.git_folder / _UNDO
    if not undo.is_file():
        return
    saved = json.loads(undo.read_text("utf-8"))
    for folder in {(workspace.top / path).parent for path in saved["after"]}:
        for torn in folder.glob(".*.tmp"):
            torn.unlink()
    if workspace.git("status", "--porcelain", "--ignored", "--", *saved["after"]):
        _put_back(workspace, saved["before"], saved["after"])
    undo.unlink()


def _put_back(
    workspace: Workspace, before: Mapping[str, str | None], after: Mapping[str, str]
) -> None:
    """Make files what they were, but for those edited since."""
    with contextlib.suppress(GitError):
        workspace.git("reset", "--quiet", "--", *after)
    with contextlib.suppress(OSError):
        for path, text in before.items():
            file = workspace.top / path
            if text is None and _text(file) == after[path]:
                file.unlink()
            elif text is not None and _text(file) in (None, after[path]):
                file.write_bytes(text.encode("utf-8", "surrogateescape"))
        for folder in {(workspace.top / path).parent for path in before}:
            folder.rmdir()  # of a kernel that did not come, if empty


def _text(path: Path) -> str | None:
    """Read a file's text as on disk; None where there is none."""
    if path.is_symlink() or not path.is_file():
        return None
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _spelled(workspace: Workspace, name: str) -> str:
    """Spell the kernel's folder as git does, from the tree's top."""
    return (workspace.generated.relative_to(workspace.top) / name).as_posix()


def _check_changes(workspace: Workspace, name: str, text: str | None) -> None:
    """Refuse what git has not finished, and uncommitted changes of the files."""
    for file, what in _UNFINISHED.items():
        if (workspace.git_folder / file).exists():
            hint = f"git {what} --continue, or --abort"
            raise WorkspaceError(f"git is in the middle of a {what}", hint=hint)
    spelled = _spelled(workspace, name)
    ours = {f"{spelled}/{file}" for file in FILES}
    about = ("--porcelain", "-z", "--untracked-files=all", "--ignored", "--no-renames")
    listing = run_git(workspace.top, "status", *about, "--", spelled)
    changed: list[str] = []
    for line in filter(None, listing.decode("utf-8", "surrogateescape").split("\0")):
        state, path = line[:2], line[3:]
        if "U" in state or state in ("AA", "DD"):
            raise WorkspaceError(f"{path} has merge conflicts", hint="resolve the merge first")
        deleted = state in (" D", "D ") and path in ours  # HEAD holds it
        judged = path == f"{spelled}/kernel.py" and (state in ("??", "!!") or " " in state)
        own = judged and (_text(workspace.top / path) or "").replace("\r\n", "\n") == text
        if path in {spelled, *ours} and not (deleted or own):
            changed.append(path)
    if changed:
        stash = ["git", "-C", str(workspace.top), "stash", "push", "--all", "--", *changed]
        message = f"acceptance would overwrite what is not committed: {', '.join(changed)}"
        hint = f"commit it, or set it aside: {shlex.join(stash)}"
        raise WorkspaceError(message, hint=hint)


def _wait(ready: Callable[[], bool]) -> bool:
    """Poll `ready` until it holds or the wait is over."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not (done := ready()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done
