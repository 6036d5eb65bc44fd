"""The composer, an author without a key, which derives programs from references.

- `capture`: the reference as an ATen graph. `subgraph`: any ATen graph, such as Inductor's, by the
  roles of its dims (`retrace`, `axes`, `resize`, `ports`). Both state a `Problem`.
- `rewrite`: its canonical expressions (`across`, `layout`, `expression`, `canonical`). What that
  refuses of a reference is read as a graph, too (`spec_graph`).
- `emit`: the expressions as source, from which the program is read.
- Then it checks itself: the program runs in float64 beside the reference or the graph (`check`).
- `draft`: what it has of a reference that it refuses, for whoever goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from coda_agent.agent.authors import Author, Kind, Options, Writer
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.structures import base_shape
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives import Program
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec


class Composer(Writer):
    """The embedded author."""

    name = "composer"

    def write(self, spec: Spec, observer: Observer) -> str:
        """Write a candidate: one program for each binding of `spec`, checked.

        Raises:
            ProgramError: The reference cannot be expressed, or the program disagrees with it.
        """
        from coda_agent.agent.authors.composer.capture import capture  # these import torch
        from coda_agent.agent.authors.composer.emit import emit
        from coda_agent.agent.authors.composer.rewrite import rewrite
        from coda_agent.agent.authors.composer.spec_graph import compose_problem

        programs, refusals = [], dict[str, ProgramError]()
        for binding in spec.bindings():
            variant = spec.variant(binding)
            observer("author.progress", {"stage": "capture", "program": variant})
            captured = capture(spec, binding)
            observer("author.progress", {"stage": "rewrite", "program": variant})
            try:
                programs.append(rewrite(captured))
            except ProgramError as error:
                refusals[variant] = error
                try:
                    programs.append(compose_problem(captured))
                except ProgramError:
                    raise error from None
        observer("author.progress", {"stage": "emit", "programs": len(programs)})
        text = emit(spec, programs)
        loaded = read_programs(text)
        for binding in spec.bindings():
            variant = spec.variant(binding)
            observer("author.progress", {"stage": "check", "program": variant})
            try:
                self_check(spec, loaded[variant], binding)
            except ProgramError as error:  # of another reading what the first one found says more
                raise refusals.get(variant, error) from None
        return text


class _Composing(Kind):
    name = spelling = "composer"
    meaning = "Rewrites the reference by rules, without a model."
    precedence = 1
    deterministic = True

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        return Composer()


AUTHOR = _Composing()
_handed: dict[str, str] = {}


def handed_over(spec: Spec) -> str:
    """Compose a spec for another author: a draft where that stops.

    Raises:
        SpecError: the reference block is broken.
    """
    if spec.digest not in _handed:
        try:
            Composer().write(spec, lambda *_: None)
        except ProgramError as error:
            from coda_agent.agent.authors.composer.draft import draft

            _handed[spec.digest] = draft(spec, error.message)
        else:
            _handed[spec.digest] = ""
    return _handed[spec.digest]


def self_check(spec: Spec, program: Program, binding: Mapping[str, str]) -> None:
    """Compare `program` with the reference in float64, at another shape.

    Raises:
        ProgramError: An output differs; names it.
    """
    from coda_agent.agent.authors.composer.check import TOLERANCE, differences

    for name, error in differences(spec, program, binding).items():
        if not error <= TOLERANCE:
            raise ProgramError(
                f"{program.name}: the program composed for output {name!r} is off by {error:.1e} of"
                f" the reference's largest value at {dict(base_shape(spec))}",
                hint="where the reference uses a size as a number, a program cannot: give the"
                " number as an input, or as an argument with a default",
            )
