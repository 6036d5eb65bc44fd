"""Gate 1: is the candidate's text in the candidate language?

A candidate is one Python file: a docstring, imports from `coda_agent.primitives`, and functions
decorated with `@epilogue(...)` whose body is a docstring, assignments and one returned dict. No
loops, branches, attributes, subscripts, comprehensions, definitions inside definitions, dunders
or other names: what is left can only build expressions.
"""

from __future__ import annotations

import ast

from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.suggest import did_you_mean

_EXPRESSIONS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.Constant,
    ast.Name,
    ast.Dict,
    ast.Tuple,
    ast.keyword,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.USub,
    ast.UAdd,
    ast.Load,
    ast.Store,
)
_MAX_NODES = 20_000


def check_source(text: str, expected: list[str]) -> list[Finding]:
    """Findings of the static gate; an empty list admits the text.

    Args:
        text: The candidate's source.
        expected: Names of the programs the spec asks for; others are refused.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        return [Finding(message=f"not Python: {error}", where={"line": line})]
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        return [Finding(message=f"the candidate has over {_MAX_NODES} syntax nodes")]
    findings: list[Finding] = []
    imported: set[str] = set()
    programs: list[str] = []
    for i, statement in enumerate(tree.body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and i == 0:
            continue
        if isinstance(statement, ast.ImportFrom):
            findings += _check_import(statement, imported)
        elif isinstance(statement, ast.FunctionDef):
            programs.append(statement.name)
            findings += _check_function(statement, imported)
        else:
            findings.append(
                _refuse(statement, "only imports and @epilogue functions may stand here")
            )
    for name in expected:
        if programs.count(name) != 1:
            findings.append(
                Finding(
                    message=f"the spec asks for one program named {name!r}, "
                    f"found {programs.count(name)}",
                    hint=did_you_mean(name, programs),
                )
            )
    findings += [
        Finding(message=f"program {p!r} is not asked for by the spec", hint=f"expected: {expected}")
        for p in programs
        if p not in expected
    ]
    return findings


def program_names(text: str) -> list[str]:
    """Names of the functions a text defines, in order; empty where it does not parse."""
    try:
        return [s.name for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return []


def _check_import(statement: ast.ImportFrom, imported: set[str]) -> list[Finding]:
    import coda_agent.primitives as primitives

    if statement.module != "coda_agent.primitives" or statement.level:
        return [_refuse(statement, "only `from coda_agent.primitives import ...` is allowed")]
    findings = []
    for alias in statement.names:
        if alias.name not in primitives.__all__ or alias.name == "Program" or alias.asname:
            hint = did_you_mean(alias.name, primitives.__all__)
            findings.append(
                _refuse(statement, f"{alias.name!r} is not a name of the vocabulary", hint)
            )
        imported.add(alias.name)
    return findings


def _check_function(function: ast.FunctionDef, imported: set[str]) -> list[Finding]:
    findings: list[Finding] = []
    names = imported | {a.arg for a in function.args.args}
    arguments = function.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        findings.append(_refuse(function, "parameters must be plain"))
    if arguments.defaults or function.returns or getattr(function, "type_params", None):
        findings.append(_refuse(function, "no defaults and no return annotation"))
    if len(function.decorator_list) != 1 or not _is_epilogue(function.decorator_list[0]):
        findings.append(
            _refuse(function, "a program is decorated with @epilogue(...) and nothing else")
        )
    else:
        findings += _check_expression(function.decorator_list[0], imported)
    for a in arguments.args:
        if a.annotation is not None:
            findings += _check_expression(a.annotation, imported)
    for i, statement in enumerate(function.body):
        last = i == len(function.body) - 1
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and i == 0:
            continue
        if isinstance(statement, ast.Assign):
            findings += _check_expression(statement.value, names)
            for target in statement.targets:
                findings += _bind(target, names)
        elif isinstance(statement, ast.Return) and last and isinstance(statement.value, ast.Dict):
            findings += _check_expression(statement.value, names)
        else:
            findings.append(
                _refuse(statement, "a program's body is assignments and one final `return {...}`")
            )
    return findings


def _bind(target: ast.expr, names: set[str]) -> list[Finding]:
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    findings = []
    for t in targets:
        if not isinstance(t, ast.Name) or t.id.startswith("__"):
            findings.append(_refuse(t, "only plain names may be assigned"))
        else:
            names.add(t.id)
    return findings


def _check_expression(expression: ast.expr, names: set[str]) -> list[Finding]:
    for node in ast.walk(expression):
        if not isinstance(node, _EXPRESSIONS):
            return [
                _refuse(
                    node if hasattr(node, "lineno") else expression, "not in the candidate language"
                )
            ]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in names:
            return [
                _refuse(node, f"unknown name {node.id!r}", did_you_mean(node.id, sorted(names)))
            ]
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            return [_refuse(node, "only functions of the vocabulary may be called")]
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str)):
            return [_refuse(node, f"constant {node.value!r} is not a number")]
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
            return [_refuse(node, "tuples may only be unpacked into")]
        if isinstance(node, ast.keyword) and node.arg is None:
            return [_refuse(node.value, "** is not in the candidate language")]
    return []


def _is_epilogue(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "epilogue"
    )


def _refuse(node: ast.AST, message: str, hint: str = "") -> Finding:
    code = ast.unparse(node).split("\n")[0][:80]
    return Finding(
        message=f"{message}: `{code}`", where={"line": getattr(node, "lineno", None)}, hint=hint
    )
