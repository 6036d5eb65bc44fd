"""Operations a program brings along: what they mean, what they compile to, what they may not be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.demos.own_instruction import own_instruction
from coda_agent.primitives import HalfTile, Program, RowSum, Tile, derivative, epilogue, pairs, ptx
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.lower import zero_preserving
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.ptx import MEANINGS, operation
from coda_agent.runtime.loading import load_kernel
from coda_agent.runtime.target import sass
from tests.programs import built

GENERATED = Path(__file__).parents[2] / "generated"
SOFT = ".reg .f32 t, u; .reg .pred p; neg.f32 t, $1; setp.lt.f32 p, $1, t; @p mov.f32 t, $1; abs.f32 u, t; add.f32 $0, u, 0f00000000;"


def asinh(code: str = "tanh.approx.f32 $0, $1;") -> Program:
    @epilogue(O=Tile, s=RowSum)
    def program(acc: Any) -> Any:
        y = ptx("asinh", code, acc)
        return {"O": y, "s": y}

    return program


def test_the_interpreter_computes_what_the_name_means() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 16, generator=g), torch.randn(24, 16, generator=g)
    got = interpret(
        asinh(),
        a,
        b,
        {},
        dtypes={"O": torch.float64, "s": torch.float64},
        block=128,
        compute=torch.float64,
    )
    want = torch.asinh(a.double() @ b.double().T)
    torch.testing.assert_close(got["O"], want)
    torch.testing.assert_close(got["s"], want.sum(-1))


def test_in_float32_the_interpreter_runs_the_instructions() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 16, generator=g), torch.randn(24, 16, generator=g)
    types = {"O": torch.float32, "s": torch.float32}
    got = interpret(asinh(), a, b, {}, dtypes=types, block=128)
    z = a @ b.T
    torch.testing.assert_close(got["O"], z.tanh())
    torch.testing.assert_close(got["s"], z.tanh().sum(-1))


def test_arguments_may_be_numbers_and_pairs() -> None:
    @epilogue(O=HalfTile)
    def program(acc: Any) -> Any:
        x, y = pairs(acc)
        angle = ptx("atan2", "sub.f32 $0, $1, $2;", x, y)
        return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", 2.0, angle)}

    a, b = torch.tensor([[1.0]]), torch.tensor([[1.0], [-3.0], [-2.0], [5.0]])
    got = interpret(program, a, b, {}, dtypes={"O": torch.float32}, block=128)
    assert got["O"].tolist() == [[2.0, -2.0]]


def test_it_crosses_processes_and_decides_the_digest() -> None:
    one, other = asinh(), asinh("sqrt.approx.f32 $0, $1;")
    assert Program.from_dict(json.loads(json.dumps(one.to_dict()))).digest == one.digest
    assert one.digest != other.digest


def test_it_compiles_to_the_instruction_it_names() -> None:
    use_cache()
    for program, opcode in (
        (asinh(), "MUFU.TANH"),
        (asinh("ex2.approx.ftz.f32 $0, $1;"), "MUFU.EX2"),
    ):
        assert opcode in sass(Path(built(program)["object"]))


def test_a_demonstration_costs_its_instructions_and_nothing_is_known_to_be_zero() -> None:
    facts = inspect_program(own_instruction, (128, 128, 64))
    flops = 3 + OPS["sqrt"].flops  # multiply, absolute, root, copysign
    assert facts.epilogue_flops == flops * 128 * 128
    program = asinh()
    graph = program.graph
    assert zero_preserving(graph, program.operands)[graph.outputs["s"]] is False


@pytest.mark.parametrize("code", [
    "ld.global.f32 $0, [$1];",
    "bra out;",
    "bar.sync 0;",
    "mov.u32 $0, %clock;",
    "tanh.approx.f32 $0, $1; } exit; {;",
    "tanh.approx.f32 $0, $1",
    "tanh.approx.f32 $1, $0;",
    "tanh.approx.f32 $0, $2;",
    "tanh.approx.f32 $0, $1; // x\n;",
    ".reg .f32 t; tanh.approx.f32 t, $1;",
    "abs.f32 $0, $1;" * 33,
    "",
    "abs.f32 $0, $1;\\n",
])  # fmt: skip
def test_what_is_no_arithmetic_on_registers_is_refused(code: str) -> None:
    with pytest.raises(ProgramError, match=r"ptx\(\)"):
        asinh(code)


P = ".reg .pred p; .reg .f32 t; .reg .s32 i; "
SET = "setp.lt.f32 p, $1, 0.0; "


@pytest.mark.parametrize(("code", "said"), [
    # $0 and what is read are set whatever predicates hold.
    (P + SET + "@p mov.f32 $0, $1;", "does not set $0, the result, in every case"),
    (P + SET + "@p mov.f32 $0, $1; @p neg.f32 $0, $1;", "does not set $0"),
    (P + SET + "@p mov.f32 $0, $1; setp.gt.f32 p, $1, 1.0; @!p neg.f32 $0, $1;", "does not set $0"),
    (P + SET + "@p setp.gt.f32 p, $1, 1.0; @p mov.f32 $0, $1;", "does not set $0"),
    ("add.f32 $0, $0, $1;", "'$0' in 'add.f32 $0, $0, $1' is read before it is set"),
    (P + "add.f32 $0, t, $1;", "'t' in 'add.f32 $0, t, $1' is read before it is set"),
    (P + SET + "@p mov.f32 t, $1; mov.f32 $0, t;", "'t' in 'mov.f32 $0, t' is read before"),
    (P + SET + "@p mov.f32 t, $1; mov.f32 $0, $1; @!p mov.f32 $0, t;", "'t' in '@!p mov.f32 $0, t'"),
    (P + "mov.f32 $0, $1; @p mov.f32 $0, 1.0;", "'p' in '@p mov.f32 $0, 1.0' is read before"),
    (P + "selp.f32 $0, $1, 1.0, p;", "'p' in 'selp.f32 $0, $1, 1.0, p' is read before"),
    # Types, numbers, operands.
    (P + "mov.s32 i, 1; add.f32 $0, $1, i;", "'i' in 'add.f32 $0, $1, i' is declared s32, expected f32"),
    (P + SET + "add.f32 $0, $1, p;", "'p' in 'add.f32 $0, $1, p' is declared pred, expected f32"),
    (P + "@t mov.f32 $0, $1;", "'t' in '@t mov.f32 $0, $1' is declared f32, expected pred"),
    ("add.f32 $0, $1, 1;", "'1' in 'add.f32 $0, $1, 1' is no number of type f32"),
    (P + "mov.s32 i, 1.0; mov.f32 $0, $1;", "'1.0' in 'mov.s32 i, 1.0' is no number of type s32"),
    ("and.b32 $0, $1, 077;", "'077' in 'and.b32 $0, $1, 077' is no number of type b32"),
    ("fma.rn.f32 $0, $1, $1;", "'fma.rn.f32' in 'fma.rn.f32 $0, $1, $1' takes 4 operands"),
    (P + ".reg .b32 t; mov.f32 $0, $1;", "'t' in '.reg .b32 t' is declared already"),
    ("mov.f32 1.0, $1;", "'1.0' in 'mov.f32 1.0, $1' is not declared"),
    # Instructions that are not evaluated: of PTX, and of nothing.
    ("add.f64 $0, $1, $1;", "does not take 'add.f64 $0, $1, $1'"),
    ("tanh.approx.ftz.f32 $0, $1;", "does not take"),
    ("add.ftz.rn.f32 $0, $1, $1;", "does not take"),
    ("sqrt.f32 $0, $1;", "does not take"),
    ("abs.f32 $0,\N{NO-BREAK SPACE}$1\N{ARABIC-INDIC DIGIT ONE};", "ptx()"),
])  # fmt: skip
def test_what_is_not_set_or_of_another_type_is_refused(code: str, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        asinh(code)
    assert said in caught.value.message and "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [
    P + SET + "@p mov.f32 $0, $1; @!p neg.f32 $0, $1;",
    P + SET + "@!p mov.f32 $0, $1; @p neg.f32 $0, $1;",
    P + SET + "mov.f32 $0, $1; @p neg.f32 $0, $1;",
    P + SET + "@p neg.f32 t, $1; @p mov.f32 $0, t; @!p mov.f32 $0, $1;",
])  # fmt: skip
def test_complementary_writes_set_a_register(code: str) -> None:
    graph = asinh(code).graph
    x = torch.tensor([-2.0, 0.0, 3.0])
    got = operation(graph.nodes[graph.outputs["O"]].op).torch(x)
    first_negated = "@!p neg" in code
    want = torch.tensor([-2.0, -0.0, -3.0]) if first_negated else torch.tensor([2.0, 0.0, 3.0])
    assert got.tolist() == want.tolist()


def test_the_refusal_of_an_instruction_says_how_it_is_written() -> None:
    with pytest.raises(ProgramError) as caught:
        asinh("fma.f32 $0, $1, $1, $1;")
    assert "fma(.rn|.rz|.rm|.rp){.ftz}{.sat}.f32" in caught.value.hint


def test_symlog_keeps_the_digits_of_small_arguments() -> None:
    program = load_kernel(GENERATED / "gemm_symlog").programs["gemm_symlog"]
    z = torch.cat([2.0 ** torch.arange(-148.0, 100.0), torch.tensor([0.0, 0.124999, 0.125])])
    z = torch.cat([z, -z])
    got = interpret(
        program, torch.zeros(1, 8), torch.zeros(len(z), 8), {"bias": z},
        dtypes={"O": torch.float32},
    )["O"][0].double()  # fmt: skip
    want = z.double().abs().log1p().copysign(z.double())
    assert ((got - want).abs() <= 2.0**-20 * want.abs() + 2.0**-149).all()


def test_several_statements_with_registers_of_their_own() -> None:
    use_cache()
    built(asinh(SOFT))


def test_bad_use() -> None:
    with pytest.raises(ProgramError, match=r"no meaning torch\.load"):
        ptx("load", "abs.f32 $0, $1;", 1.0)
    with pytest.raises(ProgramError, match=r"got 2 values, torch\.asinh takes 1"):
        ptx("asinh", "abs.f32 $0, $1;", 1.0, 2.0)
    with pytest.raises(ProgramError, match="at least one value"):
        ptx("asinh", "abs.f32 $0, $1;", 1.0)

    with pytest.raises(ProgramError, match="has no rule"):

        @epilogue(O=Tile)
        def program(acc: Any) -> Any:
            return {"O": derivative(lambda x: ptx("asinh", "abs.f32 $0, $1;", x), acc)}


@pytest.mark.parametrize("name", MEANINGS)
def test_meanings_are_elementwise_functions_of_torch(name: str) -> None:
    x = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(2, 3)
    got = getattr(torch, name)(*[x] * MEANINGS[name])
    assert got.shape == x.shape and got.dtype == x.dtype
