"""Evidence: short enough to read, renewed gate by gate, and whole in its raw records."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coda_agent.agent import evidence as module
from coda_agent.agent import workspace
from coda_agent.agent.accept import accept
from coda_agent.agent.evidence import Compiled, Evidence, keep_raw, raw_path
from coda_agent.agent.judge import provenance, rules
from coda_agent.agent.judge.records import (
    GATES,
    CompiledKernel,
    CompileReport,
    Finding,
    GateResult,
    NumericsReport,
    PerformanceReport,
    Rates,
    Ratio,
    RefusedTile,
    Timed,
    Timing,
    Verdict,
    WorstError,
)
from coda_agent.evals import archive
from coda_agent.primitives.errors import CodaError, WorkspaceError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

ROOT = Path(__file__).parents[2]
TOOLS = {"nvidia-cutlass-dsl": "4", "quack-kernels": "0"}
NOW = {"spec": "sha256:s", "candidate": "sha256:c", "judge": "sha256:j"}
NOW["toolchain"] = provenance.toolchain(TOOLS)
GPU = {"device": "cuda", "gpu": {"name": "H", "driver_version": "1", "power.draw": "3"},
       "packages": TOOLS, "sandbox": {"tier": "landlock", "missing": {}}}  # fmt: skip
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
        "performance": PerformanceReport(program="k", cells=(timed(us),)),
    }  # fmt: skip
    names = GATES[: GATES.index(last) + 1]
    gates = [
        GateResult(name=n, passed=True, rules=rules.versions(n), data=reports.get(n)) for n in names
    ]
    gates[-1].skipped = "needs a Hopper GPU" if cpu and last == "performance" else None
    gates[-1].passed = not failed
    gates[-1].findings = [Finding(message="too slow")] * failed
    level = "proved" if cpu else "accepted" if last == "performance" else "verified"
    return Verdict.model_validate({
        "passed": not failed, "level": None if failed else level, "gates": gates,
        "environment": where, "digests": {**NOW, **digests},
    })  # fmt: skip


def made(verdict: Verdict, date: str = "2026-01-01T00:00:00Z") -> Evidence:
    level = verdict.level or "revoked"
    return Evidence.of(verdict, kernel="k", level=level, author="a", run=date, date=date)


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Raises a rule's version in the lock."""

    def raise_(name: str) -> None:
        entry = rules.lock()[name]
        monkeypatch.setitem(
            rules.lock(), name, entry.model_copy(update={"version": entry.version + 1})
        )

    return raise_


LATER = "2026-02-02T00:00:00Z"


def test_it_reads_itself_back_and_is_short() -> None:
    for name in (p.parent.name for p in (ROOT / "generated").glob("*/evidence.json")):
        text = (ROOT / "generated" / name / "evidence.json").read_text("utf-8")
        found = Evidence.model_validate_json(text)
        assert found.kernel == name and found.text() == text and len(text.splitlines()) <= 80
    first = made(judged())
    assert Evidence.model_validate_json(first.text()) == first and first.text() == first.text()
    assert first.machines == {"H": module.Machine.of(GPU)} and "power" not in first.text()
    assert "times_us" not in first.text() and first.compiled and first.compiled.kernels == 30


@pytest.mark.parametrize("rule", ["numerics", "performance", "lowering", "language", "static"])
def test_a_raised_rule_makes_its_gates_due_and_those_before(raised: Any, rule: str) -> None:
    first = made(judged())
    assert first.stale(NOW) == {} and first.due(NOW, gpu=True) == first.due(NOW, gpu=False) == ()
    raised(rule)
    gates = [gate for gate in GATES if rule in rules.involved(gate)]
    assert first.stale(NOW) == {gate: [rule] for gate in gates}
    assert first.due(NOW, gpu=True) == GATES[: GATES.index(gates[-1]) + 1]


def test_numerics_are_given_again_and_timings_stay(raised: Any) -> None:
    first = made(judged())
    raised("numerics")
    again = first.renewed(made(judged("numerics", ratio=0.7, where={**GPU, "cuda": "14"}), LATER))
    assert again and again.level == "accepted" and again.cells == first.cells
    assert again.worst["k bfloat16"].ratio == 0.7 and len(again.refused_tiles) == 1
    dates = {name: gate.date for name, gate in again.gates.items()}
    assert dates == {**dict.fromkeys(GATES, first.date), "numerics": LATER}
    machines = {name: again.machines[gate.machine].cuda for name, gate in again.gates.items()}
    assert machines == {**dict.fromkeys(GATES, None), "numerics": "14"}
    assert again.stale(NOW) == {} and again.date == LATER
    assert Evidence.model_validate_json(again.text()) == again


def test_timings_are_taken_again_and_numerics_stay(raised: Any) -> None:
    first = made(judged())
    raised("performance")
    again = first.renewed(made(judged(us=20.0, ratio=0.9), LATER))
    assert again and again.cells[0].times and again.cells[0].times["ours"].median_us == 20.0
    assert again.worst == first.worst and again.gates["numerics"] == first.gates["numerics"]
    assert list(again.machines) == ["H"] and again.stale(NOW) == {}


def test_what_stands_is_not_replaced(raised: Any) -> None:
    first = made(judged())
    assert first.renewed(made(judged(us=20.0), LATER)) is None
    # A machine without a GPU contradicts nothing, and renews nothing that a GPU showed.
    assert first.renewed(made(judged(where=CPU), LATER)) is None
    raised("numerics")
    assert first.renewed(made(judged(where=CPU), LATER)) is None
    raised("static")
    again = first.renewed(made(judged(where=CPU), LATER))
    assert again and again.level == "accepted" and again.ran == "compiled kernel"
    assert again.gates["static"].machine == "CPU" and list(again.stale(NOW)) == ["numerics"]


def test_a_gpu_shows_more_and_another_program_or_a_refusal_all(raised: Any) -> None:
    proved = made(judged(where=CPU))
    assert list(proved.gates) == ["static", "compile", "numerics"]
    assert proved.due(NOW, gpu=False) == () and proved.due(NOW, gpu=True) == GATES
    risen = proved.renewed(made(judged(), LATER))
    assert risen and risen.level == "accepted" and risen.gates["compile"].machine == "H"
    other = made(judged(where=CPU, candidate="sha256:other"), LATER)
    assert risen.renewed(other) == other
    refused = made(judged(failed=True), LATER)
    assert risen.renewed(refused) == refused and refused.gates["performance"].findings
    assert refused.renewed(refused) is None and refused.due(NOW, gpu=True) == GATES
    assert refused.renewed(proved) == proved


def test_another_toolchain_or_program_is_named(raised: Any) -> None:
    first = made(judged())
    found = first.stale({**NOW, "toolchain": "sha256:other"})
    assert found == {gate: ["toolchain"] for gate in GATES[1:]}
    assert first.stale({**NOW, "candidate": "sha256:x"}) == {g: ["candidate"] for g in GATES}
    assert first.stale({**NOW, "judge": "sha256:other"}) == {}


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
    assert stored(9.0, 192) == (10.0, 128)  # the verdict stands: nothing is renewed
    raised("numerics")
    assert stored(8.0, 192) == (10.0, 128)  # nor where another gate is
    raised("performance")
    assert stored(7.0, 192) == (7.0, 192)
    assert where.git("log", "-1", "--format=%s") == "Accept k (accepted): O_{m, n} = {}"


def test_raw_records_are_whole_and_packed(tmp_path: Path) -> None:
    where, _ = workspace.init(tmp_path)
    verdict = judged()
    found = made(verdict)
    keep_raw(where.root, verdict, found)
    folder = where.generated / "k"
    folder.mkdir()
    (folder / "evidence.json").write_text(found.text())
    path = archive.pack_kernels(where)
    assert list(archive.read(path)) == [f"k/{gate}.json" for gate in sorted(GATES[1:])]
    for gate in GATES[1:]:
        raw_path(where.root, str(found.gates[gate].raw)).unlink()
    assert archive.problems(where) == [] and archive.pack_kernels(where) == path
    whole = archive.raw(where, where.kernel("k"))
    assert (
        whole["performance"]["gate"]["data"]["cells"][0]["times"]["ours"]["times_us"] == [10] * 50
    )
    assert whole["numerics"]["environment"]["gpu"]["power.draw"] == "3"
    path.unlink()
    assert archive.raw(where, where.kernel("k")) == {}
    assert archive.problems(where) == ["k: no raw record of compile, numerics, performance"]
    with pytest.raises(CodaError, match="no raw record of compile is left"):
        archive.pack_kernels(where)


def test_the_archive_of_this_repository_is_complete() -> None:
    where = workspace.find(ROOT)
    if not archive.found(archive.KERNELS, ROOT / archive.FOLDER):
        pytest.skip("no archive is here")
    assert archive.problems(where) == []


def test_a_place_for_raw_records_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    verdict = judged()
    with pytest.raises(WorkspaceError, match="raw records could not be written"):
        keep_raw(tmp_path, verdict, made(verdict))


def test_json_is_valid_where_an_error_is_infinite() -> None:
    text = made(judged(ratio=float("inf"))).text()
    assert json.loads(text)["worst"]["k bfloat16"]["ratio"] == "inf"
    assert Evidence.model_validate_json(text).worst["k bfloat16"].ratio == float("inf")
