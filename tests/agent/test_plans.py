"""Plans of whole functions, and `fuse`."""

import copy
import json
import operator
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from typer.testing import CliRunner

from coda_agent import generated
from coda_agent.agent import workspace
from coda_agent.agent.cli import app
from coda_agent.agent.judge import timing
from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.plans import choice, fused, kernels, passes, ways
from coda_agent.agent.plans.choice import Made
from coda_agent.agent.plans.cut import MERGE, Plan
from coda_agent.agent.plans.fused import Fused, fuse, mm
from coda_agent.agent.plans.rules import CARRY
from coda_agent.agent.plans.trace import Value
from coda_agent.agent.workspace import Kernel as Entry


@pytest.fixture(autouse=True)
def cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """One for all tests of the module, so that each kernel is composed once."""
    folder = tmp_path_factory.getbasetemp() / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with warnings.catch_warnings(action="ignore"):  # that kernels are interpreted here
        yield folder


def drawn(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=made) * shape[-1] ** -0.5).bfloat16()


def plain(function: Any) -> Fused:
    return fuse(function, judged=False)


def left(plan: Plan) -> list[Value]:
    """What PyTorch runs."""
    return [step for step in plan.steps if isinstance(step, Value)]


def norms(got: Any, expected: Any) -> float:
    return float((got.float() - expected).norm() / expected.norm())


D, H, KV, FF = 192, 64, 96, 96  # a row of D is no group of columns in one tile


def attention_output(
    x: Tensor, res: Tensor, wo: Tensor, g: Tensor, wg: Tensor, wu: Tensor, wd: Tensor
) -> Tensor:
    h = res + F.linear(x, wo)
    n = F.rms_norm(h, (h.shape[-1],), g, 1e-5)
    return h + F.linear(F.silu(F.linear(n, wg)) * F.linear(n, wu), wd)


def next_projections(
    x: Tensor, wd: Tensor, res: Tensor, g: Tensor, wq: Tensor, wk: Tensor, wv: Tensor
) -> Any:
    """A norm that is spelled out."""
    h = res + F.linear(x, wd)
    wide = h.float()
    n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * g
    return h, F.linear(n, wq), F.linear(n, wk), F.linear(n, wv)


def head(x: Tensor, wd: Tensor, res: Tensor, g: Tensor, w: Tensor, t: Tensor) -> Tensor:
    n = F.rms_norm(res + F.linear(x, wd), (D,), g, 1e-5)
    return F.cross_entropy(F.linear(n, w).flatten(0, 1).float(), t.flatten())


def layer() -> list[Tensor]:
    return [
        drawn(2, 24, H), drawn(2, 24, D, seed=1), drawn(D, H), drawn(D).abs() + 0.5,
        drawn(FF, D), drawn(FF, D, seed=2), drawn(D, FF),
    ]  # fmt: skip


def test_a_llama_layer_has_the_papers_cuts() -> None:
    """Section 3.2.1: the output projection carries residual, the norm's weight and the statistic;
    gate and up are one product, scaled after it; the rest is one number a row."""
    args = layer()
    fused = plain(attention_output)
    plan = fused.plan(*args)
    assert plan is not None
    one, two, three = plan.kernels
    assert isinstance(one.made, Made)
    assert one.made.about.accepted == "gemm_residual_partial_rmsnorm"
    assert one.made.about.level == "accepted"
    assert [v.called for v in one.outputs] == ["add", "mean", "to"]
    assert [v.called for v in two.members if v.called in ("linear", "silu", "mul")].count(
        "linear"
    ) == 2
    assert [v.called for v in three.members] == ["linear", "add"]
    assert [(s.called, s.shape) for s in left(plan)] == [("add", (2, 24, 1)), ("rsqrt", (2, 24, 1))]
    fired = {note.rule for note in plan.notes if note.fired}
    assert {CARRY, MERGE} <= fired
    truth = attention_output(*(a.float() for a in args))
    assert norms(fused(*args), truth) <= 1.05 * norms(attention_output(*args), truth)


def test_projections_of_several_widths_are_one_kernel_behind_a_spelled_norm() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5]
    args += [drawn(D, D), drawn(KV, D), drawn(KV, D, seed=3)]
    fused = plain(next_projections)
    plan = fused.plan(*args)
    assert plan is not None
    assert [len(k.outputs) for k in plan.kernels] == [3, 3]
    truth = next_projections(*(a.float() for a in args))
    for got, own, true in zip(fused(*args), next_projections(*args), truth, strict=True):
        assert got.shape == true.shape
        assert norms(got, true) <= 1.1 * norms(own, true)


def normed_heads(x: Tensor, w: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, w).view(x.shape[0], -1, g.shape[0])
    n = F.rms_norm(y, (g.shape[0],), g, 1e-6)
    a, b = n.chunk(2, -1)
    return n * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def test_the_width_of_heads_is_a_number_wherever_it_is_taken_from() -> None:
    args = [drawn(48, D), drawn(128, D), drawn(64).abs() + 0.5]
    angle = torch.rand(48, 64, generator=torch.Generator().manual_seed(0)) * 6
    args += [angle.cos().bfloat16(), angle.sin().bfloat16()]
    fused = plain(normed_heads)
    plan = fused.plan(*args)
    assert plan is not None and len(plan.kernels) == len(plan.steps) == 1
    truth = normed_heads(*(a.float() for a in args))
    assert norms(fused(*args), truth) <= norms(normed_heads(*args), truth)


def test_a_loss_leaves_a_number_a_row() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5, drawn(160, D)]
    index = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    index[0, :5] = -100
    fused = plain(head)
    plan = fused.plan(*args, index)
    assert plan is not None
    assert [[v.called for v in k.outputs] for k in plan.kernels][1] == ["gather", "logsumexp"]
    assert all(s.view or len(s.shape) < 2 or 1 in s.shape for s in left(plan))
    wide: list[Any] = [a.float() for a in args]
    truth = head(wide[0], wide[1], wide[2], wide[3], wide[4], index)
    assert fused(*args, index).item() == pytest.approx(truth.item(), rel=2e-3)


def test_log_probabilities_of_some_words_store_no_logits() -> None:
    def wide(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.log_softmax(F.linear(x, w).float(), dim=-1).gather(dim=-1, index=t)

    def narrow(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.linear(x, w).log_softmax(1).gather(1, t)

    def fewer(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.linear(x, w).log_softmax(-1).gather(-1, t[:5])

    x, w, t = drawn(24, H) * 8, drawn(D, H), torch.arange(24)[:, None] * 7
    truth = (x.double() @ w.double().T).log_softmax(-1).gather(-1, t)
    for function, error in ((wide, 2e-3), (narrow, 4e-3), (fewer, 2e-2)):
        fused = plain(function)
        got, plan = fused(x, w, t), fused.plan(x, w, t)
        assert got.dtype == function(x, w, t).dtype and plan is not None
        assert norms(got, truth[: len(got)]) < error
        stored = [v.shape for k in plan.kernels for v in k.outputs]
        assert stored == ([] if function is fewer else [(24, 1)] * 2)


def test_a_norm_that_is_needed_itself_is_left_whole() -> None:
    def both(x: Tensor, w: Tensor, v: Tensor) -> Any:
        n = F.rms_norm(F.linear(x, w), (D,), None, 1e-5)
        return n, F.silu(F.linear(n, v))

    args = [drawn(24, H), drawn(D, H), drawn(FF, D)]
    fused = plain(both)
    plan = fused.plan(*args)
    assert plan is not None
    (note,) = [n for n in plan.notes if n.rule == CARRY]
    assert not note.fired
    assert "is a result" in note.why
    assert "rms_norm" in [s.called for s in left(plan)]
    for got, own in zip(fused(*args), both(*args), strict=True):
        assert torch.allclose(got, own, atol=2e-2)


def by_value(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) if x.sum() > 0 else F.relu(F.linear(x, w))


def in_place(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu_()


def drawing(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(F.relu(F.linear(x, w)))


def leaving_torch(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) * float(x.float().numpy().max())


def by_number(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) * x.abs().max().item()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (by_value, "depends on a value"),
        (in_place, "it writes in place (relu_)"),
        (drawing, "it draws random numbers"),
        (leaving_torch, "numpy() is not supported"),
        (by_number, "depends on a value"),
    ],
)
def test_what_cannot_be_planned_is_pytorchs_and_says_why(function: Any, why: str) -> None:
    args = [drawn(24, H), drawn(D, H)]
    fused = plain(function)
    assert torch.equal(fused(*args), function(*args))
    assert why in fused.why
    assert fused.plan(*args) is None


def test_float32_is_left_to_pytorch() -> None:
    fused = plain(lambda x, w: F.relu(F.linear(x, w)))
    x, w = drawn(24, H).float(), drawn(D, H).float()
    assert torch.equal(fused(x, w), F.relu(F.linear(x, w)))
    assert fused.why


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(D, FF, False),
            nn.Linear(D, FF, False),
            nn.Linear(FF, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_module_is_fused_with_its_gradients_and_follows_its_weights() -> None:
    torch.manual_seed(0)
    mlp = MLP().bfloat16()
    fused = plain(mlp)
    x = drawn(24, D).requires_grad_()

    def gradients(call: Any) -> list[Tensor]:
        return [*torch.autograd.grad(call(x).float().square().sum(), [x, *mlp.parameters()])]

    for got, own in zip(gradients(fused), gradients(mlp), strict=True):
        assert norms(got, own.float()) < 0.01
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.mul_(-0.5)  # counted by autograd, so what was packed is packed again
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.up.weight = nn.Parameter(mlp.up.weight * 3)
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.gate.weight.data.mul_(-1)  # not counted
        fused.forget()
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)


def test_under_compile_it_is_one_operator_with_gradients() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v)

    args = [drawn(24, H).requires_grad_(), drawn(FF, H).requires_grad_(), drawn(D, FF)]
    fused = fuse(function, *args, judged=False)
    compiled = torch.compile(lambda *x: 2 * fused(*x), backend="aot_eager", fullgraph=True)
    got = compiled(*args)
    assert torch.equal(got, 2 * fused(*args))
    grads = torch.autograd.grad(got.float().sum(), args[:2])
    for one, own in zip(
        grads, torch.autograd.grad(2 * function(*args).float().sum(), args[:2]), strict=True
    ):
        assert norms(one, own.float()) < 0.01


def test_one_tensor_as_two_arguments_and_other_numbers_of_the_same_shapes() -> None:
    def function(x: Tensor, w: Tensor, r: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.silu(F.linear(x, w) + r)

    square = drawn(64, 64).requires_grad_()
    other = drawn(64, 64, seed=1).requires_grad_()
    fused = plain(function)
    calls: list[Any] = [(square, square, square), (square, other, square)]
    calls.append((other, square, square, 3.0))
    for args in calls:
        got, own = fused(*args), function(*args)
        assert torch.allclose(got, own, atol=2e-2)
    first, last = fused(square, other, square), fused(square, other, square, 3.0)
    one, three = (torch.autograd.grad(y.sum(), other)[0] for y in (first, last))
    assert norms(three, 3 * one.float()) < 0.01
    with torch.autocast("cpu", torch.bfloat16):
        fused(square, other, square)
    assert "autocast" in fused.why


class AsTorch211(TorchFunctionMode):
    """Whose products of leading dims and a matrix ask symbolic sizes for their number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.matmul, Tensor.matmul) and args[0].ndim > 2:
            if type(args[0].shape[0]) is not int:
                raise RuntimeError("Cannot call numel() on tensor with symbolic sizes/strides")
        return func(*args, **(kwargs or {}))


def test_no_product_of_leading_dims_has_symbolic_sizes() -> None:
    def function(x: Tensor, r: Tensor, wo: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        n = F.rms_norm(r + torch.matmul(x, wo), (D,), g, 1e-5)
        return F.linear(n, w, bias=b)

    args = [drawn(2, 24, H), drawn(2, 24, D), drawn(H, D), drawn(D).abs() + 0.5]
    args += [drawn(FF, D), drawn(FF)]
    fused = plain(function)
    with AsTorch211():
        plan = fused.plan(*args)
    assert plan is not None and CARRY in [note.rule for note in plan.notes if note.fired]
    assert torch.allclose(fused(*args), function(*args), atol=2e-2)


def test_both_passes_have_plans_with_the_papers_cuts() -> None:
    def function(
        x: Tensor, res: Tensor, wo: Tensor, g: Tensor, w: Tensor, b: Tensor
    ) -> tuple[Tensor, ...]:
        h = res + F.linear(x, wo)
        n = F.rms_norm(h, (h.shape[-1],), g, 1e-5)
        return h, F.silu(F.linear(n, w, b))

    args = [drawn(24, H), drawn(24, D), drawn(D, H), drawn(D).abs() + 0.5, drawn(FF, D)]
    args.append(drawn(FF))
    call = passes.by_passes(function, judged=False)
    planned, made = [], fused.chosen

    def seen(graph: Any, tensors: Any, **options: Any) -> Any:
        found = made(graph, tensors, **options)
        planned.append(found[0])
        return found

    def results(call: Any, args: list[Tensor], wanted: list[int]) -> list[Tensor]:
        given = [a.detach().requires_grad_(i in wanted) for i, a in enumerate(args)]
        outs = call(*given)
        ones = [torch.ones_like(y) for y in outs]
        return [*outs, *torch.autograd.grad(outs, [given[i] for i in wanted], ones)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "chosen", seen)
        for wanted in ([0, 1, 2, 3, 4, 5], [0, 2]):  # what needs no gradient has none
            got, own = results(call, args, wanted), results(function, args, wanted)
            truth = results(function, [a.float() for a in args], wanted)
            for one, other, true in zip(got, own, truth, strict=True):
                assert one.dtype == other.dtype
                assert norms(one, true) <= 1.05 * norms(other, true)
    forward, backward = planned[:2]
    first, second = forward.kernels
    assert first.made.about.accepted == "gemm_residual_partial_rmsnorm"
    assert CARRY in [n.rule for n in forward.notes if n.fired]
    assert "silu" in [v.called for v in second.members]
    names = [k.made.about.accepted for k in backward.kernels]
    assert names == ["gemm_residual_partial_rmsnorm_bwd"]  # it ends the norm's backward
    assert len(planned) == 4
    with torch.no_grad():  # is planned by itself
        assert torch.allclose(call(*args)[1], function(*args)[1], atol=2e-2)
    weights = [k.made.keeps for plan in planned for k in plan.kernels]
    assert weights and not any(weights)


def test_other_rows_take_the_kernel_that_was_composed(cache: Path) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.softplus(F.linear(x, w))

    fused, kept = plain(function), cache / "coda-agent" / "plans"
    w = drawn(D, H)
    for m in (8, 24, 33):
        x = drawn(m, H)
        assert torch.allclose(fused(x, w), function(x, w), atol=1e-2)
    texts = [json.loads(path.read_text()).get("text", "") for path in kept.iterdir()]
    assert sum("softplus" in text for text in texts) == 1


def test_what_is_kept_of_an_accepted_kernel_ends_with_its_evidence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gemm_residual_partial_rmsnorm"
    shutil.copytree(Path(generated.__file__).parent / "gemm_residual_partial_rmsnorm", folder)
    monkeypatch.setattr(
        workspace, "packaged_kernels", lambda: {folder.name: Entry(folder.name, folder)}
    )
    monkeypatch.chdir(tmp_path)  # which is no workspace
    args = layer()

    def accepted() -> str:
        kernels._accepted.cache_clear()
        plan = plain(attention_output).plan(*args)
        assert plan is not None and isinstance(plan.kernels[0].made, Made)
        return plan.kernels[0].made.about.accepted

    try:
        assert [accepted(), accepted()] == ["gemm_residual_partial_rmsnorm"] * 2
        path = folder / "evidence.json"
        evidence = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps(evidence | {"level": "revoked"}), "utf-8")
        assert accepted() == ""
    finally:
        kernels._accepted.cache_clear()


def test_the_fastest_way_is_timed_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    us, timed = {"the plan": 3.0, "PyTorch": 2.0, "torch.compile": 1.0}, []

    def times(runs: Any) -> tuple[str, dict[str, float]]:
        timed.append(runs)
        found = {name: us[name] for name in runs}
        return min(found, key=found.__getitem__), found

    class Way(str):
        def __call__(self, tensors: Any) -> None:
            if self == "torch.compile" and "torch.compile" not in us:
                raise RuntimeError("Inductor")

    def fastest(x: Tensor) -> tuple[Any, str, str]:
        ways = {name: lambda n=name: Way(n) for name in ("the plan", "PyTorch", "torch.compile")}
        plan = fuse(lambda x: x + 1).plan(x)
        return choice._fastest(ways, [x], plan)

    monkeypatch.setattr(choice, "fastest", times)
    x = torch.ones(4, 16)
    assert fastest(x)[1:] == ("torch.compile", "the plan 3, PyTorch 2, torch.compile 1")
    assert fastest(x)[0] == "torch.compile"
    assert len(timed) == 1
    del us["torch.compile"]
    assert fastest(torch.ones(8, 16))[1:] == ("PyTorch", "the plan 3, PyTorch 2")


@pytest.mark.parametrize(
    ("gpu", "loop", "best"),
    [
        ((2.0, 3.0), (9.0, 1.0), "plan"),  # what the GPU takes decides
        ((3.0, 2.0), (1.0, 9.0), "compile"),
        ((2.0, 2.001), (3.0, 2.0), "compile"),  # alike there: a loop does
        ((2.001, 2.0), (2.0, 2.0), "plan"),  # and there
        ((None, 2.0), (2.0, 3.0), "plan"),  # a host too busy for the judge's clocks
    ],
)
def test_the_fastest_is_that_of_the_gpu_and_else_of_a_loop(
    gpu: tuple[Any, Any], loop: tuple[float, float], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"plan": lambda: None, "compile": lambda: None}
    given = [Samples((us,) * 11) if us else Samples((), fault="late") for us in gpu]
    times = lambda calls, rounds: dict(zip(calls, given, strict=True))
    monkeypatch.setattr(timing, "interleave", times)
    monkeypatch.setattr(ways, "times_of", lambda calls: [Samples((us,) * 11) for us in loop])
    kept = gpu if gpu[0] else loop
    assert ways.fastest(runs) == (best, dict(zip(runs, kept, strict=True)))


RECORD = """
import sys, torch
from coda_agent.agent.plans.trace import record
graph = record(lambda x, w: torch.relu(x @ w), (torch.ones(4, 16), torch.ones(16, 8)), {})
assert [v.called for v in graph.values] == ["matmul", "relu"]
assert not {"torch.export._trace", "torch._inductor.compile_fx"} & set(sys.modules)
"""


def test_a_function_is_recorded_without_what_only_messages_need() -> None:
    done = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


AGAIN = """
import sys, torch
from coda_agent import fuse
x, w = torch.ones(4, 16).bfloat16(), torch.eye(16).bfloat16()
call = fuse(lambda x, w: torch.relu(x @ w) + 1, judged=False)
assert torch.equal(call(x, w), x + 1) and call.plan(x, w).kernels
print("coda_agent.agent.judge" in sys.modules, "coda_agent.agent.authors" in sys.modules)
"""


@pytest.mark.sampled(0.5)
def test_what_was_composed_before_needs_neither_composer_nor_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = lambda: subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True)
    assert [run().stdout, run().stdout] == ["True True\n", "False False\n"]


QUACK = """
import sys, torch
from coda_agent.agent.plans.imports import import_quack
asked = []
torch.compile = lambda function, *, recompile_limit=8, **options: asked.append(function) or function
given = torch.compile
import_quack()
assert asked == [] and torch.compile is given
assert "torch._inductor.compile_fx" not in sys.modules
from quack.blockscaled import quantize
x = torch.randn(4, 64).bfloat16()
for one, other in zip(quantize.to_mx_compiled(x), quantize.to_mx(x), strict=True):
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
quantize.to_mx_compiled(x)
assert asked == [quantize.to_mx_compiled.__wrapped__]
"""


def test_quack_asks_torch_compile_for_its_quantisers_when_they_are_called() -> None:
    done = subprocess.run([sys.executable, "-c", QUACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rotated(x: Tensor, w: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w).unflatten(-1, (-1, 16))  # of Python, where Dynamo breaks a graph
    one, two = y.chunk(2, -1)
    return torch.cat((-two, one), -1) * cos[:, None], torch.sum(y, [0, 1])


def test_inductor_is_given_one_graph_of_atens_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    graphs: list[torch.fx.GraphModule] = []
    given = lambda graph, tensors: graphs.append(graph) or graph
    monkeypatch.setattr(torch._inductor, "compile", given)
    args = [drawn(24, H), drawn(D, H), drawn(24, 16)]
    plan = plain(rotated)
    plan(*args)
    run = ways.Inductor(plan.planned(*tree_flatten((tuple(args), {}))).torch)  # pyright: ignore[reportOptionalMemberAccess]
    for _ in range(2):
        for got, own in zip(run(args), rotated(*args), strict=True):
            assert torch.equal(got, own)
    (graph,) = graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert all(isinstance(x, torch._ops.OpOverload) or x is operator.getitem for x in called)


def test_a_call_like_an_earlier_one_is_found_by_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = drawn(24, H), nn.Linear(H, D, dtype=torch.bfloat16)
    call = fuse(lambda x: F.relu(w(x)), judged=False)
    planned = Fused.planned
    asked = []
    noted = lambda self, *args: asked.append(1) or planned(self, *args)
    monkeypatch.setattr(Fused, "planned", noted)

    def asks(*args: Any, **named: Any) -> bool:
        asked.clear()
        found = call(*args, **named)
        assert torch.allclose(found, F.relu(w(*args, *named.values())), atol=2e-2)
        return bool(asked)

    assert asks(x)
    with torch.no_grad():
        assert [asks(x), asks(drawn(24, H, seed=1))] == [False, False]
        assert asks(x=x) and asks(x.mT.contiguous().mT) and asks(drawn(33, H))
        assert not asks(x)
        w.eval()
        assert asks(x) and not asks(x)
        w.weight = nn.Parameter(2 * w.weight)
        assert not asks(x)  # it is read anew
    assert asks(x)  # its weight has a gradient
    assert asks(x.requires_grad_())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.bfloat16 and "autocast" in call.why
    mapped = torch.func.vmap(call)(x.detach()[None])
    assert "transform" in call.why and mapped.shape == (1, 24, D)


def test_what_inductor_runs_has_gradients() -> None:
    x, w = drawn(24, H).requires_grad_(), drawn(D, H)
    call = fuse(lambda x, w: F.relu(F.linear(x, w)), judged=False)
    call(x, w)
    known = call.planned(*tree_flatten(((x, w), {})))
    known.run = ways.Inductor(known.torch)
    expected = F.relu(F.linear(x, w))
    assert torch.allclose(call(x, w), expected, atol=1e-2)
    own, theirs = (torch.autograd.grad(y.sum(), x) for y in (call(x, w), expected))
    assert torch.allclose(own[0], theirs[0], atol=1e-2)


def test_the_module_is_the_function() -> None:
    from coda_agent import fuse as module

    x, w = torch.ones(4, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    assert isinstance(module(judged=False)(lambda x, w: F.relu(x @ w)), Fused)
    package: Any = module  # to a type checker it is the function
    assert package.fuse is fuse
    assert torch.equal(package.mm(torch.mm, (x, w), F.relu), x @ w)


def test_the_call_of_flexgemm() -> None:
    x, w = drawn(24, H), drawn(D, H).T
    assert torch.allclose(mm(torch.mm, (x, w), F.relu), F.relu(torch.mm(x, w)), atol=1e-2)


def test_as_a_decorator() -> None:
    @fuse(judged=False)
    def named(x: Tensor, w: Tensor) -> Tensor:
        """Its words."""
        return torch.tanh(F.linear(x, w))

    assert named.__name__ == "named"
    assert named.__doc__ == "Its words."
    x, w = drawn(24, H), drawn(D, H)
    assert torch.allclose(named(x=x, w=w), torch.tanh(F.linear(x, w)), atol=1e-2)


class Gated(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(H, FF, False, dtype=torch.bfloat16), scale

    @fuse(judged=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.relu(self.up(x))


class Doubly(Gated):
    @fuse(judged=False)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_decorated_method_is_each_objects_own() -> None:
    one, other, x = Gated(1.0), Gated(-3.0), drawn(24, H)
    copied = copy.deepcopy(one)
    for module in (one, other, one, copied):
        expected = module.scale * F.relu(x @ module.up.weight.T)
        assert torch.allclose(module(x), expected, atol=1e-2)
        assert module.forward.why == "" and module.forward is module.forward
    assert isinstance(Gated.forward, Fused) and copied.forward is not one.forward
    with torch.no_grad():
        copied.up.weight.zero_()
    assert torch.equal(copied(x), torch.zeros(24, FF).bfloat16()) and one(x).any()
    both = Doubly(2.0)
    assert torch.allclose(both(x), 1 + 2 * F.relu(x @ both.up.weight.T), atol=2e-2)
    loaded = pickle.loads(pickle.dumps(both))
    assert torch.equal(loaded(x), both(x))


def test_a_copy_of_what_was_called_has_modules_of_its_own() -> None:
    torch.manual_seed(0)
    fused, x = plain(MLP().bfloat16()), drawn(24, D)
    before = fused(x)
    copied = copy.deepcopy(fused)
    own: Any = copied.function
    with torch.no_grad():
        own.down.weight.zero_()
        own.down.bias.zero_()
    assert torch.equal(copied(x), x) and torch.equal(fused(x), before)


def test_second_derivatives_are_pytorchs() -> None:
    """Also where one argument is made of another, and where a factor is a gradient's alone."""

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, w)) * F.linear(y, w)

    args = [drawn(24, 64).requires_grad_(), drawn(FF, 64).requires_grad_()]

    def seconds(call: Any) -> tuple[Tensor, ...]:
        x, w = args
        factor = torch.ones(24, FF).bfloat16().requires_grad_()
        first = torch.autograd.grad(call(x, x.square() + x, w), [x, w], factor, create_graph=True)
        total = torch.stack([g.float().square().sum() for g in first]).sum()
        return torch.autograd.grad(total, [*args, factor])

    fused = plain(function)
    with warnings.catch_warnings(action="error"):
        for got, own in zip(seconds(fused), seconds(function), strict=True):
            assert own.any() and norms(got, own.float()) < 0.01
    assert fused.why == ""


def test_shapes_that_do_not_multiply_are_said_by_the_users_names() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x + 1, w))

    fused = plain(function)
    with pytest.raises(RuntimeError):  # PyTorch's own
        fused(drawn(24, 64), drawn(FF, 32))
    assert "linear of v1 [24, 64], w [96, 32]: " in fused.why
    assert re.search(r"\[24, 64\].*\[32, 96\]|24x64 and 32x96", fused.why), fused.why


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function or a module, not str"):
        fuse("layer")  # pyright: ignore[reportArgumentType]


SOURCE = """
import torch.nn.functional as F
from torch import Tensor

def inner(x: Tensor, r: Tensor, wo: Tensor, g: Tensor, w: Tensor):
    h = r + F.linear(x, wo)
    return F.linear(F.rms_norm(h, (h.shape[-1],), g, 1e-5), w)
"""


@pytest.mark.sampled(0.3)
def test_what_computes_less_than_an_accepted_kernel_has_its_tiles() -> None:
    """And not its level: it is judged by itself."""

    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    x, gate, up = drawn(40, D), drawn(FF, D), drawn(FF, D, seed=2)
    fused = plain(gated)
    plan = fused.plan(x, gate, up)
    assert plan is not None and isinstance(plan.kernels[0].made, Made)
    about = plan.kernels[0].made.about
    assert (about.like, about.accepted, about.level) == ("gemm_swiglu", "", "")
    gpu, less = "NVIDIA H200", generated.gemm_swiglu.without("D")
    assert about.program.digest == less.programs["gemm_swiglu"].digest
    for shape in ((16, 2 * FF, D), (4096, 28672, 4096), (777, 2048, 1024)):
        assert about.kernel.choose(*shape, "bfloat16", gpu=gpu) == less.choose(
            *shape, "bfloat16", gpu=gpu
        )
    assert torch.allclose(fused(x, gate, up), gated(x, gate, up), atol=2e-2)
    again = plain(gated).plan(x, gate, up)
    assert again is not None and isinstance(again.kernels[0].made, Made)
    assert again.kernels[0].made.about.like == "gemm_swiglu"


def test_explain_shows_a_functions_plan_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    sizes = {"x": "512,1024", "r": "512,2048", "wo": "2048,1024", "g": "2048", "w": "256,2048"}
    args = ["explain", f"{path}:inner", *(a for x in sizes for a in ("--shape", f"{x}={sizes[x]}"))]
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    steps = found["steps"]
    assert [s["launches"] for s in steps] == [2, 1, 1, 1]
    # x, wo, the residual, g; h scaled, and one float a row. h itself nobody needs.
    moved = 2 * (512 * 1024 + 2048 * 1024 + 512 * 2048 + 2048) + 2 * 512 * 2048 + 4 * 512
    assert steps[0]["bytes"] == moved
    assert steps[3]["what"].startswith("gemm_rmsnorm, accepted")
    assert sum(s["bytes"] for s in steps) < found["eager"]["bytes"]
    assert steps[3]["floor_us"] == pytest.approx(
        1e6 * max(2 * 512 * 256 * 2048 / 990e12, steps[3]["bytes"] / 4.8e12)
    )
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(app, [*args, "--html", str(page)])
    assert result.exit_code == 0 and result.stdout.strip() == f"wrote {page}"
    text = page.read_text("utf-8")
    assert all(s["step"] in text for s in steps)
    assert [s["takes"] for s in steps] == [[], [0], [1], [0, 2]]
    refused = CliRunner().invoke(app, [*args, "--stage", "ptx", "--html", str(page)])
    assert refused.exit_code != 0 and "--html shows a plan" in refused.stderr
    missing = CliRunner().invoke(app, [*args, "--html", "/proc/none/plan.html"])
    assert missing.exit_code != 0 and "cannot be written" in missing.stderr
