"""What the kernel of gradients compiles to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coda_agent.primitives.gradient import PRODUCT, Gradient
from coda_agent.primitives.kinds import Operand
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import ColVector, Scalar
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.gradient_pass import GradientPass
from coda_agent.runtime.target import resources, sass, target
from coda_agent.runtime.unfused import forget
from tests.primitives.test_gradient import added, gate, head, wide

BLOCK = TileConfig(8, 1024, fused=False)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import quack.cache

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    forget()
    yield


def dtype_of(o: str, kind: type[Operand]) -> torch.dtype:
    if o == "y":  # columns, of a cross-entropy's targets
        return torch.int64
    return torch.float32 if kind in (ColVector, Scalar) else torch.bfloat16


@pytest.mark.parametrize("program", [gate, head, added, wide], ids=lambda p: p.name)
@pytest.mark.one_in(4)
def test_every_kind_compiles_into_wide_accesses(program: Program, tmp_path: Path) -> None:
    wanted = (PRODUCT, *(o for o in program.operands if o != "y"))
    stored = [o for o in program.outputs if o in "DZ"]
    found = GradientPass.of(Gradient.of(program, wanted, tuple(program.outputs), stored))
    assert found is not None
    types = [torch.float32 if found.first == PRODUCT else torch.bfloat16]
    types += [dtype_of(o, kind) for o, kind in found.program.operands.items()]
    sums = found.program.reductions
    types += [torch.float32 if o in sums else torch.bfloat16 for o in found.program.outputs]
    with target("sm_90a"):
        found._kernel(BLOCK, tuple(types))
    (made,) = tmp_path.rglob("*.o")
    used, text = resources(made), sass(made)
    assert used["stack_bytes"] == used["local_stores"] == used["mma_instructions"] == 0
    assert 0 < used["registers"] <= 168  # three CTAs of 128 threads an SM
    # Rows of a tile are read and written in units of 16 bytes, of half width in those of 8.
    assert text.count("STG.E.128") >= 4 and text.count("LDG.E.128") >= 4
    half = any(kind.dims == ("M", "N/2") for kind in found.program.operands.values())
    assert ("LDG.E.64" in text) >= half
    assert "STG.E.U16" not in text and "LDG.E.U16" not in text
