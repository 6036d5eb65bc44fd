"""What cases of coda_agent.layers (`layer_cases`, `train_step`), of `fuse` (`fuse_cases`) and of
kernels' gradients (`gradient_cases`) take beside others: records and pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coda_agent.agent.judge.timing import PROTOCOL
from coda_agent.evals import (
    dependence,
    fuse_cases,
    gradient_cases,
    pages,
)
from coda_agent.evals.contest import Clock
from coda_agent.evals.dependence import digest
from coda_agent.evals.fp8_cases import Fp8Widths
from coda_agent.evals.fuse_cases import Function
from coda_agent.evals.gradient_cases import Differentiated
from coda_agent.evals.layer_cases import Widths
from coda_agent.evals.sharded_step import ALONE, Sharded
from coda_agent.evals.train_step import COURSE, Fp8Training, Training
from coda_agent.primitives.errors import CodaError, MachineError

ROUNDS = 15
CONTENDERS = {
    "ours": "ours", "packed": "ours, packed before", "gemm": "the bare products",
    "eager": "PyTorch", "compile": "torch.compile",
    "compile_unit": "torch.compile, FP8 scales behind the products",
    "liger": "Liger", "liger_compile": "Liger under torch.compile",
    "bf16": "ours in bf16",
}  # fmt: skip
CASES: dict[str, Widths | Fp8Widths | Training] = {
    "block 2048": Widths(2048, 5632, 512),
    "block 4096": Widths(4096, 11008, 1024),
    "block 8192": Widths(8192, 28672, 1024),
    "block Llama-3-8B": Widths(4096, 14336, 1024),
    "block Qwen2.5-7B": Widths(3584, 18944, 512, bias=True),
    "block 2048 fp8": Fp8Widths(2048, 5632, 512),
    "block 4096 fp8": Fp8Widths(4096, 11008, 1024),
    "block 8192 fp8": Fp8Widths(8192, 28672, 1024),
    "block Llama-3-8B fp8": Fp8Widths(4096, 14336, 1024),
    "head 4096": Widths(4096, words=32000),
    "head Llama-3-8B": Widths(4096, words=128256),
    "train-1b": Training(2048, 8192, 16, 32, 8, 128256, 500000.0, batch=8, length=4096),
    "train-1b fp8": Fp8Training(2048, 8192, 16, 32, 8, 128256, 500000.0, batch=8, length=4096),
    "train-1b on 2 GPUs": Sharded(2048, 8192, 16, 32, 8, 128256, 500000.0, batch=8, length=4096),
}
What = Widths | Fp8Widths | Training | Function | Differentiated
SUITES: dict[str, Mapping[str, What]] = {
    "layers": CASES,
    "fuse": fuse_cases.CASES,
    "gradients": gradient_cases.CASES,
}


def measure(
    root: Path,
    suite: str = "layers",
    *,
    clock: Clock,
    machine: Mapping[str, Any],
    cases: Sequence[str] = (),
    names: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float | None = None,
    device: str = "cuda",
    shrink: int = 1,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure what the record, evals/results/<suite>-<gpu>.json, does not hold yet; its path.

    Args:
        suite: One of `SUITES`.
        clock: What times.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        cases: Some of the suite's; none means all that this machine can have.
        names: Some of `CONTENDERS`; none means all. Ours and the products always take part.
        rounds: Timed rounds a cell.
        seconds: Begin no further case after so long.
        device: "cpu" interprets and compiles nothing, for tests.
        shrink: Divides all sizes, for tests.
        say: Takes a line a case.

    Raises:
        CodaError: an unknown case or contender.
        MachineError: too few GPUs for a case that is named.
    """
    began, known_cases = time.monotonic(), SUITES[suite]
    for what, given, known in (("case", cases, known_cases), ("contender", names, CONTENDERS)):
        if unknown := [name for name in given if name not in known]:
            raise CodaError(f"no {what} {unknown[0]!r}, expected {', '.join(known)}")
    path = pages.gpu_record(root, suite, machine, device)
    record = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    cells, chains = record.get("cells", {}), record.get("sources", {})
    kinds = {type(known_cases[case]) for case in cases or known_cases}
    depends = {kind: dependence.of(suite, kind) for kind in kinds}
    for done, case in enumerate(cases or known_cases):
        what, kind = known_cases[case], type(known_cases[case])
        wanted = {"ours", "gemm", *(names or CONTENDERS)} & {*what.CONTENDERS}
        sizes = asdict(what.shrunk(shrink) if shrink > 1 else what)
        about, on = _about(machine, sizes, clock.PROTOCOL), depends[kind]
        whole, held, chain = what.PHASES[-1], cells.get(case, {}), chains.get(kind.__name__, [])
        known = dependence.fresh(held, about, on, chain)
        if known and {*held[whole]["times"], *held["absent"]} >= wanted:
            say(f"{case}: in the record")
            continue
        if done and seconds is not None and time.monotonic() - began > seconds:
            say(f"{case} and what follows: left, after {seconds:g} s")
            break
        started = time.monotonic()
        try:
            it = what.on(device, shrink)
        except MachineError as why:
            if cases:
                raise
            say(f"{case}: left, since {why}")
            continue
        found = it.measured(wanted, clock, rounds or ROUNDS)
        took = round(time.monotonic() - started, 1)
        cells[case] = {
            "digest": digest([*about, on.kernels]), "sources": digest(on.sources),
            "sizes": sizes, "tokens": it.tokens, "machine": machine, **found, "seconds": took,
        }  # fmt: skip
        chains[kind.__name__] = dependence.measured(chain, on)
        del it
        head = {"suite": suite, "date": pages.today(), "sources": chains}
        pages.write_record(path, head, cells)
        over = {n: r["ratio"] for n, r in found[whole]["over"].items() if n != "ours"}
        fell = dict.fromkeys(found["fallbacks"], " (fell back)")
        said = ", ".join(f"{n} {ratio:.3f}{fell.get(n, '')}" for n, ratio in over.items())
        say(f"{case}: {whole} over {said} ({took} s)")
    return path


def _about(machine: Mapping[str, Any], sizes: Mapping[str, Any], protocol: int) -> list[Any]:
    return [machine["gpu"], machine["packages"], sizes, protocol]


def declare_same(root: Path, suite: str, why: str) -> None:
    """Declare that sources of a suite's cases, which were changed since its latest record, time the
    same.

    Raises:
        CodaError: no record, no reason, or no change.
    """
    record, file = _record(root, suite)
    kinds = {type(what) for what in SUITES[suite].values()}
    head = {key: value for key, value in record.items() if key != "cells"}
    head["sources"] = dependence.declare_same(record.get("sources", {}), suite, kinds, why)
    pages.write_record(file, head, record["cells"])


def _record(root: Path, suite: str) -> tuple[dict[str, Any], Path]:
    if not (found := pages.latest(root, suite)):
        hint = f"`coda-agent bench --suite {suite}`"
        raise CodaError(f"there is no record of {suite}", hint=hint)
    return found


def write_page(root: Path, suite: str = "layers") -> list[Path]:
    """Write docs/<suite>.md of a workspace from the latest record; the record and the page.

    Raises:
        CodaError: no record.
    """
    (record, file), cases = _record(root, suite), SUITES[suite]
    cells = {name: cell for name in cases if (cell := record["cells"].get(name))}
    kinds, chains = {type(cases[name]) for name in cells}, record.get("sources", {})
    depends = {kind: dependence.of(suite, kind) for kind in kinds}
    older = list[str]()
    for name, cell in cells.items():
        about, kind = _about(cell["machine"], cell.get("sizes", {}), PROTOCOL), type(cases[name])
        chain = chains.get(kind.__name__, [])
        older += [name] * (not dependence.fresh(cell, about, depends[kind], chain))
    taking = {n for case in cases.values() for n in case.CONTENDERS}
    others = [n for n in CONTENDERS if n != "ours" and n in taking]
    rows = [("", "", "ours, µs", *(f"over {CONTENDERS[n]}" for n in others))]
    for case, cell in cells.items():
        for phase in cases[case].PHASES:
            over = cell[phase]["over"]
            fell = dict.fromkeys(cell.get("fallbacks", ()), ", fell back")
            shown = [pages.filled(pages.interval("it"), {"it": over[n]}) + fell.get(n, "")
                     if n in over else "" for n in others]  # fmt: skip
            rows.append((case, phase, f"{cell[phase]['times']['ours']['median_us']:.0f}", *shown))
    held = ["ours", *(n for n in others if n != "gemm")]
    memory = [("", *(CONTENDERS[n] for n in held), "error")]
    for case, cell in cells.items():
        peaks = (str(cell["peak_mib"].get(n, "")) for n in held)
        memory.append((case, *peaks, str(cell.get("errors", {}).get("ours", ""))))
    far = [n for n in CONTENDERS if n in Fp8Widths.CONTENDERS and n != "gemm"]
    apart = [("", *(CONTENDERS[n] for n in far))]
    for case, cell in ((case, cell) for case, cell in cells.items() if "distances" in cell):
        apart.append((case, *(str(cell["distances"].get(n, "")) for n in far)))
    stepped = {*Training.CONTENDERS, *Fp8Training.CONTENDERS}
    named = {n: label for n, label in CONTENDERS.items() if n in stepped}
    steps = [("", *(f"{label}, tokens/s" for label in named.values()))]
    losses = [("", *named.values())]
    for case, cell in ((case, cell) for case, cell in cells.items() if "step" in cell):
        times = {n: time["median_us"] for n, time in cell["step"]["times"].items()}
        speeds = {n: f"{cell['tokens'] / us * 1e6:.0f}" for n, us in times.items()}
        for row, shown in ((steps, speeds), (losses, cell["losses"])):
            row.append((case, *(str(shown.get(n, "")) for n in named)))
    shown = (1, *range(5, COURSE + 1, 5))
    course: pages.Rows = [("", "", *(f"step {i}" for i in shown))]
    trained = CONTENDERS | ALONE
    for case, cell in cells.items():
        for name, losses_of in cell.get("course", {}).items():
            course.append((case, trained[name], *(f"{losses_of[i - 1]:.3f}" for i in shown)))
    page = pages.write(
        root / "docs" / f"{suite}.md", f"{suite}.md", record=file.relative_to(root).as_posix(),
        date=record["date"], rows=rows, memory=memory, apart=apart, steps=steps, ways={
            way: [case for case, cell in cells.items() if cell.get("way") == way]
            for way in ("torch.compile", "PyTorch")
        }, losses=losses, course=course, sharded=[
            case for case in cells if isinstance(cases.get(case), Sharded)
        ], linears={
            case: cell["linears"] for case, cell in cells.items() if "linears" in cell
        },
        left=[case for case in cases if case not in cells], older=older,
        same=dict.fromkeys(link["why"] for chain in chains.values() for link in chain[1:]),
        **{key: [f"{case}: {CONTENDERS[n]}: {why}" for case, cell in cells.items()
                 for n, why in cell.get(key, {}).items()] for key in ("absent", "fallbacks")},
        **(fuse_cases.summary(cells) if suite in ("fuse", "gradients") else {}),
        machines=dict.fromkeys(pages.machine(cell["machine"]) for cell in cells.values()),
    )  # fmt: skip
    return [file, page]
