"""A model sharded by FSDP2 under the backend, on two processes: gradients are those of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from coda_agent.fuse.backend import coda
from tests.fuse.test_joint import norms
from tests.ranks import on_two_ranks

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip


def loss(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids).loss


def gradients_of(mesh: Any, by_layer: bool) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG).bfloat16().train()
    own, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    called = loss if by_layer else torch.compile(loss, backend=coda)
    for layer in model.model.layers if by_layer else ():
        layer.compile(backend=coda)
    ids = torch.randint(96, (4, 32))
    called(model, ids.chunk(2)[mesh.get_local_rank()]).backward()
    for whole in (own, truth):
        loss(whole, ids).backward()
    pairs = zip(model.parameters(), own.parameters(), truth.parameters(), strict=True)
    for sharded, pytorch, true in pairs:
        error = norms(sharded.grad.full_tensor(), true.grad)
        assert error <= 1.5 * norms(pytorch.grad, true.grad) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_sharded_model_has_the_gradients_of_a_whole_one(by_layer: bool) -> None:
    on_two_ranks(gradients_of, by_layer)
