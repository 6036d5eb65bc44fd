"""`coda-agent score-judge`: mutants, right programs, diagnoses and the clock's noise, kept."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from coda_agent.agent import execution
from coda_agent.agent.cli.options import DeviceOption
from coda_agent.agent.cli.report import quiet, reported
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.evals.judge import generated as references
from coda_agent.evals.judge import plans as planning
from coda_agent.evals.judge import report, scores, selection
from coda_agent.evals.judge.by_hand import SETS
from coda_agent.evals.judge.scores import Judge, Score, score_mutants

Count = Annotated[int | None, typer.Option(min=1, help="So many mutants, every fault in turn.")]
Some = Annotated[int | None, typer.Option(min=1, help="So many of them, evenly from the list.")]
Repeat = Annotated[int, typer.Option(min=1, help="How often each is judged.")]
Seed = Annotated[int, typer.Option(help="Chooses the mutants and what they are judged on.")]
Found = dict[str, Score]


@reported()
def mutants(device: DeviceOption = "auto", count: Count = None, seed: Seed = 1) -> Reply:
    """Judge programs and lowerings with one fault each; resumes."""
    with _judge(device) as judge:
        return _reply(judge, {"mutants": _mutants(judge, "mutants", count, seed)})


@reported()
def diagnosis(device: DeviceOption = "auto", count: Count = None, seed: Seed = 1) -> Reply:
    """How often the fault that the judge names is the one that was made, in mistakes
    that authors make, in the accepted kernels, and in the demonstrations, which it was not tuned
    on; judges what is missing."""
    with _judge(device) as judge:
        wrong = selection.evenly(selection.authors(find()), count)
        found = {"authors": score_mutants(judge, "authors", wrong, seed=seed)}
        found |= {n: _mutants(judge, n, count, seed) for n in ("mutants", "held-out")}
        named = [f"{n}: {report.diagnosis(found[n].values())[0]} named" for n in found]
        return _reply(judge, found, *named, refuse=False)


@reported()
def by_hand(device: DeviceOption = "auto", seed: Seed = 1) -> Reply:
    """Judge wrong programs that people wrote, in two sets; resumes."""
    with _judge(device) as judge:
        chosen = {f"by-hand-{name}": selection.by_hand(find(), name) for name in SETS}
        found = {name: score_mutants(judge, name, x, seed=seed) for name, x in chosen.items()}
        return _reply(judge, found)


@reported()
def corpus(device: DeviceOption = "auto", count: Some = None, repeat: Repeat = 5) -> Reply:
    """Judge right programs, each several times with fresh seeds; resumes."""
    with _judge(device) as judge:
        right = selection.right(find(), count)
        return _reply(judge, {"corpus": scores.score_corpus(judge, right, repeat=repeat)})


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


@reported("contended")
def timing(
    trials: Annotated[int, typer.Option(min=1, help="Comparisons of a contender.")] = 200,
) -> Reply:
    """Compare a kernel with itself on this GPU: how often are the two called different?"""
    with _judge("cuda") as judge:
        return _reply(judge, {"timing": scores.score_timing(judge, trials)})


@contextmanager
def _judge(device: str) -> Iterator[Judge]:
    gpu = execution.usable_gpu(device)
    with Progress(console=Console(stderr=True), disable=quiet(), transient=True) as bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield Judge(find().root, "cuda" if gpu else "cpu", say)


def _written(one: Callable[[int, int], dict[str, Any]], name: str, count: int, seed: int) -> Reply:
    """Score functions written at random."""
    with _judge("cpu") as judge:
        return _reply(judge, {name: references.score_batches(judge, name, one, count, seed=seed)})


def _mutants(judge: Judge, name: str, count: int | None, seed: int) -> Found:
    chosen = selection.mutants(find(), name, count=count, seed=seed)
    return score_mutants(judge, name, chosen, seed=seed)


def _reply(judge: Judge, found: Mapping[str, Found], *more: str, refuse: bool = True) -> Reply:
    """Write the page, and say what came of these scores; refused where something went wrong."""
    page = report.write_page(judge.root)
    results = {name: report.SUMMARIES[name](cells.values()) for name, cells in found.items()}
    lines = [f"{name}: {summary.result}" for name, summary in results.items()]
    wrong = [fault for summary in results.values() for fault in summary.faults]
    document = {"scores": {n: [*cells.values()] for n, cells in found.items()}, "page": page}
    text = "\n".join([*lines, *more, *wrong, f"wrote {page}"])
    return Reply(document, text, REFUSED if refuse and wrong else 0)
