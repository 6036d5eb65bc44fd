"""docs/results.md: the cells of all suites as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from coda_agent.agent.tables import Rows, cell_text, filled, markdown, ratio_text, tabulate
from coda_agent.evals.benchmarks import SUITES, load
from coda_agent.evals.cases import BASE, OURS, Suite
from coda_agent.evals.cells import FOLDER, Cell, card, period, read
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.objects import write_whole

PAGE, FAIR = Path("docs", "results.md"), "compile, mask folded"
_BRIEF = ("independent", "shapes", "numerics")
"""Records of so many cells that the page has their means, and the slowest ones of shapes."""
_SLOWEST = 12
_INDEPENDENT = Suite(
    "independent",
    "A clock that knows nothing of this project timed the paper's own code (quack 0.4.1, raw "
    "partials) and ours on the same GPU, each beside `torch.mm`; and ours at 35 products of "
    "layers, of 16 to 8192 rows, before there were tiles for few rows. The cells are in "
    "`evals/results/independent.jsonl`; nothing here measures them again.",
    (),
    group=lambda case: f"S = {case.split()[1]}" if "x" not in case.split()[1] else "of layers",
)
_HEAD = """# Results

Written by `coda-agent bench` from `evals/results/*.jsonl`; do not edit. `coda-agent bench --table`
writes it anew.

*Over X* is how many times as fast as X ours is: the median of interleaved rounds, with its 99.8 %
interval. Means are geometric; brackets say of how many cells where some lack the figure. A row
names the commit of the program that it was measured with. Regimes:

- *warm* decides: before each call come 1.4 ms of products and an overwritten L2, as inside a model.
  *idle*: an overwritten L2 alone.
- *steady*: one call back to back for up to 100 ms, of which the second half is timed.
- *loop*: eager calls that nothing waits for, by the host's clock. *host*: a call until it returns.
  *ranks*: one call of all GPUs together.

An *error* is the largest distance of an output from the truth over the truth's norm. *Of eager* is
the largest error of an output over that of PyTorch's own form."""

Grouped = Mapping[tuple[str, str], Mapping[str, Cell]]
"""Cells by case and regime, then by contender."""


def write(root: Path) -> Path:
    """Write docs/results.md of a workspace from its records."""
    parts = [_HEAD]
    for suite in (*(load(name, root) for name in SUITES), _INDEPENDENT):
        cells = [*read(root / FOLDER / f"{suite.name}.jsonl", Cell).values()]
        if cells or suite.name not in ("kernels", "independent"):
            parts += [f"## {suite.name}", *_section(suite, cells)]
    path = root / PAGE
    write_whole(path, "\n\n".join(parts) + "\n")
    if (root / "README.md").is_file():
        write_models(root)
    return path


def write_models(root: Path) -> Path:
    """Write README's table of models, where it stands there, from the records.

    Of each model that is compared at equal attention it has the records of the first card by name.
    """
    path, found = root / "README.md", dict[tuple[str, str], list[tuple[Cell, Cell]]]()
    for suite in ("layers", "models"):
        cells = [*read(root / FOLDER / f"{suite}.jsonl", Cell).values()]
        known = {(c.case, c.machine, c.regime): c for c in cells if c.contender == OURS}
        fairs = (c for c in cells if c.contender == FAIR and c.ratio and _work(c.case))
        for fair in sorted(fairs, key=lambda c: card(c.machine)):
            clock = "warm" if fair.regime == "warm" else "a plain loop"
            rows = found.setdefault((_work(fair.case), clock), [])
            if not rows or rows[0][1].machine == fair.machine:
                rows.append((known[fair.case, fair.machine, fair.regime], fair))

    def kernels(work: tuple[str, str]) -> str:
        notes = (re.search(r"(\d+) kernels of the backend", ours.note) for ours, _ in found[work])
        return span((int(said[1]) for said in notes if said), "d")

    def share(ours: Cell, fair: Cell) -> float:  # graphs of CUDA hold what they take
        return ours.peak_mib / fair.peak_mib if ours.peak_mib and fair.peak_mib else 0.0

    def span(values: Iterable[float], form: str = ".2f") -> str:
        known = sorted(values)
        return " to ".join(dict.fromkeys(f"{x:{form}}" for x in (*known[:1], *known[-1:]))) or "–"

    table = markdown(tabulate(found, {
        "model": lambda x: x[0],
        "kernels": kernels,
        "speed": lambda x: span(fair.ratio or 0 for _, fair in found[x]),
        "memory": lambda x: span(share(*pair) for pair in found[x] if share(*pair)),
        "card": lambda x: card(found[x][0][1].machine).split()[1],
        "clock": lambda x: x[1],
    }))  # fmt: skip
    begin, end = "<!-- of bench -->\n", "\n<!-- to here -->"
    head, _, rest = path.read_text("utf-8").partition(begin)
    if rest:
        write_whole(path, head + begin + table + end + rest.partition(end)[2])
    return path


def _work(case: str) -> str:
    """Say what a case computes with a model; "" of other cases."""
    words = case.split()
    if case == "train-1b of 4 sequences":
        return "Llama-3.2-1B, training step"
    if case == "train-1b on 2 GPUs":
        return "Llama-3.2-1B, training step under FSDP2 on two GPUs"
    if case.startswith("train ") and "layers of" in case:
        return f"{words[1]} layers of {words[-1]} with the head, training step"
    if len(words) < 2 or words[-2] not in ("inference", "training"):
        return ""
    return f"2 layers of {'other families' if words[0] == 'family' else words[0]}, {words[-2]}"


def _section(suite: Suite, cells: Sequence[Cell]) -> list[str]:
    about = " ".join(suite.about.split())
    if not cells:
        return [about, "Not measured yet."]
    cards = sorted({card(cell.machine) for cell in cells})
    of_card = {name: [c for c in cells if card(c.machine) == name] for name in cards}
    return [about, *(part for name in cards for part in _card_section(suite, of_card[name]))]


def _card_section(suite: Suite, cells: Sequence[Cell]) -> list[str]:
    """Write what was measured on one GPU."""
    order = [case.name for case in suite.cases]
    cells = sorted(cells, key=lambda c: order.index(c.case) if c.case in order else len(order))
    machines = ", ".join(dict.fromkeys(cell.machine for cell in cells))
    parts = [f"### {card(cells[0].machine)}", f"Measured {period(cells)} on {machines}."]
    parts.append(markdown(means(suite, cells)))
    if suite.name == "shapes":
        slow, count = slowest(cells)
        below = f"In {count} the whole interval of the warm ratio over `compile` lies below 1."
        parts += [f"{below} The slowest ones:", markdown(slow)]
    elif suite.name not in _BRIEF:
        parts += [markdown(detail(cells)), "\n".join(f"- {line}" for line in notes(cells))]
    return [part for part in parts if part]


def grouped(cells: Iterable[Cell]) -> Grouped:
    """Put the contenders of a case in a regime together."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault((cell.case, cell.regime), {})[cell.contender] = cell
    return found


def others(cells: Iterable[Cell]) -> list[str]:
    """List whom ours is compared with, in their order."""
    return [*dict.fromkeys(c.contender for c in cells if c.ratio and c.contender != OURS)]


def means(suite: Suite, cells: Sequence[Cell]) -> Rows:
    """Tabulate mean ratios, or errors where nothing was timed, by group."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((suite.group(cell.case), cell.regime), []).append(cell)

    def ratio(group: tuple[str, str], name: str) -> str:
        found = [c.ratio for c in groups[group] if c.contender == name and c.ratio]
        cases = len({c.case for c in groups[group]})
        return (
            f"{geometric_mean(found):.3f}{f' ({len(found)})' * (len(found) < cases)}"
            if found
            else "–"
        )

    def error(group: tuple[str, str], name: str) -> str:
        cells = [c for c in groups[group] if c.contender == name]
        found = [c.error_ratio for c in cells if c.error_ratio]
        if not found:
            return "–"
        if name == BASE:
            return f"{geometric_mean([c.error for c in cells if c.error]):.2e}"
        return f"{geometric_mean(found):.3f} ({min(found):.3f}–{max(found):.3f})"

    names, untimed = others(cells), [g for g in groups if g[1] == "untimed"]
    head = {
        "": lambda group: group[0],
        "regime": lambda group: group[1],
        "cases": lambda group: len({cell.case for cell in groups[group]}),
    }
    if not names:
        checked = dict.fromkeys(cell.contender for cell in cells if cell.error)
        return tabulate(untimed, head | {
            f"error{', of eager' * (n != BASE)}: {n}": lambda group, n=n: error(group, n)
            for n in sorted(checked, key=lambda n: n != BASE)
        })  # fmt: skip
    timed = [group for group in groups if group not in untimed]
    return tabulate(timed, head | {f"over {n}": lambda g, n=n: ratio(g, n) for n in names})


def detail(cells: Sequence[Cell]) -> Rows:
    """Tabulate each case in each regime, without columns that say nothing."""
    rows = grouped(cells)

    def ours(key: tuple[str, str], field: str, form: str = "") -> str:
        return cell_text(getattr(rows[key].get(OURS), field, None), form)

    def over(key: tuple[str, str], name: str) -> str:
        cell = rows[key].get(name)
        if cell is None or not cell.ratio:
            return "–"
        interval = cell.ratio_interval
        return ratio_text(cell.ratio, *interval) if interval else f"{cell.ratio:.3f}"

    def peaks(key: tuple[str, str]) -> str:
        found = {n: c.peak_mib for n, c in rows[key].items() if c.peak_mib is not None}
        return "; ".join(f"{name} {peak}" for name, peak in found.items()) or "–"

    table = tabulate(rows, {
        "case": lambda key: key[0],
        "regime": lambda key: key[1],
        "ours, µs": lambda key: ours(key, "time_us", ".1f"),
        **{f"over {n}": lambda key, n=n: over(key, n) for n in others(cells)},
        "error": lambda key: ours(key, "error", ".1e"),
        "of eager": lambda key: ours(key, "error_ratio", ".3f"),
        "peak MiB": peaks,
        "ours ran": lambda key: ours(key, "note") or "–",
        "commit": lambda key: next(iter(rows[key].values())).commit,
    })  # fmt: skip
    return filled(table)


def slowest(cells: Sequence[Cell]) -> tuple[Rows, str]:
    """Tabulate the slowest warm cells beside torch.compile; count the slower."""
    warm = [c for c in cells if c.contender == "compile" and c.regime == "warm" and c.ratio]
    slower = [cell for cell in warm if cell.ratio_interval and cell.ratio_interval[1] < 1]
    few = sorted(warm, key=lambda cell: cell.ratio or 0.0)[:_SLOWEST]
    names = {cell.case for cell in few}
    rows = detail([c for c in cells if c.case in names and c.regime == "warm"])
    return rows, f"{len(slower)} of {len(warm)} cells"


def notes(cells: Sequence[Cell]) -> list[str]:
    """Say what others ran, leave out or lack, in how many cases."""
    found: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        said = f"absent: {cell.absent}" if cell.absent else cell.note
        if said and cell.contender != OURS:
            found.setdefault((cell.contender, said), set()).add(cell.case)
    return [
        f"{name}: {said} ({next(iter(where)) if len(where) == 1 else f'{len(where)} cases'})"
        for (name, said), where in found.items()
    ]


def draw(cells: Sequence[Cell], path: Path) -> Path:
    """Draw ratios as bars, or one case's times and memory.

    Raises:
        MachineError: matplotlib is not installed.
    """
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        hint = "pip install 'coda-agent[docs]'"
        raise MachineError("a figure needs matplotlib, which is not installed", hint=hint) from None
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "coda-agent"}
    timed = [cell for cell in cells if cell.ratio]
    alone = len({(cell.case, cell.regime, cell.machine) for cell in timed}) == 1
    figure = (_bars if alone else _ratios)(pyplot, timed)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _bars(pyplot: Any, timed: Sequence[Cell]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(9, 1 + 0.4 * len(timed)))
    rows = timed[::-1]  # the first stands on top
    colors = ["tab:green" if cell.contender == OURS else "tab:gray" for cell in rows]
    for panel, label, widths in (
        (left, "ms", [(cell.time_us or 0) / 1e3 for cell in rows]),
        (right, "GiB beyond what was there", [(cell.peak_mib or 0) / 1024 for cell in rows]),
    ):
        bars = panel.barh([cell.contender for cell in rows], widths, color=colors)
        panel.bar_label(bars, fmt="%.1f", padding=3)
        panel.margins(x=0.15)
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{timed[0].case}, {timed[0].regime}, {card(timed[0].machine)}")
    return figure


def _ratios(pyplot: Any, timed: Sequence[Cell]) -> Any:
    names, regimes = others(timed), [*dict.fromkeys(cell.regime for cell in timed)]
    cases = [*dict.fromkeys(cell.case for cell in timed)]
    size = 4 + len(cases) * len(names) / 8, 4 * max(1, len(regimes))
    figure, panels = pyplot.subplots(len(regimes) or 1, squeeze=False, figsize=size)
    for regime, panel in zip(regimes, panels[:, 0], strict=True):
        for i, name in enumerate(names):
            found = {c.case: c.ratio for c in timed if (c.regime, c.contender) == (regime, name)}
            places = [cases.index(case) + i / (len(names) + 1) for case in found]
            panel.bar(places, [*found.values()], 1 / (len(names) + 1), label=f"over {name}")
        panel.set_xticks(range(len(cases)), cases, rotation=45, ha="right")
        panel.axhline(1.0, color="gray")
        panel.set_title(regime)
        panel.legend()
    return figure
