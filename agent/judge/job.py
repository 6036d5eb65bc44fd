"""A gate's work, as data that another process or machine can take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter

from coda_agent.agent.judge.records import (
    JsonObject,
    NumericsReport,
    Outcome,
    PerformanceReport,
    Progress,
    Record,
    ReportT,
    Resources,
    Tiles,
    Tool,
    Tuned,
)
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.target import Tensors, compile_blind
from coda_agent.specs import Spec, load_spec


def _read_program(value: Any) -> Program:
    return value if isinstance(value, Program) else Program.from_dict(value)


def _read_spec(value: Any) -> Spec:
    if isinstance(value, Spec):
        return value
    shapes = {key: tuple(value[key]) for key in ("check_shapes", "bench_shapes")}
    return load_spec(Path(value["path"]), text=value["text"]).model_copy(update=shapes)


def _write_spec(spec: Spec) -> JsonObject:
    shapes = {"check_shapes": spec.check_shapes, "bench_shapes": spec.bench_shapes}
    return {"path": str(spec.path), "text": spec.text, **shapes}


ProgramData = Annotated[
    Program,
    PlainValidator(_read_program),
    PlainSerializer(lambda program: program.to_dict()),
]
SpecData = Annotated[Spec, PlainValidator(_read_spec), PlainSerializer(_write_spec)]


class BuiltObject(Resources):
    """A compile job's answer: the object file, and what is in it."""

    object: str
    order: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # `launch.order`, where fused


class CompileJob(Record):
    """One program for one architecture, in one configuration.

    Attributes:
        element: The choice for the spec's symbolic types.
        dtype: Of A and B.
        operand_dtypes, output_dtypes: Of the other tensors, by name.
        read_scalars: Whether scalars are tensors, not numbers.
        turned: Those of A and B that are transposes of contiguous matrices, as "B".
        transposed: Whether B is what the spec does not have it as, a transpose or none.
        tables: Extents of tables, on whose columns the code depends.
        again: Whether another job has the same tile, which is reported once.
        read: Whether the answer says what is in the object: 8 % of the time.
    """

    kind: Literal["compile"] = "compile"
    program: ProgramData
    arch: str
    config: TileConfig
    element: str
    dtype: str
    operand_dtypes: dict[str, str]
    output_dtypes: dict[str, str]
    read_scalars: bool = False
    turned: str = ""
    transposed: bool = False
    tables: dict[str, tuple[int, ...]] = Field(default={})
    again: bool = False
    read: bool = True

    @classmethod
    def of(
        cls, program: Program, config: TileConfig, arch: str, spec: Spec | None, element: str
    ) -> Self:
        """Make a job; without a spec every tensor is of type `element`."""
        chosen = dict.fromkeys(spec.types, element) if spec else {}

        def dtype(tensor: str) -> str:
            return spec.dtype_of(tensor, chosen) if spec else element

        return cls(
            program=program, arch=arch, config=config, element=element,
            dtype=dtype(spec.gemm[0]) if spec else element,
            operand_dtypes={o: dtype(o) for o in program.operands},
            output_dtypes={o: dtype(o) for o in program.outputs},
            turned=spec.turned if spec else "",
        )  # fmt: skip

    def run(self) -> BuiltObject:
        """Compile, without a GPU.

        Raises:
            CompileError: the program does not lower or compile.
        """
        use_cache()
        types = self.dtype, self.operand_dtypes, self.output_dtypes
        turned = "".join({*self.turned} ^ ({"B"} if self.transposed else set()))
        tensors = Tensors(*types, self.read_scalars, turned, self.tables)
        built = compile_blind(self.program, self.config, self.arch, tensors, read=self.read)
        return BuiltObject.model_validate(built)


class Job(Record, Generic[ReportT]):
    """One gate over some tiles.

    Attributes:
        programs: By variant name.
        tiles: Configurations to try.
        device: "cuda" runs kernels; "cpu" the interpreter.
        tool: What of compute-sanitizer it runs under, in a child of its own; its report counts.
    """

    kind: Any  # each kind of job is a literal of its own
    device: Literal["cuda", "cpu"] = "cuda"
    spec: SpecData
    programs: dict[str, ProgramData]
    tiles: Tiles
    tool: Tool | None = None
    answer: ClassVar[type[Outcome[Any]]] = Outcome

    def run(self, progress: Progress) -> Outcome[ReportT]:
        """Carry it out in this process."""
        raise NotImplementedError


class NumericsJob(Job[NumericsReport]):
    """The numerics gate: what may be dispatched.

    Attributes:
        seed: What all draws follow from.
        approximated: What outputs are off by in float64, as shares, by "program output".
    """

    kind: Literal["numerics"] = "numerics"
    seed: int
    approximated: dict[str, float] = Field(default={})
    answer = Outcome[NumericsReport]

    def run(self, progress: Progress) -> Outcome[NumericsReport]:
        from coda_agent.agent.judge.numerics import check_numerics

        variants = Variant.of_all(self.spec, self.programs)
        return check_numerics(
            variants, self.tiles, device=self.device, progress=progress, seed=self.seed,
            approximated=self.approximated,
        )  # fmt: skip


class PrepareJob(Job[PerformanceReport]):
    """What the performance gate needs beside the candidate, in some element types."""

    kind: Literal["prepare"] = "prepare"
    types: tuple[str, ...]

    def run(self, progress: Progress) -> Outcome[PerformanceReport]:
        from coda_agent.agent.judge.baselines import prepare

        prepare(self.spec, self.types)
        return Outcome()


class PerformanceJob(Job[PerformanceReport]):
    """The performance gate.

    Attributes:
        known: What tuned.json holds of this GPU.
    """

    kind: Literal["performance"] = "performance"
    known: Tuned = Field(default={})
    answer = Outcome[PerformanceReport]

    def run(self, progress: Progress) -> Outcome[PerformanceReport]:
        from coda_agent.agent.judge.performance import check_performance

        given = self.spec, self.programs, self.tiles, self.known
        return check_performance(*given, progress=progress)


class TuneJob(Job[PerformanceReport]):
    """The fastest right configurations at the spec's bench shapes."""

    kind: Literal["tune"] = "tune"

    def run(self, progress: Progress) -> Outcome[PerformanceReport]:
        from coda_agent.agent.judge.tuner import tune

        return Outcome(tuned=tune(self.spec, self.programs, self.tiles, progress=progress))


class SurveyJob(Job[PerformanceReport]):
    """Times of all right configurations at the spec's bench shapes."""

    kind: Literal["survey"] = "survey"

    def run(self, progress: Progress) -> Outcome[PerformanceReport]:
        from coda_agent.agent.judge.survey import survey

        return Outcome(survey=survey(self.spec, self.programs, self.tiles, progress=progress))


class CallJob(Job[NumericsReport]):
    """The function that a user would import, in the types of `tiles`.

    Attributes:
        tuned: What tuned.json will hold.
        refused: Labels of the tiles that evidence will call wrong.
        seed: What all draws follow from.
    """

    kind: Literal["call"] = "call"
    tuned: dict[str, Tuned] = Field(default={})
    refused: tuple[str, ...] = ()
    seed: int

    def run(self, progress: Progress) -> Outcome[NumericsReport]:
        from coda_agent.agent.judge.imported import check_imported, imported

        types = list(dict.fromkeys(element for _, element in self.tiles))
        tuned = self.model_dump()["tuned"]
        kernel = imported(self.spec, self.programs, tuned, self.refused)
        found = check_imported(kernel, types, device=self.device, seed=self.seed)
        return Outcome(findings=tuple(found))


GateJob = NumericsJob | PrepareJob | PerformanceJob | TuneJob | SurveyJob | CallJob
_JOB: TypeAdapter[GateJob] = TypeAdapter(Annotated[GateJob, Field(discriminator="kind")])


def read_job(data: JsonObject) -> Job[Any]:
    """Read the gate job that `model_dump(mode="json")` wrote."""
    return _JOB.validate_python(data)
