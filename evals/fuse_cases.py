"""Functions by `coda_agent.fuse` beside PyTorch and torch.compile: their forward pass.

The functions are those of `fuse_functions.py`, at 4096 rows, and with the widths of real models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, ClassVar

from coda_agent.agent.plans.fused import fuse
from coda_agent.evals.contest import Clock
from coda_agent.evals.layer_cases import Case, Values, Way, peak, prepared, timed

if TYPE_CHECKING:
    from torch import Tensor

M, _BATCH, _HEAD = 4096, 4, 128
_SAMPLES = _BATCH, M // _BATCH


@dataclass(frozen=True)
class Function:
    """A function of `fuse_functions`.

    Attributes:
        name: Its name.
        model: Whose widths it has.
        shapes: Of its arguments, in order.
    """

    name: str
    model: str
    shapes: Mapping[str, tuple[int, ...]]
    PHASES: ClassVar = ("forward",)
    CONTENDERS: ClassVar = ("ours", "eager", "compile")

    def shrunk(self, by: int) -> Function:
        """So many times as small, in multiples of a head's width; what is no wider stays."""
        small = {
            name: tuple(x if x <= _HEAD else -(-x // by // _HEAD) * _HEAD for x in shape)
            for name, shape in self.shapes.items()
        }
        return replace(self, shapes=small)

    def on(self, device: str, shrink: int) -> FunctionCase:
        """The case on a device, so many times as small."""
        return FunctionCase(self.shrunk(shrink) if shrink > 1 else self, device)


class FunctionCase(Case):
    """A function on one device: its values, and each contender's way."""

    def __init__(self, function: Function, device: str) -> None:
        import torch

        self.function, self.device = function, device
        self.tokens = math.prod(function.shapes["x"][:-1])
        torch.manual_seed(0)
        drawn = {name: self._one(name, shape) for name, shape in function.shapes.items()}
        self.constants = {name: drawn.pop(name) for name in ("target",) if name in drawn}
        self.values: Values = drawn
        self.way = ""

    def _one(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        if name == "target":
            return torch.randint(0, self.function.shapes["w"][0], shape, device=self.device)
        if name in ("cos", "sin"):
            positions, width = shape
            turns = 10000.0 ** (-torch.arange(0, width, 2, device=self.device) / width)
            angle = torch.arange(positions, device=self.device)[:, None] * turns
            return getattr(torch.cat((angle, angle), -1), name)().bfloat16()
        kind = name.partition("_")[0]
        if kind == "g":
            return (torch.rand(shape, device=self.device) + 0.5).bfloat16()
        spread = shape[-1] ** -0.5 if kind in ("w", "b") else 1.0
        return (torch.randn(shape, device=self.device) * spread).bfloat16()

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times of the forward pass, peak memory in MiB, errors, why a contender is absent, what
        torch.compile left as it was, and what `fuse` chose."""
        import torch

        found: dict[str, Any] = {"absent": {}, "fallbacks": {}, "peak_mib": {}}
        with torch.no_grad():
            ways = self._ways(wanted, found)
            found["errors"] = self._errors(ways)
            calls = {name: self._call(way, "forward") for name, way in ways.items()}
            if self.device == "cuda":
                found["peak_mib"] = {name: peak(call) for name, call in calls.items()}
            found["forward"] = timed(clock, calls, rounds)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return found | {"way": self.way}

    def _ways(self, wanted: Iterable[str], found: dict[str, Any]) -> dict[str, Way]:
        import torch

        from coda_agent.evals import fuse_functions

        plain = getattr(fuse_functions, self.function.name)
        fused = fuse(plain, judged=False)

        def called(call: Callable[..., Any]) -> Way:
            return lambda t: call(*((t | self.constants)[n] for n in self.function.shapes))

        made: dict[str, Callable[[], Any]] = {
            "ours": lambda: fused, "eager": lambda: plain,
            "compile": lambda: torch.compile(plain, dynamic=False),
        }  # fmt: skip

        def ready(name: str) -> Way:
            way = called(made[name]())
            way(self.values)
            if name == "ours":
                self.way = fused.way
            return way

        names = [n for n in made if n in {*wanted, "eager"}]
        return prepared(names, ready, found, self.device)

    def _results(self, way: Way, values: Values) -> Values:
        outs = way(values)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return {f"out {i}": out.detach() for i, out in enumerate(outs)}


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Whose widths functions have; the geometric mean over torch.compile, of how many; and those
    that are slower by their whole interval."""
    over = {n: cell.get("forward", cell.get("both"))["over"] for n, cell in cells.items()}
    over = {name: found.get("compile") for name, found in over.items()}
    over = {name: ratio for name, ratio in over.items() if ratio}
    return {
        "widths": [f"{name} {cell['sizes'].get('model')}" for name, cell in cells.items()],
        "mean": geometric_mean(r["ratio"] for r in over.values()) if over else None,
        "compared": len(over), "slower": [name for name, r in over.items() if r["high"] < 1],
    }  # fmt: skip


def _function(name: str, model: str, **shapes: tuple[int, ...]) -> Function:
    return Function(name, model, shapes)


_TURNS = {"cos": (M, _HEAD), "sin": (M, _HEAD)}

CASES = {f.name: f for f in (
    _function("gelu", "Whisper-large", x=(M, 1280), w=(5120, 1280), b=(5120,)),
    _function("gelu_tanh", "SigLIP-so400m", x=(M, 1152), w=(4304, 1152), b=(4304,)),
    _function("relu_squared", "Minitron-4B", x=(M, 3072), w=(9216, 3072)),
    _function("softplus", "Mamba-2.8B", x=(M, 160), w=(5120, 160), b=(5120,)),
    _function("residual", "Llama-3-8B", x=(M, 4096), w=(4096, 4096), skip=(M, 4096)),
    _function(
        "layer_scale", "DINOv2-large", x=(M, 4096), w=(1024, 4096), b=(1024,), g=(1024,),
        skip=(M, 1024),
    ),
    _function(
        "gated_residual", "FLUX.1", x=(*_SAMPLES, 3072), w=(3072, 3072), b=(3072,),
        mix=(_BATCH, 3072), skip=(*_SAMPLES, 3072),
    ),
    _function("swiglu", "Mistral-7B", x=(M, 4096), w_gate=(14336, 4096), w_up=(14336, 4096)),
    _function("glu", "Parakeet-1.1B", x=(M, 1024), w=(2048, 1024), b=(2048,)),
    _function("swiglu_amax", "Qwen2.5-7B", x=(M, 3584), w_gate=(18944, 3584), w_up=(18944, 3584)),
    _function(
        "qkv_rope", "Llama-3-8B", x=(M, 4096), w_q=(4096, 4096), w_k=(1024, 4096),
        w_v=(1024, 4096), **_TURNS,
    ),
    _function(
        "qkv_bias_rope", "Qwen2.5-7B", x=(M, 3584), w_q=(3584, 3584), b_q=(3584,),
        w_k=(512, 3584), b_k=(512,), w_v=(512, 3584), b_v=(512,), **_TURNS,
    ),
    _function("q_norm_rope", "Qwen3-8B", x=(M, 4096), w=(4096, 4096), g=(_HEAD,), **_TURNS),
    _function("lora", "Mistral-7B", x=(M, 4096), w=(4096, 4096), w_down=(16, 4096),
              w_up=(4096, 16)),
    _function("softcap", "Gemma-2-2B", x=(M, 2304), w=(256000, 2304)),
    _function("cross_entropy", "Llama-3-8B", x=(M, 4096), w=(128256, 4096), target=(M,)),
    _function("log_probability", "TinyLlama", x=(M, 2048), w=(32000, 2048), target=(M,)),
    _function("router", "DeepSeek-V3", x=(M, 7168), w=(256, 7168), b=(256,)),
    _function(
        "swiglu_mlp", "Llama-3-8B", x=(M, 4096), w_gate=(14336, 4096), w_up=(14336, 4096),
        w_down=(4096, 14336), skip=(M, 4096),
    ),
    _function(
        "geglu_mlp", "Gemma-2-9B", x=(M, 3584), w_gate=(14336, 3584), w_up=(14336, 3584),
        w_down=(3584, 14336), skip=(M, 3584),
    ),
    _function(
        "gelu_mlp", "GPT-2-XL", x=(M, 1600), w_up=(6400, 1600), b_up=(6400,),
        w_down=(1600, 6400), b_down=(1600,), skip=(M, 1600),
    ),
    _function(
        "norm_projection", "Mistral-7B", x=(M, 4096), w_o=(4096, 4096), skip=(M, 4096),
        g=(4096,), w=(6144, 4096),
    ),
    _function(
        "norm_swiglu_mlp", "TinyLlama", x=(M, 2048), w_o=(2048, 2048), skip=(M, 2048),
        g=(2048,), w_gate=(5632, 2048), w_up=(5632, 2048), w_down=(2048, 5632),
    ),
    _function(
        "layer_norm_gelu", "ViT-large", x=(M, 1024), w_o=(1024, 1024), b_o=(1024,),
        skip=(M, 1024), g=(1024,), b=(1024,), w=(4096, 1024), b_up=(4096,),
    ),
    _function(
        "modulated_gelu", "DiT-XL", x=(*_SAMPLES, 1152), w_o=(1152, 1152), b_o=(1152,),
        mix=(_BATCH, 1152), skip=(*_SAMPLES, 1152), scale=(_BATCH, 1152), shift=(_BATCH, 1152),
        w=(4608, 1152), b=(4608,),
    ),
    _function("post_norm", "Gemma-2-9B", x=(M, 4096), w=(3584, 4096), g=(3584,), skip=(M, 3584)),
    _function("latent", "DeepSeek-V3", x=(M, 7168), w_down=(1536, 7168), g=(1536,),
              w_up=(24576, 1536)),
    _function(
        "parallel_mlp", "Pythia-6.9B", x=(M, 4096), w_o=(4096, 4096), b_o=(4096,), n=(M, 4096),
        w_up=(16384, 4096), b_up=(16384,), w_down=(4096, 16384), b_down=(4096,), skip=(M, 4096),
    ),
    _function(
        "masked_head", "ModernBERT-large", x=(M, 1024), w=(1024, 1024), g=(1024,), b=(1024,),
        w_head=(50368, 1024), b_head=(50368,),
    ),
    _function(
        "channel_mix", "RWKV-6-3B", x=(M, 2560), y=(M, 2560), w_gate=(2560, 2560),
        w_up=(8960, 2560), w_down=(2560, 8960),
    ),
)}  # fmt: skip
