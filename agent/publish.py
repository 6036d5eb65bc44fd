"""One commit of a kernel's four files, made beside the user's work; HEAD is the truth.

- All that takes room on the disk comes before HEAD moves: the objects, the user's index with our
  four entries changed, and the files, in a folder beside the target. What follows are renames. So
  whatever fails, on a full disk too, leaves everything as it was.
- A kill leaves the old kernel or the new one in HEAD. Whoever takes the lock next compares what was
  prepared with HEAD, and finishes or discards it.
- `check_place` finds before a trial what would stop the commit after it. What git does not hold is
  never overwritten.
- No hook runs and nothing is signed: the commit is the machine's, and a hook or a passphrase
  prompt written for people has no place in it.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coda_agent.agent.workspace import GitError, Workspace, lock_error, run_git
from coda_agent.primitives.errors import WorkspaceError

FILES = ("kernel.py", "spec.md", "evidence.json", "tuned.json")

_LOCK_WAIT_S = 10.0
_HEAD_RETRIES = 5
_READY = ".coda-ready-"
"""Before a kernel's name: the folder of its files to come, where generated/ ignores it."""
_OURS = "coda-agent"
"""Where an index.lock of ours leads: a link is made in one step, takes no room, and is told from
git's own when its maker was killed."""
_UNFINISHED = {
    "rebase-merge": "a rebase: aborting it leaves this commit on no branch",
    "rebase-apply": "a rebase: aborting it leaves this commit on no branch",
    "MERGE_HEAD": "a merge, which goes on from this commit",
    "CHERRY_PICK_HEAD": "a cherry-pick, which goes on from this commit",
    "REVERT_HEAD": "a revert, which goes on from this commit",
}
"""What git keeps in its folder while it is in the middle of something."""


@dataclass(frozen=True)
class _Git:
    """Where a working tree's git keeps what a commit changes; no `branch` on a detached HEAD."""

    folder: Path
    common: Path
    index: Path
    branch: Path | None

    @classmethod
    def of(cls, workspace: Workspace) -> "_Git":
        places = ("--absolute-git-dir", "--git-common-dir", "--git-path", "index")
        said = workspace.git("rev-parse", *places).splitlines()
        folder, common, index = (workspace.top / line for line in said)
        branch: Path | None = None
        with contextlib.suppress(GitError):
            branch = common / workspace.git("symbolic-ref", "--quiet", "HEAD")
        return cls(folder, common, index, branch)

    @property
    def lock(self) -> Path:
        return Path(f"{self.index}.lock")

    @property
    def prepared(self) -> Path:
        """The index to come."""
        return self.folder / "coda-agent.index"


def check_identity(workspace: Workspace) -> None:
    """Refuses a repository in which git could not say who commits.

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
    """Refuses what would stop the commit of a kernel; called before anything is spent on it. The
    text is what kernel.py may be though git does not hold it: the program to be committed.

    Raises:
        WorkspaceError: no git identity, something else in the kernel's place, changes of its files
            that are not committed, a folder that cannot be written to, or a lock that stays.
    """
    with exclusive(workspace, name, text):
        pass


@contextlib.contextmanager
def exclusive(workspace: Workspace, name: str, text: str | None = None) -> Iterator[int]:
    """The place of a kernel, to this process alone and fit for a commit; raises as `check_place`.
    The lock's descriptor, for `publish`.

    What a killed process left is mended first.
    """
    check_identity(workspace)
    git = _Git.of(workspace)
    target = workspace.generated / name
    _check_folders(workspace, name)
    needed = [git.folder, git.common / "objects", git.branch and git.branch.parent]
    for folder in filter(None, [*needed, workspace.generated, target]):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            hint = "acceptance writes there: see its owner and mode, and how it is mounted"
            raise WorkspaceError(f"{folder} cannot be written to", hint=hint)
    with (git.folder / "coda-agent.lock").open("w") as file:

        def take() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        if not _wait(take):
            raise WorkspaceError(f"another coda-agent is committing in {workspace.top}")
        heads = [git.folder / "HEAD", *filter(None, [git.branch])]
        for lock in (git.lock, *(Path(f"{head}.lock") for head in heads)):
            if not _wait(lambda lock=lock: not lock.exists()):
                raise lock_error(lock)
        # Only now: a git that outlived the process that began it may still have moved HEAD.
        _mend(workspace, git)
        _check_changes(workspace, name, text)
        yield file.fileno()


def held(workspace: Workspace, name: str) -> dict[str, bytes]:
    """What HEAD holds of the kernel's files, as a checkout would write them."""
    found: dict[str, bytes] = {}
    for file, path in _paths(workspace, name).items():
        with contextlib.suppress(GitError):
            found[file] = run_git(workspace.top, "cat-file", "--filters", f"HEAD:{path}")
    return found


def remark(workspace: Workspace, commit: str | None) -> str:
    """What is unusual about where a commit went, in one line; nothing on a branch at rest, or where
    there is none."""
    if commit is None:
        return ""
    git = _Git.of(workspace)
    for file, what in _UNFINISHED.items():
        if (git.folder / file).exists():
            return f"committed in the middle of {what}"
    if git.branch is None:
        return "committed on a detached HEAD: git branch NAME gives it a branch"
    return ""


def publish(
    workspace: Workspace, name: str, files: Mapping[str, bytes], message: str, *, lock: int
) -> str | None:
    """Brings the kernel's `files` into HEAD, the index and the working tree; inside `exclusive`,
    which gave the `lock`.

    Returns:
        The commit, or None where HEAD held them already.

    Raises:
        WorkspaceError: git refused, or a file could not be written; then nothing has changed.
    """
    git, target = _Git.of(workspace), workspace.generated / name
    ready = workspace.generated / f"{_READY}{name}"
    try:
        ready.mkdir()
        for file in FILES:
            with (ready / file).open("wb") as out:
                out.write(files[file])
                out.flush()
                os.fsync(out.fileno())
        blobs = _blobs(workspace, {p: ready / f for f, p in _paths(workspace, name).items()}, "-w")
        target.mkdir(exist_ok=True)
        for left in reversed(range(_HEAD_RETRIES)):
            parent = _head(workspace)
            commit = _commit(workspace, git, parent, blobs, message)
            _prepare_index(workspace, git, blobs)
            try:
                if commit:
                    log = f"coda-agent: {message.partition(chr(10))[0]}"
                    # The old value makes this fail where someone committed meanwhile; "" is unborn.
                    # If we are killed now, git moves HEAD yet: until then it holds our lock.
                    moved = ("HEAD", commit, parent or "")
                    workspace.git("update-ref", "-m", log, *moved, holding=lock)
            except GitError:
                if not left or _head(workspace) == parent:
                    raise
                continue
            finally:
                # Ctrl-C may come after HEAD moved: then the commit stands.
                if _holds(workspace, blobs):
                    os.replace(git.prepared, git.index)
                    for file in FILES:
                        os.replace(ready / file, target / file)
            return commit
        raise AssertionError("unreachable")
    except OSError as error:
        raise WorkspaceError(f"{name} could not be written: {error}") from error
    finally:
        _mend(workspace, git)


def _paths(workspace: Workspace, name: str) -> dict[str, str]:
    """Each file's path from the top of the working tree, as git spells it."""
    folder = workspace.generated.relative_to(workspace.top) / name
    return {file: (folder / file).as_posix() for file in FILES}


def _check_folders(workspace: Workspace, name: str) -> None:
    """Refuses what is no folder where one has to be, in the working tree, the index or HEAD."""
    folders = (workspace.generated, workspace.generated / name)
    spelled = {folder.relative_to(workspace.top).as_posix(): folder for folder in folders}
    tree = ["--with-tree=HEAD"] if _head(workspace) else []
    listing = workspace.git("ls-files", "-z", *tree, "--", *spelled)
    tracked = {spelled[path] for path in listing.split("\0") if path in spelled}
    for folder in folders:
        there = folder.is_symlink() or (folder.exists() and not folder.is_dir())
        if there or folder in tracked:
            what = "a symbolic link" if folder.is_symlink() else "no folder"
            what = what if there else "committed or staged as something else than a folder"
            hint = "a kernel's files go there: move it away" + ", and commit that" * (not there)
            raise WorkspaceError(f"{folder} is {what}", hint=hint)


def _check_changes(workspace: Workspace, name: str, text: str | None) -> None:
    """Refuses changes of the kernel's files that only the working tree or the index holds."""
    paths = _paths(workspace, name)
    about = ("--porcelain", "-z", "--untracked-files=all", "--ignored", "--no-renames")
    listing = run_git(workspace.top, "status", *about, "--", *paths.values())
    changed: list[str] = []
    for line in filter(None, listing.decode("utf-8", "surrogateescape").split("\0")):
        state, path = line[:2], line[3:]
        if "U" in state or state in ("AA", "DD"):
            raise WorkspaceError(f"{path} has merge conflicts", hint="resolve the merge first")
        file, untracked = workspace.top / path, state in ("??", "!!")
        # What was deleted comes back out of HEAD, and what stands there already is written again.
        deleted = state in (" D", "D ")
        held = untracked and file.is_file() and _holds(workspace, _blobs(workspace, {path: file}))
        own = path == paths["kernel.py"] and (untracked or " " in state) and _is_text(file, text)
        if not (deleted or held or own):
            changed.append(path)
    if changed:
        stash = ["git", "-C", str(workspace.top), "stash", "push", "--all", "--", *changed]
        message = f"acceptance would overwrite what is not committed: {', '.join(changed)}"
        hint = f"commit it, or set it aside: {shlex.join(stash)}"
        raise WorkspaceError(message, hint=hint)


def _is_text(path: Path, text: str | None) -> bool:
    return not path.is_symlink() and path.is_file() and path.read_text("utf-8", "replace") == text


def _head(workspace: Workspace) -> str | None:
    """The commit HEAD stands on; None before the first."""
    try:
        return workspace.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except GitError:
        return None


def _blobs(workspace: Workspace, files: Mapping[str, Path], *write: str) -> dict[str, str]:
    """The objects of files, by their path in git; `-w` makes them, too."""
    return {
        path: workspace.git("hash-object", *write, "--path", path, str(file))
        for path, file in files.items()
    }


def _holds(workspace: Workspace, blobs: Mapping[str, str]) -> bool:
    """Whether HEAD holds exactly these objects at these paths."""
    with contextlib.suppress(GitError):
        held = workspace.git("rev-parse", *(f"HEAD:{path}" for path in blobs))
        return held.split() == [*blobs.values()]
    return False


def _wait(ready: Callable[[], bool]) -> bool:
    """Polls `ready` until it holds or the wait is over."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not (done := ready()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def _commit(
    workspace: Workspace, git: _Git, parent: str | None, blobs: Mapping[str, str], message: str
) -> str | None:
    """A commit of the parent's tree with `blobs`, on no branch; None where nothing changes."""
    git.prepared.unlink(missing_ok=True)
    index = {"GIT_INDEX_FILE": str(git.prepared)}
    workspace.git("read-tree", parent or "--empty", env=index)
    workspace.git(*_update(blobs), env=index)
    tree = workspace.git("write-tree", env=index)
    if parent and tree == workspace.git("rev-parse", f"{parent}^{{tree}}"):
        return None
    parents = ["-p", parent] if parent else []
    # commit-tree never signs unless told to, whatever commit.gpgSign says.
    return workspace.git("commit-tree", tree, *parents, "-m", message.strip())


def _prepare_index(workspace: Workspace, git: _Git, blobs: Mapping[str, str]) -> None:
    """Takes git's lock of the user's index, and writes beside it the index that is to follow."""

    def take() -> bool:
        with contextlib.suppress(FileExistsError):
            os.symlink(_OURS, git.lock)
        return _is_ours(git.lock)

    if not _wait(take):
        raise lock_error(git.lock)
    git.prepared.unlink(missing_ok=True)
    if git.index.exists():
        shutil.copy2(git.index, git.prepared)  # its time tells git which entries to look at again
    workspace.git(*_update(blobs), env={"GIT_INDEX_FILE": str(git.prepared)})


def _update(blobs: Mapping[str, str]) -> list[str]:
    cached = (("--cacheinfo", f"100644,{blob},{path}") for path, blob in blobs.items())
    return ["update-index", "--add", *(part for pair in cached for part in pair)]


def _is_ours(lock: Path) -> bool:
    return lock.is_symlink() and os.readlink(lock) == _OURS


def _mend(workspace: Workspace, git: _Git) -> None:
    """Finishes what a process left that had moved HEAD, and removes what another had prepared."""
    for left in (git.prepared, Path(f"{git.prepared}.lock")):
        left.unlink(missing_ok=True)
    if _is_ours(git.lock):
        git.lock.unlink()
    for ready in workspace.generated.glob(f"{_READY}*"):
        name = ready.name.removeprefix(_READY)
        paths = _paths(workspace, name)
        files = {path: ready / file for file, path in paths.items() if (ready / file).is_file()}
        # They are written and moved in this order: without the last, not all had been prepared.
        if paths[FILES[-1]] in files and _holds(workspace, _blobs(workspace, files)):
            workspace.git("checkout", "HEAD", "--", *files)
        _remove(ready)
        with contextlib.suppress(OSError):
            (workspace.generated / name).rmdir()  # of a kernel that did not come, if empty


def _remove(folder: Path) -> None:
    """Removes a folder of ours; of a link put in its place, the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
