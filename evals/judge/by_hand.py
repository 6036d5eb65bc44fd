"""Wrong programs that people wrote, in two sets.

`wrong/found.toml` has programs that once passed the judge, and their like. `wrong/blind.toml` was
written from the specs by somebody who did not know the judge.

Each program is that of an accepted kernel with one piece of its text replaced. They are judged like
mutants, and a program that no input tells from its original does not count.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.workspace import packaged_specs
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import Mutant
from coda_agent.primitives import __all__ as vocabulary
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import load_spec

SETS = ("found", "blind")
AUTHORS = "authors"
"""Mistakes with the names that a diagnosis may give them, in programs of their own."""
_FOLDER = Path(__file__).parent / "wrong"
# An accepted text imports what it needs; a wrong one may need more of the vocabulary.
_IMPORT = re.compile(r"^from coda_agent\.primitives import (?:\([^)]*\)|.*)$", re.MULTILINE)


def written(name: str, kernels: Mapping[str, tuple[Subject, str]]) -> list[Mutant]:
    """Read the programs of a set; `kernels` has what they change.

    Raises:
        CodaError: an entry names no kernel, or a piece that its text does not hold.
    """
    found = []
    for entry in _entries(name)["wrong"]:
        kernel, old, new = entry["kernel"], entry["old"], entry["new"]
        right, text = kernels.get(kernel, (None, ""))
        if right is None or old not in text:
            raise CodaError(f"{name}.toml: the program of {kernel!r} does not hold {old!r}")
        program = _programs(text.replace(old, new))[right.variant]
        faults, says = tuple(entry.get("faults", ())), entry.get("says", "")
        found.append(Mutant(right, "by hand", entry["what"], faults, program, says=says))
    return found


def right_programs(name: str) -> dict[str, tuple[Subject, str]]:
    """Read the right programs that a set brings along, with the package's specs."""
    found, specs = dict[str, tuple[Subject, str]](), packaged_specs()
    for kernel, text in _entries(name)["right"].items():
        spec = load_spec(specs[kernel])
        found[kernel] = Subject(kernel, spec, _programs(text), spec.bind()), text
    return found


def _entries(name: str) -> JsonObject:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def _programs(text: str) -> dict[str, Program]:
    used = {*re.findall(r"\w+", _IMPORT.sub("", text))} & {*vocabulary}
    imports = f"from coda_agent.primitives import {', '.join(sorted(used))}\n"
    return read_programs(_IMPORT.sub(imports, text) if _IMPORT.search(text) else imports + text)
