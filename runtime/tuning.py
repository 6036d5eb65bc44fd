"""Tiles that a user measured: a file of the cache each kernel.

- A file's name holds a digest of the kernel and of what compiles it, so what was measured for
  another program, or with another quack, is another file and is not read.
- Writers merge under a lock and replace the file whole. A file that cannot be read is set aside by
  the next writer, never overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, TypeAdapter

from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.objects import fingerprint, reason, user_cache, write_whole
from coda_agent.primitives.tiles import TileConfig

VARIABLE = "CODA_AGENT_TUNED"
"""Environment variable: another folder than `$XDG_CACHE_HOME/coda-agent/tuned`."""

_COMPILERS = "quack-kernels", "nvidia-cutlass-dsl"


class TunedShape(BaseModel):
    """The best configuration at one shape, and of each reduction block."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    config: TileConfig
    blocks: dict[str, TileConfig] = {}
    median_us: PositiveFloat

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k


Lines = dict[str, dict[str, list[TunedShape]]]
"""GPU name to dtype of A to measured shapes."""
_LINES = TypeAdapter(Lines)


def read_tuned(path: Path) -> dict[str, Any]:
    """Read a kernel's tuned.json as JSON; nothing where there is none.

    Raises:
        WorkspaceError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = path.read_bytes()
        _LINES.validate_json(content)
        return json.loads(content)  # as it stands there: a commit changes no line of another GPU
    except (OSError, ValueError) as error:
        hint = f"git checkout -- {path} restores it; without it tiles are chosen by a model"
        raise WorkspaceError(
            f"{path} does not hold measured tiles: {reason(error)}", hint=hint
        ) from error


def folder() -> Path:
    """Find where the files are."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else user_cache() / "tuned"


@lru_cache(maxsize=1)
def _toolchain() -> list[str]:
    found = [fingerprint("primitives", "runtime")]
    for package in _COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return found


class UserTuning:
    """What the user measured of one kernel, in a file of theirs."""

    def __init__(self, kernel: str, digest: str) -> None:
        """Takes the kernel's name, and the digest of its program and spec."""
        key = hashlib.sha256("\n".join([digest, *_toolchain()]).encode()).hexdigest()
        self.path = folder() / f"{kernel}-{key[:16]}.json"

    def find(
        self, gpu: str, dtype: str, shape: tuple[int, int, int], block: int | None = None
    ) -> TileConfig | None:
        """Find the fastest configuration measured at this shape, with this block."""
        for line in self._held.get(gpu, {}).get(dtype, ()):
            if line.shape == shape:
                return line.config if block is None else line.blocks.get(str(block))
        return None

    def gpus(self) -> set[str]:
        """List the GPUs that something was measured on."""
        return set(self._held)

    @cached_property
    def _held(self) -> Lines:
        """What a call reads of the file, once a process."""
        try:
            return self.lines()
        except (OSError, ValueError) as error:
            warnings.warn(
                f"coda-agent: {self.path} is no tuning cache and is not used: {reason(error)}",
                stacklevel=2,
            )
            return {}

    def lines(self) -> Lines:
        """Read what the file holds now; nothing where there is none.

        Raises:
            OSError: it cannot be read.
            ValueError: it holds something else.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        return _LINES.validate_json(text)

    def add(self, measured: Mapping[str, object]) -> None:
        """Add lines, in place of their shapes'; adding none tests the folder.

        Raises:
            OSError: the folder cannot be written to; the file is as it was.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = self._kept()
            for gpu, types in _LINES.validate_python(measured).items():
                for dtype, found in types.items():
                    here = lines.setdefault(gpu, {})
                    by_shape = {line.shape: line for line in (*here.get(dtype, ()), *found)}
                    here[dtype] = [by_shape[shape] for shape in sorted(by_shape)]
            write_whole(self.path, _LINES.dump_json(lines, indent=1).decode() + "\n")
        self.__dict__.pop("_held", None)

    def _kept(self) -> Lines:
        """Read the file; set one aside that holds something else."""
        try:
            return self.lines()
        except ValueError as error:
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            warnings.warn(
                f"coda-agent: {self.path} was no tuning cache and is now {aside}: {reason(error)}",
                stacklevel=3,
            )
            return {}
