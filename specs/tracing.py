"""What a run on symbolic sizes tells: products, and equal extents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError
from coda_agent.specs.recording import quiet

if TYPE_CHECKING:
    import sympy
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

Extent: TypeAlias = "int | sympy.Expr"
"""Of an axis, in symbols of the trace or a number."""

_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products of ATen, and the place of their first operand."""
_ARITHMETIC = ("add", "sub", "mul", "div", "pow")
_BROADCASTING = ("addcdiv", "addcmul", "lerp")
"""What torch 2.11 cannot broadcast over symbolic sizes but by its decomposition."""
_CONVOLVED = (
    "of 1x1 write F.linear(x, w), with the channels last, x [B, H, W, C] and w [N, C]; of another"
    " kernel size give what F.unfold makes of x"
)
DRAWN = (
    "give the numbers as an argument, or let the kernel draw them by a counter: u = philox(seed,"
    " offset, *y.shape, device=y.device), of coda_agent.primitives.placed, is uniform over [0, 1)"
    " for a matrix y; dropout is y * (u >= p) / (1 - p)"
)
"""What to write in the place of torch's random numbers."""


@dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
        inputs: What it is made of; of a product too, where "" is among them.
        joined: The inputs that lie side by side in it along its last dimension, if any do.
    """

    inputs: frozenset[str]
    shape: tuple[Extent, ...]
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What a run told.

    Attributes:
        shapes: Each input's extents: equal symbols must be equal, numbers may be no others.
        products: The operands of each matrix product, in order.
        equal: Other expressions that must be equal.
    """

    shapes: dict[str, tuple[Extent, ...]]
    products: list[tuple[Operand, Operand]]
    equal: list[tuple[Any, Any]]


def tensors(tree: object) -> list[torch.Tensor]:
    """List the tensors among a call's arguments or results."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def folded(func: Any, args: Sequence[Any], kwargs: object) -> Callable[..., Any]:
    """Give `func` with leading dims flattened, if it multiplies by a matrix.

    torch 2.11's own asks for the number of elements, which symbolic sizes do not have.
    """
    if getattr(func, "__name__", "") not in ("linear", "matmul", "__matmul__") or len(args) < 2:
        return func
    x, matrix = args[:2]
    if not (hasattr(x, "ndim") and hasattr(matrix, "ndim") and x.ndim > 2 and matrix.ndim == 2):
        return func
    return lambda x, *rest, **named: func(x.flatten(0, -2), *rest, **named).unflatten(
        0, x.shape[:-1]
    )


def traced(
    function: Callable[..., object],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    alike: Mapping[str, list[tuple[str, int]]],
) -> Trace:
    """Run `function` on tensors without values, whose extents are symbols.

    Args:
        shapes: An example of each input's shape.
        alike: Axes (input, place) that are one dim, by its letter.

    Raises:
        Exception: Whatever the function raises, or what needs values raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    environment = ShapeEnv(duck_shape=False)
    fake = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)  # constants
    inputs: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        sizes = [DimDynamic.DYNAMIC] * len(shape)
        real = torch.empty(shape, dtype=dtypes[name], device="meta")
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        inputs[name] = fake.from_tensor(real, symbolic_context=context)
    for places in alike.values():
        first, *others = (inputs[name].shape[axis] for name, axis in places)
        for other in others:
            bool(first == other)  # what is asked is noted as an equality
    seen = _Seen(inputs)
    watch, folding = _modes(seen)
    # What the function makes by itself is on meta too.
    with quiet(), fake, torch.device("meta"), watch, folding:
        function(**inputs)

    def known(shape: Iterable[Any]) -> tuple[Extent, ...]:
        exprs = [s.node.expr if isinstance(s, torch.SymInt) else s for s in shape]
        return tuple(environment.replace(e) if not isinstance(e, int) else e for e in exprs)

    guards = [environment.replace(guard.expr) for guard in environment.guards]
    return Trace(
        {name: known(tensor.shape) for name, tensor in inputs.items()},
        [
            (replace(a, shape=known(a.shape)), replace(b, shape=known(b.shape)))
            for a, b in seen.products
        ],
        [(g.lhs, g.rhs) for g in guards if type(g).__name__ == "Equality"],
    )


def _modes(seen: _Seen) -> tuple[TorchDispatchMode, TorchFunctionMode]:
    """Make the modes that watch ATen's calls and flatten products' dims."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
        ) -> object:
            return seen.call(func, args, kwargs or {})

    class Folding(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
        ) -> object:
            return folded(func, args, kwargs)(*args, **(kwargs or {}))

    return Watch(), Folding()


class _Seen:
    """What calls of ATen make of a function's inputs."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.products: list[tuple[Operand, Operand]] = []
        self._inputs = inputs
        self._origins: dict[int, frozenset[str]] = {}
        self._joined: dict[int, tuple[str, ...]] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used again
        for name, tensor in inputs.items():
            self._note(tensor, frozenset({name}))

    def call(self, func: Any, args: Any, kwargs: Mapping[str, object]) -> object:
        """Call what a kernel may hold, and note its results' origins."""
        from torch._decomp import decomposition_table

        name = func.overloadpacket.__name__
        _check_call(func, name, args)
        if name in _ARITHMETIC:
            self._take_values(args)
        called = decomposition_table[func] if name in _BROADCASTING else func
        result = called(*args, **kwargs)
        given = tensors((args, kwargs))
        taken = [self._origins.get(id(t), frozenset[str]()) for t in given]
        side = next((self._joined[id(t)] for t in given if id(t) in self._joined), ())
        if name == "cat" and (len(args) > 1 and args[1] % args[0][0].ndim) == args[0][0].ndim - 1:
            side = tuple(x for some in taken if len(some) == 1 for x in some)
        for tensor in tensors(result):
            self._note(tensor, frozenset({""} if name in _PRODUCTS else ()).union(*taken))
            self._joined[id(tensor)] = side if name == "cat" or name not in _PRODUCTS else ()
        if name in _PRODUCTS:
            left, right = map(self._operand, args[_PRODUCTS[name] :][:2])
            self.products.append((left, right))
        return result

    def _note(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        self._kept.append(tensor)
        self._origins[id(tensor)] = names

    def _operand(self, side: torch.Tensor) -> Operand:
        names = self._origins.get(id(side), frozenset())  # none of a tensor made of numbers
        return Operand(names, tuple(side.shape), self._joined.get(id(side), ()))

    def _take_values(self, args: Iterable[object]) -> None:
        """Let sizes that values are made of be numbers from now on."""
        for x in args:
            if isinstance(x, torch.SymInt | torch.SymFloat):
                held = x.node.expr.free_symbols
                for size in (s for t in self._inputs.values() for s in t.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr in held:
                        int(size)


def _check_call(func: torch._ops.OpOverload, name: str, args: Sequence[Any]) -> None:
    """Refuse a call of ATen that has no counterpart in a kernel."""
    # The leaky ReLU with a random slope draws only in training.
    still = name.startswith("rrelu") and not any(x is True for x in args)
    if torch.Tag.nondeterministic_seeded in func.tags and not still:
        raise SpecError(f"the function draws random numbers ({name})", hint=DRAWN)
    if name == "convolution":
        raise SpecError("the function convolves", hint=_CONVOLVED)
    if name in _PRODUCTS and name != "_scaled_mm":
        if any(t.dtype.itemsize == 1 for t in args[_PRODUCTS[name] :][:2]):
            raise SpecError(
                "torch multiplies no operands of 8 bits",
                hint="write x.float() @ w.float().T: the kernel multiplies them as they are",
            )


def operands(trace: Trace, function: str) -> tuple[list[str], list[str]]:
    """Find the inputs that are A, and those that are B.

    Raises:
        SpecError: `function` multiplies nothing, or more than one product.
    """
    if len(trace.products) == 1 and len(first := list(trace.products[0][0].joined)) > 1:
        ((left, right),) = trace.products
        if left.inputs == {*first} and len(right.inputs) == 1:
            return first, list(right.inputs)

    pairs: dict[tuple[str, str], None] = {}
    for left, right in trace.products:
        pair = _pair(trace, function, left, right, {name for pair in pairs for name in pair})
        pairs[pair] = None
    if not pairs:
        hint = "a kernel is a product such as x @ w.T, and what is computed with it"
        raise SpecError(f"{function} multiplies no two matrices", hint=hint)
    first, second = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    if len(first) > 1 and len(first) != len(second):
        listed = ", ".join(f"{a} with {b}" for a, b in pairs)
        hint = "a kernel has one product: of one tensor with a weight, or with several"
        raise SpecError(f"the function multiplies {listed}", hint=hint)
    return first, second


def _pair(
    trace: Trace, function: str, left: Operand, right: Operand, used: set[str]
) -> tuple[str, str]:
    """Find the inputs of a product; `used` are those of products before."""

    def of(side: Operand, inner: Extent) -> str:
        held = [
            x
            for x, shape in trace.shapes.items()
            if len(shape) > 1 and (inner in shape or math.prod(shape[:-1]) == inner)
        ]
        return next((x for x in held if x in side.inputs), "")

    pair = of(left, left.shape[-1]), of(right, right.shape[-2])
    for side, name in zip((left, right), pair, strict=True):
        if len(side.inputs) == 1 and not name:
            (whole,) = side.inputs
            message = f"{function} multiplies {whole} in parts, or sums over several of its dims"
            raise SpecError(message, hint=f"give {whole} as a matrix, with one dim to sum over")
    made = next((s for s, x in zip((left, right), pair, strict=True) if not x), None)
    for side, inner in ((left, left.shape[-1]), (right, right.shape[-2])):
        over = [x for x in trace.shapes if x in side.inputs and inner in trace.shapes[x]]
        if "" in side.inputs or not (side is made or len(over) > 1):
            continue
        some = " and ".join(over or sorted(side.inputs))
        hint = "compute that in the call, and take it as an argument"
        raise SpecError(f"{function} multiplies what it makes of {some}", hint=hint)
    if made or any(len(side.inputs & used) > 1 for side in (left, right)):
        raise SpecError(
            "the function multiplies what a product gave; a kernel has one product",
            hint="give the first product as an argument, or make a kernel of each",
        )
    if math.prod(left.shape) != math.prod(trace.shapes[pair[0]]):
        hint = "give that part as the argument"
        raise SpecError(f"{function} multiplies a part of {pair[0]}", hint=hint)
    batch = right.shape[-2] in trace.shapes[pair[1]]
    if pair[0] == pair[1] or (batch and sum(e != 1 for e in trace.shapes[pair[1]]) > 2):
        what = "with itself" if pair[0] == pair[1] else f"with a batch of matrices, {pair[1]}"
        hint = "take one matrix as an argument of its own, and call the kernel for each"
        raise SpecError(f"{function} multiplies {pair[0]} {what}", hint=hint)
    return pair
