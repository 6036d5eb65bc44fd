"""What PyTorch runs on a CPU in Inductor's place is what Inductor can lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from coda_agent.fuse import backend


@pytest.fixture(autouse=True)
def inductor_lowers_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find calls in graphs that Inductor decomposes: after the pass it is too late for them."""
    called = backend._called

    def checked(module: fx.GraphModule, *rest: Any, **options: Any) -> Any:
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.lowering import lowerings

        known, table = {*lowerings}, {*select_decomp_table()}
        ops = {n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
        assert not ops & table - known
        return called(module, *rest, **options)

    monkeypatch.setattr(backend, "_called", checked)
