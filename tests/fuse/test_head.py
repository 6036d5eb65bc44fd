"""A head and its loss some rows at a time: what is taken, what is left whole, and the numbers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from coda_agent.agent.authors.composer.calls import ancestors
from coda_agent.fuse import backend, fuse, head
from coda_agent.fuse.nodes import PLAIN
from tests.fuse.test_joint import leaves, norms, watched
from tests.fuse.test_regions import drawn

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
ROWS, WORDS, WIDTH = 512, 160, 32
TARGETS = torch.arange(ROWS) * 7 % WORDS


@pytest.fixture(autouse=True)
def a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarter of the logits be held."""
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * ROWS // 4)


def gradients(
    loss: Callable[..., Any], args: list[Tensor], upstream: Any = 1.0, *, wide: bool = False
) -> list[Tensor]:
    given = [(a.double() if wide else a.clone()).requires_grad_() for a in args]
    value, *others = leaves(loss(*given))
    (value * upstream).sum().backward()
    return [x.detach() for x in (value, *others)] + [a.grad for a in given if a.grad is not None]


def compared(loss: Callable[..., Any], args: list[Tensor], upstream: Any = 1.0) -> str:
    """What is noted of a loss, which with its gradients is as near to float64 as PyTorch's."""
    with watched() as seen:
        got = gradients(fuse(loss), args, upstream)
    own, truth = gradients(loss, args, upstream), gradients(loss, args, upstream, wide=True)
    for mine, pytorch, true in zip(got, own, truth, strict=True):
        assert norms(mine, true) <= 1.25 * norms(pytorch, true) + 1e-3
    (shown,) = seen
    return "\n".join(shown.notes)


def logits(h: Tensor, w: Tensor) -> Tensor:
    z = F.linear(h, w)
    return z if z.dtype == torch.float64 else z.float()


def rows_left_out(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(logits(h, w), TARGETS.where(TARGETS > 40, -100))


def of_sequences(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h.view(4, -1, WIDTH), w)
    return F.cross_entropy(z.view(-1, WORDS), TARGETS)


def capped(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(logits(h, w) / 5) * 5, TARGETS, label_smoothing=0.1)


def with_z_loss(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)
    return F.cross_entropy(z, TARGETS, reduction="sum") / 7 + z.logsumexp(-1).square().mean()


def biased(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).float(), TARGETS)


def log_probability(h: Tensor, w: Tensor) -> Tensor:
    return -torch.log_softmax(logits(h, w), -1).gather(-1, TARGETS[:, None]).mean()


def other_way_round(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.view(WIDTH, WORDS)).float(), TARGETS)


def distilled(h: Tensor, w: Tensor) -> Tensor:
    teacher = torch.softmax(logits(h.detach(), w.detach()) * 0.5, -1)
    return F.kl_div(F.log_softmax(logits(h, w), -1), teacher, reduction="batchmean")


def of_known_words(h: Tensor, w: Tensor) -> Tensor:
    """KL to the probabilities of a teacher's eight likeliest words."""
    words = (torch.arange(ROWS * 8) * 13 % WORDS).view(4, -1, 8)
    teacher = torch.softmax(words / 40, -1)
    p = logits(h.view(4, -1, WIDTH), w).log_softmax(-1).gather(-1, words)
    return (teacher * (teacher.log() - p)).sum(-1).mean()


LOSSES = [rows_left_out, of_sequences, capped, with_z_loss, biased, log_probability,
          other_way_round, distilled, of_known_words]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.__name__)
@pytest.mark.one_in(2)
def test_gradients_of_some_rows_at_a_time_are_as_near_as_pytorchs(loss: Any) -> None:
    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2, drawn(WORDS, seed=2)]
    args = args[: loss.__code__.co_argcount]
    assert "computed 128 rows at a time" in compared(loss, args, 0.5)


def test_no_logits_are_whole_or_kept_and_sums_of_gradients_are_in_kernels() -> None:
    args = [drawn(ROWS, WIDTH).requires_grad_(), drawn(WORDS, WIDTH, seed=1).requires_grad_()]
    kept: list[tuple[list[int], torch.dtype]] = []
    with (
        watched() as seen,
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(([*x.shape], x.dtype)) or x, lambda x: x
        ),
    ):
        fuse(rows_left_out)(*args)
    assert ([WORDS, WIDTH], torch.float32) in kept
    assert not any(shape[-1] == WORDS or ROWS // 4 in shape for shape, _ in kept)
    (shown,) = seen
    assert not any(f"[{ROWS}, {WORDS}]" in line for line in shown.graph)
    assert any(f"[{ROWS // 4}, {WORDS}]" in line for line in shown.graph)
    ours = [x for x in shown.steps if x.what.startswith("composed")]
    # One after the other: logits, and what they add to the weight's gradient.
    kinds = ["add" if x.step.startswith("add") else x.step.split(" + ")[1][:9] for x in ours]
    assert kinds == ["logsumexp", *["logsumexp", "add"] * 3]


def test_a_frozen_head_gives_gradients_of_its_input_alone() -> None:
    w = drawn(WORDS, WIDTH, seed=1)
    loss = lambda h: F.cross_entropy(logits(h, w.to(h.dtype)), TARGETS)
    assert "computed 128 rows at a time" in compared(loss, [drawn(ROWS, WIDTH) * 4])


WEIGHTS = torch.linspace(-1, 2, ROWS)
KEPT = TARGETS % 5 > 0


def of_rows(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(logits(h, w), TARGETS.where(KEPT, -100), reduction="none")


def of_biased_rows(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    z = F.linear(h, w, b).to(torch.promote_types(h.dtype, torch.float32))
    return F.cross_entropy(z, TARGETS, reduction="none", label_smoothing=0.1)


def cooled_with_entropy(h: Tensor, w: Tensor) -> Tensor:
    p = torch.log_softmax(logits(h.view(4, -1, WIDTH), w) / 0.7, -1)
    chosen = p.gather(-1, TARGETS.view(4, -1, 1)).squeeze(-1)
    return (chosen - 0.1 * (p.exp() * p).sum(-1)).view(-1)


def probable(h: Tensor, w: Tensor) -> Tensor:
    p = logits(h.view(4, -1, WIDTH), w).softmax(-1)
    return (p.gather(-1, TARGETS.view(4, -1, 1)).squeeze(-1) + p.square().sum(-1)).view(-1)


def perplexity(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(logits(h, w) / 4, TARGETS).exp()


def of_rows_and_all(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x = of_rows(h, w)
    return x, x.mean()


def of_a_teacher(h: Tensor, w: Tensor) -> Tensor:
    teacher = torch.log_softmax(logits(h.detach().roll(1), w.detach()) / 3, -1)
    return F.kl_div((logits(h, w) / 3).log_softmax(-1), teacher, reduction="none",
                    log_target=True).sum(-1)  # fmt: skip


def of_likeliest_words(h: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        values, words = (logits(h.roll(1), w) / 8).topk(8, dim=-1)
    teacher, p = values.softmax(-1), (logits(h, w) / 2).log_softmax(-1).gather(-1, words)
    return (teacher * (teacher.log() - p)).sum(-1) + p.logsumexp(-1).square()


def log_probabilities(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h.view(4, -1, WIDTH), w)
    return z.gather(-1, TARGETS.view(4, -1, 1)).squeeze(-1) - z.logsumexp(-1)


def summed_by_sequences(h: Tensor, w: Tensor) -> Tensor:
    """DPO of one call of all sequences; what is gathered is taken of a dim of one."""
    z = logits(h.view(4, -1, WIDTH), w)
    chosen = z.gather(-1, TARGETS.view(4, -1, 1))[..., 0]
    total = ((chosen - z.logsumexp(-1)) * KEPT.view(4, -1)).sum(-1)
    return -F.logsigmoid(0.01 * (total[:2] - total[2:])).mean()


def preferred(h: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """DPO of two calls of a policy, and of a reference, whose weights are other ones."""
    kept = KEPT.view(4, -1)
    with torch.no_grad():
        frozen = [(log_probabilities(x, other) * kept).sum(-1) for x in (h, h.roll(7, 0))]
    won, lost = ((log_probabilities(x, w) * kept).sum(-1) for x in (h, h.roll(7, 0)))
    return -F.logsigmoid(0.01 * ((won - frozen[0]) - (lost - frozen[1]))).mean()


def clipped(h: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """GRPO of whole sequences' ratios, with entropies and a distance to a reference."""
    p = torch.log_softmax(logits(h.view(4, -1, WIDTH), w) / 0.9, -1)
    chosen = p.gather(-1, TARGETS.view(4, -1, 1)).squeeze(-1)
    with torch.no_grad():
        frozen = log_probabilities(h, other)
    kept, gain = KEPT.view(4, -1), torch.tensor([[1.0], [-0.5], [0.2], [-2.0]])
    ratio = (0.01 * ((chosen - frozen) * kept).sum(-1, keepdim=True)).exp()
    distance = (0.1 * (frozen - chosen)).exp() - 0.1 * (frozen - chosen) - 1
    loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.04 * distance
    return ((loss + 0.01 * (p.exp() * p).sum(-1)) * kept).sum() / kept.sum()


AGAIN = {of_rows: 1, of_biased_rows: 1, cooled_with_entropy: 1, probable: 1, perplexity: 1,
         of_rows_and_all: 1, of_a_teacher: 2, of_likeliest_words: 1, summed_by_sequences: 1,
         preferred: 1, clipped: 1}  # fmt: skip
SCALAR = perplexity, summed_by_sequences, preferred, clipped


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Graphs as the partitioner leaves them."""
    found, called = list[fx.Graph](), backend._called
    keep = lambda module, *args, **options: found.append(module.graph) or called(module, *args)
    monkeypatch.setattr(backend, "_called", keep)
    return found


def is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1] == WORDS


def check_some_rows_live(graph: fx.Graph, heads: int) -> None:
    """Check that few logits are live at once: each product of a head awaits the one before."""
    wide = [n for n in graph.nodes if is_wide(n) and n.meta["val"].numel() > WIDTH * WORDS]
    places = {node: i for i, node in enumerate(graph.nodes)}
    last = {node: max(places[user] for user in node.users) for node in wide}
    assert max([sum(places[x] <= places[n] < last[x] for x in wide) for n in wide] or [0]) <= 8
    results = [node for node in wide if node.target in (*PLAIN, operator.getitem)]
    made = list(dict.fromkeys(n.args[0] if n.target is operator.getitem else n for n in results))
    free = sum(one not in ancestors([other]) for one, other in itertools.pairwise(made))
    assert free == (heads - 1)


@pytest.mark.parametrize("loss", AGAIN, ids=lambda x: x.__name__)
@pytest.mark.one_in(4)
def test_what_a_row_weighs_is_known_when_its_logits_are_made_again(
    loss: Any, passes: list[fx.Graph]
) -> None:
    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2]
    third = {"b": drawn(WORDS, seed=2), "other": drawn(WORDS, WIDTH, seed=3)}
    args += [third[x] for x in loss.__code__.co_varnames[2 : loss.__code__.co_argcount]]
    upstream = 0.5 if loss in SCALAR else WEIGHTS
    notes = compared(loss, args, upstream)
    assert f"rows at a time in both passes, by {AGAIN[loss]} product" in notes
    assert "whole" not in notes
    forward, backward = passes
    for graph in passes:
        sizes = [
            n.meta["val"].numel() for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)
        ]
        assert max(sizes) < WORDS * ROWS // 2
    saved = {node.name for node in forward.output_node().all_input_nodes}
    assert not any(is_wide(n) and n.meta["val"].numel() > WIDTH * WORDS for n in
                   forward.nodes if n.name in saved)  # fmt: skip
    check_some_rows_live(backward, 1 + (loss is preferred))


@pytest.mark.parametrize("loss", [of_rows, log_probabilities], ids=lambda x: x.__name__)
def test_no_kernel_stores_logits_that_are_made_again(loss: Any) -> None:
    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2]
    with watched() as seen:
        fuse(loss)(*(x.requires_grad_() for x in args)).sum().backward()
    (shown,) = seen
    outputs = [[kind for kind, _ in program["outputs"].values()] for _, program in shown.kernels]
    forward = [x for x in outputs if "RowLogSumExp" in x]
    assert len(forward) == 4 and not any("Tile" in x for x in forward)
    assert outputs.count(["Tile"]) == 4  # gradients of logits alone


def test_gradients_of_entropies_are_made_of_logits_that_are_stored_once() -> None:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        z = logits(h, w)
        total = z.logsumexp(-1)
        entropy = total - (z.softmax(-1) * z).sum(-1)
        chosen = z.gather(-1, TARGETS[:, None])[:, 0] - total
        return ((chosen.exp() - 0.1 * entropy) * WEIGHTS).mean()

    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2]
    with watched() as seen:
        fuse(loss)(*(x.requires_grad_() for x in args)).backward()
    (shown,) = seen
    programs = [program for _, program in shown.kernels]
    kinds = [[kind for kind, _ in program["outputs"].values()] for program in programs]
    assert sum("RowGather" in x for x in kinds) == 4 and max(x.count("Tile") for x in kinds) == 1
    heads = [p for p, x in zip(programs, kinds, strict=True) if "RowGather" in x]
    assert all("Tile" not in program["operands"].values() for program in heads)


def test_rows_of_infinities_have_the_logarithms_of_pytorchs_sums() -> None:
    w = drawn(WORDS, WIDTH, seed=1)
    x = torch.zeros(ROWS, 1, dtype=torch.bfloat16)
    x[3], x[5] = -torch.inf, torch.inf
    of_rows = lambda h, b: (logits(h, w) + b.float()).logsumexp(-1)
    args = [drawn(ROWS, WIDTH), x]
    torch.testing.assert_close(fuse(of_rows)(*args), of_rows(*args), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("loss", [of_rows, cooled_with_entropy], ids=lambda x: x.__name__)
def test_numbers_of_rows_alone_are_made_some_rows_at_a_time(
    loss: Any, passes: list[fx.Graph]
) -> None:
    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2]
    with watched() as seen, torch.no_grad():
        got = fuse(loss)(*args)
    own, truth = loss(*args), loss(*(x.double() for x in args))
    assert norms(got, truth) <= 1.25 * norms(own, truth) + 1e-3
    assert "and its loss are computed 128 rows at a time" in "\n".join(seen[0].notes)
    (graph,) = passes
    assert not any(is_wide(n) and n.meta["val"].numel() == WORDS * ROWS for n in graph.nodes)


def test_a_square_weights_input_is_no_teachers_logits() -> None:
    args = [drawn(4, ROWS // 4, WORDS), drawn(WORDS, WORDS, seed=1)]
    notes = compared(lambda h, w: F.linear(h, w).float().square().mean(), args)
    assert "and its loss are computed 128 rows at a time" in notes


WHOLE = {
    "it is a result": lambda h, w: (F.cross_entropy(z := logits(h, w), TARGETS), z),
    "a gradient needs a value of all rows": lambda h, w: F.cross_entropy(
        (z := logits(h, w)) - z.mean(), TARGETS
    ),
    "compares it with what was made of it before": lambda h, w: (
        logits(h, w).log_softmax(-1).amax(-1).exp().mean().exp()
    ),
    "cumsum reads it whole": lambda h, w: F.cross_entropy(logits(h, w).cumsum(-1), TARGETS),
}


@pytest.mark.parametrize("why", WHOLE)
def test_what_needs_all_rows_has_them(why: str) -> None:
    args = [drawn(ROWS, WIDTH), drawn(WORDS, WIDTH, seed=1)]
    assert why in compared(WHOLE[why], args)


def test_logits_that_fit_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * ROWS)
    args = [drawn(ROWS, WIDTH), drawn(WORDS, WIDTH, seed=1)]
    assert compared(rows_left_out, args).count("row") == 2


def test_labels_logits_are_read_of_those_that_are_kept_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "LOGITS", 1 << 30)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), TARGETS % 64, reduction="none").sum()

    args = [drawn(ROWS, WIDTH), drawn(64, WIDTH, seed=1)]
    truth = [x.double().requires_grad_() for x in args]
    for grad in (False, True):
        with watched() as seen, torch.set_grad_enabled(grad):
            found = fuse(loss, dynamic=False)(*(x.requires_grad_(grad) for x in args))
        (shown,) = seen
        programs = [program["outputs"].values() for _, program in shown.kernels]
        heads = [{kind for kind, _ in x} for x in programs if "RowLogSumExp" in str(x)]
        assert heads == [{"Tile" if grad else "RowGather", "RowLogSumExp"}]
        assert (found.double() - loss(*truth)).abs() < 1e-2 * loss(*truth)
    exact = torch.autograd.grad(loss(*truth), truth)
    for x, wide in zip(torch.autograd.grad(found, args), exact, strict=True):
        assert (x.double() - wide).norm() < 2e-2 * wide.norm()
