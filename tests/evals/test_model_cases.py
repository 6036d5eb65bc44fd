"""Models' layers by their plans: at reduced size, interpreted, by a clock that is no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.capture import running
from coda_agent.agent.capture.config import layer_of
from coda_agent.agent.judge.samples import Samples
from coda_agent.evals.layer_speed import SUITES, TINYLLAMA, measure, write_page
from coda_agent.primitives.errors import CodaError

SMALL = ["TinyLlama-1.1B 512 tokens", "Qwen2.5-7B 512 tokens"]


class Clock:
    PROTOCOL = 0

    def interleave(self, contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> Any:
        for call in contenders.values():
            call(0)
        return {n: Samples(({"ours": 10.0, "eager": 15.0}[n],) * rounds) for n in contenders}

    def steady(self, contenders: Any) -> Any: ...
    def gpu_state(self) -> Any: ...


def run(root: Path, **options: Any) -> list[str]:
    said = list[str]()
    machine = {"gpu": {"name": "NVIDIA H200"}, "packages": {}}
    measure(root, "models", clock=Clock(), machine=machine, rounds=10, device="cpu", shrink=64,
            say=said.append, **options)  # fmt: skip
    return said


@pytest.mark.sampled(0.3)
@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
def test_layers_run_by_plans_as_right_as_by_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [line.partition(":")[0] for line in run(tmp_path, cases=SMALL)] == SMALL
    file = tmp_path / "evals" / "results" / "models-nvidia-h200.json"
    for case, cell in json.loads(file.read_text())["cells"].items():
        assert case in SMALL and cell["tokens"] == 16
        assert cell["both"]["over"]["eager"] == {"ratio": 1.5, "low": 1.5, "high": 1.5}
        assert cell["absent"] == {"compile": "needs a GPU"}
        assert cell["way"] == "plans"
        assert 0.0 < cell["errors"]["ours"] <= 1.1  # at these sizes single roundings count
    assert run(tmp_path, cases=SMALL) == [f"{case}: in the record" for case in SMALL]
    _, page = write_page(tmp_path, "models")
    text = page.read_text()
    assert f"| {SMALL[0]} | both | 10 | 1.500 (1.500–1.500) |  |" in text
    left = [case for case in SUITES["models"] if case not in SMALL]
    assert f"Not measured yet: {', '.join(left)}." in text


def test_what_is_slower_than_torch_compile_is_torch_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(TINYLLAMA, Path("config.json"))
    us = iter([(2.0, 3.0), (3.0, 2.0)])

    def fastest(runs: dict[str, Any]) -> tuple[str, dict[str, float]]:
        times = dict(zip(runs, next(us), strict=True))
        return min(times, key=times.__getitem__), times

    monkeypatch.setattr(running, "fastest", fastest)
    monkeypatch.setattr(running, "attending", lambda c, t, *parts: (2 * t["residual"],))
    given = {"residual": torch.ones(1, requires_grad=True)}

    def chosen(compile: Any) -> running.ByPlans:
        monkeypatch.setattr(torch, "compile", compile)
        found = running.ByPlans(layer, 1, 16, judged=False)
        found._choose(given)
        assert found(given)[0].item() == 2.0
        return found

    def failing(function: Any, **_: Any) -> Any:
        raise RuntimeError("Inductor")

    assert chosen(lambda function, **_: function).way == "torch.compile"
    assert chosen(lambda function, **_: function).us == {"plans": 2.0, "torch.compile": 3.0}
    broken = chosen(lambda function, **_: failing)
    assert (broken.way, broken.us) == ("plans", {})


def test_a_way_is_timed_with_the_gradients_that_training_keeps() -> None:
    """A gradient that is a part of another is copied to lie as its weight does."""
    weight, x = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3)
    weight.grad = kept = torch.full((4, 3), 7.0)
    strides = list[tuple[int, ...]]()

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(inputs[0])
            return inputs[0] @ inputs[1].T

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None, (ctx.saved_tensors[0].T @ grads[0]).T

    def way(t: Any) -> Any:
        assert t["weight"].data_ptr() == weight.data_ptr() and not t["x"].requires_grad
        t["weight"].register_post_accumulate_grad_hook(lambda w: strides.append(w.grad.stride()))
        return (Turned.apply(t["x"], t["weight"]),)

    running.step(way, {"weight": weight, "x": x})
    assert strides == [(3, 1)]
    assert weight.grad is kept and torch.equal(kept, torch.full((4, 3), 7.0))


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match=r"no case .Llama., expected TinyLlama-1\.1B 32 tokens"):
        run(tmp_path, cases=["Llama"])
    with pytest.raises(CodaError, match="no record of models"):
        write_page(tmp_path, "models")
