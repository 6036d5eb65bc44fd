"""A dispatch model fitted to measured times, and its picks elsewhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import (
    Cost,
    Features,
    Memory,
    Model,
    Regret,
    Shape,
    features,
    time_us,
)

Times = Mapping[TileConfig, float]
"""Measured microseconds by configuration."""
_STEPS = 150  # of the optimiser; its loss was flat by then
_FOLDS = 8
# Errors of the logarithm beyond which a time pulls no harder; how little the start values pull; and
# how much the costs of a configuration are pulled to those of its kind, divided by the number of
# shapes: a few with a short K say little of each one's epilogue, and much of all.
_OUTLIER, _PULL, _ALIKE = 0.1, 1e-5, 0.1
_DISTURBED = math.log(1.8)


def fit(measured: Mapping[Shape, Times], *, element_bytes: int, sms: int) -> Model:
    """Find the model that fits measured times best.

    The squared error of the logarithm counts; less for slow configurations, which are never picked.

    Args:
        measured: By shape; a configuration need not stand at every one.
    """
    configs = sorted({config for times in measured.values() for config in times})
    shapes = tuple(measured)
    grid = [[measured[s].get(c, math.nan) for s in shapes] for c in configs]
    times = torch.tensor(grid, dtype=torch.float64)
    seen = [[features(c, s, element_bytes=element_bytes, sms=sms) for s in shapes] for c in configs]
    axes: list[Any] = [*torch.tensor(seen, dtype=torch.float64).unbind(-1)]
    best = times.nan_to_num(math.inf).amin(0)
    weights = (best / times).pow(3).nan_to_num(0.0)
    logs = times.nan_to_num(1.0).log()
    costs = _Costs(configs)

    def predicted() -> torch.Tensor:
        return time_us(*costs.now(), Features(*axes)).log()

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        errors = torch.nn.functional.huber_loss(predicted(), logs, reduction="none", delta=_OUTLIER)
        total = (weights * errors).sum() / weights.sum() + costs.pull(len(shapes))
        total.backward()
        return total

    optimiser = torch.optim.LBFGS(costs.parameters, max_iter=_STEPS, line_search_fn="strong_wolfe")
    optimiser.step(loss)
    with torch.no_grad():
        cost, memory = costs.now()
        missed = (logs - predicted()).tolist()
    found = torch.stack([x.squeeze(-1) for x in cost], -1).tolist()
    known = (~times.isnan()).tolist()
    return Model(
        sms,
        element_bytes,
        Memory(*map(float, memory)),
        {c: Cost(*x) for c, x in zip(configs, found, strict=True)},
        shapes,
        {
            c: tuple(x if is_known else None for x, is_known in zip(row, there, strict=True))
            for c, row, there in zip(configs, missed, known, strict=True)
        },
    )


class _Costs:
    """Costs as they are fitted: start, kind's share, configuration's own."""

    def __init__(self, configs: Sequence[TileConfig]) -> None:
        areas = [c.tile_m * c.tile_n / 16384 if c.fused else 1.0 for c in configs]
        area = torch.tensor(areas, dtype=torch.float64)
        step, small = 0.35 * area.clamp(min=0.3), torch.full_like(area, 0.05)
        start, split = 120 * small, 40 * small
        self._begin = torch.stack([start, step, small, small, 0.5 * area, small, split]).log()
        self._about = torch.tensor([1e6 / 4e12, 4e6 / 4e12], dtype=torch.float64).log()
        self._kind = torch.tensor([c.fused + c.pingpong for c in configs])
        self._alike = self._begin.new_zeros(len(self._begin), 3).requires_grad_()
        self._own = torch.zeros_like(self._begin).requires_grad_()
        self._shared = self._about.clone().requires_grad_()
        self.parameters = [self._alike, self._own, self._shared]

    def now(self) -> tuple[Any, Any]:
        """Give the costs of configurations and of memory."""
        logs = self._begin + self._alike[:, self._kind] + self._own
        cost: list[Any] = [*logs.exp().unsqueeze(-1)]
        memory: list[Any] = [*self._shared.exp()]
        return Cost(*cost), Memory(*memory)

    def pull(self, shapes: int) -> torch.Tensor:
        """Give the loss of distance from the start and the kind."""
        pull = _PULL * (self._alike.square().sum() + (self._shared - self._about).square().sum())
        return pull + _ALIKE / shapes * self._own.square().mean()


def undisturbed(
    measured: Mapping[Shape, Times], *, element_bytes: int, sms: int
) -> dict[Shape, Times]:
    """Leave out measured times that something else on the machine made long.

    Those are 1.8 times as long as they would fit; where a fifth of a shape's are, it is left out.
    """
    model = fit(measured, element_bytes=element_bytes, sms=sms)
    kept = dict[Shape, Times]()
    for i, (shape, times) in enumerate(measured.items()):
        sound = {c: us for c, us in times.items() if (model.misses[c][i] or 0.0) < _DISTURBED}
        if len(sound) >= 0.8 * len(times):
            kept[shape] = sound
    return kept


def held_back(
    measured: Mapping[Shape, Times], *, element_bytes: int, sms: int
) -> tuple[Regret, dict[Shape, float]]:
    """Find the regret at each shape, by models fitted without it."""
    shapes = list(measured)
    ratios: dict[Shape, float] = {}
    for fold in range(_FOLDS):
        held = shapes[fold::_FOLDS]
        rest = {s: measured[s] for s in shapes if s not in held}
        model = fit(rest, element_bytes=element_bytes, sms=sms)
        for shape in held:
            times = measured[shape]
            pick, _ = model.ranked(shape, times)[0]
            ratios[shape] = times[pick] / min(times.values())
    mean = statistics.geometric_mean(ratios.values())
    return Regret(round(mean, 4), round(max(ratios.values()), 4), len(ratios)), ratios
