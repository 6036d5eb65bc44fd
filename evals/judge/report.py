"""docs/judge.md: the judge's records as a page, section by section.

The words are in `templates/judge.md.j2`; here are the figures that they are filled with.
"""

import json
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coda_agent.evals.pages import machine, render
from coda_agent.evals.staleness import of_scores

Record = Mapping[str, Any]

_EXPLAINED = Path(__file__).with_name("explained.toml")
"""Survivors to the reason why the judge may let them live."""


def write_page(root: Path) -> Path:
    """Write docs/judge.md from the records that are there."""
    parts = [
        "# How strong the judge is\n\nWritten by `coda-agent score-judge` from "
        "`evals/results/judge-*.json`; do not edit."
    ]
    for name, sections in _SECTIONS.items():
        for path in sorted((root / "evals" / "results").glob(f"judge-{name}-*.json")):
            record = json.loads(path.read_text("utf-8"))
            device = path.stem.removeprefix(f"judge-{name}-")
            parts += [text(section, device, record) for section in sections]
    catalogue = root / "tests" / "exploits" / "catalogue.toml"
    if catalogue.is_file():
        parts.append(text("exploits", "", tomllib.loads(catalogue.read_text("utf-8"))))
    page = root / "docs" / "judge.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def text(section: str, device: str, record: Record) -> str:
    """One section of the page, of `FIGURES`, about a record."""
    when = f"{record['date']}, {machine(record['machine'])}" if "date" in record else ""
    if "versions" in record and (stale := of_scores(record)):
        when += f", stale: {', '.join(stale)}"
    figures = FIGURES[section](record)
    values = {"section": section, "device": device, "record": record, "when": when}
    return render("judge.md", **values, **figures).strip()


def _fates(record: Record) -> dict[str, Any]:
    """What became of mutants: how many the judge killed, and the names of those that lived."""
    total = Counter(c["layer"] for c in record["cells"].values())
    killed = total["signature"] + total["numerics"]
    judged = killed + total["survived"]
    why = tomllib.loads(_EXPLAINED.read_text("utf-8"))
    survivors = [
        f"{name}: {why.get(name, 'not explained')}"
        for name, c in record["cells"].items()
        if c["layer"] == "survived"
    ]
    counts = {"killed": killed, "judged": judged, "equivalent": total["equivalent"]}
    return {"fates": {**counts, "share": f"{killed / max(judged, 1):.1%}", "survivors": survivors}}


def _mutants(record: Record) -> dict[str, Any]:
    cells = record["cells"].values()
    layers = ("signature", "numerics", "survived", "equivalent")
    rows = [["fault", "made in", *layers]]
    for operator, lowered in dict.fromkeys((c["operator"], c["lowered"]) for c in cells):
        found = Counter(c["layer"] for c in cells if c["operator"] == operator)
        made = ("program", "lowering")[lowered]
        rows.append([operator, made, *(str(found[x] or "") for x in layers)])
    total = Counter(c["layer"] for c in cells)
    rows.append(["**all**", "", *(f"**{total[x]}**" for x in layers)])
    return {**_fates(record), "faults": rows}


def _diagnosis(record: Record) -> dict[str, Any]:
    """How often the fault that was named is the one that was made. Another right name counts as the
    best one."""
    cells = [c for c in record["cells"].values() if "fault" in c]
    pairs = [
        (c["expected"][0], c["expected"][0] if c["fault"] in c["expected"] else c["fault"])
        for c in cells
    ]
    # A name counts where the sentence holds what the set asks of it.
    right = sum(
        made == said and "vague" not in c for (made, said), c in zip(pairs, cells, strict=True)
    )
    unnamed = sum(
        made != said and said in ("wrong_function", "wrong_statistics") for made, said in pairs
    )
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
    named = f"{right} of {len(pairs)}, {right / max(len(pairs), 1):.1%}"
    wrong = f"{len(pairs) - right - unnamed} of {len(pairs)}"
    return {"named": named, "misnamed": wrong, "names": rows}


def _held_out(record: Record) -> dict[str, Any]:
    programs = len({name.partition(":")[0] for name in record["cells"]})
    return {**_fates(record), **_diagnosis(record), "programs": programs}


def _corpus(record: Record) -> dict[str, Any]:
    cells = record["cells"]
    programs = {name.rpartition(" #")[0] for name in cells}
    return {
        "programs": len(programs),
        "shown": sum(p.startswith("demonstration") for p in programs),
        "rewrites": sum(": " in p for p in programs),
        "refused": [f"{name}: {c['refused'][0]}" for name, c in cells.items() if c["refused"]],
    }


def _generated(record: Record) -> dict[str, Any]:
    cells = record["cells"].values()
    layers, refused = Counter[str](), Counter[str]()
    for cell in cells:
        layers.update(cell["layers"])
        refused.update(cell["refused"])
    rows = [["refusal", "times"], *([said, str(n)] for said, n in refused.most_common(20))]
    faults = [fault for cell in cells for fault in cell["faults"]]
    return {"layers": layers, "refusals": rows, "faults": faults}


def _latency(record: Record) -> dict[str, Any]:
    cells = {name: cell["seconds"] for name, cell in record["cells"].items()}
    gates = [gate for gate in next(iter(cells.values()))[0] if gate != "whole"]
    rows = [["kernel", "median, s", "least", "most", *gates]]
    for name, verdicts in cells.items():
        whole = [v["whole"] for v in verdicts]
        shown = [f(whole) for f in (statistics.median, min, max)]
        shown += [statistics.median(v[gate] for v in verdicts) for gate in gates]
        rows.append([name, *(f"{seconds:.2f}" for seconds in shown)])
    every = [v["whole"] for verdicts in cells.values() for v in verdicts]
    figures = {"median": statistics.median(every), "least": min(every), "most": max(every)}
    return {**figures, "kernels": rows}


def _exploits(catalogue: Record) -> dict[str, Any]:
    keys = ["row", "name", "status", "layer", "reason"]
    rows = [[str(e.get(key, "")) for key in keys] for e in catalogue["row"]]
    return {"exploits": [["row", "exploit", *keys[2:]], *rows]}


FIGURES = {
    "mutants": _mutants,
    "diagnosis": _diagnosis,
    "held-out": _held_out,
    "authors": _held_out,
    "by-hand-found": _fates,
    "by-hand-blind": _fates,
    "corpus": _corpus,
    "generated": _generated,
    "plans": _generated,
    "latency": _latency,
    "timing": lambda record: {},
    "exploits": _exploits,
}
"""Of each section, its figures."""
# Which sections a record has, by its name, in the order of the page.
_SECTIONS = {
    "mutants": ("mutants", "diagnosis"),
    **{name: (name,) for name in FIGURES if name not in ("mutants", "diagnosis", "exploits")},
}
