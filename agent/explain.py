"""Every stage between a spec and machine code, as text."""

import tempfile
from pathlib import Path

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.execution.answers import Ok, Refused, answered, read_answer
from coda_agent.agent.execution.child import Child, ChildError, serve
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError, CompileError
from coda_agent.primitives.inspect import describe
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.syntax import program_names
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.target import ARCHITECTURES, sass
from coda_agent.specs import Spec

_LIMIT_S = 300.0


def explain(spec: Spec | None, text: str | None, stage: str, variant: str | None = None) -> str:
    """Print one stage of a kernel.

    Args:
        spec: Its spec; needed where `text` is None, and to know element types.
        text: The candidate's or accepted kernel's text; None lets the composer write it.
        stage: "graph" is the reference's ATen graph (of a spec) or the program's graph, "program"
            the source, "cute" the kernel's MLIR, "ptx" and "sass" what it compiles to for sm_90a at
            the default tile.
        variant: Which program, where the spec has parameters; the default one otherwise.

    Raises:
        CodaError: an unknown variant, or the kernel does not compile.
    """
    if text is None:
        assert spec is not None  # there is one of them
        if stage == "graph":
            from coda_agent.agent.authors.composer.capture import capture

            return str(capture(spec, _binding(spec, variant)))
        text = Composer().write(spec, lambda *_: None)
    if stage == "program":
        return text
    return stage_of(spec, program_of(spec, text, variant), stage)


def _binding(spec: Spec, variant: str | None) -> dict[str, str]:
    for binding in spec.bindings():
        if variant in (None, spec.variant(binding)):
            return dict(binding)
    known = ", ".join(spec.variant(b) for b in spec.bindings())
    raise CodaError(f"{spec.name} has no variant {variant!r}, expected one of {known}")


def program_of(spec: Spec | None, text: str, variant: str | None = None) -> Program:
    """Read one program of a text, by default its spec's first.

    Raises:
        CodaError: the text is not in the language, or has no such program.
    """
    wanted = [spec.variant(b) for b in spec.bindings()] if spec else program_names(text)
    programs, name = read_programs(text, wanted), variant or wanted[0]
    if name not in programs:
        raise CodaError(f"no program {name!r}, expected one of {', '.join(programs)}")
    return programs[name]


def stage_of(spec: Spec | None, program: Program, stage: str) -> str:
    """Print a program's graph, or what it compiles to."""
    return describe(program.graph) if stage == "graph" else compiled(spec, program, stage)


def compiled(spec: Spec | None, program: Program, stage: str) -> str:
    """Compile in a fresh process: the DSL reads dump settings once.

    Raises:
        CompileError: the program does not compile.
    """
    element = spec.elements[0] if spec else "bfloat16"
    job = CompileJob.of(program, DEFAULT_CONFIGS["sm_90a"], "sm_90a", spec, element)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "QUACK_ARCH": ARCHITECTURES["sm_90a"],
            "CUTE_DSL_ARCH": "sm_90a",
            "CUTE_DSL_KEEP": {"cute": "ir", "ptx": "ptx", "sass": "cubin"}[stage],
            "CUTE_DSL_DUMP_DIR": folder,
            "QUACK_CACHE_DIR": str(Path(folder) / "objects"),
        }
        child = Child("coda_agent.agent.explain", environment=environment)
        try:
            work = {"stage": stage, "folder": folder, "job": job.model_dump(mode="json")}
            answer = read_answer(child.call(work, timeout_s=_LIMIT_S))
        except ChildError as error:
            raise CompileError(f"{program.name} does not compile: {error.detail}") from error
        finally:
            child.close()
    match answer:
        case Ok(result=text):
            return text
        case Refused(message=message, hint=hint):
            raise CompileError(f"{program.name} does not compile: {message}", hint=hint)
    raise CompileError(f"the compiler answered {answer.kind}")


def _dumped(work: JsonObject) -> str:
    """Compile a job in the fresh process, and read the stage's artifact."""
    built = CompileJob.model_validate(work["job"]).run()
    if work["stage"] == "sass":
        return sass(Path(built.object))
    suffix = {"cute": ".mlir", "ptx": ".ptx"}[work["stage"]]
    files = sorted(Path(work["folder"]).glob(f"*{suffix}"))
    if not files:
        raise CompileError(f"the compiler left no {suffix} file")
    return files[0].read_text()


if __name__ == "__main__":
    serve(lambda work, _: answered(lambda: _dumped(work)).model_dump())
