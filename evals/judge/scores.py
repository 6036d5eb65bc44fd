"""The judge's scores: run, keep as records, write as docs/judge.md.

What is scored is handed in: this room imports no agent. A record is written as it grows, and a run
that was interrupted goes on where it stopped while the judge, its sources, is the same.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.evals.judge.corpus import Right
from coda_agent.evals.judge.mutants import EXPLAINED, Mutant, differs, mutants
from coda_agent.evals.pages import table, write_record

if TYPE_CHECKING:
    from coda_agent.evals.judge.lowerings import Runner
    from coda_agent.generated.kernel import Kernel
    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec

REPETITIONS = 5
Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Judge:
    """What is scored.

    Attributes:
        digest: Of its sources.
        device: "cpu" or "cuda".
        machine: Kept in the records.
        signature: Faults of programs against a spec's declarations, from (spec, programs).
        numerics: The first fault of a variant: its message and place, from (spec, programs,
            variant, runner or None, seed).
        run: The right lowering.
    """

    digest: str
    device: str
    machine: Mapping[str, Any]
    signature: Callable[[Spec, dict[str, Program]], Sequence[Any]]
    numerics: Callable[
        [Spec, Mapping[str, Program], str, Runner | None, int], tuple[str, dict[str, Any]] | None
    ]
    run: Runner


def suite(kernels: Iterable[Kernel], *, seed: int, count: int | None = None) -> list[Mutant]:
    """The mutants of all kernels; with `count`, so many of them, operators in turn."""
    found = [m for k in kernels for m in mutants(k.spec, k.programs[k.spec.variant()], seed=seed)]
    if count is None:
        return found
    random.Random(seed).shuffle(found)
    seen: Counter[str] = Counter()
    turn = {}
    for mutant in found:
        turn[mutant.name] = seen[mutant.operator]
        seen[mutant.operator] += 1
    chosen = sorted(found, key=lambda m: turn[m.name])[:count]
    return sorted(chosen, key=lambda m: m.kernel)


def trial(judge: Judge, kernel: Kernel, mutant: Mutant, *, seed: int) -> dict[str, Any]:
    """What became of a mutant: its layer is "equivalent", "signature", "numerics" or "survived"."""
    spec, first = kernel.spec, kernel.spec.variant()
    start = time.monotonic()
    programs = {**kernel.programs, first: mutant.program}
    cell: dict[str, Any] = {"operator": mutant.operator, "lowered": mutant.lowered}
    if not differs(mutant, kernel.programs[first], spec, judge.run, judge.device):
        return {**cell, "layer": "equivalent"}
    if findings := [] if mutant.lowered else judge.signature(spec, programs):
        return {**cell, "layer": "signature", "said": findings[0].message}
    found = judge.numerics(spec, programs, first, mutant.runner(judge.run), seed)
    cell["seconds"] = round(time.monotonic() - start, 2)
    if found is None:
        return {**cell, "layer": "survived"}
    message, where = found
    cell |= {"layer": "numerics", "said": message}
    if mutant.faults and "fault" in where:
        cell |= {"expected": mutant.faults, "fault": where["fault"]}
    return cell


def score_mutants(
    root: Path, kernels: Sequence[Kernel], judge: Judge, *, seed: int, count: int | None, say: Say
) -> dict[str, Any]:
    """Judge the mutant suite; the record, judge-mutants-<device>.json."""
    by_name = {k.spec.name: k for k in kernels}
    record = _Record(root, f"judge-mutants-{judge.device}", judge, {"seed": seed})
    chosen = suite(kernels, seed=seed, count=count)
    jobs = {m.name: lambda m=m: trial(judge, by_name[m.kernel], m, seed=seed) for m in chosen}
    return record.run(jobs, say)


def score_corpus(
    root: Path, corpus: Sequence[Right], left_out: list[str], judge: Judge, *, say: Say
) -> dict[str, Any]:
    """Judge right programs, each with several fresh seeds; the record, judge-corpus-<device>.json.

    Programs of one spec follow each other with equal seeds: they share their cases.
    """
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(REPETITIONS)]
    record = _Record(root, f"judge-corpus-{judge.device}", judge, {"left_out": left_out})

    def one(right: Right, seed: int) -> dict[str, Any]:
        found = judge.numerics(right.spec, right.programs, right.variant, None, seed)
        signature = judge.signature(right.spec, dict(right.programs))
        said = [] if right.name.startswith("demonstration") else [f.message for f in signature]
        return {"seed": seed, "refused": [*said, *([found[0]] if found else [])]}

    jobs = {
        f"{right.name} #{i + 1}": lambda right=right, seed=seed: one(right, seed)
        for i, seed in enumerate(seeds)
        for right in corpus
    }
    return record.run(jobs, say)


def score_latency(
    root: Path, verdict: Callable[[str], float], names: Sequence[str], judge: Judge, *, say: Say
) -> dict[str, Any]:
    """Time verdicts of kernels, one to warm up and five each; judge-latency-<device>.json."""
    record = _Record(root, f"judge-latency-{judge.device}", judge, {"load": _load()})
    record.cells.clear()

    def one(name: str) -> dict[str, Any]:
        verdict(name)
        return {"seconds": [round(verdict(name), 3) for _ in range(REPETITIONS)]}

    return record.run({name: lambda name=name: one(name) for name in names}, say)


def _load() -> list[float]:
    import os

    return [round(x, 1) for x in os.getloadavg()]


class _Record:
    """A record that grows: cells by name, written every few seconds and at the end."""

    def __init__(self, root: Path, name: str, judge: Judge, head: Mapping[str, Any]) -> None:
        self.path = root / "evals" / "results" / f"{name}.json"
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        self.head = {"judge": judge.digest, "machine": judge.machine, **head, "date": date}
        self.cells: dict[str, Any] = {}
        if self.path.is_file():
            old = json.loads(self.path.read_text("utf-8"))
            same = ("judge", "seed") if "seed" in self.head else ("judge",)
            if all(old.get(key) == self.head[key] for key in same):
                self.cells = old["cells"]

    def run(self, jobs: Mapping[str, Callable[[], dict[str, Any]]], say: Say) -> dict[str, Any]:
        written = time.monotonic()
        try:
            for done, (name, job) in enumerate(jobs.items(), 1):
                say(done, len(jobs), name)
                if name not in self.cells:
                    self.cells[name] = job()
                if time.monotonic() - written > 10:
                    write_record(self.path, self.head, self.cells)
                    written = time.monotonic()
        finally:
            write_record(self.path, self.head, self.cells)
        return {**self.head, "cells": self.cells}


# The page.

_HEAD = """# How strong the judge is

Written by `coda-agent score-judge` from `evals/results/judge-*.json`; do not edit.
"""


def write_page(root: Path) -> Path:
    """Write docs/judge.md from the records that are there."""
    parts = [_HEAD]
    for name, section in _SECTIONS.items():
        for path in sorted((root / "evals" / "results").glob(f"judge-{name}-*.json")):
            record = json.loads(path.read_text("utf-8"))
            device = path.stem.removeprefix(f"judge-{name}-")
            parts.append(section(device, record))
    catalogue = root / "tests" / "exploits" / "catalogue.toml"
    if catalogue.is_file():
        parts.append(_exploits(tomllib.loads(catalogue.read_text("utf-8"))))
    page = root / "docs" / "judge.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return page


def mutants_text(device: str, record: Mapping[str, Any]) -> str:
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
    killed = total["signature"] + total["numerics"]
    judged = killed + total["survived"]
    survivors = [
        f"- {name}: {EXPLAINED.get(c['operator'], 'not explained.')}"
        for name, c in record["cells"].items()
        if c["layer"] == "survived"
    ]
    return f"""## Mutants, {device}

{killed} of {judged} mutants killed, {killed / max(judged, 1):.1%}. {total["equivalent"]} more never
differ from their original and do not count. A mutant in the program is an edit of its graph; one in
the lowering runs the right program as a broken kernel would. Seed {record["seed"]},
{record["date"]}.

{table(rows)}

Survivors:

{chr(10).join(survivors) or "none"}"""


def diagnosis_text(device: str, record: Mapping[str, Any]) -> str:
    """The section on diagnoses of the mutants that numerics killed."""
    cells = [c for c in record["cells"].values() if "fault" in c]
    # A name that is also right counts as the best one.
    pairs = [
        (c["expected"][0], c["expected"][0] if c["fault"] in c["expected"] else c["fault"])
        for c in cells
    ]
    rows = [["fault", "mutants", "recall", "precision", "else called"]]
    for fault in sorted({fault for pair in pairs for fault in pair}):
        made = [said for true, said in pairs if true == fault]
        said = [true for true, said in pairs if said == fault]
        hits = made.count(fault)
        others = Counter(x for x in made if x != fault).most_common()
        rows.append([
            fault.replace("_", " "), str(len(made)), f"{hits / len(made):.2f}" if made else "",
            f"{hits / len(said):.2f}" if said else "",
            ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in others),
        ])  # fmt: skip
    right = sum(true == said for true, said in pairs)
    return f"""## Diagnosis, {device}

The fault that is named is the one that was made for {right} of {len(pairs)},
{right / max(len(pairs), 1):.1%}, of the mutants above that numerics killed by a wrong value. Some
look alike from outside, such as a scalar left out and a constant factor; then either name is right,
and counts as the first.

{table(rows)}"""


def corpus_text(device: str, record: Mapping[str, Any]) -> str:
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
{record["date"]}.

{chr(10).join(refused)}"""


def latency_text(device: str, record: Mapping[str, Any]) -> str:
    """The section on the time of a verdict."""
    rows = [["kernel", "median, s", "least", "most"]]
    for name, cell in record["cells"].items():
        times = cell["seconds"]
        rows.append([name, *(f"{f(times):.2f}" for f in (statistics.median, min, max))])
    every = [t for cell in record["cells"].values() for t in cell["seconds"]]
    return f"""## Time of a verdict, {device}

All gates that run there, from warm workers and an empty cache: median
{statistics.median(every):.2f} s, from {min(every):.2f} to {max(every):.2f} s,
on {record["machine"]["cores"]} cores whose load (over 1, 5 and 15 minutes) was
{", ".join(map(str, record["load"]))} at the start. {record["date"]}.

{table(rows)}"""


def timing_text(device: str, record: Mapping[str, Any]) -> str:
    """The section on a kernel timed against itself."""
    return f"""## A kernel against itself, {device}

`{record["kernel"]}` and cuBLAS's product were called different from themselves in
{record["different"]} of {record["compared"]} comparisons. {record["date"]}."""


def _exploits(catalogue: Mapping[str, Any]) -> str:
    entries = next(v for v in catalogue.values() if isinstance(v, list))
    rows = [["row", "exploit", "status", "layer", "reason"]]
    rows += [
        [str(e.get(k, "")) for k in ("row", "name", "status", "layer", "reason")] for e in entries
    ]
    return f"""## Exploits

Known ways to fool a kernel judge. Those that can be tried on this one are run by `tests/exploits`.

{table(rows)}"""


_SECTIONS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "mutants": lambda device, r: f"{mutants_text(device, r)}\n\n{diagnosis_text(device, r)}",
    "corpus": corpus_text,
    "latency": latency_text,
    "timing": timing_text,
}
