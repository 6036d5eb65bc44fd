"""Every command by its words, such as `eval run`, with the example that its help ends with."""

from collections.abc import Iterator

from coda_agent.agent.cli import GROUPS
from coda_agent.agent.cli.lazy import Lazy


def _examples() -> Iterator[tuple[str, str]]:
    for command in (command for some in GROUPS.values() for command in some):
        if isinstance(command, Lazy):
            yield str(command.name), command.example
            continue
        for inner in command.commands.values():
            assert isinstance(inner, Lazy)
            yield f"{command.name} {inner.name}", inner.example


EXAMPLES = dict(_examples())
