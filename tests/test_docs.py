"""What README.md, docs/ and the skill show is run: every ```python block, and the spelling of every command.

- A block is run in this process, from an empty folder, alone: it has to bring its own imports.
- A block whose fence says `python no-run` is an excerpt and is left alone.
- In a ```console block, each `coda-agent ...` line must name a command that exists, with options
  that it has; the command itself is not run.
"""

import re
import runpy
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "agent" / "skill.md"]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block; `line` is where its first line of code stands in the page, from 1."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            info = match[1].strip()
            if info.split(maxsplit=1)[:1] == [language]:
                line = text.count("\n", 0, match.start(2)) + 1
                found.append(Block(page, line, info, match[2]))
    return found


def commands(block: Block) -> list[list[str]]:
    """The words after `coda-agent` of each such line, with or without a `$ ` prompt."""
    lines = [line.strip().removeprefix("$ ") for line in block.text.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("coda-agent")]
    return [line[1:] for line in words]


RUNNABLE = [block for block in blocks("python") if "no-run" not in block.info]
COMMANDS = [(block, words) for block in blocks("console") for words in commands(block)]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.id) for block in RUNNABLE])
def test_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Padded, so that a traceback's line number is the page's; a file, so that inspect finds source.
    script = tmp_path / f"{block.page.stem}.py"
    script.write_text("\n" * (block.line - 1) + block.text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__docs__")


@pytest.mark.parametrize(
    ("block", "words"),
    [pytest.param(block, words, id=f"{block.id}-{' '.join(words)}") for block, words in COMMANDS],
)
def test_console_command_exists(block: Block, words: list[str]) -> None:
    cli = pytest.importorskip("coda_agent.agent.cli", reason="the command line is not there yet")
    import typer

    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        name = rest.pop(0)
        assert name in command.commands, f"{block.id}: no command {name!r}"
        command = command.commands[name]
        command = getattr(command, "loaded", command)
    known = {spelling for p in command.params for spelling in (*p.opts, *p.secondary_opts)}
    used = {word.split("=", 1)[0] for word in rest if word.startswith("-")} - {"--help"}
    assert used <= known, f"{block.id}: `{shlex.join(words)}` has no {sorted(used - known)}"


def test_the_readme_has_something_to_run() -> None:
    """Guards the extraction: a fence it no longer recognises would pass every test above."""
    pages = {block.page.name for block in RUNNABLE} & {block.page.name for block, _ in COMMANDS}
    assert "README.md" in pages
