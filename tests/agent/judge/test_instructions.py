"""Operations brought along: right ones pass, wrong ones are refused without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.execution import executor
from coda_agent.agent.judge import Terms, judge_candidate
from coda_agent.agent.judge.instructions import check_instructions
from coda_agent.demos.own_instruction import own_instruction
from coda_agent.primitives import Program, Tile, epilogue, ptx
from coda_agent.primitives.ptx import MEANINGS
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import load_spec

ROOT = Path(__file__).parents[3]


def brought(meaning: str, code: str, *numbers: float) -> dict[str, Program]:
    """A program with that operation, of the accumulator and these numbers, or of two values."""

    @epilogue(O=Tile)
    def program(acc: Any) -> Any:
        others = numbers or [acc * 2.0][: MEANINGS[meaning] - 1]
        return {"O": ptx(meaning, code, acc, *others)}

    return {"program": program}


NAIVE = "add.f32 $0, $1, 1.0; lg2.approx.f32 $0, $0; mul.f32 $0, $0, 0.6931471806;"
HYPOT = (
    ".reg .f32 a, b, m; .reg .pred p; abs.f32 a, $1; abs.f32 b, $2; max.NaN.f32 m, a, b;"
    "min.NaN.f32 b, a, b; div.rn.f32 a, b, m; fma.rn.f32 a, a, a, 1.0; sqrt.approx.f32 a, a;"
    "mul.f32 $0, a, m; setp.eq.f32 p, m, 0.0; @p mov.f32 $0, m;"
)
COSH = (
    ".reg .f32 a, b; fma.rn.f32 a, $1, 1.442695041, -1.0; ex2.approx.f32 a, a;"
    "fma.rn.f32 b, $1, -1.442695041, -1.0; ex2.approx.f32 b, b; add.f32 $0, a, b;"
)
SIGN = (
    ".reg .pred p; setp.gt.f32 p, $1, 0.0; selp.f32 $0, 1.0, 0.0, p;"
    "setp.lt.f32 p, $1, 0.0; @p mov.f32 $0, -1.0;"
)


@pytest.mark.parametrize(("meaning", "code"), [
    ("copysign", "copysign.f32 $0, $2, $1;"),
    ("copysign", ".reg .b32 s; and.b32 s, $2, 0x80000000; and.b32 $0, $1, 0x7fffffff; or.b32 $0, $0, s;"),
    ("log2", "lg2.approx.ftz.f32 $0, $1;"),
    ("exp2", "ex2.approx.ftz.f32 $0, $1;"),
    ("square", "mul.ftz.f32 $0, $1, $1;"),
    ("floor", "cvt.rmi.f32.f32 $0, $1;"),
    ("round", "cvt.rni.ftz.f32.f32 $0, $1;"),
    ("frac", ".reg .f32 t; cvt.rzi.f32.f32 t, $1; sub.f32 $0, $1, t;"),
    ("sign", SIGN),
    ("hypot", HYPOT),
    ("cosh", COSH),
])  # fmt: skip
def test_right_instructions_pass(meaning: str, code: str) -> None:
    assert check_instructions(brought(meaning, code)) == []


def test_the_kernel_and_the_demonstration_that_bring_one_pass() -> None:
    programs = load_kernel(ROOT / "generated" / "gemm_symlog").programs
    assert check_instructions({**programs, "own_instruction": own_instruction}) == []


@pytest.mark.parametrize(("old", "new"), [
    ("0.125;", "0.0000001;"),  # 1 + x with few digits of x left
    ("0.125;", "0.75;"),  # the polynomial too far out
    ("t, u, small", "u, t, small"),
    ("t, 1.0;", "t, 1.01;"),
    ("0.6931471806", "0.7031471806"),
    ("-0.49998751", "0.49998751"),
    ("setp.lt", "setp.gt"),
    ("abs.f32 size", "mov.f32 size"),  # right above 0 alone
])  # fmt: skip
def test_mutants_of_the_kernels_logarithm_are_refused(old: str, new: str) -> None:
    program = load_kernel(ROOT / "generated" / "gemm_symlog").programs["gemm_symlog"]
    (op,) = (n.op for n in program.graph.nodes if n.op.startswith("ptx log1p"))
    code = op.removeprefix("ptx log1p: ")
    assert check_instructions(brought("log1p", code)) == []
    assert (
        code.count(old) == 1
        and len(check_instructions(brought("log1p", code.replace(old, new)))) == 1
    )


@pytest.mark.parametrize(("meaning", "code", "said"), [
    ("copysign", "mov.f32 $0, $1;", "of (0.5, -0) they make 0.5, torch.copysign -0.5"),
    ("copysign", "copysign.f32 $0, $1, $2;", "of (0, 0.5) they make 0.5, torch.copysign 0"),
    ("copysign", "abs.f32 $0, $1;", "torch.copysign -0.5"),
    ("log1p", NAIVE, "they make 0, torch.log1p"),
    ("log1p", "mov.f32 $0, $1;", "of (0.5) they make 0.5, torch.log1p 0.405465108"),
    ("log2", "lg2.approx.f32 $0, $1; abs.f32 $0, $0;", "of (0.5) they make 1, torch.log2 -1"),
    ("exp2", "ex2.approx.f32 $0, $1; min.f32 $0, $0, 1000000.0;", "torch.exp2"),
    ("floor", "cvt.rzi.f32.f32 $0, $1;", "of (-0.5) they make -0, torch.floor -1"),
    ("round", "add.f32 $0, $1, 0.5; cvt.rmi.f32.f32 $0, $0;", "of (0.5) they make 1, torch.round 0"),
    ("trunc", ".reg .s32 i; cvt.rzi.s32.f32 i, $1; cvt.rn.f32.s32 $0, i;", "torch.trunc"),
    ("hypot", "mul.f32 $0, $1, $1; fma.rn.f32 $0, $2, $2, $0; sqrt.rn.f32 $0, $0;", "torch.hypot"),
    ("asinh", "tanh.approx.f32 $0, $1;", "of (0.5) they make 0.462117165, torch.asinh 0.481211825"),
    ("square", "mul.f32 $0, $1, $1; max.f32 $0, $0, 0.0;", "of (nan) they make 0, torch.square nan"),
])  # fmt: skip
def test_wrong_instructions_are_refused(meaning: str, code: str, said: str) -> None:
    (finding,) = check_instructions(brought(meaning, code))
    assert finding.message.startswith(f"the instructions of ptx {meaning!r} are wrong: of (")
    assert said in finding.message
    assert finding.where == {"program": "program", "operation": f"ptx {meaning}: {code}"}


def test_an_argument_that_is_a_number_keeps_its_value() -> None:
    floor = ".reg .f32 t; cvt.rzi.f32.f32 t, $1; sub.f32 $0, $1, t;"  # a remainder by 1
    assert check_instructions(brought("fmod", floor, 1.0)) == []
    assert len(check_instructions(brought("fmod", floor, 2.0))) == 1
    assert len(check_instructions(brought("fmod", floor))) == 1


def test_equal_operations_are_named_once() -> None:
    code = "mov.f32 $0, $1;"
    one, other = brought("log1p", code)["program"], brought("log1p", code)["program"]
    assert len(check_instructions({"one": one, "other": other})) == 1


def test_the_judge_refuses_them_before_it_compiles() -> None:
    kernel = (ROOT / "generated" / "gemm_symlog" / "kernel.py").read_text()
    text = kernel.replace("copysign.f32 $0, $2, $1;", "mov.f32 $0, $1;")
    assert text != kernel
    spec = load_spec(ROOT / "specs" / "gemm_symlog.md")
    terms = Terms("cpu", ("static", "compile", "numerics"))
    verdict = judge_candidate(spec, text, executor(), terms=terms)
    assert not verdict.passed and verdict.level is None
    *_, gate = verdict.gates
    assert gate.name == "compile" and gate.data is None
    assert "torch.copysign" in gate.findings[0].message
