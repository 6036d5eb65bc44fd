"""What a proof of a module holds for: its parts, and the values that its code reads.

`Fingerprint.difference` is asked at each call of a replaced forward. It compares some hundred
entries of dictionaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from coda_agent.layers.fit import foreign_hooks, named

_PLAIN = int, float, bool, str, type(None)
_ABSENT = object()
_GLOBAL_HOOKS = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)


class Fingerprint:
    """Some modules as they were when a proof was made.

    Args:
        parts: The modules, by their names from `owner`; "" is `owner` itself, around whose forward
            hooks may lie, and whose class FSDP may have derived.
        weights: Parameters that kernels read, by name, with the module that has each.
        sharded: Whether FSDP's hooks may be on parts.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        weights: Mapping[str, tuple[Any, str]],
        *,
        sharded: bool = False,
    ) -> None:
        self.sharded = sharded
        self.modules = [(name, m) for name, m in parts.items() if isinstance(m, nn.Module)]
        self.children = [
            (parts[owner]._modules, leaf, m, name)
            for name, m in self.modules
            if name
            for owner, _, leaf in (name.rpartition("."),)
        ]
        self.hooks = [
            (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks, name)
            for name, m in self.modules
            if name
        ]
        self.classes = [(m, type(m), name) for name, m in self.modules if name]
        self.values = [entry for name, m in self.modules for entry in _values(name, m)]
        self.weights = [
            (m._parameters, leaf, name, m._parameters[leaf].shape)
            for name, (m, leaf) in weights.items()
        ]

    def difference(self, x: Tensor) -> str:
        """Say what is another than it was, or what kernels do not take of a call; "" if nothing.

        Args:
            x: What the modules are called with, whose type and device the weights must have.
        """
        return self.alteration() or unusual(x.device.type) or self.misplacement(x)

    def alteration(self) -> str:
        """Say which module, hook or value is another than it was; "" if none is."""
        for modules, leaf, module, name in self.children:
            if modules.get(leaf) is not module:
                return f"{name} is {named(modules.get(leaf))} now"
        for module, kind, name in self.classes:
            if type(module) is not kind:
                return f"{name} is {named(module)} now"
        for *hooks, name in self.hooks:
            if any(hooks):
                module = dict(self.modules)[name]
                if hook := next(foreign_hooks(module, fsdp_hooks=self.sharded), None):
                    return f"{name} has a hook ({hook})"
        if any(_GLOBAL_HOOKS):
            return "a hook of all modules is registered"
        for entries, key, value, name in self.values:
            if (now := entries.get(key, _ABSENT)) is not value and now != value:
                return f"{name}{key} has changed"
        return ""

    def misplacement(self, x: Tensor) -> str:
        """Say which weight has another shape than it had, or is not as x is; "" if none."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return f"it is called with a {named(x)}"
        dtype, device = x.dtype, x.device
        for parameters, leaf, name, shape in self.weights:
            weight = parameters.get(leaf)
            if weight is None or weight.dtype is not dtype or weight.device != device:
                return _misplaced(name, weight, x)
            if weight.shape != shape:
                return f"{name} is {tuple(weight.shape)} now"
        return ""


def unusual(device: str) -> str:
    """Say what about a call on such a device kernels do not take; "" if they take it."""
    if torch.is_autocast_enabled(device):
        return "autocast is on; cast the model instead, as by model.to(torch.bfloat16)"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it is differentiated in forward mode"
    return ""


def _misplaced(name: str, weight: Tensor | None, x: Tensor) -> str:
    if weight is None or weight.is_meta:
        return f"{name} is offloaded"
    if weight.device != x.device:
        return f"{name} is on {weight.device} and its input on {x.device}"
    return f"{name} is {weight.dtype} and its input {x.dtype}"


def _values(name: str, module: Any) -> Iterator[tuple[dict[str, Any], str, Any, str]]:
    """Yield what the code of a module's class reads of plain values: where, by which key, the value
    and the owner's name. Values of its config are among them."""
    entries, place = vars(module), f"{name}." if name else ""
    names = read_names(type(module))
    for key in names & entries.keys():
        if key != "training" and isinstance(entries[key], _PLAIN):
            yield entries, key, entries[key], place
    if name:
        yield entries, "forward", entries.get("forward", _ABSENT), place
    config = entries.get("config") if "config" in names else None
    for key in names & getattr(config, "__dict__", {}).keys():
        if isinstance(vars(config)[key], _PLAIN):
            yield vars(config), key, vars(config)[key], "config."


@cache
def read_names(kind: type) -> frozenset[str]:
    """Return the names that a module's forward reads, and methods and properties that it calls."""
    names, pending = set[str](), ["forward"]
    while pending:
        attribute = inspect.getattr_static(kind, pending.pop(), None)
        getter = attribute.fget if isinstance(attribute, property) else attribute
        function = inspect.unwrap(getter) if callable(getter) else None
        if isinstance(function, FunctionType) and not function.__module__.startswith("torch."):
            new = _code_names(function.__code__) - names
            names |= new
            pending += new
    return frozenset(names)


def _code_names(code: CodeType) -> set[str]:
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _code_names(constant)
    return names
