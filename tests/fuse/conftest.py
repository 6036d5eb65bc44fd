"""What PyTorch runs on a CPU in Inductor's place is what Inductor can lower."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from torch import fx

from coda_agent.fuse import backend


@lru_cache(maxsize=1)
def _decomposed() -> frozenset[Any]:
    """List calls that Inductor decomposes, and cannot lower."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    return frozenset({*select_decomp_table()} - {*lowerings})


@pytest.fixture(autouse=True)
def inductor_lowers_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find calls in graphs that Inductor decomposes: after the pass it is too late for them."""
    called = backend._called

    def checked(module: fx.GraphModule, *rest: Any, **options: Any) -> Any:
        assert _decomposed().isdisjoint(node.target for node in module.graph.nodes)
        return called(module, *rest, **options)

    monkeypatch.setattr(backend, "_called", checked)
