"""`coda-agent score-judge`: mutants, right programs, diagnoses, latency and timing, kept."""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from coda_agent.agent import execution
from coda_agent.agent.cli.options import DeviceOption
from coda_agent.agent.cli.report import quiet, reported
from coda_agent.agent.execution.environment import environment
from coda_agent.agent.judge import timing as clock
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.evals import definitions
from coda_agent.evals.judge import generated as references
from coda_agent.evals.judge import plans as planning
from coda_agent.evals.judge import report, scores, selection
from coda_agent.evals.judge.by_hand import SETS
from coda_agent.evals.judge.scores import Judge, score_mutants
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.objects import use_cache
from coda_agent.specs import load_spec

Count = Annotated[int | None, typer.Option(min=1, help="So many mutants, every fault in turn.")]
Some = Annotated[int | None, typer.Option(min=1, help="So many of them, evenly from the list.")]
Repeat = Annotated[int, typer.Option(min=1, help="How often each is judged.")]
Seed = Annotated[int, typer.Option(help="Chooses the mutants and what they are judged on.")]


@reported()
def mutants(device: DeviceOption = "auto", count: Count = None, seed: Seed = 1) -> Reply:
    """Judge programs and lowerings with one fault each; resumes."""
    with _judge(device) as judge:
        record = _mutants(judge, "mutants", count, seed)
        return _reply(judge, record, {"mutants": record}, _survived(record))


@reported()
def diagnosis(device: DeviceOption = "auto", count: Count = None, seed: Seed = 1) -> Reply:
    """How often the fault that the judge names is the one that was made, in mistakes
    that authors make, in the accepted kernels, and in the demonstrations, which it was not tuned
    on; judges what is missing."""
    with _judge(device) as judge:
        wrong = selection.evenly(selection.authors(find()), count)
        authors = score_mutants(judge, "authors", wrong, seed=seed)
        record, held_out = (_mutants(judge, n, count, seed) for n in ("mutants", "held-out"))
        shown = {"authors": authors, "diagnosis": record, "held-out": held_out}
        return _reply(judge, {**record, "held_out": held_out, "authors": authors}, shown, False)


@reported()
def by_hand(device: DeviceOption = "auto", seed: Seed = 1) -> Reply:
    """Judge wrong programs that people wrote, in two sets; resumes."""
    with _judge(device) as judge:
        chosen = {name: selection.by_hand(find(), name) for name in SETS}
        records = {
            name: score_mutants(judge, f"by-hand-{name}", wrong, seed=seed)
            for name, wrong in chosen.items()
        }
        shown = {f"by-hand-{name}": record for name, record in records.items()}
        return _reply(judge, records, shown, any(map(_survived, records.values())))


@reported()
def corpus(device: DeviceOption = "auto", count: Some = None, repeat: Repeat = 5) -> Reply:
    """Judge right programs, each several times with fresh seeds; resumes."""
    with _judge(device) as judge:
        record = scores.score_corpus(judge, *selection.right(find(), count), repeat=repeat)
        refused = any(c["refused"] for c in record["cells"].values())
        return _reply(judge, record, {"corpus": record}, refused)


@reported()
def generated(
    count: Annotated[int, typer.Option(min=1, help="So many functions.")] = 5000,
    seed: Seed = 1,
) -> Reply:  # fmt: skip
    """Compose PyTorch functions written at random, and judge what comes of it, on all cores;
    resumes."""
    return _written(references.tried, "generated", count, seed)


@reported()
def plans(
    count: Annotated[int, typer.Option(min=1, help="So many functions.")] = 2000,
    seed: Seed = 1,
) -> Reply:  # fmt: skip
    """Plan functions of two and three products written at random, and compare the plans with the
    functions in float64, on all cores; resumes."""
    return _written(planning.tried, "plans", count, seed)


@reported()
def latency(device: DeviceOption = "auto", count: Some = None, repeat: Repeat = 5) -> Reply:
    """Time whole verdicts from warm workers over the kernels of the paper."""
    workspace = find()
    # The one with most programs first: it warms up as many workers as any needs.
    names = selection.evenly(list(definitions.load("paper").specs), count)
    names.sort(key=lambda name: -len(load_spec(workspace.kernel(name).spec).bindings()))
    with tempfile.TemporaryDirectory() as cache, _judge(device) as judge:
        os.environ["QUACK_CACHE_DIR"] = cache  # an empty one: nothing compiled before counts
        timed = functools.partial(selection.verdict_s, workspace, judge.device)
        record = scores.score_latency(judge, timed, names, repeat=repeat)
        return _reply(judge, record, {"latency": record}, False)


@reported("contended")
def timing(
    trials: Annotated[int, typer.Option(min=1, help="Comparisons of a contender.")] = 200,
) -> Reply:
    """Compare a kernel with itself on this GPU: how often are the two called different?"""
    with _judge("cuda") as judge:
        kernel = load_kernel(find().kernel(scores.KERNEL).folder)
        use_cache()
        path = scores.score_timing(
            judge.root, kernel, clock=clock, machine=environment("cuda"), trials=trials,
            say=judge.say,
        )  # fmt: skip
    record = json.loads(path.read_text("utf-8"))
    different, compared = record["different"], record["compared"]
    text = f"{different} of {compared} comparisons with itself were called different\nwrote {path}"
    return Reply({"record": path, **record}, text, REFUSED if 100 * different > compared else 0)


@contextmanager
def _judge(device: str) -> Iterator[Judge]:
    gpu = execution.usable_gpu(device)
    with Progress(console=Console(stderr=True), disable=quiet(), transient=True) as bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield Judge(find().root, "cuda" if gpu else "cpu", say)


def _written(one: Callable[[int, int], dict[str, Any]], name: str, count: int, seed: int) -> Reply:
    """The reply to a score of functions written at random."""
    with _judge("cpu") as judge:
        record = references.score_batches(judge, name, one, count, seed=seed)
        faulty = any(c["faults"] for c in record["cells"].values())
        return _reply(judge, record, {name: record}, faulty)


def _mutants(judge: Judge, name: str, count: int | None, seed: int) -> dict[str, Any]:
    chosen = selection.mutants(find(), name, count=count, seed=seed)
    return score_mutants(judge, name, chosen, seed=seed)


def _survived(record: Mapping[str, Any]) -> bool:
    return any(c["layer"] == "survived" for c in record["cells"].values())


def _reply(judge: Judge, data: Any, shown: Mapping[str, Any], failed: bool) -> Reply:
    """The page written, and the sections of these records shown."""
    page = report.write_page(judge.root)
    texts = [report.text(section, judge.device, record) for section, record in shown.items()]
    said = "\n\n".join([*texts, f"wrote {page}"])
    return Reply({**data, "page": page}, said, REFUSED if failed else 0)
