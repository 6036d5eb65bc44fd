"""Definitions of suites: what authors are tried on. docs/evaluation.md is the format in words.

A suite is a TOML file. Its digest is of what decides one trial: specs, shapes, goal, GPU, budget.
The digest leaves out how many trials there are, how they are summed up, and what
`coda-agent bench --suite` measures.
"""

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from coda_agent.agent import execution
from coda_agent.agent.judge.machine import demanded
from coda_agent.agent.workspace import Workspace
from coda_agent.evals.records import Device, Level, suite_digest
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import text_of
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.format import evaluate

FOLDER = Path(__file__).parent / "suites"
_UNDECISIVE = {"title", "groups", "trials", "judge", "benchmark"}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _tile(values: Any) -> Any:
    """A configuration out of (tile_m, tile_n, cluster_m, cluster_n, ping-pong)."""
    return TileConfig(*values) if isinstance(values, list) and len(values) == 5 else values


class Shapes(_Model):
    """Shapes in place of a spec's own; a list that is empty leaves the spec's."""

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


Dims = dict[str, int | str]
"""Expressions over S and the widths of a model; a dim that is not there is S."""


class Extents(_Model):
    """The dims of a kernel, or with models the products where it stands."""

    dims: Dims = {}
    products: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """One thing to measure: a kernel at one size, with models at one of a model's products.

    Attributes:
        size: The value of S.
        dims: As `Dims`.
        model, product: Their names; empty without models.
        widths: Of the model, by name.
    """

    kernel: str
    size: int
    dims: Dims
    model: str = ""
    product: str = ""
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name in records."""
        return " ".join(filter(None, (self.model, self.kernel, self.product, str(self.size))))

    def sizes(self, spec: Spec) -> dict[str, int]:
        """The extents of the kernel's dims."""
        known = {**self.widths, "S": self.size}
        return {d: int(evaluate(self.dims.get(d, "S"), known)) for d in spec.dims}


class Benchmark(_Model):
    """What `coda-agent bench --suite` measures.

    Attributes:
        sizes: Values of S. With models it stands for the rows.
        models: By name, the widths that dims of products are made of.
        products: Dims by name.
        contenders: Those that take part unless others are asked for; none means all.
        rounds: Timed rounds a cell.
        loops: Whether eager loops are timed too.
        reduction_block: Columns, or rows, of the partials of kernels that return them raw.
        tiles: Configurations that contenders with a choice of them are searched over.
    """

    dtype: str
    sizes: tuple[PositiveInt, ...]
    models: dict[str, dict[str, PositiveInt]] = {}
    products: dict[str, Dims] = {}
    contenders: tuple[str, ...] = ()
    rounds: PositiveInt = 50
    loops: bool = False
    reduction_block: PositiveInt = 128
    kernels: dict[str, Extents]
    tiles: tuple[Annotated[TileConfig, BeforeValidator(_tile)], ...] = ()

    def places(
        self, kernels: Sequence[str] = (), sizes: Sequence[int] = (), models: Sequence[str] = ()
    ) -> Iterator[Place]:
        """What is measured, in order; of each argument none means all. With models a part of them
        covers all kernels: it goes by model and size first."""
        kernels, sizes = kernels or tuple(self.kernels), sizes or self.sizes
        if not self.models:
            yield from (Place(k, s, self.kernels[k].dims) for k in kernels for s in sizes)
        for model, size, kernel in product(models or self.models, sizes, kernels):
            for name in self.kernels[kernel].products:
                yield Place(kernel, size, self.products[name], model, name, self.models[model])

    @model_validator(mode="after")
    def _known(self) -> Self:
        for kernel, extents in self.kernels.items():
            if unknown := [name for name in extents.products if name not in self.products]:
                raise ValueError(f"kernels.{kernel}: no product is named {unknown[0]!r}")
        return self


class Suite(_Model):
    """A suite.

    Attributes:
        name: The file's.
        specs: Names of specs; "all" for every one the workspace knows. Empty means those of
            `groups`.
        groups: Sequences of kernels that are of use together: one is solved when all in it are.
        shapes: By spec.
        goal: The level that counts as solved.
        gpu: What the GPU's name has to contain; empty where a suite needs none.
        trials: How many an author that is not deterministic gets at each spec.
        judge: With "current", a trial is done once today's judge and spec have decided it. With
            "any", once any did.
        budget: What one trial may spend.
    """

    name: str
    title: str
    specs: tuple[str, ...] | Literal["all"] = ()
    groups: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, Shapes] = {}
    goal: Level
    gpu: str = ""
    trials: PositiveInt = 1
    judge: Literal["current", "any"] = "current"
    budget: TrialLimits = TrialLimits()
    benchmark: Benchmark | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.specs and not any(self.groups.values()):
            raise ValueError('it names no specs; expected specs = ["NAME", ...], "all" or groups')
        if self.specs == "all":
            return self
        if len(set(self.specs)) < len(self.specs):
            raise ValueError("specs: a spec is listed twice")
        if unknown := sorted(set(self.shapes) - set(self._listed())):
            raise ValueError(f"shapes: {', '.join(unknown)} is not among its specs")
        return self

    def _listed(self) -> list[str]:
        grouped = [name for group in self.groups.values() for name in group]
        return list(dict.fromkeys([*(() if self.specs == "all" else self.specs), *grouped]))

    @cached_property
    def definition(self) -> dict[str, Any]:
        """What decides a trial, as plain data."""
        data = self.model_dump(mode="json", exclude=_UNDECISIVE, exclude_defaults=True)
        return {**data, "specs": self.specs or self._listed()}

    @cached_property
    def digest(self) -> str:
        """Of the definition."""
        return suite_digest(self.definition)

    def device(self, asked: Literal["auto", "cpu", "cuda"]) -> Device:
        """Where it runs: a GPU where the suite names one, unless told otherwise.

        Raises:
            MachineError: there is no such GPU here.
        """
        jobs = execution.executor()  # a cluster that does not answer is said now
        if asked == "cpu" or (asked == "auto" and not self.gpu):
            return "cpu"
        hint = "--device cpu shows what can be shown without: proved"
        name = demanded(jobs.gpu(), hint).name
        if self.gpu.lower() not in name.lower():
            message = f"suite {self.name} is for a GPU named {self.gpu}, here is {name}"
            raise MachineError(message, hint=hint)
        return "cuda"

    def measured(self) -> Benchmark:
        """
        Raises:
            CodaError: there is nothing to measure in it.
        """
        if self.benchmark is None:
            hint = "bench --suite paper has"
            raise CodaError(f"suite {self.name} has no [benchmark] table", hint=hint)
        return self.benchmark

    def spec_names(self, workspace: Workspace) -> list[str]:
        """Its specs, in order.

        Raises:
            WorkspaceError: one does not exist.
        """
        if self.specs == "all":
            return sorted(workspace.spec_names())
        for name in self._listed():
            workspace.resolve_spec(name)
        return self._listed()

    def spec(self, workspace: Workspace, name: str) -> Spec:
        """One spec, with the suite's shapes in place of its own.

        Raises:
            SpecError: the spec cannot be used, or not at these shapes.
            WorkspaceError: it does not exist.
        """
        path = workspace.resolve_spec(name)
        spec = load_spec(path)
        given = self.shapes.get(name, Shapes())
        changes = {"check_shapes": given.check, "bench_shapes": given.bench}
        if not any(changes.values()):
            return spec
        _, front, rest = re.split(r"^---[ \t]*\n", spec.text, maxsplit=2, flags=re.MULTILINE)
        header: dict[str, Any] = yaml.safe_load(front)
        for key, new in changes.items():
            if new:  # in the spec's own order: the text decides the digest
                header[key] = [{d: s[d] for d in (*spec.declared.dims, *s) if d in s} for s in new]
        front = yaml.safe_dump(header, sort_keys=False, default_flow_style=None, width=120)
        return load_spec(path, text=f"---\n{front}---\n{rest}")


def load(name: str, *folders: Path, others: Iterable[str] = ()) -> Suite:
    """A suite by the path of its file, or by its name in one of `folders` or among the packaged. A
    refusal names the caller's `others`, too.

    Raises:
        CodaError: there is none, or its file cannot be used; names the file and the first fault.
    """
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        known = {p.stem: p for folder in (FOLDER, *folders) for p in sorted(folder.glob("*.toml"))}
        if name not in known:
            names = ", ".join([*known, *others])
            raise CodaError(f"no suite {name!r}, expected one of {names}, or a path")
        path = known[name]
    hint = "docs/evaluation.md has the format"
    try:
        data = tomllib.loads(text_of(path, hint))
        return Suite.model_validate({**data, "name": path.stem})
    except ValidationError as error:
        raise CodaError(f"{path}: {_first(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise CodaError(f"{path}: {error}", hint=hint) from None


def titles(*folders: Path) -> dict[str, str]:
    """The titles of the packaged suites and of those in `folders`, by name; what is damaged is left
    out."""
    found: dict[str, str] = {}
    for path in (path for folder in (FOLDER, *folders) for path in sorted(folder.glob("*.toml"))):
        with contextlib.suppress(CodaError):
            found[path.stem] = load(str(path)).title
    return found


def beside(folder: Path) -> dict[str, Suite]:
    """The suites whose definitions are kept under a folder of records, by digest; what is damaged
    is left out, and named by `read_records`."""
    found: dict[str, Suite] = {}
    for path in folder.rglob("suite-*.json"):
        try:
            suite = Suite.model_validate({"title": "", **json.loads(path.read_text("utf-8"))})
        except (OSError, ValueError):
            continue
        found[suite.digest] = suite
    return found


def _first(error: ValidationError) -> str:
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = ", ".join(name for name in Suite.model_fields if name != "name")
        return f"unknown key {where!r}" + f"; expected {known}" * (len(fault["loc"]) == 1)
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
