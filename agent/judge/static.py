"""Gate 1: is the candidate's text in the candidate language?

A candidate is one Python file: a docstring, imports from `coda_agent.primitives`, and functions
decorated with `@epilogue(...)` whose body is a docstring, assignments and one returned dict. No
loops, branches, attributes, subscripts, comprehensions, definitions inside definitions, dunders
or other names: what is left can only build expressions. Everything is refused but what is listed
here; the text's size and nesting are bounded before Python's parser sees it.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
import unicodedata

from coda_agent import primitives
from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.resources import OPERAND_KINDS, OUTPUT_KINDS
from coda_agent.primitives.suggest import did_you_mean

# The largest known programs have 1,700 characters, 43 tokens a statement, 4 open brackets and 110
# syntax nodes.
MAX_CHARACTERS = 40_000
_MAX_TOKENS = 400  # a statement, which bounds how deep its tree is
_MAX_BRACKETS = 32
_MAX_NODES = 1000  # a program
_MAX_NUMBER = 3.4028234e38  # the largest float32
_COOKIE = re.compile(r"[ \t\f]*#.*?coding[:=]")  # PEP 263
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)


def check_source(text: str, expected: list[str]) -> list[Finding]:
    """Findings of the static gate, each with a line and a hint; an empty list admits the text.

    Args:
        text: The candidate's source.
        expected: Names of the programs the spec asks for; others are refused.
    """
    tree = _parsed(text)
    return [tree] if isinstance(tree, Finding) else _Gate(text).check(tree, expected)


def program_names(text: str) -> list[str]:
    """Names of the functions a text defines, in order; empty where it does not parse."""
    tree = _parsed(text)
    body = [] if isinstance(tree, Finding) else tree.body
    return [s.name for s in body if isinstance(s, ast.FunctionDef)]


def _parsed(text: str) -> ast.Module | Finding:
    """The text's tree, or why there is none.

    CPython 3.11's parser recurses in C, and a small thread's stack ends before its own limit:
    5000 signs in a row are a segmentation fault in 256 KiB.
    """
    if len(text) > MAX_CHARACTERS:
        fault = f"the candidate has {len(text)} characters, at most {MAX_CHARACTERS} are read"
        return _finding(fault, 1, "a program is a few lines; compose what the vocabulary offers")
    text = text.replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        for c in line if not line.isprintable() else "":
            if c != "\t" and unicodedata.category(c)[0] == "C":
                hint = "take out control, invisible and half characters"
                return _finding(f"character U+{ord(c):04X} may not stand here", number, hint)
        if number <= 2 and _COOKIE.match(line):
            # Read from a file, the text would be decoded to another program than is judged here.
            return _finding("an encoding declaration", number, "a candidate is UTF-8; take it out")
    line = 1
    opened: list[tuple[str, int]] = []
    try:
        tokens = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            tokens = 0 if token.type == tokenize.NEWLINE else tokens + 1
            if token.type == tokenize.OP and token.string in "([{":
                opened.append((token.string, line))
            elif token.type == tokenize.OP and token.string in ")]}":
                if not opened:
                    fault = f"not Python: {token.string!r} closes nothing"
                    return _finding(fault, line, "take it out, or open it before")
                opened.pop()
            if tokens > _MAX_TOKENS or len(opened) > _MAX_BRACKETS:
                fault = "this statement is too long or too deep"
                return _finding(fault, line, "give parts of it names")
        return ast.parse(text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, tokenize.TokenError) and opened:
            bracket, line = opened[-1]
            return _finding(f"not Python: {bracket!r} is never closed", line, "close it")
        reason = error.args[0] if error.args else "nested too deeply"
        line = getattr(error, "lineno", None) or line
        return _finding(f"not Python: {reason}", line, "mend this line, or what is open before it")


def _finding(message: str, line: int, hint: str) -> Finding:
    return Finding(message=message, where={"line": line}, hint=hint)


class _Gate:
    """The check of one tree."""

    def __init__(self, text: str) -> None:
        self.text, self.findings = text, list[Finding]()
        self.vocabulary, self.imported = sorted({*primitives.__all__} - {"Program"}), set[str]()
        self.operands = [*OPERAND_KINDS]
        self.outputs = [*OUTPUT_KINDS]

    def check(self, tree: ast.Module, expected: list[str]) -> list[Finding]:
        programs: list[str] = []
        for i, statement in enumerate(tree.body):
            if len(self.findings) > 20:
                break
            match statement:
                case ast.ImportFrom():
                    self.check_import(statement)
                case ast.FunctionDef(name=name):
                    if name in self.imported or name not in expected:
                        hint = f"expected: {', '.join(expected)}"
                        self.refuse(statement, f"program {name!r} is not asked for", hint)
                    programs.append(name)
                    self.check_function(statement)
                case ast.Expr(value=ast.Constant(value=str())) if i == 0:
                    pass
                case _:
                    fault = "only imports and @epilogue functions may stand here"
                    self.refuse(statement, fault, "see any demonstration")
        for name in expected:
            if programs.count(name) != 1:
                fault = f"the spec asks for one program named {name!r}, found "
                hint = did_you_mean(name, programs) or f"write it: def {name}(acc, ...)"
                self.findings.append(_finding(f"{fault}{programs.count(name)}", 1, hint))
        return self.findings[:20]

    def check_import(self, statement: ast.ImportFrom) -> None:
        if statement.module != "coda_agent.primitives" or statement.level:
            fault = "only `from coda_agent.primitives import ...` is allowed"
            self.refuse(statement, fault, "the vocabulary is all a program needs")
            return
        for alias in statement.names:
            if alias.name not in self.vocabulary or alias.asname:
                hint = did_you_mean(alias.name, self.vocabulary) or "import it under its own name"
                self.refuse(statement, f"{alias.name!r} is not a name of the vocabulary", hint)
            self.imported.add(alias.name)

    def check_function(self, function: ast.FunctionDef) -> None:
        arguments, names = function.args, {a.arg for a in function.args.args}
        if sum(1 for _ in ast.walk(function)) > _MAX_NODES:
            fault = f"the program has over {_MAX_NODES} syntax nodes"
            self.refuse(function, fault, "compose what the vocabulary offers")
            return
        others = (
            arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg
        )
        if others or arguments.defaults or function.returns:
            fault = "parameters are plain, without defaults, and no type is returned"
            self.refuse(function, fault, "numbers stand in the body, outputs in the decorator")
        self.check_decorator(function)
        for a in arguments.args:
            self.check_name(a, a.arg, self.imported)
            if a.annotation is not None:
                self.check_kind(a.annotation, self.operands)
        for i, statement in enumerate(function.body):
            last = statement is function.body[-1]
            match statement:
                case ast.Assign(targets=targets, value=value) if not last:
                    self.check_value(value, names)
                    for target in targets:
                        self.bind(target, names)
                case ast.Return(value=ast.Dict() as returned) if last:
                    self.check_outputs(returned, names)
                case ast.Expr(value=ast.Constant(value=str())) if i == 0 and not last:
                    pass
                case _:
                    fault = "a program's body is assignments and one final `return {...}`"
                    self.refuse(statement, fault, "see any demonstration")

    def check_decorator(self, function: ast.FunctionDef) -> None:
        match function.decorator_list if "epilogue" in self.imported else []:
            case [ast.Call(func=ast.Name(id="epilogue"), args=[], keywords=kinds)]:
                for kind in kinds:
                    self.check_name(kind, kind.arg or "__", set())
                    self.check_kind(kind.value, self.outputs)
            case _:
                fault = "a program is decorated with @epilogue(...) and nothing else"
                self.refuse(function, fault, "import epilogue; @epilogue(D=Tile)")

    def check_kind(self, node: ast.expr, kinds: list[str]) -> None:
        if not isinstance(node, ast.Name) or node.id not in {*kinds} & self.imported:
            hint = f"one of {', '.join(kinds)}, imported"
            self.refuse(node, "operands and outputs are declared by their kind", hint)

    def check_outputs(self, returned: ast.Dict, names: set[str]) -> None:
        keys = [k.value if isinstance(k, ast.Constant) else None for k in returned.keys]
        if not all(isinstance(k, str) for k in keys) or len({*keys}) != len(keys):
            hint = 'return {"D": d, "s": d * d}'
            self.refuse(returned, "outputs are returned by their names, each once", hint)
        for value in returned.values:
            self.check_value(value, names)

    def check_value(self, expression: ast.expr, names: set[str]) -> None:
        """Refuse the first part of an expression that is not of the language."""
        pending: list[ast.expr] = [expression]
        functions = self.imported - {*self.operands, *self.outputs, "epilogue"}
        while pending:
            node = pending.pop()
            fault, hint = "not in the candidate language", "use + - * / and the vocabulary"
            match node:
                case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
                    pending += [right, left]
                    continue
                case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _OPERATORS):
                    pending.append(operand)
                    continue
                case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                    if abs(number) <= _MAX_NUMBER:
                        continue
                    fault, hint = "constant is beyond float32", f"at most {_MAX_NUMBER} in size"
                case ast.Constant():
                    fault, hint = "constant is not a number", "a constant is an int or a float"
                case ast.Name(id=name) if name in names:
                    continue
                case ast.Name(id=name):
                    imported = name in self.imported
                    fault = f"{name!r} is not a value" if imported else f"unknown name {name!r}"
                    hint = did_you_mean(name, sorted(names)) or "assign it first"
                case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                    if name in functions and all(k.arg for k in keywords):
                        # What is differentiated is the one function that is handed on.
                        of = args[0] if name == "derivative" and args else None
                        given = int(isinstance(of, ast.Name) and of.id in functions)
                        if name == "ptx":  # its two texts are checked where they are read
                            texts = [
                                isinstance(a, ast.Constant) and type(a.value) is str for a in args
                            ]
                            given = 2
                            if texts[:2] != [True, True]:
                                fault = "ptx() takes two texts first, its meaning and its code"
                                hint = 'ptx("log1p", "...", x): read_primitive ptx lists both'
                                self.refuse(node, fault, hint)
                                return
                        pending += [*args[given:], *(k.value for k in keywords)]
                        continue
                    fault = "only functions of the vocabulary may be called, without **"
                    if name not in names | self.imported:
                        fault = f"unknown name {name!r}"
                        hint = did_you_mean(name, self.vocabulary) or hint
                case ast.Call(func=ast.Attribute(attr=name)) if name in self.vocabulary:
                    fault, hint = "a value has no methods", f"write {name}(...)"
                case ast.Call():
                    fault = "only functions of the vocabulary may be called"
                case ast.Starred(value=ast.Call(func=ast.Name(id=name))):
                    fault, hint = (
                        "* does not unpack here",
                        f"write u, v = {name}(...)",
                    )
                case ast.Tuple():
                    fault, hint = "tuples may only be unpacked into", "gate, up = pairs(acc)"
                case ast.BinOp(op=ast.Pow()):
                    hint = "write x * x, or power(x, y)"
                case ast.Compare():
                    hint = "greater(x, y), greater_equal and equal give 1 or 0"
                case ast.IfExp():
                    hint = "write where(condition, x, y)"
                case _:
                    pass
            self.refuse(node, fault, hint)
            return

    def bind(self, target: ast.expr, names: set[str]) -> None:
        for t in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(t, ast.Name):
                # A parameter's name is the spec's; an assigned one is free to be another.
                self.check_name(t, t.id, self.imported | ({*dir(builtins)} - names))
                names.add(t.id)
            else:
                self.refuse(t, "only plain names may be assigned", "d = acc * r")

    def check_name(self, node: ast.AST, name: str, taken: set[str]) -> None:
        if name in taken or "__" in name:
            self.refuse(node, f"the name {name!r} is not free", "take another, without __")

    def refuse(self, node: ast.AST, message: str, hint: str) -> None:
        code = (ast.get_source_segment(self.text, node) or "").split("\n")[0][:80]
        self.findings.append(_finding(f"{message}: `{code}`", getattr(node, "lineno", 1), hint))
