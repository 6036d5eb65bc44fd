"""Authors: whoever writes candidates.

A kind of author is one module or package of this folder, registered by its `AUTHOR`: a `Kind`, or
several. The commands, `doctor`, `--help` and evaluations know of it from there alone. A name is
`KIND` or `KIND:WHICH`, and the kind says what WHICH is: `claude:MODEL`, `replay:RUN`. Registering
imports neither torch nor an SDK. An agent that works at the tools is no kind; its name is its own.
"""

import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from coda_agent.agent.budget import Budget, Price
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.tips import HOLDOUT
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.agent.workbench import Work, Workbench


@dataclass(frozen=True)
class Options:
    """What a user may choose about an author."""

    model: str = ""
    """The model that writes; the author's own default where it is empty."""
    models: tuple[str, ...] = ()
    """Those that a ladder climbs, in this order."""
    samples: int = 1
    """Conversations that a ladder has with each model but the last, or with one that is alone."""
    effort: str = "high"
    fallback: str | None = None
    """The model that is asked where the first refuses."""
    price: Price | None = None
    budget: Budget = field(default_factory=Budget)
    holdout: float = HOLDOUT
    """Share of the tips that is held back."""
    base_url: str = ""
    """The server that has the model; Anthropic's, or the SDK's own setting, where it is empty."""


class Author(ABC):
    """Whoever works at a workbench until its run is over."""

    name: str
    """What evidence and logs call it."""
    limits = ""
    """What it may spend, said before it begins."""
    in_dollars = True
    """Whether it knows what it spends in dollars."""
    gpu_limit_s = math.inf
    """Seconds of GPU work in its run, the full trial left aside."""

    def settings(self) -> JsonObject:
        """Say what the first event of a run holds of the author."""
        return {}

    @abstractmethod
    def work(self, bench: "Workbench") -> "Work[None]":
        """Work until the run is over, and end it (`Workbench.finish`).

        Yields each candidate that is to be judged, and is sent its verdict; `pipeline.drive` does
        that. What prevents a verdict or an acceptance is raised here instead.
        """


class Writer(Author):
    """An author that writes a candidate in one go."""

    @abstractmethod
    def write(self, spec: Spec, observer: Observer) -> str:
        """Write a candidate's text, one program per binding of `spec`.

        The observer is told of each stage, as "author.progress".

        Raises:
            ProgramError: The spec cannot be expressed as an epilogue program.
        """

    def work(self, bench: "Workbench") -> "Work[None]":
        """Submit its text, once."""
        bench.log.candidate(self.write(bench.spec, bench.log.observer))
        verdict = yield bench.submission()
        bench.finish(None if verdict.passed else "refused")


@dataclass(frozen=True)
class Need:
    """What a kind of author needs beside the program."""

    name: str
    met: bool
    hint: str
    where: str
    """The condition in words: "where a key is set"."""


class Kind:
    """One kind of author.

    Attributes:
        name: What `--author` takes.
        spelling: The names it takes, for `--help`.
        meaning: What it is, in a sentence for a reader of results.
        precedence: Of the kinds whose need is met, the highest is the author where none is named.
            At 0 it has to be named.
        deterministic: Whether all its trials at a spec are alike.
        aided: Whether it reads the tips, demonstrations, profiles and diagnoses that an ablation
            withholds.
        climbs: Whether it has several models or conversations, as `Options` names them.
    """

    name: str
    spelling: str
    meaning: str
    precedence = 0
    deterministic = False
    aided = False
    climbs = False

    def need(self) -> Need | None:
        """What it cannot do without."""
        return None

    def full_name(self, which: str, options: Options) -> str:
        """The name that a trial's record has."""
        return f"{self.name}:{which}" if which else self.name

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        """The author.

        Raises:
            CodaError: it lacks what it needs, or there is no WHICH.
        """
        raise NotImplementedError

    def tried(
        self, which: str, options: Options, workspace: Workspace, specs: Collection[str]
    ) -> dict[str, list[str]]:
        """Name the authors that a name stands for, with their specs."""
        self.make(which, options, workspace)  # what it lacks is said before the first trial
        return {self.full_name(which, options): list(specs)}


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of author by its name, the deterministic ones first."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    authors = (import_module(f"{__name__}.{name}").AUTHOR for name in modules)
    found: list[Kind] = [kind for a in authors for kind in (a if isinstance(a, tuple) else (a,))]
    return {kind.name: kind for kind in sorted(found, key=lambda k: (not k.deterministic, k.name))}


def kind_of(name: str) -> tuple[Kind, str]:
    """Split an author's name into its kind and which of that kind.

    Raises:
        CodaError: there is no such kind.
    """
    kind, _, which = name.partition(":")
    if kind not in kinds():
        known = ", ".join(kind.spelling for kind in kinds().values())
        raise CodaError(f"unknown author {name!r}, expected {known}")
    return kinds()[kind], which


def agents_name(name: str) -> str:
    """Check the name of an agent that works at the tools.

    Raises:
        CodaError: it is, or is no name.
    """
    if not re.fullmatch(r"[\w.:@/+ -]{1,80}", name) or name.partition(":")[0] in kinds():
        hint = "such as agent:MODEL"
        raise CodaError(f"{name!r} cannot be the name of an agent at the tools", hint=hint)
    return name


def meaning(name: str) -> str:
    """What an author of this name is, in a sentence."""
    kind = kinds().get(name.partition(":")[0])
    return kind.meaning if kind else "An agent at the tools, over MCP or from a shell."


def make(name: str, options: Options, workspace: Workspace) -> Author:
    """The author called `name`.

    Raises:
        CodaError: there is none, or it lacks what it needs.
    """
    kind, which = kind_of(name)
    if not kind.climbs and (options.models or options.samples > 1):
        given = "--models" if options.models else "--samples"
        hint = "--author ladder does; --models MODEL --samples N has N conversations with one"
        raise CodaError(f"the author {kind.name} takes no {given}", hint=hint)
    author = kind.make(which, options, workspace)
    author.gpu_limit_s = 60 * options.budget.gpu_minutes
    return author


def _by_precedence() -> list[Kind]:
    """The kinds that need no name, the first choice last."""
    found = (kind for kind in kinds().values() if kind.precedence)
    return sorted(found, key=lambda kind: kind.precedence)


def default() -> str:
    """The author where none is named."""
    met = [k.name for k in _by_precedence() if not (need := k.need()) or need.met]
    return met[-1]


def choices() -> str:
    """Who may be named, and who is where nobody is: for `--help`."""
    known = _by_precedence()
    first = (f"{kind.name} {need.where}" if (need := kind.need()) else kind.name for kind in known)
    return f"{', '.join(kind.spelling for kind in kinds().values())}; else {' or '.join(first)}."
