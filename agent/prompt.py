"""What an author is told, rendered from the code.

Nothing here depends on the time, the machine or chance: equal code gives equal bytes, which is what
a prompt cache is keyed by.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from coda_agent.agent.authors.composer import handed_over
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.tips import names_in
from coda_agent.agent.workbench import feedback, shown
from coda_agent.agent.workbench.reading import programs_to_define, vocabulary
from coda_agent.demos import Demo, demos
from coda_agent.primitives import reader
from coda_agent.primitives.resources import OPERAND_KINDS, OUTPUT_KINDS
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
_WRITTEN = {
    r"median|kthvalue|sort|topk|max|min|clip|clamp|relu": "maximum minimum",
    r"unflatten|unbind|stack|complex|stride|pool|conv|chunk|pairs": "pairs interleave",
    r"bucketize|searchsorted|where|heaviside|sign|one_hot|mask": "where greater step",
    r"softmax|logsumexp|logaddexp|entropy": "exp log maximum",
    r"abs|norm|hypot|polar|complex": "absolute sqrt",
    r"special|erfinv|gamma|bessel|i0|frexp|ldexp": "ptx log sqrt",
    r"round|quant|float8|fp8": "round_even absolute",
    r"mean|var|std|norm": "rsqrt",
}
"""By which primitives other words of PyTorch are written."""
_TASK = Path(__file__).with_name("task.md")


def common(withheld: Sequence[str] = ()) -> dict[str, str]:
    """Write what is the same for every spec, without the `withheld`."""
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


def opening(spec: Spec, withheld: Sequence[str] = ()) -> dict[str, str]:
    """Write what is for one spec: spec, composer's draft, demonstrations."""
    parts = {"spec": f"# The spec\n\n{spec.text.strip()}\n\n{programs_to_define(spec)}"}
    if draft := handed_over(spec):
        parts["draft"] = f"# Where the composer stopped\n\n{_DRAFT}\n\n{draft}"
    for demo in demos_for(spec) if "demos" not in withheld else ():
        program = f"```python\n{demo.text.strip()}\n```"
        parts[f"demonstration {demo.name}"] = f"# Demonstration: {demo.name}\n\n{program}"
    return parts


def demos_for(spec: Spec) -> list[Demo]:
    """Choose the demonstrations that together show most of what is needed.

    That is what the composer's draft has, the kinds of operands and outputs, the primitives that
    the reference names, and those by which its other words are written. Each choice is the one that
    adds most; what is in many demonstrations counts a little, too.
    """
    shown = {demo.name: names_in(demo.candidate) for demo in demos()}
    often = Counter(name for names in shown.values() for name in names)
    wanted = wanted_of(spec)
    chosen = list[Demo]()
    for _ in range(DEMOS):
        known = {name for demo in chosen for name in shown[demo.name]}

        def adds(demo: Demo, known: set[str] = known) -> tuple[float, str]:
            new = shown[demo.name] - known
            worth = sum(1.0 if name in wanted else 0.01 * often[name] for name in new)
            return -worth / len(demo.text) ** 0.5, demo.name

        rest = [demo for demo in demos() if demo not in chosen]
        chosen.append(min(rest, key=adds))
    return sorted(chosen, key=lambda demo: demo.name)


def wanted_of(spec: Spec) -> set[str]:
    """List the primitives that a spec's program may need, by its words."""
    m, n, _ = spec.gemm_dims
    kinds = {*OPERAND_KINDS.values(), *OUTPUT_KINDS.values()}
    found = names_in(handed_over(spec)) | names_in(spec.reference_source)
    for binding in spec.bindings():
        for x in (*spec.inputs, *spec.outputs):
            shape = tuple(map(str, spec.symbolic_shape(x, binding)))
            side = OUTPUT_KINDS if x in spec.outputs else OPERAND_KINDS
            found |= {k.__name__ for k in kinds if k.named(m, n) == shape and k.__name__ in side}
    words = " ".join(re.findall(r"[a-z_0-9]+", spec.reference_source))
    for said, names in _WRITTEN.items():
        if re.search(said, words):
            found |= set(names.split())
    return found - ({"AddTile"} if spec.in_place is None else set())


def request(spec: Spec, withheld: Sequence[str] = ()) -> JsonObject:
    """Make a conversation's tools, system text and first message, with cache breakpoints.

    Text has the vocabulary and the composer's draft: `list_primitives` and `compose` are not
    offered.

    An hour, not five minutes: a compilation, or a wait for a GPU, may outlast the shorter one.
    """
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[JsonObject] = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.schema()}
        for tool in shown(withheld).values()
        if tool.name not in ("list_primitives", "compose", "use")
    ]
    tools[-1] |= hour
    first = [{"type": "text", "text": joined(opening(spec, withheld)), **hour}]
    return {
        "tools": tools,
        "system": [{"type": "text", "text": joined(common(withheld)), **hour}],
        "messages": [{"role": "user", "content": first}],
    }


def joined(parts: Mapping[str, str]) -> str:
    """Join parts to one text."""
    return "\n\n".join(parts.values())


def estimated_tokens(sent: object) -> int:
    """Guess the tokens of a request from its characters."""
    return round(len(json.dumps(sent, ensure_ascii=False)) / CHARACTERS_PER_TOKEN)


def language() -> str:
    """Read the rules of a candidate's text."""
    # Its first line names the module's place.
    return inspect.cleandoc(reader.__doc__ or "").partition("\n\n")[2]
