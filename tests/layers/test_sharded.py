"""Patched models on two ranks: under FSDP2 as near to float64 as PyTorch's own, with the same state
dicts; tensor parallelism is refused."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.layers import apply_coda_kernels, linear_residual_norm, packing
from coda_agent.layers.packing import interleave, pack_qkv
from coda_agent.layers.patched import Tables
from tests.layers.test_functional import within
from tests.layers.test_patch import KINDS, built
from tests.ranks import on_two_ranks

CONFIG = KINDS["llama"]


def test_models_on_two_ranks() -> None:
    """All in one pair of processes, which take 5 s to begin."""
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(_all, folder)


def _all(mesh: Any, folder: str) -> None:
    _refusals(mesh)
    states(mesh, folder)
    head(mesh)
    near(mesh)  # it and what follows have other sizes of large weights
    late(mesh)
    in_fp8(mesh)


def test_layers_share_a_table_of_rotations() -> None:
    """FSDP's mixed precision makes a new tuple of the same cosines and sines for each layer."""
    cos, sin = torch.rand(1, 8, 16), torch.rand(1, 8, 16)
    tables = Tables()
    first = tables.find((cos, sin), 2, 3, 64)
    assert tables.find((cos, sin), 2, 3, 64) is first
    assert tables.find((cos, sin.clone()), 2, 3, 64) is not first


def sharded(model: Any, mesh: Any, *tail: Any, **options: Any) -> Any:
    """A model whose layers FSDP2 gathers one by one, and its `tail` apart."""
    from torch.distributed.fsdp import fully_shard

    for part in (*model.model.layers, *tail):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def full(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def trained(model: Any, mesh: Any) -> dict[str, Tensor]:
    """The loss and all gradients of the second of two steps without an optimizer, on rows that
    ranks do not share."""
    g = torch.Generator("cpu").manual_seed(mesh.get_rank())
    ids = torch.randint(0, 96, (2, 23), generator=g, device="cpu").to(mesh.device_type)
    found = None
    for _ in range(2):
        model.zero_grad()
        found = model.train()(ids, labels=ids).loss
        found.backward()
    assert found is not None
    wrap = "_checkpoint_wrapped_module."
    grads = {n.replace(wrap, ""): full(p.grad) for n, p in model.named_parameters()}
    for i in range(len(model.model.layers)):
        at = f"model.layers.{i}"
        if f"{at}.mlp.gate_proj.weight" in grads:  # as they are packed
            pair = (grads.pop(f"{at}.mlp.{n}_proj.weight") for n in ("gate", "up"))
            grads[f"{at}.mlp.gate_up_weight"] = interleave(*pair)
            q, k, v = (grads.pop(f"{at}.self_attn.{n}_proj.weight") for n in "qkv")
            packed = pack_qkv(q, k, v, (len(q) // 16, len(k) // 16))
            grads[f"{at}.self_attn.qkv_weight"] = packed
    return {"loss": found.detach(), **grads}


def hold(ours: Any, theirs: Any, truth: dict[str, Tensor], mesh: Any) -> None:
    """Hold that a model's gradients are as near to the truth as another's, and its loss nearly.
    A GPU adds in another order: a tensor of few elements is one draw of roundings."""
    times = 1.0 if mesh.device_type == "cpu" else 1.5
    found, others = trained(ours, mesh), trained(theirs, mesh)
    assert found.keys() == others.keys() == truth.keys()
    for name, exact in truth.items():
        if name == "loss":
            torch.testing.assert_close(found[name].double(), exact.double(), rtol=2e-3, atol=0)
        else:
            within(found[name], others[name], exact, times=times)


def near(mesh: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def same(model: Any) -> None:
        pass

    def wrapped(model: Any) -> None:
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(layer)

    def reentrant(model: Any) -> None:
        model.model.checkpoint = True

    def wide(model: Any) -> None:
        model.float()

    truth = trained(sharded(built(CONFIG).double(), mesh), mesh)
    cases: list[tuple[bool, Callable[[Any], None], dict[str, Any]]] = [
        (False, same, {"reshard_after_forward": True}),
        (False, same, {"reshard_after_forward": False}),
        (False, wrapped, {"reshard_after_forward": False}),
        (True, wrapped, {}),
        (True, reentrant, {}),
        (True, wide, {"mp_policy": mixed()}),
    ]
    for i, (pack, change, options) in enumerate(cases):
        # As on a GPU, large weights are turned out of what FSDP gathers again.
        packing._large = lambda _, large=i != 1: large
        ours, theirs = built(CONFIG), built(CONFIG)
        report = apply_coda_kernels(ours, pack=pack)
        for model in (ours, theirs):
            change(model)
            sharded(model, mesh, **options)
        hold(ours, theirs, truth, mesh)
        ids = torch.arange(16).view(2, 8)
        with torch.no_grad():
            logits = ours.eval()(ids).logits
            torch.testing.assert_close(logits, theirs.eval()(ids).logits, rtol=0.1, atol=0.05)
        assert report._layers[0].kept is None  # whole weights, of which FSDP would not say a write


def mixed() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def late(mesh: Any) -> None:
    """What is sharded already is looked at as a forward pass has it: here in bfloat16."""
    truth = trained(sharded(built(CONFIG).double(), mesh), mesh)
    ours, theirs = (built(CONFIG).float() for _ in range(2))
    for model in (ours, theirs):
        sharded(model, mesh, [model.model.norm, model.lm_head], mp_policy=mixed())
    assert [*apply_coda_kernels(ours).replaced] == ["layers.0", "layers.1"]
    hold(ours, theirs, truth, mesh)


def in_fp8(mesh: Any) -> None:
    """A layer quantises what was gathered: as without FSDP, but for roundings in between."""
    ours, alone = built(CONFIG), built(CONFIG)
    apply_coda_kernels(alone, pack=True, fp8=True)
    apply_coda_kernels(ours, pack=True, fp8=True)
    expected, found = trained(alone, mesh), trained(sharded(ours, mesh), mesh)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=2e-3, atol=0)
    for name, t in expected.items():
        if name != "loss":
            torch.distributed.all_reduce(t)
            assert (found[name] - t / 2).norm() <= 0.1 * (t / 2).norm(), name


def states(mesh: Any, folder: str) -> None:
    from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver

    by_dcp: Any = state_dict.get_model_state_dict

    for pack in (False, True):
        plain, ours = (built(CONFIG) for _ in range(2))
        report = apply_coda_kernels(ours, pack=pack)
        sharded(plain, mesh)
        sharded(ours, mesh)
        for get in (torch.nn.Module.state_dict, by_dcp):
            theirs, state = get(plain), get(ours)
            assert state.keys() == theirs.keys()
            for name, t in state.items():
                assert t.placements == theirs[name].placements, name
                local = t.to_local()
                assert local.untyped_storage().nbytes() == local.nbytes, name
                assert torch.equal(full(t), full(theirs[name])), name
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(1.5)
        at = str(Path(folder) / str(pack))
        state_dict_saver.save(by_dcp(plain), checkpoint_id=at)
        state_dict_loader.load(state := by_dcp(ours), checkpoint_id=at)
        state_dict.set_model_state_dict(ours, state)
        for name, t in plain.state_dict().items():
            assert torch.equal(full(ours.state_dict()[name]), full(t)), name
        options = state_dict.StateDictOptions(full_state_dict=True)
        whole = {n: t / 3 for n, t in by_dcp(plain, options=options).items()}
        state_dict.set_model_state_dict(ours, dict(whole), options=options)
        for name, t in by_dcp(ours, options=options).items():
            assert torch.equal(t, whole[name]), name
        trained(ours, mesh)
        if pack:
            with pytest.raises(TypeError, match="fully_shard has taken do not become"):
                report.revert()
            trained(ours, mesh)
        else:
            report.revert()
            assert trained(ours, mesh).keys() == trained(plain, mesh).keys()


def _refusals(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def parallel(model: Any) -> Any:
        for layer in model.model.layers[1:]:
            plan: dict[str, Any] = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
            plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
            plan |= {n: RowwiseParallel() for n in ("self_attn.o_proj", "mlp.down_proj")}
            parallelize_module(layer, mesh, plan)
        return model

    ids = torch.arange(16).view(2, 8)
    said = r"layers\.1\.self_attn\.q_proj\.weight is a DTensor of \(Shard\(dim=0\),\)"
    model = parallel(built(CONFIG))
    expected = model(ids).logits
    with pytest.raises(TypeError, match=said):
        apply_coda_kernels(model)
    assert torch.equal(model(ids).logits, expected)  # its first layer is as it was, too
    assert all("forward" not in vars(m) for m in model.modules())
    model = built(CONFIG)
    report = apply_coda_kernels(model)
    parallel(model)
    with pytest.raises(TypeError, match=said):
        model(ids)
    report.revert()
    assert torch.equal(model(ids).logits, expected)

    model = built(CONFIG)
    apply_coda_kernels(model)
    fully_shard(model.model.layers[0].mlp, mesh=mesh)
    with pytest.raises(TypeError, match=r"layers\.0\.mlp\.gate_proj\.weight is a DTensor"):
        model(ids)

    with pytest.raises(TypeError, match="Llama is sharded already; pack=True before fully_shard"):
        apply_coda_kernels(sharded(built(CONFIG), mesh), pack=True)

    model = built(CONFIG)
    apply_coda_kernels(model)
    sharded(model, mesh)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    with pytest.raises(TypeError, match=r"layers\.0 or of the layer behind it has a main_grad"):
        model(ids)

    a, x = torch.randn(4, 32).bfloat16(), torch.randn(4, 64).bfloat16()
    weight = distribute_tensor(torch.randn(64, 32).bfloat16(), mesh, [Replicate()])
    with pytest.raises(TypeError, match="linear_residual_norm got a DTensor"):
        linear_residual_norm(a, weight, x, torch.ones(64).bfloat16(), 1e-5)


def head(mesh: Any) -> None:
    transformers: Any = importlib.import_module("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, head_dim=16)

    def made(kind: torch.dtype, tail: str, patched: str = "") -> Any:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).bfloat16().to(kind)
        ends = model.model.norm, model.lm_head
        parts = {"of the model": [], "together": [[*ends]], "each": ends}[tail]
        if patched == "before":
            assert not apply_coda_kernels(model).left
        sharded(model, mesh, *parts, reshard_after_forward=True)
        if patched == "after":
            assert not apply_coda_kernels(model).left
        return model

    for tail in ("of the model", "together", "each"):
        truth = trained(made(torch.float64, tail), mesh)
        for patched in ("before", "after"):
            ours, theirs = made(torch.bfloat16, tail, patched), made(torch.bfloat16, tail)
            hold(ours, theirs, truth, mesh)
