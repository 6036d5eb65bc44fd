"""Layers of models by their plans (`agent/capture/running.py`) beside PyTorch and torch.compile.

A layer is what lies between the projections of one layer and those of the next: the rotation of
queries and keys, attention, and all up to the next queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from coda_agent.agent.capture.config import layer_of
from coda_agent.agent.capture.pieces import pieces
from coda_agent.agent.capture.running import ByPlans, attending
from coda_agent.evals.contest import Clock
from coda_agent.evals.layer_cases import Case, Values, Way, prepared

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH = 4096
_CONSTANT = ("cos", "sin")


@dataclass(frozen=True)
class Captured:
    """A model's layer, by its configuration, and the tokens that it is given: sequences of 4096, or
    one that is shorter."""

    configuration: Mapping[str, Any]
    tokens: int
    PHASES: ClassVar = ("forward", "backward", "both")
    CONTENDERS: ClassVar = ("ours", "eager", "compile")

    def shrunk(self, by: int) -> Captured:
        """About so many times as small."""
        sizes, about = dict[str, int](), self.configuration
        for key, least in (("num_attention_heads", 2), ("num_key_value_heads", 1)):
            sizes[key] = max(least, about[key] // by)
        sizes["hidden_size"] = 16 * sizes["num_attention_heads"]
        sizes["intermediate_size"] = -(-about["intermediate_size"] // by // 16) * 16
        return replace(self, configuration={**about, **sizes}, tokens=max(16, self.tokens // by))

    def on(self, device: str, shrink: int) -> LayerCase:
        """The case on a device, so many times as small."""
        return LayerCase(self.shrunk(shrink) if shrink > 1 else self, device)


class LayerCase(Case):
    """A model's layer on one device: its values, and each contender's way."""

    def __init__(self, what: Captured, device: str) -> None:
        import torch

        self.what, self.device, self.tokens = what, device, what.tokens
        batch = max(1, what.tokens // _LENGTH)
        self.shape = batch, what.tokens // batch
        self.layer = layer_of(what.configuration, Path("config.json"))
        torch.manual_seed(0)
        rows = (*self.shape, self.layer.sizes["kv"])
        shapes = {"v": rows} | {
            name: shape
            for piece in pieces(self.layer, *self.shape)
            for name, (shape, _) in piece.inputs.items()
            if piece.name != "exit" and name != "attended"
        }
        drawn = {name: self._one(name, shape) for name, shape in shapes.items()}
        self.constants = {name: drawn.pop(name) for name in _CONSTANT if name in drawn}
        self.ours: ByPlans | None = None
        self.values: Values = {name: value.requires_grad_() for name, value in drawn.items()}

    def _one(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        if name in _CONSTANT:
            positions, width = shape
            turns = 10000.0 ** (-torch.arange(0, width, 2, device=self.device) / width)
            angle = torch.arange(positions, device=self.device)[:, None] * turns
            return getattr(torch.cat((angle, angle), -1), name)().bfloat16()
        kind = name.partition("_")[0]
        if kind == "g":
            return (torch.rand(shape, device=self.device) + 0.5).bfloat16()
        spread = shape[-1] ** -0.5 if kind in ("w", "b") else 1.0
        return (torch.randn(shape, device=self.device) * spread).bfloat16()

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """What a case of layers measures, and the `way` that ours chose."""
        return super().measured(wanted, clock, rounds) | {"way": self.ours and self.ours.way}

    def _ways(self, wanted: Iterable[str], found: dict[str, Any]) -> dict[str, Way]:
        import torch

        plain = lambda t: attending(self.layer, {**t, **self.constants})

        def planned() -> Way:
            run = self.ours = ByPlans(self.layer, *self.shape, judged=False)
            return lambda t: run({**t, **self.constants})

        made: dict[str, Callable[[], Way]] = {
            "ours": planned, "eager": lambda: plain,
            "compile": lambda: torch.compile(plain, dynamic=False),
        }  # fmt: skip

        def ready(name: str) -> Way:
            way = made[name]()
            self._call(way, "both")()
            return way

        names = [n for n in made if n in {*wanted, "eager"}]
        return prepared(names, ready, found, self.device)
