"""An accepted kernel as a callable, from its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.program import Program
from coda_agent.primitives.spread import spread
from coda_agent.runtime import autograd as gradients
from coda_agent.runtime.call_cache import filled, signature, traced
from coda_agent.runtime.call_inputs import CallInputs
from coda_agent.runtime.documentation import documentation
from coda_agent.runtime.function import ProgramFunction, supported
from coda_agent.runtime.operators import Variant, Variants, differentiated, register
from coda_agent.runtime.pruning import without
from coda_agent.runtime.tile_choice import TileChoice, fused_by
from coda_agent.runtime.user_layout import Declared
from coda_agent.specs import Spec
from coda_agent.specs.format import Draw
from coda_agent.specs.layout import Place

if TYPE_CHECKING:
    from coda_agent.runtime.call_cache import Results


class Kernel:
    """An accepted kernel: a function of the spec's inputs, and torch operators.

    torch.compile traces it, with dynamic shapes too, and a CUDA graph captures it once a call with
    the same dtypes and layouts has compiled it.

    Attributes:
        variants: What runs, for each choice of the static parameters.
        kept: Operators that calls with gradients run in place of these, where their backward pass
            needs more than they store: that is their last output.
        left_out: Outputs of the accepted kernel that this one does not give.
        origin: What gives it again, as `__reduce__` returns it; None where nothing does.
    """

    origin: str | tuple[Callable[..., object], tuple[object, ...]] | None = None

    def __init__(
        self,
        spec: Spec,
        programs: Mapping[str, Program],
        op_name: str,
        tiles: TileChoice | None = None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.spec, self.programs, self.left_out = spec, programs, left_out
        self.tiles = tiles = tiles or TileChoice(spec.name, next(iter(programs.values())))
        self._op, self._less = op_name, dict[tuple[str, ...], Kernel]()
        self.__name__ = spec.name  # what help() and torch.compile print
        self.__doc__ = documentation(spec, columns := index_inputs(spec))
        self.variants = _variants(spec, programs, tiles, columns)
        self.ops = _operators(op_name, spec, self.variants)
        unmeasured = partial(TileChoice, "", refused=tiles.refused, spills=tiles.spills)
        kept = gradients.keeping(spec, self.variants, lambda x: unmeasured(x).choose)
        self.kept = _operators(f"{op_name}_kept", spec, kept)
        # Plain values, because torch.compile traces the call.
        types, alike = _types(spec), (spec.inputs[spec.gemm[0]].dtype, *_types(spec))
        self._declared = Declared(spec.name, spec.layout, alike) if spec.layout else None
        self._parts = tuple(spec.declared.inputs) if self.packing else ()
        self._apart = self._of_rows_apart() if self.packing else {}
        self._inputs = CallInputs(spec, types, self._declared.hint if self._declared else "")
        self._returned = {tuple(x.values()): _returned(spec, x) for x in spec.bindings()}

    def __call__(
        self, *args: Any, block_size: int | None = None, **inputs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the kernel.

        Args:
            args: The reference's arguments in its order; they may be given by name too. The GEMM
                operands are (…, M, K) and (N, K), the nn.Linear layout; any strides. A scalar is a
                number, or a float32 tensor of one element on the others' device; torch.compile
                specialises on a number, and not on what a tensor holds. Where some are tensors, a
                number costs a launch that fills one. What no view brings into the kernel's form is
                packed here (`packed` takes what was packed before), but for two dense weights, or
                halves of one, whose rows are paired: where nothing needs a gradient, a GPU reads
                them as they lie.
            block_size: None gives final reductions, by one launch more; an integer the raw float32
                partials of blocks of that many columns (or rows, where rows are reduced over), from
                one launch. Inputs whose strides or address TMA cannot load are copied first.
            inputs: Inputs by name, and the spec's static parameters.

        Returns:
            The outputs in the spec's order; a single one alone. One that overwrites an input is
            that input.

        Raises:
            ArgumentError: an input is missing, or there is no such input; a TypeError, too.
            LaunchError: wrong shapes, dtypes or layouts; the message names the tensor. Or an input
                requires a gradient, and there is none: of FP8 numbers, and of a variant that
                overwrites an input.
        """
        key, values = self._bound(args, inputs, self._parts or self._inputs.names)
        if self._parts:
            given = dict(zip(self._parts, values, strict=True))
            apart = None if block_size is not None or traced() else self._apart.get(key)
            if apart and (found := self._where_they_lie(given)):
                return self._run(key, found, None, apart)
            values = self._of_parts(given)
        return self._run(key, values, block_size)

    def packed(
        self, *args: Any, block_size: int | None = None, **inputs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the kernel on what `pack` made, in its parts' place.

        All else is as in a call; a kernel that takes nothing packed is called.
        """
        key, values = self._bound(args, inputs, self._inputs.names)
        return self._run(key, values, block_size)

    def _bound(
        self, args: tuple[Any, ...], inputs: dict[str, Any], names: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Sequence[Any]]:
        """Find a call's static parameters, and its inputs in the order of `names`."""
        key = self._inputs.choice(inputs) if self._inputs.parameters else ()
        if inputs or len(args) != len(names):
            args = (*args, *self._inputs.named(args, inputs, names))
        return key, args

    def _run(
        self,
        key: tuple[str, ...],
        values: Sequence[Any],
        block_size: int | None,
        variant: Variant | None = None,
    ) -> Any:
        """Run the kernel, or a variant that takes rows apart, on inputs of its own."""
        given = values
        if self._declared:
            try:
                values = self._declared.entered(values)
            except RuntimeError:  # no views are taken of what is not dense
                self._inputs.check(values)
                raise
        variant = variant or (None if traced() else self.variants[key])
        ordered = variant.inputs(values) if variant else []
        call = variant and variant.function.calls.find(ordered, (block_size, None))
        if variant and call:
            results = variant.run(call, ordered, values)
        else:
            values = list(values)
            results = self._anew(variant, key, values, block_size)
        names, updated = self._returned[key]
        if self._declared:
            element, raw = values[self._inputs.a].dtype, block_size is not None
            results = self._declared.left(names, results, element, raw=raw)
        return results if updated is None else _with_updated(results, given, *updated)

    def without(self, *outputs: str) -> Kernel:
        """Give the kernel that neither computes nor stores these outputs.

        Inference has no use for what only a backward pass reads. Make it once, outside of what
        torch.compile traces. Its tiles are chosen as this one's are.

            project = gemm_rmsnorm_rope.without("D")
            O = project(A, B, r, cs)

        Args:
            outputs: Names in the spec; calls with the same ones give the same kernel.

        Returns:
            A kernel with the same inputs, and with the outputs that are left.

        Raises:
            LaunchError: no such output, one that may overwrite an input, or what is left reads less
                than all inputs.
        """
        key = tuple(o for o in self.spec.outputs if o in outputs)
        if not outputs:
            return self
        if key not in self._less or len(key) < len({*outputs}):
            spec, programs = without(self.spec, self.programs, outputs)
            tiles = replace(self.tiles, name=spec.name, program=next(iter(programs.values())))
            name, left_out = "_".join((self._op, "without", *key)), (*self.left_out, *key)
            self._less[key] = less = Kernel(spec, programs, name, tiles, left_out)
            less.origin = Kernel.without, (self, *key)
        return self._less[key]

    def __repr__(self) -> str:
        less = f".without({', '.join(map(repr, self.left_out))})" if self.left_out else ""
        return f"<kernel {self.__name__}{less}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle by name, or by the folder of a workspace's."""
        if self.origin is None:
            raise TypeError(f"{self!r} cannot be pickled: it was made here, out of no folder")
        return self.origin

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: object) -> Kernel:
        return self

    def pack(self, **tensors: torch.Tensor) -> torch.Tensor:
        """Make the input that a kernel takes in its parts' place.

        No view brings these into the kernel's form. Pack a weight once, not at every call.

        Args:
            tensors: By their names in the spec, as `help` of the kernel shows under "Packed".

        Returns:
            One tensor of them all, which `packed` takes.

        Raises:
            LaunchError: no input is made of exactly these.
        """
        return self._layout().pack(tensors)

    def unpack(
        self, name: str, packed: torch.Tensor, extents: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Take a packed tensor apart again: the inverse of `pack`.

        Args:
            name: Of the input that is packed.
            packed: What `pack` gave for it, or its gradient.
            extents: Of each part along the dimension in which they lie side by side; by default
                in the spec's proportion.

        Returns:
            The spec's tensors by name, which are views but of halves and of what is scaled.

        Raises:
            LaunchError: no such input is packed, or the extents leave the proportion open.
        """
        return self._layout().unpack(name, packed, extents)

    @property
    def packing(self) -> Mapping[str, Place]:
        """Inputs that the kernel takes packed, and what each is made of."""
        return self._declared.packing if self._declared else {}

    def _of_parts(self, given: Mapping[str, Any]) -> list[Any]:
        """Make inputs of what the reference takes, packed."""
        for x, value in given.items():
            if not isinstance(value, (torch.Tensor, int, float)):
                raise LaunchError(f"{self.__name__}: input {x!r} is {type(value).__name__}")
        return self._layout().whole(given)

    def _where_they_lie(self, given: Mapping[str, Any]) -> list[Any] | None:
        """Make inputs of rows apart, where a kernel takes them so."""
        a = given.get(self.spec.gemm[0])  # or it is packed, too
        if not isinstance(a, torch.Tensor) or not supported(a.device):
            return None
        if differentiated([*given.values()]) or torch.is_autocast_enabled("cuda"):
            return None
        return self._layout().apart(given)

    def _of_rows_apart(self) -> Variants:
        """Make what takes B's even and its odd rows, these behind all inputs."""
        found = dict[tuple[str, ...], Variant]()
        for key, variant in self.variants.items():
            function = variant.function
            if function.program.wide or function.program.accumulated or variant.updated:
                continue
            program = spread(function.program)
            choose = fused_by(self.tiles.choose, TileChoice("", program).choose)
            found[key] = replace(
                variant,
                function=replace(function, program=program, choose=lru_cache(maxsize=1024)(choose)),
                operands=(*variant.operands, program.spread),
                places=(*variant.places, len(self.spec.inputs)),
            )
        return found

    def _layout(self) -> Declared:
        if self._declared is None:
            raise LaunchError(f"{self.__name__} takes every tensor as its spec declares it")
        return self._declared

    def _anew(
        self, variant: Variant | None, key: tuple[str, ...], values: list[Any], block: int | None
    ) -> Any:
        """Run a call without a plan, by the operator if need be."""
        self._inputs.check(values)
        if variant is None:
            self._inputs.check_transforms()
        if (device := self._inputs.autocast(values)) is not None:
            # The interpreter's own product would be cast too.
            with torch.autocast(device, enabled=False):
                return self._anew(variant, key, values, block)
        scalars, a = self._inputs.scalars, self._inputs.a
        in_memory = scalars and filled(values, scalars, values[a].device)
        if variant is None or signature(values) is None or differentiated(values):
            kept = self.kept.get(key) if differentiated(values) else None
            packet = kept or self.ops[key]
            op = packet.Tensor if in_memory else packet.default
            static: dict[str, str | int] = dict(zip(self._inputs.parameters, key, strict=True))
            if block is not None:
                static["block_size"] = block
            found = op(*values, **static)
            return found if kept is None else found[:-1] if len(found) > 2 else found[0]
        return variant(values, block)  # what the operator runs, without the dispatcher


def _types(spec: Spec) -> tuple[str, ...]:
    """List the element types that A may have."""
    element = spec.inputs[spec.gemm[0]].dtype
    return spec.types.get(element, (element,))


def index_inputs(spec: Spec) -> tuple[str, ...]:
    """List the inputs that name a column in each row."""
    column = Draw("integers", (0, spec.gemm_dims[1]))
    return tuple(x for x, t in spec.inputs.items() if t.draw == column)


def _variants(
    spec: Spec, programs: Mapping[str, Program], tiles: TileChoice, columns: tuple[str, ...]
) -> Variants:
    """Make what runs for each choice of parameters; `columns` are index inputs."""
    element, types = spec.inputs[spec.gemm[0]].dtype, _types(spec)
    dtypes = {
        o: None if x.dtype == element else spec.types.get(x.dtype, (x.dtype,))[0]
        for o, x in spec.outputs.items()
    }
    choose = lru_cache(maxsize=1024)(tiles.choose)
    functions = {
        v: ProgramFunction(program, dtypes, choose, types, tiles.refused, columns)
        for v, program in programs.items()
    }
    return {
        tuple(x.values()): Variant.of(spec, x, functions[spec.variant(x)]) for x in spec.bindings()
    }


def _operators(name: str, spec: Spec, variants: Variants) -> dict[tuple[str, ...], Any]:
    ops = register(name, spec, variants)
    gradients.register(name, spec, variants)
    return ops


def _returned(
    spec: Spec, binding: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[int, int] | None]:
    """Find a call's outputs, and places of one that overwrites its input."""
    updated = spec.updated(binding)
    names, inputs = tuple(spec.declared.outputs), tuple(spec.inputs)
    places = [(names.index(o), inputs.index(i)) for o, i in updated.items()]
    return tuple(o for o in spec.outputs if o not in updated), places[0] if places else None


def _with_updated(results: Results, given: Sequence[Any], o: int, i: int) -> Any:
    """Put input `i` in the place `o` of what overwrote it."""
    others = results if isinstance(results, tuple) else () if results is None else (results,)
    return (*others[:o], given[i], *others[o:]) if others else given[i]
