"""An operation added to the vocabulary, as CONTRIBUTING says: its definition is all that is needed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import coda_agent.primitives as vocabulary
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge import disturbance
from coda_agent.primitives import Program, RowSum, Tile, derivative, epilogue
from coda_agent.primitives.derivatives import chained
from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.lower import Replay
from coda_agent.primitives.operation import OPS, elementwise, kept
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.target import Tensors, compile_blind
from coda_agent.specs import load_spec

SPEC = """---
name: angles
level: compose
summary: The angles whose tangents a product holds.
dims: {M: {}, N: {multiple_of: 8}, K: {multiple_of: 8}}
gemm: [A, B]
inputs:
  A: {shape: [M, K], dtype: bfloat16}
  B: {shape: [N, K], dtype: bfloat16}
outputs:
  O: {shape: [M, N], dtype: bfloat16}
check_shapes: [{M: 64, N: 64, K: 64}]
bench_shapes: [{M: 64, N: 64, K: 64}]
tolerance: {multiple: 2}
target: 0.9
---
```python reference
def reference(A, B):
    return {"O": ((A.float() @ B.float().T).atan() * 2.0).to(A.dtype)}
```
"""


def lowered(x: Any) -> Any:
    from cutlass import cute

    return cute.math.atan(x, fastmath=True)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def atan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The whole definition, and what naming it in `__all__` of its module does; the vocabulary's
    own is taken away."""
    monkeypatch.delitem(OPS, "atan")
    others = [name for name in vocabulary.__all__ if name != "atan"]

    @elementwise(
        lowered,
        flops=12,
        derivative=chained(lambda z, x: 1.0 / (1.0 + x * x)),
        edge=kept,
        error="range",
        aten=("atan",),
    )
    def atan(x: Any) -> Any:
        """The angle in radians, between -π/2 and π/2, whose tangent is x."""
        return x.atan()

    monkeypatch.setattr(vocabulary, "atan", atan, raising=False)
    monkeypatch.setattr(vocabulary, "__all__", [*others, "atan"])
    disturbance.errors.cache_clear()
    yield atan
    del OPS["atan"]
    disturbance.errors.cache_clear()


@pytest.fixture
def program(atan: Any) -> Program:
    @epilogue(O=Tile, s=RowSum)
    def angles_backward(acc, C: Tile):
        return {"O": acc * derivative(atan, C), "s": atan(acc)}

    return angles_backward


def test_it_is_traced_and_crosses_processes(program: Program) -> None:
    assert [n.op for n in program.graph.nodes].count("atan") == 1
    assert Program.from_dict(program.to_dict()).digest == program.digest
    # The function 12; its derivative a product, a sum and a quotient of 2, and a product.
    assert inspect_program(program, (1, 2, 1)).epilogue_flops == 2 * (12 + 5 + 1)


def test_it_is_interpreted_and_differentiated(program: Program) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*s, generator=generator).double() for s in ((6, 8), (16, 8), (6, 16)))
    got = interpret(program, a, b, {"C": c}, dtypes={}, compute=torch.float64)
    c.requires_grad_()
    c.atan().backward(a @ b.mT)
    torch.testing.assert_close(got["O"], c.grad)
    torch.testing.assert_close(got["s"], (a @ b.mT).atan().sum(1))


def test_it_is_computed_of_numbers(atan: Any) -> None:
    assert atan(1) == pytest.approx(0.7853981633974483)


def test_it_is_composed_from_its_aten_name() -> None:
    spec = load_spec("angles.md", text=SPEC)
    source = Composer().write(spec, lambda *_: None)
    assert 'return {"O": 2.0 * atan(acc)}' in source
    assert [*read_programs(source)] == ["angles"]


def test_the_judge_knows_how_it_errs() -> None:
    assert disturbance.errors()["atan"] == "range"


def test_it_is_lowered(program: Program) -> None:
    assert not Replay(program, 0).masked  # 0 past the last column
    types = {o: "float32" if o == "s" else "bfloat16" for o in ("O", "s", "C")}
    config = DEFAULT_CONFIGS["sm_90a"]
    tensors = Tensors("bfloat16", types, types)
    assert compile_blind(program, config, "sm_90a", tensors)["registers"] > 0
