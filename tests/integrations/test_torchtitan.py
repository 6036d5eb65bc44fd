"""torchtitan picks the kernel up by name, and trains as with its own feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from torchtitan.config.override import (  # pyright: ignore[reportMissingImports]
    OverrideConfig,
    apply_overrides,
)
from torchtitan.models.common.config_utils import (  # pyright: ignore[reportMissingImports]
    make_ffn_config,
)
from torchtitan.models.common.feed_forward import (  # pyright: ignore[reportMissingImports]
    SigmoidGatedFeedForward,
)
from torchtitan.models.common.linear import Linear  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]

NAME = "coda_agent.integrations.torchtitan.swiglu"
INIT = {"weight": partial(nn.init.trunc_normal_, std=0.1)}


class Stack(Module):
    """Feed-forwards in turn, each with a residual."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([x.build() for x in config.layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def built(*imports: str, gated: bool = False) -> tuple[Any, list[str]]:
    layers = [
        make_ffn_config(dim=64, hidden_dim=96, w1_param_init=INIT, w2w3_param_init=INIT)
        for _ in range(2)
    ]
    if gated:
        one = layers[1]
        gate = Linear.Config(in_features=64, out_features=1, param_init=INIT)
        layers[1] = SigmoidGatedFeedForward.Config(w1=one.w1, w2=one.w2, w3=one.w3, gate=gate)
    config = Stack.Config(layers=layers)
    lines = apply_overrides(OverrideConfig(imports=list(imports)), config)
    model = config.build()
    model.init_states()
    return model, lines


def test_it_is_picked_up_by_name_and_keeps_checkpoints() -> None:
    stock, _ = built()
    ours, lines = built(NAME)
    assert [line.split(": ")[1] for line in lines] == [
        f"layers.{i} FeedForward.Config -> SwiGLU.Config" for i in range(2)
    ]
    assert ours.layers[0].w13.shape == (96, 2, 64) and 0.05 < ours.layers[0].w13.std() < 0.15
    saved = stock.state_dict()
    ours.load_state_dict(saved)
    again = ours.state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)


def test_a_feed_forward_that_computes_more_is_left_alone() -> None:
    _, lines = built(NAME, gated=True)
    assert [line.split()[2] for line in lines] == ["layers.0"]


def losses(*models: Any) -> list[torch.Tensor]:
    """Of a few steps of each, on the same data."""
    x, y = torch.randn(2, 2, 40, 64).bfloat16()
    found = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        some = []
        for _ in range(8):
            loss = (model(x) - y).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            some.append(loss.item())
        found.append(torch.tensor(some))
    return found


def test_it_trains_as_torchtitans_own() -> None:
    torch.manual_seed(0)
    stock, (ours, _) = built()[0], built(NAME)
    ours.load_state_dict(stock.state_dict())
    theirs, own = losses(stock.bfloat16(), ours.bfloat16())
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(own, theirs, rtol=0.005, atol=0)


def test_the_compiler_of_torch_takes_it_whole() -> None:
    torch.manual_seed(0)
    model = built(NAME)[0].bfloat16()
    x = torch.randn(2, 40, 64).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    meet = f"file://{tmp_path}/meet"
    distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_it_trains_under_fsdp_with_weights_in_float32() -> None:
    torch.manual_seed(0)
    models = built()[0], built(NAME)[0]
    models[1].load_state_dict(models[0].state_dict())
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for model in models:
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    theirs, own = losses(*models)
    assert models[1].layers[0].w13.dtype == torch.float32
    torch.testing.assert_close(own, theirs, rtol=0.005, atol=0)


@pytest.mark.usefixtures("alone")
def test_weights_in_dtensors_are_left_to_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = built(NAME)[0].layers[0]
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    layer.w13 = nn.Parameter(distribute_tensor(layer.w13.detach(), mesh, [Shard(0)]))
    monkeypatch.setattr(type(layer).__mro__[1], "forward", lambda *_: "torchtitan's own")
    assert layer(torch.zeros(1, 64)) == "torchtitan's own"
