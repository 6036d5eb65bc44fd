"""Caches of compiled objects, keyed by sources; text files, read and written."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar

from coda_agent.primitives.errors import CodaError, MachineError

T = TypeVar("T")
ROOT = Path(__file__).parents[1]


@lru_cache
def fingerprint(*folders: str) -> str:
    """Hash all Python sources in `folders` of this package, as caches' keys."""
    hashed = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        hashed.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return hashed.hexdigest()


def user_cache() -> Path:
    """Find this package's folder of the user's cache."""
    # Not `Path.home()`, which raises where a container's user has no home.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "coda-agent"


def cache_directory() -> Path:
    """Find where compiled objects are kept: `$QUACK_CACHE_DIR`, or the user's cache."""
    given = os.environ.get("QUACK_CACHE_DIR")
    return Path(given) if given else user_cache() / "quack"


def writable_cache() -> Path:
    """Make `cache_directory`, whole.

    Raises:
        MachineError: nothing can be written there.
    """
    folder = cache_directory().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.resolve()
    except OSError as error:
        raise MachineError(
            f"the cache {folder} cannot be written: {error.strerror}",
            hint="XDG_CACHE_HOME names another folder for caches, QUACK_CACHE_DIR one for this",
        ) from None


def use_cache() -> None:
    """Point quack's object cache at ours, even where quack is imported."""
    import quack.cache

    quack.cache.CACHE_DIR = str(cache_directory())


def cached(build: Callable[[], T]) -> T:
    """Build by quack's object cache: the folder somebody chose, else `cache_directory`.

    One that cannot be written to is still read; what it lacks is then compiled for this process
    alone.
    """
    import quack.cache as state

    if state.CACHE_DIR is None:
        use_cache()
    try:
        return build()
    except OSError as error:
        if not state.CACHE_ENABLED or error.filename is None:
            raise
        _say_not_kept(str(state.CACHE_DIR), str(error.strerror))
    state.CACHE_ENABLED = False
    try:
        return build()
    finally:
        state.CACHE_ENABLED = True


@lru_cache(maxsize=1)
def _say_not_kept(folder: str, why: str) -> None:
    warnings.warn(
        f"coda-agent: compiled kernels cannot be kept in {folder} ({why}), so each process "
        "compiles its own; QUACK_CACHE_DIR names another folder",
        stacklevel=4,
    )


def text_of(path: Path, hint: str = "", kind: type[CodaError] = CodaError) -> str:
    """Read a user's file, without a byte-order mark.

    Raises:
        CodaError: of this `kind`; it cannot be read.
    """
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise kind(f"{path} cannot be read as text: {said}", hint=hint) from error


def reason(error: Exception) -> str:
    """Say in one line why a file is not what it should."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    said = getattr(error, "strerror", None) or " ".join(str(error).split())
    return f"no {said}" if isinstance(error, KeyError) else said


def open_own(path: Path) -> BinaryIO:
    """Open a file to append to, but not through a link."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, "ab+", opener=opener)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, synced to disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=".", suffix=".tmp", delete=False
    ) as file:
        try:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
