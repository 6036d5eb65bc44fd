"""A whole training step of a Llama of transformers' by coda_agent.layers, torch.compile and Liger:
forward, backward and AdamW.

All contenders train the same weights, by one optimizer, on the same random tokens; `packed`, whose
parameters are others, trains a copy. Whose first loss is another than the model's has no part. A
case in FP8 has the products of layers in it: ours forward, torch.compile's backward too
(`float8_linear`). Heads stay in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from coda_agent.evals.contest import Clock
from coda_agent.evals.layer_cases import peak, prepared, timed
from coda_agent.primitives.errors import CodaError

COURSE = 20
"""Steps of a case in FP8 whose losses are kept beside those of ours in bf16."""
NEAR = 0.01
"""How far a contender's first loss may be from the model's own, as a part of that."""


@dataclass(frozen=True)
class Training:
    """A Llama with tied embeddings, and the tokens of a step."""

    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    words: int
    theta: float
    batch: int
    length: int
    PHASES: ClassVar = ("step",)
    # Without Liger under torch.compile: on an H200 (torch 2.11, Liger 0.8.5, 2026-11-24) its first
    # loss was 19.19 in one run, not 12.18, and another run ended by an illegal memory access.
    CONTENDERS: ClassVar = ("ours", "packed", "compile", "liger")
    FP8: ClassVar = False

    def shrunk(self, by: int) -> Self:
        """About so many times as small."""
        heads, kv_heads = max(2, self.heads // by), max(1, self.kv_heads // by)
        dim = max(16, self.width // self.heads // by)
        ffn, words = (-(-x // by // 16) * 16 for x in (self.ffn, self.words))
        sizes = max(2, self.layers // by), heads, kv_heads, words, self.theta
        batch, length = max(1, self.batch // by), max(16, self.length // by)
        return type(self)(heads * dim, ffn, *sizes, batch, length)

    def on(self, device: str, shrink: int) -> Step:
        """The case on a device, so many times as small."""
        return Step(self.shrunk(shrink) if shrink > 1 else self, device)


class Fp8Training(Training):
    """The same with the products of layers in FP8; `bf16` is ours without."""

    CONTENDERS: ClassVar = ("ours", "packed", "bf16", "compile")
    FP8: ClassVar = True


class Step:
    """A training step on one device.

    Raises:
        CodaError: transformers is not installed.
    """

    def __init__(self, what: Training, device: str) -> None:
        import torch

        try:
            from transformers.models.llama import (  # pyright: ignore[reportMissingImports]
                modeling_llama,
            )
        except ImportError:
            raise CodaError(
                "transformers is not installed, whose Llama the case trains",
                hint="`pip install transformers`, or name other cases with --models",
            ) from None
        self.what, self.device, self.tokens = what, device, what.batch * what.length
        self.home: Any = modeling_llama
        config = modeling_llama.LlamaConfig(
            hidden_size=what.width, intermediate_size=what.ffn, num_hidden_layers=what.layers,
            num_attention_heads=what.heads, num_key_value_heads=what.kv_heads,
            vocab_size=what.words, max_position_embeddings=max(what.length, 2048),
            rope_theta=what.theta, rms_norm_eps=1e-5, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # of parameters alone: frequencies stay float32
        try:
            with torch.device(device):
                self.model = modeling_llama.LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(kept)
        self.ids = torch.randint(what.words, (what.batch, what.length), device=device)
        self.optimizer = adamw(self.model)
        with torch.no_grad():  # a sequence at a time: float32 logits of all take 17 GB
            one = [self.model(input_ids=i[None], labels=i[None]).loss for i in self.ids]
        self.loss = float(sum(one)) / len(one)

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times, peak memory in MiB, the loss of the first weights, why a contender is absent, and
        what torch.compile left as it was. In FP8 also by what the linears multiply that it
        compiles, and losses of `COURSE` steps."""
        found: dict[str, Any] = {"absent": {}, "fallbacks": {}, "losses": {}, "peak_mib": {}}
        rotation = self.home.apply_rotary_pos_emb
        names = [name for name in self.what.CONTENDERS if name in wanted]
        if self.what.FP8:
            found["course"] = {n: self._course(n) for n in names if n in ("ours", "bf16")}
        try:
            ready = lambda name: self._ready(name, rotation, found)
            steps = prepared(names, ready, found, self.device)
            for step in steps.values():
                step()  # the optimizer makes its states
            if self.device == "cuda":
                found["peak_mib"] = {name: peak(step) for name, step in steps.items()}
            found["step"] = timed(clock, steps, rounds)
        finally:
            self.home.apply_rotary_pos_emb = rotation
        return found

    def _ready(
        self, name: str, rotation: Callable[..., Any], found: dict[str, Any]
    ) -> Callable[[], None]:
        import torch

        self.home.apply_rotary_pos_emb = rotation
        model, optimizer = self._made(name, found)
        rotates = self.home.apply_rotary_pos_emb  # ours and Liger replace the module's
        called = torch.compile(model, dynamic=False) if "compile" in name else model

        def loss() -> Any:
            self.home.apply_rotary_pos_emb = rotates
            found = called(input_ids=self.ids, labels=self.ids).loss
            found.backward()
            return found

        def step() -> None:
            loss()
            optimizer.step()
            optimizer.zero_grad()

        first = self.mean(loss())
        optimizer.zero_grad()
        if not abs(first - self.loss) <= NEAR * self.loss:
            raise CodaError(f"its first loss is {first:.3f}, expected {self.loss:.3f}")
        found["losses"][name] = round(first, 5)
        return step

    def mean(self, loss: Any) -> float:
        """Of a loss, over all who take part in a step."""
        return loss.item()

    def _made(self, name: str, found: dict[str, Any]) -> tuple[Any, Any]:
        """A contender's model, and the optimizer of its weights."""
        shared = {id(p): p for p in self.model.parameters()}
        model = copy.deepcopy(self.model, {} if name == "packed" else shared)
        self._changed(model, name, found)
        return model, adamw(model) if name == "packed" else self.optimizer

    def _changed(self, model: Any, name: str, found: dict[str, Any]) -> None:
        if name in ("ours", "packed", "bf16"):
            self._patched(model, name)
        elif name.startswith("liger"):
            from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
                apply_liger_kernel_to_llama,
            )

            apply_liger_kernel_to_llama(model=model)
        elif self.what.FP8:
            from coda_agent.evals.float8_linear import converted

            found["linears"] = converted(model)

    def _patched(self, model: Any, name: str) -> Any:
        from coda_agent.layers import apply_coda_kernels_to_llama

        options = {"pack": name == "packed", "fp8": self.what.FP8 and name != "bf16"}
        report = apply_coda_kernels_to_llama(model, **options)
        if report.left:
            raise CodaError(f"ours leaves parts as they are: {report.left}")
        return report

    def _course(self, name: str) -> list[float]:
        """Losses of `COURSE` steps on a quarter of the sequences, from the first weights on."""
        model, ids = copy.deepcopy(self.model), self.ids[: max(1, len(self.ids) // 4)]
        report, optimizer, losses = self._patched(model, name), adamw(model, 3e-4), list[Any]()
        for _ in range(COURSE):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        report.revert()
        return [round(loss.item(), 4) for loss in losses]


def adamw(model: Any, rate: float = 1e-5) -> Any:
    """The optimizer of all contenders."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
