"""Every stage between a spec and machine code, as text."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.sandbox import launcher
from coda_agent.primitives.errors import CodaError, CompileError
from coda_agent.primitives.inspect import describe
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import program_names, read_programs
from coda_agent.primitives.target import ARCHITECTURES, sass
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs import Spec


def explain(spec: Spec | None, text: str | None, stage: str, variant: str | None = None) -> str:
    """One stage of a kernel.

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
    program = traced(spec, text, variant)
    if stage == "graph":
        return describe(program.graph)
    return compiled(spec, program, stage)


def _binding(spec: Spec, variant: str | None) -> dict[str, str]:
    for binding in spec.bindings():
        if variant in (None, spec.variant(binding)):
            return dict(binding)
    known = ", ".join(spec.variant(b) for b in spec.bindings())
    raise CodaError(f"{spec.name} has no variant {variant!r}, expected one of {known}")


def traced(spec: Spec | None, text: str, variant: str | None = None) -> Program:
    """Read one program of a candidate's text, by default the first of its spec.

    Raises:
        CodaError: the text is not in the language, or has no such program.
    """
    wanted = [spec.variant(b) for b in spec.bindings()] if spec else program_names(text)
    programs, name = read_programs(text, wanted), variant or wanted[0]
    if name not in programs:
        raise CodaError(f"no program {name!r}, expected one of {', '.join(programs)}")
    return programs[name]


def compiled(spec: Spec | None, program: Program, stage: str) -> str:
    """MLIR, PTX or SASS, from a fresh process: the DSL reads its dump settings once."""
    element = spec.elements[0] if spec else "bfloat16"
    job = CompileJob.of(program, DEFAULT_CONFIGS["sm_90a"], "sm_90a", spec, element)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "QUACK_ARCH": ARCHITECTURES["sm_90a"],
            "CUTE_DSL_ARCH": "sm_90a",
            "CUTE_DSL_KEEP": {"cute": "ir", "ptx": "ptx", "sass": "cubin"}[stage],
            "CUTE_DSL_DUMP_DIR": folder,
            "QUACK_CACHE_DIR": str(Path(folder) / "objects"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "coda_agent.agent.explain", stage, folder],
            input=job.model_dump_json(), text=True, capture_output=True, env=environment,
            timeout=300, check=False,
        )  # fmt: skip
        result = Path(folder) / "result.txt"
        if done.returncode or not result.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CompileError(f"{program.name} does not compile: {last}")
        return result.read_text()


def _dump(stage: str, folder: str) -> None:
    """Body of the fresh process: compile the job on stdin, leave the artifact in
    `folder`/result.txt."""
    built = CompileJob.model_validate_json(sys.stdin.read()).run()
    if stage == "sass":
        text = sass(Path(built.object))
    else:
        suffix = {"cute": ".mlir", "ptx": ".ptx"}[stage]
        files = sorted(Path(folder).glob(f"*{suffix}"))
        if not files:
            raise CompileError(f"the compiler left no {suffix} file")
        text = files[0].read_text()
    (Path(folder) / "result.txt").write_text(text)


if __name__ == "__main__":
    launcher.prctl(launcher.PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _dump(sys.argv[1], sys.argv[2])
