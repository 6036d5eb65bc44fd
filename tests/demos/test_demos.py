"""Demonstrations: each is in the candidate language and equals its reference, at a ragged size."""

import ast
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import coda_agent.primitives as vocabulary
from coda_agent.demos import END, Demo, demos
from coda_agent.primitives import Program
from coda_agent.primitives.interpret import interpret
from tests.meanings import wide

DEMOS = demos()
M, N, K = 77, 272, 64
EACH = pytest.mark.parametrize("demo", DEMOS, ids=[d.name for d in DEMOS])
BLOCKS = pytest.mark.parametrize("block", [128, 192])


def draw(demo: Demo, seed: int = 0) -> dict[str, Any]:
    n = -(-N // demo.n_multiple) * demo.n_multiple
    return demo.inputs(torch.Generator().manual_seed(seed), M, n, K)


def run(
    demo: Demo, values: dict[str, Any], block: int, dtype: torch.dtype, compute: torch.dtype
) -> dict[str, torch.Tensor]:
    results: dict[str, torch.Tensor] = {}
    for program in demo.programs:
        dtypes = {o: dtype for o in program.outputs}
        a, b = values["A"], values["B"]
        results |= interpret(program, a, b, values, dtypes=dtypes, block=block, compute=compute)
    return results


@EACH
def test_text_is_complete(demo: Demo) -> None:
    assert demo.summary.endswith(".")
    assert demo.text.count(END) == 1
    assert demo.programs and demo.why
    assert len(demo.text.splitlines()) <= 100
    ast.parse(demo.candidate)


@EACH
def test_its_text_is_read_as_python_runs_it(demo: Demo) -> None:
    module = importlib.import_module(f"coda_agent.demos.{demo.name}")
    ran = [p.to_dict() for p in vars(module).values() if isinstance(p, Program)]
    assert ran == [p.to_dict() for p in demo.programs]


@EACH
def test_operands_and_outputs_match_inputs_and_reference(demo: Demo) -> None:
    values = draw(demo)
    assert values["A"].dtype == values["B"].dtype == torch.bfloat16
    given = {o for p in demo.programs for o in (*p.operands, p.accumulated) if o}
    assert given | {"A", "B"} == set(values)
    assert set(demo.unusual(torch.Generator(), M, N)) <= set(values)
    outputs = [o for p in demo.programs for o in p.outputs]
    assert len(outputs) == len(set(outputs))
    assert set(demo.reference(**wide(values))) == set(outputs)


@EACH
@BLOCKS
def test_float64_equals_the_reference(demo: Demo, block: int) -> None:
    values = draw(demo)
    expected = demo.reference(**wide(values))
    got = run(demo, values, block, torch.float64, torch.float64)
    for o, want in expected.items():
        assert got[o].shape == want.shape, o
        assert got[o].dtype == torch.float64
        torch.testing.assert_close(
            got[o], want, rtol=1e-10, atol=1e-10, msg=lambda m, o=o: f"{o}: {m}"
        )


@EACH
@BLOCKS
def test_float32_and_bfloat16_are_within_bounds(demo: Demo, block: int) -> None:
    values = draw(demo, seed=1)
    expected = demo.reference(**wide(values))
    single = run(demo, values, block, torch.float32, torch.float32)
    rounded = run(demo, values, block, torch.bfloat16, torch.float32)
    for o, want in expected.items():
        scale = want.abs().max()
        assert (single[o].double() - want).abs().max() <= 1e-5 * scale, o
        slack = 2**-8 * want.abs() + 1e-5 * scale  # half a unit in the last place of bfloat16
        if o in values:  # what is added was rounded already
            slack += 2**-8 * (want - values[o]).abs()
        assert ((rounded[o].double() - want).abs() <= slack).all(), o


@EACH
def test_outputs_are_not_degenerate(demo: Demo) -> None:
    for o, value in demo.reference(**wide(draw(demo))).items():
        assert value.isfinite().all(), o
        assert value.std() > 1e-2 * value.abs().max(), o


def test_together_they_use_the_whole_vocabulary() -> None:
    used = {
        node.id
        for demo in DEMOS
        for node in ast.walk(ast.parse(demo.candidate))
        if isinstance(node, ast.Name)
    }
    assert set(vocabulary.__all__) - used == {"Program"}  # what the decorator makes, never written


def test_programs_are_all_different() -> None:
    digests = [p.digest for d in DEMOS for p in d.programs]
    assert len(digests) == len(set(digests))


def test_listing_them_imports_neither_torch_nor_cutlass() -> None:
    code = (
        "import sys; from coda_agent.demos import demos; assert len(demos()) > 10; "
        "print({'torch', 'cutlass', 'quack'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
