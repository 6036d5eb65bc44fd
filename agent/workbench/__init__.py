"""The workbench: all that an author of a kernel can do, and the only thing it talks to.

- `TOOLS` is the registry; `Workbench.call` runs one tool, each call an event before and after.
- The state is a fold over the run's events (`agent/state.py`): a run can be left and taken up again
  by another process, another author, or a person at the command line.
- A tool refuses with a sentence; whatever else it raises is a fault of ours and ends the run.
"""

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from coda_agent.agent import accept as acceptance
from coda_agent.agent import events as e
from coda_agent.agent import execution, judge, publish
from coda_agent.agent.judge import Finding, Verdict
from coda_agent.agent.judge.machine import demanded
from coda_agent.agent.judge.records import GATES
from coda_agent.agent.judge.runners import one_thread
from coda_agent.agent.keys import KEYS
from coda_agent.agent.log import RunLog, short_digest
from coda_agent.agent.state import CHECKS, Attempt
from coda_agent.agent.tips import Tip, Tips
from coda_agent.agent.workbench.at_once import at_once
from coda_agent.agent.workbench.feedback import feedback as told
from coda_agent.agent.workbench.feedback import lines_of
from coda_agent.agent.workbench.reading import (
    demonstrations,
    names_by_kind,
    programs_to_define,
    vocabulary,
)
from coda_agent.agent.workbench.registry import Result, Tool, ToolError, bounded, registry, tool
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.demos import demos
from coda_agent.primitives.catalogue import entries
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.suggest import near_matches
from coda_agent.primitives.syntax import MAX_CHARACTERS
from coda_agent.specs import Spec

__all__ = ["NEXT", "TOOLS", "Result", "Tool", "ToolError", "Workbench", "shown"]

PAGE = 4000
"""Characters of a page of an artifact."""
NEXT = "read_spec with the spec's name opens a new one"
CHECKED = {"static": GATES[:1], "compile": GATES[:2], "interpret": GATES[:3], "gpu": GATES[:3]}
"""The gates of each level of `check`; all others run them all."""

WITHHELD: dict[str, tuple[str, ...]] = {
    "tips": ("search_tips",),
    "demos": ("list_demos", "read_demo"),
    "profile": ("profile",),
    "diagnosis": ("evaluate", "read_artifact"),
}
"""What an ablation may withhold from an author, with the tools that go with it."""


def _told(description: str) -> Any:
    """What an author reads about an argument."""
    return Field(description=description)


Name = Annotated[str, _told("As the list spells it.")]
Word = Annotated[str, _told("Part of a name, of a kind or of what is said of it.")]
Level = Annotated[
    Literal["static", "compile", "interpret", "gpu"],
    _told(
        "static: the language (instant). compile: also compiled. interpret: "
        "also its numbers, by the interpreter. gpu: the numbers of the compiled kernels."
    ),
]


class Workbench:
    """The workbench of one run and its spec."""

    def __init__(self, workspace: Workspace, run: Run, spec: Spec, log: RunLog) -> None:
        self.workspace, self.run, self.spec, self.log = workspace, run, spec, log
        self.gpu_limit_s = math.inf
        """Seconds of GPU work after which only `submit` may still use the GPU."""
        self.state = log.state
        self.verdict: Verdict | None = None
        self.reason: str | None = None
        self.withheld, self.tools = log.state.withheld, shown(log.state.withheld)

    def call(self, name: str, given: object, id: str = "") -> Result:
        """Runs one tool; a call that cannot be done is a result that says so."""
        known = self.tools.get(name)
        self.log.append(e.ToolStarted(id=id, name=name, input=given))
        start = time.monotonic()
        try:
            if known is None:
                raise ToolError(f"no tool named {name!r}", hint=near_matches(name, self.tools))
            if self.state.over and name != "log_tip":  # what a run taught may follow its end
                raise ToolError(f"this run is over: {self.state.over}", hint=NEXT)
            result = known.method(self, **known.parsed(given))
        except CodaError as error:
            lacks = {"lacks": "machine"} if isinstance(error, MachineError) else {}
            result = Result(ok=False, text=str(error), data=lacks)
        return self.answer(id, name, result, time.monotonic() - start)

    def answer(self, id: str, name: str, result: Result, seconds: float = 0.0) -> Result:
        """Records the result of a call, its text bounded."""
        result = self._kept_short(name, result)
        self.log.append(
            e.ToolFinished(id=id, name=name, seconds=round(seconds, 3), **result.model_dump())
        )
        return result

    def refuse(self, id: str, name: str, why: str) -> None:
        """Records that a call was not run."""
        self.answer(id, name, Result(ok=False, text=why))

    def judge(self, check: str) -> Verdict:
        """One attempt: the candidate before the gates of a check.

        Raises:
            CodaError: there is no candidate, or the machine or the budget lacks what it needs.
        """
        text = self._candidate()
        device = {"interpret": "cpu", "gpu": "cuda", "benchmark": "cuda"}.get(check)
        device = device or self.state.device
        if device == "cuda" and check != "submit":
            self._need_gpu()
        self.verdict = judge.judge_candidate(
            self.spec, text, execution.executor(),
            device=device, gates=CHECKED.get(check, GATES), observer=self.log.observer,
        )  # fmt: skip
        self.log.verdict(self.verdict, check)
        return self.verdict

    def accept(self) -> Verdict:
        """The full trial of the candidate, and its acceptance when it passes.

        Raises:
            WorkspaceError: it could not be committed.
        """
        verdict = self.judge("submit")
        if verdict.passed and self.state.commits:
            sha = acceptance.accept(
                self.workspace, self.spec, self.state.candidate, verdict,
                author=str(self.state.author), run_id=self.run.id,
            )  # fmt: skip
            level = self.workspace.kernel(self.spec.name).level
            self.log.append(e.Stored.of(sha, level))
        elif verdict.passed:
            self.log.append(e.Stored(type="passed", level=verdict.level))
        return verdict

    def finish(self, reason: str | None = None, *, final: bool = True) -> None:
        """Ends the run: the outcome of its tips, and its last event.

        A stop that is not `final` was not the author's doing, and says nothing about the tips.
        """
        arms = self.state.tips
        if final and arms:
            success = self.state.over == "accepted"
            Tips.of(self.workspace).record_outcomes(self.run.id, arms, success=success)
        best = self.state.best
        self.reason = reason or self.state.over
        if best:
            (self.run.folder / "best.py").write_text(best.text, "utf-8")
        self.log.append(e.RunFinished(reason=self.reason, best=best and best.record()))

    def _kept_short(self, name: str, result: Result) -> Result:
        """`result` with its text bounded; the whole text becomes an artifact."""
        short = bounded(result.text)
        if short == result.text:
            return result
        path = self.log.artifact(f"{name}-{short_digest(result.text)}.txt", result.text)
        more = {"text": f"{short}\n(all of it: {path})", "artifacts": [*result.artifacts, path]}
        return result.model_copy(update=more)

    def _candidate(self) -> str:
        if not self.state.candidate:
            raise ToolError("there is no candidate yet", hint="write_candidate comes first")
        return self.state.candidate

    def _need_gpu(self) -> None:
        gpu = None if self.state.device == "cpu" else execution.usable_gpu("auto")
        demanded(gpu, "check at level interpret is the most that can be shown before submit")
        if self.state.spent.gpu_s > self.gpu_limit_s:
            raise ToolError(f"the GPU budget of {self.gpu_limit_s:.0f} s is used up")

    def _judged(self, check: str) -> Result:
        attempt, verdict = self._known(check)
        if verdict is None:
            verdict = self.accept() if check == "submit" else self.judge(check)
        number = attempt.number if attempt else len(self.state.attempts)
        text = told(verdict, attempt.check if attempt else check, number)
        if attempt:
            text += f"\n    not run again: the candidate is that of attempt {number}"
        if "diagnosis" in self.withheld:
            text = text.partition("\n")[0]
        if check == "submit" and verdict.passed:
            commit = self.state.commit
            remark = publish.remark(self.workspace, commit)
            text += f"\naccepted as {self.state.level}" + f", commit {commit}" * bool(commit)
            text += f"\n{remark}" * bool(remark)
        return Result(
            text=text,
            data={"passed": verdict.passed, "level": verdict.level, "attempt": number},
            artifacts=[f"artifacts/verdict-{number}.json"],
            gpu=verdict.environment.get("device") == "cuda",
        )

    def _known(self, check: str) -> tuple[Attempt | None, Verdict | None]:
        """The attempt that failed at what this check would find again, and its verdict: the same
        candidate by the same gates, at the same check or, where nothing was computed yet, at one of
        which this check does more."""
        for attempt in reversed(self.state.attempts):
            failed = next(iter(attempt.judgement.failed), "")
            order = CHECKS.index(check) - CHECKS.index(attempt.check)
            path = self.log.folder / "artifacts" / f"verdict-{attempt.number}.json"
            again = (order == 0 and failed == "numerics") or (order >= 0 and failed in GATES[:2])
            same = attempt.text == self.state.candidate and not attempt.judgement.stale
            if again and same and path.is_file():
                return attempt, Verdict.model_validate_json(path.read_text("utf-8"))
        return None, None

    # The tools, in the order an author is shown them.

    @tool()
    def read_spec(self) -> Result:
        """The spec: what to compute, with shapes, types, tolerance, target and the reference."""
        names = [self.spec.variant(binding) for binding in self.spec.bindings()]
        text = f"{self.spec.text}\n---\n{programs_to_define(self.spec)}"
        return Result(text=text, data={"programs": names})

    @tool()
    def list_primitives(self, word: Word = "") -> Result:
        """Every name a program may use, by kind; or with a summary those that have a word in it."""
        found = vocabulary(word) if word else names_by_kind()
        return Result(
            text=found or f"no primitive has {word!r}; those there are:\n{names_by_kind()}"
        )

    @tool()
    def read_primitive(self, name: Name) -> Result:
        """One primitive: shapes, types, cost, when to use it, an example."""
        entry = _pick({e.name: e for e in entries()}, name, "primitive")
        return Result(text=f"{entry.signature}  [{entry.kind}]\n\n{entry.doc}")

    @tool()
    def list_demos(self, word: Word = "") -> Result:
        """The demonstrations: small programs that show one primitive or pattern each; or what those
        are of that have a word, such as a primitive's name, in them."""
        names = ", ".join(demo.name for demo in demos())
        found = demonstrations(word) if word else names
        return Result(text=found or f"no demonstration has {word!r}; there are {names}")

    @tool()
    def read_demo(self, name: Name) -> Result:
        """One demonstration: problem, program, why it is written so, reference."""
        return Result(text=_pick({d.name: d for d in demos()}, name, "demo").text)

    @tool()
    def search_tips(
        self, query: Annotated[str, _told("Words: primitives, symptoms, outputs.")]
    ) -> Result:
        """Tips from earlier runs that match some words, the most useful first."""
        known = Tips.of(self.workspace).search(query)
        found = [tip for tip in known if tip.run != self.run.id]  # what it wrote, it knows
        if not found:
            return Result(text="no tip matches these words")
        self.log.append(e.TipsGiven(arms={tip.id: "shown" for tip in found}))
        return Result(text="\n".join(tip.line() for tip in found))

    @tool()
    def write_candidate(
        self, text: Annotated[str, _told("The complete text of kernel.py.")]
    ) -> Result:
        """Sets the candidate's whole text, which is kept, and says what is wrong at first sight."""
        return self._saved(text)

    @tool()
    def edit_candidate(
        self,
        old: Annotated[str, _told("Text that occurs exactly once in the candidate.")],
        new: Annotated[str, _told("What stands there instead.")],
    ) -> Result:
        """Replaces one passage of the candidate, `old`, which has to occur exactly once."""
        count = self.state.candidate.count(old) if old else 0
        if count != 1:
            hint = "quote a longer passage" if count else "quote it exactly as it stands"
            now = bounded(self.state.candidate, 4000)
            raise ToolError(f"`old` occurs {count} times; the candidate is:\n{now}", hint=hint)
        return self._saved(self.state.candidate.replace(old, new))

    def _saved(self, text: str) -> Result:
        if len(text) > MAX_CHARACTERS or KEYS.redacted(text) != text:
            raise ToolError(f"a candidate has at most {MAX_CHARACTERS} characters and no secrets")
        digest = self.log.candidate(text)
        said = f"candidate {digest}, {len(text.splitlines())} lines"
        found = at_once(self.spec, text)
        if "diagnosis" in self.withheld:
            said += ", refused" * bool(found)
        else:
            lines = (f"\n{line}" for finding in found for line in lines_of(finding))
            said += "".join(lines) or ", names and shapes fit the spec"
        return Result(text=said, data={"findings": len(found)})

    @tool()
    def check(self, level: Level) -> Result:
        """Judges the candidate up to a level, and says what is wrong, where, and what to try."""
        return self._judged(level)

    @tool()
    def evaluate(
        self,
        expression: Annotated[
            str | None,
            _told("Of acc and operands; lines before the last assign. None: the candidate."),
        ] = None,
        values: Annotated[
            dict[str, float | list[float]] | None,
            _told("Numbers of the first row by name, acc among them; what is absent is drawn."),
        ] = None,
        failing: Annotated[bool, _told("On the case in which the last check failed.")] = False,
        against: Annotated[int | None, _told("Number of an attempt to show beside it.")] = None,
        program: Annotated[str | None, _told("One program of several.")] = None,
    ) -> Result:
        """What the candidate or an expression gives at a few elements, beside the exact reference:
        in float64, and as float32 arithmetic stores it."""
        from coda_agent.agent.workbench.evaluating import inputs_of, table, written
        from coda_agent.primitives.reader import read_programs

        names = {self.spec.variant(b): b for b in self.spec.bindings()}
        name = program or next(iter(names))
        binding, values = _pick(names, name, "program"), values or {}
        found = written(self.spec, binding, expression) if expression else None
        programs = {"expression": found} if found else {}
        if not found:
            programs["candidate"] = read_programs(self._candidate(), [*names])[name]
        if against is not None:
            attempts = {str(a.number): a.text for a in self.state.attempts}
            text = _pick(attempts, str(against), "attempt")
            programs[f"attempt {against}"] = read_programs(text, [*names])[name]
        finding = self._last_finding() if failing else None
        with one_thread():
            inputs = inputs_of(self.spec, binding, values, finding)
            given = max((len(v) if isinstance(v, list) else 1 for v in values.values()), default=0)
            return Result(text=table(self.spec, binding, programs, inputs, given=given))

    def _last_finding(self) -> Finding:
        """The first finding of the last attempt."""
        number = len(self.state.attempts)
        path = self.log.folder / "artifacts" / f"verdict-{number}.json"
        gates = Verdict.model_validate_json(path.read_text("utf-8")).gates if number else []
        found = next((f for gate in gates for f in gate.findings), None)
        if found is None:
            raise ToolError("the last check did not fail", hint="leave `failing` out")
        return found

    @tool()
    def read_artifact(
        self,
        name: Annotated[str, _told("As a result names it, such as artifacts/verdict-1.json.")],
        page: Annotated[int, Field(ge=1, description="From 1.")] = 1,
    ) -> Result:
        """One page of a file that an earlier result left in the run's folder."""
        files = sorted((self.log.folder / "artifacts").glob("*"))
        known = {f"artifacts/{file.name}": file for file in files if file.is_file()}
        text = _pick(known, name, "artifact").read_text("utf-8")
        pages = max(1, -(-len(text) // PAGE))
        if page > pages:
            raise ToolError(f"{name} has {pages} pages")
        shown = text[(page - 1) * PAGE : page * PAGE]
        return Result(text=f"{name}, page {page} of {pages}\n{shown}", data={"pages": pages})

    @tool()
    def benchmark(self) -> Result:
        """Times the candidate on the GPU against a bare GEMM and torch.compile."""
        return self._judged("benchmark")

    @tool()
    def profile(self) -> Result:
        """Nsight Compute on the candidate's kernel, as its difference from the accepted one."""
        from coda_agent.agent.execution.device import exclusive
        from coda_agent.agent.workbench.profile import profile

        self._need_gpu()
        text = self._candidate()
        accepted = {kernel.name: kernel for kernel in self.workspace.kernels()}
        incumbent = accepted.get(self.spec.name)
        old = incumbent.program.read_text("utf-8") if incumbent else None
        with exclusive([execution.hopper()]):
            return Result(text=profile(self.spec, text, old), gpu=True)

    @tool()
    def inspect(
        self,
        what: Annotated[
            Literal["graph", "roofline", "tiles", "cute", "ptx", "sass"],
            _told(
                "graph: its operations. roofline: time and traffic at the bench shapes. tiles: "
                "registers and spills in each. cute, ptx, sass: its epilogue in the CuTe dialect, "
                "in PTX or in SASS, for sm_90a at the default tile."
            ),
        ],
        program: Annotated[str | None, _told("One program of several.")] = None,
    ) -> Result:
        """What a program became: its graph, its roofline, its tiles or its code."""
        from coda_agent.agent.explain import explain
        from coda_agent.agent.workbench.inspection import epilogue, tiles
        from coda_agent.agent.workbench.profile import roofline

        text = self._candidate()
        match what:
            case "graph":
                return Result(text=explain(self.spec, text, what, program))
            case "roofline":
                return Result(text=roofline(self.spec, text, program))
            case "tiles":
                return Result(text=tiles(self.spec, text, program))
        whole = explain(self.spec, text, what, program)
        path = self.log.artifact(f"{what}-{short_digest(whole)}.txt", whole)
        return Result(text=f"{epilogue(what, whole)}\n(the whole kernel: {path})", artifacts=[path])

    @tool(last=True)
    def log_tip(
        self,
        text: Annotated[str, _told("One or two sentences: symptom, cause, what to do. No code.")],
        tags: Annotated[
            list[str], _told("Names of primitives or words of a spec where it applies.")
        ],
        failing: Annotated[int, _told("Number of an attempt that failed for lack of it.")],
        passing: Annotated[int, _told("Number of the later attempt that passed with it.")],
    ) -> Result:
        """Keeps what an attempt taught, for later runs. Names a failing and a passing attempt."""
        attempts = {attempt.number: attempt for attempt in self.state.attempts}
        before, after = attempts.get(failing), attempts.get(passing)
        if not (before and not before.passed and after and after.passed and failing < passing):
            said = ", ".join(
                f"{n} {'passed' if a.passed else 'failed'}" for n, a in attempts.items()
            )
            message = "a tip needs an attempt that failed and a later one that passed"
            raise ToolError(f"{message}; there are: {said or 'none'}")
        finding = " ".join(before.judgement.finding.split())[:160]
        tip = Tip(
            text=text, tags=tags, author=str(self.state.author), run=self.run.id,
            failing=f"check {failing}, {before.check}: {finding}",
            passing=f"check {passing}, {after.check}",
        )  # fmt: skip
        programs = [kernel.program.read_text("utf-8") for kernel in self.workspace.kernels()]
        programs += [self.state.candidate, best.text if (best := self.state.best) else ""]
        kept = Tips.of(self.workspace).add(tip, programs)
        return Result(text=f"tip {tip.id} kept" if kept else f"tip {tip.id} was known already")

    @tool(last=True)
    def submit(self) -> Result:
        """The full trial: all gates this machine can run. A pass is committed and ends the run."""
        return self._judged("submit")

    @tool(last=True)
    def give_up(
        self, reason: Annotated[str, _told("What stands in the way, in one sentence.")]
    ) -> Result:
        """Ends the run without a kernel, and says what stands in the way."""
        self.log.append(e.GaveUp(reason=reason))
        return Result(text="the run is over; the candidate is kept")


def _pick(known: dict[str, Any], name: str, what: str) -> Any:
    if name not in known:
        raise ToolError(f"no {what} named {name!r}", hint=near_matches(name, known))
    return known[name]


TOOLS = registry(Workbench)


def shown(withheld: Sequence[str] = ()) -> dict[str, Tool]:
    """The tools without those that go with what is withheld."""
    hidden = {name for part in withheld for name in WITHHELD[part]}
    return {name: tool for name, tool in TOOLS.items() if name not in hidden}
