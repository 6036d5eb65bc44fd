"""A step of a plan as Python: a function of tensors, one call a line, as people write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coda_agent.fuse.trace import Value, plain

_INFIX = {
    "add": "+", "iadd": "+", "radd": "+", "mul": "*", "rmul": "*", "multiply": "*", "sub": "-",
    "rsub": "-", "div": "/", "truediv": "/", "rtruediv": "/", "matmul": "@", "rmatmul": "@",
    "gt": ">", "lt": "<", "ge": ">=", "le": "<=",
}  # fmt: skip


def spelled(
    name: str,
    inputs: Mapping[Value, str],
    members: Sequence[Value],
    outputs: Sequence[Value],
    element: Value,
) -> str:
    """The text of a module with a function `name`.

    Args:
        name: The function's.
        inputs: Its arguments, with their names.
        members: What it computes, in order; a line each, from the fifth on.
        outputs: What it returns, in order.
        element: The argument whose type is the one left open.

    Raises:
        ValueError: an argument of a call that cannot be written down.
    """
    names = {**inputs, **{v: v.name for v in members}}
    spelling = _Spelling(names, list(inputs), element)
    lines = ["import torch", "import torch.nn.functional as F", "", ""]
    lines[3:] = [f"def {name}({', '.join(inputs.values())}):"]
    lines += [f"    {names[v]} = {spelling.call(v)}" for v in members]
    lines.append(f"    return {', '.join(names[v] for v in outputs)}")
    return "\n".join(lines) + "\n"


FIRST_LINE = 5
"""The line of the first member in a spelled text."""


def written(value: Value) -> str:
    """One call, for people."""
    names: dict[Value, str] = {v: v.name for v in value.inputs}
    try:
        return _Spelling(names, [], value).call(value)
    except ValueError:
        return f"{value.called}({', '.join(v.name for v in value.inputs)})"


class _Spelling:
    def __init__(self, names: Mapping[Value, str], inputs: Sequence[Value], element: Value) -> None:
        self.names, self.element = names, element
        # Where a symbol's extent is found.
        self.extents: dict[Any, str] = {}
        for value in inputs:
            for i, extent in enumerate(value.meta.shape):
                if not isinstance(extent, int):
                    self.extents.setdefault(str(extent.node.expr), f"{names[value]}.shape[{i}]")

    def call(self, v: Value) -> str:
        import torch
        from torch.overrides import resolve_name

        if v.called == "getitem":
            index = v.args[1] if isinstance(v.args[1], tuple) else (v.args[1],)
            return f"{self.argument(v.args[0])}[{', '.join(map(self.index, index))}]"
        args = [self.argument(x) for x in self.split(v)]
        keywords = [f"{k}={self.argument(x)}" for k, x in v.kwargs.items() if x is not None]
        if v.called in _INFIX and len(args) == 2 and not keywords:
            left, right = args[::-1] if v.called[0] == "r" else args
            return f"{left} {_INFIX[v.called]} {right}"
        if v.called == "neg" and len(args) == 1:
            return f"-{args[0]}"
        path = str(resolve_name(v.func) or "") if v.func is not None else ""
        if path.endswith(".__get__"):
            return f"{args[0]}.{v.called}"
        if path.startswith("torch.Tensor."):
            return f"{args[0]}.{path.rpartition('.')[2]}({', '.join(args[1:] + keywords)})"
        place, _, name = path.rpartition(".")
        if place == "torch.nn.functional":
            return f"F.{name}({', '.join(args + keywords)})"
        if place.startswith("torch") and getattr(torch, v.called, None) is not None:
            return f"torch.{v.called}({', '.join(args + keywords)})"
        if place.startswith("torch"):
            return f"{path}({', '.join(args + keywords)})"
        raise ValueError(f"{v.called} is no function of torch")

    def split(self, v: Value) -> tuple[Any, ...]:
        """A call's arguments. The width of heads that a view splits columns into is a number, by
        which a kernel groups them, wherever it was taken from."""
        if v.called not in ("view", "reshape", "unflatten") or not v.inputs:
            return v.args
        first, *sizes = v.args
        listed = isinstance(sizes[-1], tuple | list)
        *leading, last = sizes[-1] if listed else sizes
        if v.called != "unflatten" and len(leading) < first.meta.ndim:
            return v.args
        given = *leading, plain(last)
        return (first, *sizes[:-1], given) if listed else (first, *given)

    def index(self, x: Any) -> str:
        if isinstance(x, slice):
            parts = ["" if p is None else self.argument(p) for p in (x.start, x.stop, x.step)]
            return ":".join(parts[:2] if not parts[2] else parts)
        return "..." if x is Ellipsis else self.argument(x)

    def argument(self, x: Any) -> str:
        import torch

        match x:
            case Value():
                return self.names[x]
            case torch.SymInt() | torch.SymFloat():
                return self.size(x)
            case torch.dtype():
                same = x == self.element.meta.dtype and self.element in self.names
                return f"{self.names[self.element]}.dtype" if same else str(x)
            case torch.device():
                return repr(str(x))
            case tuple() | list():
                inner = ", ".join(map(self.argument, x))
                comma = "," * (isinstance(x, tuple) and len(x) == 1)
                return f"({inner}{comma})" if isinstance(x, tuple) else f"[{inner}]"
            case None | bool() | int() | float() | str():
                return repr(x) if x not in (float("inf"), float("-inf")) else f"float('{x}')"
        raise ValueError(f"{type(x).__name__} cannot be written down")

    def size(self, x: Any) -> str:
        """A size as a formula of the arguments' extents; as a number where they do not tell."""
        expression = x.node.expr
        free = {str(s): self.extents.get(str(s)) for s in expression.free_symbols}
        if str(expression) in self.extents:
            return self.extents[str(expression)]
        if not all(free.values()) or not hasattr(x.node, "hint"):
            return repr(plain(x))
        text = str(expression)
        for symbol, place in sorted(free.items(), key=lambda item: -len(item[0])):
            text = text.replace(symbol, str(place))
        return f"({text})" if " " in text or "*" in text or "/" in text else text
