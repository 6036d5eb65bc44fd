"""Demonstrations: small epilogue programs to read, each with problem, reasons and reference.

- One module is one demonstration. Its docstring states the problem as a spec would; the program
  follows, in the candidate language; after the line `END` come `WHY` and `reference`.
- `reference(**inputs)` is plain PyTorch in the dtype of its inputs; it returns outputs by name.
- Inputs are drawn as is usual for their kinds. The constant `INPUTS` says by name which are not: a
  number, "positive", "whole" for small integers, or the mean and scale of a normal draw. Tensors
  that no such draw gives are returned by a function `inputs(generator, M, N)`.
- A program whose N must be a multiple of more than 16 says so by the constant `N_MULTIPLE`.
- A new demonstration is a new module in this folder; nothing has to be registered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.demos._draw import draw
from coda_agent.primitives import Program
from coda_agent.primitives.reader import read_programs

if TYPE_CHECKING:
    import torch

END = "# --- end of program ---"


@dataclass(frozen=True)
class Demo:
    """One demonstration.

    Attributes:
        name: The module's name.
        summary: First line of its docstring.
        why: Why the program is written so: what is free, what costs, what would be worse.
        text: The module's source.
        programs: The programs it defines, in order; their output names are distinct.
        reference: Named inputs to named outputs, in plain PyTorch.
        unusual: (generator, M, N) to the inputs not drawn as usual, by name (see `_draw`).
        n_multiple: What N must be a multiple of.
    """

    name: str
    summary: str
    why: str
    text: str
    programs: tuple[Program, ...]
    reference: Callable[..., dict[str, torch.Tensor]]
    unusual: Callable[[torch.Generator, int, int], Mapping[str, Any]]
    n_multiple: int

    @property
    def candidate(self) -> str:
        """The text that is a candidate: docstring, import and programs."""
        return self.text.partition(END)[0]

    def inputs(self, generator: torch.Generator, m: int, n: int, k: int) -> dict[str, Any]:
        """Draw A (M, K), B (N, K), operands, and an `AddTile`'s addend."""
        return draw(self.programs, self.unusual(generator, m, n), generator, m, n, k)


def demos() -> list[Demo]:
    """List every demonstration of this folder, by name."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [_load(file) for file in files if not file.stem.startswith("_")]


@cache
def _load(file: Path) -> Demo:
    module = importlib.import_module(f"{__name__}.{file.stem}")
    problem, text = (module.__doc__ or "").strip(), file.read_text(encoding="utf-8")
    return Demo(
        name=file.stem,
        summary=problem.split("\n")[0],
        why=module.WHY.strip(),
        text=text,
        programs=tuple(read_programs(text.partition(END)[0]).values()),
        reference=module.reference,
        unusual=getattr(module, "inputs", lambda *_: getattr(module, "INPUTS", {})),
        n_multiple=getattr(module, "N_MULTIPLE", 16),
    )
