"""Training steps of transformers' models by `coda`, torch.compile and Liger.

- A step is forward, backward and a fused AdamW. All contenders train the same weights in turn, by
  one optimizer, on the same random tokens.
- `compile` is the model as transformers has it: under torch.compile it hands attention a mask, so
  that no flash attention runs. `compile, mask folded` leaves the mask out: attention is causal.
- Ours is the model as transformers has it, under torch.compile with the backend `coda`.
- What is checked is the first loss, against the model's own; each notes the attention that it ran.
- In FP8 the products of layers are: ours forward, torch.compile's backward too. Heads stay in bf16.
- On two GPUs FSDP2 shards layers, and what is left of the model; each trains weights of its own.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coda_agent.agent.judge.records import JsonObject
from coda_agent.evals.cases import Absent, Case, Contender, Setup, operators_of
from coda_agent.fuse.backend import coda

LIMIT, LOSSES, FAR = 0.01, 20, 0.5
"""How far a first loss may be from the model's own; the steps of a case of losses, and how far
these may be from PyTorch's."""


@dataclass(frozen=True)
class Work:
    """A language model of transformers', and each GPU's tokens a step."""

    kind: str
    sizes: dict[str, int]
    options: JsonObject
    batch: int = 8
    length: int = 4096

    def shrunk(self, by: int) -> Work:
        """Divide the sizes, down to two layers and heads."""
        if by == 1:
            return self
        sizes = {name: max(2, -(-size // by)) for name, size in self.sizes.items()}
        for name in sizes:
            if name.endswith(("intermediate_size", "head_dim", "vocab_size")):
                sizes[name] = 16 * -(-sizes[name] // 16)
        heads = self.sizes["num_attention_heads"]
        dim = max(16, self.sizes["hidden_size"] // heads // by)
        sizes["hidden_size"] = sizes["num_attention_heads"] * dim
        if "num_key_value_heads" in sizes:
            sizes["num_key_value_heads"] = 1
        batch, length = max(1, self.batch // by), max(16, self.length // by)
        return replace(self, sizes=sizes, batch=batch, length=length)

    def configured(self) -> tuple[Any, Any]:
        """Find the model's class, and make its configuration.

        Raises:
            Absent: transformers is not installed.
        """
        try:
            import transformers
        except ImportError:
            raise Absent("transformers is not installed") from None
        kind = getattr(transformers, self.kind)
        options = {"max_position_embeddings": self.length, **self.options}
        return kind, kind.config_class(**self.sizes, **options)

    @property
    def words(self) -> int:
        """Get the size of the vocabulary."""
        return self.sizes["vocab_size"]


def sizes_of(width: int, layers: int, heads: int, words: int, **others: int) -> dict[str, int]:
    """Name sizes as transformers does."""
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": words, **others}  # fmt: skip


def _tied(theta: float | None = None) -> JsonObject:
    rotation = {"rope_theta": theta} if theta else {}
    return {"tie_word_embeddings": True, "use_cache": False, **rotation}


LLAMA = Work(
    "LlamaForCausalLM",
    sizes_of(2048, 16, 32, 128256, intermediate_size=8192, num_key_value_heads=8),
    {**_tied(500000.0), "rms_norm_eps": 1e-5},
)  # fmt: skip
LAYERS = 6
"""The layers that other models have here, of 28, 26, 24 and 12: compiling takes minutes for all."""
# The dropout of the last two is left out, as in pretraining from scratch today: contenders would
# draw other numbers, and no first loss could be compared.
OTHERS = {
    "qwen3-0.6b": Work(
        "Qwen3ForCausalLM",
        sizes_of(1024, LAYERS, 16, 151936, intermediate_size=3072, num_key_value_heads=8,
                 head_dim=128),
        _tied(1000000.0), batch=4,
    ),
    "gemma-3-1b": Work(
        "Gemma3ForCausalLM",
        sizes_of(1152, LAYERS, 4, 262144, intermediate_size=6912, num_key_value_heads=1,
                 head_dim=256, sliding_window=512),
        _tied(), batch=2,
    ),
    "gpt2-medium": Work(
        "GPT2LMHeadModel", sizes_of(1024, LAYERS, 16, 50257),
        {**_tied(), "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        batch=16, length=1024,
    ),
    "bert-base": Work(
        "BertForMaskedLM", sizes_of(768, LAYERS, 12, 30522, intermediate_size=3072),
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, batch=32, length=512,
    ),
}  # fmt: skip


def cases() -> list[Case]:
    """List steps of Llama-3.2-1B, their losses, and other models' steps.

    One has half the tokens, since 80 GB hold all contenders of it.
    """
    compiled = "compile", "compile, mask folded"
    whole, narrow = ("ours", *compiled, "liger"), ("ours", "bf16", *compiled)
    alone = "ours", "eager", "ours, one GPU", "eager, one GPU"
    make, losses = partial(_step, LLAMA), partial(_losses, LLAMA)
    half = replace(LLAMA, batch=4)  # of which 80 GB hold all contenders
    return [
        Case("train-1b", whole, partial(make, False)),
        Case("train-1b of 4 sequences", whole, partial(_step, half, False)),
        Case("train-1b fp8", narrow, partial(_step, half, True)),
        Case("train-1b on 2 GPUs", whole, partial(make, False), ("ranks",), ranks=2),
        Case("train-1b fp8, 20 steps", ("ours", "bf16", "eager"), partial(losses, True), ()),
        Case("train-1b on 2 GPUs, 20 steps", alone, partial(losses, False), (), ranks=2),
        *(Case(f"train {LAYERS} layers of {name}", ("ours", *compiled), partial(_step, work, False))
          for name, work in OTHERS.items()),
    ]  # fmt: skip


class _Model:
    """A model, its tokens, and what makes contenders of it.

    Raises:
        Absent: transformers is not installed.
    """

    def __init__(self, work: Work, fp8: bool, device: str) -> None:
        made, config = work.configured()
        self.home: Any = sys.modules[made.__module__]
        self.fp8, self.device = fp8, device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # of parameters alone: frequencies stay float32
        try:
            with torch.device(device):
                self.model: Any = made(config).train()
        finally:
            torch.set_default_dtype(default)
        if getattr(self.model, "loss_type", None) is None:
            self.model.loss_type = "ForCausalLM"  # a warning in each call parts GPT-2's graph else
        shape = self.ranks * work.batch, work.length
        self.all = torch.randint(work.words, shape, device=device)
        self.ids = self.all[dist.get_rank() :: self.ranks] if self.ranks > 1 else self.all
        self.optimizer = adamw(self.model)
        self.start = [p.detach().to("cpu", copy=True) for p in self.model.parameters()]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the weights that it began with."""
        for p, start in zip(self.model.parameters(), self.start, strict=True):
            p.copy_(start)

    def loss(self) -> torch.Tensor:
        """Compute the model's loss by sequences: logits of all take 17 GB."""
        with torch.no_grad():
            return torch.stack([self.model(input_ids=i[None], labels=i[None]).loss
                                for i in self.all]).double().mean()  # fmt: skip

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Take a loss's mean over ranks."""
        total = loss.detach().double()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total / self.ranks

    def contender(
        self, name: str, own: bool
    ) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor], list[str]]:
        """Make a contender's model, what takes gradients on tokens, and notes.

        Args:
            own: Whether it has weights of its own.
        """
        before = {**vars(self.home)}
        shared = {} if own else {id(p): p for p in self.model.parameters()}
        model = copy.deepcopy(self.model, shared)
        notes = self._change(model, name)
        changed = {k: v for k, v in vars(self.home).items() if v is not before.get(k)}
        vars(self.home).update(before)
        if self.ranks > 1 and "one GPU" not in name:
            self._shard(model)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids=ids, labels=ids).loss

        if name.startswith("compile"):
            forward = torch.compile(forward, dynamic=False)
        elif name.startswith(("ours", "bf16")):
            options: JsonObject = {"fp8": "forward"} if self.fp8 and name != "bf16" else {}
            forward = torch.compile(forward, dynamic=False, backend=coda, options=options)

        def loss(ids: torch.Tensor) -> torch.Tensor:
            vars(self.home).update(changed)  # Liger replaces functions of the module
            try:
                found = forward(ids)
                found.backward()
            finally:
                vars(self.home).update(before)
            return found

        return model, loss, notes

    def _change(self, model: Any, name: str) -> list[str]:
        if name == "liger":
            from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
                apply_liger_kernel_to_llama,
            )

            apply_liger_kernel_to_llama(model=model)
        elif name.startswith("compile"):
            if "folded" in name:
                fold_mask(model)
            if self.fp8:
                from coda_agent.evals.float8 import converted

                return [converted(model)]
        return []

    def _shard(self, model: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device, (self.ranks,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)


def fold_mask(model: Any) -> None:
    """Have causal or full attention run without a mask when compiled."""
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]
    from transformers.integrations.sdpa_attention import (  # pyright: ignore[reportMissingImports]
        sdpa_attention_forward,
    )
    from transformers.masking_utils import (  # pyright: ignore[reportMissingImports]
        AttentionMaskInterface,
        sdpa_mask,
    )

    def mask(*args: Any, **options: Any) -> torch.Tensor | None:
        return sdpa_mask(*args, **options) if options.get("local_size") else None  # a window

    AttentionMaskInterface.register("causal", mask)
    AttentionInterface.register("causal", sdpa_attention_forward)
    model.config._attn_implementation = "causal"


def adamw(model: nn.Module, rate: float = 1e-5) -> torch.optim.Optimizer:
    """Make the optimizer of a contender."""
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)


def parts(step: Callable[[], object]) -> str:
    """Name the attention kernels that a step ran; count ours."""
    ran = operators_of(step)
    names = {name.removeprefix("aten::") for name in ran if "_scaled_dot_product" in name}
    kernels = sorted(name for name in names if "backward" not in name)
    attention = ", ".join(kernels) or "none of PyTorch's"
    found = f"attention: {attention}"
    count = ran.get("coda_agent::kernel", 0)
    return f"{found}; {count} kernels of the backend" if count else found


def _step(work: Work, fp8: bool, device: str, shrink: int) -> Setup:
    home = _Model(work.shrunk(shrink), fp8, device)

    def made(name: str) -> Contender:
        home.restore()  # the contender before this one has stepped
        own = home.ranks > 1
        model, loss, notes = home.contender(name, own)
        optimizer = adamw(model) if own else home.optimizer

        def step(_: int = 0) -> None:
            loss(home.ids)
            optimizer.step()
            optimizer.zero_grad()

        def first() -> dict[str, torch.Tensor]:
            began = time.perf_counter()
            found = home.mean(loss(home.ids))
            shown = f"first loss {found:.5f}"
            shown += f"; first call {time.perf_counter() - began:.0f} s"
            optimizer.zero_grad()
            notes[:0] = [parts(lambda: loss(home.ids)), shown]
            optimizer.zero_grad()
            return {"loss": found}

        return Contender(step, first, lambda: "; ".join(notes))

    names = ("ours", "bf16", "compile", "compile, mask folded", "liger")
    return Setup({n: partial(made, n) for n in names}, {"loss": home.loss()}, LIMIT)


def _losses(work: Work, fp8: bool, device: str, shrink: int) -> Setup:
    """Compare losses of steps with those of PyTorch on one GPU."""
    home = _Model(work.shrunk(shrink), fp8, device)
    each = max(1, len(home.ids) // 4)

    def losses(name: str) -> torch.Tensor:
        model, loss, _ = home.contender(name, True)
        alone = "one GPU" in name
        ids = home.all[: each * home.ranks] if alone else home.ids[:each]
        optimizer, found = adamw(model, 3e-4), list[torch.Tensor]()
        for _ in range(LOSSES):
            found.append(home.mean(loss(ids)))
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(found)

    def made(name: str) -> Contender:
        found = losses(name)
        shown = " ".join(f"{found[i - 1]:.3f}" for i in (1, 5, 10, 15, 20))
        note = f"losses of steps 1, 5, 10, 15, 20: {shown}"
        return Contender(lambda _: None, lambda: {"losses": found}, lambda: note)

    names = ("ours", "bf16", "eager", "ours, one GPU", "eager, one GPU")
    return Setup({n: partial(made, n) for n in names}, {"losses": losses("eager, one GPU")}, FAR)
