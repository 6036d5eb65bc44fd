"""What a call of a kernel is given: named, checked, and cast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ArgumentError, LaunchError
from coda_agent.runtime.operators import scalars
from coda_agent.specs import Spec
from coda_agent.specs.layout import extent


class CallInputs:
    """A kernel's inputs, as plain values, since torch.compile traces its calls."""

    def __init__(self, spec: Spec, types: Sequence[str], hint: str) -> None:
        """`types` are those of A; `hint` says what is packed."""
        self.names, self.parameters = tuple(spec.inputs), dict(spec.parameters)
        self.a = self.names.index(spec.gemm[0])
        self.scalars = tuple(map(self.names.index, scalars(spec)))
        self._kernel, self._hint = spec.name, hint
        # What is overwritten must stay the caller's tensor.
        kept = {spec.in_place.input} if spec.in_place else set()
        element = spec.inputs[spec.gemm[0]].dtype
        own = {x for x, t in spec.inputs.items() if t.dtype == element} - kept
        self._sizes = tuple(_fixed_sizes(spec))
        self._casts = tuple(map(self.names.index, own)) if "float8" not in types[0] else ()

    def choice(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        """Take the static parameters out of `inputs`."""
        chosen = []
        for p, known in self.parameters.items():
            if (value := inputs.pop(p, known[0])) not in known:
                raise LaunchError(
                    f"{self._kernel}: {p} is {value!r}, expected one of {', '.join(known)}"
                )
            chosen.append(value)
        return tuple(chosen)

    def named(
        self, args: tuple[object, ...], inputs: dict[str, Any], names: tuple[str, ...]
    ) -> list[Any]:
        """Find the inputs that follow `args` in the order of `names`."""
        name, rest = self._kernel, names[len(args) :]
        if len(args) + len(inputs) == len(names) and all([x in inputs for x in rest]):
            return [inputs[x] for x in rest]
        if len(args) > len(names):
            message = f"{name} takes {len(names)} inputs, got {len(args)}"
            raise ArgumentError(message, hint=self._hint)
        for x in inputs:
            if x not in rest:
                raise ArgumentError(
                    f"{name}: unexpected or repeated argument {x!r}, expected {', '.join(names)}",
                    hint=self._hint,
                )
        missing = next(x for x in rest if x not in inputs)
        raise ArgumentError(f"{name}: input {missing!r} is missing")

    def check_transforms(self) -> None:
        """Refuse to be differentiated but by `backward` and `grad`."""
        from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
        from torch.autograd import forward_ad

        if torch.compiler.is_compiling():
            return
        kinds = {level.key().name for level in _functorch.get_interpreter_stack() or ()}
        if forward_ad._current_level >= 0 or "Grad" in kinds:
            raise LaunchError(
                f"{self._kernel} has gradients by torch.autograd alone, not by torch.func.grad "
                "and not in forward mode",
                hint="use torch.autograd.grad or backward()",
            )

    def autocast(self, values: list[object]) -> str | None:
        """Cast as autocast does where it is on; the device's type then."""
        device = getattr(getattr(values[self.a], "device", None), "type", "cpu")
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return None
        dtype = torch.get_autocast_dtype(device)
        for i in self._casts:
            value = values[i]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[i] = value if value.dtype is torch.float64 else value.to(dtype)
        return device

    def check(self, values: Sequence[object]) -> None:
        """Refuse what is no dense tensor, nor an allowed number."""
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                if hasattr(value, "placements"):
                    raise LaunchError(
                        f"{self._kernel}: input {self.names[i]!r} is a DTensor, expected a "
                        "rank's tensor",
                        hint="call it on .to_local() of all, as docs/several-gpus.md has it",
                    )
                if value.layout is torch.strided and not value.is_nested:
                    continue
                kind = "nested" if value.is_nested else value.layout
                raise LaunchError(
                    f"{self._kernel}: input {self.names[i]!r} is {kind}, expected a dense tensor",
                    hint="such as .to_dense() or .to_padded_tensor(0.0) makes",
                )
            if not (number := i in self.scalars) or not isinstance(value, (int, float)):
                raise LaunchError(
                    f"{self._kernel}: input {self.names[i]!r} is {type(value).__name__}, "
                    f"expected a {'number or ' * number}tensor"
                )
        for i, axis, size in self._sizes:
            shape = tuple(getattr(values[i], "shape", ()))
            if len(shape) >= -axis and shape[axis] != size:
                raise LaunchError(
                    f"{self._kernel}: input {self.names[i]!r} is {shape} to the kernel, expected "
                    f"{size} as its dimension {axis}",
                    hint="the kernel is of this size alone: its reference has it as a number",
                )


def _fixed_sizes(spec: Spec) -> Iterator[tuple[int, int, int]]:
    """List extents that a spec's inputs have alone: an input, a dimension and the extent."""
    only = {x: dim.only for x, dim in spec.dims.items() if dim.only}
    for i, name in enumerate(spec.inputs):
        shape = spec.symbolic_shape(name)
        for axis, entry in enumerate(shape, start=-len(shape)):
            with suppress(KeyError):  # it follows from sizes that are free
                if (size := extent(entry, only)) > 1:
                    yield i, axis, size
