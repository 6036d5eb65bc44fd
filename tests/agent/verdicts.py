"""Verdicts without a GPU: the walk from a spec to one."""

import secrets
from collections.abc import Mapping

from coda_agent.agent import pipeline
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.instructions import check_instructions
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.agent.judge.variant import Variant
from coda_agent.agent.workbench import Result, Workbench
from coda_agent.primitives import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec, admit


def composed(spec: Spec) -> dict[str, Program]:
    """What the composer writes for a spec that is admitted, and meaning accepts, by name."""
    admit(spec)
    return judged(spec, Composer().write(spec, lambda *_: None))


def judged(spec: Spec, text: str) -> dict[str, Program]:
    """The programs of `text`, if static and meaning accept it and its own instructions are right."""
    programs = read_programs(text, [spec.variant(binding) for binding in spec.bindings()])
    assert check_instructions(programs) == []
    assert check_meaning(spec, programs, seed=secrets.randbits(62)) == []
    return programs


def right(spec: Spec, programs: Mapping[str, Program]) -> None:
    """Numerics accepts the programs in bfloat16, interpreted in one tile."""
    tiles = {(name, "bfloat16"): (TileConfig(128, 128),) for name in programs}
    variants = Variant.of_all(spec, programs)
    seed = secrets.randbits(62)
    report = check_numerics(variants, tiles, device="cpu", progress=lambda *_: None, seed=seed)
    assert report.findings == ()


def refused(spec: Spec, program: Program) -> None:
    """Meaning says that the spec's one program is another function."""
    (finding,) = check_meaning(spec, {spec.name: program}, seed=1)
    assert "O is another function of the inputs" in finding.message


def call(bench: Workbench, name: str, given: object) -> Result:
    """Run a tool, with the judge's verdict where it asks for one."""
    return pipeline.drive(bench, bench.call(name, given))
