"""A hook of mkdocs: generated pages, and links from the sources."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from coda_agent import generated
from coda_agent.agent.cli import GROUPS
from coda_agent.primitives.catalogue import KINDS, entries

SOURCES = {"index.md": "README.md", "spec-format.md": "agent/spec_format.md"}
"""Pages that are files outside of docs/."""
LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```(python|console) (no-)?run$", re.M)
UNPARTED = re.compile(r"^((?!\d+\. |- |\s|```).+)\n(?=- |1\. )", re.M)


def on_files(files: Files, config: Any) -> Files:
    """Add what is written elsewhere, and what the program says of itself."""
    made = {name: Path(source).read_text("utf-8") for name, source in SOURCES.items()}
    made["spec-format.md"] = f"# Write a spec\n\n{made['spec-format.md']}"
    made |= {"kernels.md": kernels(), "primitives.md": primitives(), "commands.md": commands()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(text: str, page: Any, files: Files, **_: Any) -> str:
    """Write a page as Python-Markdown reads it; links to non-pages become text."""
    here = Path(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(found: re.Match[str]) -> str:
        said, target, anchor = found.groups("")
        path = os.path.normpath(here / target)
        name = next((x for x, y in SOURCES.items() if y == path), path.removeprefix("docs/"))
        if files.get_file_from_path(name) or not os.path.exists(path):
            return f"[{said}]({name}{anchor})"
        return said if said.startswith("`") else f"`{said}`"

    return UNPARTED.sub(r"\1\n\n", FENCE.sub(r"```\1", LINK.sub(link, text)))


def kernels() -> str:
    """Write the accepted kernels' docstrings."""
    parts = ["# Kernels\n\n`from coda_agent.generated import gemm_swiglu`: each is a function."]
    for name in dir(generated):
        said = getattr(generated, name).__doc__
        parts.append(f"## {name}\n\n```text\n{said.strip()}\n```")
    return "\n\n".join(parts)


def primitives() -> str:
    """Write the vocabulary, by kind."""
    parts = [
        "# Primitives\n\nWhat programs are written from: `from coda_agent.primitives import …`."
    ]
    known = entries()
    for kind in KINDS:
        parts.append(f"## {kind}")
        for entry in (x for x in known if x.kind == kind):
            parts.append(f"### `{entry.signature}`\n\n```text\n{entry.doc.strip()}\n```")
    return "\n\n".join(parts)


def commands() -> str:
    """Write every command's help."""
    parts = ["# Commands"]
    for title, some in GROUPS.items():
        parts.append(f"## {title}")
        for command in some:
            inner = getattr(command, "commands", None)
            for one in inner.values() if inner else [command]:
                name = " ".join(["coda-agent", *[command.name] * bool(inner), one.name])
                context = one.make_context(name, [], resilient_parsing=True, terminal_width=80)
                parts.append(f"### {name}\n\n```text\n{context.get_help()}\n```")
    return "\n\n".join(parts)
