"""What a verdict is given by, in versions that change only with the meaning of the rules.

A rule is what some modules decide. `rules.lock.json` holds the version of each and a digest of its
meaning. The digest is of syntax trees, from which all is taken that decides nothing: comments,
layout, docstrings, annotations of functions, unused imports, and what is said to people. That is
text in calls that report (`Finding`, errors, progress), and in the judge's own modules any text in
which a lower-case word follows another: what they compare or look up is one word.

A verdict names, for each gate, the versions it was given by. They alone decide whether it stands;
`provenance.judge_digest`, of the bytes of all sources, says only where it came from.

Where the sources say other than the lock, `tests/agent/test_rules.py` fails, and verdicts name a
version that no lock holds. Two commands bring the lock up to date:

    coda-agent rules raise GATE --why "..."    the meaning changed: verdicts have to be given again
    coda-agent rules same GATE --why "..."     it is worded otherwise and means the same
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import user_cache, write_whole

ROOT = Path(__file__).parents[2]
LOCK = Path(__file__).with_name("rules.lock.json")


class Rule(NamedTuple):
    """What decides one question: modules, relative to the package, and other rules it rests on."""

    modules: tuple[str, ...]
    needs: tuple[str, ...] = ()


def _in(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names.split())


_COMPILED = ("walk", "language", "lowering")
RULES = {
    # Which gates run, in which order and on what, and the level that shows.
    "walk": Rule(_in("agent/judge", "__init__")),
    # What a spec and a program say, and what they mean in torch.
    "language": Rule(
        _in(
            "primitives",
            "__init__ activations auxiliary derivatives elementary gather graph groups interpret "
            "kinds operation ops pairwise placed program ptx ptx_run reductions resources rotary "
            "rounding tables",
        )
        + _in("specs", "__init__ canonical defaults faults format layout load reference")
    ),
    # How a program becomes a kernel, and how a kernel is launched.
    "lowering": Rule(
        _in(
            "primitives",
            "elementwise fast_math fold function group_fold group_store head_table launch lower "
            "masked_sum memory placed_tiles plan stores table_load target tiles unfused wide",
        )
    ),
    "static": Rule(_in("agent/judge", "static"), ("walk", "language")),
    "compile": Rule(_in("agent/judge", "compile_gate instructions"), _COMPILED),
    "numerics": Rule(
        _in(
            "agent/judge", "compare disturbance imported meaning numerics oracle runners structures"
        )
        + _in("generated", "__init__ declared kernel ops recent"),
        _COMPILED,
    ),
    "performance": Rule(
        _in("agent/judge", "clocks machine performance samples timing tuner")
        + _in("primitives", "inspect"),
        _COMPILED,
    ),
}
"""Every rule; gates are among them by their names."""

OUTSIDE = {
    *_in(
        "agent/judge",
        "approximation diagnosis executor job provenance records repairs replaying rules survey",
    ),
    *_in(
        "primitives",
        "adjoint catalogue dispatch errors fit gradient gradient_kernel gradient_pass objects "
        "suggest",
    ),
    *_in("specs", "admission draft effects front_matter source tracing"),
    *_in("generated", "gradients out sharded tables tuning without"),
}
"""Modules that decide no verdict: transport, records, words of findings, admission of specs, what a
user measured for shapes of his own, drafts of specs, and which of the right tiles is run."""


class Locked(BaseModel):
    """A rule as the lock holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    meaning: str
    """SHA-256 of the normalised syntax trees."""
    why: str
    """Why the version was raised."""
    same: tuple[str, ...] = ()
    """Changes since then that were declared to mean the same, and why. The judge's scores confirm
    a declaration: they are stale until they are run by the rule as it is worded now."""


@lru_cache(maxsize=1)
def lock(path: Path = LOCK) -> dict[str, Locked]:
    """The lock, by rule."""
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return {name: Locked.model_validate(entry) for name, entry in known.items()}


def involved(gate: str) -> tuple[str, ...]:
    """The rules that a gate's verdict rests on; none for what is no gate."""
    return (*RULES[gate].needs, gate) if gate in RULES else ()


def versions(gate: str) -> dict[str, str]:
    """The versions that the lock holds of a gate's rules: what a verdict has to name to stand."""
    return {name: str(lock()[name].version) for name in involved(gate) if name in lock()}


def given(gate: str) -> dict[str, str]:
    """The versions that a verdict given now names. Where the sources are not those of the lock, it
    is one that no lock holds."""
    named: dict[str, str] = {}
    for name in involved(gate):
        known, now = lock().get(name), meanings()[name]
        version = str(known.version) if known else "0"
        named[name] = version if known and known.meaning == now else f"{version}+{now[7:15]}"
    return named


def moved(then: Mapping[str, str], gate: str) -> list[str]:
    """The rules of a gate whose versions are not those that a verdict names, `then`."""
    return [name for name, version in versions(gate).items() if then.get(name) != version]


class _Kept(BaseModel):
    sources: str
    """SHA-256 of all texts that the meanings follow from, this module's among them."""
    meanings: dict[str, str]


@lru_cache(maxsize=1)
def meanings() -> dict[str, str]:
    """The digest of each rule's meaning, by the sources.

    Parsing them takes 0.3 s, so the user's cache keeps the digests until a source changes.
    """
    file, sources = user_cache() / "meanings.json", sha256(Path(__file__).read_bytes())
    for module, text in sorted(_texts(ROOT).items()):
        sources.update(f"{module}\0{text}\0".encode())
    with contextlib.suppress(OSError, ValueError):
        kept = _Kept.model_validate_json(file.read_bytes())
        if kept.sources == sources.hexdigest():
            return kept.meanings
    found = parsed_meanings(ROOT)
    kept = _Kept(sources=sources.hexdigest(), meanings=found)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time alone
        write_whole(file, kept.model_dump_json())
    return found


def parsed_meanings(root: Path) -> dict[str, str]:
    """`meanings` of the sources under `root`, which are parsed."""
    found, texts = dict[str, str](), _texts(root)
    for name, rule in RULES.items():
        hashed = sha256()
        for module in sorted(rule.modules):
            said = module.startswith("agent/judge/")
            hashed.update(f"{module}\0{meaning(texts[module], prose=said)}\0".encode())
        found[name] = f"sha256:{hashed.hexdigest()}"
    return found


def _texts(root: Path) -> dict[str, str]:
    """The text of each module of a rule; a module that is gone is a change as well, and no reason
    to judge nothing."""
    files = {module: root / module for rule in RULES.values() for module in rule.modules}
    return {m: file.read_text("utf-8") if file.is_file() else "" for m, file in files.items()}


def differing() -> list[str]:
    """The rules whose meaning, by the sources, is not what the lock holds."""
    return [n for n, now in meanings().items() if n not in lock() or lock()[n].meaning != now]


def raise_versions(names: Iterable[str], why: str, path: Path = LOCK) -> dict[str, Locked]:
    """Gives rules the next version; the first where the lock has none. Returns the lock.

    Raises:
        CodaError: no such rule, or no reason.
    """
    known = _named(names, why, path)
    for name, entry in known.items():
        version = entry.version + 1 if entry else 1
        known[name] = Locked(version=version, meaning=meanings()[name], why=why)
    return _written(path, known)


def declare_same(names: Iterable[str], why: str, path: Path = LOCK) -> dict[str, Locked]:
    """Declares that rules mean what they meant; their versions stay. Returns the lock.

    Raises:
        CodaError: no such rule, none that differs from the lock, or no reason.
    """
    known = _named(names, why, path)
    for name, entry in known.items():
        now = meanings()[name]
        if entry is None or entry.meaning == now:
            raise CodaError(f"{name} is what the lock holds: there is nothing to declare")
        fields = {"meaning": now, "same": (*entry.same, why)}
        known[name] = entry.model_copy(update=fields)
    return _written(path, known)


def _named(names: Iterable[str], why: str, path: Path) -> dict[str, Locked | None]:
    chosen = list(names)
    if unknown := [name for name in chosen if name not in RULES]:
        raise CodaError(f"no rule named {unknown[0]!r}", hint=f"known: {', '.join(RULES)}")
    if not why.strip():
        raise CodaError("--why is empty, expected the reason")
    lock.cache_clear()
    return {name: lock(path).get(name) for name in chosen}


def _written(path: Path, changed: Mapping[str, Locked | None]) -> dict[str, Locked]:
    merged = {**lock(path), **{name: entry for name, entry in changed.items() if entry}}
    ordered = {name: merged[name].model_dump(mode="json") for name in RULES if name in merged}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")
    lock.cache_clear()
    return lock(path)


_REPORTS = {"Finding", "progress", "tell", "say", "refuse", "_finding", "warn", "warning", "info"}
_PROSE = re.compile(r"[A-Za-z]{2,}[,;:.]? [a-z]{2,}")


def meaning(text: str, *, prose: bool = False) -> str:
    """A module's text without what decides nothing, as one line; equal on every Python.

    Args:
        text: The module.
        prose: Whether texts in which words follow one another are said to people.
    """
    whole = ast.parse(text)
    imported = [node for node in ast.walk(whole) if isinstance(node, ast.Import | ast.ImportFrom)]
    tree = _Meaning(prose).visit(whole)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | _exported(tree)
    names = {
        f"{getattr(node, 'module', None)}.{alias.name} as {alias.asname}"
        for node in imported
        for alias in node.names
        if (alias.asname or alias.name).partition(".")[0] in used
    }
    return f"{sorted(names)} {_dumped(tree)}"


def _exported(tree: ast.Module) -> set[str]:
    """The names in `__all__`."""
    return {
        str(name.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for name in ast.walk(node.value)
        if isinstance(name, ast.Constant)
    }


def _dumped(node: object) -> str:
    # ast.dump leaves out other fields in one version of Python than in the next.
    if isinstance(node, list):
        return f"[{' '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((f, getattr(node, f, None)) for f in node._fields if f not in ("ctx", "kind"))
    shown = (f"{f}={_dumped(x)}" for f, x in fields if x is not None and x != [])
    return f"{type(node).__name__}({' '.join(shown)})"


class _Meaning(ast.NodeTransformer):
    """Takes out of a module's tree what decides nothing."""

    def __init__(self, prose: bool) -> None:
        self.prose, self.reporting, self.in_class = prose, False, False

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Imports are told by the names they bind, wherever they stand."""

    visit_ImportFrom = visit_Import

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return [self.visit(statement) for statement in node.orelse]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._inside(node, in_class=False)

    def _inside(self, node: ast.AST, *, in_class: bool) -> ast.AST:
        outside, self.in_class = self.in_class, in_class
        self.generic_visit(node)
        self.in_class = outside
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        # In a class an annotation may decide what is read.
        if self.in_class:
            return self.generic_visit(node)
        plain = node.value and ast.Assign([node.target], node.value)
        return plain and self.generic_visit(plain)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = str(getattr(node.func, "attr", getattr(node.func, "id", "")))
        outside = self.reporting
        self.reporting = outside or name in _REPORTS or name.endswith("Error")
        self.generic_visit(node)
        self.reporting = outside
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_said = isinstance(node.value, str) and self._is_said(node.value)
        return ast.Constant("") if is_said else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        parts = (x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
        return ast.Constant("") if self._is_said("".join(map(str, parts))) else node

    def _is_said(self, text: str) -> bool:
        return self.reporting or (self.prose and _PROSE.search(text) is not None)
