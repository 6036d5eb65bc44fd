"""The author Claude: a model of the Messages API at the workbench.

- `loop`: the author, a step function over what its run's events say.
- `conversation`: what was said, a fold over these events.
- `client`: one turn of the model over HTTP. `answer`: what a turn's stream amounts to.
"""

import os
from dataclasses import replace

from coda_agent.agent.authors import Author, Kind, Need, Options
from coda_agent.agent.authors.claude.loop import Claude
from coda_agent.agent.keys import KEYS
from coda_agent.agent.workspace import Workspace

DEFAULT_MODEL = "claude-opus-5-5"


def model_named(name: str = "") -> str:
    """The model that is called: the one named, else the user's own, else the project's."""
    return name or os.environ.get("CODA_AGENT_MODEL") or DEFAULT_MODEL


class _Claude(Kind):
    name = "claude"
    spelling = "claude or claude:MODEL"
    precedence = 2
    aided = True

    def need(self) -> Need:
        hint = "not needed by the composer"
        return Need("ANTHROPIC_API_KEY", KEYS.present(), hint, "where a key is set")

    def full_name(self, which: str) -> str:
        return f"claude:{model_named(which)}"

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        return Claude(replace(options, model=model_named(which or options.model)))


AUTHOR = _Claude()
