"""`coda-agent eval`: authors on a suite. `bench --suite`, `--numerics`: measure, write pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coda_agent.agent import authors
from coda_agent.agent.cli import leaderboard
from coda_agent.agent.cli.authoring import Effort, PriceIn, PriceOut, price_of
from coda_agent.agent.cli.report import Reply, columns, reported
from coda_agent.agent.cli.targets import DeviceOption, ExecutorOption, Json
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError, MachineError

if TYPE_CHECKING:
    from coda_agent.agent.pipeline import Device
    from coda_agent.evals.definitions import Suite
    from coda_agent.evals.records import TrialRecord

_KINDS = authors.kinds().values()
_SPELLINGS = ", ".join(kind.spelling for kind in _KINDS)
_DETERMINISTIC = " and ".join(kind.name for kind in _KINDS if kind.deterministic)
_AIDED = ", ".join(kind.spelling for kind in _KINDS if kind.aided)

app = typer.Typer(help="Compare authors on a suite.", no_args_is_help=True)
app.add_typer(leaderboard.app)

SuiteName = Annotated[str, typer.Option("--suite", help="smoke, paper, catalogue, blocks, a path.")]
Trials = Annotated[int | None, typer.Option(min=1, help="A spec; the suite's number by default.")]
Jobs = Annotated[int, typer.Option(min=1, help="Trials at a time, each in a process of its own.")]
Only = Annotated[list[str] | None, typer.Option(help="Some of the suite's specs.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the records; evals/results/trials.")]


@app.command("run")
@reported
def run(
    suite: SuiteName,
    author: Annotated[list[str], typer.Option(help=f"{_SPELLINGS}; repeatable.")],
    trials: Trials = None,
    jobs: Jobs = 1,
    only: Only = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help=f"More than one trial of {_DETERMINISTIC}, too.")
    ] = False,
    device: DeviceOption = "auto",
    effort: Effort = "high",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    out: Out = None,
    executor: ExecutorOption = None,
    as_json: Json = False,
) -> Reply:
    """Try authors on a suite. What is done is kept; run it again to go on."""
    from coda_agent.evals import comparison

    session = _Session(suite, author, device, out, (effort, price_in, price_out), silent=as_json)
    found = session.tried(trials, jobs, only or [], repeat=repeat)
    authors = comparison.document(found, session.suite.groups)
    text = columns(comparison.summary(found))
    if together := session.suite.groups:
        text += f"\n\n{columns(comparison.chances(authors, together))}"
    return Reply({"folder": session.folder, "authors": authors}, text)


@app.command("ablate")
@reported
def ablate(
    suite: SuiteName,
    author: Annotated[str, typer.Option(help=f"{_AIDED}.")],
    without: Annotated[list[str], typer.Option(help="tips, demos, profile or diagnosis.")],
    trials: Trials = None,
    jobs: Jobs = 1,
    only: Only = None,
    device: DeviceOption = "auto",
    effort: Effort = "high",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    out: Out = None,
    executor: ExecutorOption = None,
    as_json: Json = False,
) -> Reply:
    """Try an author with a part of its help and without, and say what the part is worth."""
    from coda_agent.agent.prompt import WITHHELD
    from coda_agent.evals import comparison, metrics

    parts = tuple(sorted(set(without)))
    if unknown := [part for part in parts if part not in WITHHELD]:
        raise CodaError(f"--without is {unknown[0]!r}, expected one of {', '.join(WITHHELD)}")
    session = _Session(suite, [author], device, out, (effort, price_in, price_out), silent=as_json)
    session.check_ablation(author, parts)
    arms = [session.tried(trials, jobs, only or [], without=w) for w in ((), parts)]
    full, deprived = (metrics.by_spec(r for rs in arm.values() for r in rs) for arm in arms)
    if not (found := comparison.compare(full, deprived)):
        hint = columns(comparison.summary(arms[0]))
        raise CodaError("no spec has a trial that counts in both arms", hint=hint)
    few = f"\n(fewer than {metrics.MIN_SPECS} specs show no difference, whatever the figures)"
    text = columns(comparison.ablation(found, f"without {', '.join(parts)}"))
    text += few * (len(set(full) & set(deprived)) < metrics.MIN_SPECS)
    return Reply({"without": parts, "differences": {one.name: one.record() for one in found}}, text)


class _Session:
    """What `run` and `ablate` share: the suite, where it runs, who is tried."""

    def __init__(
        self,
        suite: str,
        names: list[str],
        device: "Device",
        out: Path | None,
        model: tuple[str, float | None, float | None],
        *,
        silent: bool,
    ) -> None:
        from coda_agent.agent.workspace import find
        from coda_agent.evals import definitions
        from coda_agent.evals.record_files import TRIALS

        self.workspace = find()
        self.suite = definitions.load(suite, self.workspace.root / "evals" / "suites")
        self.device: Literal["cpu", "cuda"] = _device(self.suite, device)
        self.folder = (out or self.workspace.root / TRIALS) / self.suite.name
        self.authors = list(dict.fromkeys(names))
        effort, price_in, price_out = model
        self.options = authors.Options(effort=effort, price=price_of(price_in, price_out))
        self.silent = silent

    def check_ablation(self, author: str, parts: tuple[str, ...]) -> None:
        """
        Raises:
            CodaError: withholding the parts would change nothing that the author sees.
        """
        from coda_agent.agent.tips import Tips

        if not authors.kind_of(author)[0].aided:
            message = f"{author} reads no tips, demos, profile or diagnosis"
            raise CodaError(f"{message}: an ablation would compare it with itself")
        if "profile" in parts and self.device == "cpu":
            raise MachineError("without a GPU there is no profile to withhold")
        if "tips" in parts and not Tips.of(self.workspace).all():
            raise CodaError("this workspace has no tips to withhold")

    def tried(
        self,
        trials: int | None,
        jobs: int,
        only: list[str],
        *,
        repeat: bool = False,
        without: tuple[str, ...] = (),
    ) -> "dict[str, list[TrialRecord]]":
        """The records of every trial, by author; those that lack are made."""
        from coda_agent.evals import trials as running
        from coda_agent.evals.record_files import read_records
        from coda_agent.evals.workers import workers

        plan = running.plan(
            self.workspace, self.suite, self.authors, folder=self.folder, device=self.device,
            trials=trials, repeat=repeat, only=only, without=without, options=self.options,
        )  # fmt: skip
        for problem in read_records(self.folder).problems:
            typer.echo(f"not counted: {problem}", err=True)
        with _Watch(plan, silent=self.silent) as watch, workers(jobs) as pool:
            records = running.run(plan, self.folder, pool, width=jobs, told=watch)
        found: dict[str, list[TrialRecord]] = {}
        for record in sorted(records, key=lambda r: (self._place(r.author), r.author)):
            found.setdefault(record.author, []).append(record)
        return found

    def _place(self, author: str) -> int:
        """Where the author was named, or its kind."""
        kind = author.partition(":")[0]
        return next(i for i, n in enumerate(self.authors) if n in (author, kind))


def _device(suite: "Suite", asked: "Device") -> 'Literal["cpu", "cuda"]':
    """Where a suite runs: a GPU where the suite names one, unless told otherwise."""
    from coda_agent.agent.execution import executor

    jobs = executor()  # a cluster that does not answer is said now
    if asked == "cpu" or (asked == "auto" and not suite.gpu):
        return "cpu"
    found = jobs.gpu()
    if found is None or suite.gpu.lower() not in found.name.lower():
        here = found.name if found else "no Hopper GPU"
        message = f"suite {suite.name} is for a GPU named {suite.gpu or 'Hopper'}, here is {here}"
        raise MachineError(message, hint="--device cpu shows what can be shown without: proved")
    return "cuda"


class _Watch:
    """The live table on a terminal; elsewhere a line a trial."""

    def __init__(self, plan: Any, *, silent: bool) -> None:
        import sys

        self.states: dict[tuple[str, str], list[str]] = {}
        for r in plan.done:
            self.states.setdefault((r.author, r.spec.name), []).append(r.outcome)
        self.left, self.silent = len(plan.tasks), silent
        self.live: Any = None
        if not silent and sys.stdout.isatty() and plan.tasks:
            from rich.live import Live

            self.live = Live(self._render(), refresh_per_second=2)

    def __call__(self, task: Any, record: "TrialRecord | None") -> None:
        """A trial began, or is done."""
        states = self.states.setdefault((task.author, task.spec), [])
        if record is None:
            states.append("…")
        else:
            states[states.index("…")] = record.outcome
            self.left -= 1
        if self.live:
            self.live.update(self._render())
        elif record and not self.silent:
            said = f": {record.reason}" if record.reason else ""
            typer.echo(
                f"{task.author} {task.spec} {task.trial}: {record.outcome}{said} "
                f"({record.spent.wall_s:.0f} s, ${record.spent.usd:.2f}; {self.left} left)"
            )

    def _render(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("author", "spec", "trials", show_edge=False, caption=f"{self.left} left")
        for (author, spec), states in sorted(self.states.items()):
            table.add_row(Text(author), Text(spec), Text(" ".join(states)))
        return table

    def __enter__(self) -> "_Watch":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()


def numbers(text: str | None) -> list[int]:
    """`2048,4096` as a list; nothing as an empty one.

    Raises:
        CodaError: something else than positive whole numbers.
    """
    try:
        found = [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(n <= 0 or n % 128 for n in found):
        raise CodaError(f"--sizes is {text!r}, expected multiples of 128, such as 2048,4096")
    return found


def shape(text: str) -> tuple[int, int, int]:
    """`4096,8192,4096` as (M, N, K).

    Raises:
        CodaError: something else than three positive whole numbers.
    """
    try:
        m, n, k = map(int, text.replace("x", ",").split(","))
    except ValueError:
        m = n = k = 0
    if min(m, n, k) <= 0:
        raise CodaError(f"--shape is {text!r}, expected M,N,K, such as 16384,4096,4096")
    return m, n, k


def suite(
    workspace: Workspace,
    name: str,
    *,
    kernels: list[str],
    sizes: str | None,
    contenders: str | None,
    rounds: int,
    table: bool,
    say: Callable[[str], None],
) -> Reply:
    """Measure what the suite's record lacks, unless only the `table` is wanted; write its pages."""
    from coda_agent.evals.contest import run_contest
    from coda_agent.evals.contest_page import write_page
    from coda_agent.evals.workloads import load_benchmark

    chosen, multiples = load_benchmark(name), numbers(sizes)
    if not table:
        from coda_agent.agent.judge import timing
        from coda_agent.agent.judge.machine import require_idle
        from coda_agent.primitives.target import use_cache

        use_cache()
        names = [n.strip() for n in (contenders or "").split(",") if n.strip()]
        require_idle()
        run_contest(
            workspace.root,
            chosen,
            clock=timing,
            machine=_machine(),
            kernels=kernels,
            sizes=multiples,
            names=names,
            rounds=rounds,
            say=say,
        )
    return _reply(write_page(workspace.root, chosen))


def numerics(workspace: Workspace, *, table: bool) -> Reply:
    """Measure the error of GEMM - RMSNorm - GEMM, unless only the `table` is wanted; write it."""
    from coda_agent.evals import chain_error

    if not table:
        from coda_agent.evals.contest import require_hopper
        from coda_agent.primitives.target import use_cache

        require_hopper()
        use_cache()
        chain_error.measure(workspace.root, machine=_machine(), device="cuda")
    return _reply(chain_error.write_page(workspace.root))


def _machine() -> dict[str, Any]:
    from coda_agent.agent.execution.environment import environment

    found = environment("cuda")
    gpu = {key: found["gpu"].get(key) for key in ("name", "driver_version")}
    return {"gpu": gpu, "cuda": found["cuda"], "packages": found["packages"]}


def _reply(paths: list[Path]) -> Reply:
    record, *pages = paths
    document = {"record": record, "pages": pages, **json.loads(record.read_text("utf-8"))}
    return Reply(document, "\n".join(f"wrote {page}" for page in pages))
