"""Dispatch tables: what was measured of all kernels on a GPU, in `dispatch/<gpu>.json`.

A folder of accepted kernels may hold tables of its own; the package's is asked otherwise.
"""

from __future__ import annotations

import json
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from coda_agent.primitives.objects import ROOT, write_whole
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Cost, Memory, Model, Regret, Shape

PACKAGED = ROOT / "generated"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tile(_Part):
    """A configuration's costs in microseconds, and its misses in thousandths of a logarithm."""

    config: TileConfig
    cost: Cost
    misses: tuple[int | None, ...]


class Entry(_Part):
    """What was measured of one kernel.

    Attributes:
        program: Digest of the program.
        dtype: Of A; other types of the same width share the entry.
        element_bytes: Its width.
        date, machine, version: When, on what, and by which version of the compile gate.
        regret: Of the model's picks at shapes it was not fitted to.
    """

    program: str
    dtype: str
    element_bytes: int
    date: str
    machine: dict[str, Any]
    version: int
    regret: Regret
    memory: Memory
    shapes: tuple[Shape, ...]
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, model: Model, **about: Any) -> Entry:
        misses = model.misses or {}
        tiles = [
            Tile(
                config=config,
                cost=Cost(*(float(f"{x:.4g}") for x in cost)),
                misses=tuple(x if x is None else round(1000 * x) for x in misses[config]),
            )
            for config, cost in model.costs.items()
        ]
        memory = Memory(*(float(f"{x:.4g}") for x in model.memory))
        kept = {"memory": memory, "shapes": model.shapes, "tiles": tuple(tiles)}
        return cls(element_bytes=model.element_bytes, **kept, **about)

    def model(self, sms: int) -> Model:
        """
        Raises:
            ValueError: a configuration has not one miss for each shape.
        """
        if any(len(tile.misses) != len(self.shapes) for tile in self.tiles):
            raise ValueError("misses and shapes are not equally many")
        return Model(
            sms,
            self.element_bytes,
            self.memory,
            {tile.config: tile.cost for tile in self.tiles},
            self.shapes,
            {t.config: tuple(x and x / 1000 for x in t.misses) for t in self.tiles},
        )


class Table(_Part):
    """All that was measured on one kind of GPU: its name, its SMs, and an entry for each kernel."""

    gpu: str
    sms: int
    kernels: dict[str, Entry]

    def write(self, folder: Path) -> Path:
        """Writes the table, a configuration a line, in place of what was there."""
        path = file(folder, self.gpu)
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1)
        # A line break in JSON text is layout, never part of a string.
        for leaf in (r"\[[^\[\]{}]*\]", r"\{\s*\"(config|mean)\"[^{}]*(\{[^{}]*\}[^{}]*)?\}"):
            text = re.sub(leaf, lambda found: re.sub(r"\n\s*", " ", found[0]), text)
        write_whole(path, text + "\n")
        return path


def file(folder: Path, gpu: str) -> Path:
    """Where a folder of kernels keeps the table of a GPU."""
    return folder / "dispatch" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


@lru_cache(maxsize=16)
def read(folder: Path, gpu: str) -> Table | None:
    """The table of a GPU, None where there is none. One that cannot be used is warned of, once."""
    path = file(folder, gpu)
    try:
        table = Table.model_validate_json(path.read_bytes())
        if table.gpu != gpu:
            raise ValueError(f"it was measured on {table.gpu}")
        for entry in table.kernels.values():
            entry.model(table.sms)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        fault = " ".join(str(error).split())[:200]
        warnings.warn(
            f"coda-agent: {path} cannot be used, tiles are chosen without it: {fault}; "
            "`coda-agent fit` writes it again",
            stacklevel=2,
        )
        return None
    return table


def find(folder: Path, gpu: str, kernel: str, program: str, dtype: str) -> Model | None:
    """The model of a kernel, from the table in the folder of kernels or in the package; None where
    the program of that digest was not measured with elements of A as wide as `dtype`."""
    for place in dict.fromkeys((folder, PACKAGED)):
        if table := read(place, gpu):
            entry = table.kernels.get(kernel)
            if entry and (entry.program, entry.element_bytes) == (program, width(dtype)):
                return entry.model(table.sms)
    return None


def width(dtype: str) -> int:
    """Bytes of an element of A."""
    return 1 if dtype.startswith("float8") else 2
