"""What a run may spend, and what the model's tokens cost."""

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path

from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError

PRICES = Path(__file__).with_name("prices.toml")
UNPRICED = 5_000_000
"""Tokens of a run whose model has no known price, where no other limit is given."""
SHORTEST = 4000
"""Tokens of an answer; a call that leaves room for fewer is not made."""
_US_ONLY = 1.1
"""Factor on every price where inference is kept in the US."""


@dataclass(frozen=True)
class Budget:
    """The limits of one run, checked before each call."""

    usd: float = 5.0
    steps: int = 1000
    tokens: int = 0
    """Of all calls, cached or not. 0: as many as the dollars buy, or `UNPRICED` without a price."""
    minutes: float = 120.0
    gpu_minutes: float = 20.0
    failures: int = 12
    """Results in a row that brought nothing: a failed tool, or a candidate refused."""
    answer: int = 20_000
    """Tokens of one answer, thinking included; a model with a small window needs fewer."""

    def changed(self, usd: float | None, limits: Iterable[str]) -> "Budget":
        """With other limits: dollars, and KEY=VALUE of the rest.

        Raises:
            CodaError: no such limit, or its value is no positive number.
        """
        kinds = {field.name: type(field.default) for field in fields(self)}
        new: JsonObject = {} if usd is None else {"usd": usd}
        for limit in limits:
            key, _, value = limit.partition("=")
            try:
                new[key] = kinds[key](value)
            except (KeyError, ValueError):
                known = ", ".join(f"{k}={getattr(self, k):g}" for k in kinds)
                raise CodaError(f"{limit!r} is no limit", hint=f"now {known}") from None
        for key, value in new.items():
            if not 0 < value < math.inf:
                raise CodaError(f"the limit {key} is {value:g}, expected a positive number")
        return replace(self, **new)


@dataclass(frozen=True)
class Price:
    """USD per token of one model, up to a length of prompt."""

    input: float
    output: float
    write_5m: float
    write_1h: float
    read: float
    above: int = 0

    @classmethod
    def of(cls, per_million_in: float, per_million_out: float) -> "Price":
        """Make a price of two figures, by the cache's usual rule.

        Raises:
            CodaError: one of them is no amount of money.
        """
        for usd in (per_million_in, per_million_out):
            if not 0 <= usd < math.inf:
                raise CodaError(f"the price is {usd:g}, expected USD per million tokens")
        i, o = per_million_in / 1e6, per_million_out / 1e6
        return cls(i, o, 1.25 * i, 2 * i, 0.1 * i)


class Prices:
    """What models cost on a day; `given` goes before the list.

    Raises:
        CodaError: the model is not in the list and no price was given.
    """

    def __init__(self, model: str, given: Price | None = None, day: date | None = None) -> None:
        self.model, self._given = model, given
        self._day = day or datetime.now(UTC).date()
        self._rows: list[JsonObject] = tomllib.loads(PRICES.read_text("utf-8"))["price"]
        self.tiers(model)

    def tiers(self, model: str) -> list[Price]:
        """List a model's prices, the tier for the longest prompts first."""
        if self._given and model == self.model:
            return [self._given]
        found: dict[int, tuple[date, Price]] = {}
        for row in self._rows:
            # A dated snapshot of a model costs what the model does.
            if not re.fullmatch(rf"{re.escape(row['model'])}(-\d{{8}})?", model):
                continue
            above, start = row.get("above", 0), row["from"]
            if start <= self._day and (above not in found or found[above][0] <= start):
                per_million = (row[key] for key in ("in", "out", "write_5m", "write_1h", "read"))
                found[above] = start, Price(*(usd / 1e6 for usd in per_million), above=above)
        if 0 not in found:
            hint = "give --price-in and --price-out, in USD per million tokens"
            if new := self._newest(model):
                hint = f"use {new}, or {hint}"
            raise CodaError(f"the price of {model} is not known", hint=hint)
        return [found[above][1] for above in sorted(found, reverse=True)]

    def _newest(self, model: str) -> str:
        """Name the newest model of a name's family, unless the name is a newer one's."""
        newest = {row["model"].split("-")[1]: row["model"] for row in reversed(self._rows)}
        family = next((word for word in model.split("-") if word in newest), None)
        if family is None or _version(model, family) > _version(newest[family], family):
            return ""
        return newest[family]

    def cost(self, usage: JsonObject) -> float:
        """Count what a usage block costs, in USD.

        The entries of `iterations` are what is billed, where there are any: a compaction or another
        model's answer is in them and not in the sums at the top.
        """
        factor = _US_ONLY if usage.get("inference_geo") == "us" else 1.0
        entries = usage.get("iterations") or [usage]
        return factor * sum(self._entry(entry) for entry in entries)

    def worst(self, context: int, output: int, model: str | None = None, cached: int = 0) -> float:
        """Count the most a call can cost; what is `cached` is read.

        What is not is written to the cache, for five minutes where it follows what is cached, else
        for an hour.
        """
        price = self._tier(model or self.model, context)
        cached = min(cached, context)
        fresh = (context - cached) * max(price.write_5m if cached else price.write_1h, price.input)
        return fresh + cached * price.read + output * price.output

    def _tier(self, model: str, context: int) -> Price:
        return next(
            price for price in self.tiers(model) if context > price.above or not price.above
        )

    def _entry(self, usage: JsonObject) -> float:
        fresh, read = usage.get("input_tokens") or 0, usage.get("cache_read_input_tokens") or 0
        written = usage.get("cache_creation_input_tokens") or 0
        parts = usage.get("cache_creation") or {}
        hour = parts.get("ephemeral_1h_input_tokens") or 0
        price = self._tier(usage.get("model") or self.model, fresh + read + written)
        return (
            fresh * price.input
            + read * price.read
            + hour * price.write_1h
            + max(0, written - hour) * price.write_5m
            + (usage.get("output_tokens") or 0) * price.output
        )


def _version(model: str, family: str) -> list[int]:
    """Read the numbers after a family's name, without a date."""
    words = model.partition(family)[2].split("-")
    return [int(word) for word in words if word.isdigit() and len(word) < 8]


def tokens(usage: JsonObject) -> int:
    """Count all tokens of a usage block, cached or not."""
    keys = ("input_tokens", "output_tokens",
            "cache_read_input_tokens", "cache_creation_input_tokens")  # fmt: skip
    entries = usage.get("iterations") or [usage]
    return sum(entry.get(key) or 0 for entry in entries for key in keys)


def context(usage: JsonObject) -> int:
    """Count the tokens that the next call reads: last prompt and answer."""
    return tokens(_last(usage))


def cached(usage: JsonObject) -> int:
    """Count the tokens that the next call can read from the cache."""
    keys = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(_last(usage).get(key) or 0 for key in keys)


def _last(usage: JsonObject) -> JsonObject:
    entries = [e for e in usage.get("iterations") or [] if e.get("type") != "compaction"]
    return entries[-1] if entries else {**usage, "iterations": None}
