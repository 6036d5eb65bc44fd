"""Records: a line of JSON for each thing measured, tried or judged.

- A line is added as soon as there is something to say, so an interruption loses one at most.
- Of lines with one key the last counts. What was cut off in the middle of a line is dropped.
- Each line names the commit of the program, the machine and the day.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coda_agent.agent.doctor import package_version
from coda_agent.agent.judge.machine import environment
from coda_agent.agent.judge.records import VERSIONS
from coda_agent.agent.judgement import Machine
from coda_agent.agent.plain import utc_now
from coda_agent.agent.workspace import GitError, run_git
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import open_own, reason

FOLDER = Path("evals", "results")
"""Where records are, in a workspace."""


class Record(BaseModel):
    """A line of a file; or by itself what those of one command have in common.

    Attributes:
        commit: Of the program; with `+` where sources differ from it.
        machine: The GPU and its driver, or the device; and torch.
        date: The day, UTC.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    commit: str
    machine: str
    date: str

    @staticmethod
    def now(device: str) -> Record:
        """Name this program, machine and day."""
        found = Machine.of(environment(device))
        return Record(commit=program_commit(), machine=machine(found), date=utc_now()[:10])

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two lines say the same thing; the later one counts."""
        raise NotImplementedError

    def line(self) -> str:
        """Write it as JSON, without fields that have their defaults."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False)


class Judged(Record):
    """What rests on the judge's word.

    Attributes:
        versions: Of the gates that decided.
    """

    versions: dict[str, int] = {}

    @property
    def stale(self) -> list[str]:
        """The gates that decide by another version now."""
        return [gate for gate, v in self.versions.items() if VERSIONS.get(gate, v) != v]


class Cell(Record):
    """A contender at a case in a regime.

    Attributes:
        time_us, interval_us: Microseconds a call, the median, and its 95 % interval.
        ratio, ratio_interval: How many times as fast ours is, the median of rounds, and its 99.8 %
            interval.
        error: The largest distance of an output from the truth, over the truth's norm.
        error_ratio: The largest error of an output over that of PyTorch's own form of the case.
        peak_mib: Memory that a call takes beyond what was there before.
        note: Its tile, what it leaves out, what it ran.
        absent: Why there is none of these.
    """

    suite: str
    case: str
    contender: str
    regime: str
    time_us: float | None = None
    interval_us: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    error: float | None = None
    error_ratio: float | None = None
    peak_mib: int | None = None
    note: str = ""
    absent: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.case, self.contender, self.regime, card(self.machine)


RecordT = TypeVar("RecordT", bound=Record)


def read(path: Path, kind: type[RecordT]) -> dict[tuple[Any, ...], RecordT]:
    """Read a file's records by their keys, if there is one.

    Raises:
        CodaError: a line is no such record.
    """
    if not path.is_file():
        return {}
    text = path.read_bytes()
    found: dict[tuple[Any, ...], RecordT] = {}
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            record = kind.model_validate_json(line)
        except ValidationError as error:
            hint = "take the line out, or restore the file by git"
            raise CodaError(f"{path}:{number}: {reason(error)}", hint=hint) from None
        found[record.key] = record
    return found


def append(path: Path, records: Iterable[Record]) -> None:
    """Add a line for each record behind a file's whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path) as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write("".join(f"{record.line()}\n" for record in records).encode())


def card(machine: str) -> str:
    """Name the GPU of a machine, or `cpu`."""
    return machine.partition(",")[0]


def period(records: Iterable[Record]) -> str:
    """Name the days of records, the first and the last."""
    days = {record.date for record in records}
    return " to ".join(dict.fromkeys((min(days), max(days))))


def machine(about: Machine) -> str:
    """Name a machine: `NVIDIA H200, driver 580.1, torch 2.11.0`, or `cpu, …`."""
    numbers = {"driver": about.driver, "torch": about.packages.get("torch")}
    said = (f"{name} {number}" for name, number in numbers.items() if number)
    return ", ".join([about.gpu or about.device, *said])


def program_commit() -> str:
    """Name the last commit of the sources, or an installed program's version.

    Commits of records and pages do not count. A copy without git says it by $CODA_AGENT_COMMIT.
    """
    if given := os.environ.get("CODA_AGENT_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[1]
    rooms = [path.parent for path in root.glob("*/__init__.py")]
    rooms += [path for path in (root / "evals").iterdir() if path.name != FOLDER.name]
    sources = [str(path.relative_to(root)) for path in rooms if path.name != "evals"]
    try:
        if Path(os.fsdecode(run_git(root, "rev-parse", "--show-toplevel").rstrip())) == root:
            commit = run_git(root, "log", "-1", "--abbrev=7", "--format=%h", "--", *sources)
            edited = run_git(root, "status", "--porcelain", "-uno", "--", *sources)
            return f"{commit.decode().strip()}{'+' * bool(edited)}"
    except (GitError, MachineError):
        pass
    return str(package_version("coda-agent", "coda_agent"))
