"""What a reviewer asks of an accepted kernel, answered from its evidence and its history.

- Every figure is the judge's, out of evidence.json; nothing an author wrote moves one.
- `Flag`s are what needs a look; their order is the order of the list.
- Terminal and pages show the same `facts` and `tables`.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from coda_agent.evals import pages, svg
from coda_agent.evals.pages import TIMED, Rows, label
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec

BROKEN, EDITED, UNSHOWN, SLOW, TIGHT, STALE, FINE = range(7)
"""What a flag asks to look at, the gravest first: evidence that refuses or is missing; text that
was not judged; a level below accepted; a figure below what a user would run; an error near its
bound; another judge."""

TIGHT_RATIO = 0.9
"""Of an error to its bound: another draw of inputs may well fall on the other side."""

_RATIOS = ("of_gemm", "over_compile")


@dataclass(frozen=True)
class Version:
    """A kernel as a commit, or the working tree (commit ""), holds it."""

    commit: str
    date: str
    program: str
    evidence: Mapping[str, Any]

    @property
    def level(self) -> str:
        return str(self.evidence.get("level", "damaged"))

    @property
    def digests(self) -> Mapping[str, str]:
        return self.evidence.get("digests", {})

    def cells(self) -> list[dict[str, Any]]:
        """The benchmark's cells that hold times."""
        cells = self.evidence.get("cells", [])
        if isinstance(gates := self.evidence.get("gates"), list):  # as before schema 2
            cells = next((g["data"]["cells"] for g in gates if g["name"] == "performance"), [])
        return [cell for cell in cells if "times" in cell]


class Flag(NamedTuple):
    """One thing that needs a look: how much (`BROKEN` first), and what."""

    rank: int
    text: str


@dataclass
class Review:
    """One kernel and what is known of it; less where its files are damaged.

    Attributes:
        current: What stands in the working tree.
        history: Its committed versions, newest first.
        spec: Its frozen spec; None where that cannot be read.
        digests: What today's spec and program have.
        stale: The gates whose word no longer stands (`Evidence.stale`).
        raw: What gates saw, whole, where the verdict's run is here.
        newer_spec: Whether specs/ holds another text than the frozen one.
        cost: What the author's run took; "" where its log is not kept.
        faults: Why files could not be read.
        programs: Its programs, where they were asked for.
        now: The time to reckon age by.
    """

    name: str
    current: Version
    history: Sequence[Version]
    spec: Spec | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    stale: Sequence[str] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    newer_spec: bool = False
    cost: str = ""
    faults: Sequence[str] = ()
    programs: Mapping[str, Program] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @cached_property
    def flags(self) -> list[Flag]:
        """What needs a look, the gravest first."""
        return sorted(self._flags(), key=lambda flag: flag.rank)

    @property
    def rank(self) -> int:
        return self.flags[0].rank if self.flags else FINE

    @property
    def moved(self) -> list[str]:
        """The spec and candidate that are not what was judged, and the gates that are stale."""
        then = self.current.digests
        return [*(k for k, v in self.digests.items() if then.get(k) != v), *self.stale]

    def saw(self, gate: str) -> Mapping[str, Any]:
        """A gate's whole report; nothing where the verdict's run is not here."""
        return self.raw.get(gate) or {}

    @property
    def age_s(self) -> float:
        """Seconds since the evidence was made; infinite where it does not say."""
        date = self.current.evidence.get("date")
        return (self.now - datetime.fromisoformat(date)).total_seconds() if date else float("inf")

    @property
    def age(self) -> str:
        """`12 d`, `5 h` or `3 min`."""
        if self.age_s == float("inf"):
            return "?"
        size, unit = (60, "min") if self.age_s < 3600 else (3600, "h")
        size, unit = (86400, "d") if self.age_s >= 86400 else (size, unit)
        return f"{self.age_s // size:.0f} {unit}"

    @property
    def slowest(self) -> list[dict[str, Any]]:
        """For each bench shape its cell in the element type that is slowest beside the GEMM."""
        shapes: dict[str, list[dict[str, Any]]] = {}
        for cell in self.current.cells():
            shapes.setdefault(label(cell["sizes"]), []).append(cell)
        return [min(cells, key=lambda c: c["of_gemm"]["ratio"]) for cells in shapes.values()]

    def changes(self) -> dict[str, Any] | None:
        """Against the version before, which is HEAD's where the kernel was edited since: program
        lines added and removed, both levels, digests that differ, and each timed cell's ratios then
        and now."""
        new = self.current
        differ = (v for v in self.history if (v.program, v.evidence) != (new.program, new.evidence))
        if (old := next(differ, None)) is None:
            return None
        body = _diff(old, new)[2:]
        before = {(c["dtype"], label(c["sizes"])): c for c in old.cells()}
        return {
            "commit": old.commit,
            "added": sum(line.startswith("+") for line in body),
            "removed": sum(line.startswith("-") for line in body),
            "level": [old.level, new.level],
            "digests": [k for k, v in new.digests.items() if old.digests.get(k) != v],
            "speed": [
                {"dtype": c["dtype"], "shape": label(c["sizes"]),
                 **{k: [b[k]["ratio"], c[k]["ratio"]] for k in _RATIOS}}
                for c in new.cells()
                if (b := before.get((c["dtype"], label(c["sizes"]))))
            ],
        }  # fmt: skip

    @property
    def since(self) -> str:
        """`changes` in one phrase."""
        found = self.changes()
        if found is None:
            return "first version"
        said = [f"+{found['added']} −{found['removed']} lines"]
        if found["level"][0] != found["level"][1]:
            said.append(" to ".join(found["level"]))
        if moved := [100 * (b / a - 1) for a, b in (f["of_gemm"] for f in found["speed"])]:
            said.append(f"of GEMM {min(moved):+.1f} … {max(moved):+.1f} %")
        return ", ".join(said)

    @property
    def diff(self) -> list[str]:
        """The last change of the program, which may lie before the last version."""
        other = next((v for v in self.history if v.program != self.current.program), None)
        return _diff(other, self.current) if other else []

    def facts(self) -> Rows:
        """Standing, provenance and environment, by name."""
        evidence = self.current.evidence
        rows: Rows = [("level", self.current.level)]
        rows += [("needs a look", text) for _, text in self.flags] or [("needs a look", "no")]
        rows += [
            ("evidence", f"{self.age} old, of {evidence.get('date')}"),
            ("since the version before", self.since),
            ("author", f"{evidence.get('author')}, run {evidence.get('run')}"),
            ("cost", self.cost or "unknown: the run's log is not kept here"),
            ("machine", _machine(evidence)),
        ]
        if self.spec:
            bound = f"{self.spec.tolerance.multiple:g} × PyTorch's own error against float64"
            rows += [("error bound", bound), ("target", f"{self.spec.target:g} of the bare GEMM")]
        return rows + [("not shown", sentence) for sentence in evidence.get("not_shown", [])]

    def tables(self) -> dict[str, Rows]:
        """Title to rows, the first of them the head; what was not recorded is left out."""
        evidence = self.current.evidence
        then = self.current.digests
        keys = ("program", "dtype", "arch", "tile", "registers", "local_stores", "shared_bytes")
        found: dict[str, Rows] = {
            "Speed": pages.speed(self.current.cells()),
            "Largest error over its bound": [
                ("program, dtype", "ratio", "margin", "output", "shape", "tile"),
                *((name, f"{w['ratio']:.2f}", f"{1 - w['ratio']:.0%}", w.get("output", ""),
                   label(w.get("sizes", {})), w.get("config", ""))
                  for name, w in evidence.get("worst", {}).items())],
            "Refused tiles": [
                ("tile", "program", "dtype", "reason"),
                *((t["tile"], t["program"], t["dtype"], t["fault"])
                  for t in evidence.get("refused_tiles", []))],
            "Gates": [
                ("gate", "passed", "s", "version", "stale"),
                *((name, gate["passed"], gate["seconds"], gate["version"],
                   "yes" if name in self.stale else "no")
                  for name, gate in evidence.get("gates", {}).items())],
            "Digests": [
                ("of", "when judged", "now"),
                *((k, then.get(k, "–"), "as now" if then.get(k) == v else v)
                  for k, v in self.digests.items())],
            "Versions": [
                ("commit", "date", "level", "author"),
                *((v.commit[:9], v.date, v.level, v.evidence.get("author")) for v in self.history)],
            "Compiled tiles": [
                tuple(key.replace("_", " ") for key in keys),
                *(tuple(k.get(key, k.get("error", "")) for key in keys)
                  for k in self.saw("compile").get("kernels", []))],
        }  # fmt: skip
        return {title: rows for title, rows in found.items() if len(rows) > 1}

    def record(self) -> dict[str, Any]:
        """As plain JSON data; tables are lists of their rows by the head's names."""
        evidence = self.current.evidence
        return {
            "kernel": self.name, "level": self.current.level, "date": evidence.get("date"),
            "author": evidence.get("author"), "run": evidence.get("run"), "cost": self.cost,
            "look": [flag.text for flag in self.flags], "stale": self.moved,
            "since": self.changes(),
            "tables": {title: pages.named(rows) for title, rows in self.tables().items()},
            "speed": [{k: c[k] for k in ("dtype", "sizes", *_RATIOS)}
                      for c in self.current.cells()],
        }  # fmt: skip

    def _flags(self) -> Iterator[Flag]:
        now = self.current
        yield from (Flag(BROKEN, fault) for fault in self.faults)
        if now.level == "revoked":
            failed = [name for name, g in now.evidence["gates"].items() if not g["passed"]]
            yield Flag(BROKEN, f"revoked: failed {', '.join(failed)}")
        if "candidate" in self.moved:
            yield Flag(EDITED, "the program was edited after it was judged")
        if "spec" in self.moved:
            yield Flag(EDITED, "its frozen spec was edited after it was judged")
        if now.level in ("proved", "verified"):
            missing = "no GPU ran it" if now.level == "proved" else "never timed"
            yield Flag(UNSHOWN, f"{now.level} only: {missing}")
        for cell in now.evidence.get("cells", []):
            where = f"at {label(cell['sizes'])} {cell['dtype']}"
            if "times" not in cell:
                yield Flag(SLOW, f"{cell['error']} {where}")
            elif (low := cell["over_compile"]["low"]) < 1:
                yield Flag(SLOW, f"perhaps slower than torch.compile {where}: from {low:.3f}")
        for name, worst in now.evidence.get("worst", {}).items():
            if worst["ratio"] >= TIGHT_RATIO:
                yield Flag(TIGHT, f"{name}: error is {worst['ratio']:.2f} of its bound")
        if self.newer_spec:
            yield Flag(STALE, "stale: specs/ holds another text")
        if self.stale:
            again = f"coda-agent verify {self.name} judges it again"
            yield Flag(STALE, f"stale: {', '.join(self.stale)}; {again}")


def _machine(evidence: Mapping[str, Any]) -> str:
    """The machine that evidence names, and the versions on it."""
    about = evidence.get("machine") or {}
    gpu = {"name": about.get("gpu"), "driver_version": about.get("driver")}
    return pages.machine({**about, "gpu": gpu})


def ordered(reviews: Sequence[Review]) -> list[Review]:
    """What needs a look most on top; among equals the oldest evidence."""
    return sorted(reviews, key=lambda r: (r.rank, -r.age_s, r.name))


def index(reviews: Sequence[Review]) -> Rows:
    """A line a kernel."""

    def speed(review: Review) -> str:
        return "  ".join(
            f"{label(c['sizes'])} {c['of_gemm']['ratio']:.3f}/{c['over_compile']['ratio']:.3f}"
            for c in review.slowest
        )

    return pages.tabulate(reviews, {
        "kernel": lambda r: r.name,
        "level": lambda r: r.current.level,
        "age": lambda r: r.age,
        "of GEMM / over compile, slowest dtype": lambda r: speed(r) or "–",
        "since the version before": lambda r: r.since,
        "needs a look": lambda r: "; ".join(flag.text for flag in r.flags) or "no",
    })  # fmt: skip


def write_pages(folder: Path, reviews: Sequence[Review]) -> list[Path]:
    """index.html and a page for each kernel; the index first."""
    shared = {"FINE": FINE, "SLOW": SLOW}
    index = folder / "index.html"
    written = [pages.write(index, "reviews.html", reviews=ordered(reviews), **shared)]
    for r in reviews:
        dtypes: dict[str, str] = {}
        if spec := r.spec:
            types = spec.default_types()
            dtypes = {n: spec.dtype_of(n, types) for n in chain(spec.inputs, spec.outputs)}
        flows = {name: svg.dataflow(program, dtypes) for name, program in r.programs.items()}
        strips = {
            title: svg.strips(title, {name: c["times"][key] for key, name in TIMED.items()})
            for c in r.saw("performance").get("cells", [])
            if "times" in c and (title := f"{c['dtype']}, {label(c['sizes'])}")
        }
        path = folder / f"{r.name}.html"
        written.append(pages.write(path, "review.html", r=r, flows=flows, strips=strips, **shared))
    return written


def write_benchmarks(root: Path) -> Path:
    """Write docs/benchmarks.md of a workspace from its evidence files and from nothing else."""
    files = sorted(root.glob("generated/*/evidence.json"))
    found = [Version("", "", "", json.loads(file.read_text("utf-8"))) for file in files]
    timed = [version for version in found if version.cells()]
    cells = [cell for version in timed for cell in version.cells()]
    kernels = ["kernel", *(v.evidence["kernel"] for v in timed for _ in v.cells())]
    rows = [(kernel, *row) for kernel, row in zip(kernels, pages.speed(cells), strict=True)]
    return pages.write(
        root / "docs" / "benchmarks.md", "benchmarks.md", rows=rows,
        streamed=any("of_gemm" in c.get("steady", {}) for c in cells),
        rounds=sorted({c["times"]["ours"]["rounds"] for c in cells}),
        machines=dict.fromkeys(_machine(v.evidence) for v in timed),
        refused=dict.fromkeys(
            "{program} ({dtype}), tile {tile}: {fault}".format(**tile)
            for v in found for tile in v.evidence["refused_tiles"]
        ),
        untimed=[v.evidence for v in found if v not in timed],
    )  # fmt: skip


def _diff(old: Version, new: Version) -> list[str]:
    texts = old.program.splitlines(), new.program.splitlines()
    names = old.commit[:9] or "working tree", new.commit[:9] or "working tree"
    return list(difflib.unified_diff(*texts, *names, lineterm="", n=2))
