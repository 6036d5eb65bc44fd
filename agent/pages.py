"""Pages for a browser: a title, and sections of tables and texts.

A page loads nothing and runs nothing, and whatever is filled in is escaped.
"""

from collections.abc import Sequence
from pathlib import Path

from coda_agent.agent.tables import Rows

Section = tuple[str, Rows | str]
"""A heading, and the table or the text below it."""


class Fold(str):
    """A heading whose body is shown when it is opened."""

    folded = True


class Diff(str):
    """A text whose lines begin with +, - or a space."""

    changes = True


def write(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write a page into a folder that is there."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template("page.html.j2").render(title=title, sections=sections)
    path.write_text(text, "utf-8", errors="replace")
    return path
