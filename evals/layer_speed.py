"""What cases of coda_agent.layers (`layer_cases`, `train_step`), of plans (`model_cases`,
`fuse_cases`) and of kernels' gradients (`gradient_cases`) take beside others: records and pages."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge import rules
from coda_agent.agent.judge.timing import PROTOCOL
from coda_agent.evals import (
    fp8_cases,
    fuse_cases,
    gradient_cases,
    layer_cases,
    pages,
    sharded_step,
    train_step,
)
from coda_agent.evals.contest import Clock, require_hopper
from coda_agent.evals.fp8_cases import Fp8Widths
from coda_agent.evals.fuse_cases import Function
from coda_agent.evals.gradient_cases import Differentiated
from coda_agent.evals.layer_cases import Widths
from coda_agent.evals.model_cases import Captured
from coda_agent.evals.sharded_step import ALONE, Sharded
from coda_agent.evals.train_step import COURSE, Fp8Training, Training
from coda_agent.primitives.errors import CodaError, MachineError

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

ROUNDS = 15
EARLIER = ", earlier"
"""What follows the name of a case in the record that was measured before ours packed in each call,
torch.compile might reuse memory in the backward pass, and fallbacks were looked for."""
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

TINYLLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "hidden_act": "silu",
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6,
}  # fmt: skip
What = Widths | Fp8Widths | Training | Captured | Function | Differentiated
SUITES: dict[str, Mapping[str, What]] = {
    "layers": CASES,
    "models": {
        f"{name} {tokens} tokens": Captured(about, tokens)
        for name, about in (("TinyLlama-1.1B", TINYLLAMA), ("Qwen2.5-7B", QWEN))
        for tokens in (32, 128, 512, 8192)
    },
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
        MachineError: no Hopper GPU, or too few for a case that is named.
    """
    began, known_cases = time.monotonic(), SUITES[suite]
    for what, given, known in (("case", cases, known_cases), ("contender", names, CONTENDERS)):
        if unknown := [name for name in given if name not in known]:
            raise CodaError(f"no {what} {unknown[0]!r}, expected {', '.join(known)}")
    if device == "cuda":
        require_hopper()
    path = pages.gpu_record(root, suite, machine, device)
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    kinds = {type(known_cases[case]) for case in cases or known_cases}
    sources = {kind: _sources(suite, kind) for kind in kinds}
    for done, case in enumerate(cases or known_cases):
        what = known_cases[case]
        wanted = {"ours", "gemm", *(names or CONTENDERS)} & {*what.CONTENDERS}
        sizes = asdict(what.shrunk(shrink) if shrink > 1 else what)
        depends = clock.PROTOCOL, sources[type(what)]
        digest, held = _digest(_about(machine, sizes, *depends)), cells.get(case, {})
        whole = what.PHASES[-1]
        if held.get("digest") == digest and {*held[whole]["times"], *held["absent"]} >= wanted:
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
            "digest": digest, "sizes": sizes, "tokens": it.tokens, "machine": machine, **found,
            "seconds": took,
        }  # fmt: skip
        cells.pop(f"{case}{EARLIER}", None)
        del it
        pages.write_record(path, {"suite": suite, "date": pages.today()}, cells)
        over = {n: r["ratio"] for n, r in found[whole]["over"].items() if n != "ours"}
        fell = dict.fromkeys(found["fallbacks"], " (fell back)")
        said = ", ".join(f"{n} {ratio:.3f}{fell.get(n, '')}" for n, ratio in over.items())
        say(f"{case}: {whole} over {said} ({took} s)")
    return path


def _about(
    machine: Mapping[str, Any], sizes: Mapping[str, Any], protocol: int, sources: Mapping[str, Any]
) -> list[Any]:
    return [machine["gpu"], machine["packages"], sizes, protocol, sources]


def _sources(suite: str, kind: type) -> dict[str, Any]:
    """What figures of a kind of case depend on, beside the machine."""
    if suite == "models":
        return _of_plans(folders=("plans", "capture"))
    if suite == "fuse":
        return _of_plans("fuse_cases", "fuse_functions")
    if suite == "gradients":
        return _of_gradients()
    if kind is Fp8Training:
        return _of_fp8_training()
    if kind is Sharded:
        layers, file = _of_layers(), Path(str(sharded_step.__file__))
        return {**layers, "rank": rules.meaning(file.read_text("utf-8"))}
    return _of_fp8() if kind is Fp8Widths else _of_layers()


def _of_gradients() -> dict[str, Any]:
    """Of gradients: what the sources mean that derive, compile and launch them, and the kernels."""
    from coda_agent import generated

    root = Path(__file__).parents[1]
    files = [*root.glob("primitives/gradient*.py"), root / "generated" / "gradients.py"]
    files.append(Path(str(gradient_cases.__file__)))
    meant = {file.name: rules.meaning(file.read_text("utf-8")) for file in sorted(files)}
    names = {case.kernel for case in gradient_cases.CASES.values()}
    return {"sources": meant, "kernels": _of_kernels(getattr(generated, n) for n in sorted(names))}


def _of_plans(*cases: str, folders: Sequence[str] = ("plans",)) -> dict[str, Any]:
    """Of plans: what the sources mean that make a plan out of a function or of a configuration, and
    those of the cases."""
    agent, evals = Path(rules.__file__).parents[1], Path(__file__).parent
    files = [file for x in (*folders, "authors/composer") for file in (agent / x).glob("*.py")]
    files += [evals / f"{name}.py" for name in ("layer_cases", "model_cases", *cases)]
    return {
        f"{file.parent.name}/{file.name}": rules.meaning(file.read_text("utf-8"))
        for file in sorted(files)
    }


def _of_layers() -> dict[str, Any]:
    """Of layers in 16 bits: what the sources of layers and of their cases mean, and the accepted
    kernels that they call, with their tiles."""
    from coda_agent.layers import functional

    folder = Path(str(functional.__file__)).parent
    files = [*({*folder.glob("*.py")} - {folder / "fp8.py"})]
    files += [Path(str(cases.__file__)) for cases in (layer_cases, train_step)]
    meant = {file.name: rules.meaning(file.read_text("utf-8")) for file in sorted(files)}
    return {"sources": meant, "kernels": _called(functional)}


def _of_fp8() -> dict[str, Any]:
    """The same of layers in FP8, which have all sources of the others and their own."""
    from coda_agent.layers import fp8

    files = (Path(str(module.__file__)) for module in (fp8, fp8_cases))
    meant = {file.name: rules.meaning(file.read_text("utf-8")) for file in files}
    return {"sources": _of_layers()["sources"] | meant, "kernels": _called(fp8)}


def _of_fp8_training() -> dict[str, Any]:
    """The same of training in FP8, which has kernels of both."""
    from coda_agent.layers import fp8_products

    layers, linear = _of_layers(), Path(__file__).with_name("float8_linear.py")
    return {
        "sources": layers["sources"] | {linear.name: rules.meaning(linear.read_text("utf-8"))},
        "kernels": layers["kernels"] | _called(fp8_products),
    }


def _called(module: ModuleType) -> dict[str, str]:
    """Digests of the accepted kernels that a module calls, with their tiles. What leaves some of
    their outputs out follows from them."""
    from coda_agent.generated.kernel import Kernel

    kernels = (kernel for kernel in vars(module).values() if isinstance(kernel, Kernel))
    return _of_kernels(kernel for kernel in kernels if not kernel.left_out)


def _of_kernels(kernels: Iterable[Kernel]) -> dict[str, str]:
    return {
        k.spec.name: _digest([[p.digest for p in k.programs.values()], sorted(k.refused), k.tuned])
        for k in kernels
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def write_page(root: Path, suite: str = "layers") -> list[Path]:
    """Write docs/<suite>.md of a workspace from the latest record; the record and the page.

    Raises:
        CodaError: no record.
    """
    if not (found := pages.latest(root, suite)):
        hint = f"`coda-agent bench --suite {suite}`"
        raise CodaError(f"there is no record of {suite}", hint=hint)
    (record, file), cases = found, SUITES[suite]
    names = [name for case in cases for name in (case, f"{case}{EARLIER}")]
    cells = {name: cell for name in names if (cell := record["cells"].get(name))}
    kinds = {name: type(cases[name.removesuffix(EARLIER)]) for name in cells}
    sources = {kind: _sources(suite, kind) for kind in kinds.values()}
    older = list[str]()
    for name, cell in cells.items():
        about = _about(cell["machine"], cell.get("sizes", {}), PROTOCOL, sources[kinds[name]])
        older += [name] * (cell.get("digest") != _digest(about))
    taking = {n for case in cases.values() for n in case.CONTENDERS}
    others = [n for n in CONTENDERS if n != "ours" and n in taking]
    rows = [("", "", "ours, µs", *(f"over {CONTENDERS[n]}" for n in others))]
    for case, cell in cells.items():
        for phase in cases[case.removesuffix(EARLIER)].PHASES:
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
        earlier=any(name.endswith(EARLIER) for name in cells),
        **{key: [f"{case}: {CONTENDERS[n]}: {why}" for case, cell in cells.items()
                 for n, why in cell.get(key, {}).items()] for key in ("absent", "fallbacks")},
        **(fuse_cases.summary(cells) if suite in ("fuse", "gradients") else {}),
        machines=dict.fromkeys(pages.machine(cell["machine"]) for cell in cells.values()),
    )  # fmt: skip
    return [file, page]
