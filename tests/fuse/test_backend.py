"""What torch.compile promises, by the backend `coda`: sizes that change, autocast, checkpoints,
budgets, graph breaks, regions compiled apart, frozen parameters, caches, threads."""

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coda_agent.fuse import backend, fuse, joint
from coda_agent.fuse.show import Shown
from tests.fuse.test_joint import IDS, Model, as_near, graded, norms, run
from tests.fuse.test_regions import FF, D, drawn


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[Shown]]:
    torch._dynamo.reset()
    found = list[Shown]()
    token = joint.SEEN.set(found)
    with warnings.catch_warnings(action="ignore"):
        warnings.filterwarnings(
            "error", message=".*boxed arguments"
        )  # what is needed no more stays
        yield found
    joint.SEEN.reset(token)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 160, shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(model: Model, call: Any, *args: Tensor, worse: float = 1.5) -> None:
    """Loss and gradients of a call are as near to float64 as PyTorch's own."""
    truth = graded(run, copy.deepcopy(model).double(), *args)
    assert as_near(graded(call, model, *args), graded(run, model, *args), truth, worse)


def counts(seen: list[Shown]) -> list[int]:
    return [len(shown.kernels) for shown in seen]


def test_sizes_that_change_have_one_set_of_kernels(seen: list[Shown]) -> None:
    model = Model(layers=1).bfloat16()
    call = fuse(run)
    for shape in ((2, 24), (3, 16), (5, 40), (4, 33), (7, 5)):
        check(model, call, ids(*shape))
    assert counts(seen) == [9, 9]


def test_a_router_of_sizes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of its largest is scattered, and spelled by columns that are counted."""

    def largest(model: nn.Linear, x: Tensor) -> Tensor:
        return model(x).softmax(-1).max(-1).values.sum()

    called = kernels_of(monkeypatch)
    torch.manual_seed(0)
    model, call = nn.Linear(D, 16, bias=False).bfloat16(), fuse(largest, dynamic=True)
    for rows in (24, 40, 7):
        x = drawn(rows, D)
        truth = graded(largest, copy.deepcopy(model).double(), x.double())
        assert as_near(graded(call, model, x), graded(largest, model, x), truth)
    assert sum(called) == 1


def test_autocast(seen: list[Shown]) -> None:
    model = Model(layers=1)

    def under(model: Model, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids)

    truth = graded(run, copy.deepcopy(model).double(), IDS)
    assert as_near(graded(fuse(under), model, IDS), graded(under, model, IDS), truth)
    assert counts(seen)[0] >= 7


def test_a_square_product_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operand, which is cast, has the extent of its result, and is no tile of its epilogue."""
    known = kernels_of(monkeypatch)
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(24, 64)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return torch.relu(layer(x)) / 2

    exact = torch.relu(x.double() @ layer.weight.double().T + layer.bias.double()) / 2
    found = fuse(run, dynamic=False)(x).double()
    assert (found - exact).norm() < 1.05 * (run(x).double() - exact).norm() and known == [1]


def kernels_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each compiled graph calls from now on."""
    known, called = list[int](), backend._called

    def noted(module: torch.fx.GraphModule, *args: Any, **named: Any) -> Any:
        known.append(sum("coda_agent.kernel" in str(n.target) for n in module.graph.nodes))
        return called(module, *args, **named)

    monkeypatch.setattr(backend, "_called", noted)
    return known


def test_checkpointed_layers_run_their_kernels_again(
    seen: list[Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, known = Model(layers=1).bfloat16(), kernels_of(monkeypatch)

    def checkpointed(model: Model, ids: Tensor) -> Tensor:
        return checkpoint(model, ids, use_reentrant=False)  # pyright: ignore[reportReturnType]

    check(model, fuse(checkpointed), IDS)
    assert sum(counts(seen)) == 9 and known[1] > 4  # of the backward pass alone


def test_a_budget_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as config

    model, known = Model(layers=1).bfloat16(), kernels_of(monkeypatch)
    for budget in (1.0, 0.4):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            check(model, fuse(run), IDS)
    assert known[0] == known[2] and known[1] < known[3]


def saved(call: Any, model: Model) -> int:
    """Bytes that a call keeps for the backward pass, beside parameters."""
    kept = dict[int, int]()

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    call(model, IDS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(model, IDS)
    own = {p.data_ptr() for p in model.parameters()}
    return sum(size for place, size in kept.items() if place not in own)


def test_no_more_is_saved_than_under_torch_compile() -> None:
    from torch._inductor.compile_fx import compile_fx

    model = Model(layers=1).bfloat16()
    plain = torch.compile(
        run, backend=lambda module, inputs: compile_fx(module, inputs, backend._called)
    )
    assert saved(fuse(run), model) <= saved(plain, model)


def test_graph_breaks_and_layers_compiled_apart(seen: list[Shown]) -> None:
    model = Model(layers=1).bfloat16()
    model.norm.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    check(model, fuse(run), IDS)
    assert len(seen) > 1 and sum(counts(seen)) >= 7


def test_modules_compiled_in_place(seen: list[Shown]) -> None:
    model, x = nn.Sequential(Gated(), Gated()).bfloat16(), drawn(24, D)
    loss = lambda model, x: model(x).double().square().sum()
    truth = graded(loss, copy.deepcopy(model).double(), x.double())
    own = graded(loss, model, x)
    for layer in model:
        layer.compile(backend="coda")
    assert as_near(graded(loss, model, x), own, truth) and sum(counts(seen)) >= 5


class Gated(nn.Module):
    """A module that is a loss by itself, and its input's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(D, FF), nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_parameters_that_are_frozen(seen: list[Shown]) -> None:
    model = Model(layers=1).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name or ".q" in name)
    check(model, fuse(run), IDS)
    assert sum(counts(seen)) >= 6


def test_inference(seen: list[Shown]) -> None:
    model = Model(layers=1).bfloat16()
    truth = copy.deepcopy(model).double()(IDS)
    with torch.no_grad():
        assert norms(fuse(run)(model, IDS), truth) <= 1.5 * norms(model(IDS), truth) + 1e-3
    with torch.inference_mode():
        assert norms(fuse(run)(model, IDS), truth) <= 1.5 * norms(model(IDS), truth) + 1e-3
    assert min(counts(seen)) >= 4


@pytest.mark.slow
def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    model = Model(layers=1).bfloat16()
    call = fuse(run)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        check(model, call, IDS)


def test_a_pass_of_the_users_own_runs_before() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Own(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(len(graph.nodes))

        def uuid(self) -> Any:
            return "own"

    ran = list[int]()
    model = Model(layers=1).bfloat16()
    check(model, fuse(run, options={"joint_custom_post_pass": Own()}), IDS)
    assert len(ran) == 1
    assert joint.Kernels().uuid() != joint.Kernels(Own()).uuid()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_has_the_strides_that_its_kernel_reads(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel gives repeated heads as its innermost dim; attention's kernel read them as rows."""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (
            (F.linear(x, w[i]) * 1.5).unflatten(-1, (2, 8)).transpose(1, 2) for i in range(3)
        )
        one = torch.chunk(v, 2, dim=1)[0].repeat(1, 2, 1, 1)
        return F.scaled_dot_product_attention(q, k, one, is_causal=True)

    x, w = 4 * drawn(2, 24, 32), 2 * drawn(3, 16, 32, seed=1)
    called, call = kernels_of(monkeypatch), fuse(attend)
    for rows in (24, 24 - 7 * dynamic):
        part = x[:, :rows].clone()
        for dim in (0, 1) if dynamic else ():
            torch._dynamo.mark_dynamic(part, dim)
        truth, own = attend(part.double(), w.double()), attend(part, w)
        assert norms(call(part, w), truth) <= 1.3 * norms(own, truth)
    assert sum(called) > 0


def test_writes_in_place_stay_where_a_mask_is_folded(seen: list[Shown]) -> None:
    def attend(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2])
        key = torch.empty_like(x)
        key[..., :8] = x[..., 8:]
        key[..., 8:] = x[..., :8]
        mask = (places[:, None] >= places).expand(len(x), 1, -1, -1)
        return F.scaled_dot_product_attention(x, key, x, attn_mask=mask).mul_(2)

    x = drawn(2, 2, 12, 16).float()
    torch.testing.assert_close(fuse(attend)(x), attend(x))


def test_threads_have_their_own_results() -> None:
    models, x = [Gated().bfloat16() for _ in range(3)], drawn(24, D)
    for i, model in enumerate(models):
        with torch.no_grad():
            model.down.weight.mul_(4 * i + 4)
    wrong = list[int]()

    def calls(i: int) -> None:
        call = fuse(models[i])
        with torch.no_grad():
            for rows in (24, 9, 24):
                got, own = call(x[:rows]), models[i](x[:rows])
                wrong.extend([i] * (norms(got, own.double()) > 0.01))

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_cpu_computes_what_pytorch_counts_in_16_bits() -> None:
    x, w = drawn(300, D), drawn(320, D, seed=1)
    function = lambda x, w: F.linear(x, w) * (2 * torch.eye(300, 320, dtype=x.dtype) - 1)
    torch.testing.assert_close(fuse(function)(x, w), function(x, w), atol=1e-2, rtol=1e-2)
