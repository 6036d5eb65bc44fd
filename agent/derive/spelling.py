"""A graph as the lines of a PyTorch function, as one would write it by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from coda_agent.agent.authors.composer.expression import REDUCTIONS
from coda_agent.primitives.graph import Graph, Node, Shape
from coda_agent.primitives.groups import ROTATED

_SUM, _PRODUCT, _SIGN, _ATOM = range(4)
_BINARY = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT)}
_COMPARED = {"greater": ">", "greater_equal": ">=", "equal": "=="}
_FUNCTIONS = {
    "absolute": "torch.abs({})",
    "even": "{}[..., 0::2]",
    "odd": "{}[..., 1::2]",
    "interleave": "torch.stack(({}, {}), dim=-1).flatten(-2)",
    "gelu_erf": "F.gelu({})",
    "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "power": "torch.pow({}, {})",
    "rint": "torch.round({})",
    "round_even": "torch.round({})",
    "softplus": "F.softplus({})",
}
"""Where it is not torch's function of the operation's name."""
_NUMBERED = {"maximum": "{}.clamp(min={})", "minimum": "{}.clamp(max={})"}
"""With a number, which torch's function of the name does not take."""
_REDUCED = {r.kind: f"{r.aten}(dim={-1 if r.left == 'M' else 0})" for r in REDUCTIONS.values()}
_LONG = 48


def function(
    name: str, graph: Graph, leaves: Mapping[str, Shape], kinds: Mapping[str, type],
    arguments: Sequence[str], like: str, columns: str, product: str = "", dtype: str = "",
    types: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """A PyTorch function that computes `graph`.

    Args:
        name: Of the function.
        graph: What it computes.
        leaves: Its operands and how each varies over the tile.
        kinds: What each output is.
        arguments: Of the function.
        like: An argument with the rows of the tile, and of its type.
        columns: How many columns the tile has.
        product: The accumulator; empty where there is none.
        dtype: What tiles are stored as; the type of `like` where empty.
        types: What single outputs are stored as instead.
    """
    lines = [f"acc = {product}"] if product else [f"dtype = {like}.dtype"]
    for leaf, shape in leaves.items():
        if shape not in (Shape.SCALAR, Shape.INDEX):
            lines.append(f"{leaf} = {leaf}.float()" + "[:, None]" * (shape is Shape.COL))
    spelled = _Spelling(graph, {*arguments, "acc", "dtype"}, (like, columns))
    dtype = dtype or (f"{like}.dtype" if product else "dtype")
    lines += [*spelled.lines, "return {"]
    for output, kind in kinds.items():
        text = spelled.stored(
            graph.outputs[output], kind.__name__, (types or {}).get(output, dtype)
        )
        lines.append(f'    "{output}": {text},')
    text = "\n".join([*lines, "}"])
    uses = {
        "import torch": "torch.",
        "import torch.nn.functional as F": "F.",
        "from coda_agent.primitives.placed import philox": "philox(",
    }
    head = [line for line, word in uses.items() if word in text]
    head += ["", ""] if head else []
    body = textwrap.indent(text, "    ")
    return "\n".join([*head, f"def {name}({', '.join(arguments)}):", body]) + "\n"


class _Spelling:
    """The values of a graph, as text.

    Args:
        graph: Pruned, so that what is used once is known.
        taken: Names that no value may get.
        like: A tensor with the tile's rows, and how many columns the tile has.
    """

    def __init__(self, graph: Graph, taken: set[str], like: tuple[str, str]) -> None:
        self.graph, self.like = graph, like
        self.lines: list[str] = []
        uses = [a for n in graph.nodes for a in n.args] + [*graph.outputs.values()]
        names = (f"{x}{i or ''}" for i in range(len(graph.nodes) + 1) for x in "xyuvwt")
        free = (name for name in names if name not in taken)
        self.texts: list[tuple[str, int]] = []
        for i, node in enumerate(graph.nodes):
            text, level = self._spelled(node)
            if level < _ATOM or "(" in text:
                if (uses.count(i) > 1 or len(text) > _LONG) and node.args:
                    name = next(free)
                    self.lines.append(f"{name} = {text}")
                    text, level = name, _ATOM
            self.texts.append((text, level))

    def stored(self, root: int, kind: str, dtype: str) -> str:
        """What an output holds."""
        if kind == "RowGather":
            x, index = (self._at_least(a, _ATOM) for a in self.graph.nodes[root].args)
            return f"{x}.gather(1, {index}[:, None]).squeeze(1)"
        how = _REDUCED.get(kind, f"to({dtype})")
        return f"{self._at_least(root, _ATOM)}.{how}"

    def _at_least(self, i: int, level: int) -> str:
        text, own = self.texts[i]
        return text if own >= level else f"({text})"

    def _spelled(self, node: Node) -> tuple[str, int]:
        name, width = [*node.op.split(" "), ""][:2]
        args, plain = node.args, [self.texts[a][0] for a in node.args]
        if name in ("acc", "operand"):
            return node.name or "acc", _ATOM
        if name == "const":
            text = repr(node.value).replace("inf", "torch.inf")
            return text, _ATOM if node.value >= 0 else _SIGN
        if name == "neg":
            return f"-{self._at_least(args[0], _SIGN)}", _SIGN
        if name in _BINARY:
            sign, level = _BINARY[name]
            right = self._at_least(args[1], level + (name != "add"))
            return f"{self._at_least(args[0], level)} {sign} {right}", level
        if name == "fma":
            x, y = (self._at_least(a, _PRODUCT) for a in args[:2])
            return f"{x} * {y} + {self._at_least(args[2], _SUM)}", _SUM
        if name == "step":
            return f"({plain[0]} > 0).float()", _ATOM
        if name in _COMPARED:
            return f"({self._compared(node)}).float()", _ATOM
        if name == "where":
            condition = self.graph.nodes[args[0]]
            said = self._compared(condition) if condition.op in _COMPARED else f"{plain[0]} != 0"
            return f"torch.where({said}, {plain[1]}, {plain[2]})", _ATOM
        numbers = [i for i, a in enumerate(args) if self.graph.nodes[a].op == "const"]
        if name in _NUMBERED and numbers:
            value = self._at_least(args[1 - numbers[0]], _ATOM)
            return _NUMBERED[name].format(value, plain[numbers[0]]), _ATOM
        if name == "interleave" and numbers:
            other = plain[1 - numbers[0]]
            plain[numbers[0]] = f"torch.zeros_like({other}) + {plain[numbers[0]]}"
        if name == "copysign" and numbers == [0]:
            return f"{plain[0]} * torch.copysign(torch.ones_like({plain[1]}), {plain[1]})", _PRODUCT
        first, second = self.like
        if name == "row_index":
            return f"torch.arange({first}.shape[0], device={first}.device)[:, None]", _ATOM
        if name == "column_index":
            return f"torch.arange({second}, device={first}.device)", _ATOM
        if name == "philox_uniform":
            given = f"{plain[1]}, {plain[2]}, {first}.shape[0], {second}, {first}.device"
            return f"philox({given})", _ATOM
        if name == "group_sum":
            groups = f"{self._at_least(args[0], _ATOM)}.unflatten(-1, (-1, {width}))"
            return f"{groups}.sum(-1).repeat_interleave({width}, -1)", _ATOM
        if name == ROTATED:
            half = int(width) // 2
            groups = f"{self._at_least(args[0], _ATOM)}.unflatten(-1, (-1, {width}))"
            return (
                f"torch.cat((-{groups}[..., {half}:], {groups}[..., :{half}]), -1).flatten(-2)",
                _ATOM,
            )
        if name in ("even", "odd"):
            plain = [self._at_least(args[0], _ATOM)]
        return _FUNCTIONS.get(name, f"torch.{name}({', '.join(plain)})").format(*plain), _ATOM

    def _compared(self, node: Node) -> str:
        x, y = (self._at_least(a, _SUM) for a in node.args)
        return f"{x} {_COMPARED[node.op]} {y}"
