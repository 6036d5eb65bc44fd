"""The gates together, on a machine without a GPU: what passes, what is refused, and what is said."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent import workspace
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.cli import app
from coda_agent.agent.cli.report import told
from coda_agent.agent.execution import device, executor, faulted_tiles, local
from coda_agent.agent.judge import (
    Finding,
    GateResult,
    Terms,
    Verdict,
    compile_gate,
    judge_candidate,
    meaning,
    tune_candidate,
    verdict_of,
)
from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import (
    VERSIONS,
    CompileReport,
    NumericsReport,
    PerformanceReport,
)
from coda_agent.agent.judge.variant import Variant
from coda_agent.agent.judge.walk import Walk
from coda_agent.agent.pipeline import Outcome
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import SM90_CONFIGS
from coda_agent.runtime.tuning import TunedShape
from coda_agent.specs import Spec, admit, load_spec
from tests import written

SPECS = Path(__file__).parents[2] / "specs"
IMPORTS = (
    "from coda_agent.primitives import ColVector, HalfTile, RowMean, RowVector, Tile, epilogue, "
    "exp, glu, pairs, silu, swiglu\n"
)


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(SPECS / "gemm_rmsnorm_swiglu.md")


def candidate(*body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body)
    head = "@epilogue(D=Tile, O=HalfTile)\ndef gemm_rmsnorm_swiglu(acc, r: ColVector):"
    return f"{IMPORTS}\n{head}\n{lines}\n"


RIGHT = candidate("d = acc * r", "gate, up = pairs(d)", 'return {"D": d, "O": swiglu(gate, up)}')


@pytest.mark.parametrize("missed", [None, "performance", "numerics"])
def test_only_a_candidate_that_passed_every_gate_has_a_level(
    spec: Spec, missed: str | None
) -> None:
    gpu = device.Gpu("GPU-1", "H200", "9.0")
    where: Any = SimpleNamespace(environment=lambda device: {"device": device}, gpu=lambda: gpu)
    walk = Walk(spec, RIGHT, where, Terms(), lambda *_: None)
    for name in ("static", "compile", "numerics", "performance"):
        walk.results.append(GateResult(name=name, passed=name != missed))
        if name == missed:
            break
    verdict = verdict_of(walk)
    assert verdict.passed is (missed is None)
    assert verdict.level == (None if missed else "accepted")


def test_an_architecture_that_no_program_of_groups_runs_on_is_told(spec: Spec) -> None:
    where: Any = SimpleNamespace(environment=lambda _: {}, gpu=lambda: None)
    walk = Walk(spec, RIGHT, where, Terms("cpu"), lambda *_: None)
    head = "from coda_agent.primitives import Tile, epilogue, group_max\n@epilogue(O=Tile)\n"
    text = f"{head}def k(acc):\n    return {{'O': acc - group_max(acc, 8)}}\n"
    walk.programs = read_programs(text)
    walk.results = [GateResult(name=name, passed=True) for name in ("static", "compile")]
    said = verdict_of(walk).not_shown
    assert said[1:] == ["that k compiles for sm_120a: no kernel there has statistics of groups"]


def judge(spec: Spec, text: str, **options: Any) -> Verdict:
    observer = options.pop("observer", lambda *_: None)
    options.setdefault("gates", ("static", "compile", "numerics"))
    terms = Terms("cpu", types=["bfloat16"], **options)
    return judge_candidate(spec, text, executor(), terms=terms, observer=observer)


def test_a_right_candidate_is_proved_and_says_what_was_not_shown(spec: Spec) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    verdict = judge(
        spec,
        RIGHT,
        gates=("static", "compile", "numerics", "performance"),
        observer=lambda kind, data: events.append((kind, data)),
    )
    assert verdict.passed and verdict.level == "proved"
    assert [g.name for g in verdict.gates] == ["static", "compile", "numerics", "performance"]
    assert verdict.gates[3].skipped == "needs a Hopper GPU"
    assert len(verdict.not_shown) == 2
    compiled, numerics = verdict.report(CompileReport), verdict.report(NumericsReport)
    assert compiled and numerics
    assert {k.arch for k in compiled.kernels} == {"sm_90a", "sm_100a", "sm_120a"}
    for kernel in compiled.kernels:
        assert kernel.registers and kernel.shared_bytes and kernel.mma_instructions
    assert numerics.ran == "interpreter"
    assert 0 < numerics.worst["gemm_rmsnorm_swiglu bfloat16"].ratio < 1
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    partly = judge(spec, RIGHT)
    compiled = partly.report(CompileReport)
    assert compiled and {k.arch for k in compiled.kernels} == {"sm_90a"}
    assert "compiles for sm_100a and sm_120a" in partly.not_shown[-1]
    kinds = [k for k, _ in events]
    assert kinds.count("gate.started") == kinds.count("gate.finished") == 4
    assert "gate.progress" in kinds


def test_nothing_computes_on_where_a_gate_cannot_end(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def slow(*_: Any, **__: Any) -> list[Any]:
        time.sleep(0.3)
        done.append("meaning")
        return []

    def failing(*_: Any) -> None:
        raise MachineError("the workers are gone")

    monkeypatch.setattr(meaning, "check_meaning", slow)
    monkeypatch.setattr(compile_gate, "compile_all", failing)
    with pytest.raises(MachineError):
        judge(spec, RIGHT, gates=("static", "compile", "numerics"))
    assert done == ["meaning"]


def test_numerics_has_the_time_that_it_took_beside_compiling(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refusing(*_: Any, **__: Any) -> list[Finding]:
        time.sleep(0.2)
        refused.set()
        return [Finding(message="another function")]

    def slower(*_: Any) -> tuple[list[Finding], list[Any]]:
        assert refused.wait(60)
        time.sleep(0.5)
        return [], []

    monkeypatch.setattr(meaning, "check_meaning", refusing)
    monkeypatch.setattr(compile_gate, "compile_all", slower)
    monkeypatch.setattr(compile_gate, "jobs_for", lambda *_, **__: [])
    *_, compiling, numerics = judge(spec, RIGHT, gates=("static", "compile", "numerics")).gates
    assert 0.2 <= numerics.seconds < compiling.seconds


# References that differentiate, where approximations cancel in the slope: 1 - tanh².
DIFFERENTIATED = {
    "vjp": "_, vjp = torch.func.vjp(torch.tanh, C.float())\nO = vjp(D)[0]",
    "jvp": "O = torch.func.jvp(torch.tanh, (C.float(),), (D,))[1]",
    "grad": "O = torch.func.grad(lambda c: (torch.tanh(input=c) * D).sum())(C.float())",
}


@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_reference_that_differentiates_is_admitted_and_judged(spec: Spec, way: str) -> None:
    slope = written.spec(
        f"D = A.float() @ B.float().T\n{DIFFERENTIATED[way]}\nreturn {{'O': O.to(A.dtype)}}",
        {"C": "[M, N]"},
        name="slope",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 37, N: 48, K: 64}]\n",
    )
    admit(slope)
    right = Composer().write(slope, lambda *_: None)
    assert 'return {"O": acc * derivative(tanh, C)}' in right
    verdict = judge(slope, right)
    assert verdict.passed, verdict.gates[-1].findings
    wrong = judge(slope, right.replace("derivative(tanh, C)", "(1 - tanh(C))"))
    assert [gate.passed for gate in wrong.gates] == [True, True, False]


# Each is one plausible slip that compiles; the numbers alone must refuse it.
SLIPS = {
    "missing scale": ("d = acc", "g, u = pairs(d * r)", 'return {"D": d, "O": swiglu(g, u)}'),
    "swapped pair": ("d = acc * r", "u, g = pairs(d)", 'return {"D": d, "O": swiglu(g, u)}'),
    "wrong gate": ("d = acc * r", "g, u = pairs(d)", 'return {"D": d, "O": glu(g, u)}'),
    "scale applied twice": ("d = acc * r * r", "g, u = pairs(acc * r)", 'return {"D": d, "O": swiglu(g, u)}'),
    "constant factor": ("d = acc * r", "g, u = pairs(d)", 'return {"D": d, "O": swiglu(g, u) * 1.05}'),
    "gate of unscaled": ("d = acc * r", "g, u = pairs(acc)", 'return {"D": d, "O": swiglu(g, u * r)}'),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_a_plausible_slip_is_refused_by_the_numbers(spec: Spec, slip: str) -> None:
    from coda_agent.agent.judge.numerics import check_numerics
    from coda_agent.primitives.tiles import TileConfig

    programs = read_programs(candidate(*SLIPS[slip]))
    tiles = {("gemm_rmsnorm_swiglu", "bfloat16"): (TileConfig(128, 128),)}
    variants = Variant.of_all(spec, programs)
    report = check_numerics(variants, tiles, device="cpu", progress=lambda *_: None, seed=1)
    assert report.findings, slip
    assert {"output", "row", "column", "got", "expected"} <= report.findings[0].where.keys()


@pytest.mark.parametrize(
    ("text", "gate", "said"),
    [
        ("import os\n" + RIGHT, "static", "only imports and @epilogue"),
        (candidate("d = acc * r", 'return {"D": d}'), "static", "'O' is declared but never written"),
        (
            candidate("d = acc + pairs(acc)", 'return {"D": d, "O": d}'),
            "static",
            "2 values stand where one is taken: `acc + pairs(acc)`",
        ),
        (
            candidate("g, u = pairs(acc)", 'return {"D": acc * r, "O": g * acc}'),
            "static",
            "mixes a full-width value with a half-width one",
        ),
        (RIGHT.replace("r: ColVector", "r: RowVector"), "compile", "r is RowVector, (N)"),
        (RIGHT.replace("r: ColVector", "s: ColVector").replace("* r", "* s"), "compile", "takes ['s']"),
    ],
)  # fmt: skip
def test_a_bad_candidate_fails_its_gate_with_one_line(
    spec: Spec, text: str, gate: str, said: str
) -> None:
    verdict = judge(spec, text)
    assert not verdict.passed and verdict.level is None
    assert verdict.gates[-1].name == gate and not verdict.gates[-1].passed
    assert said in verdict.gates[-1].findings[0].message
    assert "\n" not in verdict.gates[-1].findings[0].message


@pytest.mark.parametrize(
    ("body", "gate"),
    [
        (SLIPS["wrong gate"], "numerics"),
        (("d = acc * r", "g, u = pairs(d)", 'return {"D": d, "O": swiglu(maximum(g, -8.0), u)}'), "numerics"),
        (("d = to_bfloat16(acc) * r", "g, u = pairs(acc * r)", 'return {"D": d, "O": swiglu(g, u)}'), "numerics"),
        (("d = acc", 'return {"D": d, "O": d}'), "static"),
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_a_refusal_is_replayed_byte_for_byte(spec: Spec, body: tuple[str, ...], gate: str) -> None:
    text = candidate(*body).replace("import ", "import maximum, to_bfloat16, ", 1)
    gates = ("static", "compile", "numerics")
    first = judge(spec, text, gates=gates)
    where = first.gates[-1].findings[0].where
    assert not first.passed and first.gates[-1].name == gate
    again = judge(spec, text, gates=gates, seed=where.get("seed"))
    assert [g.model_dump_json(include={"findings"}) for g in again.gates] == [
        g.model_dump_json(include={"findings"}) for g in first.gates
    ]
    assert again.replay == first.replay
    if gate == "numerics":
        sizes = " ".join(f"{x}={n}" for x, n in where["sizes"].items())
        middle = f", case {where['case']}" if "case" in where else ""
        assert first.replay == f"seed {where['seed']}{middle}, sizes {sizes}"
    else:
        assert first.replay == ""


def test_the_line_of_a_refusal_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.init(tmp_path)[0].root)
    Path("mine.py").write_text(candidate(*SLIPS["wrong gate"]))

    def check(*args: str) -> tuple[list[str], str]:
        done = CliRunner().invoke(app, ["check", *args, "--device", "cpu"])
        assert done.exit_code == 1, done.output
        (line,) = re.findall(r"^replay: coda-agent check (.*)$", done.output, re.M)
        return re.findall(r"^    .*$", done.output, re.M), line

    found, line = check("mine.py", "--spec", "gemm_rmsnorm_swiglu")
    ((arguments, sizes),) = re.findall(r"^(\S+ --seed \d+) \((?:case .*, )?sizes (.+)\)$", line)
    assert found and found == check(*arguments.split())[0]
    shown = " ".join(CliRunner().invoke(app, ["runs", "last"]).output.split())
    assert (
        "check: refused" in shown and f"seed {arguments.split()[-1]}, " in shown and sizes in shown
    )


@pytest.mark.parametrize(
    ("gate", "where", "line"),
    [
        ("compile", {"arch": "sm_90a"}, "replay: coda-agent check run/kernel.py"),
        ("performance", {"sizes": {"M": 64}}, ""),
    ],
)
def test_what_no_draw_decides_names_no_seed(gate: str, where: dict[str, Any], line: str) -> None:
    """What is slow has sizes and no seed; `check` would not find it, since it times nothing."""
    fault = Finding(message="no", where=where)
    found = Verdict(
        passed=False,
        level=None,
        gates=[GateResult(name=gate, passed=False, version=1, findings=[fault])],
    )
    assert found.replay == ""
    outcome = Outcome("k", False, None, None, None, None, Path("run"), found)
    assert told(outcome).splitlines()[:-1] == [line] * bool(line)


def test_rounding_is_replayed_too(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the meaning passes, the fault is the rounding's."""
    monkeypatch.setattr(meaning, "check_meaning", lambda *_, **__: [])
    text = candidate(*SLIPS["constant factor"])
    found = [judge(spec, text, gates=("static", "compile", "numerics"), seed=7) for _ in range(2)]
    one, two = (verdict.gates[-1].findings[0] for verdict in found)
    assert one == two and one.where["seed"] == 7
    assert found[0].replay.startswith("seed 7, sizes M=")


def test_the_same_trial_has_the_same_digests(spec: Spec) -> None:
    first, second = (judge(spec, RIGHT, gates=("static",)) for _ in range(2))
    assert first.digests == second.digests
    assert first.digests == {"spec": spec.digest, "candidate": sha(RIGHT)}
    assert [gate.version for gate in first.gates] == [VERSIONS["static"]]
    assert (
        judge(spec, RIGHT + "\n", gates=("static",)).digests["candidate"]
        != first.digests["candidate"]
    )


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hopper GPU that is not there: its child does what script.json says; two tiles on offer."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$*" in *index*) echo "0, GPU-1, Fake GPU, 9.0";; esac\n')
    smi.chmod(0o755)
    (tmp_path / "script.json").write_text("{}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).with_name('execution')}")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(faulted_tiles, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(device, "LOCKS", tmp_path)
    monkeypatch.setattr(device, "SETTLE_S", 0.2)
    monkeypatch.setattr(compile_gate, "offered", lambda *_: SM90_CONFIGS[:4:3])
    made = device.Device(device.Gpu("GPU-1", "Fake GPU", "9.0"), "scripted_device")
    local.here.cache_clear()
    monkeypatch.setattr(local.Local, "_device", lambda self, gpu: {made.gpu: made}[gpu])
    yield tmp_path
    local.here.cache_clear()
    made.close()


def test_on_a_gpu_a_tile_that_faults_is_not_tuned_and_the_rest_is_accepted(
    spec: Spec, scripted: Path
) -> None:
    (scripted / "script.json").write_text('{"128x160": "illegal address"}')
    verdict = judge_candidate(spec, RIGHT, executor(), terms=Terms(types=["bfloat16"]))
    assert verdict.passed and verdict.level == "accepted"
    assert verdict.environment["device"] == "cuda"
    numerics, performance = verdict.report(NumericsReport), verdict.report(PerformanceReport)
    assert numerics and numerics.ran == "compiled kernel"
    (refused,) = numerics.refused_tiles
    assert refused.tile == SM90_CONFIGS[3].label and "illegal address" in refused.fault
    assert performance and [cell.dtype for cell in performance.cells] == ["performance"]
    kinds = [n for n in (scripted / "journal").read_text().split("\n") if n and " " not in n]
    assert kinds[0] == "prepare" and kinds.count("prepare") == 1
    # The imported function is called before it is tuned, and as it will be dispatched.
    assert [kind for kind in kinds if kind != "probe"][-3:] == ["call", "performance", "call"]
    line = TunedShape(m=8, n=16, k=32, config=SM90_CONFIGS[0], median_us=1.0)
    best = {"bfloat16": (line,)}
    assert verdict.tuned == {"Fake GPU": best}
    one = Terms(types=["bfloat16"], tiles=SM90_CONFIGS[:1])
    alone = judge_candidate(spec, RIGHT, executor(), terms=one)
    compiled = alone.report(CompileReport)
    assert compiled
    assert {k.tile for k in compiled.kernels if k.arch == "sm_90a"} == {SM90_CONFIGS[0].label}
    assert alone.level == "accepted" and not alone.gates[2].refused_tiles
    only = spec.model_copy(update={"types": {next(iter(spec.types)): ("bfloat16",)}})
    assert tune_candidate(only, RIGHT, executor()) == {"Fake GPU": best}


@pytest.mark.slow
def test_on_a_gpu_a_fault_of_the_default_tile_refuses_the_candidate(
    spec: Spec, scripted: Path
) -> None:
    (scripted / "script.json").write_text('{"128x128": "illegal address"}')
    terms = Terms("cuda", types=["bfloat16"])
    verdict = judge_candidate(spec, RIGHT, executor(), terms=terms)
    assert not verdict.passed and verdict.level is None
    assert [g.name for g in verdict.gates] == ["static", "compile", "numerics"]
    assert verdict.gates[2].findings[0].where["tile"] == SM90_CONFIGS[0].label


def test_demanding_a_gpu_where_there_is_none_is_one_clear_error(spec: Spec) -> None:
    import torch

    from coda_agent.primitives.errors import MachineError

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MachineError, match="needs a Hopper GPU"):
        judge_candidate(spec, RIGHT, executor(), terms=Terms("cuda"))
