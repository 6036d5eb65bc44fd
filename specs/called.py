"""A user's function, called on tensors of any extents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from coda_agent.primitives.errors import SpecError
from coda_agent.specs.source import Example, Source

FILE = "<reference>"
"""The file of the function's lines, in tracebacks."""


class Elsewhere(RuntimeError):
    """What the function raises at sizes that the example does not have."""


class Called:
    """A function with an example of each argument; its text is run."""

    def __init__(self, source: Source, examples: Mapping[str, Example]) -> None:
        self.source, self.examples = source, examples
        space: dict[str, Any] = {}
        exec(compile(source.block, FILE, "exec"), space)
        self.function: Callable[..., object] = space["reference"]

    def dtype(self, name: str, chosen: str) -> torch.dtype:
        """Give an argument's type, where T is the one that is chosen."""
        dtype = self.examples[name].dtype
        return getattr(torch, chosen if dtype == "T" else dtype)

    def inputs(
        self, shapes: Mapping[str, tuple[int, ...]], chosen: str, device: str = "cpu"
    ) -> dict[str, Any]:
        """Draw values in [0.5, 1.5]; of integers 1."""
        draws = torch.Generator("cpu").manual_seed(0) if device == "cpu" else None
        inputs: dict[str, Any] = {}
        for name, shape in shapes.items():
            dtype = self.dtype(name, chosen)
            values = torch.rand(shape, generator=draws, device=device) + 0.5
            values = values if dtype.is_floating_point else values.fill_(1)
            inputs[name] = values.to(dtype) if shape else 0.75
        return inputs

    def run(self, shapes: Mapping[str, tuple[int, ...]], chosen: str) -> dict[str, torch.Tensor]:
        """Give the outputs at some extents, by name.

        Raises:
            Elsewhere: the function raises there.
        """
        inputs = self.inputs(shapes, chosen)
        try:
            returned = self.function(**inputs)
        except (SpecError, OSError):
            raise
        except Exception as error:  # the function is foreign code
            said = (str(error).splitlines() or ["no message"])[0]
            given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            fault = Elsewhere(f"{type(error).__name__}: {said}, with {given}")
            raise fault.with_traceback(error.__traceback__) from None
        return self._named(returned)

    def outputs(self, inputs: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Give the outputs of some inputs, by name."""
        return self._named(self.function(**inputs))

    def _named(self, returned: Any) -> dict[str, torch.Tensor]:
        if isinstance(returned, dict):
            found = {str(name): value for name, value in returned.items()}
        else:
            values = [*returned] if isinstance(returned, tuple | list) else [returned]
            names = self.source.returned
            if len(names) != len(values) or {*names} & {*self.examples}:
                stem = next(x for x in ("out", "result", "returned") if x not in self.examples)
                names = [f"{stem}{i + 1}" for i in range(len(values))] if values[1:] else [stem]
            found = dict(zip(names, values, strict=True))
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                what = "nothing" if value is None else f"a {type(value).__name__}"
                hint = "return a tensor, a tuple of tensors or a dict of them"
                raise SpecError(f"the function returns {what} for {name}", hint=hint)
            if not value.ndim:
                message = f"{name} is one number; a kernel reduces over rows, or over columns"
                raise SpecError(message, hint="return what it is made of, and reduce it with torch")
        return found
