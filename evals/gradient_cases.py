"""Accepted kernels with their gradients, beside the references of their specs by PyTorch and by
torch.compile: forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from coda_agent.evals.contest import Clock
from coda_agent.evals.layer_cases import _distance, peak, prepared, timed

_CONSTANT = ("cs",)  # cosines and sines: nobody learns them


@dataclass(frozen=True)
class Differentiated:
    """A kernel at M = 4096 tokens of width 4096, or so many times as small.

    Attributes:
        kernel: Its name.
        static: Its static parameters.
    """

    kernel: str
    static: Mapping[str, str] = field(default_factory=dict)
    m: int = 4096
    n: int = 4096
    k: int = 4096
    PHASES: ClassVar = ("both",)
    CONTENDERS: ClassVar = ("ours", "eager", "compile")

    def shrunk(self, by: int) -> Differentiated:
        """So many times as small."""
        return replace(self, m=self.m // by, n=self.n // by, k=self.k // by)

    def on(self, device: str, shrink: int) -> GradientCase:
        """The case on a device, so many times as small."""
        return GradientCase(self.shrunk(shrink) if shrink > 1 else self, device)


class GradientCase:
    """A kernel on one device, and the gradients of all its tensors but tables and indices."""

    def __init__(self, what: Differentiated, device: str) -> None:
        import torch

        from coda_agent import generated
        from coda_agent.specs import draw_inputs

        self.what, self.device, self.tokens = what, device, what.m
        self.kernel = getattr(generated, what.kernel)
        self.spec = spec = self.kernel.spec
        sizes, types = {"M": what.m, "N": what.n, "K": what.k}, spec.default_types()
        about: Any = {"seed": 1, "device": device, "binding": what.static}
        self.values: dict[str, Any] = draw_inputs(spec, sizes, types, **about)
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_(name not in _CONSTANT)

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times of forward and backward, peak memory in MiB, errors, why a contender is absent, and
        what torch.compile left as it was."""
        import torch

        from coda_agent.specs.reference import reference_callable

        found: dict[str, Any] = {"absent": {}, "fallbacks": {}, "peak_mib": {}}
        reference = reference_callable(self.spec, self.what.static, baseline=True)
        plain = lambda **values: tuple(map(reference(**values).__getitem__, self.spec.outputs))
        made: dict[str, Callable[..., Any]] = {
            "ours": self._ours, "eager": plain, "compile": torch.compile(plain, dynamic=False),
        }  # fmt: skip

        def ready(name: str) -> Callable[[], Any]:
            call = lambda: self._gradients(made[name], self.values)
            call()
            return call

        names = [n for n in made if n in {*wanted, "eager"}]
        calls = prepared(names, ready, found, self.device)
        found["errors"] = self._errors(calls)
        if self.device == "cuda":
            found["peak_mib"] = {name: peak(call) for name, call in calls.items()}
        found["both"] = timed(clock, calls, rounds)
        return found

    def _ours(self, **values: Any) -> tuple[Any, ...]:
        results = self.kernel(**values, **self.what.static)
        return results if isinstance(results, tuple) else (results,)

    def _gradients(self, way: Callable[..., Any], values: Mapping[str, Any]) -> list[Any]:
        """What outputs drawn at random as gradients give, by the inputs."""
        import torch

        outs = [out for out in way(**values) if out.requires_grad]
        if not hasattr(self, "drawn"):
            made = torch.Generator(self.device).manual_seed(2)
            draws = (torch.randn(o.shape, device=self.device, generator=made) for o in outs)
            self.drawn = [g.to(o.dtype) for g, o in zip(draws, outs, strict=True)]
        inputs = [x for x in values.values() if getattr(x, "requires_grad", False)]
        slopes = self.drawn
        if outs[0].dtype == torch.float64:
            slopes = [g.double() for g in slopes]
        return [*torch.autograd.grad(outs, inputs, slopes)]

    def _errors(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Our largest error of a gradient over PyTorch's of that, both against float64, or over
        half an ulp of bf16 where that is more."""
        import torch

        from coda_agent.specs import run_reference

        wide = dict(self.values)
        for name, x in wide.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                wide[name] = x.detach().double().requires_grad_(x.requires_grad)
        exact = lambda **x: run_reference(self.spec, x, binding=self.what.static, exact=True)
        truth = self._gradients(lambda **x: exact(**x).values(), wide)
        every = zip(calls["ours"](), calls["eager"](), truth, strict=True)
        worst = max(_distance(o, t) / max(_distance(e, t), 2**-9) for o, e, t in every)
        return {"ours": round(worst, 3)}


def _cases() -> dict[str, Differentiated]:
    plain = (
        "gemm_partial_cross_entropy", "gemm_partial_swiglu_bwd", "gemm_residual_partial_rmsnorm",
        "gemm_rmsnorm", "gemm_rmsnorm_partial_cross_entropy", "gemm_rmsnorm_rope",
        "gemm_rmsnorm_swiglu", "gemm_rope", "gemm_swiglu", "gemm_symlog",
    )  # fmt: skip
    found = [
        *(
            Differentiated("gemm_bias_act", {"activation": act, "bias_per": per})
            for act in ("gelu_tanh", "relu", "silu")
            for per in ("column", "row")
        ),
        Differentiated("gemm_residual_partial_rmsnorm_bwd", {"update": "out_of_place"}),
        *map(Differentiated, plain),
    ]
    return {" ".join((c.kernel, *c.static.values())): c for c in found}


CASES = _cases()
"""Every accepted kernel of 16-bit operands, each of its forms that overwrite nothing."""
