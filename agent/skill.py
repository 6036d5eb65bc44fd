"""An agent skill: what authors are told, for coding agents elsewhere.

Its format is `SKILL.md`, YAML front matter and instructions, with references beside it that are
read when they are needed. Equal code gives equal bytes.
"""

import inspect
import re
from pathlib import Path

import yaml

from coda_agent.agent import prompt
from coda_agent.agent.workbench import TOOLS
from coda_agent.agent.workbench.reading import programs_to_define
from coda_agent.agent.workspace import packaged_specs
from coda_agent.demos import demos
from coda_agent.primitives.catalogue import entries
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole
from coda_agent.specs import defaults, load_spec

DESCRIPTION = """\
Writes fused GEMM-epilogue kernels for NVIDIA Hopper GPUs with coda-agent, out of a spec
(mathematics and a PyTorch reference) and a short program of primitives that a judge checks for
numbers and speed. Use when a matrix product is followed by a bias, activation, gate, norm, rotary
embedding, residual, loss, reduction or quantisation in PyTorch and should be one kernel, or when
asked for a coda-agent spec or program."""
EXAMPLES = (
    "gemm_relu_squared", "gemm_bias_act", "gemm_rmsnorm_swiglu", "gemm_partial_cross_entropy",
)  # fmt: skip
"""Specs that are shown whole: without and with parameters, of pairs, and of reductions. Programs
are shown in demonstrations alone, since authors are tried on specs that have one here."""
_MADE_BY = {"made-by": "coda-agent"}
_NAME = re.compile(r"(?=.{1,64}$)[a-z0-9]+(-[a-z0-9]+)*")
_TEXTS = Path(__file__).parent


def files(name: str) -> dict[str, str]:
    """Write the skill's files by path, `SKILL.md` first; `name` is its folder's."""
    lines = (f"- [{x.name}](references/demonstrations/{x.name}.py): {x.summary}" for x in demos())
    front = {
        "name": name, "description": " ".join(DESCRIPTION.split()), "license": "Apache-2.0",
        "metadata": _MADE_BY,
    }  # fmt: skip
    head = yaml.safe_dump(front, sort_keys=False, width=2000)  # some readers know one line alone
    found = {
        "SKILL.md": f"---\n{head}---\n\n{_text('skill')}\n\n" + "\n".join(lines),
        "references/language.md": prompt.joined(prompt.instructions()),
        "references/primitives.md": _primitives(),
        "references/spec.md": _spec(),
        "references/tools.md": _tools(),
    }
    found |= {f"references/specs/{x}.md": packaged_specs()[x].read_text("utf-8") for x in EXAMPLES}
    found |= {f"references/demonstrations/{x.name}.py": x.text for x in demos()}
    return {path: f"{text.rstrip()}\n" for path, text in found.items()}


def write(out: Path) -> list[str]:
    """Write the skill to `out`, in place of a former one.

    Returns:
        The paths of its files in `out`.

    Raises:
        CodaError: the format allows no such name, or `out` holds something else.
    """
    name = out.resolve().name
    if not _NAME.fullmatch(name):
        hint = "name another --out, such as coda-agent"
        raise CodaError(
            f"{name!r} is no name of a skill: 1 to 64 of a-z, 0-9 and single hyphens between them",
            hint=hint,
        )
    made = files(name)
    if out.is_dir() and any(out.iterdir()) and not _ours(out / "SKILL.md"):
        raise CodaError(f"{out} holds no skill of coda-agent", hint="name another --out")
    there = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    if others := sorted(there - made.keys()):
        hint = "move it away, or name another --out"
        raise CodaError(f"{out / others[0]} is no file of this skill", hint=hint)
    for path, text in made.items():
        write_whole(out / path, text)
    return sorted(made)


def _ours(path: Path) -> bool:
    """Tell whether a SKILL.md was written here."""
    try:
        front = path.read_text("utf-8").split("---\n")[1]
        return yaml.safe_load(front)["metadata"] == _MADE_BY
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
        return False


def _primitives() -> str:
    """Write the vocabulary in full, by kind."""
    lines, kind = ["# The vocabulary"], ""
    for x in entries():
        if x.kind != kind:
            lines.append(f"## {(kind := x.kind).capitalize()}")
        lines.append(f"### `{x.signature}`\n\n{x.doc}")
    return "\n\n".join(lines)


def _spec() -> str:
    """Write the format, what may be left out, and examples."""
    left_out = inspect.cleandoc(defaults.completed.__doc__ or "").partition("\n\n")[2]
    paths = {name: packaged_specs()[name] for name in EXAMPLES}
    examples = "\n\n".join(
        f"### [{name}](specs/{name}.md)\n\n```text\n{programs_to_define(load_spec(path))}\n```"
        for name, path in paths.items()
    )
    return (
        f"# Specs\n\n{_text('spec_format')}\n\n## What may be left out, and what then holds\n\n"
        f"{left_out.partition('Args:')[0]}## Examples\n\n{examples}"
    )


def _tools() -> str:
    """Write what an author can do."""
    lines = ["# The tools\n\n`coda-agent tool NAME KEY=VALUE...`; `--help` after a name says more."]
    for tool in TOOLS.values():
        keys = ", ".join(f"`{x}`" for x in tool.schema()["properties"])
        lines.append(f"## {tool.name}\n\n{tool.description}" + f"\n\nTakes {keys}." * bool(keys))
    return "\n\n".join(lines)


def _text(name: str) -> str:
    return (_TEXTS / f"{name}.md").read_text("utf-8").strip()
