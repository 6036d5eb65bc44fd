"""Plans of whole functions, and `fuse`."""

import copy
import gc
import itertools
import json
import logging
import operator
import pickle
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
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from coda_agent import generated
from coda_agent.agent import workspace
from coda_agent.agent.cli import app
from coda_agent.agent.judge import timing
from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.workspace import Kernel as Entry
from coda_agent.fuse import backend, choice, fused, kernels, run
from coda_agent.fuse import timing as ways
from coda_agent.fuse.choice import Made
from coda_agent.fuse.cut import BESIDE, MERGE, Plan
from coda_agent.fuse.fused import Fused, fuse, mm
from coda_agent.fuse.rules import CARRY
from coda_agent.fuse.run import Runner
from coda_agent.fuse.trace import Value, record
from coda_agent.primitives.errors import LaunchError
from coda_agent.runtime.kernel import Kernel


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
        assert got.dtype == function(x, w, t).dtype
        assert norms(got, truth[: len(got)]) < error
        stored = [v.shape for k in plan.kernels for v in k.outputs] if plan else []
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
        (in_place, "it writes in place (relu_)"),
        (drawing, "it draws random numbers"),
    ],
)
def test_what_cannot_be_planned_is_pytorchs_and_says_why(function: Any, why: str) -> None:
    args = [drawn(24, H), drawn(D, H)]
    fused = plain(function)
    assert torch.equal(fused(*args), function(*args))
    assert why in fused.why
    assert fused.plan(*args) is None


@pytest.mark.parametrize("function", [by_value, leaving_torch, by_number])
def test_where_a_value_is_asked_for_the_graph_ends(function: Any) -> None:
    """What comes before may be a kernel all the same."""
    x, w = drawn(24, H), drawn(D, H)
    fused = plain(function)
    for args in ([x, w], [-x, w]):
        assert torch.allclose(fused(*args), function(*args), atol=2e-2)
        line = function.__code__.co_firstlineno + 1
        assert f"Dynamo's graph ends at {__file__}:{line}, `return " in fused.why
    assert bool(fused.plan(x, w)) == (function is not by_value)


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


class AsTorch211(TorchFunctionMode):
    """Whose products of leading dims and a matrix ask symbolic sizes for their number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.matmul, Tensor.matmul) and args[0].ndim > 2:
            if type(args[0].shape[0]) is not int:
                raise RuntimeError("Cannot call numel() on tensor with symbolic sizes/strides")
        return func(*args, **(kwargs or {}))


def test_layers_of_one_code_have_one_plan_and_their_own_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, x = [MLP().bfloat16() for _ in range(3)], drawn(24, D)
    fused = [plain(layer) for layer in layers]
    packed, planned, pack, chosen = [], [], Kernel.pack, choice.chosen
    noted = lambda kernel, **parts: packed.append(1) or pack(kernel, **parts)
    monkeypatch.setattr(Kernel, "pack", noted)
    noted_plan = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted_plan)
    with torch.no_grad():
        for rows in (24, 24, 24, 7):
            for call, layer in zip(fused, layers, strict=True):
                assert torch.allclose(call(x[:rows]), layer(x[:rows]), atol=2e-2)
        assert len(packed) == 3 and len(planned) <= 2  # for each number of rows one
        layers[0].gate.weight.data.mul_(-1)
        fused[1].forget()
        assert torch.allclose(fused[0](x), layers[0](x), atol=2e-2) and len(packed) == 4
    assert len(run.PACKED) == 1  # what was forgotten is packed when it is needed
    call = layer = None
    del layers[:], fused[:]
    gc.collect()
    assert not run.PACKED


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
        torch._dynamo.reset()
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
        plan = choice.planned(record(lambda x: x + 1, (x,), {}))
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
from coda_agent.fuse.trace import record
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
from coda_agent.fuse.imports import import_quack
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
    graph = record(rotated, tuple(args), {})
    run = ways.Inductor(Runner(graph, graph.values))
    for _ in range(2):
        for got, own in zip(run(args), rotated(*args), strict=True):
            assert torch.equal(got, own)
    (graph,) = graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert all(isinstance(x, torch._ops.OpOverload) or x is operator.getitem for x in called)


def test_calls_of_one_layout_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = drawn(24, H), nn.Linear(H, D, dtype=torch.bfloat16)
    call = fuse(lambda x: F.relu(w(x)), judged=False)
    planned, chosen = [], choice.chosen
    noted = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted)

    def plans(*args: Any, **named: Any) -> bool:
        planned.clear()
        found = call(*args, **named)
        assert torch.allclose(found, F.relu(w(*args, *named.values())), atol=2e-2)
        return bool(planned)

    with torch.no_grad():
        assert [plans(x), plans(x), plans(drawn(24, H, seed=1)), plans(x=x)] == [True] + 3 * [False]
        assert plans(x.mT.contiguous().mT) and plans(drawn(33, H)) and not plans(x)
        w.weight = nn.Parameter(2 * w.weight)
        assert not plans(x)  # it is an input
    assert not plans(x) and "gradients" in call.why  # of its weight
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.bfloat16 and call.why == "autocast is on"
    mapped = torch.func.vmap(call)(x.detach()[None])
    assert "transform" in call.why and mapped.shape == (1, 24, D)


def test_the_module_is_the_function() -> None:
    from coda_agent import fuse as module

    x, w = torch.ones(4, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    assert isinstance(module(judged=False)(lambda x, w: F.relu(x @ w)), Fused)
    package: Any = module  # to a type checker it is the function
    assert package.fuse is fuse
    assert torch.equal(package.mm(torch.mm, (x, w), F.relu), x @ w)


def test_the_call_of_flexgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epilogues take tensors of the enclosing function; another closure is no other kernel."""
    x, w, call = drawn(24, H), drawn(D, H).T, fused._applied()
    tile, row = drawn(24, D), torch.rand(24, 1)
    planned, chosen = [], choice.chosen
    noted = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted)
    assert torch.allclose(mm(torch.mm, (x, w), F.relu), F.relu(torch.mm(x, w)), atol=1e-2)
    for seed in range(3):
        planned.clear()
        bias = drawn(D, seed=seed)
        epilogues: list[Any] = [
            lambda acc, b=bias: F.gelu(acc + b), lambda acc: acc * row + tile,
            lambda acc, b=bias: (acc + b, F.logsigmoid(acc + b)),
        ]  # fmt: skip
        for epilogue in epilogues:
            got, want = mm(torch.mm, (x, w), epilogue), epilogue(torch.mm(x, w))
            for one, own in zip(tree_leaves(got), tree_leaves(want), strict=True):
                assert torch.allclose(one, own, atol=2e-2)
            assert (call.way, call.why) == ("the plan", "")
        assert len(planned) == (0 if seed else 3)


def beside_a_tile(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) + t


def cast_before(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    y = F.relu(F.linear(x.to(torch.bfloat16), w.to(torch.bfloat16)))
    return (y * t).to(torch.float16)


@pytest.mark.parametrize("function", [beside_a_tile, cast_before])
def test_a_kernel_has_the_type_of_its_product_or_there_is_none(function: Any) -> None:
    x, w, t, call = drawn(24, H), drawn(D, H), drawn(24, D), plain(function)
    refused = set[tuple[torch.dtype, torch.dtype]]()
    for one, other in itertools.product((torch.bfloat16, torch.float16), repeat=2):
        args = x.to(one), w.to(one), t.to(other)
        got, want = call(*args), function(*args)
        assert got.dtype == want.dtype and norms(got, want.float()) < 0.01
        if "is float16, and what is beside it makes that bfloat16" in call.why:
            refused.add((one, other))
    other = torch.bfloat16 if function is beside_a_tile else torch.float16
    assert refused == {(torch.float16, other)}


def test_what_a_kernel_refuses_at_its_launch_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise LaunchError("it has no such tile")

    x, w, call = drawn(24, H), drawn(D, H), plain(lambda x, w: torch.erf(F.linear(x, w)))
    monkeypatch.setattr(Made, "__call__", refuse)
    for _ in range(2):
        assert torch.equal(call(x, w), torch.erf(F.linear(x, w)))
        assert call.why == "it has no such tile"


def test_composing_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = lambda: (torch.get_rng_state().tolist(), sys.stdout, logging.getLogger("torch").level)
    torch.manual_seed(7)
    before = seen()
    assert plain(lambda x, w: torch.sin(F.linear(x, w))).plan(drawn(24, H), drawn(D, H))
    assert seen() == before


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
        assert "gradients" in module.forward.why
        with torch.no_grad():
            assert torch.allclose(module(x), expected, atol=1e-2)
        assert module.forward.why == "" and len(module.forward.plan(x).kernels) == 1
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


def test_a_fused_module_is_used_as_the_module() -> None:
    mlp = MLP().bfloat16()
    fused, x = plain(mlp), drawn(24, D)
    assert [*fused.parameters()] == [*mlp.parameters()] and fused.up is mlp.up
    assert fused.eval() is fused and not mlp.training and not fused.training
    fused.load_state_dict({name: 0.5 * t for name, t in MLP().bfloat16().state_dict().items()})
    with torch.no_grad():
        assert torch.allclose(fused(x), mlp(x), atol=2e-2)
        fused.up = nn.Linear(D, FF, dtype=torch.bfloat16)
        assert fused.up is mlp.up and torch.allclose(fused(x), mlp(x), atol=2e-2)
        assert fused.to(torch.float64) is fused and fused(x.double()).dtype == torch.float64
    with pytest.raises(AttributeError, match="no attribute 'parameters'"):
        plain(by_value).parameters()


@fuse(judged=False)
def pickled_by_name(x: Tensor) -> Tensor:
    return x + 1


def test_a_fused_function_is_pickled_as_what_it_is_of() -> None:
    again = lambda fused: pickle.loads(pickle.dumps(fused))
    assert again(pickled_by_name) is pickled_by_name
    x, w, mlp, gated = drawn(24, D), drawn(FF, D), plain(MLP().bfloat16()), Gated(2.0)
    assert torch.equal(again(mlp)(x), mlp.function(x))
    loaded = again(plain(drawing))
    assert type(loaded) is Fused and loaded.function is drawing and not loaded.judged
    method, some = again(gated.forward), drawn(24, H)
    assert torch.equal(method(some), gated.forward(some))
    with pytest.raises(Exception, match=r"^Can't (pickle|get local object)[^\n]*$"):
        pickle.dumps(plain(lambda x: x + w))


def test_with_gradients_a_gpu_has_what_torch_compile_gives_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(all(isinstance(x, Tensor) for x in inputs))
        return module.forward

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(x, w)).view(x.shape[0], 2, -1)

    compiled = list[bool]()
    monkeypatch.setattr(backend, "_on_gpu", lambda _: True)
    known = torch._dynamo.lookup_backend
    found = lambda name: inductor if name == "inductor" else known(name)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", found)
    x, w, call = drawn(24, H), drawn(D, H).requires_grad_(), plain(function)
    for rows in (24, 24, 9, 7):
        given = x[:rows]
        (got,), (own,) = (torch.autograd.grad(f(given, w).sum(), w) for f in (call, function))
        assert torch.equal(got, own) and call.way == "torch.compile", call.why
        assert call.why == "gradients are asked for, and torch.compile has them"
    assert compiled == [True, False]  # sizes are symbols where they have changed
    with torch.no_grad():
        assert torch.allclose(call(x, w), function(x, w), atol=2e-2) and call.way == "the plan"


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
    for got, own in zip(seconds(fused), seconds(function), strict=True):
        assert own.any() and norms(got, own.float()) < 0.01


def test_an_error_is_the_functions_own(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x + 1, w))

    fused, x = plain(function), drawn(24, 64)
    for w in (drawn(FF, 32), drawn(FF, 64, 1)):
        with pytest.raises(RuntimeError) as own:
            function(x, w)
        with pytest.raises(RuntimeError) as caught:
            fused(x, w)
        assert type(caught.value) is RuntimeError and str(caught.value) == str(own.value)
    assert "fake_tensor" not in capfd.readouterr().err  # where torch logs a traceback
    w = drawn(FF, 64)
    assert torch.allclose(fused(x, w), function(x, w), atol=2e-2)
    assert fused.way == "the plan"


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


def beside(x: Tensor, w: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = F.silu(t)
    return F.linear(x, w) * h + t, F.linear(h, v)


def before(t: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.silu(t)
    return F.linear(F.linear(h, w).tanh(), v) * h


def wider(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) * (a.float() * b.float() + b.float().exp()).bfloat16()


@pytest.mark.parametrize(
    ("function", "shapes", "inside", "stored"),
    [
        # The other product reads what the kernel stores.
        (beside, [(24, H), (H, H), (24, H), (FF, H)], ["silu"], ["silu", "add"]),
        (before, [(24, H), (FF, H), (H, FF)], [], ["mul"]),  # a product before it reads it
        (
            wider,
            [(24, H), (H, H), (24, H), (24, H)],
            [],
            ["mul"],
        ),  # two matrices in the place of one
    ],
)
def test_what_is_made_of_tiles_that_a_kernel_reads_is_computed_in_it(
    function: Any,
    shapes: list[tuple[int, ...]],
    inside: list[str],
    stored: list[str],
) -> None:
    args = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    call = fuse(function, judged=False)
    plan = call.plan(*args)
    assert plan is not None
    kernel = plan.kernels[-1]
    own = [v.called for v in kernel.members if v.called in ("silu", "exp")]
    assert own == inside and [v.called for v in kernel.outputs] == stored
    fired = [n.why for n in plan.notes if n.rule == BESIDE and n.fired]
    assert bool(fired) == bool(inside)
    flat = lambda y: y if isinstance(y, tuple) else (y,)
    for got, want in zip(flat(call(*args)), flat(function(*args)), strict=True):
        assert torch.allclose(got, want, atol=2e-2)


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
    assert missing.exit_code != 0 and "cannot be used" in missing.stderr
