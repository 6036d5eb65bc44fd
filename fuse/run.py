"""Steps as a callable of tensors, flat and ready to be called often."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.cut import Kernel
from coda_agent.fuse.trace import Graph, Value, plain

if TYPE_CHECKING:
    import torch


class Runner:
    """A graph's results by some steps that compute it.

    It keeps nothing of the graph, so a later change of that changes nothing here. The steps are
    written as one function of Python: looked up in a loop they took twice the time.
    """

    def __init__(self, graph: Graph, steps: Iterable[Kernel | Value]) -> None:
        names = {v: f"x{i}" for i, v in enumerate(graph.inputs)}
        known: dict[str, Any] = {}

        def said(x: Any) -> str:
            if isinstance(x, Value):
                return names[x]
            if type(x) is slice:
                return f"slice({said(x.start)}, {said(x.stop)}, {said(x.step)})"
            if isinstance(x, dict):
                inner = ", ".join(f"{k!r}: {said(y)}" for k, y in x.items())
                return f"{{{inner}}}"
            if isinstance(x, tuple | list):
                inner = "".join(f"{said(y)}, " for y in x)
                return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
            known[name := f"c{len(known)}"] = plain(x)
            return name

        lines, takes = list[str](), list[list[str]]()
        for step in steps:
            kernel = isinstance(step, Kernel)
            args, kwargs = (step.inputs, {}) if kernel else (step.args, step.kwargs)
            given = [said(x) for x in args] + [f"{k}={said(x)}" for k, x in kwargs.items()]
            outputs = step.outputs if kernel else [step]
            takes.append([names[v] for v in step.inputs])
            names |= {v: f"x{len(names) + i}" for i, v in enumerate(outputs)}
            made = "".join(f"{names[v]}, " for v in outputs) if kernel else names[step]
            call = said(step.made if kernel else step.func)
            lines.append(f"{made} = {call}({', '.join(given)})")
            takes[-1] += [names[v] for v in outputs]
        kept = {names[v] for v in (*graph.inputs, *graph.results)}
        last = {name: i for i, taken in enumerate(takes) for name in taken if name not in kept}
        for name, i in last.items():  # what no later step takes
            lines[i] += f"; del {name}"
        inputs = "".join(f"{names[v]}, " for v in graph.inputs)
        body = [f"{inputs} = tensors"] if inputs else []
        body += [*lines, f"return [{', '.join(names[v] for v in graph.results)}]"]
        exec("def run(tensors):\n    " + "\n    ".join(body), known)
        self._run = known["run"]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results; views and copies of the inputs where they are such."""
        return self._run(tensors)


PACKED: dict[tuple[int, ...], tuple[list[weakref.ref[torch.Tensor]], list[int], Any]] = {}
"""What was packed, as long as all its parts live: by the kernel, the input and the parts, since
layers of one code have one plan. Emptied, it is packed again."""


class Packed:
    """A kernel as a step: it takes a step's arguments, and packs those that no view brings into the
    kernel's form.

    What is packed is kept as long as its parts are the same tensors at the same version, as
    PyTorch counts writes. A write by way of `.data` is not counted.

    Attributes:
        kernel: The kernel.
    """

    def __init__(self, kernel: Any, names: Sequence[str]) -> None:
        """
        Args:
            kernel: A kernel (`generated.kernel.Kernel`).
            names: The step's arguments, by the names of the spec that it was drafted to.
        """
        self.kernel = kernel
        places = {name: i for i, name in enumerate(names)}
        self._order = [
            [places[p.name] for p in kernel.packing[x].parts] if x in kernel.packing else places[x]
            for x in kernel.spec.inputs
        ]
        self._parts = [[names[i] for i in at] if isinstance(at, list) else [] for at in self._order]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [
            self._packed(i, [tensors[j] for j in at]) if isinstance(at, list) else tensors[at]
            for i, at in enumerate(self._order)
        ]
        result = self.kernel(*given)
        return result if isinstance(result, tuple) else (result,)

    @property
    def packed(self) -> list[str]:
        """The arguments that are packed."""
        return [name for parts in self._parts for name in parts]

    def _packed(self, i: int, parts: list[torch.Tensor]) -> torch.Tensor:
        named = dict(zip(self._parts[i], parts, strict=True))
        if any(t.is_inference() for t in parts):  # whose writes are not counted
            return self.kernel.pack(**named)
        key = id(self.kernel), i, *map(id, parts)
        versions = [x for t in parts for x in (t._version, t.data_ptr())]
        if known := PACKED.get(key):
            refs, of, packed = known
            if of == versions and all(r() is t for r, t in zip(refs, parts, strict=True)):
                return packed
        packed = self.kernel.pack(**named)
        gone = lambda _: PACKED.pop(key, None)
        PACKED[key] = [weakref.ref(t, gone) for t in parts], versions, packed
        return packed
