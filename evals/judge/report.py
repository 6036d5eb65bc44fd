"""docs/judge.md: the judge's records as a page, section by section."""

from __future__ import annotations

import json
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coda_agent.evals.pages import machine, table

Record = Mapping[str, Any]

_TAIL = "a GPU's own sigmoid is made of a tanh, and errs as much in its left tail"
EXPLAINED = {
    "folded_norm: change a constant, 1e-05": "a twentieth of this epsilon moves the result by less "
    "than float32 arithmetic may",
    "gemm_fp8_swiglu: by hand, a sigmoid by subtraction from 1, which loses the left tail": _TAIL,
    "gemm_rmsnorm_swiglu: by hand, a sigmoid by tanh, which loses the left tail": _TAIL,
}
"""Survivors to the reason why the judge may let them live."""


def write_page(root: Path) -> Path:
    """Write docs/judge.md from the records that are there."""
    parts = [
        "# How strong the judge is\n\nWritten by `coda-agent score-judge` from "
        "`evals/results/judge-*.json`; do not edit."
    ]
    for name, section in _SECTIONS.items():
        for path in sorted((root / "evals" / "results").glob(f"judge-{name}-*.json")):
            record = json.loads(path.read_text("utf-8"))
            parts.append(section(path.stem.removeprefix(f"judge-{name}-"), record))
    catalogue = root / "tests" / "exploits" / "catalogue.toml"
    if catalogue.is_file():
        parts.append(_exploits(tomllib.loads(catalogue.read_text("utf-8"))))
    page = root / "docs" / "judge.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return page


def _when(record: Record) -> str:
    return f"{record['date']}, {machine(record['machine'])}"


def mutants_text(device: str, record: Record) -> str:
    """The section on mutants."""
    cells = record["cells"].values()
    layers = ("signature", "numerics", "survived", "equivalent")
    rows = [["fault", "made in", *layers]]
    for operator, lowered in dict.fromkeys((c["operator"], c["lowered"]) for c in cells):
        found = Counter(c["layer"] for c in cells if c["operator"] == operator)
        made = ("program", "lowering")[lowered]
        rows.append([operator, made, *(str(found[x] or "") for x in layers)])
    total = Counter(c["layer"] for c in cells)
    rows.append(["**all**", "", *(f"**{total[x]}**" for x in layers)])
    return f"""## Mutants, {device}

{_killed(record)}
A mutant in the program is an edit of its graph; one in
the lowering runs the right program as a broken kernel would. Seed {record["seed"]},
{_when(record)}.

{table(rows)}"""


def _killed(record: Record) -> str:
    total = Counter(c["layer"] for c in record["cells"].values())
    killed = total["signature"] + total["numerics"]
    judged = killed + total["survived"]
    survivors = [
        f"{name}: {EXPLAINED.get(name, 'not explained')}"
        for name, c in record["cells"].items()
        if c["layer"] == "survived"
    ]
    return (
        f"{killed} of {judged} mutants killed, {killed / max(judged, 1):.1%}; survivors: "
        f"{'; '.join(survivors) or 'none'}.\n{total['equivalent']} more are their original but for "
        "less than a sixteenth of a rounding, and do not count."
    )


def diagnosis_text(device: str, record: Record) -> str:
    """The section on diagnoses of the mutants that numerics killed."""
    return f"""## Diagnosis, {device}

The fault that is named is the one that was made for {_named(record)}
of the mutants above that numerics killed by a wrong value. The judge's hypotheses were tuned on
mutants of the same kernels. Some faults look alike from outside, such as a scalar left out and a
constant factor; then either name is right, and counts as the first.

{_by_fault(record)}"""


def held_out_text(device: str, record: Record) -> str:
    """The section on diagnoses of programs that nothing was tuned on."""
    programs = len({name.partition(":")[0] for name in record["cells"]})
    return f"""## Diagnosis, held out, {device}

The same for mutants of the {programs} programs of the demonstrations, on which nothing of the judge
was tuned: {_named(record)}.
{_killed(record)} Seed {record["seed"]},
{_when(record)}.

{_by_fault(record)}"""


def _pairs(record: Record) -> list[tuple[str, str]]:
    """The fault that was made and the one that was named, of each mutant that got a name; one that
    is also right counts as the best one."""
    cells = [c for c in record["cells"].values() if "fault" in c]
    return [
        (c["expected"][0], c["expected"][0] if c["fault"] in c["expected"] else c["fault"])
        for c in cells
    ]


def _named(record: Record) -> str:
    pairs = _pairs(record)
    right = sum(made == said for made, said in pairs)
    return f"{right} of {len(pairs)}, {right / max(len(pairs), 1):.1%}"


def _by_fault(record: Record) -> str:
    pairs = _pairs(record)
    rows = [["fault", "mutants", "recall", "precision", "else called"]]
    for fault in sorted({fault for pair in pairs for fault in pair}):
        said = Counter(said for made, said in pairs if made == fault)
        hits, made = said.pop(fault, 0), sum(fault == made for made, _ in pairs)
        called = sum(fault == said for _, said in pairs)
        rows.append([
            fault.replace("_", " "), str(made), f"{hits / made:.2f}" if made else "",
            f"{hits / called:.2f}" if called else "",
            ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in said.most_common()),
        ])  # fmt: skip
    return table(rows)


_SETS = {
    "found": "Programs that once passed this judge, and their like: what differs shows on unusual "
    "values alone, or is less than a rounding to 16 bits",
    "blind": "Programs written from the specs alone, by somebody who did not know the judge",
}


def by_hand_text(name: str, device: str, record: Record) -> str:
    """The section on one set of wrong programs that people wrote."""
    return f"""## Wrong programs written by hand, {name}, {device}

{_SETS[name]}. {_killed(record)} Seed {record["seed"]},
{_when(record)}."""


def corpus_text(device: str, record: Record) -> str:
    """The section on right programs."""
    cells = record["cells"]
    programs = {name.rpartition(" #")[0] for name in cells}
    shown = sum(p.startswith("demonstration") for p in programs)
    rewrites = sum(": " in p for p in programs)
    refused = [f"- {name}: {c['refused'][0]}" for name, c in cells.items() if c["refused"]]
    return f"""## Right programs, {device}

{len(refused)} refusals in {len(cells)} trials, each with fresh seeds, of {len(programs)} right
programs: {len(programs) - shown - rewrites} accepted ones, {rewrites} rewrites of them (factors
regrouped, sigmoid by exp or tanh, pairs taken of each factor, …) and {shown} demonstrations. Left
out, since a spec cannot draw their inputs: {", ".join(record["left_out"]) or "none"}.
{_when(record)}.

{chr(10).join(refused)}"""


def latency_text(device: str, record: Record) -> str:
    """The section on the time of a verdict."""
    cells = {name: cell["seconds"] for name, cell in record["cells"].items()}
    gates = [gate for gate in next(iter(cells.values()))[0] if gate != "whole"]
    rows = [["kernel", "median, s", "least", "most", *gates]]
    for name, verdicts in cells.items():
        whole = [v["whole"] for v in verdicts]
        shown = [f(whole) for f in (statistics.median, min, max)]
        shown += [statistics.median(v[gate] for v in verdicts) for gate in gates]
        rows.append([name, *(f"{seconds:.2f}" for seconds in shown)])
    every = [v["whole"] for verdicts in cells.values() for v in verdicts]
    return f"""## Time of a verdict, {device}

{"All gates" if device == "cuda" else "Static, compile for sm_90a and numerics"},
one element type, from warm workers and an empty cache: median
{statistics.median(every):.2f} s, from {min(every):.2f} to {max(every):.2f} s,
on {record["machine"]["cores"]} cores whose load (over 1, 5 and 15 minutes) was
{", ".join(map(str, record["load"]))} at the start. Under a gate's name, its median.
{_when(record)}.

{table(rows)}"""


def timing_text(device: str, record: Record) -> str:
    """The section on a kernel timed against itself."""
    return f"""## A kernel against itself, {device}

`{record["kernel"]}` and cuBLAS's product were called different from themselves in
{record["different"]} of {record["compared"]} comparisons.
{_when(record)}."""


def _exploits(catalogue: Mapping[str, Any]) -> str:
    keys = ["row", "exploit", "status", "layer", "reason"]
    rows = [[str(e.get(k, "")) for k in ("row", "name", *keys[2:])] for e in catalogue["row"]]
    return f"""## Exploits

Known ways to fool a kernel judge. Those that can be tried on this one are run by `tests/exploits`.

{table([keys, *rows])}"""


_SECTIONS = {
    "mutants": lambda device, r: f"{mutants_text(device, r)}\n\n{diagnosis_text(device, r)}",
    "held-out": held_out_text,
    "by-hand-found": partial(by_hand_text, "found"),
    "by-hand-blind": partial(by_hand_text, "blind"),
    "corpus": corpus_text,
    "latency": latency_text,
    "timing": timing_text,
}
