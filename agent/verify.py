"""A program judged outside an author's run: accepted, or a text alone."""

import shlex

from coda_agent.agent import accept as acceptance
from coda_agent.agent import events as e
from coda_agent.agent import execution, judge, publish
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer, Verdict
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.log import RunLog, short_run
from coda_agent.agent.pipeline import Outcome
from coda_agent.agent.workspace import Workspace, resolve_kernel
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.specs import Spec, load_spec


def verify(
    workspace: Workspace,
    kernel: str,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
    fresh: bool = False,
) -> Outcome:
    """Judge an accepted kernel again where due; raise or revoke its level.

    It is due where its evidence is stale or this machine can show more; with `fresh`, in any case.
    A refused edit of kernel.py that git does not hold is not committed: it was never accepted.

    Where nothing is due there is no run, and the outcome says so. One of the package, where the
    workspace has none of its name, is judged alone.

    Raises:
        WorkspaceError: there is no such kernel, or nothing could be committed.
    """
    stored = resolve_kernel(kernel, workspace)
    commit = commit and workspace.owns(stored)
    text = stored.text
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
    with short_run(run, observer, "verify", kernel) as log:
        verdict = _judged(log, spec, text, judge.Terms(device, known=stored.tuned))
        sha: str | None = None
        level, remark = verdict.level, ""
        if commit and not verdict.passed and publish.edited(workspace, kernel):
            remark = (
                f"{stored.program} is not as git holds it, and nothing was committed:"
                f" git restore {shlex.quote(str(stored.program))} brings the other back"
            )
        elif commit:
            sha = acceptance.raise_or_revoke(workspace, kernel, verdict, run_id=run.id, text=text)
            level = workspace.kernel(kernel).level
            log.append(e.Stored.of(sha, level))
            remark = publish.remark(workspace, sha)
    return Outcome(
        kernel, verdict.passed, level, evidence.level, sha, stored.folder, run.folder, verdict,
        remark=remark,
    )  # fmt: skip


def judge_only(log: RunLog, spec: Spec, text: str, terms: judge.Terms) -> Outcome:
    """Judge a text on some terms; store nothing but the run."""
    verdict = _judged(log, spec, text, terms)
    level = verdict.level if verdict.passed else None
    return Outcome(spec.name, verdict.passed, level, None, None, None, log.folder, verdict)


def _judged(log: RunLog, spec: Spec, text: str, terms: judge.Terms) -> Verdict:
    """Write spec and candidate into the run before anything is judged; then judge."""
    (log.folder / "spec.md").write_text(spec.text, "utf-8")
    log.candidate(text)
    executor = execution.executor()
    verdict = judge.judge_candidate(spec, text, executor, terms=terms, observer=log.observer)
    log.verdict(verdict, str(log.state.kind))
    return verdict
