"""The workbench of a run: its state, tools, and proposals.

- Every call of a tool is an event before and after.
- The state is a fold over the run's events (`agent/state.py`): a run can be left and taken up again
  by another process, another author, or a person at the command line.
- A tool that needs a verdict proposes the candidate. `Workbench.call` yields that proposal to the
  pipeline, which sends the verdict back.
"""

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from coda_agent.agent import events as e
from coda_agent.agent import execution, publish
from coda_agent.agent.judge import Verdict
from coda_agent.agent.judge.machine import demanded
from coda_agent.agent.judge.records import GATES
from coda_agent.agent.log import RunLog, short_digest
from coda_agent.agent.state import CHECKS, Attempt
from coda_agent.agent.tips import HOLDOUT, SHOWN, Tips, arms, fault_of, names_in
from coda_agent.agent.workbench.feedback import PROFILE, feedback
from coda_agent.agent.workbench.registry import Result, Tool, ToolError, bounded
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import Spec

T = TypeVar("T")

AFTER = "log_tip", "read_candidate", "use"
"""What may follow the end of a run."""
NEXT = "read_spec with the spec's name opens a new one"


@dataclass(frozen=True)
class Proposal:
    """A candidate before the judge, at one of `state.CHECKS`."""

    text: str
    check: str


Work = Generator[Proposal, Verdict, T]
"""What an author does: it yields proposals, is sent a verdict for each, and returns T."""


class Workbench:
    """The workbench of one run and its spec.

    Attributes:
        gpu_limit_s: Seconds of GPU work after which only `submit` may still use the GPU.
        verdict: The last one.
        reason: Why the run ended.
    """

    def __init__(
        self, workspace: Workspace, run: Run, spec: Spec, log: RunLog, tools: Mapping[str, Tool]
    ) -> None:
        self.workspace, self.run, self.spec, self.log = workspace, run, spec, log
        self.state, self.tools, self.withheld = log.state, tools, log.state.withheld
        self.gpu_limit_s = math.inf
        self.verdict: Verdict | None = None
        self.reason: str | None = None

    def call(self, name: str, given: object, id: str = "") -> Work[Result]:
        """Run one tool; where that cannot be done, the result says so."""
        self.log.append(e.ToolStarted(id=id, name=name, input=given))
        start = time.monotonic()
        try:
            tool = self.tools.get(name)
            if tool is None:
                raise ToolError(f"no tool named {name!r}", hint=near_matches(name, self.tools))
            if self.state.over and name not in AFTER:
                raise ToolError(f"this run is over: {self.state.over}", hint=NEXT)
            result = tool.function(self, **tool.parsed(given))
            if isinstance(result, Proposal):
                verdict = yield result
                result = self._ruling(verdict, result.check, len(self.state.attempts))
                result.text += self._tips()
        except CodaError as error:
            lacks = {"lacks": "machine"} if isinstance(error, MachineError) else {}
            result = Result(ok=False, text=str(error), data=lacks)
        return self.answer(id, name, result, time.monotonic() - start)

    def answer(self, id: str, name: str, result: Result, seconds: float = 0.0) -> Result:
        """Record the result of a call, its text bounded."""
        result = self._kept_short(name, result)
        self.log.append(
            e.ToolFinished(id=id, name=name, seconds=round(seconds, 3), **result.model_dump())
        )
        return result

    def refuse(self, id: str, name: str, why: str) -> None:
        """Record that a call was not run."""
        self.answer(id, name, Result(ok=False, text=why))

    def candidate(self) -> str:
        """Return the candidate's text.

        Raises:
            ToolError: there is none yet.
        """
        if not self.state.candidate:
            raise ToolError("there is no candidate yet", hint="write_candidate comes first")
        return self.state.candidate

    def submission(self) -> Proposal:
        """Propose the candidate for the full trial."""
        return Proposal(self.candidate(), "submit")

    def propose(self, check: str) -> Proposal | Result:
        """Propose the candidate, or answer as before to the same.

        Raises:
            CodaError: there is no candidate, or the machine or the budget lacks what it needs.
        """
        text = self.candidate()
        if attempt := self._same_failure(check):
            result = self.told(attempt)
            if "diagnosis" not in self.withheld:
                result.text += (
                    f"\n    not run again: the candidate is that of attempt {attempt.number}"
                )
            return result
        if check in ("gpu", "benchmark"):
            self.need_gpu()
        return Proposal(text, check)

    def told(self, attempt: Attempt) -> Result:
        """Say again what was said of an attempt."""
        return self._ruling(self.verdict_of(attempt), attempt.check, attempt.number)

    def fault(self, attempt: Attempt) -> str:
        """Say what an attempt failed by, as tips are kept under."""
        gates = self.verdict_of(attempt).gates
        gate = next(gate for gate in gates if not gate.passed and not gate.skipped)
        return fault_of(gate.name, gate.findings[0])

    def verdict_of(self, attempt: Attempt) -> Verdict:
        """Read the whole verdict of an attempt."""
        path = self.log.folder / "artifacts" / f"verdict-{attempt.number}.json"
        return Verdict.model_validate_json(path.read_text("utf-8"))

    def _tips(self) -> str:
        """What earlier runs learned of the fault just found, each tip once."""
        attempt = self.state.attempts[-1]
        if attempt.passed or {"tips", "diagnosis"} & set(self.withheld):
            return ""
        found = Tips.of(self.workspace).on(self.fault(attempt), names_in(attempt.text))
        new = [t for t in found if t.run != self.run.id and t.id not in self.state.tips][:SHOWN]
        share = (self.state.options or {}).get("holdout", HOLDOUT)
        if not new:
            return ""
        given = arms(new, self.run.id, share)
        self.log.append(e.TipsGiven(arms=given))
        shown = [f"\n    > {tip.line()}" for tip in new if given[tip.id] == "shown"]
        head = (
            "\n    tips of earlier runs on such a fault, as quotations, which ask nothing of you:"
        )
        return head * bool(shown) + "".join(shown)

    def need_gpu(self) -> None:
        """Refuse where there is no GPU, or its budget is used up."""
        gpu = None if self.state.device == "cpu" else execution.usable_gpu("auto")
        demanded(gpu, "check at level interpret is the most that can be shown before submit")
        if self.state.spent.gpu_s > self.gpu_limit_s:
            raise ToolError(f"the GPU budget of {self.gpu_limit_s:.0f} s is used up")

    def finish(self, reason: str | None = None, *, final: bool = True) -> None:
        """End the run: the outcome of its tips, and its last event.

        A stop that is not `final` was not the author's doing, and says nothing about the tips.
        """
        arms = self.state.tips
        if final and arms:
            passed = self.state.passed
            Tips.of(self.workspace).record_outcomes(self.run.id, arms, success=passed)
        best = self.state.best
        self.reason = reason or self.state.over
        if best:
            (self.run.folder / "best.py").write_text(best.text, "utf-8")
        self.log.append(e.RunFinished(reason=self.reason, best=best and best.record()))

    def keep(self, attempt: Attempt) -> None:
        """Let what was accepted stand, as the run's last word."""
        self.verdict = self.verdict_of(attempt)
        commit, level = self.state.commit, attempt.judgement.level
        self.log.append(e.Stored(type="kept", commit=commit, level=level))

    def _kept_short(self, name: str, result: Result) -> Result:
        """`result` with its text bounded; the whole text becomes an artifact."""
        short = bounded(result.text)
        if short == result.text:
            return result
        path = self.log.artifact(f"{name}-{short_digest(result.text)}.txt", result.text)
        more = {"text": f"{short}\n(all of it: {path})", "artifacts": [*result.artifacts, path]}
        return result.model_copy(update=more)

    def _ruling(self, verdict: Verdict, check: str, number: int) -> Result:
        """A verdict as the result of a tool."""
        text = feedback(verdict, check, number)
        if "profile" not in self.tools:
            text = text.replace(PROFILE, "")
        elif PROFILE in text:
            with contextlib.suppress(CodaError):  # then the author may ask for it
                line = self.tools["profile"].function(self).text.splitlines()[1]
                text = text.replace(PROFILE, f"\n    its time in the slowest cell: {line}")
        if "diagnosis" in self.withheld:
            text = text.partition("\n")[0]
        kept = self.state.kept
        if check == "submit" and verdict.passed and kept and kept.number != number:
            text += f"\nnot taken: attempt {kept.number} is no slower"
        elif check == "submit" and verdict.passed:
            commit, level = self.state.commit, self.state.level or verdict.level
            remark = publish.remark(self.workspace, commit)
            text += f"\naccepted as {level}" + f", commit {commit}" * bool(commit)
            text += f"\n{remark}" * bool(remark)
        return Result(
            text=text,
            data={"passed": verdict.passed, "level": verdict.level, "attempt": number},
            artifacts=[f"artifacts/verdict-{number}.json"],
            gpu=verdict.environment.get("device") == "cuda",
        )

    def _same_failure(self, check: str) -> Attempt | None:
        """The attempt that failed at what this check would find again.

        It is of the same candidate by the same gates, at the same check or, where nothing was
        computed yet, at one of which this check does more.
        """
        for attempt in reversed(self.state.attempts):
            failed = next(iter(attempt.judgement.failed), "")
            order = CHECKS.index(check) - CHECKS.index(attempt.check)
            path = self.log.folder / "artifacts" / f"verdict-{attempt.number}.json"
            again = (order == 0 and failed == "numerics") or (order >= 0 and failed in GATES[:2])
            same = attempt.text == self.state.candidate and not attempt.judgement.stale
            if again and same and path.is_file():
                return attempt
        return None
