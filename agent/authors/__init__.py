"""Authors: whoever writes candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.judge import Observer
    from coda_agent.agent.workbench import Workbench
    from coda_agent.specs import Spec

AUTHORS = ("composer", "claude")


class Author(Protocol):
    """Writes a candidate for a spec in one go."""

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


class Agent(Protocol):
    """Works at the workbench until its run is over."""

    @property
    def name(self) -> str:
        """What evidence and logs call it."""
        ...

    def settings(self) -> dict[str, Any]:
        """What the first event of a run says about the agent."""
        ...

    def drive(self, bench: Workbench) -> None:
        """Works until the run is over, and ends it (`Workbench.finish`)."""
        ...


def get_author(name: str) -> Author:
    """The author called `name`; `claude`, which takes options, is made where these are read.

    Raises:
        CodaError: No author has this name.
    """
    if name == "composer":
        from coda_agent.agent.authors.composer import Composer

        return Composer()
    raise CodaError(f"unknown author {name!r}, expected one of {', '.join(AUTHORS)}")
