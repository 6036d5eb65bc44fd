"""An accepted kernel as a callable, from its folder."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError, WorkspaceError
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec, load_spec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Kernel:
    """An accepted kernel.

    Attributes:
        spec: Its frozen spec.
        programs: Its programs by variant name.
        tuned: GPU name to dtype to measured shapes with their best configuration.
    """

    spec: Spec
    programs: Mapping[str, Program]
    tuned: Mapping[str, Mapping[str, list[dict[str, Any]]]]

    @property
    def __name__(self) -> str:  # what help() and torch.compile print
        return self.spec.name

    def __call__(
        self, *args: Any, block_size: int | None = None, **inputs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the kernel.

        Args:
            args: The spec's inputs in the spec's order; they may be given by name too. The GEMM
                operands are (…, M, K) and (N, K), the nn.Linear layout; any strides.
            block_size: None gives final reductions; an integer the raw float32 partials of blocks
                of that many columns, from one launch.
            inputs: Inputs by name, and the spec's static parameters.

        Returns:
            The outputs in the spec's order; a single one alone.

        Raises:
            LaunchError: wrong arguments, shapes, dtypes or layouts; the message names the tensor.
        """
        from coda_agent.primitives.function import ProgramFunction

        binding = {p: inputs.pop(p) for p in list(inputs) if p in self.spec.parameters}
        values = self._bind(args, inputs)
        program = self.programs[self._variant(binding)]
        a, b = (values.pop(name) for name in self.spec.gemm)
        dtypes = {
            o: None if self.spec.outputs[o].dtype in self.spec.types else self.spec.outputs[o].dtype
            for o in self.spec.outputs
        }
        results = ProgramFunction(program, dtypes, self._choose)(
            a, b, values, block_size=block_size
        )
        ordered = tuple(results[o] for o in self.spec.outputs)
        return ordered[0] if len(ordered) == 1 else ordered

    def _bind(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
        names = list(self.spec.inputs)
        if len(args) > len(names):
            raise LaunchError(f"{self.spec.name} takes {len(names)} inputs, got {len(args)}")
        values = dict(zip(names, args, strict=False))
        for name, value in inputs.items():
            if name not in names or name in values:
                raise LaunchError(
                    f"{self.spec.name}: unexpected or repeated argument {name!r}, "
                    f"expected {', '.join(names)}"
                )
            values[name] = value
        missing = [n for n in names if n not in values]
        if missing:
            raise LaunchError(f"{self.spec.name}: input {missing[0]!r} is missing")
        return values

    def _variant(self, binding: Mapping[str, str]) -> str:
        for name, value in binding.items():
            choices = self.spec.parameters[name]
            if value not in choices:
                raise LaunchError(
                    f"{self.spec.name}: {name} is {value!r}, expected one of {', '.join(choices)}"
                )
        return self.spec.variant(binding)

    def _choose(self, m: int, n: int, k: int, dtype: str) -> TileConfig:
        from coda_agent.primitives.function import default_config

        measured = self.tuned.get(_gpu_name(), {}).get(dtype, [])
        if not measured:
            return default_config(m, n, k, dtype)

        def distance(shape: dict[str, Any]) -> float:
            return sum(
                abs(math.log(shape[d] / size)) for d, size in zip("mnk", (m, n, k), strict=True)
            )

        return TileConfig(**min(measured, key=distance)["config"])


@lru_cache(maxsize=1)
def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def load_kernel(folder: Path) -> Kernel:
    """The kernel in `folder` (kernel.py, spec.md and, where it was tuned, tuned.json).

    Raises:
        WorkspaceError: the folder holds no kernel.
    """
    path = folder / "kernel.py"
    module_spec = importlib.util.spec_from_file_location(
        f"coda_agent.generated.{folder.name}", path
    )
    if module_spec is None or module_spec.loader is None or not path.is_file():
        raise WorkspaceError(f"{folder} holds no kernel.py")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    spec = load_spec(folder / "spec.md")
    tuned = folder / "tuned.json"
    return Kernel(
        spec,
        {spec.variant(b): getattr(module, spec.variant(b)) for b in spec.bindings()},
        json.loads(tuned.read_text()) if tuned.is_file() else {},
    )
