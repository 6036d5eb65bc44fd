"""The author Claude: a model of the Messages API at the workbench.

- `loop`: the author, a step function over what its run's events say.
- `ladder`: the composer, then several models, in one run. `samples`: their conversations, of which
  several may be held at once.
- `purse`: what it may spend, and the most that a call can cost.
- `opening`: the parameters of every call. `conversation`: what was said, a fold over these events.
- `client`: one turn of the model over HTTP. `answer`: what a turn's stream amounts to.
"""

import os
from dataclasses import replace
from urllib.parse import urlsplit

from coda_agent.agent.authors import Author, Kind, Need, Options
from coda_agent.agent.authors.claude.ladder import MODELS, Ladder
from coda_agent.agent.authors.claude.loop import Claude
from coda_agent.agent.keys import KEYS
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

DEFAULT_MODEL = "claude-opus-5-5"


def model_named(name: str = "") -> str:
    """Choose the model: the one named, the user's own, or the project's."""
    return name or os.environ.get("CODA_AGENT_MODEL") or DEFAULT_MODEL


def server_named(url: str) -> str:
    """Strip the URL of a server, which may end in /v1.

    Raises:
        CodaError: it is no URL of HTTP, or has a password in it, which logs would keep.
    """
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc):
        hint = "a token goes into ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN"
        raise CodaError("--base-url is no http://HOST[:PORT][/PATH]", hint=hint)
    return url.rstrip("/").removesuffix("/v1")


class _Ladder(Kind):
    name = spelling = "ladder"
    meaning = "The composer, then models of Anthropic's from cheap to strong."
    precedence = 2
    aided = climbs = True

    def need(self) -> Need:
        hint = "not needed by the composer"
        return Need("ANTHROPIC_API_KEY", KEYS.present(), hint, "where a key is set")

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        if which:
            raise CodaError(f"ladder:{which} is none", hint="--models MODEL,MODEL names its models")
        if options.model and options.models:
            raise CodaError("--model and --models exclude each other", hint="--models has them all")
        one = options.model or os.environ.get("CODA_AGENT_MODEL")
        # A run keeps its models, so that it is resumed with them whatever the variable then is.
        models = options.models or ((one,) if one else MODELS)
        server = server_named(options.base_url)
        return Ladder(replace(options, model="", models=models, base_url=server))


class _Claude(Kind):
    name = "claude"
    spelling = "claude or claude:MODEL"
    meaning = "A model of Anthropic's at the tools, driven by this program."
    aided = True

    def full_name(self, which: str, options: Options) -> str:
        return f"claude:{model_named(which or options.model)}"

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        model = model_named(which or options.model)
        return Claude(replace(options, model=model, base_url=server_named(options.base_url)))


class _Messages(Kind):
    """The same author for a model of another server.

    Such a server may know less than Anthropic's, so it is asked for nothing but what it says it can
    do. Its prices are the user's to tell; where they are unknown, budgets are in tokens.
    """

    name = "messages"
    spelling = "messages:MODEL"
    meaning = "A model of another server that speaks the Messages API, driven by this program."
    aided = True

    def full_name(self, which: str, options: Options) -> str:
        return f"messages:{which or options.model}"

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        server = server_named(options.base_url or os.environ.get("ANTHROPIC_BASE_URL", ""))
        model = which or options.model
        if not (server and model):
            hint = "coda-agent generate SPEC --author messages:MODEL --base-url http://HOST:PORT"
            raise CodaError("the author messages needs a model's name and --base-url", hint=hint)
        return Claude(replace(options, model=model, base_url=server), name=self.name)


AUTHOR = _Ladder(), _Claude(), _Messages()
