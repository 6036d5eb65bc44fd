"""Tiles that hung or faulted on a GPU, remembered so that none is paid for twice.

One append-only file beside the cache of compiled kernels. An entry holds for a program's digest, an
element type, a tile, a GPU, the toolchain and the meaning of the lowering; when one of them changes
the tile is tried again. The launch's shape is noted, but does not enter: a tuned tile is dispatched
at other shapes too, so one that hangs at a shape may be dispatched at none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.agent.events import utc_now
from coda_agent.agent.judge.provenance import PACKAGES, version
from coda_agent.agent.judge.rules import meanings
from coda_agent.primitives.target import cache_directory

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program
    from coda_agent.primitives.tiles import TileConfig


class FaultMemory:
    """What is known of one program in one element type on one GPU."""

    def __init__(self, gpu: str, program: Program, element: str) -> None:
        self.path = cache_directory().parent / "faults.jsonl"
        # An operation's own lowering is written where its meaning is.
        tools = [meanings()["lowering"], meanings()["language"], *map(version, PACKAGES)]
        self._about = [gpu, program.digest, element, tools]

    def known(self, configs: Sequence[TileConfig]) -> dict[TileConfig, dict[str, Any]]:
        """Those of `configs` that faulted before: `fault`, `detail` and `launch` of each."""
        entries: dict[str, dict[str, Any]] = {}
        text = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                entry["detail"] += f" (on {entry['time'][:10]}; remembered in {self.path})"
                entries[entry["key"]] = entry
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill
        return {c: entries[key] for c in configs if (key := self._key(c)) in entries}

    def add(self, config: TileConfig, fault: Mapping[str, Any]) -> dict[str, Any]:
        """Remembers a tile's `fault`, `detail` and `launch`."""
        entry = {"key": self._key(config), "time": utc_now(), **fault}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def _key(self, config: TileConfig) -> str:
        parts = json.dumps([*self._about, config.to_dict()], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()
