"""Host time of a call and its parts, with a launch of known length."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coda_agent import generated
from coda_agent.evals import host_time
from coda_agent.primitives import function, plan
from coda_agent.primitives.launch import Arguments, Bound


def test_parts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(given: Arguments) -> Bound:
        def slowly(*_: Any) -> None:
            time.sleep(2e-3)

        return Bound(given.program, given.config, slowly)

    monkeypatch.setattr(function, "supported", lambda _: True)
    monkeypatch.setattr(plan, "bind", bind)
    monkeypatch.setattr(plan.Finish, "__call__", lambda *_: time.sleep(1e-3))
    kernel = generated.gemm_residual_partial_rmsnorm
    for variant in kernel.variants.values():
        monkeypatch.setattr(variant.recent, "_kept", {})
        monkeypatch.setitem(vars(variant.function), "plans", {})
    found = host_time.measure(kernel, device="cpu", compiled=False, rounds=2)
    assert found.kernel == "gemm_residual_partial_rmsnorm"
    assert (found.outputs, found.limit_us) == (3, 40.0)
    us = found.median_us
    assert us["launch"] >= 2000 and us["folds"] >= 1000 and us["call"] >= 3000
    assert all(0 < us[part] < 1000 for part in ("lookup", "allocation", "mm"))
    header, line = host_time.table([found])
    assert dict(zip(header, line, strict=True))["compiled"] == "–"
    assert line[:3] == ["gemm_residual_partial_rmsnorm", "3", "40"]
