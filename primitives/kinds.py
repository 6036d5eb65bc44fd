"""What every kind of operand and output has, for all readings.

The kinds themselves are in `resources.py` and `reductions.py`. They are markers: an operand kind is
a value to a type checker, so that programs check, and nothing makes instances. All methods are of
the class, and what is said here is what a kind does unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.fast_math import Lanes
from coda_agent.primitives.graph import Shape, Value
from coda_agent.primitives.operation import Edge, Term

if TYPE_CHECKING:
    from quack.epilogue.ops import EpiOp

    from coda_agent.primitives.program import Program
    from coda_agent.primitives.tiles import TileConfig

GEMM_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
"""Element types of A and B, which are equal."""
HALVES = ("bfloat16", "float16")
FLOATS = (*HALVES, "float32")


class Lowering(Protocol):
    """What a kernel's epilogue is made by: `lower.Replay`."""

    program: Program
    names: dict[str, str]
    indices: dict[str, EpiOp]
    masked: set[str]
    scaled: set[str]
    apply: Callable[..., Lanes]

    def index_of(self, o: str) -> str: ...


class Resource:
    """A tensor beside A and B.

    Attributes:
        dims: Its shape in terms of M and N; of a reduction that of its final value.
        element_bytes: Of an element; None where that is a matter of the call.
        by_tma: Whether its strides and its address must suit TMA; else any will do.
    """

    dims: ClassVar[tuple[str, ...]]
    element_bytes: ClassVar[int | None] = None
    by_tma: ClassVar[bool] = True

    @classmethod
    def extents(cls, m: int, n: int) -> tuple[int, ...]:
        """Give its shape at one size."""
        sizes = {"M": m, "N": n, "2*N": 2 * n}
        return tuple(sizes[d] if d in sizes else n // int(d[2:]) for d in cls.dims)

    @classmethod
    def named(cls, m: str, n: str) -> tuple[str, ...]:
        """Write its shape with these names of M and N.

        A dim of its own says that it is.
        """
        words = {"M": m, "N": n, "2*N": f"2*{n}"}
        own = (d.replace("N", n, 1) if d.startswith("N/") else f"{d} of its own" for d in cls.dims)
        return tuple(words.get(d, other) for d, other in zip(cls.dims, own, strict=True))

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        """Say what is wrong with a caller's tensor; `lead` is M."""
        got = tuple(value.shape) if hasattr(value, "shape") else value
        expected = cls.extents(0, n)
        if cls.dims[0] == "M":
            expected = (*lead, *expected[1:])
        return "" if got == expected else f"has shape {got}, expected {expected}"

    @classmethod
    def flat(cls, value: torch.Tensor, m: int) -> torch.Tensor:
        """Give a caller's tensor one dimension of rows."""
        if cls.dims[:1] != ("M",):
            return value
        return value.reshape(m, *value.shape[value.ndim - len(cls.dims) + 1 :])


class Operand(Resource, Value):
    """What a program reads.

    Attributes:
        varies: Shape of its value in the graph.
        dtypes: Element types it may have; none of a number, whatever a spec calls it.
        vector: Whether it is one, which quack takes with a batch dimension.
        edges: What is known of it past the last column, and past the last row. What TMA loads reads
            0 there, a vector whatever shared memory held.
        transposes: Whether a kernel that computes the transposed product can load it.
        loader: The class of quack's operations that loads it.
    """

    varies: ClassVar[Shape]
    dtypes: ClassVar[tuple[str, ...]]
    vector: ClassVar[bool] = False
    edges: ClassVar[tuple[Edge, Edge]] = (Edge(True, True), Edge(True, True))
    transposes: ClassVar[bool] = True
    loader: ClassVar[str]

    @classmethod
    def lifted(cls, value: Term, acc: torch.Tensor) -> torch.Tensor:
        """Cast it to the accumulator's type, against which it broadcasts."""
        return torch.as_tensor(value, dtype=acc.dtype, device=acc.device)

    @classmethod
    def load(cls, name: str) -> EpiOp:
        """Make quack's operation that loads it, unless the GEMM's C does."""
        from quack.epilogue import ops

        return getattr(ops, cls.loader)(name)


class Output(Resource):
    """What a program writes.

    Attributes:
        values: Shapes in the graph of the values it stores.
        stored: Element types it may have.
        accumulates: Whether it is added to what its buffer holds.
        instruction: The SASS instruction that stores it, if one of TMA's does.
    """

    values: ClassVar[tuple[Shape, ...]]
    stored: ClassVar[tuple[str, ...]]
    accumulates: ClassVar[bool] = False
    instruction: ClassVar[str] = ""

    @classmethod
    def buffer(cls, m: int, n: int, config: TileConfig) -> tuple[int, ...]:
        """Give the shape of its buffer as the kernel writes it."""
        return cls.extents(m, n)

    @classmethod
    def taken(cls, value: torch.Tensor) -> torch.Tensor:
        """Take what it holds of a value (rows, columns)."""
        return value

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp | str:
        """Make output `o`'s sink, store or name, by a `lower.Replay`.

        A sink or a store is quack's, and a name has its plain store; none of these is for the
        GEMM's own D.
        """
        return lowering.names[o]
