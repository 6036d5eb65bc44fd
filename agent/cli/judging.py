"""`coda-agent score-judge`: mutants, right programs, diagnoses, latency and timing, kept."""

import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent.cli.report import REFUSED, Reply, reported
from coda_agent.agent.cli.targets import ContendedOption, DeviceOption, Json, require_gpu
from coda_agent.agent.workspace import find
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.evals.judge.corpus import Subject
    from coda_agent.evals.judge.scores import Judge

app = typer.Typer(help="Score the judge: what it kills, passes, says, and how long it takes.")

Count = Annotated[int | None, typer.Option(min=1, help="So many mutants, every fault in turn.")]
Some = Annotated[int | None, typer.Option(min=1, help="So many of them, evenly from the list.")]
Repeat = Annotated[int, typer.Option(min=1, help="How often each is judged.")]
Seed = Annotated[int, typer.Option(help="Chooses the mutants and what they are judged on.")]


@app.command()
@reported
def mutants(
    device: DeviceOption = "auto", count: Count = None, seed: Seed = 1, as_json: Json = False
) -> Reply:
    """Judge programs and lowerings with one fault each; resumes."""
    with _judge(device, as_json) as judge:
        record = _mutants(judge, "mutants", count, seed)
        return _reply(judge, record, {"mutants": record}, _survived(record))


@app.command()
@reported
def diagnosis(
    device: DeviceOption = "auto", count: Count = None, seed: Seed = 1, as_json: Json = False
) -> Reply:
    """How often the fault that the judge names is the one that was made, in the accepted kernels
    and in the demonstrations, which it was not tuned on; judges what is missing."""
    with _judge(device, as_json) as judge:
        record, held_out = (_mutants(judge, n, count, seed) for n in ("mutants", "held-out"))
        shown = {"diagnosis": record, "held-out": held_out}
        return _reply(judge, {**record, "held_out": held_out}, shown, False)


@app.command()
@reported
def by_hand(device: DeviceOption = "auto", seed: Seed = 1, as_json: Json = False) -> Reply:
    """Judge wrong programs that people wrote, in two sets; resumes."""
    from coda_agent.evals.judge.by_hand import SETS, written
    from coda_agent.evals.judge.scores import score_mutants

    with _judge(device, as_json) as judge:
        accepted = {kernel.name: kernel.folder / "kernel.py" for kernel in find().kernels()}
        first = {r.spec.name: r for r in _kernels() if r.is_default}
        kernels = {x: (first[x], file.read_text("utf-8")) for x, file in accepted.items()}
        records = {
            name: score_mutants(judge, f"by-hand-{name}", written(name, kernels), seed=seed)
            for name in SETS
        }
        shown = {f"by-hand-{name}": record for name, record in records.items()}
        return _reply(judge, records, shown, any(map(_survived, records.values())))


def _survived(record: dict[str, Any]) -> bool:
    return any(c["layer"] == "survived" for c in record["cells"].values())


def _mutants(judge: "Judge", name: str, count: int | None, seed: int) -> dict[str, Any]:
    from coda_agent.demos import demos
    from coda_agent.evals.judge.corpus import demonstrations
    from coda_agent.evals.judge.mutants import suite
    from coda_agent.evals.judge.scores import score_mutants

    if name == "mutants":
        right = [r for r in _kernels() if r.is_default]
    else:
        right, _ = demonstrations(demos())
    return score_mutants(judge, name, suite(right, seed=seed, count=count), seed=seed)


@app.command()
@reported
def corpus(
    device: DeviceOption = "auto", count: Some = None, repeat: Repeat = 5, as_json: Json = False
) -> Reply:
    """Judge right programs, each several times with fresh seeds; resumes."""
    from coda_agent.demos import demos
    from coda_agent.evals.judge.corpus import demonstrations, rewrites
    from coda_agent.evals.judge.scores import score_corpus

    with _judge(device, as_json) as judge:
        right = []
        for entry in _kernels():
            right += [entry, *(rewrites(entry) if entry.is_default else [])]
        shown, left_out = demonstrations(demos())
        record = score_corpus(judge, _evenly([*right, *shown], count), left_out, repeat=repeat)
        refused = any(c["refused"] for c in record["cells"].values())
        return _reply(judge, record, {"corpus": record}, refused)


@app.command()
@reported
def latency(
    device: DeviceOption = "auto", count: Some = None, repeat: Repeat = 5, as_json: Json = False
) -> Reply:
    """Time whole verdicts from warm workers over the kernels of the paper."""
    from coda_agent.evals import definitions
    from coda_agent.evals.judge.scores import score_latency
    from coda_agent.specs import load_spec

    # The one with most programs first: it warms up as many workers as any needs.
    names = _evenly(list(definitions.load("paper").specs), count)
    names.sort(key=lambda name: -len(load_spec(find().kernel(name).spec).bindings()))
    with tempfile.TemporaryDirectory() as cache, _judge(device, as_json) as judge:
        os.environ["QUACK_CACHE_DIR"] = cache  # an empty one: nothing compiled before counts
        timed = functools.partial(_verdict_s, judge.device)
        record = score_latency(judge, timed, names, repeat=repeat)
        return _reply(judge, record, {"latency": record}, False)


@app.command()
@reported
def timing(
    trials: Annotated[int, typer.Option(min=1, help="Comparisons of a contender.")] = 200,
    contended: ContendedOption = False,
    as_json: Json = False,
) -> Reply:
    """Compare a kernel with itself on this GPU: how often are the two called different?"""
    from coda_agent.agent.execution.environment import environment
    from coda_agent.agent.judge import timing as clock
    from coda_agent.evals.judge.against_itself import KERNEL, score_timing
    from coda_agent.generated.kernel import load_kernel
    from coda_agent.primitives.target import use_cache

    with _judge("cuda", as_json) as judge:
        kernel = load_kernel(find().kernel(KERNEL).folder)
        use_cache()
        path = score_timing(
            judge.root, kernel, clock=clock, machine=environment("cuda"), trials=trials,
            say=judge.say,
        )  # fmt: skip
    record = json.loads(path.read_text("utf-8"))
    different, compared = record["different"], record["compared"]
    text = f"{different} of {compared} comparisons with itself were called different\nwrote {path}"
    return Reply({"record": path, **record}, text, REFUSED if 100 * different > compared else 0)


def _verdict_s(device: str, name: str) -> dict[str, float]:
    """Seconds of the judge on an accepted kernel ("whole"), and of its gates, in its first element
    type: without a GPU what `check` does, with one all gates, over three tiles, among which the
    fastest need not be."""
    from coda_agent.agent.execution import executor
    from coda_agent.agent.execution.pool import warm_pool
    from coda_agent.agent.judge import GATES, judge_candidate
    from coda_agent.primitives.target import cache_directory
    from coda_agent.primitives.tiles import SM90_CONFIGS
    from coda_agent.specs import load_spec

    folder = find().kernel(name).folder
    spec, text = load_spec(folder / "spec.md"), (folder / "kernel.py").read_text("utf-8")
    element = next(iter(spec.types.values()), ("bfloat16",))[0]
    warm_pool()
    for file in cache_directory().rglob("*"):
        if file.is_file():
            file.unlink()
    gates = GATES if device == "cuda" else GATES[:-1]
    start = time.perf_counter()
    verdict = judge_candidate(
        spec, text, executor(), device=device, gates=gates, types=[element], tiles=SM90_CONFIGS[::6]
    )
    took = round(time.perf_counter() - start, 3)
    if any(not gate.passed for gate in verdict.gates if gate.name != "performance"):
        raise CodaError(f"{name} is refused", hint=f"coda-agent check {name}")
    return {"whole": took, **{gate.name: gate.seconds for gate in verdict.gates}}


@contextmanager
def _judge(device: str, silent: bool) -> "Iterator[Judge]":
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from coda_agent.evals.judge.scores import Judge

    require_gpu(device)
    cuda = device != "cpu" and torch.cuda.is_available()
    with Progress(console=Console(stderr=True), disable=silent, transient=True) as bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield Judge(find().root, "cuda" if cuda else "cpu", say)


def _kernels() -> "list[Subject]":
    from coda_agent.evals.judge.corpus import kernels
    from coda_agent.generated.kernel import load_kernel

    return kernels(load_kernel(kernel.folder) for kernel in find().kernels())


def _evenly(things: list[Any], count: int | None) -> list[Any]:
    """So many of them, at equal distances; all by default."""
    count = min(count or len(things), len(things))
    return [things[i * len(things) // count] for i in range(count)]


def _reply(judge: "Judge", data: Any, shown: dict[str, Any], failed: bool) -> Reply:
    """The page written, and the sections of these records shown."""
    from coda_agent.evals.judge.report import text, write_page

    page = write_page(judge.root)
    texts = [text(section, judge.device, record) for section, record in shown.items()]
    said = "\n\n".join([*texts, f"wrote {page}"])
    return Reply({**data, "page": page}, said, REFUSED if failed else 0)
