"""Acceptance: generated/<kernel>/ and one git commit that holds it, and nothing else.

- The four files are swapped in together: built in a folder beside the target, fsynced, exchanged
  by one rename. A kill at any point leaves the old kernel or the new one.
- The commit is built beside the user's work: a temporary index holds HEAD and our four paths, and
  the user's own index changes in those four entries only. It changes *before* HEAD does: a kill in
  between leaves the kernel staged, where the other order would leave its reversal staged.
- No hook runs and nothing is signed: the commit is the machine's, and a hook or a passphrase
  prompt written for people has no place in it.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.events import plain, utc_now
from coda_agent.agent.workspace import GitError, Workspace, run_git
from coda_agent.primitives.errors import WorkspaceError

if TYPE_CHECKING:
    from coda_agent.agent.judge import Verdict
    from coda_agent.specs import Spec

FILES = ("kernel.py", "spec.md", "evidence.json", "tuned.json")
SCHEMA = 1
LEVELS = ("revoked", "proved", "verified", "accepted")
"""Every level, from the least shown to the most."""

_LOCK_WAIT_S = 10.0
_HEAD_RETRIES = 5


def accept(
    workspace: Workspace, spec: "Spec", text: str, verdict: "Verdict", *, author: str, run_id: str
) -> str | None:
    """Stores a candidate that passed and commits it.

    Returns:
        The commit, or None where HEAD already holds this program with evidence as strong; the
        working tree then shows what HEAD holds.

    Raises:
        ValueError: the verdict is a refusal.
        WorkspaceError: no git identity (nothing was written then), or git refused (the folder and
            the index are as they were).
    """
    if not verdict.passed or verdict.level is None:
        raise ValueError(f"the judge refused {spec.name}: there is nothing to accept")
    subject = f"Accept {spec.name} ({verdict.level}): {spec.summary}"
    sources = {"kernel.py": text, "spec.md": spec.text}
    return _record(workspace, spec.name, sources, verdict, verdict.level, subject, author, run_id)


def raise_or_revoke(
    workspace: Workspace, kernel: str, verdict: "Verdict", *, run_id: str, text: str | None = None
) -> str | None:
    """Brings a kernel's evidence in line with a new verdict and commits it.

    A pass raises the level, or keeps it: a machine that can show less than an earlier one did has
    contradicted nothing. A refusal revokes it. `text` is the program that was judged, by default
    kernel.py as it is now. Returns and raises as `accept`.
    """
    stored = workspace.kernel(kernel)
    level = verdict.level or "revoked"
    author = str(stored.evidence.get("author", "unknown"))
    if _digests(verdict).get("candidate") != stored.evidence.get("digests", {}).get("candidate"):
        author = f"{author.removesuffix(', edited by hand')}, edited by hand"
    failed = [gate.name for gate in verdict.gates if not gate.passed and not gate.skipped]
    reason = "re-graded" if verdict.passed else f"failed {', '.join(failed)}"
    subject = f"{'Verify' if verdict.passed else 'Revoke'} {kernel} ({level}): {reason}"
    sources = {
        "kernel.py": text if text is not None else stored.program.read_text("utf-8"),
        "spec.md": stored.spec.read_text("utf-8"),
    }
    return _record(workspace, kernel, sources, verdict, level, subject, author, run_id)


def store_tuned(workspace: Workspace, kernel: str, measured: Mapping[str, Any]) -> str | None:
    """Adds measured shapes to a kernel's tuned.json and commits it; None where nothing is new.

    Raises:
        WorkspaceError: no git identity, no such kernel in HEAD, or git refused.
    """
    check_identity(workspace)
    with _exclusive(workspace):
        _clean(workspace.generated)
        files = _held(workspace, kernel)
        if files.keys() != set(FILES):
            raise WorkspaceError(f"{kernel} is not committed", hint="accept it first: generate")
        tuned = _merged(_parsed(files, "tuned.json"), measured)
        files["tuned.json"] = _encode(_sorted(tuned))
        return _publish(workspace, kernel, files, f"Tune {kernel} on {', '.join(measured)}\n")


def _merged(known: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """tuned.json with the entries of `measured` in place of, or beside, those of the same shape."""
    merged: dict[str, Any] = {gpu: dict(types) for gpu, types in known.items()}
    for gpu, types in measured.items():
        for dtype, entries in types.items():
            found = {(e["m"], e["n"], e["k"]): e for e in merged.get(gpu, {}).get(dtype, [])}
            found |= {(e["m"], e["n"], e["k"]): e for e in entries}
            merged.setdefault(gpu, {})[dtype] = [found[shape] for shape in sorted(found)]
    return merged


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


def _record(
    workspace: Workspace,
    name: str,
    sources: Mapping[str, str],
    verdict: "Verdict",
    level: str,
    subject: str,
    author: str,
    run_id: str,
) -> str | None:
    check_identity(workspace)
    digests = _digests(verdict)
    evidence = {
        "schema": SCHEMA,
        "kernel": name,
        "level": level,
        "digests": digests,
        "author": author,
        "run": run_id,
        "gates": [_sorted(gate) for gate in verdict.gates],
        "environment": _sorted(verdict.environment),
        "not_shown": list(verdict.not_shown),
        "date": utc_now(),
    }
    trailed = ("spec", "candidate", "judge")
    trailers = {f"{key.title()}-Digest": digests.get(key, "unknown") for key in trailed}
    trailers |= {"Level": level, "Author": author}
    message = textwrap.shorten(subject, 100, placeholder=" …") + "\n\n"
    message += "\n".join(f"{key}: {' '.join(value.split())}" for key, value in trailers.items())
    with _exclusive(workspace):
        _clean(workspace.generated)
        held = _held(workspace, name)
        old, known = _parsed(held, "evidence.json"), _parsed(held, "tuned.json")
        if not _same_program(digests, old):
            known = {}  # another program's best tiles
        measured = (verdict.tuned or {}) if verdict.passed else {}
        if held.keys() != set(FILES) or _supersedes(verdict, level, old):
            files = {file: text.encode() for file, text in sources.items()}
            files["evidence.json"] = _encode(evidence)
            tuned = _merged(known, measured)
        else:
            files = dict(held)
            tuned = _merged(measured, known)  # a GPU not seen before is all that can be new
        files["tuned.json"] = _encode(_sorted(tuned))
        return _publish(workspace, name, files, message + "\n")


def _digests(verdict: "Verdict") -> dict[str, str]:
    return {key: str(value) for key, value in sorted(verdict.digests.items())}


def _sorted(value: object) -> Any:
    """`value` as plain JSON data with the keys of every object in order."""
    return json.loads(json.dumps(plain(value), sort_keys=True))


def _encode(value: object) -> bytes:
    """JSON for review in git: a record without records inside, or a list of numbers, is a line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break in JSON text is layout, never part of a string.
    leaf = re.compile(r"\{\n[^{}\[\]]*\}|\[\n[-+.\deE,\s]*\]")
    return (leaf.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n").encode()


def _same_program(digests: Mapping[str, str], old: Mapping[str, Any]) -> bool:
    known = old.get("digests", {})
    return all(digests.get(key) == known.get(key) for key in ("spec", "candidate"))


def _supersedes(verdict: "Verdict", level: str, old: Mapping[str, Any]) -> bool:
    """Whether new evidence replaces `old`: another program, a refusal, more shown, or as much
    shown by another judge or toolchain."""
    digests = _digests(verdict)
    if not _same_program(digests, old) or old.get("level") not in LEVELS:
        return True
    if level == old["level"]:
        return digests != old["digests"]
    return not verdict.passed or LEVELS.index(level) > LEVELS.index(old["level"])


def _parsed(held: Mapping[str, bytes], file: str) -> dict[str, Any]:
    """A JSON object HEAD holds; empty where it is missing or damaged."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(json.loads(held.get(file, b"{}")))
    return {}


def _paths(workspace: Workspace, name: str) -> dict[str, str]:
    """Each file's path from the top of the working tree, as git spells it."""
    folder = workspace.generated.relative_to(workspace.top) / name
    return {file: (folder / file).as_posix() for file in FILES}


def _head(workspace: Workspace) -> str | None:
    """The commit HEAD stands on; None before the first."""
    try:
        return workspace.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except GitError:
        return None


def _held(workspace: Workspace, name: str) -> dict[str, bytes]:
    """What HEAD holds of the kernel's files, as a checkout would write them."""
    held: dict[str, bytes] = {}
    for file, path in _paths(workspace, name).items():
        with contextlib.suppress(GitError):
            held[file] = run_git(workspace.top, "cat-file", "--filters", f"HEAD:{path}")
    return held


def _holds(workspace: Workspace, entries: Mapping[str, str]) -> bool:
    """Whether HEAD holds exactly these entries (mode,object by path)."""
    if _head(workspace) is None:
        return False
    listing = workspace.git("ls-tree", "-z", "--full-tree", "HEAD", "--", *entries)
    held: dict[str, str] = {}
    for entry in filter(None, listing.split("\0")):
        about, _, path = entry.partition("\t")
        mode, _, blob = about.split()
        held[path] = f"{mode},{blob}"
    return held == entries


@contextlib.contextmanager
def _exclusive(workspace: Workspace) -> Iterator[None]:
    """One acceptance at a time in a working tree; another process is waited for."""
    lock = Path(workspace.git("rev-parse", "--absolute-git-dir")) / "coda-agent.lock"
    with lock.open("w") as file:

        def take() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        if not _wait(take):
            raise WorkspaceError(f"another coda-agent is committing in {workspace.top}")
        yield


def _wait(ready: Callable[[], bool]) -> bool:
    """Polls `ready` until it holds or the wait is over."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not (done := ready()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def _publish(
    workspace: Workspace, name: str, files: Mapping[str, bytes], message: str
) -> str | None:
    """Puts `files` into the working tree, the index and, where HEAD differs, a commit."""
    target = workspace.generated / name
    fresh = workspace.generated / f".{name}.new-{secrets.token_hex(4)}"
    existed = target.exists()
    try:
        _build(fresh, target, files)
        paths = _paths(workspace, name)
        entries = {
            path: "100644," + workspace.git("hash-object", "-w", "--path", path, str(fresh / file))
            for file, path in paths.items()
        }
        before = _staged(workspace, list(paths.values()))
        _swap(fresh, target)
        try:
            _stage(workspace, entries)
            try:
                return _commit(workspace, entries, message)
            except BaseException:
                # Ctrl-C may come after HEAD moved: then the commit stands.
                if not _holds(workspace, entries):
                    _stage(workspace, {path: before.get(path) for path in entries})
                raise
        except BaseException:
            if not _holds(workspace, entries):
                _swap(fresh, target) if existed else os.rename(target, fresh)
            raise
    finally:
        _remove(fresh)


def _build(fresh: Path, target: Path, files: Mapping[str, bytes]) -> None:
    """Fills `fresh`: whatever else the user keeps in the target's folder, and `files`, fsynced."""
    if target.is_dir() and not target.is_symlink():
        ignore = shutil.ignore_patterns("__pycache__", *FILES)
        shutil.copytree(target, fresh, symlinks=True, ignore=ignore)
    else:
        fresh.mkdir(parents=True)
    for file, content in files.items():
        with (fresh / file).open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    _sync_folder(fresh)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(one: Path, other: Path) -> None:
    """Exchanges two folders of one parent; `other` may not be there, then `one` becomes it."""
    if not other.exists():
        os.rename(one, other)
    elif not _exchange(one, other):
        # Where the system cannot exchange in one step: `_clean` mends a kill between these.
        aside = other.with_name(f".{other.name}.old-{secrets.token_hex(4)}")
        os.rename(other, aside)
        try:
            os.rename(one, other)
        except OSError:
            os.rename(aside, other)
            raise
        os.rename(aside, one)
    _sync_folder(other.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Linux renameat2(RENAME_EXCHANGE); False where system or file system has no such thing."""
    call = _renameat2()
    if call is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        folder, path = ctypes.c_int, ctypes.c_char_p
        call.argtypes = [folder, path, folder, path, ctypes.c_uint]
    return call


def _clean(generated: Path) -> None:
    """Mends and removes what killed runs left; only under the lock, where none is in use."""
    for aside in generated.glob(".*.old-*"):
        target = generated / aside.name[1:].partition(".")[0]
        if not target.exists():
            os.rename(aside, target)
    for stale in [*generated.glob(".*.old-*"), *generated.glob(".*.new-*")]:
        _remove(stale)


def _remove(folder: Path) -> None:
    """Removes a folder of ours; of a link put in its place, the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _staged(workspace: Workspace, paths: list[str]) -> dict[str, str]:
    """The user's index entries of `paths`, as mode,object.

    Raises:
        WorkspaceError: one of them is in conflict.
    """
    staged: dict[str, str] = {}
    listing = workspace.git("ls-files", "--stage", "-z", "--", *paths)
    for entry in filter(None, listing.split("\0")):
        about, _, path = entry.partition("\t")
        mode, blob, stage = about.split()
        if stage != "0":
            raise WorkspaceError(f"{path} has merge conflicts", hint="resolve the merge first")
        staged[path] = f"{mode},{blob}"
    return staged


def _stage(workspace: Workspace, entries: Mapping[str, str | None]) -> None:
    """Sets entries of the user's index, and no other; None takes one out."""
    args: list[str] = []
    for path, entry in entries.items():
        args += ["--cacheinfo", f"{entry},{path}"] if entry else ["--force-remove", path]
    failure: list[GitError] = []

    def update() -> bool:
        try:
            workspace.git("update-index", "--add", *args)
        except GitError as error:
            failure[:] = [error]
            return "index.lock" not in error.stderr  # another git command runs: wait for it
        failure.clear()
        return True

    _wait(update)
    if failure:
        raise failure[0]


def _commit(workspace: Workspace, entries: Mapping[str, str], message: str) -> str | None:
    """Commits HEAD's tree plus `entries` and moves HEAD; None where that is HEAD's tree."""
    args = [part for path, entry in entries.items() for part in ("--cacheinfo", f"{entry},{path}")]
    for attempt in range(_HEAD_RETRIES):
        parent = _head(workspace)
        with tempfile.TemporaryDirectory() as folder:
            env = {"GIT_INDEX_FILE": f"{folder}/index"}
            workspace.git("read-tree", parent or "--empty", env=env)
            workspace.git("update-index", "--add", *args, env=env)
            tree = workspace.git("write-tree", env=env)
        if parent and tree == workspace.git("rev-parse", f"{parent}^{{tree}}"):
            return None
        parents = ["-p", parent] if parent else []
        # commit-tree never signs unless told to, whatever commit.gpgSign says.
        commit = workspace.git("commit-tree", tree, *parents, "-m", message.strip())
        log = f"coda-agent: {message.partition(chr(10))[0]}"
        try:
            # The old value makes this fail where someone committed meanwhile; "" means unborn.
            workspace.git("update-ref", "-m", log, "HEAD", commit, parent or "")
        except GitError:
            if attempt == _HEAD_RETRIES - 1 or _head(workspace) == parent:
                raise
            continue
        return commit
    raise AssertionError("unreachable")
