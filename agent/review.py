"""What accepted kernels stand on, and what of it needs a look.

Every figure is the judge's, out of evidence.json. What changed since is in git's history.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coda_agent.agent import pages
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.judge.records import Ratio
from coda_agent.agent.judgement import Cell, Ratios
from coda_agent.agent.tables import Rows, cell_text, ratio_text, shape_text, tabulate
from coda_agent.agent.workspace import Kernel, Workspace
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import load_spec

DAMAGED, EDITED, UNSHOWN, SLOW, TIGHT, STALE, FINE = range(7)
"""What needs a look, the gravest first: evidence that is missing or refuses; text that was not
judged; a level below accepted; what is slower than torch.compile; an error near its bound; an
earlier version of a gate or a later text of the spec."""
TIGHT_RATIO = 0.9
"""Of an error to its bound: another draw of inputs may well fall on the other side."""


@dataclass(frozen=True)
class Review:
    """A kernel, and what needs a look: how grave, and what."""

    kernel: Kernel
    flags: Sequence[tuple[int, str]]

    @property
    def rank(self) -> int:
        """The gravest of its flags."""
        return min((rank for rank, _ in self.flags), default=FINE)

    @property
    def look(self) -> list[str]:
        """What needs a look, the gravest first."""
        return [text for _, text in sorted(self.flags, key=lambda flag: flag[0])]


def review(workspace: Workspace | None, kernels: Iterable[Kernel]) -> list[Review]:
    """Review kernels, what needs a look most on top; damage raises nothing."""
    found = [Review(kernel, [*_flags(workspace, kernel)]) for kernel in kernels]
    return sorted(found, key=lambda r: (r.rank, r.kernel.name))


def _flags(workspace: Workspace | None, kernel: Kernel) -> Iterator[tuple[int, str]]:
    try:
        evidence = kernel.evidence
        spec = load_spec(kernel.spec)
        now = digests(spec, kernel.text)
        _ = kernel.tuned
    except CodaError as error:
        yield DAMAGED, " ".join(str(error).split())
        return
    if evidence.level == "revoked":
        yield DAMAGED, f"revoked: failed {', '.join(evidence.failed)}"
    for key, name in {"candidate": "program", "spec": "frozen spec"}.items():
        if evidence.digests.get(key) != now[key]:
            yield EDITED, f"the {name} was edited after it was judged"
    if evidence.level in ("proved", "verified"):
        missing = "no GPU ran it" if evidence.level == "proved" else "it was never timed"
        yield UNSHOWN, f"{evidence.level} only: {missing}"
    for cell in evidence.cells:
        where = f"at {shape_text(cell.sizes)} {cell.dtype}"
        if cell.error:
            yield SLOW, f"{cell.error} {where}"
        elif cell.over_compile and (low := cell.over_compile.low) < 1:
            yield SLOW, f"perhaps slower than torch.compile {where}: from {low:.3f}"
    for name, worst in evidence.worst.items():
        if worst.ratio >= TIGHT_RATIO:
            yield TIGHT, f"{name}: error is {worst.ratio:.2f} of its bound"
    if workspace and (other := workspace.differing_spec(kernel.name, spec.text)):
        yield STALE, f"its spec.md differs from {other}"
    if evidence.stale:
        yield STALE, f"stale: {', '.join(evidence.stale)}; coda-agent verify {kernel.name}"


def slowest(kernel: Kernel) -> str:
    """Give a kernel's least ratios to cuBLAS's product and torch.compile, or a dash."""
    cells = () if kernel.level == "damaged" else kernel.evidence.cells
    of_gemm = min((c.of_gemm.ratio for c in cells if c.of_gemm), default=None)
    over = min((c.over_compile.ratio for c in cells if c.over_compile), default=None)
    return f"{of_gemm:.3f} / {over:.3f}" if of_gemm and over else "–"


def index(reviews: Iterable[Review]) -> Rows:
    """Tabulate reviews, a line a kernel."""

    return tabulate(reviews, {
        "kernel": lambda r: r.kernel.name,
        "level": lambda r: r.kernel.level,
        "least of GEMM / over compile": lambda r: slowest(r.kernel),
        "needs a look": lambda r: "; ".join(r.look) or "no",
    })  # fmt: skip


def facts(review: Review) -> Rows:
    """Tabulate a kernel's author and machine, and what needs a look."""
    rows = [("level", review.kernel.level)]
    rows += [("needs a look", text) for text in review.look] or [("needs a look", "no")]
    if review.kernel.level == "damaged":
        return rows
    evidence = review.kernel.evidence
    rows += [("author", f"{evidence.author}, run {evidence.run}"), ("date", evidence.date)]
    rows += [("machine", evidence.machine.versions)]
    near = evidence.approximated.items()
    rows += [("approximated", f"{output}, to {off:.1g} of an element") for output, off in near]
    return rows + [("not shown", sentence) for sentence in evidence.not_shown]


def tables(kernel: Kernel) -> dict[str, Rows]:
    """Tabulate what the judge saw, by title, where there is any."""
    if kernel.level == "damaged":
        return {}
    evidence = kernel.evidence
    found = {
        "Speed": speed(evidence.cells),
        "Largest error over its bound": tabulate(evidence.worst.items(), {
            "program, dtype": lambda item: item[0],
            "ratio": lambda item: f"{item[1].ratio:.2f}",
            "output": lambda item: item[1].output,
            "shape": lambda item: shape_text(item[1].sizes or {}),
            "tile": lambda item: item[1].config,
        }),
        "Refused tiles": tabulate(evidence.refused_tiles, {
            "tile": lambda t: t.tile, "program": lambda t: t.program,
            "dtype": lambda t: t.dtype, "reason": lambda t: t.fault,
        }),
        "Gates": tabulate(evidence.gates.items(), {
            "gate": lambda item: item[0], "passed": lambda item: item[1].passed,
            "version": lambda item: item[1].version, "s": lambda item: item[1].seconds,
            "stale": lambda item: "yes" if item[0] in evidence.stale else "no",
        }),
    }  # fmt: skip
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def speed(cells: Iterable[Cell]) -> Rows:
    """Tabulate cells that hold times; steady ratios where any were measured."""
    timed = [cell for cell in cells if cell.times]

    def median(cell: Cell, name: str) -> str:
        found = (cell.times or {}).get(name)
        return cell_text(found and found.median_us, ".1f")

    def ratio(held: object, name: str) -> str:
        found = getattr(held, name, None)
        return ratio_text(found.ratio, found.low, found.high) if isinstance(found, Ratio) else "–"

    names = {"of GEMM": "of_gemm", "over compile": "over_compile"}
    shown = {head: lambda cell, name=name: ratio(cell, name) for head, name in names.items()}
    if any(isinstance(cell.steady, Ratios) for cell in timed):
        shown |= {f"{head}, steady": lambda cell, name=name: ratio(cell.steady, name)
                  for head, name in names.items()}  # fmt: skip
    baselines = {"this kernel": "ours", "bare cuBLAS": "gemm", "torch.compile": "compile"}
    return tabulate(timed, {
        "dtype": lambda cell: cell.dtype,
        "shape": lambda cell: shape_text(cell.sizes),
        **{f"{label}, µs": lambda cell, name=name: median(cell, name)
           for label, name in baselines.items()},
        **shown,
        "TFLOP/s": lambda cell: cell_text(cell.tflops, ".0f"),
        "floor, µs": lambda cell: cell_text(cell.floor_us, ".1f"),
        "tile": lambda cell: cell.tile,
    })  # fmt: skip


def write_pages(folder: Path, reviews: Sequence[Review]) -> list[Path]:
    """Write index.html and a page for each kernel; the index first."""
    top = [("Kernels", index(reviews))]
    written = [pages.write(folder / "index.html", "Accepted kernels", top)]
    for found in reviews:
        kernel = found.kernel
        texts = {
            path.name: path.read_text("utf-8", errors="replace")
            for path in (kernel.program, kernel.spec) if path.is_file()
        }  # fmt: skip
        about = [("what", "is"), *facts(found)]
        sections = [("Standing", about), *tables(kernel).items(), *texts.items()]
        written.append(pages.write(folder / f"{kernel.name}.html", kernel.name, sections))
    return written
