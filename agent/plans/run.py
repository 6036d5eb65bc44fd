"""Steps as a callable of tensors, flat and ready to be called often."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.agent.plans.cut import Kernel
from coda_agent.agent.plans.trace import Graph, Value, mapped, plain

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Slot:
    at: int


class Runner:
    """A graph's results by some steps that compute it.

    It keeps nothing of the graph, so a later change of that changes nothing here.
    """

    def __init__(self, graph: Graph, steps: Iterable[Kernel | Value]) -> None:
        slots = {v: i for i, v in enumerate(graph.inputs)}
        self._count = len(slots)
        self._steps: list[tuple[Any, Any, Any, Any]] = []

        def slot(x: Any) -> Any:
            return _Slot(slots[x]) if isinstance(x, Value) else plain(x)

        for step in steps:
            if isinstance(step, Kernel):
                call, args, kwargs = step.made, tuple(step.inputs), {}
            else:
                call, args, kwargs = step.func, step.args, step.kwargs
            args, kwargs = mapped(args, slot), mapped(kwargs, slot)
            for v in step.outputs if isinstance(step, Kernel) else [step]:
                slots[v] = len(slots)
            made = [slots[v] for v in step.outputs] if isinstance(step, Kernel) else slots[step]
            self._steps.append((call, args, kwargs, made))
        self._results = [slots[v] for v in graph.results]
        self._freed = self._last_uses(len(slots))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results; views and copies of the inputs where they are such."""
        env: dict[int, Any] = dict(enumerate(tensors))

        def value(x: Any) -> Any:
            return env[x.at] if type(x) is _Slot else x

        for (call, args, kwargs, made), freed in zip(self._steps, self._freed, strict=True):
            result = call(*mapped(args, value), **mapped(kwargs, value))
            env.update(zip(made, result, strict=True) if type(made) is list else [(made, result)])
            for i in freed:
                del env[i]
        return [env[i] for i in self._results]

    def _last_uses(self, count: int) -> list[list[int]]:
        """What no later step takes, after each step."""
        last = dict.fromkeys(range(self._count), -1)
        for at, (_, args, kwargs, made) in enumerate(self._steps):
            found: list[int] = made[:] if isinstance(made, list) else [made]
            mapped((args, kwargs), lambda x, f=found: f.append(x.at) if type(x) is _Slot else None)
            last |= dict.fromkeys(found, at)
        freed: list[list[int]] = [[] for _ in self._steps]
        for i, at in last.items():
            if at >= 0 and i >= self._count and i not in self._results:
                freed[at].append(i)
        return freed


class Packed:
    """A kernel as a step: it takes a step's arguments, and packs those that no view brings into the
    kernel's form.

    What is packed is kept as long as its parts are the same tensors at the same version, as
    PyTorch counts writes. A write by way of `.data` is not counted; `forget` packs anew.

    Attributes:
        kernel: The kernel.
        keeps: Whether it is kept at all.
    """

    def __init__(self, kernel: Any, names: Sequence[str]) -> None:
        """
        Args:
            kernel: A kernel (`generated.kernel.Kernel`).
            names: The step's arguments, by the names of the spec that it was drafted to.
        """
        self.kernel, self.keeps = kernel, True
        places = {name: i for i, name in enumerate(names)}
        self._order = [
            [places[p.name] for p in kernel.packing[x].parts] if x in kernel.packing else places[x]
            for x in kernel.spec.inputs
        ]
        self._parts = [[names[i] for i in at] if isinstance(at, list) else [] for at in self._order]
        self._kept: dict[int, tuple[list[Any], list[int], Any]] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [
            self._packed(i, [tensors[j] for j in at]) if isinstance(at, list) else tensors[at]
            for i, at in enumerate(self._order)
        ]
        result = self.kernel(*given)
        return result if isinstance(result, tuple) else (result,)

    def forget(self) -> None:
        """Packs again at the next call."""
        self._kept.clear()

    @property
    def packed(self) -> list[str]:
        """The arguments that are packed."""
        return [name for parts in self._parts for name in parts]

    def _packed(self, i: int, parts: list[torch.Tensor]) -> torch.Tensor:
        counted = self.keeps and not any(t.is_inference() for t in parts)
        versions = [x for t in parts for x in (t._version, t.data_ptr())] if counted else []
        if counted and (known := self._kept.get(i)):
            refs, of, packed = known
            if of == versions and all(r() is t for r, t in zip(refs, parts, strict=True)):
                return packed
        packed = self.kernel.pack(**dict(zip(self._parts[i], parts, strict=True)))
        if counted:
            self._kept[i] = [weakref.ref(t) for t in parts], versions, packed
        return packed
