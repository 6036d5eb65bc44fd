"""Kernels in the graphs of functions and models: which there are, and their numbers beside
PyTorch's own, in both passes."""

import copy
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config

from coda_agent.evals.judge import plans
from coda_agent.fuse import backend, explain, fuse, joint, kernels
from coda_agent.fuse.show import Shown
from tests.fuse.test_regions import FF, KV, D, H, drawn


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*interpreted by PyTorch")
        yield


def norms(got: Any, expected: Any) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@contextmanager
def watched() -> Iterator[list[Shown]]:
    """The graphs that are compiled meanwhile, each anew, as `explain` has them."""
    seen = list[Shown]()
    token = joint.SEEN.set(seen)
    torch._dynamo.reset()
    try:
        with config.patch(force_disable_caches=True):  # or the passes do not run
            yield seen
    finally:
        joint.SEEN.reset(token)


def names(shown: Shown) -> list[str]:
    """The accepted kernels that compute the same as those of a graph, or have their tiles."""
    ours = [c.what for c in shown.steps if not c.what.startswith("PyTorch")]
    return [re.sub(r"composed(, with tiles of )?|, accepted", "", x).split(":")[0] for x in ours]


def leaves(y: Any) -> list[Tensor]:
    return [*y] if isinstance(y, tuple | list) else [y]


def compared(function: Callable[..., Any], args: list[Tensor], worse: float = 1.02) -> Shown:
    """How a function is cut, without gradients; its numbers are as near to float64 as PyTorch's."""
    wide = [a.double() if a.is_floating_point() else a for a in args]
    with torch.no_grad(), watched() as seen:
        got, own, truth = map(leaves, (fuse(function)(*args), function(*args), function(*wide)))
    (shown,) = seen
    for mine, pytorch, true in zip(got, own, truth, strict=True):
        assert (mine.shape, mine.dtype) == (pytorch.shape, pytorch.dtype)
        assert mine.stride() == pytorch.stride()
        assert norms(mine, true) <= worse * norms(pytorch, true) + 1e-6
    return shown


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


def test_a_llama_layer_has_the_papers_cuts() -> None:
    """Section 3.2.1: the output projection carries residual, the norm's weight and the statistic;
    gate and up are one product, scaled after it; the rest is one number a row."""
    args = [drawn(2, 24, H), drawn(2, 24, D, seed=1), drawn(D, H), drawn(D).abs() + 0.5]
    args += [drawn(FF, D), drawn(FF, D, seed=2), drawn(D, FF)]
    shown = compared(attention_output, args)
    assert names(shown)[:2] == ["gemm_residual_partial_rmsnorm", "gemm_rmsnorm_swiglu"]
    assert len(shown.kernels) == 3
    assert len(shown.notes) == 2 and "carried past" in shown.notes[0]


def test_projections_of_several_widths_are_one_kernel_behind_a_spelled_norm() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5]
    args += [drawn(D, D), drawn(KV, D), drawn(KV, D, seed=3)]
    shown = compared(next_projections, args)
    assert names(shown) == ["gemm_residual_partial_rmsnorm", "gemm_rmsnorm"]


def normed_heads(x: Tensor, w: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, w).view(x.shape[0], -1, g.shape[0])
    n = F.rms_norm(y, (g.shape[0],), g, 1e-6)
    a, b = n.chunk(2, -1)
    return n * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def transposed_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers rotates them."""
    q = F.linear(x, w).view(x.shape[0], x.shape[1], -1, 64).transpose(1, 2)
    a, b = q.chunk(2, -1)
    return q * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def test_heads_are_normed_and_rotated_in_the_kernel() -> None:
    angle = torch.rand(48, 64, generator=torch.Generator().manual_seed(0)) * 6
    tables = [angle.cos().bfloat16(), angle.sin().bfloat16()]
    norm = [drawn(48, D), drawn(128, D), drawn(64).abs() + 0.5]
    assert len(compared(normed_heads, [*norm, *tables]).kernels) == 1
    tables = [t.view(2, 24, 64) for t in tables]
    assert len(compared(transposed_heads, [drawn(2, 24, D), drawn(128, D), *tables]).kernels) == 1


def test_a_loss_leaves_a_number_a_row() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5, drawn(160, D)]
    index = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    index[0, :5] = -100
    shown = compared(head, [*args, index], worse=5)
    outputs = shown.kernels[1][1]["outputs"].values()
    assert {kind for kind, _ in outputs} == {"RowLogSumExp", "RowGather"}


@pytest.mark.parametrize("biased", [False, True])
def test_the_gradient_of_a_loss_is_of_the_logits_that_are_stored(biased: bool) -> None:
    """At a logit of 20 an unrounded sum of exponentials is off by 6 % from that of rounded ones."""

    def loss(*args: Any) -> Tensor:
        x, w, b, t = args
        return F.cross_entropy((F.linear(x, w) + b if biased else F.linear(x, w)).float(), t)

    x, w, b = drawn(24, H) * 8, drawn(160, H) * 40, drawn(160)
    t = F.linear(x, w).argmax(1)  # most are right, and surely so
    gradient = lambda *args: torch.autograd.grad(loss(*args, t), args[0])[0]
    given = [x.requires_grad_(), w, b]
    truth = gradient(*(a.detach().double().requires_grad_() for a in given))
    with watched() as seen:
        (got,) = torch.autograd.grad(fuse(loss)(*given, t), x)
    assert norms(got, truth) <= 1.1 * norms(gradient(*given), truth)
    assert any("logsumexp" in step.step for step in seen[0].steps)


def test_a_norm_that_is_needed_itself_is_left_whole() -> None:
    def both(x: Tensor, w: Tensor, v: Tensor) -> Any:
        n = F.rms_norm(F.linear(x, w), (D,), None, 1e-5)
        return n, F.silu(F.linear(n, v))

    shown = compared(both, [drawn(24, H), drawn(D, H), drawn(FF, D)])
    assert shown.notes == [] and len(shown.kernels) == 2


def test_a_product_of_other_types_is_pytorchs_with_its_reason() -> None:
    function = lambda x, w: F.relu(F.linear(x, w))
    shown = compared(function, [drawn(24, H).float(), drawn(D, H).float()])
    assert shown.kernels == []
    assert "PyTorch: multiplies float32 with float32" in [c.what for c in shown.steps]
    shown = compared(F.linear, [drawn(24, H), drawn(D, H)])
    assert [c.what for c in shown.steps] == [
        "PyTorch: nothing follows it that a kernel could take along"
    ]


class Model(nn.Module):
    """Layers of a decoder with grouped heads and rotation, and its loss."""

    def __init__(self, width: int = 128, head_width: int = 32, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_width = head_width
        linear = lambda n, k: nn.Linear(k, n, bias=False)
        self.embed = nn.Embedding(160, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": linear(width, width), "k": linear(64, width), "v": linear(64, width),
                    "o": linear(width, width), "gate": linear(192, width),
                    "up": linear(192, width), "down": linear(width, 192),
                    "one": nn.RMSNorm(width, 1e-5), "two": nn.RMSNorm(width, 1e-5),
                }
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm, self.head = nn.RMSNorm(width, 1e-5), linear(160, width)

    def forward(self, ids: Tensor) -> Tensor:
        x, (_, rows) = self.embed(ids), ids.shape
        turns = 1e4 ** (-torch.arange(0, self.head_width, 2) / self.head_width)
        angle = (torch.arange(rows)[:, None] * turns).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def heads(y: Tensor) -> Tensor:
            return y.view(*ids.shape, -1, self.head_width).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat((-b, a), -1) * sin

        for layer in self.layers:
            part: Any = layer
            n = part["one"](x)
            q, k, v = (heads(part[p](n)) for p in "qkv")
            y = F.scaled_dot_product_attention(
                turned(q), turned(k), v, is_causal=True, enable_gqa=True
            )
            x = x + part["o"](y.transpose(1, 2).flatten(2))
            n = part["two"](x)
            x = x + part["down"](F.silu(part["gate"](n)) * part["up"](n))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


def graded(call: Any, model: nn.Module, *args: Tensor) -> list[Tensor]:
    """The loss of a model and the gradients of its parameters."""
    model.zero_grad()
    loss = call(model, *args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def as_near(got: list[Tensor], own: list[Tensor], truth: list[Tensor], worse: float = 1.5) -> bool:
    """Whether results are as near to float64's as PyTorch's own."""
    wrong = [
        (norms(g, t), norms(o, t))
        for g, o, t in zip(got, own, truth, strict=True)
        if not norms(g, t) <= worse * norms(o, t) + 1e-3
    ]
    return not wrong


def run(model: nn.Module, *args: Tensor) -> Tensor:
    return model(*args)


IDS = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))


def test_a_decoder_runs_both_passes_by_kernels_as_exactly_as_pytorch() -> None:
    model = Model().bfloat16()
    truth = graded(run, copy.deepcopy(model).double(), IDS)
    own = graded(run, model, IDS)
    with watched() as seen:
        got = graded(fuse(run), model, IDS)
    assert as_near(got, own, truth)
    (shown,) = seen
    products = [c for c in shown.steps if c.step.startswith("mm") or " + " in c.step]
    left = [c.what for c in products if c.what.startswith("PyTorch")]
    assert len(shown.kernels) == 16
    assert {*left} == {"PyTorch: nothing follows it that a kernel could take along"}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.one_in(2)
def test_functions_at_random_have_right_gradients(number: int) -> None:
    text, args = plans.function(40_000 + number), plans.tensors(number)
    function = plans.called(text)

    def gradients(call: Any, args: list[Tensor]) -> list[Tensor]:
        given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
        results = [y for y in leaves(call(*given)) if y.requires_grad]
        floats = [g for g in given if g.requires_grad]
        total = torch.stack([(y.double() * (i + 1)).sum() for i, y in enumerate(results)]).sum()
        found = torch.autograd.grad(total, floats, allow_unused=True)
        return [g for g in found if g is not None]

    wide = [a.double() if a.is_floating_point() else a for a in args]
    truth = gradients(plans.called(text.replace(".float()", ".double()")), wide)
    own, got = gradients(function, args), gradients(fuse(function), args)
    assert len(got) == len(own)
    for g, o, t in zip(got, own, truth, strict=True):
        scale = t.norm().clamp(min=1e-3 * max(float(x.norm()) for x in truth))
        errors = [float((x.double() - t).norm() / scale) for x in (g, o)]
        assert errors[0] <= 2 * errors[1] + 0.02, (text, errors)


def test_a_kernel_whose_numbers_are_wrong_is_left_to_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(composition: Any) -> kernels.Kernel:
        found = right(composition)
        return kernels.Kernel(found.text.replace('"tanh"', '"sin"'), found.like, found.accepted)

    right = kernels.kernel_of
    monkeypatch.setattr(kernels, "kernel_of", wrong)
    monkeypatch.setattr(joint, "_JUDGED", {})
    shown = compared(lambda x, w: torch.tanh(8 * F.linear(x, w)), [drawn(24, H), drawn(D, H)])
    assert shown.kernels == []
    assert any(re.search(r"is off by \S+, and PyTorch's by", c.what) for c in shown.steps)


@pytest.mark.parametrize(
    "change", [(joint, "replace_regions"), (backend, "spell_by_rows")], ids=str
)
def test_where_a_pass_fails_the_graph_stays_as_it_was(
    change: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: fx.Graph, *_: Any) -> None:
        next(iter(graph.find_nodes(op="output"))).args = ((),)
        raise KeyError("s0")

    failing = fails if change[0] is backend else lambda known, _: fails(known.graph)
    monkeypatch.setattr(*change, failing)
    x, w = drawn(24, H), drawn(D, H)
    function = lambda x, w: torch.tanh(F.linear(x, w))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"left as it was: KeyError\('s0'\)"):
        assert norms(fuse(function)(x, w), function(x, w)) < 0.004


def test_rows_of_several_products_are_joined_behind_them() -> None:
    """Experts' as JetMoE has them, whose sizes leave the composer one choice of its own sizes."""
    counts = [15, 11, 18, 20]
    function = lambda x, w: torch.cat(
        [torch.exp(a @ b) for a, b in zip(x.split(counts), w, strict=True)]
    )
    compared(function, [drawn(64, H), torch.stack([drawn(H, D, seed=i) for i in range(4)])])


def test_parts_without_elements_are_left_out() -> None:
    """Register tokens of a DINOv3 that has none."""
    split = lambda x, w: F.linear(x, w).relu().split((2, 0, 22))
    function = lambda x, w: torch.stack([part.sum(0) for part in split(x, w)])
    compared(function, [drawn(24, H), drawn(D, H)])


def test_the_last_columns_before_the_first() -> None:
    """As MobileBERT's embeddings, which stand beside their neighbours'."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w).tanh()
        return torch.cat([y[:, -8:], y[:, :24]], 1).exp()

    compared(function, [drawn(24, H), drawn(D, H)])


def test_composing_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert explain(lambda x, w: torch.sin(F.linear(x, w)), drawn(24, H), drawn(D, H))[0].kernels
    assert torch.equal(torch.get_rng_state(), before)


def test_the_backward_pass_keeps_gate_and_up_and_not_their_product() -> None:
    args = [drawn(24, H), drawn(160, H), drawn(160, H, seed=1), drawn(D, 160, seed=2)]
    args = [a.requires_grad_() for a in args]
    mlp = lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
    kept: list[list[int]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append([*x.shape]) or x, lambda x: x
    ):
        fuse(mlp)(*args)
    assert kept.count([24, 160]) == 2


@pytest.mark.slow
def test_the_pass_alone_has_the_operator_that_its_kernels_call() -> None:
    text = "from coda_agent.fuse.joint import Kernels; import torch; torch.ops.coda_agent.kernel"
    subprocess.run([sys.executable, "-c", text], check=True)
