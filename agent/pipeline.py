"""The main job: spec -> author -> judge -> accept, each step an event of the run's log.

The candidate's text is in the run's log and folder before it is judged, so a refusal, a crash or
Ctrl-C loses nothing an author wrote. An author works at the workbench (`Author.drive`); its run can
be left and taken up again (`reopened`).
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from coda_agent.agent import accept as acceptance
from coda_agent.agent import events as e
from coda_agent.agent import execution, judge, publish, references, runs
from coda_agent.agent.authors import Author
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer, Verdict
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.judge.records import GATES
from coda_agent.agent.keys import KEYS
from coda_agent.agent.log import RunLog
from coda_agent.agent.plain import plain
from coda_agent.agent.workbench import Workbench
from coda_agent.agent.workspace import Kernel, Run, Workspace, resolve_kernel
from coda_agent.primitives.errors import CompileError, SpecError, WorkspaceError
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Shape, propose
from coda_agent.runtime.kernel import Kernel as Function
from coda_agent.runtime.kernel import load_kernel, user_tuning
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.faults import size_faults

PROPOSED = 10
"""Configurations that are compiled and timed at a shape, for each element type.

Over 1,368 problems of all kernels on an H200, the best of ten was 0.9998 of the best of thirty in
geometric mean where a table was fitted, which saw other shapes near, and 0.9955 by the prior. The
worst were 0.915 and 0.838.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    `level` is the kernel's level afterwards. A refusal stores nothing, so it is None then, or
    revoked by verify. `before` is the level that verify found. `commit` is None where there was
    nothing to commit. `verdict` is None where the author ended before any, and `reason` says why it
    ended. `remark` is what is unusual about where the commit went.
    """

    kernel: str
    passed: bool
    level: str | None
    before: str | None
    commit: str | None
    folder: Path | None
    run: Path | None
    verdict: Verdict | None
    reason: str | None = None
    remark: str = ""

    def record(self) -> dict[str, Any]:
        """As plain JSON data."""
        verdict = self.verdict and self.verdict.model_dump(mode="json")
        return plain({**vars(self), "verdict": verdict})


@lru_cache(maxsize=64)
def _admit(spec_path: Path, text: str) -> None:
    """Admission of a spec's text, once a process: it takes up to a second, and trials, resumed runs
    and sessions open the same spec again and again. What raises is tried again."""
    # Authors and gates need torch next; a worker takes as long to import it.
    threading.Thread(target=importlib.import_module, args=("torch",)).start()
    references.admitted(load_spec(spec_path, text=text))


@contextlib.contextmanager
def _logged(run: Run, observer: Observer, begin: e.Event | None) -> Iterator[RunLog]:
    """The log of a run, the event it begins with written; a failure is its last event."""
    KEYS.take()
    with RunLog(run.folder / "events.jsonl", observer) as log:
        try:
            if begin:
                log.append(begin)
            yield log
        except BaseException as error:
            message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            log.append(e.RunFailed(error=error.__class__.__name__, message=message))
            raise


@contextlib.contextmanager
def _short(run: Run, observer: Observer, kind: str, spec: str) -> Iterator[RunLog]:
    """The log of a run that ends with the command."""
    begin = e.RunStarted(run=run.id, kind=kind, spec=spec)
    with _logged(run, observer, begin) as log:
        yield log
        log.append(e.RunFinished())


def _check_fit(workspace: Workspace, spec: Spec) -> None:
    """Refuses what would stop the commit of a kernel, before anything is spent on it.

    Raises:
        WorkspaceError: as `publish.check_place` and `Workspace.check_spec`.
    """
    publish.check_place(workspace, spec.name)
    workspace.check_spec(spec.name, spec.text)


@contextlib.contextmanager
def opened(
    workspace: Workspace,
    spec_path: Path,
    author: str,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
    settings: dict[str, Any] | None = None,
    withheld: Sequence[str] = (),
) -> Iterator[Workbench]:
    """The workbench of a new run; what is `withheld`, an ablation takes away.

    Raises:
        SpecError: the spec cannot be used; there is no run then.
        WorkspaceError: nothing could be committed; checked before the author starts.
    """

    spec = load_spec(spec_path)
    if commit:
        _check_fit(workspace, spec)
    execution.executor().start(gpu=False)  # which imports while the spec is admitted
    _admit(spec_path, spec.text)
    run = workspace.new_run("generate", spec.name)
    (run.folder / "spec.md").write_text(spec.text, "utf-8")
    begin = e.RunStarted(
        run=run.id, kind="generate", spec=spec.name, author=author, device=device, commit=commit,
        **({"withheld": tuple(withheld)} if withheld else {}), **(settings or {}),
    )  # fmt: skip
    with _logged(run, observer, begin) as log:
        log.append(e.SpecAdmitted(path=spec_path.name, digest=spec.digest))
        yield Workbench(workspace, run, spec, log)


@contextlib.contextmanager
def reopened(
    workspace: Workspace, run: Run, observer: Observer, *, settings: dict[str, Any] | None = None
) -> Iterator[Workbench]:
    """The workbench of a run as its last process left it, with the spec it was started with.

    A run that was left between two calls of tools goes on without an event of its own, so the time
    between them is its author's.

    Raises:
        SpecError: its spec cannot be used.
        WorkspaceError: it is no run of an author, its spec is not the one that was admitted,
            another process works on it, or nothing that it may still accept could be committed.
    """

    state = runs.state(run)
    if state.kind != "generate":
        raise WorkspaceError(f"{run.id} is not the run of an author")
    spec = load_spec(run.folder / "spec.md")
    if state.admitted is None:
        _admit(spec.path, spec.text)  # the process was killed before it wrote that down
    elif spec.digest != state.admitted:
        raise WorkspaceError(f"{spec.path} was not admitted", hint="start another run")
    if state.commits and not state.over:
        _check_fit(workspace, spec)
    ended = state.over is None and state.outcome in ("stopped", "failed")
    resumed = e.RunResumed(run=run.id, **(settings or {})) if settings or ended else None
    with _logged(run, observer, resumed) as log:
        if state.admitted is None:
            log.append(e.SpecAdmitted(path=spec.path.name, digest=spec.digest))
        yield Workbench(workspace, run, spec, log)


def _judge(
    spec: Spec,
    text: str,
    log: RunLog,
    device: Device,
    gates: tuple[str, ...] = GATES,
    known: dict[str, Any] | None = None,
) -> Verdict:
    log.candidate(text)
    verdict = judge.judge_candidate(
        spec, text, execution.executor(),
        device=device, gates=gates, observer=log.observer, known=known,
    )  # fmt: skip
    log.verdict(verdict, str(log.state.kind))
    return verdict


def generate(
    workspace: Workspace,
    spec_path: Path,
    author: Author,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
    withheld: Sequence[str] = (),
) -> Outcome:
    """Has an author write a kernel for a spec, judges it, and accepts it when it passes.

    Raises:
        SpecError: the spec cannot be used.
        WorkspaceError: nothing could be committed; checked before the author starts.
    """
    with opened(
        workspace, spec_path, author.name, observer,
        device=device, commit=commit, settings=author.settings(),
        withheld=withheld,
    ) as bench:  # fmt: skip
        return _worked(bench, author)


def resume(workspace: Workspace, run: Run, author: Author, observer: Observer) -> Outcome:
    """Has the author of a run go on where it stopped.

    Raises:
        WorkspaceError: it is no run of an author, or another process works on it.
    """
    with reopened(workspace, run, observer, settings=author.settings()) as bench:
        return _worked(bench, author)


def _worked(bench: Workbench, author: Author) -> Outcome:
    bench.log.append(e.AuthorStarted(author=author.name))
    bench.gpu_limit_s = author.gpu_limit_s
    author.drive(bench)
    return outcome(bench)


def outcome(bench: Workbench) -> Outcome:
    """How the run of a workbench stands."""
    state, name = bench.state, bench.spec.name
    passed = state.over == "accepted"
    folder = bench.workspace.generated / name if passed and state.commits else None
    return Outcome(
        name, passed, state.level, None, state.commit, folder, bench.run.folder, bench.verdict,
        None if passed else bench.reason, publish.remark(bench.workspace, state.commit),
    )  # fmt: skip


def verify(
    workspace: Workspace,
    kernel: str,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
    fresh: bool = False,
) -> Outcome:
    """Judges an accepted kernel again where its evidence is stale or this machine can show more,
    and raises or revokes its level; with `fresh`, in any case.

    Where nothing is due there is no run, and the outcome says so. One of the package, where the
    workspace has none of its name, is judged alone.

    Raises:
        WorkspaceError: there is no such kernel, or nothing could be committed.
    """
    stored = resolve_kernel(kernel, workspace)
    commit = commit and workspace.owns(stored)
    text = stored.program.read_text("utf-8")
    if commit:
        publish.check_place(workspace, kernel, text)
    evidence = stored.evidence
    spec = load_spec(stored.spec)
    if spec.digest != evidence.digests.get("spec"):
        # A wider tolerance there would make right whatever kernel.py computes.
        raise WorkspaceError(
            f"{stored.spec} is not the spec that {kernel} was accepted with",
            hint="put it back from git, or generate again from the new spec",
        )
    gpu = execution.usable_gpu(device) is not None
    if not (fresh or evidence.due(digests(spec, text), gpu=gpu)):
        return Outcome(
            kernel, True, evidence.level, evidence.level, None, stored.folder, None, None
        )
    run = workspace.new_run("verify", kernel)
    with _short(run, observer, "verify", kernel) as log:
        verdict = _judge(spec, text, log, device, known=stored.tuned)
        sha: str | None = None
        level = verdict.level
        if commit:
            sha = acceptance.raise_or_revoke(workspace, kernel, verdict, run_id=run.id, text=text)
            level = workspace.kernel(kernel).level
            log.append(e.Stored.of(sha, level))
    return Outcome(
        kernel, verdict.passed, level, evidence.level, sha, stored.folder, run.folder, verdict,
        remark=publish.remark(workspace, sha),
    )  # fmt: skip


def tune(
    kernel: Kernel,
    shapes: Sequence[Shape],
    observer: Observer,
    *,
    new_run: Callable[[], Run],
    commit: Workspace | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Finds the best configurations of an accepted kernel at (M, N, K) shapes on this GPU.

    They go to the user's cache, shape by shape, so that what was measured stays measured. What the
    cache holds is not measured again.

    Args:
        kernel: Of a workspace or of the package.
        shapes: Where it is to be fast.
        observer: Told of gates, and by `shape.tuned` of each shape that is kept.
        new_run: Makes the run, where there is anything to do.
        commit: The workspace that has the kernel; its tuned.json then gets the lines too.

    Returns:
        The lines of these shapes as tuned.json holds them, and the commit; None where there is
        none, or nothing new to it.

    Raises:
        CompileError: no proposed tile compiles, or computes the right result.
        MachineError: there is no Hopper GPU.
        SpecError: the spec, or a kernel of its types, does not allow a shape.
        WorkspaceError: the kernel is not what its evidence was made for, or nothing could be
            committed.
        OSError: the cache cannot be written to; said before anything is measured.
    """
    if commit:
        publish.check_place(commit, kernel.name)
    spec = load_spec(kernel.spec)
    for shape in shapes:
        check_shape(spec, shape)
    gpu = execution.usable_gpu("cuda")
    assert gpu is not None  # "cuda" demands one
    function, user = load_kernel(kernel.folder), user_tuning(kernel.folder)
    user.add({})  # what fails, fails before anything is measured
    dtypes = sorted({spec.dtype_of(spec.gemm[0], types) for types in spec.type_choices()})

    def lines() -> dict[str, Any]:
        held = user.lines().get(gpu.name, {})
        chosen = {d: [plain(x) for x in held.get(d, []) if x.shape in shapes] for d in dtypes}
        return {gpu.name: chosen}

    missing = [s for s in shapes if not all(user.find(gpu.name, dtype, s) for dtype in dtypes)]
    if not missing and not commit:
        return lines(), None
    with _short(new_run(), observer, "tune", kernel.name) as log:
        for shape in missing:
            sizes = dict(zip(spec.gemm_dims, shape, strict=True))
            measured = judge.tune_candidate(
                spec.model_copy(update={"bench_shapes": (sizes,)}),
                kernel.program.read_text("utf-8"),
                execution.executor(),
                observer=log.observer,
                tiles=_proposed(function, shape, dtypes[0], gpu.name),
            )
            if measured.get(gpu.name, {}).keys() != set(dtypes):
                raise CompileError(f"{kernel.name}: no proposed tile compiles in every type")
            user.add(plain(measured))
            log.observer("shape.tuned", {"shape": " x ".join(map(str, shape))})
        sha = acceptance.store_tuned(commit, kernel.name, lines()) if commit else None
        log.append(e.Stored.of(sha, kernel.level))
    return lines(), sha


def check_shape(spec: Spec, shape: Shape) -> None:
    """
    Raises:
        SpecError: the spec, or a kernel of its types, does not allow a shape.
    """
    sizes = dict(zip(spec.gemm_dims, shape, strict=True))
    spec.check_sizes(sizes)
    for fault, _ in size_faults(spec, sizes):
        raise SpecError(f"{spec.name}: {fault}")


def _proposed(function: Function, shape: Shape, dtype: str, gpu: str) -> list[TileConfig]:
    """The right configurations to compile and time at a shape, as the model of their times ranks
    them."""
    program, *_ = function.programs.values()
    refused, model = function.refused, function.model(gpu, dtype)
    count, spills = PROPOSED + len(refused), function.spills
    found = propose(program, *shape, count=count, model=model, spills=spills)
    return [config for config in found if config.label not in refused][:PROPOSED]


def judge_only(
    run: Run,
    kind: str,
    spec: Spec,
    text: str,
    observer: Observer,
    *,
    device: Device = "auto",
    gates: tuple[str, ...] = GATES,
) -> Outcome:
    """Judges a text, before all gates unless some are named, and stores nothing but the run."""
    with _short(run, observer, kind, spec.name) as log:
        verdict = _judge(spec, text, log, device, gates)
    level = verdict.level if verdict.passed else None
    return Outcome(spec.name, verdict.passed, level, None, None, None, run.folder, verdict)
