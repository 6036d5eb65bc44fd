"""Findings of regions in the user's cache, by what they depend on."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from coda_agent.agent.judge.provenance import PACKAGES, version
from coda_agent.primitives.objects import fingerprint, user_cache, write_whole

T = TypeVar("T")
SOURCES = "fuse", "agent/authors", "primitives", "runtime", "generated"
"""The folders that compose and run a kernel, by which a verdict holds."""


def path_of(kind: str, *parts: str) -> Path:
    """Name the file of what depends on texts, sources, PyTorch and compilers."""
    key = json.dumps([kind, *parts, *_toolchain()])
    return user_cache() / "regions" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pickle"


@lru_cache(maxsize=1)
def _toolchain() -> list[str]:
    return [fingerprint(*SOURCES), *(str(version(package)) for package in PACKAGES)]


def remembered(path: Path, nodes: Sequence[fx.Node] = ()) -> Any:
    """Read what was kept in a file; None where that fails.

    Args:
        path: It.
        nodes: Those of a graph, in the place of those that `remember` was given.
    """
    with suppress(Exception):  # a broken file raises whatever it likes, and is written anew
        return _Reader(path, nodes).load()
    return None


def remember(path: Path, known: object, nodes: Sequence[fx.Node] = ()) -> None:
    """Keep it in a file for `remembered`, where it can be kept."""
    with suppress(Exception):  # what is not kept is found out again
        file = io.BytesIO()
        _Writer(file, nodes).dump(known)
        write_whole(path, file.getvalue())


def kept(path: Path, make: Callable[[], T], nodes: Sequence[fx.Node] = ()) -> T:
    """Read what was kept in a file; else make it, and keep it."""
    found = remembered(path, nodes)
    if found is None:
        found = make()
        remember(path, found, nodes)
    return found


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node]) -> None:
        super().__init__(file)
        self._places = {node: i for i, node in enumerate(nodes)}

    def persistent_id(self, obj: object) -> int | str | None:
        """Write nodes by their place, and operators by their name."""
        if isinstance(obj, fx.Node):
            return self._places[obj]
        return str(obj) if isinstance(obj, torch._ops.OpOverload) else None


class _Reader(pickle.Unpickler):
    def __init__(self, path: Path, nodes: Sequence[fx.Node]) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._nodes = nodes

    def persistent_load(self, pid: int | str) -> object:
        """Find what `_Writer` wrote."""
        if isinstance(pid, int):
            return self._nodes[pid]
        return reduce(getattr, pid.split("."), torch.ops)
