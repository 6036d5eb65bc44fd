"""What a gate has to do, as data that another process or machine can take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec

Progress = Callable[[int, int, str], None]
"""Called as (done, total, note)."""
Key = tuple[str, str]
"""A program's name and an element type."""
Tiles = Mapping[Key, Sequence[TileConfig]]


@dataclass(frozen=True)
class Job:
    """One gate over some tiles.

    Attributes:
        kind: "numerics", "performance", "tune" or "call", which run kernels; "prepare", what the
            performance gate needs beside them; or "interpret", the numerics gate without a GPU.
        spec: The spec.
        programs: By variant name.
        tiles: Configurations by (program, element type).
        stored: For "call", the `tuned` and `refused` tiles that acceptance would store.
    """

    kind: str
    spec: Spec
    programs: Mapping[str, Program]
    tiles: Tiles
    stored: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads."""
        return {
            "kind": self.kind,
            "path": str(self.spec.path),
            "spec": self.spec.text,
            "check_shapes": self.spec.check_shapes,
            "bench_shapes": self.spec.bench_shapes,
            "programs": {name: program.to_dict() for name, program in self.programs.items()},
            "tiles": [
                [*key, [c.to_dict() for c in configs]] for key, configs in self.tiles.items()
            ],
            "stored": self.stored,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """What `to_dict` wrote."""
        from coda_agent.primitives.program import Program
        from coda_agent.specs import load_spec

        shapes = {key: tuple(data[key]) for key in ("check_shapes", "bench_shapes")}
        spec = load_spec(Path(data["path"]), text=data["spec"]).model_copy(update=shapes)
        programs = {name: Program.from_dict(entry) for name, entry in data["programs"].items()}
        tiles = {(p, e): [TileConfig(**c) for c in configs] for p, e, configs in data["tiles"]}
        return cls(data["kind"], spec, programs, tiles, data["stored"])
