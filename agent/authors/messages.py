"""The author `messages:MODEL`: a model of any other server that speaks the Messages API.

It is the author Claude (`claude/`) under a name that does not claim whose model it is. Such a
server may know less than Anthropic's, so it is asked for nothing but what it says it can do. Its
prices are the user's to tell; where they are unknown, budgets are in tokens.
"""

import os
from dataclasses import replace

from coda_agent.agent.authors import Author, Kind, Options
from coda_agent.agent.authors.claude import server_named
from coda_agent.agent.authors.claude.loop import Claude
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError


class _Messages(Kind):
    name = "messages"
    spelling = "messages:MODEL"
    meaning = "A model of another server that speaks the Messages API, driven by this program."
    aided = True

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        server = server_named(options.base_url or os.environ.get("ANTHROPIC_BASE_URL", ""))
        model = which or options.model
        if not (server and model):
            hint = "coda-agent generate SPEC --author messages:MODEL --base-url http://HOST:PORT"
            raise CodaError("the author messages needs a model's name and --base-url", hint=hint)
        return Claude(replace(options, model=model, base_url=server), name=self.name)


AUTHOR = _Messages()
