"""Evidence: short enough to read, and one verdict as a whole."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coda_agent.agent import workspace
from coda_agent.agent.accept import accept
from coda_agent.agent.evidence import Evidence
from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import (
    GATES,
    VERSIONS,
    CompiledKernel,
    CompileReport,
    Finding,
    NumericsReport,
    PerformanceReport,
    Rates,
    Ratio,
    RefusedTile,
    Timed,
    Timing,
    WorstError,
)
from coda_agent.agent.judge.verdict import GateResult, Verdict
from coda_agent.agent.judgement import Compiled, Judgement, Machine
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

ROOT = Path(__file__).parents[2]
TOOLS = {"nvidia-cutlass-dsl": "4", "quack-kernels": "0"}
NOW = {"spec": sha("s"), "candidate": sha("c")}
GPU = {"device": "cuda", "gpu": {"name": "H", "driver_version": "1", "power.draw": "3"},
       "packages": TOOLS}  # fmt: skip
CPU = {"device": "cpu", "packages": TOOLS}


def test_what_spills_is_recorded_and_what_spills_too_much_is_refused() -> None:
    about: dict[str, Any] = {"program": "k", "dtype": "bfloat16"}
    kernels = (
        CompiledKernel(**about, arch="sm_90a", tile="a", registers=168, local_stores=40),
        CompiledKernel(**about, arch="sm_90a", tile="a", registers=168, local_stores=90),
        CompiledKernel(**about, arch="sm_90a", tile="b", registers=168, local_stores=0),
        CompiledKernel(**about, arch="sm_90a", tile="c", local_stores=900, error="spills: 900"),
        CompiledKernel(**about, arch="sm_100a", tile="d", error="does not compile"),
    )
    report = CompileReport(kernels=kernels, programs={})
    assert Compiled.of(report).spills == {"a": 90}
    (refused,) = GateResult(name="compile", passed=True, data=report).refused_tiles
    assert (refused.tile, refused.fault) == ("c", "spills: 900")


def timed(median_us: float) -> Timed:
    timing = Timing(median_us=median_us, interval_us=(1, 2), times_us=(median_us,) * 50)
    ratio = Ratio(ratio=1.0, low=0.9, high=1.1)
    config = DEFAULT_CONFIGS["sm_90a"]
    return Timed(
        of_gemm=ratio, over_compile=ratio, times=dict.fromkeys(("ours", "gemm"), timing),
        dtype="bfloat16", sizes={"M": 8}, config=config, tile=config.label, tflops=1, floor_us=1,
        ceiling=Rates(tflops=1, gbytes_s=1), launches=(1,), mismatches=0, finalists_us={}, gpu={},
    )  # fmt: skip


def judged(last: str = "performance", *, ratio: float = 0.5, us: float = 10.0, failed: bool = False,
           where: dict[str, Any] = GPU, **digests: str) -> Verdict:  # fmt: skip
    """A verdict of the gates up to the `last`, which refuses where it `failed`."""
    cpu = where is CPU
    tile = RefusedTile(program="k", dtype="bfloat16", tile="t", fault="O is wrong")
    kernel = CompiledKernel(program="k", arch="sm_90a", dtype="bfloat16", tile="t", registers=168)
    reports = {
        "compile": CompileReport(kernels=(kernel,) * 30, programs={}),
        "numerics": NumericsReport(
            ran="interpreter" if cpu else "compiled kernel", shapes=(),
            worst={"k bfloat16": WorstError(seed=1, ratio=ratio)}, refused_tiles=(tile,),
        ),
        "performance": None if cpu else PerformanceReport(program="k", cells=(timed(us),)),
    }  # fmt: skip
    gates = [
        GateResult(name=n, passed=True, version=VERSIONS[n], seconds=1.5, data=reports.get(n))
        for n in GATES[: GATES.index(last) + 1]
    ]
    gates[-1].skipped = "needs a Hopper GPU" if cpu and last == "performance" else None
    gates[-1].passed = not failed
    gates[-1].findings = [Finding(message="too slow")] * failed
    level = "proved" if cpu else "accepted" if last == "performance" else "verified"
    return Verdict.model_validate({
        "passed": not failed, "level": None if failed else level, "gates": gates,
        "environment": where, "digests": {**NOW, **digests},
    })  # fmt: skip


def made(verdict: Verdict) -> Evidence:
    return Evidence.of(verdict, kernel="k", author="a", run="r")


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Raises a gate's version, as the commit does that changes what the gate decides."""
    return lambda gate: monkeypatch.setitem(VERSIONS, gate, VERSIONS[gate] + 1)


def test_it_reads_itself_back_and_is_short() -> None:
    for name in (p.parent.name for p in (ROOT / "generated").glob("*/evidence.json")):
        text = (ROOT / "generated" / name / "evidence.json").read_text("utf-8")
        found = Evidence.model_validate_json(text)
        assert found.kernel == name and found.text() == text and len(text.splitlines()) <= 80
        assert found.level == "accepted" and found.passed
    first = made(judged())
    assert Evidence.model_validate_json(first.text()) == first and first.text() == first.text()
    assert first.machine == Machine(device="cuda", gpu="H", driver="1", packages=dict(TOOLS))
    assert "power" not in first.text() and "times_us" not in first.text()
    assert first.compiled and first.compiled.kernels == 30


@pytest.mark.parametrize("gate", GATES)
def test_what_another_version_of_a_gate_said_is_stale(raised: Any, gate: str) -> None:
    first = made(judged())
    assert first.stale == [] and not first.due(NOW, gpu=True) and not first.due(NOW, gpu=False)
    raised(gate)
    assert first.stale == [gate] and first.due(NOW, gpu=False)
    again = made(judged(us=20.0))
    assert first.yields_to(again) and again.stale == []


def test_what_stands_yields_to_more_alone(raised: Any) -> None:
    first, here = made(judged()), made(judged(where=CPU))
    assert here.level == "proved" and list(here.gates) == ["static", "compile", "numerics"]
    assert not first.yields_to(made(judged(us=20.0)))
    assert here.yields_to(first) and here.due(NOW, gpu=True) and not here.due(NOW, gpu=False)
    raised("numerics")
    # A machine without a GPU contradicts nothing that a GPU showed: what is stale stays so.
    later = made(judged(where=CPU))
    assert first.stale == ["numerics"] and not first.yields_to(later)
    assert here.yields_to(later)


def test_another_program_or_a_refusal_takes_the_place_of_all() -> None:
    first = made(judged())
    other = made(judged(where=CPU, candidate=sha("other")))
    assert first.yields_to(other) and first.due(other.digests, gpu=False)
    refused = made(judged(failed=True))
    assert refused.level == "revoked" and refused.finding == "too slow"
    assert refused.failed == ["performance"] and first.yields_to(refused)
    assert not refused.yields_to(refused) and refused.due(NOW, gpu=True)
    assert refused.yields_to(made(judged(where=CPU)))


def test_logs_of_before_gates_had_versions_are_read_as_stale() -> None:
    words = {"static": "passed", "compile": "failed", "numerics": "skipped"}
    log = Judgement.model_validate({
        "passed": False, "level": None, "gates": words, "rules": {"static": {"static": "2"}},
        "digests": {**NOW, "judge": sha("j")}, "finding": "no",
        "cells": [{"dtype": "float16", "sizes": {"M": 8}, "ours_us": 1.0, "tile": "t"}],
    })  # fmt: skip
    assert log.failed == ["compile"] and log.stale == ["static", "compile"]
    assert log.mean("roofline") is None


def test_tuned_tiles_come_with_the_timings_they_are_of(
    raised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "U")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "u@example.com")
    where, _ = workspace.init(tmp_path)
    spec: Any = SimpleNamespace(name="k", summary="O_{m, n} = {}", text="# k\n")

    def stored(us: float, tile_n: int) -> tuple[Any, int]:
        config = replace(DEFAULT_CONFIGS["sm_90a"], tile_n=tile_n).to_dict()
        line = {"m": 1, "n": 1, "k": 1, "config": config, "median_us": us}
        found = judged(us=us).model_copy(update={"tuned": {"H": {"bfloat16": [line]}}})
        verdict = Verdict.model_validate(found.model_dump())
        accept(where, spec, "x\n", verdict, author="a", run_id="r")
        kernel = where.kernel("k")
        ((line,),) = kernel.tuned["H"].values()
        return kernel.evidence.cells[0].times["ours"].median_us, line["config"]["tile_n"]  # type: ignore[index]

    assert stored(10.0, 128) == (10.0, 128)
    assert stored(9.0, 192) == (10.0, 128)  # the verdict stands
    raised("numerics")
    assert stored(7.0, 192) == (7.0, 192)
    assert where.git("log", "-1", "--format=%s") == "Store k (accepted): O_{m, n} = {}"


def test_json_is_valid_where_an_error_is_infinite() -> None:
    text = made(judged(ratio=float("inf"))).text()
    assert json.loads(text)["worst"]["k bfloat16"]["ratio"] == "inf"
    assert Evidence.model_validate_json(text).worst["k bfloat16"].ratio == float("inf")
