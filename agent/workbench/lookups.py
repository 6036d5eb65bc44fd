"""Tools that look things up: the spec, primitives, demonstrations, tips."""

from typing import Annotated

from coda_agent.agent import events as e
from coda_agent.agent.tips import Tips
from coda_agent.agent.workbench.reading import (
    demonstrations,
    names_by_kind,
    programs_to_define,
    vocabulary,
)
from coda_agent.agent.workbench.registry import Result, pick, told, tool
from coda_agent.agent.workbench.session import Workbench
from coda_agent.demos import demos
from coda_agent.primitives.catalogue import entries

Name = Annotated[str, told("As the list spells it.")]
Word = Annotated[str, told("Part of a name, a kind or a summary.")]


@tool(reads=True)
def read_spec(bench: Workbench) -> Result:
    """The spec: what to compute, with shapes, types, tolerance, target and the reference."""
    names = [bench.spec.variant(binding) for binding in bench.spec.bindings()]
    text = f"{bench.spec.text}\n---\n{programs_to_define(bench.spec)}"
    return Result(text=text, data={"programs": names})


@tool(reads=True)
def list_primitives(bench: Workbench, word: Word = "") -> Result:
    """Every name a program may use, by kind; or with a summary those that have a word in it."""
    found = vocabulary(word) if word else names_by_kind()
    return Result(text=found or f"no primitive has {word!r}; those there are:\n{names_by_kind()}")


@tool(reads=True)
def read_primitive(bench: Workbench, name: Name) -> Result:
    """One primitive: shapes, types, cost, when to use it, an example."""
    entry = pick({e.name: e for e in entries()}, name, "primitive")
    return Result(text=f"{entry.signature}  [{entry.kind}]\n\n{entry.doc}")


@tool(reads=True)
def list_demos(bench: Workbench, word: Word = "") -> Result:
    """The demonstrations, each of a primitive or pattern; or with a summary those that have a
    word, such as a primitive's name, in them."""
    names = ", ".join(demo.name for demo in demos())
    found = demonstrations(word) if word else names
    return Result(text=found or f"no demonstration has {word!r}; there are {names}")


@tool(reads=True)
def read_demo(bench: Workbench, name: Name) -> Result:
    """One demonstration: problem, program, why it is written so, reference."""
    return Result(text=pick({d.name: d for d in demos()}, name, "demo").text)


@tool(reads=True)
def search_tips(
    bench: Workbench, query: Annotated[str, told("Words: primitives, symptoms, outputs.")]
) -> Result:
    """Tips from earlier runs that match some words, the most useful first."""
    known = Tips.of(bench.workspace).search(query)
    found = [tip for tip in known if tip.run != bench.run.id]  # what it wrote, it knows
    if not found:
        return Result(text="no tip matches these words")
    bench.log.append(e.TipsGiven(arms={tip.id: "shown" for tip in found}))
    return Result(text="\n".join(tip.line() for tip in found))
