"""The vocabulary as data, for authors, out of the docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import coda_agent.primitives as vocabulary
from coda_agent.primitives.kinds import Operand, Output
from coda_agent.primitives.ptx import MEANINGS
from coda_agent.primitives.ptx_run import MNEMONICS, forms
from coda_agent.primitives.reductions import Reduction

KINDS = (
    "program",
    "load",
    "load, store",
    "store",
    "pairwise",
    "group",
    "select",
    "reduction",
    "elementwise",
    "extension",
)
_FUNCTIONS = {
    "program": "program",
    "groups": "group",
    "pairwise": "pairwise",
    "rotary": "pairwise",
    "gather": "select",
    "ptx": "extension",
}
"""What functions are, by their module; those of others are elementwise."""


@dataclass(frozen=True)
class Entry:
    """One name of the vocabulary; its kind is one of `KINDS`."""

    name: str
    kind: str
    signature: str
    summary: str
    doc: str


def vocabulary_names() -> list[str]:
    """List what a program can be written with."""
    return [name for name in vocabulary.__all__ if name != "Program"]


def entries() -> list[Entry]:
    """List every name of the vocabulary, loads and stores first."""
    found = [_entry(name, getattr(vocabulary, name)) for name in vocabulary_names()]
    return sorted(found, key=lambda e: (KINDS.index(e.kind), e.name))


def _entry(name: str, item: type | Callable[..., object]) -> Entry:
    doc = inspect.cleandoc(item.__doc__ or "")
    doc += _instructions() * (name == "ptx")
    signature = name if inspect.isclass(item) else name + _parameters(item)
    return Entry(name, _kind(item), signature, doc.split("\n")[0], doc)


@cache
def _instructions() -> str:
    meanings = (f"{m}({', '.join('xy'[:count])})" for m, count in MEANINGS.items())
    listed = "\n".join("; ".join(forms(mnemonic)) for mnemonic in MNEMONICS)
    head = "Instructions; of (…|…) one is written, of {…} none or one:"
    return f"\n\nMeanings, functions of torch: {', '.join(meanings)}.\n\n{head}\n{listed}"


def _parameters(item: Callable[..., object]) -> str:
    signature = inspect.signature(item)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _kind(item: type | Callable[..., object]) -> str:
    if inspect.isclass(item):
        if issubclass(item, Reduction):
            return "reduction"
        ways = {"load": Operand, "store": Output}
        return ", ".join(way for way, kind in ways.items() if issubclass(item, kind))
    return _FUNCTIONS.get(item.__module__.rpartition(".")[2], "elementwise")
