"""Programs from their text, by its syntax tree; none is run.

A candidate is one Python file: a docstring, imports from `coda_agent.primitives`, and functions
decorated with `@epilogue(...)` whose body is a docstring, assignments and one returned dict. No
loops, branches, attributes, subscripts, comprehensions, definitions inside definitions, dunders
or other names: what is left can only build expressions. Everything is refused but what is listed
here; the text's size and nesting are bounded before Python's parser sees it.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from coda_agent import primitives
from coda_agent.primitives.errors import Fault, ProgramError, TextError
from coda_agent.primitives.program import Program, begin, finish
from coda_agent.primitives.resources import OPERAND_KINDS, OUTPUT_KINDS
from coda_agent.primitives.suggest import did_you_mean
from coda_agent.primitives.syntax import parse

_MAX_NODES = 1000  # a program; the largest known one has 110
_MAX_NUMBER = 3.4028234663852886e38  # the largest float32
_MAX_FAULTS = 20
_OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_REFUSED = object()
"""The value of an expression that was refused, and of all that is computed from it."""


def read_programs(text: str, expected: Sequence[str] | None = None) -> dict[str, Program]:
    """Evaluate a text's programs.

    Args:
        text: The whole file.
        expected: Names of the programs it has to have, and no others; by default any.

    Returns:
        The programs by name, in the order of `expected`, or of the text.

    Raises:
        TextError: it is not in the language, or a program breaks its rules; has every fault.
    """
    reader = _Reader(text)
    programs = reader.read(parse(text), expected)
    if reader.faults:
        raise TextError.of(reader.faults[:_MAX_FAULTS])
    return {name: programs[name] for name in expected or programs}


class _Refusal(Exception):
    """The first part of an expression that cannot stand there."""

    def __init__(self, node: ast.AST, message: str, hint: str) -> None:
        self.node, self.message, self.hint = node, message, hint


class _Reader:
    """The walk over one tree, which collects faults."""

    def __init__(self, text: str) -> None:
        self.text, self.faults, self.names = text, list[Fault](), _Names()

    def read(self, tree: ast.Module, expected: Sequence[str] | None) -> dict[str, Program]:
        names, programs = list[str](), dict[str, Program]()
        for i, statement in enumerate(tree.body):
            if len(self.faults) > _MAX_FAULTS:
                break
            match statement:
                case ast.ImportFrom():
                    self.read_import(statement)
                case ast.FunctionDef(name=name):
                    asked = expected is None or name in expected
                    if name in self.names.imported or not asked:
                        hint = f"expected: {', '.join(expected or ['a name of your own'])}"
                        self.refuse(statement, f"program {name!r} is not asked for", hint)
                    names.append(name)
                    if program := self.read_function(statement):
                        programs[name] = program
                case ast.Expr(value=ast.Constant(value=str())) if i == 0:
                    pass
                case _:
                    message = "only imports and @epilogue functions may stand here"
                    self.refuse(statement, message, "see any demonstration, up to its line END")
        for name in dict.fromkeys(names) if expected is None else expected:
            if names.count(name) != 1:
                message = f"the spec asks for one program named {name!r}, found {names.count(name)}"
                hint = did_you_mean(name, names) or f"write it: def {name}(acc, ...)"
                self.faults.append(Fault(message, 1, hint))
        return programs

    def read_import(self, statement: ast.ImportFrom) -> None:
        if statement.module != "coda_agent.primitives" or statement.level:
            message = "only `from coda_agent.primitives import ...` is allowed"
            self.refuse(statement, message, "the vocabulary is all a program needs")
            return
        for name, other in ((alias.name, alias.asname) for alias in statement.names):
            self.names.imported.add(name)
            if name not in self.names.vocabulary or other:
                hint = did_you_mean(name, self.names.vocabulary) or "import it under its own name"
                self.refuse(statement, f"{name!r} is not a name of the vocabulary", hint)
                self.names.functions[name] = _REFUSED
            elif name not in {**OPERAND_KINDS, **OUTPUT_KINDS, "epilogue": None}:
                self.names.functions[name] = getattr(primitives, name)

    def read_function(self, function: ast.FunctionDef) -> Program | None:
        before, program = len(self.faults), None
        if sum(1 for _ in ast.walk(function)) > _MAX_NODES:
            message = f"the program has over {_MAX_NODES} syntax nodes"
            self.refuse(function, message, "compose what the vocabulary offers")
            return None
        operands, outputs = self.read_parameters(function), self.read_decorator(function)
        self.names.values = dict.fromkeys([a.arg for a in function.args.args], _REFUSED)
        if len(self.faults) == before:
            doc = ast.get_docstring(function) or ""
            try:
                program, self.names.values = begin(function.name, doc, operands, outputs)
            except ProgramError as error:
                self.refuse(function, error.message, error.hint)
        result = self.read_body(function)
        values = *self.names.values.values(), *result.values()
        if program is None or len(self.faults) > before or any(v is _REFUSED for v in values):
            return None
        try:
            return finish(program, result)
        except ProgramError as error:
            self.refuse(function, error.message, error.hint)
        return None

    def read_parameters(self, function: ast.FunctionDef) -> dict[str, type | None]:
        """Read the kinds of the parameters; None of one that has none."""
        arguments, kinds = function.args, dict[str, type | None]()
        others = (
            arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg
        )
        if (
            others or arguments.defaults or function.returns
            or getattr(function, "type_params", None)
        ):  # fmt: skip
            message = "parameters are plain, without defaults, and no type is returned"
            self.refuse(function, message, "numbers stand in the body, outputs in the decorator")
        for a in arguments.args:
            self.check_name(a, a.arg, self.names.imported | kinds.keys())
            kinds[a.arg] = a.annotation and self.read_kind(a.annotation, OPERAND_KINDS)
        return kinds

    def read_decorator(self, function: ast.FunctionDef) -> dict[str, type | None]:
        kinds = dict[str, type | None]()
        match function.decorator_list if "epilogue" in self.names.imported else []:
            case [ast.Call(func=ast.Name(id="epilogue"), args=[], keywords=keywords)]:
                for keyword in keywords:
                    name = keyword.arg or "__"
                    self.check_name(keyword, name, kinds)
                    kinds[name] = self.read_kind(keyword.value, OUTPUT_KINDS)
            case _:
                message = "a program is decorated with @epilogue(...) and nothing else"
                self.refuse(function, message, "import epilogue; @epilogue(D=Tile)")
        return kinds

    def read_kind(self, node: ast.expr, kinds: Mapping[str, type]) -> type | None:
        if isinstance(node, ast.Name) and node.id in kinds and node.id in self.names.imported:
            return kinds[node.id]
        hint = f"one of {', '.join(kinds)}, imported"
        self.refuse(node, "operands and outputs are declared by their kind", hint)
        return None

    def read_body(self, function: ast.FunctionDef) -> dict[object, object]:
        """Evaluate the statements; what they return, by output."""
        for i, statement in enumerate(function.body):
            last = statement is function.body[-1]
            match statement:
                case ast.Assign(targets=targets, value=value) if not last:
                    result = self.evaluated(value)
                    for target in targets:
                        self.bind(target, result)
                case ast.Return(value=ast.Dict() as returned) if last:
                    keys = [k.value if isinstance(k, ast.Constant) else None for k in returned.keys]
                    if not all(isinstance(k, str) for k in keys) or len({*keys}) != len(keys):
                        hint = 'return {"D": d, "s": d * d}'
                        message = "outputs are returned by their names, each once"
                        self.refuse(returned, message, hint)
                    return dict(zip(keys, map(self.evaluated, returned.values), strict=True))
                case ast.Expr(value=ast.Constant(value=str())) if i == 0 and not last:
                    pass
                case _:
                    message = "a program's body is assignments and one final `return {...}`"
                    self.refuse(statement, message, "see any demonstration, up to its line END")
        return {}

    def bind(self, target: ast.expr, result: object) -> None:
        names, results = [target], [result]
        if isinstance(target, ast.Tuple):
            names, results = target.elts, [_REFUSED] * len(target.elts)
            if isinstance(result, tuple) and len(result) == len(names):
                results = [*result]
            elif result is not _REFUSED:
                count = len(result) if isinstance(result, tuple) else 1
                message = f"{len(names)} names for {count} value{'s' * (count > 1)}"
                self.refuse(target, message, "gate, up = pairs(acc)")
        for name, value in zip(names, results, strict=True):
            if isinstance(name, ast.Name):
                # A parameter's name is the spec's; an assigned one is free to be another.
                free = self.names.imported | ({*dir(builtins)} - self.names.values.keys())
                self.check_name(name, name.id, free)
                self.names.values[name.id] = value
            else:
                self.refuse(name, "only plain names may be assigned", "d = acc * r")

    def evaluated(self, expression: ast.expr) -> object:
        """Evaluate an expression, or refuse the first foreign part of it."""
        try:
            return self.names.value(expression)
        except _Refusal as refusal:
            self.refuse(refusal.node, refusal.message, refusal.hint)
            return _REFUSED

    def check_name(self, node: ast.AST, name: str, taken: Collection[str]) -> None:
        if name in taken or "__" in name:
            self.refuse(node, f"the name {name!r} is not free", "take another, without __")

    def refuse(self, node: ast.AST, message: str, hint: str) -> None:
        code = (ast.get_source_segment(self.text, node) or "").split("\n")[0][:80]
        self.faults.append(Fault(f"{message}: `{code}`", getattr(node, "lineno", 1), hint))


class _Names:
    """What a text's names mean, and expressions of them."""

    def __init__(self) -> None:
        self.vocabulary = sorted({*primitives.__all__} - {"Program"})
        self.imported, self.functions = set[str](), dict[str, Any]()
        self.values = dict[str, Any]()

    def value(self, node: ast.expr) -> object:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _applied(node, _OPERATORS[type(op)], [self.value(left), self.value(right)])
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _applied(node, _OPERATORS[type(op)], [self.value(operand)])
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return _bounded(node, number)
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if (
                name in self.functions and all(k.arg for k in keywords)
            ):
                if len({k.arg for k in keywords}) < len(keywords):
                    raise _Refusal(node, "an argument is given twice", "give it once")
                taken = self.taken(node, name, args)
                taken += [self.value(a) for a in args[len(taken) :]]
                named = {str(k.arg): self.value(k.value) for k in keywords}
                return _applied(node, self.functions[name], taken, named)
        raise self.refusal(node)

    def taken(self, node: ast.Call, name: str, args: list[ast.expr]) -> list[object]:
        """Give a call's first arguments that are a function, or texts."""
        match name, args:
            case "derivative", [ast.Name(id=function), *_] if function in self.functions:
                return [self.functions[function]]
            case "ptx", [ast.Constant(value=str(meaning)), ast.Constant(value=str(code)), *_]:
                return [meaning, code]  # they are checked where they are read
            case "ptx", _:
                message = "ptx() takes two texts first, its meaning and its code"
                hint = 'ptx("log1p", "...", x): read_primitive ptx lists both'
                raise _Refusal(node, message, hint)
        return []

    def refusal(self, node: ast.expr) -> _Refusal:
        """Say why an expression is foreign, and what to write instead."""
        message, hint = "not in the candidate language", "use + - * / and the vocabulary"
        match node:
            case ast.Constant():
                message, hint = "constant is not a number", "a constant is an int or a float"
            case ast.Name(id=name):
                imported = name in self.imported
                message = f"{name!r} is not a value" if imported else f"unknown name {name!r}"
                hint = did_you_mean(name, sorted(self.values)) or "assign it first"
            case ast.Call(func=ast.Name(id=name)):
                message = "only functions of the vocabulary may be called, without **"
                if name not in self.values.keys() | self.imported:
                    message = f"unknown name {name!r}"
                    hint = did_you_mean(name, self.vocabulary) or hint
            case ast.Call(func=ast.Attribute(attr=name)) if name in self.vocabulary:
                message, hint = "a value has no methods", f"write {name}(...)"
            case ast.Call():
                message = "only functions of the vocabulary may be called"
            case ast.Starred(value=ast.Call(func=ast.Name(id=name))):
                message, hint = "* does not unpack here", f"write u, v = {name}(...)"
            case ast.Tuple():
                message, hint = "tuples may only be unpacked into", "gate, up = pairs(acc)"
            case ast.BinOp(op=ast.Pow()):
                hint = "write x * x, or power(x, y)"
            case ast.Compare():
                hint = "greater(x, y), greater_equal and equal give 1 or 0"
            case ast.IfExp():
                hint = "write where(condition, x, y)"
            case _:
                pass
        return _Refusal(node, message, hint)


def _applied(
    node: ast.expr,
    function: Callable[..., object],
    args: list[object],
    named: dict[str, object] | None = None,
) -> object:
    """Call an operator or a function of the vocabulary, or refuse to."""
    named = named or {}
    given = [*args, *named.values()]
    if any(a is _REFUSED for a in (function, *given)):
        return _REFUSED
    if several := next((a for a in given if isinstance(a, tuple)), None):
        message = f"{len(several)} values stand where one is taken"
        raise _Refusal(node, message, "take them apart: u, v = pairs(acc)")
    try:
        return _bounded(node, function(*args, **named))
    except ProgramError as error:
        raise _Refusal(node, error.message, error.hint) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        hint = "use + - * / and the vocabulary"
        if isinstance(node, ast.Call):
            names = inspect.signature(function).parameters
            hint = f"{function.__name__}({', '.join(names)})"
        raise _Refusal(node, str(error), hint) from None


def _bounded(node: ast.expr, value: Any) -> object:
    """Refuse a literal beyond float32, and whole numbers that grow without end."""
    if isinstance(value, int) or isinstance(node, ast.Constant):
        if not abs(value) <= _MAX_NUMBER:
            hint = f"at most {_MAX_NUMBER} in size; minus infinity is log(0.0)"
            raise _Refusal(node, "constant is beyond float32", hint)
    return value
