"""Dispatch tables: all kernels' times on a GPU, in `dispatch/<gpu>.json.xz`.

A folder of accepted kernels may hold tables of its own; the package's is asked otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import lzma
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from coda_agent.primitives.objects import ROOT, reason, write_whole
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Cost, Memory, Model, Regret

PACKAGED = ROOT / "generated"
_MISSES = 500
"""Parts of a logarithm that a miss is rounded to: 0.2 %, below what a measurement repeats to."""

_LONGEST = 1e9  # of a table's times


_Count = Annotated[int, Field(gt=0, lt=2**31)]
_Miss = Annotated[int, Field(gt=-10 * _MISSES, lt=10 * _MISSES)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("cost", "memory", check_fields=False)
    @classmethod
    def _times(cls, times: Cost | Memory) -> Cost | Memory:
        if not all(0 <= x < _LONGEST for x in times):
            raise ValueError(f"expected microseconds from 0 to {_LONGEST:g}")
        return times


class Tile(_Part):
    """A configuration's costs in microseconds, its misses in `_MISSES` of a logarithm."""

    config: TileConfig
    cost: Cost
    misses: tuple[_Miss | None, ...]


class Entry(_Part):
    """What was measured of one kernel.

    Attributes:
        program: Digest of the program.
        dtype: Of A; other types of the same width share the entry.
        date, machine, version: When, on what, and by which version of the compile gate.
    """

    program: str
    dtype: str
    element_bytes: Annotated[int, Field(ge=1, le=2)]
    date: str
    machine: dict[str, Any]
    version: int
    regret: Regret
    memory: Memory
    shapes: tuple[tuple[_Count, _Count, _Count], ...]
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, model: Model, **about: Any) -> Entry:
        tiles = [
            Tile(
                config=config,
                cost=Cost(*(float(f"{x:.4g}") for x in cost)),
                misses=tuple(x if x is None else round(_MISSES * x) for x in model.misses[config]),
            )
            for config, cost in model.costs.items()
        ]
        memory = Memory(*(float(f"{x:.4g}") for x in model.memory))
        kept = {"memory": memory, "shapes": model.shapes, "tiles": tuple(tiles)}
        return cls(element_bytes=model.element_bytes, **kept, **about)

    def model(self, sms: int) -> Model:
        """Make the model, on a GPU with so many SMs."""
        if any(len(tile.misses) != len(self.shapes) for tile in self.tiles):
            raise ValueError("misses and shapes are not equally many")
        return Model(
            sms,
            self.element_bytes,
            self.memory,
            {tile.config: tile.cost for tile in self.tiles},
            self.shapes,
            {t.config: tuple(x and x / _MISSES for x in t.misses) for t in self.tiles},
        )


class Table(_Part):
    """A GPU's name, its SMs, and an entry for each kernel."""

    gpu: str
    sms: _Count
    kernels: dict[str, Entry]

    def write(self, folder: Path) -> Path:
        """Write the table: JSON, packed by xz to a quarter."""
        path = file(folder, self.gpu)
        text = json.dumps(
            self.model_dump(mode="json", exclude_defaults=True), separators=(",", ":")
        )
        write_whole(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        return path


def file(folder: Path, gpu: str) -> Path:
    """Name the file of a GPU's table in a folder of kernels."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / "dispatch" / f"{name}.json.xz"


@lru_cache(maxsize=16)
def fitted(folder: Path = PACKAGED) -> list[str]:
    """List the GPUs of a folder's tables that can be read."""
    names: list[str] = []
    for path in sorted((folder / "dispatch").glob("*.json.xz")):
        with contextlib.suppress(OSError, ValueError):
            names.append(_unpack(path).gpu)
    return names


def _unpack(path: Path) -> Table:
    try:
        return Table.model_validate_json(lzma.decompress(path.read_bytes()))
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"it is not packed by xz, or cut off: {error}") from error


@lru_cache(maxsize=16)
def read(folder: Path, gpu: str) -> Table | None:
    """Read a GPU's table, if there is a usable one."""
    path = file(folder, gpu)
    try:
        table = _unpack(path)
        if table.gpu != gpu:
            raise ValueError(f"it was measured on {table.gpu}")
        for entry in table.kernels.values():
            entry.model(table.sms)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"coda-agent: {path} cannot be used, tiles are chosen without it: {reason(error)}; "
            "`coda-agent fit` writes it again",
            stacklevel=2,
        )
        return None
    return table


def find(
    folder: Path, gpu: str, kernel: str, program: str, dtype: str, *, sms: int = 0
) -> Model | None:
    """Find a kernel's model: this GPU's, else another's with its SMs.

    By the tables of another card the picks at what was measured are 1.3 % (H200's on an H100) and
    1.6 % (H100's on an H200) slower than the fastest tile; by the prior they are 5.7 and 4.6 %
    slower (2026-11-26, 19 kernels). Another bandwidth changed nothing.

    Args:
        folder: Of kernels; the package's tables count behind its own.
        kernel, program, dtype: Its name, its program's digest, and the type of A.
        sms: SMs of the card; 0 takes no other card's table.

    Returns:
        None where no table has that program with elements as wide.
    """
    places = dict.fromkeys((folder, PACKAGED))
    own = (read(place, gpu) for place in places)
    others = (read(place, name) for place in places for name in fitted(place) if name != gpu)
    for table in itertools.chain(own, others if sms else ()):
        entry = table.kernels.get(kernel) if table else None
        if table and entry and (entry.program, entry.element_bytes) == (program, width(dtype)):
            return entry.model(table.sms if table.gpu == gpu else sms)
    return None


def width(dtype: str) -> int:
    """Give the bytes of an element of A."""
    return 1 if dtype.startswith("float8") else 2
