"""The author `messages`: a model of another server, which may know less and have no price."""

from dataclasses import replace
from typing import Any

import pytest
from bench import RIGHT, generate, log_of, run_of
from pydantic import TypeAdapter
from server import Reply, Serve, Server, call, text
from typer.testing import CliRunner

from coda_agent.agent import authors, pipeline
from coda_agent.agent.authors import Options
from coda_agent.agent.budget import Budget, Price
from coda_agent.agent.cli import app
from coda_agent.agent.events import Prompted, ToolFinished, Turned
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

LOCAL = "qwen3-coder"
WHOLE = [
    Reply([text("First."), call("write_candidate", {"text": RIGHT}, "1")], model=LOCAL),
    Reply([call("submit", {}, "1")], model=LOCAL),  # such servers count from one in each turn
]


@pytest.fixture
def keyless(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A server that no variable names and that wants no key."""

    def start(script: Any) -> Server:
        made = serve(script)
        for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
            monkeypatch.delenv(name)
        return made

    return start


def made(where: Workspace, url: str, **options: Any) -> Any:
    return authors.make(f"messages:{LOCAL}", Options(base_url=url, **options), where)


def test_a_run_without_key_price_or_anything_the_server_did_not_offer(
    where: Workspace, keyless: Serve
) -> None:
    server = keyless(WHOLE)
    outcome = generate(where, made(where, f"{server.url}/v1/"))
    assert outcome.passed and where.kernel("gemm_swiglu").evidence.author == "messages"
    first, second = server.requests()
    assert first["model"] == LOCAL == second["model"]
    assert not {"thinking", "output_config", "betas", "context_management", "cache_control"} & set(
        first
    )
    state = RunState.of(log_of(where))
    assert state.spent.usd is None and state.spent.tokens == 2 * (100 + 50)
    (prompt,) = [event for event in log_of(where) if isinstance(event, Prompted)]
    told = [event.text for event in log_of(where) if isinstance(event, ToolFinished)]
    told += [event.note for event in log_of(where) if isinstance(event, Turned)]
    assert state.spent.received == prompt.characters + sum(map(len, told))


def test_a_price_of_ones_own_is_counted(where: Workspace, keyless: Serve) -> None:
    server = keyless(WHOLE)
    generate(where, made(where, server.url, price=Price.of(1.0, 2.0), budget=Budget(answer=3000)))
    assert [request["max_tokens"] for request in server.requests()] == [3000, 3000]
    state = RunState.of(log_of(where))
    assert state.spent.usd == pytest.approx(2 * (100 * 1e-6 + 50 * 2e-6))


def test_without_a_price_tokens_are_the_budget_and_the_run_can_be_resumed(
    where: Workspace, keyless: Serve
) -> None:
    server = keyless([replace(WHOLE[0], usage={"input_tokens": 60_000}), *WHOLE])
    generate(where, made(where, server.url, budget=Budget(tokens=130_000)))
    state = RunState.of(log_of(where))
    assert state.reason == "budget: 130000 tokens; 60050 used" and state.spent.usd is None
    assert state.options and state.options["base_url"] == server.url
    options = TypeAdapter(Options).validate_python({**state.options, "budget": vars(Budget())})
    who = authors.make("messages", options, where)
    assert pipeline.resume(where, run_of(where), who, lambda *_: None).passed
    assert RunState.of(log_of(where)).spent.usd is None


def test_what_the_command_line_says(
    where: Workspace, keyless: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = keyless(WHOLE)
    monkeypatch.chdir(where.root)

    def run(*args: str, code: int = 0) -> str:
        found = CliRunner().invoke(app, list(args))
        assert found.exit_code == code, (found.stdout, found.stderr)
        return found.stderr if code else found.stdout

    author = ("generate", "gemm_swiglu", "--device", "cpu", "--author", f"messages:{LOCAL}")
    assert "needs a model's name and --base-url" in run(*author, code=2)
    at = ("--base-url", server.url)
    assert "needs the model's price" in run(*author, *at, "--max-usd", "3", code=2)
    assert "no http://HOST" in run(*author, "--base-url", "http://me:secret@host", code=2)
    said = run(*author, *at)
    assert f"{LOCAL}: at most 5000000 tokens (price unknown), 1000 steps" in said
    assert "2 steps, unknown" in run("runs", "last")
    assert " unknown" in run("runs")


def test_the_names_that_agents_at_the_tools_may_have() -> None:
    assert authors.agents_name("agent:some model 3.1") == "agent:some model 3.1"
    for name in ("claude", "composer", "messages:x", "replay:a", "", "a\nb", "x" * 81):
        with pytest.raises(CodaError, match="cannot be the name"):
            authors.agents_name(name)
    assert "Messages API" in authors.meaning("messages:x")
    assert authors.meaning("mcp:x").startswith("An agent at the tools")
