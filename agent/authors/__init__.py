"""Authors: whoever writes candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.specs import Spec

Observer = Callable[[str, dict[str, Any]], None]

AUTHORS = ("composer",)


class Author(Protocol):
    """Writes a candidate for a spec."""

    name: str

    def write(self, spec: Spec, observer: Observer) -> str:
        """The complete text of a candidate `kernel.py`, with one program per binding of `spec`.

        Args:
            spec: What to compute.
            observer: Called with "author.progress" and its data at each stage.

        Raises:
            ProgramError: The spec cannot be expressed as an epilogue program.
        """
        ...


def get_author(name: str) -> Author:
    """The author called `name`.

    Raises:
        CodaError: No author has this name.
    """
    if name == "composer":
        from coda_agent.agent.authors.composer import Composer

        return Composer()
    raise CodaError(f"unknown author {name!r}, expected one of {', '.join(AUTHORS)}")
