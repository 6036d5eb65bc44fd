"""Tests of evals/training.py: steps of a tiny Llama, on a CPU and in two processes of it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coda_agent.evals.cases import Absent
from coda_agent.evals.training import LLAMA, OTHERS, _Model, cases, fold_mask, parts
from tests.evals.small import measured

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {case.name: case for case in cases()}


def cells(root: Path, name: str) -> dict[str, Any]:
    return {key[1]: cell for key, cell in measured(root, 64, CASES[name]).items()}


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "name", ["train-1b", "train-1b fp8", *(name for name in CASES if "layers of" in name)]
)
def test_first_losses_are_the_models_own(tmp_path: Path, name: str) -> None:
    found = cells(tmp_path, name)
    for contender in {"ours", "bf16"} & {*found}:
        assert found[contender].error < 2e-3, contender
        assert "kernels of the backend" in found["ours"].note
        assert "attention: _scaled_dot_product_flash_attention" in found[contender].note
        assert "first loss " in found[contender].note
    for contender in ("compile", "compile, mask folded"):
        assert found[contender].absent == "needs a GPU"


def test_a_step_trains_the_shared_weights_or_its_own() -> None:
    setup = CASES["train-1b"].make("cpu", 64)
    make: Any = CASES["train-1b"].make
    assert make.args[0] == LLAMA and setup.limit == 0.01
    home = _Model(LLAMA.shrunk(64), False, "cpu")
    before = {n: p.detach().clone() for n, p in home.model.named_parameters()}
    apart, loss, _ = home.contender("bf16", True)
    shared, _, _ = home.contender("ours", False)
    assert {*map(id, shared.parameters())} == {*map(id, home.model.parameters())}
    assert not {*map(id, apart.parameters())} & {*map(id, home.model.parameters())}
    loss(home.ids)
    assert all(torch.equal(p, before[n]) and p.grad is None
               for n, p in home.model.named_parameters())  # fmt: skip


def test_a_contender_begins_where_the_one_before_it_did() -> None:
    setup = CASES["train-1b"].make("cpu", 64)
    first = setup.makers["ours"]()
    loss = first.checked()["loss"]
    for i in range(3):
        first.call(i)
    assert setup.makers["ours"]().checked()["loss"] == loss


def test_a_library_that_changes_the_module_changes_no_other_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger replaces classes of transformers' module: models made later must not have them. Its
    loss is wrong here, and so it has no part."""
    liger, home = ModuleType("liger_kernel.transformers"), _Model(LLAMA.shrunk(64), False, "cpu")
    norm, rotation = home.home.LlamaRMSNorm, home.home.apply_rotary_pos_emb

    def scaled(model: Any) -> None:
        home.home.LlamaRMSNorm = home.home.apply_rotary_pos_emb = None
        with torch.no_grad():
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 4)

    setattr(liger, "apply_liger_kernel_to_llama", scaled)  # noqa: B010
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    home.contender("liger", False)
    assert home.home.LlamaRMSNorm is norm and home.home.apply_rotary_pos_emb is rotation

    def four_times(model: Any) -> None:
        with torch.no_grad():
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 4)

    setattr(liger, "apply_liger_kernel_to_llama", four_times)  # noqa: B010
    found = cells(tmp_path, "train-1b")
    assert found["liger"].absent.startswith("computes something else: error ")
    assert found["ours"].error < 2e-3


def test_a_folded_mask_is_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile transformers hands attention a mask; folded, it is told to be causal."""
    home, seen = _Model(LLAMA.shrunk(64), False, "cpu"), list[Any]()

    def spy(graph: Any, _: Any) -> Any:
        for node in graph.graph.find_nodes(
            op="call_function", target=F.scaled_dot_product_attention
        ):
            seen.append((node.kwargs.get("attn_mask") is None, node.kwargs.get("is_causal")))
        return graph

    losses = []
    for fold in (False, True):
        seen.clear()
        torch.compiler.reset()
        if fold:
            fold_mask(home.model)
        called = torch.compile(home.model, dynamic=False, backend=spy)
        losses.append(float(called(input_ids=home.ids, labels=home.ids).loss))
        assert {causal for _, causal in seen} == {fold} and {none for none, _ in seen} == {fold}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@torch.no_grad()
def test_a_folded_mask_keeps_windows() -> None:
    from transformers import AttentionMaskInterface  # pyright: ignore[reportMissingImports]

    home = _Model(OTHERS["gemma-3-1b"].shrunk(64), False, "cpu")
    for p in home.model.parameters():
        p.mul_(8)  # so that it matters what attention reads
    own = home.model(home.ids).logits
    fold_mask(home.model)
    torch.testing.assert_close(home.model(home.ids).logits, own)
    AttentionMaskInterface.register("causal", lambda *_, **__: None)
    assert (home.model(home.ids).logits - own).abs().max() > 0.1 * own.abs().max()


def test_the_kernels_of_attention_are_named() -> None:
    q = torch.randn(1, 2, 16, 16)
    ran = parts(partial(F.scaled_dot_product_attention, q, q, q, is_causal=True))
    assert ran == "attention: _scaled_dot_product_flash_attention_for_cpu"
    assert parts(lambda: q @ q.mT) == "attention: none of PyTorch's"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("2 GPUs" in name or "fp8" in name))
        for name in CASES
        if name not in ("train-1b", "train-1b fp8") and "layers of" not in name
    ],
)
def test_losses_and_two_processes_agree_with_one(tmp_path: Path, name: str) -> None:
    found = cells(tmp_path, name)
    for contender, cell in found.items():
        if contender != "liger" and not contender.startswith("compile"):
            assert cell.error < (1e-3 if "fp8" in name else 1e-4), contender
            assert ("losses of steps 1, 5" in cell.note) == ("20 steps" in name)
    assert "ours" in found


def test_without_transformers_there_is_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Absent, match="transformers is not installed"):
        CASES["train-1b"].make("cpu", 64)
