"""`coda-agent score-judge`: mutants, right programs, diagnoses, latency and timing, kept."""

import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent.cli.report import REFUSED, Reply, reported
from coda_agent.agent.cli.targets import ContendedOption, DeviceOption, Json, require_gpu
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.workspace import Workspace
    from coda_agent.evals.judge.scores import Judge, Say

app = typer.Typer(help="Score the judge: what it kills, passes, says, and how long it takes.")

Count = Annotated[int | None, typer.Option(min=1, help="So many mutants, every fault in turn.")]
Seed = Annotated[int, typer.Option(help="Chooses the mutants and what they are judged on.")]


@app.command()
@reported
def mutants(
    device: DeviceOption = "auto", count: Count = None, seed: Seed = 1, as_json: Json = False
) -> Reply:
    """Judge programs and lowerings with one fault each; resumes."""
    return _mutants("mutants", device, count, seed, as_json)


@app.command()
@reported
def diagnosis(
    device: DeviceOption = "auto", count: Count = None, seed: Seed = 1, as_json: Json = False
) -> Reply:
    """How often the fault that the judge names is the one that was made; judges what is missing."""
    return _mutants("diagnosis", device, count, seed, as_json)


def _mutants(what: str, device: str, count: int | None, seed: int, as_json: bool) -> Reply:
    from coda_agent.evals.judge import scores

    workspace, judge = _start(device)
    kernels = _kernels(workspace)
    with _progress(as_json) as say:
        record = scores.score_mutants(
            workspace.root, kernels, judge, seed=seed, count=count, say=say
        )
    text = scores.mutants_text if what == "mutants" else scores.diagnosis_text
    survived = any(c["layer"] == "survived" for c in record["cells"].values())
    return _reply(workspace, record, text(judge.device, record), bool(survived))


@app.command()
@reported
def corpus(device: DeviceOption = "auto", as_json: Json = False) -> Reply:
    """Judge right programs, each several times with fresh seeds; resumes."""
    from coda_agent.demos import demos
    from coda_agent.evals.judge import scores
    from coda_agent.evals.judge.corpus import demonstrations, kernels

    workspace, judge = _start(device)
    shown, left_out = demonstrations(demos())
    right = [*kernels(_kernels(workspace)), *shown]
    with _progress(as_json) as say:
        record = scores.score_corpus(workspace.root, right, left_out, judge, say=say)
    refused = any(c["refused"] for c in record["cells"].values())
    return _reply(workspace, record, scores.corpus_text(judge.device, record), refused)


@app.command()
@reported
def latency(device: DeviceOption = "auto", as_json: Json = False) -> Reply:
    """Time whole verdicts from warm workers over the kernels of the paper."""
    from coda_agent.evals import suites
    from coda_agent.evals.judge import scores

    workspace, judge = _start(device)
    names = suites.load("paper").specs
    with tempfile.TemporaryDirectory() as cache, _progress(as_json) as say:
        os.environ["XDG_CACHE_HOME"] = cache  # an empty one: nothing compiled before counts
        verdict = functools.partial(_verdict_s, workspace, judge.device)
        record = scores.score_latency(workspace.root, verdict, names, judge, say=say)
    return _reply(workspace, record, scores.latency_text(judge.device, record), False)


@app.command()
@reported
def timing(
    trials: Annotated[int, typer.Option(min=1, help="Comparisons of a contender.")] = 200,
    contended: ContendedOption = False,
    as_json: Json = False,
) -> Reply:
    """Compare a kernel with itself on this GPU: how often are the two called different?"""
    from coda_agent.agent.judge import timing as clock
    from coda_agent.agent.judge.provenance import environment
    from coda_agent.agent.workspace import find
    from coda_agent.evals.judge.timing import KERNEL, score_timing
    from coda_agent.generated.kernel import load_kernel
    from coda_agent.primitives.target import use_cache

    require_gpu("cuda")
    workspace = find()
    kernel = load_kernel(workspace.kernel(KERNEL).folder)
    use_cache()
    path = score_timing(
        workspace.root, kernel, clock=clock, machine=environment("cuda"), trials=trials
    )
    record = json.loads(path.read_text("utf-8"))
    different, compared = record["different"], record["compared"]
    text = f"{different} of {compared} comparisons with itself were called different\nwrote {path}"
    return Reply({"record": path, **record}, text, REFUSED if 100 * different > compared else 0)


def _verdict_s(workspace: "Workspace", device: str, name: str) -> float:
    """Seconds of the judge on an accepted kernel, in its first element type: without a GPU all that
    needs none, with one all gates at the two bench shapes."""
    from coda_agent.agent.judge import GATES, judge_candidate
    from coda_agent.agent.judge.pool import warm_pool
    from coda_agent.primitives.target import cache_directory
    from coda_agent.specs import load_spec

    folder = workspace.kernel(name).folder
    spec, text = load_spec(folder / "spec.md"), (folder / "kernel.py").read_text("utf-8")
    element = next(iter(spec.types.values()), ("bfloat16",))[0]
    warm_pool()
    for file in cache_directory().rglob("*"):
        if file.is_file():
            file.unlink()
    start = time.perf_counter()
    verdict = judge_candidate(spec, text, device=device, gates=GATES, types=[element])
    took = time.perf_counter() - start
    if not verdict.passed:
        raise CodaError(f"{name} is refused", hint=f"coda-agent check {name}")
    return took


def _start(device: str) -> "tuple[Workspace, Judge]":
    from coda_agent.agent.judge import numerics
    from coda_agent.agent.judge.compile_gate import check_signature
    from coda_agent.agent.judge.provenance import environment, judge_digest
    from coda_agent.agent.workspace import find
    from coda_agent.evals.judge.scores import Judge

    require_gpu(device)
    import torch

    workspace = find()
    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cuda":
        from coda_agent.primitives.target import use_cache

        use_cache()
    run = numerics.run_kernel if device == "cuda" else numerics.run_interpreter
    machine = environment(device) | {"cores": len(os.sched_getaffinity(0))}
    check = functools.partial(_numerics, device, _Cases())
    return workspace, Judge(judge_digest(), device, machine, check_signature, check, run)


def _numerics(
    device: str,
    cases: "_Cases",
    spec: Any,
    programs: Mapping[str, Any],
    variant: str,
    run: Any,
    seed: int,
) -> tuple[str, dict[str, Any]] | None:
    """The gate on one variant in its first type and the default tile, as `check_numerics`; but the
    cases of a spec and seed, most of its time, are kept for the next program."""
    from coda_agent.agent.judge.numerics import Trial, run_interpreter, run_kernel
    from coda_agent.primitives.tiles import DEFAULT_CONFIGS

    element = next(iter(spec.types.values()), ("bfloat16",))[0]
    binding = next(b for b in spec.bindings() if spec.variant(b) == variant)
    run = run or (run_kernel if device == "cuda" else run_interpreter)
    config, program = DEFAULT_CONFIGS["sm_90a"], programs[variant]
    trial = Trial(spec, program, binding, element, config, run, seed)
    kept = cases(spec, binding, element, device, seed)
    fault = trial.check(kept, {"ratio": 0.0, "element": 0.0}, full=True)
    return (fault.message, fault.where) if fault else None


class _Cases:
    """The cases that were asked for last."""

    def __init__(self) -> None:
        self._key: Any = None
        self._cases: list[Any] = []

    def __call__(
        self, spec: Any, binding: Mapping[str, str], element: str, device: str, seed: int
    ) -> list[Any]:
        from coda_agent.agent.judge.oracle import make_cases

        key = spec.digest, spec.variant(binding), element, device, seed
        if key != self._key:
            self._key, self._cases = key, list(make_cases(spec, binding, element, device, seed))
        return self._cases


def _kernels(workspace: "Workspace") -> list[Any]:
    from coda_agent.generated.kernel import load_kernel

    return [load_kernel(kernel.folder) for kernel in workspace.kernels()]


@contextmanager
def _progress(silent: bool) -> "Iterator[Say]":
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=silent, transient=True) as bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield say


def _reply(workspace: "Workspace", record: Any, text: str, failed: bool) -> Reply:
    from coda_agent.evals.judge.scores import write_page

    page = write_page(workspace.root)
    return Reply({**record, "page": page}, f"{text}\n\nwrote {page}", REFUSED if failed else 0)
