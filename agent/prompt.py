"""What an author is told, rendered from the code: the language, the vocabulary, the tools, and for
one spec the demonstrations and tips that fit it.

Nothing here depends on the time, the machine or chance: equal code and equal tips give equal
bytes, which is what a prompt cache is keyed by.
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coda_agent.agent import tips as tips_module
from coda_agent.agent.authors.composer import handed_over
from coda_agent.agent.tips import Tip
from coda_agent.agent.workbench import feedback, shown
from coda_agent.agent.workbench.reading import programs_to_define, vocabulary
from coda_agent.demos import Demo, demos
from coda_agent.primitives import reader
from coda_agent.specs import Spec

DEMOS = 4
"""Demonstrations shown in full; the others are a tool call away."""
CHARACTERS_PER_TOKEN = 3.0
"""For estimates only; code and mathematics take more tokens a character than prose."""

_DRAFT = (
    "A compiler went before you, which rewrites references by rules. It stopped at these lines. A "
    "HOLE stands for what it has no rule for, over the values that it has; what the reference "
    "does after that line is missing, too. Operands that only come after it are not declared yet."
)
_TASK = Path(__file__).with_name("task.md")


def common(withheld: Sequence[str] = ()) -> dict[str, str]:
    """What is the same for every spec, by name, without what is `withheld` of `WITHHELD`."""
    names = "What one of them does in full, `read_primitive` says.\n\n" + vocabulary()
    return {**instructions(withheld), "vocabulary": f"# The vocabulary\n\n{names}"}


def instructions(withheld: Sequence[str] = ()) -> dict[str, str]:
    """Task, language and feedback by name; tools describe themselves."""
    grammar = inspect.cleandoc(feedback.__doc__ or "")
    if "diagnosis" in withheld:
        grammar = "One line: whether the candidate passed, or at which gate it failed."
    return {
        "task": f"# The task\n\n{_TASK.read_text('utf-8').strip()}",
        "language": f"# The language\n\n{language()}",
        "what the judge says": f"# What the judge says\n\n{grammar}",
    }


def opening(spec: Spec, tips: Iterable[Tip], withheld: Sequence[str] = ()) -> dict[str, str]:
    """What is for one spec, by name: the spec, the composer's draft, demonstrations, tips."""
    parts = {"spec": f"# The spec\n\n{spec.text.strip()}\n\n{programs_to_define(spec)}"}
    if draft := handed_over(spec):
        parts["draft"] = f"# Where the composer stopped\n\n{_DRAFT}\n\n{draft}"
    for demo in demos_for(spec) if "demos" not in withheld else ():
        program = f"```python\n{demo.text.strip()}\n```"
        parts[f"demonstration {demo.name}"] = f"# Demonstration: {demo.name}\n\n{program}"
    if lines := [f"- {tip.line()}" for tip in tips]:
        parts["tips"] = "# Tips from earlier runs\n\n" + "\n".join(lines)
    return parts


def demos_for(spec: Spec) -> list[Demo]:
    """The demonstrations nearest to the words of the spec's name, summary and reference.

    A demonstration's score is the sum of its shared words, each weighted by how rare it is, over
    the root of how many words it has: long ones share words by length alone."""
    found = demos()
    words = {demo.name: _words(demo.candidate) for demo in found}
    wanted = _words(f"{' '.join(spec.name.split('_'))} {spec.summary} {spec.reference_source}")

    def score(demo: Demo) -> float:
        shared = wanted & words[demo.name]
        rare = sum(1 / sum(word in other for other in words.values()) for word in shared)
        return rare / len(words[demo.name]) ** 0.5

    return sorted(sorted(found, key=lambda d: (-score(d), d.name))[:DEMOS], key=lambda d: d.name)


def request(spec: Spec, tips: Iterable[Tip], withheld: Sequence[str] = ()) -> dict[str, Any]:
    """Tools, system text and first message of a conversation, with their cache breakpoints, and
    without what is `withheld`. The vocabulary is in the text, so `list_primitives` is not offered.

    An hour, not five minutes: a compilation, or a wait for a GPU, may outlast the shorter one.
    """
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[dict[str, Any]] = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.schema()}
        for tool in shown(withheld).values()
        if tool.name != "list_primitives"
    ]
    tools[-1] |= hour
    first = [{"type": "text", "text": joined(opening(spec, tips, withheld)), **hour}]
    return {
        "tools": tools,
        "system": [{"type": "text", "text": joined(common(withheld)), **hour}],
        "messages": [{"role": "user", "content": first}],
    }


def joined(parts: Mapping[str, str]) -> str:
    """Parts as one text."""
    return "\n\n".join(parts.values())


def tips_for(spec: Spec, tips: tips_module.Tips) -> list[Tip]:
    """The tips that match a spec."""
    return tips.matching(tips_module.words_of(spec))


def estimated_tokens(sent: object) -> int:
    """A guess at the tokens of a request, from its characters."""
    return round(len(json.dumps(sent, ensure_ascii=False)) / CHARACTERS_PER_TOKEN)


def language() -> str:
    """The rules of a candidate's text."""
    # Its first line names the module's place.
    return inspect.cleandoc(reader.__doc__ or "").partition("\n\n")[2]


def _words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Za-z_]\w+", text)}
