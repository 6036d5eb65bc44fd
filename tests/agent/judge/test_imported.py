"""The last word of a verdict: the function that a user imports, called on the spec's own inputs."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.execution.local import Local
from coda_agent.agent.judge import GateResult, Terms
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.judge.imported import check_imported, imported
from coda_agent.agent.judge.walk import Walk
from coda_agent.primitives import (
    ColIndex,
    ColVector,
    Program,
    RowGather,
    RowSum,
    RowVector,
    Tile,
    epilogue,
    gather,
)
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import Spec, load_spec

SPECS = Path(__file__).parents[3] / "specs"
TYPES = ["bfloat16", "float16"]


@epilogue(O=Tile)
def gemm_rmsnorm(acc, r: ColVector):
    return {"O": acc * r}


@pytest.fixture
def spec() -> Spec:
    return load_spec(SPECS / "gemm_rmsnorm.md")


def call(spec: Spec, program: Program = gemm_rmsnorm, types: list[str] | None = None) -> list[str]:
    kernel = imported(spec, {program.name: program})
    found = check_imported(kernel, types or TYPES, device="cpu", seed=secrets.randbits(62))
    assert all(f.where["program"] == spec.name for f in found)
    return [f"{f.where['dtype']}: {f.message}" for f in found]


def with_input(spec: Spec, name: str, **changes: Any) -> Spec:
    return spec.model_copy(
        update={"inputs": {**spec.inputs, name: spec.inputs[name].model_copy(update=changes)}}
    )


def test_a_right_function_says_nothing(spec: Spec) -> None:
    assert call(spec) == []


def test_wrong_numbers_are_found(spec: Spec) -> None:
    @epilogue(O=Tile)
    def gemm_rmsnorm(acc, r: ColVector):
        return {"O": acc * r * 1.05}

    said = call(spec, gemm_rmsnorm)
    assert [s.partition(":")[0] for s in said] == TYPES
    assert all("the function that would be imported gives a wrong O: error" in s for s in said)


def test_inputs_that_the_function_refuses_are_found(spec: Spec) -> None:
    # Copies are not parsed, which would refuse these: the call does not rely on it.
    cast = spec.reference_source.replace("B.T", "B.to(A.dtype).T")
    mixed = with_input(spec, "B", dtype="float16").model_copy(update={"reference_source": cast})
    (said,) = call(mixed, types=["bfloat16"])
    assert "refuses the spec's inputs: gemm_rmsnorm" in said and "expected one dtype" in said
    dims = {name: dim.model_copy(update={"multiple_of": 1}) for name, dim in spec.dims.items()}
    odd = spec.model_copy(update={"dims": dims, "check_shapes": ({"M": 9, "N": 297, "K": 149},)})
    (said,) = call(odd, types=["bfloat16"])
    assert "N, K = 297, 149, expected positive, N a multiple of 8 and K of 8" in said


def test_another_type_than_declared_is_found(spec: Spec) -> None:
    output = {"O": spec.outputs["O"].model_copy(update={"dtype": "S"})}
    types = {**spec.types, "S": spec.types["T"]}
    said = call(spec.model_copy(update={"types": types, "outputs": output}))
    (size, *_) = sorted(spec.check_shapes, key=lambda s: s["M"] * s["N"] * s["K"])
    shape = size["M"], size["N"]
    wanted = f"gives O as bfloat16 {shape}, expected float16 {shape}"
    assert said == [f"float16: the function that would be imported {wanted}"]


def test_a_verdict_ends_with_the_call(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(spec, "", Local(), Terms("cpu"), lambda *_: None)
    walk.programs = {"gemm_rmsnorm": gemm_rmsnorm}
    right = GateResult(name="numerics", passed=True)
    walk._numerics(right)
    assert right.findings == []
    honest = Kernel.__call__
    monkeypatch.setattr(
        Kernel, "__call__", lambda self, *args, **given: 2 * honest(self, *args, **given)
    )
    wrong = GateResult(name="numerics", passed=True)
    walk._numerics(wrong)
    assert [f.where["dtype"] for f in wrong.findings] == TYPES
    assert "gives a wrong O" in wrong.findings[0].message


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "refused"),
    [
        (Tile, ("M", "N"), "float32", False),
        (Tile, ("M", "N"), "float16", False),
        (Tile, ("M", "N"), "float8_e4m3fn", True),
        (Tile, ("M", "N"), "int32", True),
        (RowVector, ("N",), "float32", False),
        (RowVector, ("N",), "int64", True),
    ],
)
def test_element_types_of_operands(
    spec: Spec, kind: Any, shape: tuple[str, ...], dtype: str, refused: bool
) -> None:
    def gemm_rmsnorm(acc, r):
        return {"O": acc * r}

    gemm_rmsnorm.__annotations__["r"] = kind
    program = epilogue(O=Tile)(gemm_rmsnorm)
    given = spec.inputs["r"].shape._replace(cases={"": shape})
    found = check_signature(
        with_input(spec, "r", shape=given, dtype=dtype), {program.name: program}
    )
    wanted = "16-bit" if not refused else f"the spec declares {dtype}"
    assert [wanted in f.message for f in found] == [True] * refused


def test_a_16_bit_vector_is_gathered_and_not_reduced(spec: Spec) -> None:
    @epilogue(O=RowGather)
    def gathers(acc, r: ColIndex):
        return {"O": gather(acc, r)}

    @epilogue(O=RowSum)
    def sums(acc, r: ColVector):
        return {"O": acc * acc * r}

    vector = spec.outputs["O"].model_copy(update={"shape": spec.inputs["r"].shape})
    narrow = spec.model_copy(update={"outputs": {"O": vector}})
    indexed = with_input(narrow, "r", dtype="int64")
    assert check_signature(indexed, {"gemm_rmsnorm": gathers}) == []
    (finding,) = check_signature(narrow, {"gemm_rmsnorm": sums})
    assert finding.message == "sums: O is RowSum, of float32; the spec declares bfloat16, float16"


def test_a_float32_tile_operand_is_read_unrounded() -> None:
    @epilogue(O=Tile)
    def summed(acc, C: Tile):
        return {"O": acc + C}

    from coda_agent.runtime.function import ProgramFunction, untuned

    a, b = torch.ones(3, 8).bfloat16(), torch.ones(8, 8).bfloat16()
    c = torch.full((3, 8), 2.0**-12)
    function = ProgramFunction(summed, {"O": "float32"}, untuned)
    assert torch.equal(function(a, b, {"C": c})["O"], torch.full((3, 8), 8 + 2.0**-12))
