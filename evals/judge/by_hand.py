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

from coda_agent.agent.execution.compile_worker import load_programs
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import Mutant
from coda_agent.primitives import __all__ as vocabulary
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.program import Program

SETS = ("found", "blind")
_FOLDER = Path(__file__).parent / "wrong"
# An accepted text imports what it needs; a wrong one may need more of the vocabulary.
_IMPORT = re.compile(r"^from coda_agent\.primitives import (?:\([^)]*\)|.*)$", re.MULTILINE)


def written(name: str, kernels: Mapping[str, tuple[Subject, str]]) -> list[Mutant]:
    """The programs of one of `SETS`; `kernels` has the default program and the text of each.

    Raises:
        CodaError: an entry names no kernel, or a piece that its text does not hold.
    """
    found = []
    everything = f"from coda_agent.primitives import {', '.join(sorted(vocabulary))}"
    for entry in tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))["wrong"]:
        kernel, old, new = entry["kernel"], entry["old"], entry["new"]
        right, text = kernels.get(kernel, (None, ""))
        if right is None or old not in text:
            raise CodaError(f"{name}.toml: the program of {kernel!r} does not hold {old!r}")
        text = _IMPORT.sub(everything, text.replace(old, new))
        program = Program.from_dict(load_programs(text)[right.variant])
        found.append(Mutant(right, "by hand", entry["what"], (), program))
    return found
