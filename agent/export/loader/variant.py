"""A variant of an exported kernel: its arguments and results."""

from __future__ import annotations

import math
import warnings
from operator import itemgetter
from typing import Any, Mapping, Optional, Sequence

import torch

from coda_agent.agent.export.loader.call import Chosen, buffer, extents, led, planned
from coda_agent.agent.export.loader.fold import Fold, folding
from coda_agent.agent.export.loader.store import KernelError, Store
from coda_agent.runtime.call_cache import CallPlan, Calls, differentiated, picked

_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


class Variant:
    """A kernel with its static parameters chosen.

    Attributes:
        updated: Places of outputs of the program that overwrite an input, and of that input.
        shown: The same places among the outputs that a caller gets.
        returned: Places of the other outputs.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        kernel: Mapping[str, Any],
        about: Mapping[str, Any],
        store: Store,
    ) -> None:
        self._name, self._inputs, self._store, self._about = name, inputs, store, about
        self._operands: list[dict[str, Any]] = about["operands"]
        self._outputs: list[dict[str, Any]] = about["outputs"]
        self._places: list[int] = about["places"]
        self._forms: dict[str, Any] = about["forms"]
        self._choices: dict[str, Any] = kernel["choices"]
        self._tiles: list[dict[str, Any]] = kernel["tiles"]
        self.updated: list[tuple[int, int]] = about["updated"]
        self.shown: list[tuple[int, int]] = about["shown"]
        self.returned: list[int] = about["returned"]
        a, b, *_ = self._places
        self._inputs_of = itemgetter(*self._places)
        self.calls: Calls[CallPlan] = Calls(a, b, kernel["scalars"], len(inputs))

    def __call__(self, values: Sequence[Any], block_size: Optional[int] = None) -> Any:
        if call := self.calls.find(values, block_size):
            return self.run(call, values)
        self.refuse_gradients(values)
        call = self.calls.recall(values, block_size)
        if call is None:
            m, n, k, form = self._check(values)
            if m == 0:
                return self.fake(values, block_size)
            call = self._resolved(values, (m, n, k), form, block_size)
            self.calls.keep(values, block_size, call)
        return self.run(call, values)

    def run(self, call: CallPlan, values: Sequence[Any]) -> Any:
        """Do a resolved call; the outputs that overwrite no input."""
        results = call(self._inputs_of(values))
        for _, place in self.updated:  # or what autograd saved would not know
            torch.autograd.graph.increment_version(values[place])
        return picked(self.returned, results)

    def fake(self, values: Sequence[Any], block_size: Optional[int] = None) -> Any:
        """Make a call's results in shapes, dtypes and strides alone."""
        m, n, _, form = self._check(values)
        a = values[self._places[0]]
        tile = next((x for x in self._tiles if block_size in (None, x["block"])), None)
        if tile is None:
            known = sorted({x["block"] for x in self._tiles if x["block"]})
            raise self._error(f"no tile of block_size {block_size} was exported, but {known}")
        results: list[torch.Tensor] = []
        for x, dtype in zip(self._outputs, form["outputs"]):
            kind, reduction = getattr(torch, dtype), x["reduction"]
            if x["accumulates"]:
                results.append(torch.empty_like(values[self._places[-1]]))
            elif reduction and block_size is None:
                shape = extents(x, m, n)
                results.append(a.new_full(shape, reduction["identity"], dtype=kind))
            else:
                t = a.new_empty(buffer(x, (m, n, 0), tile), dtype=kind)
                results.append(t.mT if reduction and reduction["over_rows"] else t)
        return picked(
            self.returned, [led(x, t, a.shape[:-1]) for x, t in zip(self._outputs, results)]
        )

    def _error(self, message: str) -> KernelError:
        return KernelError(f"{self._name}: {message}")

    def refuse_gradients(self, values: Sequence[object]) -> None:
        if differentiated(values):
            raise self._error(
                "has no backward pass, but an input requires a gradient; use torch.no_grad()"
            )

    def _check(self, values: Sequence[Any]) -> tuple[int, int, int, dict[str, Any]]:
        """Check arguments: M (maybe a symbol), N, K, and the exported form."""
        a, b, *operands = [values[i] for i in self._places]
        names = [self._inputs[i] for i in self._places]
        dtype = str(a.dtype)[6:]
        if (form := self._forms.get(dtype)) is None:
            raise self._error(f"{names[0]} is {dtype}, but exported were {', '.join(self._forms)}")
        if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[-1] or a.dtype != b.dtype:
            raise self._error(
                f"{names[0]} is {tuple(a.shape)} {a.dtype} and {names[1]} {tuple(b.shape)} "
                f"{b.dtype}, expected (…, M, K) and (N, K) of one dtype"
            )
        (n, k), m = b.shape, math.prod(a.shape[:-1])
        n_step, k_step = form["steps"]
        if n == 0 or k == 0 or n % n_step or k % k_step:
            raise self._error(
                f"N, K = {n}, {k}, expected positive, N a multiple of {n_step} and K of {k_step}"
            )
        for x, name, kind, value in zip(self._operands, names[2:], form["operands"], operands):
            if not isinstance(value, torch.Tensor):
                continue
            sizes = {"M": tuple(a.shape[:-1]), "N": (n,), "2*N": (2 * n,)}
            expected = sum((sizes[d] for d in x["dims"]), ())
            if tuple(value.shape) != expected and (x["dims"] or value.numel() != 1):
                raise self._error(f"{name} has shape {tuple(value.shape)}, expected {expected}")
            if str(value.dtype)[6:] != kind:
                raise self._error(f"{name} is {str(value.dtype)[6:]}, but exported was {kind}")
        for name, value in zip(names, (a, b, *operands)):
            if isinstance(value, torch.Tensor) and value.device != a.device:
                raise self._error(f"{name} is on {value.device}, {names[0]} on {a.device}")
        return m, n, k, form

    def _choose(
        self,
        form: Mapping[str, Any],
        objects: Mapping[str, object],
        shape: tuple[int, int, int],
        block_size: Optional[int],
    ) -> dict[str, Any]:
        """Choose a shape's tile by the table: measured, or predicted near it."""
        table = self._choices[form["choice"]]
        found = table["exact"].get("x".join(map(str, shape)))
        if found is None:
            at = 0
            for size, axis in zip(shape, table["axes"]):
                near = min(range(len(axis)), key=lambda i: abs(math.log2(size / axis[i])))
                at = at * len(axis) + near
            found = table["near"][at]
        for i in (*table["orders"][found], *range(len(self._tiles))):
            tile = self._tiles[i]
            parts = tile["split_k"]  # a part without a K tile of its own never returns
            suits = tile["code"] in objects and (parts == 1 or shape[2] >= 256 * parts)
            if suits and block_size in (None, tile["block"]):
                return tile
        raise self._error(f"no tile was exported for block_size {block_size} at {shape}")

    def _resolved(
        self,
        values: Sequence[Any],
        shape: tuple[int, int, int],
        form: Mapping[str, Any],
        block_size: Optional[int],
    ) -> CallPlan:
        """Resolve a call, and later ones with such arguments."""
        if max(shape) >> 31:
            raise self._error(f"M, N, K = {', '.join(map(str, shape))}, expected each below 2**31")
        device = values[self._places[0]].device
        arch = self._arch(form, device)
        numbers = [values[i] for x, i in zip(self._operands, self._places[2:]) if not x["dims"]]
        in_memory = any([isinstance(x, torch.Tensor) for x in numbers])
        objects = form["objects"][arch]["memory" if in_memory else "number"]
        tile = self._choose(form, objects, shape, block_size)
        found = objects[tile["code"]]
        launch = self._store.function(found["file"])

        def fold(x: Mapping[str, Any]) -> Fold:
            """Make what folds an output's partials."""
            of, rows = x["reduction"], x["reduction"]["over_rows"]
            (down, across), extent = buffer(x, shape, tile), shape[0] if rows else shape[1]
            layout = ((across, down), (1, across)) if rows else ((down, across), (across, 1))
            block = tile["tile_m"] if rows else tile["tile_n"]
            weight = block / extent if of["mean"] else 1.0
            return folding(self._store, arch, of["combine"], weight, layout, device)

        raw = block_size is not None
        folds = [
            (i, None if raw else fold(x))
            for i, x in enumerate(self._outputs)
            if x["reduction"] and (not raw or x["reduction"]["over_rows"])
        ]
        chosen = Chosen(form["outputs"], tile, found["order"], launch, folds)
        return planned(self._about, chosen, self._inputs_of(values), shape)

    def _arch(self, form: Mapping[str, Any], device: torch.device) -> str:
        """Name the architecture of a device.

        Raises:
            KernelError: no object was exported for it.
        """
        known = ", ".join(form["objects"])
        if device.type != "cuda":
            raise self._error(f"tensors are on {device}, expected a GPU of {known}")
        found = torch.cuda.get_device_capability(device)
        arch = _CAPABILITIES.get(found, "")
        if arch not in form["objects"]:
            name = torch.cuda.get_device_name(device)
            raise self._error(
                f"{name} has compute capability {found[0]}.{found[1]}, but exported was {known}"
            )
        if arch not in self._store.ran:
            message = f"{self._name}: what was exported for {arch} compiles, and was never run"
            warnings.warn(message, stacklevel=2)
        return arch
