"""Commands around authors: begin a kernel, go on, work by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter

from coda_agent.agent import authors, execution, pipeline
from coda_agent.agent import prompt as prompting
from coda_agent.agent import runs as past
from coda_agent.agent.authors.claude import model_named, server_named
from coda_agent.agent.authors.claude.client import Client
from coda_agent.agent.budget import Budget, Price
from coda_agent.agent.calls import Calls
from coda_agent.agent.cli.options import DeviceOption, NoCommit, RunName, SpecName
from coda_agent.agent.cli.report import columns, judged, progress, quiet, reported, waiting
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.keys import KEYS
from coda_agent.agent.mcp import Connection, serve
from coda_agent.agent.mcp import install as installed
from coda_agent.agent.reply import Reply
from coda_agent.agent.tips import HOLDOUT
from coda_agent.agent.workspace import Workspace, find, here, resolve_spec
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import reason
from coda_agent.specs import load_spec

MaxUsd = Annotated[float | None, typer.Option(help="Most to spend on the model; 5 by default.")]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", help="steps, tokens, minutes, gpu_minutes, failures or answer, as KEY=VALUE."
    ),
]
Model = Annotated[
    str | None, typer.Option(help="The one model of claude or the ladder; else CODA_AGENT_MODEL.")
]
Models = Annotated[str, typer.Option(help="Models that the ladder climbs, as MODEL,MODEL.")]
Samples = Annotated[
    int, typer.Option(help="Conversations with each of them but the last, or with one.", min=1)
]
Effort = Annotated[
    Literal["low", "medium", "high", "xhigh", "max"], typer.Option(help="How hard it thinks.")
]
Fallback = Annotated[str | None, typer.Option(help="Model to ask where the first refuses.")]
PriceIn = Annotated[float | None, typer.Option(help="USD per million tokens of prompt.")]
PriceOut = Annotated[float | None, typer.Option(help="USD per million tokens of answer.")]
BaseUrl = Annotated[
    str, typer.Option(help="Server of the Messages API, for claude or messages:MODEL.")
]
Holdout = Annotated[float, typer.Option(help="Share of the tips to hold back (A/B).")]


@reported(timed=True, compiles=True)
def generate(
    spec: SpecName,
    author: Annotated[str | None, typer.Option(help=authors.choices())] = None,
    device: DeviceOption = "auto",
    model: Model = None,
    models: Models = "",
    samples: Samples = 1,
    effort: Effort = "high",
    fallback_model: Fallback = None,
    max_usd: MaxUsd = None,
    limit: Limits = None,
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    base_url: BaseUrl = "",
    tip_holdout: Holdout = HOLDOUT,
    no_commit: NoCommit = False,
) -> Reply:
    """Write a kernel for SPEC, judge it, commit it when it passes."""
    if device == "cuda":  # said now, rather than after an author's work
        execution.usable_gpu(device)
    workspace = find()
    path = resolve_spec(spec, workspace)
    budget, price = Budget().changed(max_usd, limit or []), price_of(price_in, price_out)
    if not 0 <= tip_holdout <= 1:
        raise CodaError(f"--tip-holdout is {tip_holdout:g}, expected a share from 0 to 1")
    options = authors.Options(
        model or "", models_of(models), samples, effort, fallback_model, price, budget,
        tip_holdout, base_url,
    )  # fmt: skip
    who = _made(author or authors.default(), options, workspace)
    if max_usd is not None and not who.in_dollars:
        hint = "give --price-in and --price-out, or --limit tokens=N instead"
        raise CodaError("--max-usd needs the model's price, which is not known", hint=hint)
    with progress() as observer:
        outcome = pipeline.generate(
            workspace, path, who, observer, device=device, commit=not no_commit
        )
    return judged(outcome)


@reported(timed=True, compiles=True)
def resume(run: RunName, max_usd: MaxUsd = None, limit: Limits = None) -> Reply:
    """Go on with a model's run where it stopped, by its own limits unless others are given."""
    workspace = find()
    found = past.find(workspace, run)
    first = past.state(found)
    if not first.options:
        hint = "coda-agent tool works at any run; replay judges a recorded one again"
        raise CodaError(f"{found.id} is not a run of claude or messages", hint=hint)
    try:
        options = TypeAdapter(authors.Options).validate_python(first.options)
    except ValueError as error:
        raise CodaError(f"{found.folder} has no options of an author: {reason(error)}") from error
    budget = options.budget.changed(max_usd, limit or [])
    who = _made(str(first.author), replace(options, budget=budget), workspace)
    with progress(usd=first.spent.usd or 0.0) as observer:
        outcome = pipeline.resume(workspace, found, who, observer)
    return judged(outcome)


@reported()
def prompt(
    spec: SpecName,
    cost: Annotated[bool, typer.Option("--cost", help="What each part costs, instead.")] = False,
    model: Model = None,
    base_url: BaseUrl = "",
) -> Reply:
    """Print exactly what claude would be sent first for SPEC, and its tokens."""
    workspace = here()
    loaded = load_spec(resolve_spec(spec, workspace))
    with waiting(f"prompt of {loaded.name}"):
        sent = prompting.request(loaded)
        schemas = json.dumps(sent["tools"], indent=1)
        texts = {**prompting.common(), **prompting.opening(loaded)}
        little = {"messages": [{"role": "user", "content": "x"}]}
        alone = [{"messages": [{"role": "user", "content": text}]} for text in texts.values()]
        asked = [sent, little, {**little, "tools": sent["tools"]}, *alone] if cost else [sent]
        server = server_named(base_url)
        (total, *counts), how = _tokens(asked, model_named(model or ""), server)
    counted = how == "counted"
    if not cost:
        shown = f"# The tools, as schemas\n\n{schemas}", prompting.joined(texts)
        text = "\n\n".join([*shown, f"[{total} tokens, {how}]"])
        return Reply({**sent, "tokens": total, "counted": counted}, text)
    sizes = {"tools": len(json.dumps(sent["tools"])), **{k: len(v) for k, v in texts.items()}}
    rows = [(name, size, count - counts[0])
            for (name, size), count in zip(sizes.items(), counts[1:], strict=True)]  # fmt: skip
    rows.append(("all", sum(sizes.values()), total))
    parts = [dict(zip(("part", "characters", "tokens"), row, strict=True)) for row in rows]
    text = columns([("part", "characters", "tokens"), *rows])
    return Reply({"parts": parts, "counted": counted}, f"{text}\n[tokens {how}]")


def _tokens(asked: Sequence[JsonObject], model: str, server: str) -> tuple[list[int], str]:
    """Count the tokens of requests by the API, or estimate them."""
    guessed = [prompting.estimated_tokens(sent) for sent in asked]
    if not (key := KEYS.take()):
        return guessed, "estimated: no key is set to count them"
    import anthropic

    count = Client(key, base_url=server).sdk.messages.count_tokens
    try:
        return [count(model=model, **sent).input_tokens for sent in asked], "counted"
    except anthropic.APIError as error:
        return guessed, f"estimated: {error.message}"


@reported(json_too=False, compiles=True)
def mcp(
    device: DeviceOption = "auto",
    no_commit: NoCommit = False,
    install: Annotated[
        Literal["claude", "codex"] | None,
        typer.Option(help="Write the server into this client's configuration, instead."),
    ] = None,
) -> Reply:
    """Serve the tools to an agent over MCP, on stdin and stdout."""
    workspace = find()
    if install:
        return Reply(None, installed(install, workspace))
    serve(Connection(workspace, device, Calls(), commit=not no_commit))
    return Reply(None)


def models_of(text: str) -> tuple[str, ...]:
    """Read --models: names apart by commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def price_of(price_in: float | None, price_out: float | None) -> Price | None:
    """Read --price-in and --price-out; None where neither is given.

    Raises:
        CodaError: only one of them is given, or one is no price.
    """
    if (price_in is None) != (price_out is None):
        raise CodaError("--price-in and --price-out go together")
    return None if price_in is None or price_out is None else Price.of(price_in, price_out)


def _made(name: str, options: authors.Options, workspace: Workspace) -> authors.Author:
    """Make an author, and say its limits."""
    who = authors.make(name, options, workspace)
    if who.limits and not quiet():
        typer.echo(who.limits)
    return who
