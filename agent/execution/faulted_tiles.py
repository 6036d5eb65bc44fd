"""Tiles that hung or faulted, remembered so that none is tried twice.

They are in one append-only file beside the cache of compiled kernels. An entry holds for a
program's digest, an element type, a tile, a GPU, the toolchain and the sources of the lowering.
When one of them changes, the tile is tried again. The launch's shape is noted but does not enter: a
tuned tile is dispatched at other shapes too, so one that hangs at a shape may be dispatched at
none.
"""

import hashlib
import json
from collections.abc import Sequence

from coda_agent.agent.judge.provenance import PACKAGES, version
from coda_agent.agent.judge.records import Record
from coda_agent.agent.plain import utc_now
from coda_agent.primitives.objects import cache_directory, fingerprint
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig


class Launch(Record):
    """A launch of a program's kernel at a shape; `dtype` is A's."""

    program: str
    dtype: str
    config: TileConfig
    m: int
    n: int
    k: int


class TileFault(Record):
    """What went wrong in a tile's launch."""

    fault: str
    detail: str
    launch: Launch


class _Entry(Record):
    """A line of the file."""

    key: str
    time: str
    fault: TileFault


class FaultMemory:
    """What is known of one program in one type on one GPU."""

    def __init__(self, gpu: str, program: Program, element: str) -> None:
        self.path = cache_directory().parent / "faults.jsonl"
        tools = [fingerprint("primitives", "runtime"), *map(version, PACKAGES)]
        self._about = [gpu, program.digest, element, tools]

    def known(self, configs: Sequence[TileConfig]) -> dict[TileConfig, TileFault]:
        """List those of `configs` that faulted before."""
        found: dict[str, TileFault] = {}
        text = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                entry = _Entry.model_validate_json(line)
            except ValueError:
                continue  # torn by a kill, or of an earlier release
            said = f"{entry.fault.detail} (on {entry.time[:10]}; remembered in {self.path})"
            found[entry.key] = entry.fault.model_copy(update={"detail": said})
        return {c: found[key] for c in configs if (key := self._key(c)) in found}

    def add(self, config: TileConfig, fault: TileFault) -> TileFault:
        """Remember a tile's fault."""
        entry = _Entry(key=self._key(config), time=utc_now(), fault=fault)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(entry.model_dump_json() + "\n")
        return fault

    def _key(self, config: TileConfig) -> str:
        parts = json.dumps([*self._about, config.to_dict()], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()
