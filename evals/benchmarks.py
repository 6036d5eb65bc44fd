"""The suites of cases that `bench` measures, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from coda_agent.evals import (
    fp8_layers,
    functions,
    gradients,
    host,
    kernels,
    layers,
    numerics,
    training,
)
from coda_agent.evals.cases import Suite
from coda_agent.primitives.errors import CodaError

_LAYERS = """Blocks, heads and training steps, at 16,384 tokens. A block is a decoder layer without
attention: from the output projection to the next layer's query, key and value with their rotation.
A head is the final norm, the product with the vocabulary, and the loss. Ours is the backend `coda`.
`gemm` are the bare products. A step is forward, backward and a fused AdamW of Llama-3.2-1B, 8
sequences of 4096 tokens for each GPU, 4 in FP8; on two GPUs FSDP2 shards it, and time is the
host's. `compile` is a transformers model under torch.compile, whose attention gets a mask;
`compile, mask folded` has causal attention instead."""
_FUSE = """Functions of one to three products with the widths of real models, at 4096 rows, forward
and in both passes. Ours is `fuse(function)`; `evals/functions.py` says what they compute."""
_GRADIENTS = """Each accepted kernel of 16-bit operands at 4096³, forward and backward together,
with gradients of every tensor but tables and indices. Beside it runs the reference of its spec."""
_HOST = """What a call of an accepted kernel costs the host, in microseconds until it returns, at
its smallest check shape."""
_NUMERICS = """The error of GEMM – RMSNorm – GEMM on the layers of Llama-3 8B, 2048 tokens, against
float32 on the same bf16 values. `eager` is `mm`, `add`, `F.rms_norm`, `mm`. Values are drawn to
resemble a trained model's (`evals/numerics.py`)."""

SUITES: Mapping[str, Callable[[Path], Suite]] = {
    "kernels": kernels.own,
    "paper": kernels.paper,
    "shapes": kernels.shapes,
    "layers": lambda _: Suite(
        "layers",
        _LAYERS,
        [*layers.cases(), *fp8_layers.cases(), *training.cases()],
        group=_without_width,
    ),
    "fuse": lambda _: Suite("fuse", _FUSE, functions.CASES, group=functions.passes),
    "gradients": lambda _: Suite("gradients", _GRADIENTS, gradients.cases()),
    "host": lambda root: Suite("host", _HOST, host.cases(root), ("host",), 40),
    "numerics": lambda _: Suite(
        "numerics", _NUMERICS, numerics.cases(), group=lambda case: case.rpartition(" ")[0]
    ),
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
