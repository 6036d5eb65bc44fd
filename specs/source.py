"""A user's function as a spec's reference block: read, never run.

What it needs of its module comes along: imports of torch and of Python's own, helper functions,
constants. What cannot, such as a value of an outer function, is refused by name and line.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs.names import (
    OWN,
    PLACED,
    REACHING,
    alias_name,
    bound_names,
    free_names,
    functions_in,
    import_lines,
    is_harmless,
)

_DTYPES = {"Float32": "float32", "Int": "int64", "Int32": "int32", "Int64": "int64"}
_Axes = tuple[int | str, ...]


@dataclass(frozen=True)
class Argument:
    """One argument: whether it has a default, and what its annotation says.

    Attributes:
        axes: Extents and letters, as of `Float[Tensor, "M K"]`; () of a float; else None.
        dtype: An element type, or "" where none is named.
    """

    name: str
    line: int
    default: bool
    axes: _Axes | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Example:
    """An example of an input.

    Attributes:
        axes: Sizes, or letters of dims; () for a number.
        dtype: Its element type; "T" for the one that a spec leaves open.
    """

    axes: _Axes
    dtype: str = "T"


@dataclass(frozen=True)
class Source:
    """A function as a reference block.

    Attributes:
        where: What messages call the place it is from.
        block: The text, in which it is called `reference`.
        lines: For each line of the block the line it comes from, or 0.
        returned: Names of what it returns, where it returns names.
    """

    name: str
    where: str
    block: str
    lines: tuple[int, ...]
    arguments: tuple[Argument, ...]
    returned: tuple[str, ...]
    summary: str


def located(target: str) -> tuple[Path, str]:
    """Locate the file and function of `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    No package is imported on the way, so nothing of the user's runs.

    Raises:
        SpecError: no such file or module.
    """
    place, colon, function = target.rpartition(":")
    if not colon or not place or not function:
        raise SpecError(
            f"{target!r} names no function",
            hint="expected MODULE:FUNCTION, FILE.py:FUNCTION, or - to read the function from stdin",
        )
    if place.endswith(".py") or "/" in place:
        if not (path := Path(place)).is_file():
            beside = [other.name for other in path.parent.glob("*.py")]
            raise SpecError(f"no file at {path}", hint=near_matches(path.name, beside))
        return path, function
    folders: Sequence[str] | None = [str(Path.cwd()), *filter(None, sys.path)]
    found, name = None, ""
    for part in place.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = importlib.machinery.PathFinder.find_spec(name, folders)
        if found is None:
            break
        folders = found.submodule_search_locations or []
    if found is None or not found.origin or not found.origin.endswith(".py"):
        hint = "run it where `import` finds it, or give FILE.py:FUNCTION"
        raise SpecError(f"no module {place!r} with Python source", hint=hint)
    return Path(found.origin), function


def extracted(text: str, where: str, function: str | None = None) -> Source:
    """Extract the function called `function`, or the last one.

    Args:
        text: Python; indented as a whole, or between Markdown fences, too.

    Raises:
        SpecError: no Python, no such function, or one that does not stand alone.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    if pasted := re.search(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        text = pasted[1]
    try:
        tree = ast.parse(text := textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
        raise SpecError(f"{where} is no Python: {said}") from None
    return _Module(text, tree, where).source(function)


def with_tensors(source: Source, names: Sequence[str]) -> Source:
    """Make these arguments, which are numbers, tensors without dims first."""
    node = functions_in(source.block)["reference"]
    first = node.body[ast.get_docstring(node) is not None :][0]
    lines = [*zip(source.block.splitlines(), source.lines, strict=True)]
    made = [(f"{' ' * first.col_offset}{x} = torch.as_tensor({x})", 0) for x in names]
    lines[first.lineno - 1 : first.lineno - 1] = made
    if "import torch" not in [line for line, _ in lines]:
        at = 2 * (lines[0][0] == "from __future__ import annotations")
        lines[at:at] = [("import torch", 0), ("", 0), ("", 0)]
    block = "".join(f"{line}\n" for line, _ in lines)
    return replace(source, block=block, lines=tuple(number for _, number in lines))


class _Module:
    def __init__(self, text: str, tree: ast.Module, where: str) -> None:
        self.text, self.tree, self.where = text.splitlines(), tree, where
        self.bound: dict[str, list[ast.stmt]] = {}
        for node in tree.body:
            for name in bound_names(node):
                self.bound.setdefault(name, []).append(node)

    def fault(self, node: ast.AST, message: str, hint: str) -> SpecError:
        return SpecError(f"{self.where}:{getattr(node, 'lineno', 0)}: {message}", hint=hint)

    def source(self, function: str | None) -> Source:
        node = self._function(function)
        arguments = tuple(self._arguments(node))
        needed: dict[str, list[ast.stmt]] = {}
        self._need(node, needed, (node.name,))
        statements = {id(s): s for found in needed.values() for s in found}
        imports = [s for s in statements.values() if isinstance(s, ast.Import | ast.ImportFrom)]
        lines: list[tuple[str, int]] = []
        if any(isinstance(n, ast.arg) and n.annotation for n in ast.walk(node)) or node.returns:
            lines.append(("from __future__ import annotations", 0))
        for place in (False, True):  # Python's own before torch
            texts = {
                (line, s.lineno)
                for s in imports
                for line, ours in import_lines(s, needed)
                if ours == place
            }
            lines += [("", 0)] * bool(lines and texts) + sorted(texts)
        others = [s for s in self.tree.body if id(s) in statements and s not in imports]
        last: ast.stmt | None = None
        for statement in others:  # in the module's order, in which constants may hold functions
            functions = isinstance(statement, ast.FunctionDef) or isinstance(last, ast.FunctionDef)
            gap = 2 if functions else last is None
            lines += [("", 0)] * gap * bool(lines) + self._text(statement)
            last = statement
        own = self._text(node)
        named = re.compile(rf"(\s*def\s+){re.escape(node.name)}\b")
        at = next(i for i, (line, _) in enumerate(own) if named.match(line))
        own[at] = (named.sub(r"\1reference", own[at][0], count=1), own[at][1])
        lines += [("", 0)] * 2 * bool(lines) + own
        for line, number in lines:
            if line.lstrip().startswith("```"):
                raise SpecError(
                    f"{self.where}:{number}: ``` ends a block of Markdown; leave it out"
                )
        doc = (ast.get_docstring(node) or "").strip()
        return Source(
            name=node.name,
            where=self.where,
            block="".join(f"{line}\n" for line, _ in lines),
            lines=tuple(number for _, number in lines),
            arguments=arguments,
            returned=_returned(node),
            summary=doc.splitlines()[0].strip() if doc else "",
        )

    def _function(self, name: str | None) -> ast.FunctionDef:
        top = [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]
        if name is None:
            if not top:
                raise SpecError(f"{self.where} defines no function", hint="expected `def ...`")
            return top[-1]
        for node in reversed(top):
            if node.name == name:
                return node
        inner = name.rpartition(".")[2]
        for outer in ast.walk(self.tree):
            body = getattr(outer, "body", [])
            for node in body if isinstance(body, list) else []:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == inner:
                    raise self._within(outer, node)
        hint = near_matches(name, [node.name for node in top])
        raise SpecError(f"no function {name!r} in {self.where}", hint=hint)

    def _within(self, outer: ast.AST, node: ast.FunctionDef | ast.AsyncFunctionDef) -> SpecError:
        kind = {ast.ClassDef: "class", ast.FunctionDef: "function"}.get(type(outer))
        if isinstance(node, ast.AsyncFunctionDef) or kind is None:
            what = (
                "is async" if isinstance(node, ast.AsyncFunctionDef) else "is not at the top level"
            )
        else:
            what = f"is within the {kind} {getattr(outer, 'name', '')}"
        hint = "write it as a plain function whose arguments are all that it takes from there"
        return self.fault(node, f"{node.name} {what}", hint)

    def _arguments(self, node: ast.FunctionDef) -> Iterator[Argument]:
        given = node.args
        if odd := given.vararg or given.kwarg or next(iter(given.posonlyargs), None):
            hint = "expected plain arguments: one for each tensor"
            raise self.fault(node, f"{node.name} takes {odd.arg} by * or /", hint)
        defaults = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
        for argument, default in zip(
            [*given.args, *given.kwonlyargs], [*defaults, *given.kw_defaults], strict=True
        ):
            axes, dtype = _annotated(argument.annotation)
            yield Argument(argument.arg, argument.lineno, default is not None, axes, dtype)

    def _need(
        self, node: ast.stmt, needed: dict[str, list[ast.stmt]], path: tuple[str, ...]
    ) -> None:
        """Add to `needed` what `node` takes from its module, by name."""
        for name in sorted(free_names(node)):
            if name in needed:
                continue
            by = f"{path[-1]} uses {name}"
            if name in path[:1]:
                raise self.fault(node, f"{path[-1]} calls {name} again", "write a loop")
            if name not in self.bound:
                if name in REACHING:
                    hint = "a reference computes with its arguments, and with nothing else"
                    raise self.fault(node, f"{path[-1]} calls {name}", hint)
                if hasattr(builtins, name):
                    continue
                hint = "import it, define it at the top of the file, or pass it as an argument"
                raise self.fault(node, f"{by}, which {self.where} does not define", hint)
            needed[name] = self.bound[name]
            for statement in self.bound[name]:
                self._admit(statement, by, name)
                if not isinstance(statement, ast.Import | ast.ImportFrom):
                    self._need(statement, needed, (*path, name))

    def _admit(self, statement: ast.stmt, by: str, name: str) -> None:
        """Refuse what does not stand alone in a spec."""
        match statement:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases if alias_name(alias) == name]
            case ast.ImportFrom(module=module, level=0):
                modules = [str(module)]
            case ast.ImportFrom():
                modules = [f".{statement.module or ''}"]
            case ast.FunctionDef() | ast.Assign(targets=[ast.Name()]) | ast.AnnAssign():
                if name != "reference":
                    return
                raise self.fault(statement, f"{by}, the name of a spec's own function", "rename it")
            case _:
                what = "a class" if isinstance(statement, ast.ClassDef) else "no plain definition"
                hint = "only imports, functions and constants of a module come along"
                raise self.fault(statement, f"{by}, {what}", hint)
        for module in modules:
            if module.partition(".")[0] not in OWN and module != PLACED:
                message = f"{by}, of {module}; a reference stands on torch alone"
                hint = "put the function into this file, or write it with torch"
                raise self.fault(statement, message, hint)

    def _text(self, node: ast.stmt) -> list[tuple[str, int]]:
        decorators = [d for d in getattr(node, "decorator_list", []) if is_harmless(d)]
        dropped = {n for d in decorators for n in range(d.lineno, (d.end_lineno or d.lineno) + 1)}
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        numbers = [n for n in range(first, (node.end_lineno or first) + 1) if n not in dropped]
        return [(self.text[n - 1].rstrip(), n) for n in numbers]


def _returned(node: ast.FunctionDef) -> tuple[str, ...]:
    last = node.body[-1]
    if not isinstance(last, ast.Return):
        return ()
    values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    names = [value.id for value in values if isinstance(value, ast.Name)]
    return tuple(names) if len(names) == len(values) and len({*names}) == len(names) else ()


def _annotated(node: ast.expr | None) -> tuple[_Axes | None, str]:
    """Read axes and element type off an annotation."""
    match node:
        case ast.Name(id="float"):
            return (), "float32"
        case ast.Constant(value=str(text)):
            return (axes, "") if (axes := axes_of(text)) and not text.isidentifier() else (None, "")
        case ast.Subscript(value=kind, slice=ast.Tuple(elts=[_, *about])):
            said = [n.value for e in about for n in ast.walk(e) if isinstance(n, ast.Constant)]
            axes = [axis for part in said for axis in axes_of(str(part))]
            dtype = _DTYPES.get(ast.unparse(kind).rpartition(".")[2], "")
            return (tuple(axes), dtype) if axes else (None, "")
    return None, ""


def axes_of(text: str) -> _Axes:
    """Read `M K`, `4096,4096` or `4096x4096` as axes; () of anything else."""
    found = [part for part in re.split(r"[\s,]+|(?<=\d)x(?=\d)", text.strip()) if part]
    if not all(re.fullmatch(r"[A-Za-z]\w*|[1-9]\d*", part) for part in found):
        return ()
    return tuple(int(part) if part.isdigit() else part for part in found)
