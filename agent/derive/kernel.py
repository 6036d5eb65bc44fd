"""A backward kernel, and what is said of the layers around it.

Three forms differ in what brings the gradient and where forward values come from:
- merged: the product is the one that brings the gradient of the output that the next layer takes;
- recomputed: the product is the forward one again, and all gradients are tiles;
- elementwise: no product, for PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.resources import Tile
from coda_agent.specs import Spec


class Unfused(ProgramError):
    """No epilogue computes it, but PyTorch does."""


class Form(Enum):
    """What brings the gradient."""

    MERGED = "merged"
    RECOMPUTED = "recomputed"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True)
class Asked:
    """What a user says of the layers around a forward kernel.

    Attributes:
        into: The output that the next product multiplies; empty where gradients come as tensors.
        norm: The row mean of squares of which the next product's rows are scaled by rsqrt(s + ε).
        kept: Outputs that are there for the backward pass alone, and have no gradient.
        without: Inputs whose gradients are not wanted.
    """

    into: str = ""
    norm: str = ""
    kept: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass
class Kernel:
    """A backward kernel.

    Attributes:
        form: What brings the gradient.
        half: Whether its N is half of the forward kernel's.
        graph: What it computes; its operands are the `leaves`.
        leaves: Shape, as `Shape`, of each operand, in order.
        kinds: What each output is.
        target: The output that is the gradient of the product, or of the scaled product.
        scale: The operand that scales the product's rows and is left to the next step; or empty.
        gradients: How each gradient follows from the outputs, in PyTorch.
        saved: The forward node that has to be stored for it; None where none has.
        again: The output that is the next layer's input, computed again; or empty.
    """

    form: Form
    half: bool
    graph: Graph
    leaves: dict[str, Shape]
    kinds: dict[str, type] = field(default_factory=dict[str, type])
    target: str = ""
    scale: str = ""
    gradients: dict[str, str] = field(default_factory=dict[str, str])
    saved: int | None = None
    again: str = ""

    @property
    def computes(self) -> bool:
        """Whether an output is more than one of the operands as it is."""
        nodes, roots = self.graph.nodes, self.graph.outputs
        return any(nodes[i].args or self.kinds[o] is not Tile for o, i in roots.items())


PRODUCT = ""
"""The name of the leaf that is the product."""
FORWARD = "?"
"""The name of the leaf that stands for the forward product, which a merged kernel has not."""


def named(spec: Spec, wanted: str) -> str:
    """A name that the forward spec has not."""
    while wanted in (*spec.inputs, *spec.outputs, *(f"d{o}" for o in spec.outputs)):
        wanted += "_"
    return wanted
