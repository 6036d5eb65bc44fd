"""Evidence: what generated/<kernel>/evidence.json says of a kernel, for a person to read.

It is one verdict in short, with whose program it is about and where it was given. A verdict takes
the place of an earlier one as a whole.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from coda_agent.agent.judge.records import Level, rank
from coda_agent.agent.judge.verdict import Verdict
from coda_agent.agent.judgement import Gate, Judgement, Machine
from coda_agent.agent.plain import plain, utc_now

Standing = Level | Literal["revoked"]
"""Every level that evidence can have."""
_FIRST = ("schema_version", "kernel", "level", "author", "run", "date", "machine")


class Evidence(Judgement):
    """All that stands behind a kernel.

    Attributes:
        level: "revoked", or the most that was shown.
        author: Who wrote the program.
        run, date, machine: The run that the verdict is of, when it was given, and where.
    """

    schema_version: Literal[3] = 3
    kernel: str
    # A refused candidate has no level, and evidence of one is revoked.
    level: Standing  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    author: str
    run: str
    date: str
    machine: Machine

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Self:
        """Make the evidence of a verdict; `more` has kernel, author and run."""
        about = {"level": verdict.level or "revoked", "date": utc_now()}
        about |= {"machine": Machine.of(verdict.environment)}
        about |= {"gates": {g.name: Gate.of(g) for g in verdict.gates if not g.skipped}}
        return super().of(verdict, **about | more)

    def of_program(self, now: Mapping[str, str]) -> bool:
        """Tell whether it is of the spec and candidate of these digests."""
        return all(self.digests.get(key) == now.get(key) for key in ("spec", "candidate"))

    def due(self, now: Mapping[str, str], *, gpu: bool) -> bool:
        """Tell whether to judge again: stale, edited, or more is possible."""
        lacks = self.level == "revoked" or (gpu and self.level != "accepted")
        return lacks or bool(self.stale) or not self.of_program(now)

    def yields_to(self, new: Self) -> bool:
        """Tell whether a later verdict takes its place.

        One that passes and shows less does not: it contradicts nothing. Nor does one that shows the
        same, unless this one is stale.
        """
        if not self.of_program(new.digests) or self.level != new.level == "revoked":
            return True
        more = rank(new.level) - rank(self.level)
        return more > 0 or (more == 0 and bool(self.stale))

    def text(self) -> str:
        """Write it as JSON, a gate, cell or tile a line."""
        record = self.model_dump(mode="json")
        keys = dict.fromkeys((*_FIRST, *record))
        lines = [f" {json.dumps(key)}: {_lines(record[key])}" for key in keys]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: object) -> str:
    """JSON of a value, each of its entries on a line."""

    def one(entry: object) -> str:
        return json.dumps(plain(entry), ensure_ascii=False, allow_nan=False)

    if not value or not isinstance(value, dict | list):
        return one(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {one(entry)}" for entry in value) + "\n ]"
    return (
        "{\n" + ",\n".join(f"  {one(key)}: {one(entry)}" for key, entry in value.items()) + "\n }"
    )
