"""A function of tensors as a graph of the torch calls that it makes.

- It runs on fake tensors, whose extents are symbols: nothing is computed, and an extent that a view
  names is known to be the input's own.
- What torch has in one call and a plan takes apart, such as a norm, is recorded in parts
  (`simpler.py`). The last part keeps the call, for where it is left whole.
- Tensors that are no arguments, such as a module's parameters, are inputs too.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.simpler import simpler
from coda_agent.primitives.errors import CodaError
from coda_agent.specs.recording import quiet
from coda_agent.specs.tracing import folded

if TYPE_CHECKING:
    import torch


class Unplanned(CodaError):
    """Why a function is left to PyTorch as a whole."""


@dataclass(eq=False, repr=False)
class Value:
    """What one torch call returns, or an input.

    Attributes:
        name: Of its own in the graph.
        func: What was called; None of an input.
        args, kwargs: Its arguments, with values in the place of tensors.
        meta: The fake tensor, or the tuple of some.
        whole: The call that this is the last part of, with its arguments.
        of: The matrix whose rows' factor was carried past this product; "" where none was.
    """

    name: str
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: Any = None
    whole: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    of: str = ""

    @property
    def called(self) -> str:
        """The name of what was called, such as "mul"."""
        if self.func is None:
            return "input"
        name = getattr(self.func, "__name__", type(self.func).__name__)
        if name in ("__get__", "__call__"):  # of a property, such as x.T
            name = self.func.__self__.__name__  # type: ignore[attr-defined]
        return name.strip("_")

    @property
    def tensor(self) -> bool:
        import torch

        return isinstance(self.meta, torch.Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in numbers; () of several tensors."""
        return tuple(map(plain, self.meta.shape)) if self.tensor else ()

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return self.count * self.meta.dtype.itemsize if self.tensor else 0

    @property
    def inputs(self) -> list[Value]:
        """The values among its arguments, each once."""
        found = (x for x in leaves((self.args, self.kwargs)) if isinstance(x, Value))
        return list(dict.fromkeys(found))

    @property
    def view(self) -> bool:
        """Whether it only names elements of its first argument."""
        first = self.inputs[0].meta if self.inputs else None
        if isinstance(first, tuple):
            return True
        if first is None or isinstance(self.meta, tuple):
            return first is not None and _shares(self.meta[0], first)
        return _shares(self.meta, first)


@dataclass(frozen=True)
class Extent:
    """An extent of a tensor, in the place of the number that it is among a call's arguments.

    Attributes:
        tensor: The tensor's place among the call's tensors.
        dim: The dim.
    """

    tensor: int
    dim: int


@dataclass(frozen=True)
class Graph:
    """A function's calls.

    Attributes:
        name: The function's.
        inputs: Its tensors: those among the arguments, then others that it uses.
        held: Those others, as they are.
        values: All calls, in order.
        results: What it returns.
        structure: Of what it returns, as pytree has it.
    """

    name: str
    inputs: list[Value]
    held: list[torch.Tensor]
    values: list[Value]
    results: list[Value]
    structure: Any

    def copy(self) -> Graph:
        """The same, with values of its own; inputs stay those that they are."""
        new: dict[Value, Value] = {}

        def changed(x: Any) -> Any:
            return new.get(x, x) if isinstance(x, Value) else x

        for v in self.values:
            args, kwargs, *whole = (
                mapped(x, changed) for x in (v.args, v.kwargs, *(v.whole or ()))
            )
            new[v] = replace(v, args=args, kwargs=kwargs, whole=tuple(whole) or None)
        results = [changed(v) for v in self.results]
        return replace(self, values=[*new.values()], results=results)


def plain(x: Any) -> Any:
    """A size, or what Python made of one, as the example's number; all else as it is."""
    return x.node.hint if type(x).__name__ in ("SymInt", "SymFloat", "SymBool") else x


def leaves(tree: Any) -> list[Any]:
    """What arguments are made of."""
    found: list[Any] = []
    mapped(tree, found.append)
    return found


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with `change` done to what is no container."""
    from torch.fx.node import map_aggregate

    return map_aggregate(tree, change)


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str] = (),
) -> Graph:
    """The graph of a call of `function`.

    Args:
        function: Any callable; a module too.
        args, kwargs: The call's, with tensors anywhere in lists, tuples and dicts.
        names: What the tensors are called, in order.

    Raises:
        Unplanned: it writes in place, draws random numbers, goes by values of tensors, or raises.
    """
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    given_leaves, structure = tree_flatten((args, kwargs))
    recorder = _recorder()
    tensors = [leaf for leaf in given_leaves if isinstance(leaf, torch.Tensor)]
    named = itertools.chain(names, itertools.repeat("x"))
    fakes = [recorder.entered(x, name) for x, name in zip(tensors, named, strict=False)]
    given, rest = len(fakes), iter(fakes)
    faked = [
        next(rest) if isinstance(x, torch.Tensor)
        else fakes[x.tensor].shape[x.dim] if isinstance(x, Extent) else x
        for x in given_leaves
    ]  # fmt: skip
    try:
        with quiet(), torch.no_grad(), recorder.fake, recorder.draws, recorder:
            fake_args, fake_kwargs = tree_unflatten(faked, structure)
            returned = function(*fake_args, **fake_kwargs)
    except Unplanned:
        raise
    except Exception as error:  # the function is foreign code
        said = recorder.at + (str(error).strip().splitlines() or ["no message"])[0]
        said = re.sub(r"\bs\d+\b", lambda found: recorder.sizes().get(found[0], found[0]), said)
        kind = type(error).__name__
        if "data-dependent" in said.lower() or "DataDependent" in kind or "item()" in said:
            raise Unplanned("control flow, or a Python number, depends on a value") from error
        raise Unplanned(f"with sizes as symbols it raises {kind}: {said}") from error
    results, shape = tree_flatten(returned)
    if odd := [x for x in results if not isinstance(x, torch.Tensor)]:
        raise Unplanned(f"it returns a {type(odd[0]).__name__} beside tensors")
    found = [recorder.known(x) for x in results]
    return Graph(
        getattr(function, "__name__", type(function).__name__),
        recorder.inputs,
        recorder.held[given:],
        recorder.made,
        found,
        shape,
    )


def _shares(one: Any, other: Any) -> bool:
    return one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _recorder() -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Sizes(ShapeEnv):
        def _get_user_frame(self) -> Any:
            """Messages alone name it, and to find it imports Inductor and torch.export, 0.4 s."""
            return inspect.currentframe()

    class Recorder(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeTensorMode(
                shape_env=Sizes(duck_shape=False), allow_non_fake_inputs=True
            )
            # Hardly a call is made twice: without its cache of calls, which hashes each one's
            # symbols, a first call took 0.09 s of CPU time less.
            self.fake.cache_enabled = False
            self.inputs: list[Value] = []
            self.held: list[torch.Tensor] = []
            self.made: list[Value] = []
            self.taken: set[str] = set()
            self.at = ""  # the call that raised, by its tensors
            self.draws = Draws()
            # By identity; the tensors are kept by their values, so none is used again.
            self.by_id: dict[int, Value] = {}
            self.of_real: dict[int, torch.Tensor] = {}

        def sizes(self) -> dict[str, str]:
            """What the symbols of inputs stand for."""
            return {str(e): str(plain(e)) for x in self.inputs for e in x.meta.shape}

        def entered(self, real: torch.Tensor, wanted: str) -> torch.Tensor:
            """The fake of a real tensor, which is an input from now on."""
            if type(real) not in (torch.Tensor, torch.nn.Parameter):
                raise Unplanned(f"it takes a {type(real).__name__}, which is no plain tensor")
            symbols: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * real.ndim)
            # A fake of the mode's own cache would be static where it was met before.
            meta = self.fake.from_tensor(real.detach(), symbolic_context=symbols)
            value = Value(self._name(wanted), meta=meta)
            self.inputs.append(value)
            self.held.append(real)
            self.by_id[id(meta)] = value
            return meta

        def reached(self, real: torch.Tensor) -> torch.Tensor:
            """The fake of a tensor that is no argument, though it may be the same as one."""
            if id(real) not in self.of_real:
                self.of_real[id(real)] = self.entered(real, "held")
            return self.of_real[id(real)]

        def known(self, tensor: torch.Tensor) -> Value:
            if id(tensor) not in self.by_id:
                if isinstance(tensor, torch._subclasses.FakeTensor):
                    raise Unplanned("a tensor comes from beyond what torch's functions return")
                tensor = self.reached(tensor)
            return self.by_id[id(tensor)]

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            def enter(x: Any) -> Any:
                real = isinstance(x, torch.Tensor) and id(x) not in self.by_id
                if real and not isinstance(x, torch._subclasses.FakeTensor):
                    return self.reached(x)
                return x

            args, kwargs = mapped(tuple(args), enter), dict(mapped(kwargs or {}, enter))
            parts = simpler(func, args, kwargs)
            if parts is not None:
                with self:
                    result = parts()
                last = self.by_id[id(result)]
                last.whole = func, mapped(args, self._value), mapped(kwargs, self._value)
                return result
            seen = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            versions = [x._version for x in seen]
            try:
                result = folded(func, args, kwargs)(*args, **kwargs)
            except Exception:
                given = ", ".join(f"{x.name} {list(x.shape)}" for x in map(self.known, seen))
                self.at = f"{getattr(func, '__name__', func)} of {given}: "
                raise
            if versions != [x._version for x in seen]:
                raise Unplanned(f"it writes in place ({getattr(func, '__name__', func)})")
            self._note(func, args, kwargs, result)
            return result

        def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            several = isinstance(result, tuple | list)
            tensors = [x for x in (result if several else [result]) if isinstance(x, torch.Tensor)]
            if not tensors or all(id(x) in self.by_id for x in tensors):
                return  # no tensor, or an argument as it was
            args, kwargs = mapped(args, self._value), mapped(kwargs, self._value)
            if any(type(x).__name__.startswith("Sym") and plain(x) is None for x in leaves(args)):
                raise Unplanned("a Python number depends on a value")
            value = Value(self._name("v"), func, args, kwargs)
            value.meta = tuple(result) if several else result
            self.made.append(value)
            if not several:
                self.by_id[id(result)] = value
                return
            for i, x in enumerate(result):
                if isinstance(x, torch.Tensor):
                    part = Value(self._name("v"), operator.getitem, (value, i), {}, x)
                    self.made.append(part)
                    self.by_id[id(x)] = part

        def _value(self, x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return self.known(x)
            return tuple(x) if isinstance(x, torch.Size) else x

        def _name(self, wanted: str) -> str:
            name, count = wanted, 1
            while name in self.taken or name == "v":
                name, count = f"{wanted}{count}", count + 1
            self.taken.add(name)
            return name

    class Draws(TorchDispatchMode):
        """Refuses what draws random numbers."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            arguments = [x.name for x in func._schema.arguments]
            given = {**dict(zip(arguments, args, strict=False)), **(kwargs or {})}
            still = "dropout_p" in arguments and not given.get("dropout_p")  # attention's
            if torch.Tag.nondeterministic_seeded in func.tags and not still:
                raise Unplanned(f"it draws random numbers ({func.overloadpacket.__name__})")
            return func(*args, **(kwargs or {}))

    return Recorder()
