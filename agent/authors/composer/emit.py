"""From canonical expressions to source, as one would write it by hand.

- A value gets a name where it is used more than once, or where a line would grow long.
- The same expressions always give the same bytes.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping

from coda_agent import primitives
from coda_agent.agent.authors.composer.expression import (
    REDUCTIONS,
    Expr,
    joins_columns,
    negative,
    uses,
    walk,
)
from coda_agent.agent.authors.composer.problem import Rewritten
from coda_agent.primitives.errors import ProgramError, TextError
from coda_agent.primitives.operation import PLACED
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec

_GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu", "sigmoid": "glu"}
_TEMPORARIES = ("x", "y", "z", "u", "v", "w", *(f"t{i}" for i in range(100)))
_SUM, _PRODUCT, _SIGN, _ATOM = range(4)
_LONG = 64
# float32's largest number, whose own digits are above the largest that a program may hold.
_LARGEST = 3.4028234663852886e38


def emit(spec: Spec, programs: list[Rewritten]) -> str:
    """Write a candidate's text with these programs, in this order."""
    doc = f"{spec.name}: {_plain(spec.summary)}"
    more = "\n\nComposed from the PyTorch reference of the spec.\n"
    return module_text(doc, spec.gemm, programs, more)


def program_of(rewritten: Rewritten) -> Program:
    """Read canonical expressions as they are written.

    Raises:
        ProgramError: the language has no such program.
    """
    try:
        return read_programs(module_text("", ("A", "B"), [rewritten]))[rewritten.name]
    except TextError as error:  # nobody sees the text
        first = error.faults[0]
        raise ProgramError(first.message.partition(": `")[0], hint=first.hint) from None


def module_text(doc: str, gemm: tuple[str, ...], programs: list[Rewritten], more: str = "") -> str:
    """Write a module of programs; `more` goes on with its doc."""
    functions = [_Function(program, gemm) for program in programs]
    used = {"epilogue"}.union(*(f.imports for f in functions))
    names = sorted(used.intersection(primitives.__all__))  # a draft has holes among them
    operands = dict.fromkeys(name for program in programs for name in program.operands)
    for name in operands:
        if name in ("acc", *names):
            raise ProgramError(
                f"input {name!r} has a name that the program needs", hint="rename it"
            )
    line = f"from coda_agent.primitives import {', '.join(names)}"
    if len(line) > 100:
        line = "from coda_agent.primitives import (\n" + "".join(f"    {n},\n" for n in names) + ")"
    head = textwrap.fill(doc, 96, break_on_hyphens=False)
    opening = f'"""{head}{more}"""'
    return "\n\n\n".join([f"{opening}\n\n{line}", *(f.text for f in functions)]) + "\n"


def _listed(opening: str, items: list[str], closing: str) -> str:
    """Items in one line, or one a line where that is long."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= 100:
        return line
    indent = " " * (len(opening) - len(opening.lstrip()))
    return "\n".join([opening, *(f"{indent}    {item}," for item in items), indent + closing])


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


class _Function:
    """One program as text."""

    def __init__(self, program: Rewritten, gemm: tuple[str, ...]) -> None:
        self.program, self.gemm = program, gemm
        self.values = dict(program.values)
        # A reduction is its argument, declared as reduced.
        self.stored = {k: e.args[0] if e.reduction else e for k, e in self.values.items()}
        self.uses = uses(list(self.stored.values()))
        self.imports: set[str] = {*program.operands.values(), *program.outputs.values()}
        self.taken = {*program.operands, "acc", *primitives.__all__}
        self.names: dict[Expr, str] = {}
        self.statements: list[str] = []
        self.sugar = _gates(list(self.stored.values()), self.uses)
        self.text = self._text()

    def _text(self) -> str:
        items = []
        for name, value in self.stored.items():
            self._name_shared(value)
            items.append(f'"{name}": {self._render(value)[0]}')
        returned = _listed("    return {", items, "}")
        outputs = ", ".join(f"{n}={k}" for n, k in self.program.outputs.items())
        operands = ["acc", *(f"{n}: {k}" for n, k in self.program.operands.items())]
        body = "".join(f"    {s}\n" for s in self.statements)
        signature = _listed(f"def {self.program.name}(", operands, "):")
        return f"@epilogue({outputs})\n{signature}\n{self._doc()}{body}{returned}"

    def _doc(self) -> str:
        text = _Mathematics(self).text()
        if len(text) <= 88 and "\n" not in text:
            return f'    """{text}"""\n'
        lines = "\n".join(
            textwrap.fill(part, 96, initial_indent="    ", subsequent_indent="      ")
            for part in text.split("\n")
        )
        return f'    """{lines.strip()}\n    """\n'

    def _name_shared(self, root: Expr) -> None:
        for expr in walk([root]):
            if expr in self.names or not expr.args or expr in self.sugar.values():
                continue
            if expr.op in ("even", "odd"):
                self._pairs(expr.args[0])
            elif self.uses[expr] > 1:
                self._assign(expr)

    def _assign(self, expr: Expr) -> str:
        output = next((n for n, e in self.stored.items() if e == expr), "")
        wanted = [output.lower()] if output and not self.values[output].reduction else []
        name = next(n for n in (*wanted, *_TEMPORARIES) if n not in self.taken)
        text = f"{name} = {self._render(expr, root=True)[0]}"
        if len(text) > 96 and expr.op in ("add", "mul"):
            sign = "+" if expr.op == "add" else "*"
            first, *rest = [self._joined(expr.op, (arg,)) for arg in expr.args]
            lines = [first, *(f"- {p[1:]}" if p[0] == "-" else f"{sign} {p}" for p in rest)]
            text = f"{name} = (\n" + "".join(f"        {line}\n" for line in lines) + "    )"
        self.statements.append(text)
        self._take(expr, name)
        return name

    def _take(self, expr: Expr, name: str) -> None:
        self.taken.add(name)
        self.names[expr] = name

    def _pairs(self, whole: Expr) -> None:
        text = self._render(whole, root=True)[0]
        halves = [e for e in walk(list(self.stored.values())) if e.args == (whole,)]
        by_side = {e.op: e for e in halves if e.op in ("even", "odd")}
        gates = [e for e in walk(list(self.stored.values())) if e.op in _GATES]
        gating = next((e for e in walk(gates) if e in by_side.values()), None)
        base = self.names.get(whole, whole.name) or "pair"
        for first, second in (("gate", "up"), ("even", "odd"), (f"{base}_even", f"{base}_odd")):
            if {first, second} & self.taken or (first == "gate" and gating is None):
                continue
            break
        else:
            first, second = [n for n in _TEMPORARIES if n not in self.taken][:2]
        if gating is not None and gating.op == "odd" and first == "gate":
            first, second = second, first
        shown: list[str] = []
        for side, name in (("even", first), ("odd", second)):
            if side in by_side:
                self._take(by_side[side], name)
            shown.append(name if side in by_side else "_")
        self.imports.add("pairs")
        self.statements.append(f"{', '.join(shown)} = pairs({text})")

    def _render(self, expr: Expr, root: bool = False) -> tuple[str, int]:
        """Text of `expr` and how tightly it binds, long parts named."""
        if expr in self.names:
            return self.names[expr], _ATOM
        text, binding = self._spelled(expr)
        if not root and len(text) > _LONG and expr.args:
            return self._assign(expr), _ATOM
        return text, binding

    def _spelled(self, expr: Expr) -> tuple[str, int]:
        match expr.op:
            case "acc" | "operand" | "index":
                return expr.name, _ATOM
            case "const":
                if math.isinf(expr.value):
                    self.imports.add("log")
                return _number(expr.value), _ATOM if expr.value >= 0 else _SIGN
            case "add":
                return self._joined("add", expr.args), _SUM
            case "mul" if expr in self.sugar:
                gate = self.sugar[expr]
                other = next(a for a in expr.args if a != gate)
                return self._call(_GATES[gate.op], (gate.args[0], other)), _ATOM
            case "mul":
                return self._joined("mul", expr.args), _PRODUCT
            case "div":
                x, y = expr.args
                return f"{self._within(x, _PRODUCT)} / {self._within(y, _SIGN)}", _PRODUCT
            case "neg":
                return f"-{self._within(expr.args[0], _SIGN)}", _SIGN
            case op if joins_columns(expr):
                self.imports.add(op)
                return f"{op}({self._render(expr.args[0])[0]}, {int(expr.value)})", _ATOM
            case op if op in PLACED:
                self.imports.add(op)
                given = ["acc", *(self._render(a)[0] for a in expr.args)]
                return f"{op}({', '.join(given)})", _ATOM
            case "hole":
                return self._call(expr.name, expr.args), _ATOM
            case op if op.startswith("d_"):
                self.imports |= {"derivative", op[2:]}
                return f"derivative({op[2:]}, {self._render(expr.args[0])[0]})", _ATOM
            case op if op in primitives.__all__:
                return self._call(op, expr.args), _ATOM
            case op:
                raise ProgramError(
                    f"{self.program.name}: {op!r} has no counterpart among the primitives",
                    hint="write it with other operations",
                )

    def _call(self, name: str, args: Iterable[Expr]) -> str:
        self.imports.add(name)
        return f"{name}({', '.join(self._render(a)[0] for a in args)})"

    def _within(self, expr: Expr, least: int) -> str:
        text, binding = self._render(expr)
        return text if binding >= least else f"({text})"

    def _joined(self, op: str, args: tuple[Expr, ...]) -> str:
        """A product or a sum, whose negative terms take their signs along."""
        if op == "mul":
            return " * ".join(self._within(a, _PRODUCT + (i > 0)) for i, a in enumerate(args))
        text = ""
        for term in args:
            if term.op == "neg" and term not in self.names:
                part = f"-{self._within(term.args[0], _PRODUCT)}"
            else:
                part = self._within(term, _SUM if term.op == "acc" else _PRODUCT)
            if not text:
                text = part
            elif negative(term) and part.startswith("-"):
                text += f" - {part[1:]}"
            else:
                text += f" + {part}"
        return text


class _Mathematics(_Function):
    """The same program as formulas, for its docstring."""

    def __init__(self, function: _Function) -> None:
        self.program, self.values, self.gemm = function.program, function.values, function.gemm
        self.stored, self.sugar, self.uses = function.stored, {}, function.uses
        self.imports, self.taken, self.names, self.statements = set(), set(), {}, []
        self.body = function.names
        self.halves = {e: n for e, n in function.names.items() if e.op in ("even", "odd")}

    def _spelled_size(self) -> int:
        """Operations in the formulas if nothing but column pairs had a name."""
        size: dict[Expr, int] = {}
        for expr in walk(list(self.stored.values())):
            size[expr] = 1 if expr in self.halves else 1 + sum(size[a] for a in expr.args)
        return max(size.values())

    def text(self) -> str:
        lines: list[str] = []
        shown: set[str] = set()
        self.names = dict(self.halves)
        if self._spelled_size() > _LONG:
            # Written out, shared values would grow without bound: use the body's names for them.
            results = set(self.stored.values())
            self.names = {e: n for e, n in self.body.items() if e not in results} | self.names
        for name, value in self.stored.items():
            kind = self.values[name].op if self.values[name].reduction else ""
            fresh = {self.halves[e] for e in walk([value]) if e in self.halves} - shown
            formula = self._render(value)[0].replace(" * ", " · ")
            if kind:
                formula = f"{REDUCTIONS[kind].words} of {formula}"
            sign = "+=" if self.program.outputs[name] == "AddTile" else "="
            lines.append("; ".join([f"{name} {sign} {formula}", *self._pairs_of(value, fresh)]))
            shown |= fresh
            if not kind and value.op != "operand":
                self.names[value] = name
        text = "; ".join(lines)
        return text if len(text) <= 88 else "\n".join(lines)

    def _pairs_of(self, value: Expr, fresh: set[str]) -> list[str]:
        wholes = dict.fromkeys(e.args[0] for e in walk([value]) if self.halves.get(e) in fresh)
        parts: list[str] = []
        for whole in wholes:
            names = {e.op: n for e, n in self.halves.items() if e.args[0] == whole}
            listed = ", ".join(names[s] for s in ("even", "odd") if s in names)
            both = "even and odd" if len(names) == 2 else next(iter(names))
            parts.append(
                f"{listed} = {both} columns of {self._render(whole)[0]}".replace(" * ", " · ")
            )
        return parts

    def _render(self, expr: Expr, root: bool = False) -> tuple[str, int]:
        return (self.names[expr], _ATOM) if expr in self.names else self._spelled(expr)

    def _spelled(self, expr: Expr) -> tuple[str, int]:
        if expr.op == "acc":
            return f"{self.gemm[0]} {self.gemm[1]}ᵀ", _SUM
        if expr.op == "mul" and len(expr.args) == 2 and expr.args[0] == expr.args[1]:
            return f"{self._within(expr.args[0], _ATOM)}²", _SIGN
        if expr.op.startswith("d_"):
            return f"{expr.op[2:]}′({self._render(expr.args[0])[0]})", _ATOM
        return super()._spelled(expr)


def _number(value: float) -> str:
    """Write a constant as a program's text has it; its literals are finite.

    Raises:
        ProgramError: it is not a number.
    """
    if math.isnan(value):
        message = f"a program cannot hold the constant {value}"
        raise ProgramError(message, hint="compute it from finite numbers, or give it as an input")
    if math.isinf(value):
        return "-log(0.0)" if value > 0 else "log(0.0)"
    return repr(math.copysign(3.4028234e38, value) if abs(value) == _LARGEST else value)


def _gates(roots: list[Expr], count: Mapping[Expr, int]) -> dict[Expr, Expr]:
    """Products that are a gated unit, with the factor that gates."""
    found: dict[Expr, Expr] = {}
    for expr in walk(roots):
        if expr.op == "mul" and len(expr.args) == 2:
            for gate in expr.args:
                halved = {e.op for e in walk([gate])} & {"even", "odd"}
                if gate.op in _GATES and count[gate] == 1 and halved and expr not in found:
                    found[expr] = gate
    return found
