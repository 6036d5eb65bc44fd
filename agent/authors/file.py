"""A program of one's own, as an author: it is judged and accepted as any other's."""

from pathlib import Path

from coda_agent.agent.authors import Author, Kind, Options, Writer
from coda_agent.agent.judge import Observer
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of
from coda_agent.specs import Spec


class Own(Writer):
    """The author of a program that is written already."""

    def __init__(self, path: str) -> None:
        self.name, self.text = f"file:{path}", text_of(Path(path))

    def write(self, spec: Spec, observer: Observer) -> str:
        return self.text


class _OfFile(Kind):
    name = "file"
    spelling = "file:PATH"
    meaning = "A program of your own, judged and accepted as any author's."
    deterministic = True

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        if not which:
            raise CodaError("file names no program", hint="file:PATH, such as file:mine.py")
        return Own(which)


AUTHOR = _OfFile()
