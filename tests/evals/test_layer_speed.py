"""Blocks and heads beside others: at reduced size, interpreted, by a clock that is no clock."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.judge.timing import PROTOCOL
from coda_agent.evals import dependence, layer_cases, layer_speed, pages, train_step
from coda_agent.evals.float8_linear import converted
from coda_agent.evals.fp8_cases import Fp8Case
from coda_agent.evals.layer_cases import Widths
from coda_agent.evals.layer_speed import CASES, declare_same, measure, write_page
from coda_agent.evals.sharded_step import Sharded
from coda_agent.evals.train_step import Fp8Training, Training
from coda_agent.layers import fp8, functional
from coda_agent.primitives.errors import CodaError

SMALL = ["block 2048", "block Qwen2.5-7B", "head 4096"]
MACHINE = {"gpu": {"name": "NVIDIA H200"}, "packages": {}}


class Clock:
    PROTOCOL = PROTOCOL
    calls = 0

    def interleave(self, contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> Any:
        for call in contenders.values():
            call(0)
            self.calls += 1
        times = {"ours": 10.0, "packed": 8.0, "bf16": 12.0, "gemm": 9.0, "eager": 15.0}
        return {name: Samples((times[name],) * rounds) for name in contenders}

    def steady(self, contenders: Any) -> Any: ...
    def gpu_state(self) -> Any: ...


def run(root: Path, clock: Clock, **options: Any) -> list[str]:
    said = list[str]()
    options = {"cases": SMALL, "names": ["packed", "eager", "compile"], **options}
    measure(root, clock=clock, machine=MACHINE, rounds=10, device="cpu", shrink=64,
            say=said.append, **options)  # fmt: skip
    return said


def test_cases_are_kept_and_as_right_as_pytorchs(tmp_path: Path) -> None:
    clock = Clock()
    said = run(tmp_path, clock)
    assert [line.partition(":")[0] for line in said] == SMALL
    file = tmp_path / "evals" / "results" / "layers-nvidia-h200.json"
    cells = json.loads(file.read_text())["cells"]
    for case in SMALL:
        cell = cells[case]
        assert cell["both"]["over"]["eager"] == {"ratio": 1.5, "low": 1.5, "high": 1.5}
        assert cell["absent"] == {"compile": "needs a GPU"}
        assert 0.0 < cell["errors"]["ours"] <= 1.05  # at these sizes single roundings count
    assert clock.calls == 3 * (4 + 4 + 3)  # a head packs nothing
    assert run(tmp_path, clock) == [f"{case}: in the record" for case in SMALL]
    cells["block Qwen2.5-7B"]["digest"] = "of other kernels"
    cells["block 2048"]["fallbacks"] = {"eager": "graph break: a *print*"}
    head = json.loads(file.read_text()) | {"date": "2026-11-23"}
    del cells["head 4096"], head["cells"]
    pages.write_record(file, head, cells)
    _, page = write_page(tmp_path)
    text = page.read_text()
    assert (
        "| block 2048 | both | 10 | 0.800 (0.800–0.800) | 0.900 (0.900–0.900) | 1.500 (1.500–1.500), fell back |"
        in text
    )
    assert (
        "| block Qwen2.5-7B | both | 10 | 0.800 (0.800–0.800) | 0.900 (0.900–0.900) | 1.500 (1.500–1.500) |"
        in text
    )
    assert "- block 2048: PyTorch: graph break: a \\*print\\*" in text
    assert "has changed since they were measured: block Qwen2.5-7B.\n" in text
    left = [c for c in CASES if c not in SMALL or c == "head 4096"]
    assert f"Not measured yet: {', '.join(left)}." in text
    run(tmp_path, clock, cases=["head 4096"])
    assert [*json.loads(file.read_text())["cells"]] == [*SMALL]


def test_a_forward_pass_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, clock = ["block 2048 fp8", "block Llama-3-8B fp8"], Clock()
    run(tmp_path, clock, cases=cases, names=["eager", "compile", "compile_unit"])
    file = tmp_path / "evals" / "results" / "layers-nvidia-h200.json"
    cells = json.loads(file.read_text())["cells"]
    for case in cases:
        cell = cells[case]
        assert cell["absent"] == dict.fromkeys(("compile", "compile_unit"), "needs a GPU")
        # e4m3 rounds by up to a sixteenth: both lose as much, and neither more than that.
        assert 0.95 < cell["errors"]["ours"] < 1.05
        assert all(0.01 < cell["distances"][name] < 2**-4 for name in ("ours", "eager"))
    text = write_page(tmp_path)[1].read_text()
    assert "| block 2048 fp8 | forward | 10 |  | 0.900 (0.900–0.900) | 1.500" in text
    cell = cells["block 2048 fp8"]["distances"]
    assert f"| block 2048 fp8 | {cell['ours']} | {cell['eager']} |" in text
    again = {"cases": cases, "names": ["eager", "compile", "compile_unit"]}
    assert run(tmp_path, clock, **again) == [f"{case}: in the record" for case in cases]
    before = dependence.of("layers", Widths)
    monkeypatch.setitem(fp8.gemm_fp8_rmsnorm_rope.tuned, "another GPU", {})
    assert dependence.of("layers", Widths) == before and "layers/fp8.py" not in before.sources
    assert run(tmp_path, clock, **again)[0].startswith("block 2048 fp8: forward over gemm 0.900")


def test_the_forms_of_scaled_products_agree() -> None:
    case = CASES["block 2048 fp8"].on("cpu", 64)
    assert isinstance(case, Fp8Case)
    scale = torch.rand(256) + 0.5
    for name, weight in case.theirs.items():
        rows = torch.randn(256, weight.values.shape[1]).to(fp8.E4M3)
        truth = (rows.double() * scale[:, None]) @ (
            weight.values.double() * weight.scale[:, None]
        ).T
        for product in (case._scaled, case._unit):
            found = product(rows, scale, name).double()
            torch.testing.assert_close(found, truth, rtol=2**-7, atol=1e-5)
    bare = case._bare()(case.values)
    assert [tuple(y.shape) for y in bare] == [(256, 32), (256, 192), (256, 32), (256, 64)]


def test_a_training_step(tmp_path: Path) -> None:
    case, clock = CASES["train-1b"], Clock()
    assert isinstance(case, Training)
    found = case.on("cpu", 64).measured({"ours", "packed", "compile"}, clock, 10)
    assert found["absent"] == {"compile": "needs a GPU"} and clock.calls == 2
    step = case.on("cpu", 64)
    before = step.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    plain = float(step.model(input_ids=step.ids, labels=step.ids).loss)
    assert found["losses"]["ours"] == found["losses"]["packed"] == pytest.approx(plain, rel=2e-3)
    assert step.model.lm_head.weight is step.model.model.embed_tokens.weight
    step.measured({"ours"}, clock, 10)
    assert not torch.equal(before, step.model.model.layers[0].mlp.up_proj.weight)


def test_a_training_step_whose_loss_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    liger, clock = ModuleType("liger_kernel.transformers"), Clock()

    def scaled(model: Any) -> None:
        with torch.no_grad():
            model.model.norm = copy.deepcopy(model.model.norm)
            model.model.norm.weight *= 4

    setattr(liger, "apply_liger_kernel_to_llama", scaled)  # noqa: B010
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    found = CASES["train-1b"].on("cpu", 64).measured({"ours", "liger"}, clock, 10)
    assert found["losses"].keys() == found["step"]["times"].keys() == {"ours"}
    said = r"CodaError: its first loss is \d+\.\d{3}, expected \d\.\d{3}"
    assert re.fullmatch(said, found["absent"]["liger"])


def test_a_training_step_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "COURSE", 3)
    case, clock = CASES["train-1b fp8"], Clock()
    assert isinstance(case, Fp8Training)
    step = case.on("cpu", 64)
    assert isinstance(step.what, Fp8Training)
    plain = float(step.model(input_ids=step.ids, labels=step.ids).loss)
    found = step.measured({"ours", "packed", "bf16", "compile"}, clock, 10)
    assert found["absent"] == {"compile": "needs a GPU"} and clock.calls == 3
    losses = found["losses"]
    assert losses["ours"] == losses["packed"] != losses["bf16"]
    assert losses["ours"] == pytest.approx(plain, rel=2e-3)
    for name, course in found["course"].items():
        assert course[0] == pytest.approx(losses[name], abs=5e-5)
        assert len(course) == 3 and course[2] < course[0] - 0.02
    assert found["course"]["ours"] == pytest.approx(found["course"]["bf16"], rel=1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_linears_in_fp8_are_right_but_for_e4m3(bias: bool) -> None:
    """Outputs and gradients against float64: random roundings of a sixteenth at most."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias), torch.nn.Linear(96, 80))
    model.add_module("lm_head", torch.nn.Linear(80, 32))
    model, x = model.bfloat16(), torch.randn(2, 24, 64).bfloat16()
    exact, found = copy.deepcopy(model).double(), list[Any]()
    by = converted(model)
    assert by.startswith("torch") and type(model.lm_head) is torch.nn.Linear
    assert type(model[0]) is not torch.nn.Linear and model[0].weight.dtype == torch.bfloat16
    one: Any
    for one in (model, exact):
        given = x.detach().to(one[0].weight.dtype, copy=True).requires_grad_()
        out = one(given)
        made = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=made).bfloat16().to(out.dtype))
        found.append([out.detach(), given.grad, *(p.grad for p in one.parameters())])
    for mine, truth in zip(*found, strict=True):
        assert 0 < (mine.double() - truth).norm() < 0.1 * truth.norm()


def test_a_training_step_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.llama", None)
    with pytest.raises(CodaError, match="transformers is not installed, whose Llama"):
        CASES["train-1b"].on("cpu", 64)


def test_the_page_gives_tokens_a_second(tmp_path: Path) -> None:
    one = {"ratio": 1.25, "low": 1.2, "high": 1.3}
    cell = {
        "tokens": 32768, "machine": MACHINE, "losses": {"ours": 11.9, "compile": 11.8},
        "peak_mib": {"ours": 7, "compile": 8}, "absent": {"liger": "ImportError: no"},
        "step": {"times": {"ours": {"median_us": 400000.0}, "compile": {"median_us": 5e5}},
                 "over": {"ours": one, "compile": one}},
    }  # fmt: skip
    path = tmp_path / "evals" / "results" / "layers-nvidia-h200.json"
    path.parent.mkdir(parents=True)
    pages.write_record(path, {"suite": "layers", "date": "2026-11-23"}, {"train-1b": cell})
    text = write_page(tmp_path)[1].read_text()
    for line in (
        "| train-1b | step | 400000 |  |  |  | 1.250 (1.200–1.300) |  |  |",
        "| train-1b | 7 |  |  | 8 |  |  |  |",
        "| train-1b | 81920 |  | 65536 |  |  |\n",
        "| train-1b | 11.9 |  | 11.8 |  |  |\n",
        "- train-1b: Liger: ImportError: no",
    ):
        assert line in text
    assert "multiplies in FP8" not in text and "Losses from these weights" not in text
    cell |= {"linears": "torchao 1, rowwise", "course": {"ours": [float(x) for x in range(20)]}}
    pages.write_record(path, {"suite": "layers", "date": "2026-11-23"}, {"train-1b fp8": cell})
    text = write_page(tmp_path)[1].read_text()
    assert (
        "In train-1b fp8 the model multiplies in FP8" in text and "of torchao 1, rowwise." in text
    )
    assert "| train-1b fp8 | ours | 0.000 | 4.000 | 9.000 | 14.000 | 19.000 |" in text


def test_a_cell_is_of_its_sources_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dependence.of("layers", Widths)
    expected = {"layers/functional.py", "layers/kernels.py", "evals/layer_cases.py"}
    assert expected < before.sources.keys()
    assert before.kernels.keys() >= {"gemm_rmsnorm_swiglu", "gemm_residual_partial_rmsnorm_bwd"}
    monkeypatch.setitem(functional.gemm_rmsnorm.tuned, "another GPU", {})
    then = dependence.of("layers", Widths)
    assert [n for n, held in then.kernels.items() if held != before.kernels[n]] == ["gemm_rmsnorm"]
    assert then.sources == before.sources
    trained = dependence.of("layers", Fp8Training)
    expected = {"layers/fp8_products.py", "layers/fp8_kernels.py", "evals/float8_linear.py"}
    assert expected < trained.sources.keys()
    assert dependence.of("layers", Sharded).sources.keys() - before.sources.keys() == {
        "evals/sharded_step.py"
    }
    assert trained.kernels.keys() - then.kernels.keys() == {
        f"gemm_fp8_{name}"
        for name in ("residual_partial_rmsnorm", "rmsnorm", "rmsnorm_rope", "rmsnorm_swiglu")
    }


def test_sources_that_time_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, clock = ["head 4096", "block 2048"], Clock()
    meant, of = {"a.py": "first"}, dependence.of
    monkeypatch.setattr(dependence, "of", lambda *kind: of(*kind)._replace(sources={**meant}))
    run(tmp_path, clock, cases=cases)
    older = "has changed since they were measured: "

    def page() -> str:
        return write_page(tmp_path)[1].read_text()

    assert older not in page()
    with pytest.raises(CodaError, match="those of its record: nothing to declare"):
        declare_same(tmp_path, "layers", "a comment")
    meant["a.py"] = "second"
    assert f"{older}block 2048, head 4096.\n" in page()
    with pytest.raises(CodaError, match="--same is empty, expected the reason"):
        declare_same(tmp_path, "layers", " ")
    declare_same(tmp_path, "layers", "a *name* alone")
    assert older not in page() and "time the same: a \\*name\\* alone\n" in page()
    assert run(tmp_path, clock, cases=cases) == [f"{case}: in the record" for case in cases]
    # Kernels are not declared, nor what was measured before other sources were.
    monkeypatch.setitem(functional.gemm_rmsnorm_rope.tuned, "another GPU", {})
    assert f"{older}block 2048, head 4096.\n" in page()
    monkeypatch.delitem(functional.gemm_rmsnorm_rope.tuned, "another GPU")
    meant["a.py"] = "third"
    run(tmp_path, clock, cases=cases[:1])
    assert f"{older}block 2048.\n" in page() and "time the same" not in page()
    meant["a.py"] = "fourth"
    declare_same(tmp_path, "layers", "another name")
    assert f"{older}block 2048.\n" in page()
    meant["a.py"] = "second"  # as they were once: its chain has ended
    assert f"{older}block 2048, head 4096.\n" in page()


def test_what_torch_compile_leaves_as_it_was_is_named() -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break("on purpose")
        return x * 2

    found: dict[str, Any] = {"absent": {}, "fallbacks": {}}

    def ready(name: str) -> Any:
        if name == "liger":
            raise ValueError("no such\nkernel")
        way = torch.compile({"compile": whole}.get(name, broken), backend="eager")
        assert torch.equal(way(torch.ones(2)), torch.full((2,), 2.0))
        return way

    made = layer_cases.prepared(["compile", "liger", "liger_compile"], ready, found, "cuda")
    assert [*made] == ["compile", "liger_compile"]
    assert found["absent"] == {"liger": "ValueError: no such"}
    assert [*found["fallbacks"]] == ["liger_compile"]
    assert found["fallbacks"]["liger_compile"].startswith("graph break: ")
    with (
        layer_cases.fallbacks() as said
    ):  # as where Triton does not compile a kernel that is traced
        try:
            raise ValueError
        except ValueError:
            logger = logging.getLogger("torch._higher_order_ops.triton_kernel_wrap")
            logger.warning("Encountered an exception", exc_info=True)
    assert said == ["Encountered an exception (ValueError)"]


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match="no case 'block 1', expected block 2048"):
        run(tmp_path, Clock(), cases=["block 1"])
    with pytest.raises(CodaError, match="no record of layers"):
        write_page(tmp_path)


def test_the_readme_gives_what_the_record_has() -> None:
    root = Path(__file__).parents[2]
    cells = json.loads((root / "evals" / "results" / "layers-nvidia-h200.json").read_text())[
        "cells"
    ]
    over = {
        case: cell["both"]["over"]["compile"]["ratio"]
        for case, cell in cells.items()
        if "both" in cell
    }
    blocks = sorted(ratio for case, ratio in over.items() if case.startswith("block"))
    peaks = [cells[case]["peak_mib"] for case in over if case.startswith("block")]
    saved = sorted(round(100 * (1 - p["ours"] / p["compile"])) for p in peaks)
    step = cells["train-1b"]
    by, used = step["step"]["over"], [step["peak_mib"][n] for n in ("ours", "compile", "liger")]
    mine, theirs, liger = (round(mib / 1024) for mib in used)
    text = " ".join((root / "README.md").read_text().split())
    assert f"{by['compile']['ratio']:.2f} times as fast as under torch.compile" in text
    assert f"{by['liger']['ratio']:.2f} times as fast as with Liger" in text
    assert f"in {mine} GiB beside {theirs} and {liger} GiB" in text
    assert f"are {blocks[0]:.2f} to {blocks[-1]:.2f} times as fast as under torch.compile" in text
    assert f"They take {saved[0]} to {saved[-1]} % less memory. [docs" in text
    step, two = cells["train-1b fp8"]["step"]["over"], cells["train-1b on 2 GPUs"]
    ours, theirs = (f"{step[n]['ratio']:.2f}" for n in ("bf16", "compile"))
    assert f"that step was {ours} times as fast as ours in bfloat16, and {theirs} times" in text
    by, course = two["step"]["over"], two["course"]
    said = f"was {by['compile']['ratio']:.2f} times as fast as under torch.compile, and "
    assert f"{said}{by['liger']['ratio']:.2f} times as fast as with Liger. In 20" in text
    far = [
        max(abs(a - b) for a, b in zip(course[n], course[f"{n} alone"], strict=True))
        for n in ("ours", "eager")
    ]
    assert f"from {course['ours'][0]:.2f} to {course['ours'][-1]:.2f} and stayed" in text
    assert f"within {far[0]:.2f} of those on one GPU, PyTorch's within {far[1]:.2f}" in text
    eight = [cell for case, cell in cells.items() if "forward" in cell and case.endswith("fp8")]
    by = [sorted(c["forward"]["over"][n]["ratio"] for c in eight) for n in ("compile", "gemm")]
    saved = sorted(
        round(100 * (1 - c["peak_mib"]["ours"] / c["peak_mib"]["compile"])) for c in eight
    )
    assert f"it is {by[0][0]:.2f} to {by[0][-1]:.2f} times as fast as `torch._scaled_mm`" in text
    assert f"in {saved[0]} to {saved[-1]} % less memory. The bare FP8" in text
    assert f"take {by[1][0]:.2f} to {by[1][-1]:.2f} of its time" in text


def test_the_readme_gives_the_mean_of_fused_functions() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "evals" / "results" / "fuse-nvidia-h200.json").read_text())
    over = [cell["forward"]["over"]["compile"] for cell in record["cells"].values()]
    mean = math.exp(sum(math.log(x["ratio"]) for x in over) / len(over))
    slower = sum(x["high"] < 1 for x in over)
    words = ("None was", "One was", "Two were", "Three were", "Four were")[slower]
    text = " ".join((root / "README.md").read_text().split())
    assert len(over) == 30 and f"ran {mean:.2f} times as fast as under torch.compile" in text
    assert f"{words} slower, {min(x['ratio'] for x in over):.2f} times as fast at worst" in text


def test_every_case_can_be_named_on_the_command_line() -> None:
    """Where names are between commas."""
    assert not [case for cases in layer_speed.SUITES.values() for case in cases if "," in case]
