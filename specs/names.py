"""Names in a module's text: bound, taken of each other, and reached."""

from __future__ import annotations

import ast
import symtable
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

OWN = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math",
        "numbers", "operator", "torch", "typing"}  # fmt: skip
"""Modules that a reference may import."""
PLACED = "coda_agent.primitives.placed"
"""Where the numbers are that a kernel draws by a counter."""
REACHING = frozenset(
    "__import__ breakpoint compile eval exec globals input locals open vars".split()  # noqa: SIM905
)


def reached(text: str) -> tuple[int, str] | None:
    """Find the line where a reference goes beyond its imports, and how."""
    tree, known = ast.parse(text), dict[str, object]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        one = node.module or "." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            module = one or (alias.name if alias.asname else alias.name.partition(".")[0])
            if module.partition(".")[0] not in OWN and module != PLACED:
                return node.lineno, f"imports {module}"
            found = sys.modules.get(module)
            known[alias_name(alias)] = getattr(found, alias.name, None) if one else found
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in REACHING:
            return node.lineno, f"calls {node.id}"
        module = _module(node, known)
        if module is not None and module.__name__.partition(".")[0] not in OWN:
            return getattr(node, "lineno", 0), f"reaches {module.__name__}"
    return None


def _module(node: ast.AST, known: Mapping[str, object]) -> ModuleType | None:
    """Find the module that an expression names, as `torch.os`."""
    match node:
        case ast.Name(id=name):
            found = known.get(name)
        case ast.Attribute(value=value, attr=name):
            found = getattr(_module(value, known), name, None)
        case _:
            return None
    return found if isinstance(found, ModuleType) else None


def functions_in(text: str) -> dict[str, ast.FunctionDef]:
    """Find a module's functions by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def alias_name(alias: ast.alias) -> str:
    """Get the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def bound_names(node: ast.stmt) -> Iterator[str]:
    """List the names that a statement of a module binds."""
    match node:
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from map(alias_name, aliases)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case _:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
                elif isinstance(inner, ast.Import | ast.ImportFrom) and inner is not node:
                    yield from map(alias_name, inner.names)


def import_lines(
    statement: ast.Import | ast.ImportFrom, needed: dict[str, list[ast.stmt]]
) -> Iterator[tuple[str, bool]]:
    """Give one line for each needed name, and whether it is torch's."""
    for alias in statement.names:
        if alias_name(alias) in needed:
            named = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            if isinstance(statement, ast.Import):
                yield f"import {named}", alias.name.partition(".")[0] == "torch"
            else:
                module = str(statement.module)
                yield f"from {module} import {named}", module.partition(".")[0] == "torch"


def free_names(node: ast.stmt) -> set[str]:
    """Find the names that a definition takes from its module, annotations aside."""
    bare = ast.parse(ast.unparse(node))
    for inner in ast.walk(bare):
        if isinstance(inner, ast.arg):
            inner.annotation = None
        elif isinstance(inner, ast.FunctionDef):
            inner.returns = None
            inner.decorator_list = [d for d in inner.decorator_list if not is_harmless(d)]
        elif isinstance(inner, ast.AnnAssign):
            inner.annotation = ast.Constant(0)
    bare.body = [
        ast.Expr(n.value) if isinstance(n, ast.Assign | ast.AnnAssign) and n.value else n
        for n in bare.body
    ]
    pending = [symtable.symtable(ast.unparse(ast.fix_missing_locations(bare)), "", "exec")]
    found = set[str]()
    while pending:
        table = pending.pop()
        top = table.get_type() == "module"
        found |= {
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and (top or s.is_global()) and not (top and s.is_assigned())
        }
        pending += table.get_children()
    return found


def is_harmless(decorator: ast.expr) -> bool:
    """Tell whether a decorator changes only how a function runs."""
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(call) in (
        "torch.compile", "torch.jit.script", "torch.no_grad", "torch.inference_mode",
        "torch.compiler.disable", "staticmethod",
    )  # fmt: skip
