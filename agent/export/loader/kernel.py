"""Exported kernels as functions and torch operators."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

from coda_agent.agent.export.loader.store import KernelError, Store
from coda_agent.agent.export.loader.variant import Variant
from coda_agent.runtime.call_cache import filled, traced

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def load(folder: Path) -> dict[str, Kernel]:
    """Load a variant's kernels by name; operators are in `torch.ops.<id>`.

    Raises:
        KernelError: a file is missing or changed, or torch is too old.
    """
    known = [
        hasattr(torch.Tensor, f"__{x}__")
        for x in ("dlpack_c_exchange_api", "c_dlpack_exchange_api")
    ]
    if not any(known):
        raise KernelError(
            f"torch {torch.__version__} is too old: its tensors have no DLPack exchange API, "
            "which those of 2.10 have"
        )
    store = Store(folder)
    store.check_modules()
    about = json.loads(store.read("kernels.json"))
    store.ran, store.folds = about["ran"], about["folds"]
    store.library = library = torch.library.Library(store.id, "FRAGMENT")
    kernels = {x["name"]: Kernel(x, store) for x in about["kernels"]}
    defined = getattr(torch.ops, store.id)
    for name, kernel in kernels.items():
        # The same export may have been loaded from another place: its operators are these.
        if not (hasattr(defined, name) or hasattr(defined, f"{name}_")):
            kernel.register(library)
    return kernels


class Kernel:
    """A function of tensors, which torch.compile traces and CUDA graphs capture.

    Its docstring says what it computes. Inputs are given in order or by name, static parameters by
    name. `block_size` None gives final reductions; an integer their raw float32 partials over
    blocks of so many columns, or rows.
    """

    def __init__(self, about: Mapping[str, Any], store: Store) -> None:
        self.__name__ = name = about["name"]
        self.__doc__ = about["doc"]
        self._id = store.id
        self._inputs: tuple[str, ...] = tuple(about["inputs"])
        self._count = len(self._inputs)
        self._parameters: dict[str, list[str]] = about["parameters"]
        self._scalars: tuple[int, ...] = tuple(about["scalars"])
        self.variants = {
            tuple(x["key"]): Variant(name, self._inputs, about, x, store) for x in about["variants"]
        }

    def __call__(self, *args: Any, block_size: Optional[int] = None, **inputs: Any) -> Any:
        key = tuple([self._chosen(p, inputs) for p in self._parameters]) if self._parameters else ()
        values = args if not inputs and len(args) == self._count else self._named(args, inputs)
        variant, tracing = self.variants[key], traced()
        call = None if tracing else variant.calls.find(values, block_size)
        results = (
            variant.run(call, values) if call else self._anew(key, values, block_size, tracing)
        )
        if not variant.updated:
            return results
        others = (
            list(results) if isinstance(results, tuple) else [] if results is None else [results]
        )
        for place, i in variant.shown:
            others.insert(place, values[i])
        return tuple(others) if len(others) > 1 else others[0]

    def _anew(
        self, key: tuple[str, ...], given: Sequence[Any], block_size: Optional[int], tracing: bool
    ) -> Any:
        """Do a call of a new signature; by the operator, where traced."""
        values, variant = list(given), self.variants[key]
        for i, value in enumerate(values):
            number = i in self._scalars and isinstance(value, (int, float))
            if not number and not isinstance(value, torch.Tensor):
                got = type(value).__name__
                raise KernelError(
                    f"{self.__name__}: input {self._inputs[i]!r} is {got}, expected a tensor"
                )
        device = next(x.device for i, x in enumerate(values) if i not in self._scalars)
        in_memory = filled(values, self._scalars, device)
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if not tracing and all(type(x) in _PLAIN and not x.is_neg() for x in tensors):
            return variant(values, block_size)
        variant.refuse_gradients(values)  # what is compiled would leave them out
        op = getattr(getattr(torch.ops, self._id), self.__name__ + "_" * bool(variant.updated))
        static: dict[str, object] = dict(zip(self._parameters, key))
        if block_size is not None:
            static["block_size"] = block_size
        return (op.Tensor if in_memory else op.default)(*values, **static)

    def _chosen(self, parameter: str, inputs: dict[str, Any]) -> str:
        known = self._parameters[parameter]
        if (value := inputs.pop(parameter, known[0])) not in known:
            raise KernelError(
                f"{self.__name__}: {parameter} is {value!r}, expected one of {', '.join(known)}"
            )
        return value

    def _named(self, args: tuple[object, ...], inputs: Mapping[str, object]) -> list[Any]:
        names = self._inputs
        rest = names[len(args) :]
        if len(args) > len(names) or set(inputs) != set(rest):
            given = ", ".join([*names[: len(args)], *inputs])
            raise KernelError(f"{self.__name__} takes {', '.join(names)}, given were {given}")
        return [*args, *(inputs[x] for x in rest)]

    def register(self, library: torch.library.Library) -> None:
        """Register the operators: `<name>`, and `<name>_` of variants that overwrite an input."""
        for suffix in ("", "_"):
            some = {k: v for k, v in self.variants.items() if bool(v.updated) == bool(suffix)}
            for overload in ("", ".Tensor") if some and self._scalars else ("",) if some else ():
                self._define(library, self.__name__ + suffix, overload, some)

    def _define(
        self, library: torch.library.Library, name: str, overload: str, variants: dict[Any, Variant]
    ) -> None:
        first = next(iter(variants.values()))
        types = ["Tensor"] * len(self._inputs)
        for i in self._scalars:
            types[i] = "Tensor" if overload else "float"
        for _, i in first.updated:
            types[i] = "Tensor(a!)"
        arguments = ", ".join(f"{kind} {x}" for kind, x in zip(types, self._inputs))
        defaults = dict(zip(self._parameters, next(iter(variants))))
        keywords = ", ".join(
            [*(f'str {p}="{x}"' for p, x in defaults.items()), "int? block_size=None"]
        )
        results = ", ".join(["Tensor"] * len(first.returned))

        def body(
            call: Callable[..., Any], *args: Any, block_size: Optional[int] = None, **static: str
        ) -> Any:
            variant = variants[tuple([static.get(p, x) for p, x in defaults.items()])]
            return call(variant, args, block_size)

        schema = f"{name}{overload}({arguments}, *, {keywords}) -> ({results})"
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name + overload, partial(body, Variant.__call__), "CUDA")
        fake = partial(body, Variant.fake)
        torch.library.register_fake(f"{self._id}::{name}{overload}", fake, lib=library)
