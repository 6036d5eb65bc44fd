"""docs/judge.md: the judge's scores, what lived or was refused."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.tables import Rows, escape, markdown
from coda_agent.evals.cells import FOLDER, read
from coda_agent.evals.judge.scores import Score
from coda_agent.primitives.objects import write_whole

PAGE = Path("docs", "judge.md")
_EXPLAINED = Path(__file__).with_name("explained.toml")
"""Survivors to the reason why the judge may let them live."""
_MOST = 12
"""Of faults, refusals or survivors that the page names."""
_HEAD = """# How strong the judge is

Written by `coda-agent eval judge` from `evals/results/judge-*.jsonl`; do not edit.

- A *mutant* is a right program with one fault: an edit of its graph, or a lowering that runs it as
  a broken kernel would. *Held out* are mutants of the demonstrations, on which nothing was tuned.
  *Equivalent* ones differ by less than a sixteenth of a rounding, and do not count.
- *Authors* are mistakes of the kind that authors make. *By hand, found* are programs that once
  passed this judge, and their like. *By hand, blind* were written from the specs by somebody who
  did not know the judge.
- *Named*: how often the fault that the judge names is the one that was made.
- The *corpus* has right programs: accepted ones, rewrites, demonstrations, with fresh seeds.
- *Generated* are PyTorch functions written at random, which the composer composes or refuses.
  *Plans* are such functions of several products.
- *Stale* is what an earlier version of a gate decided."""
_NAMED = ("mutants", "held-out", "authors")
Scores = Iterable[Score]


class Summary(NamedTuple):
    """What came of a score: the result, faults, and further remarks."""

    result: str
    faults: list[str]
    remarks: Sequence[str] = ()


def write_page(root: Path) -> Path:
    """Write docs/judge.md of a workspace from the records that are there."""
    parts = [_HEAD]
    rows: list[tuple[object, ...]] = [
        ("score", "device", "result", "named", "seed", "commit", "measured on")
    ]
    said, names = list[str](), list[tuple[str, Rows]]()
    for name, summary in SUMMARIES.items():
        for path in sorted((root / FOLDER).glob(f"judge-{name}-*.jsonl")):
            scores, device = [*read(path, Score).values()], path.stem.rpartition("-")[2]
            result, faults, remarks = summary(scores)
            named = diagnosis(scores) if name in _NAMED else None
            rows.append((name, device, result, named[0] if named else "", *_where(scores)))
            said += [f"{name}, {device}: {line}" for line in (*faults[:_MOST], *remarks)]
            if named and device == "cpu":
                names.append((name, named[1]))
    if len(rows) > 1:
        parts.append(markdown(rows))
    parts.append("\n".join(f"- {escape(line)}" for line in said))
    if names:
        parts += ["Recall and precision of the names, on a CPU:", markdown(_together(names))]
    catalogue = root / "tests" / "exploits" / "catalogue.toml"
    if catalogue.is_file():
        parts += [_exploits(tomllib.loads(catalogue.read_text("utf-8"))["row"])]
    path = root / PAGE
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _where(scores: Scores) -> tuple[str, str, str]:
    """Say by which seeds, commits, machines and days cells came about."""
    seeds = dict.fromkeys(str(score.seed) for score in scores if score.seed)
    commits = dict.fromkeys(score.commit + " (stale)" * bool(score.stale) for score in scores)
    machines = dict.fromkeys(f"{score.machine}, {score.date}" for score in scores)
    return ", ".join(seeds), ", ".join(commits), "; ".join(machines)


def mutants(scores: Scores) -> Summary:
    """Count the mutants that were killed; name those that lived."""
    total = Counter(score.cell["layer"] for score in scores)
    killed = total["signature"] + total["numerics"]
    judged = killed + total["survived"]
    why = tomllib.loads(_EXPLAINED.read_text("utf-8"))
    lived = [score.case for score in scores if score.cell["layer"] == "survived"]
    share = f"killed {killed} of {judged}, {killed / max(judged, 1):.1%}"
    equivalent = f"; {total['equivalent']} equivalent" * bool(total["equivalent"])
    survivors = [f"lived: {name}: {why.get(name, 'not explained')}" for name in lived]
    return Summary(share + equivalent, survivors)


def corpus(scores: Scores) -> Summary:
    """Count the right programs that were refused."""
    cells = [score.cell for score in scores]
    refused = [line for cell in cells for line in cell["refused"]]
    trials, programs = (sum(cell["trials"] for cell in cells),
                        sum(len(cell["programs"]) for cell in cells))  # fmt: skip
    text = f"refused {len(refused)} in {trials} trials of {programs} programs"
    return Summary(text, [f"refused: {line}" for line in refused])


def generated(scores: Scores) -> Summary:
    """Count what became of random functions; name faults and common refusals."""
    layers, refused = Counter[str](), Counter[str]()
    for score in scores:
        layers.update(score.cell["layers"])
        refused.update(score.cell["refused"])
    faults = [f"{f['number']}, {f['layer']}: {f['said']}" for s in scores for f in s.cell["faults"]]
    counts = ", ".join(f"{layers[key]} {key}" for key in ("right", "wrong", "disputed", "refused"))
    text = f"of {layers.total()}: {counts}, {layers['not admitted']} not admitted"
    common = [f"refused {count} times: {why}" for why, count in refused.most_common(3)]
    return Summary(text, faults, common)


def diagnosis(scores: Scores) -> tuple[str, Rows]:
    """Count how often the named fault is that which was made.

    Another right name counts as the best one. A name counts where the sentence holds what the set
    asks of it.
    """
    cells = [score.cell for score in scores if "fault" in score.cell]
    pairs = [
        (c["expected"][0], c["expected"][0] if c["fault"] in c["expected"] else c["fault"])
        for c in cells
    ]
    right = sum(
        made == said and "vague" not in c for (made, said), c in zip(pairs, cells, strict=True)
    )
    rows: list[tuple[object, ...]] = [("fault", "mutants", "recall", "precision")]
    for fault in sorted({fault for pair in pairs for fault in pair}):
        hits = pairs.count((fault, fault))
        made, called = (sum(pair[i] == fault for pair in pairs) for i in (0, 1))
        rows.append((fault.replace("_", " "), made, f"{hits / made:.2f}" if made else "",
                     f"{hits / called:.2f}" if called else ""))  # fmt: skip
    return f"{right} of {len(pairs)}, {right / max(len(pairs), 1):.1%}", rows


def _together(names: Iterable[tuple[str, Rows]]) -> Rows:
    """Put the faults of several scores side by side."""
    found = {score: {row[0]: row[1:] for row in rows[1:]} for score, rows in names}
    head = ["fault", *(f"{score}: {what}" for score in found
                       for what in ("how many", "recall", "precision"))]  # fmt: skip
    faults = sorted({str(fault) for rows in found.values() for fault in rows})
    cells = ((fault, *(x for rows in found.values() for x in rows.get(fault, ("", "", ""))))
             for fault in faults)  # fmt: skip
    return [head, *cells]


def _exploits(rows: Iterable[JsonObject]) -> str:
    """Count the known exploits, and what stops them."""
    total = Counter(row["status"] for row in rows)
    by = Counter(row.get("layer") or "nothing has to" for row in rows if row["status"] == "stopped")
    kinds = ", ".join(f"{count} {status}" for status, count in total.most_common())
    layers = ", ".join(f"{layer} {count}" for layer, count in by.most_common())
    known = f"Of {total.total()} known ways to fool a kernel judge"
    return (f"{known} (`tests/exploits/catalogue.toml`) there are {kinds}. "
            f"What is stopped is stopped by: {layers}.")  # fmt: skip


SUMMARIES: Mapping[str, Callable[[Scores], Summary]] = {
    "mutants": mutants,
    "held-out": mutants,
    "authors": mutants,
    "by-hand-found": mutants,
    "by-hand-blind": mutants,
    "corpus": corpus,
    "generated": generated,
    "plans": generated,
}
"""What sums up a score, by its name."""
