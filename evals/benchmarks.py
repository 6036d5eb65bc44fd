"""The suites of cases that `bench` measures, by name. What they hold is imported when one is made:
most of it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from coda_agent.evals.cases import Suite
from coda_agent.primitives.errors import CodaError

_LAYERS = """Blocks, heads and training steps, at 16,384 tokens. A block is a decoder layer without
attention: from the output projection to the next layer's query, key and value with their rotation.
A head is the final norm, the product with the vocabulary, and the loss. Ours is the backend `coda`.
`gemm` are the bare products. A step is forward, backward and a fused AdamW of Llama-3.2-1B, 8
sequences of 4096 tokens for each GPU, 4 in FP8; on two GPUs FSDP2 shards it, and time is the
host's; or of six layers of another model, with its head. `compile` is a transformers model under
torch.compile, whose attention gets a mask; `compile, mask folded` has causal attention instead."""
_FUSE = """Functions of one to three products with the widths of real models, at 4096 rows, forward
and in both passes. Ours is `fuse(function)`; `evals/functions.py` says what they compute."""
_GRADIENTS = """Each accepted kernel of 16-bit operands at 4096³, forward and backward together,
with gradients of every tensor but tables and indices. Beside it runs the reference of its spec."""
_HOST = """What a call of an accepted kernel costs the host, in microseconds until it returns, at
its smallest check shape."""
_NUMERICS = """The error of GEMM – RMSNorm – GEMM on the layers of Llama-3 8B, 2048 tokens, against
float32 on the same bf16 values. `eager` is `mm`, `add`, `F.rms_norm`, `mm`. Values are drawn to
resemble a trained model's (`evals/numerics.py`)."""


def _kernels(root: Path) -> Suite:
    from coda_agent.evals import kernels

    return kernels.own(root)


def _paper(root: Path) -> Suite:
    from coda_agent.evals import kernels

    return kernels.paper(root)


def _shapes(root: Path) -> Suite:
    from coda_agent.evals import kernels

    return kernels.shapes(root)


def _layers(_: Path) -> Suite:
    from coda_agent.evals import fp8_layers, layers, training

    cases = [*layers.cases(), *fp8_layers.cases(), *training.cases()]
    return Suite("layers", _LAYERS, cases, group=_without_width)


def _fuse(_: Path) -> Suite:
    from coda_agent.evals import functions

    return Suite("fuse", _FUSE, functions.CASES, group=functions.passes)


def _gradients(_: Path) -> Suite:
    from coda_agent.evals import gradients

    return Suite("gradients", _GRADIENTS, gradients.cases())


def _host(root: Path) -> Suite:
    from coda_agent.evals import host

    return Suite("host", _HOST, host.cases(root), ("host",), 40)


def _numerics(_: Path) -> Suite:
    from coda_agent.evals import numerics

    cases = numerics.cases()
    return Suite("numerics", _NUMERICS, cases, group=lambda case: case.rpartition(" ")[0])


SUITES: Mapping[str, Callable[[Path], Suite]] = {
    "kernels": _kernels,
    "paper": _paper,
    "shapes": _shapes,
    "layers": _layers,
    "fuse": _fuse,
    "gradients": _gradients,
    "host": _host,
    "numerics": _numerics,
}


def load(name: str, root: Path) -> Suite:
    """Make a suite for a workspace.

    Raises:
        CodaError: there is none of that name.
    """
    if name not in SUITES:
        raise CodaError(f"no suite {name!r}, expected one of {', '.join(SUITES)}")
    return SUITES[name](root)


def _without_width(case: str) -> str:
    kind, *rest = case.split()
    return case if kind == "train-1b" else " ".join((kind, *rest[1:]))
