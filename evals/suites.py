"""Suites that authors are tried on. docs/evaluation.md is the format in words.

A suite is a TOML file. Its digest is of what decides one trial: specs, shapes, goal, GPU, budget.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from coda_agent.agent import execution
from coda_agent.agent.device import Device as Asked
from coda_agent.agent.judge.machine import Gpu, demanded
from coda_agent.agent.judge.records import JsonObject, Level
from coda_agent.agent.workspace import Workspace, resolve_spec, spec_names
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import text_of
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import Spec, load_spec

FOLDER = Path(__file__).parent / "suites"
Device = Literal["cpu", "cuda"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shapes(_Model):
    """Shapes in place of a spec's own, where there are any."""

    check: tuple[dict[str, PositiveInt], ...] = ()
    bench: tuple[dict[str, PositiveInt], ...] = ()


class TrialLimits(_Model):
    """What one trial may spend, as `coda_agent.agent.budget.Budget`; None is that one's default."""

    usd: PositiveFloat | None = None
    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    minutes: PositiveFloat | None = None
    gpu_minutes: PositiveFloat | None = None
    failures: PositiveInt | None = None


class Suite(_Model):
    """A suite.

    Attributes:
        name: The file's.
        specs: Names of specs; "all" for every one the workspace knows.
        shapes: By spec.
        goal: The level that counts as solved.
        gpu: What the GPU's name has to contain; empty where a suite needs none.
        trials: How many an author that is not deterministic gets at each spec.
        budget: What one trial may spend.
    """

    name: str
    title: str
    specs: tuple[str, ...] | Literal["all"]
    shapes: dict[str, Shapes] = {}
    goal: Level
    gpu: str = ""
    trials: PositiveInt = 1
    budget: TrialLimits = TrialLimits()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.specs:
            raise ValueError('specs is empty, expected specs = ["NAME", ...] or "all"')
        if self.specs == "all":
            return self
        if len(set(self.specs)) < len(self.specs):
            raise ValueError("specs: a spec is listed twice")
        if unknown := sorted(set(self.shapes) - set(self.specs)):
            raise ValueError(f"shapes: {', '.join(unknown)} is not among its specs")
        return self

    @cached_property
    def digest(self) -> str:
        """Of what decides a trial."""
        data = self.model_dump(mode="json", exclude={"title", "trials"}, exclude_defaults=True)
        text = json.dumps({**data, "specs": self.specs}, sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def device(self, asked: Asked, gpu: Callable[[], Gpu | None] | None = None) -> Device:
        """Choose where it runs: a GPU where it names one, unless told.

        `gpu` looks for one elsewhere than on this machine.

        Raises:
            MachineError: there is no such GPU here.
        """
        if asked == "cpu" or (asked == "auto" and not self.gpu):
            return "cpu"
        hint = "--device cpu shows what can be shown without: proved"
        name = demanded((gpu or execution.executor().gpu)(), hint).name
        if self.gpu.lower() not in name.lower():
            message = f"suite {self.name} is for a GPU named {self.gpu}, here is {name}"
            raise MachineError(message, hint=hint)
        return "cuda"

    def spec_names(self, workspace: Workspace) -> list[str]:
        """List its specs, in order.

        Raises:
            WorkspaceError: one does not exist.
        """
        if self.specs == "all":
            return sorted(spec_names(workspace))
        for name in self.specs:
            resolve_spec(name, workspace)
        return [*self.specs]

    def spec(self, workspace: Workspace, name: str) -> Spec:
        """Load one spec, with the suite's shapes in place of its own.

        Raises:
            SpecError: the spec cannot be used, or not at these shapes.
            WorkspaceError: it does not exist.
        """
        path = resolve_spec(name, workspace)
        spec = load_spec(path)
        shapes = self.shapes.get(name, Shapes())
        changes = {"check_shapes": shapes.check, "bench_shapes": shapes.bench}
        if not any(changes.values()):
            return spec
        _, front, rest = re.split(r"^---[ \t]*\n", spec.text, maxsplit=2, flags=re.MULTILINE)
        header: JsonObject = yaml.safe_load(front)
        for key, new in changes.items():
            if new:  # in the spec's own order: the text decides the digest
                header[key] = [{d: s[d] for d in (*spec.declared.dims, *s) if d in s} for s in new]
        front = yaml.safe_dump(header, sort_keys=False, default_flow_style=None, width=120)
        return load_spec(path, text=f"---\n{front}---\n{rest}")


def load(name: str, *folders: Path) -> Suite:
    """Load a suite by its file's path, or by its name.

    Raises:
        CodaError: there is none, or its file cannot be used; names the file and the first fault.
    """
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        known = paths(*folders)
        if name not in known:
            raise CodaError(f"no suite {name!r}, nor a path", hint=near_matches(name, known))
        path = known[name]
    hint = "docs/evaluation.md has the format"
    try:
        data = tomllib.loads(text_of(path, hint))
        return Suite.model_validate({**data, "name": path.stem})
    except ValidationError as error:
        raise CodaError(f"{path}: {_first(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise CodaError(f"{path}: {error}", hint=hint) from None


def paths(*folders: Path) -> dict[str, Path]:
    """List files of suites, packaged and in `folders`, by name."""
    return {p.stem: p for folder in (FOLDER, *folders) for p in sorted(folder.glob("*.toml"))}


def _first(error: ValidationError) -> str:
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = ", ".join(name for name in Suite.model_fields if name != "name")
        return f"unknown key {where!r}" + f"; expected {known}" * (len(fault["loc"]) == 1)
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
