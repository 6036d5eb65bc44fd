"""What the training shows: where losses end, time and memory of a step, and the curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coda_agent.primitives.errors import MachineError

_Records = Sequence[dict[str, Any]]
# Student's t, two-sided 95 %, of 1 to 9 degrees of freedom; of more it is smaller.
_T95 = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


def means(records: _Records, share: float) -> dict[str, dict[int, float]]:
    """By form and seed, the mean loss of the last so great a share of steps."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        tail = record["losses"][-max(1, round(share * len(record["losses"]))) :]
        found.setdefault(record["form"], {})[record["seed"]] = statistics.fmean(tail)
    return found


def verdict(records: _Records) -> tuple[bool, list[str]]:
    """Whether our losses lie within seed noise, in the mean of all steps and of the last tenth; and
    lines that say so.

    The noise is measured on PyTorch's means over n seeds, as the band in which 95 of 100 further
    seeds would lie, were they normal: mean ± t · s · sqrt(1 + 1 / n), Student's t of n - 1 degrees.
    """
    within, lines = True, list[str]()
    for what, share in (("all steps", 1.0), ("the last tenth of steps", 0.1)):
        found = means(records, share)
        plain, ours = found.get("PyTorch", {}), found["coda-agent"]
        if len(plain) < 2:
            return True, ["Seed noise was not measured: it takes PyTorch and two seeds."]
        middle, n = statistics.fmean(plain.values()), len(plain)
        half = (
            _T95[min(n, len(_T95) + 1) - 2] * statistics.stdev(plain.values()) * (1 + 1 / n) ** 0.5
        )
        inside = all(abs(mean - middle) <= half for mean in ours.values())
        shift = max(abs(ours[seed] - mean) for seed, mean in plain.items())
        within &= inside
        lines.append(
            f"Mean loss of {what}: by PyTorch's {n} seeds, 95 of 100 lie within {middle:.4f} ± "
            f"{half:.4f}; {'all' if inside else 'not all'} of coda-agent's do, at most {shift:.4f} "
            "from PyTorch's of the same seed."
        )
    return within, lines


def rows(records: _Records, tokens: int) -> list[tuple[str, ...]]:
    """A table: form, where each seed ends, ms a step with its middle half, how many times as fast
    as PyTorch beside it, tokens/s, and peak memory. `tokens` are those of a step."""
    found: list[tuple[str, ...]]
    found = [("", "losses at the end", "ms a step", "over PyTorch", "tokens/s", "peak MiB")]
    plain = {r["seed"]: r["seconds"] for r in records if r["form"] == "PyTorch"}
    for form, last in means(records, 0.1).items():
        own = [r for r in records if r["form"] == form]
        times = [1e3 * t for r in own for t in r["seconds"]]
        shown = "not timed", "", ""
        if len(times) > 1:
            middle, (low, _, high) = statistics.median(times), statistics.quantiles(times, n=4)
            pairs = [zip(plain[r["seed"]], r["seconds"], strict=True) for r in own if plain]
            over = [theirs / t for pair in pairs for theirs, t in pair]
            ratio = f"{statistics.median(over):.3f}" if over else ""
            shown = f"{middle:.2f} ({low:.2f}–{high:.2f})", ratio, f"{1e3 * tokens / middle:.0f}"
        peaks = [r["peak_mib"] for r in own if r["peak_mib"]]
        losses = " ".join(f"{end:.4f}" for end in last.values())
        found.append((form, losses, *shown, str(max(peaks)) if peaks else ""))
    return found


class Panel(NamedTuple):
    """Lines of the same steps by form, over a band from its lower to its upper edge."""

    title: str
    lines: dict[str, list[list[float]]]
    band: tuple[list[float], list[float]] | None = None


def panels(records: _Records) -> list[Panel]:
    """The losses by step, and how far each is from the mean of PyTorch's seeds."""
    lines: dict[str, list[list[float]]] = {}
    for record in records:
        lines.setdefault(record["form"], []).append(_smooth(record["losses"]))
    found = [Panel("Loss (mean of 10 steps)", lines)]
    if "PyTorch" in lines:
        steps = [*zip(*lines["PyTorch"], strict=True)]
        middle = [statistics.fmean(step) for step in steps]
        apart = {f: [_less(line, middle) for line in own] for f, own in lines.items()}
        del apart["PyTorch"]
        band = _less(map(min, steps), middle), _less(map(max, steps), middle)
        title = "The same less the mean of PyTorch's seeds, which lie in the band"
        found.append(Panel(title, apart, band))
    return found


def draw(records: _Records, path: Path) -> None:
    """Draw the panels.

    Raises:
        MachineError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        hint = "pip install 'coda-agent[docs]'"
        raise MachineError("a figure needs matplotlib, which is not installed", hint=hint) from None
    shown = panels(records)
    figure, places = pyplot.subplots(len(shown), squeeze=False, sharex=True)
    for panel, place in zip(shown, places[:, 0], strict=True):
        if panel.band:
            place.fill_between(range(len(panel.band[0])), *panel.band, alpha=0.3)
        for number, (form, lines) in enumerate(panel.lines.items()):
            for seed, line in enumerate(lines):
                place.plot(line, color=f"C{number}", label=form if not seed else None)
        place.set_title(panel.title)
        place.legend()
    figure.savefig(path)


def _smooth(losses: Sequence[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]


def _less(values: Any, middle: Sequence[float]) -> list[float]:
    return [v - m for v, m in zip(values, middle, strict=True)]
