"""What README.md, docs/ and the skill show is run: every ```python block, and the spelling of every command.

- A block is run in this process, from an empty folder, alone: it has to bring its own imports.
- A block whose fence says `python no-run` is an excerpt and is left alone.
- In a ```console block, each `coda-agent ...` line must name a command that exists, with options
  that it has; the command itself is not run.
- Blocks whose fences say `run` are run by a shell, those of a page in order and in one folder. What
  they show is compared, and `…` is anything. A file that `cat` shows first is written. What needs a
  GPU says so in its comment; without one its exit code is 3.
"""

import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.commands import EXAMPLES

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


def runs(page: Path) -> list[tuple[str, str]]:
    """The commands that a page runs, each with what it shows; Python is a command, too."""
    found: list[tuple[str, str]] = []
    steps = [x for y in ("python", "console") for x in blocks(y) if "run" in x.info.split()]
    for block in sorted(x for x in steps if x.page == page):
        if block.info.startswith("python"):
            script = f"step_{block.line}.py"
            found += [
                (f"cat {script}", block.text),
                (f"{shlex.quote(sys.executable)} {script}", ""),
            ]
        else:
            _, *parts = re.split(r"^\$ ", block.text, flags=re.M)
            found += [(command, shown) for command, _, shown in (x.partition("\n") for x in parts)]
    return found


def matches(shown: str, said: str) -> bool:
    """Whether a command said what a page shows: a line of `…` is any lines, another … no newline."""
    lines = ["(?s:.*)" if x == "…" else re.escape(x).replace("…", ".*") for x in shown.splitlines()]
    return re.fullmatch("\n".join(lines), said.rstrip("\n")) is not None


RUNNABLE = [block for block in blocks("python") if "run" not in re.split(r"\W", block.info)]
COMMANDS = [(block, words) for block in blocks("console") for words in commands(block)]
HELP = Block(ROOT / "agent" / "cli" / "__init__.py", 0, "", "")
COMMANDS += [(HELP, shlex.split(example)) for example in EXAMPLES.values()]


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


@pytest.mark.slow  # compiles twice; `make demo` takes README's way
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.name)
def test_commands_do_what_a_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Your Name")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "you@example.com")
    folder, written = tmp_path, set[str]()
    for command, shown in runs(page):
        verb, *words = shlex.split(command, comments=True)
        if verb == "cat" and words[0] not in written:
            written.add(words[0])
            (folder / words[0]).write_text(shown)
            continue
        # What is told meanwhile, where something takes long, is on stderr.
        line = f"{{ {command}\n}}; code=$?; pwd > {tmp_path}/.folder; exit $code"
        done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
        folder = Path((tmp_path / ".folder").read_text().strip())
        if (on_gpu := "on a GPU: " in command) and torch.cuda.is_available():
            continue  # it would take minutes
        code = 3 if on_gpu else int("FAILED" in shown)
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        if shown.strip():
            assert matches(shown, done.stdout), f"{command}\n{shown}\n--- said\n{done.stdout}"


def referred() -> dict[str, Any]:
    """The functions and methods of the reference, by their paths."""
    shown = re.compile(r"^::: (\S+)(?:\n +options:\n +members: \[(.+?)\])?", re.MULTILINE)
    found = {}
    for path, members in shown.findall((ROOT / "docs" / "reference.md").read_text()):
        module, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        named = {f"{path}.{x}": getattr(thing, x) for x in re.findall(r"\w+", members)}
        found |= named or {path: thing}
    return found


@pytest.mark.parametrize("path", referred())
def test_the_reference_names_arguments_and_results(path: str) -> None:
    thing = referred()[path]
    assert (said := inspect.getdoc(thing))
    if inspect.isfunction(thing):
        taken = inspect.signature(thing)
        for name in taken.parameters.keys() - {"self"}:
            assert re.search(rf"^ +{name}: ", said, re.MULTILINE), f"{path} does not say {name}"
        result = taken.return_annotation
        assert ("Returns:\n" in said) == (result not in (None, "None")), f"{path} gives {result}"


def test_the_readme_has_something_to_run() -> None:
    """Guards the extraction: a fence it no longer recognises would pass every test above."""
    pages = {block.page.name for block in RUNNABLE} & {block.page.name for block, _ in COMMANDS}
    assert "README.md" in pages


def test_what_a_command_says_is_compared() -> None:
    """Guards the comparison."""
    assert matches("a … c\n…\nend", "a b c\n1\n2\nend\n")
    assert not matches("a … c\nend", "a b\nc\nend") and not matches("a.c", "abc")
    pages = {page.name: len(runs(page)) for page in PAGES if runs(page)}
    assert pages["lesson.md"] > 15 and pages["README.md"] >= 5
