"""The ladder: the composer for nothing, then models, each with what the others left."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import SPECS, log_of, run_of
from pydantic import TypeAdapter
from server import Reply, Serve, Server, call, error
from typer.testing import CliRunner

from coda_agent.agent import authors, pipeline
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.client import Stopped
from coda_agent.agent.cli import app
from coda_agent.agent.events import AuthorStarted, Responded
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

MAXOUT = SPECS / "catalogue" / "gemm_maxout.md"
SOLUTION = Path(__file__).parents[1] / "solutions" / "gemm_maxout.py"
HAIKU, SONNET = "claude-haiku-5-5", "claude-sonnet-5-5"


@pytest.fixture
def served(serve: Serve) -> Serve:
    """A server of every model, whose script may ask which one is called."""

    def start(script: Any) -> Server:
        made = serve(lambda body, number: replace(script(body, number), model=body["model"]))
        made.model = None
        return made

    return start


def made(where: Workspace, **options: Any) -> Author:
    return authors.make("ladder", Options(**options), where)


def climb(where: Workspace, who: Author, spec: Path = MAXOUT) -> pipeline.Outcome:
    return pipeline.generate(where, spec, who, lambda *_: None, device="cpu")


def test_what_the_composer_writes_costs_nothing(where: Workspace, served: Serve) -> None:
    server = served(lambda *_: pytest.fail("a model was asked"))
    outcome = climb(where, made(where), SPECS / "gemm_swiglu.md")
    assert outcome.passed and not server.bodies and outcome.cost == ""
    assert where.kernel("gemm_swiglu").evidence.author == "composer"


def test_a_stronger_model_goes_on_from_what_a_weaker_one_left(
    where: Workspace, served: Serve
) -> None:
    """Haiku has a candidate that fails, and gives up; Sonnet is shown it, and solves the spec."""
    solution = SOLUTION.read_text("utf-8")
    wrong = "import os\n" + solution
    script = [
        Reply([call("write_candidate", {"text": wrong}, "a"), call("submit", {}, "b")]),
        Reply([call("give_up", {"reason": "too hard"}, "c")]),
        Reply([call("edit_candidate", {"old": "import os\n", "new": ""}, "d"),
               call("submit", {}, "e")]),
    ]  # fmt: skip
    server = served(lambda body, number: script[number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET)))
    assert outcome.passed and outcome.commit
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{SONNET}"
    sent = server.requests()
    assert [body["model"] for body in sent] == [HAIKU, HAIKU, SONNET]
    haiku, sonnet = (
        "\n".join(b["text"] for b in sent[i]["messages"][0]["content"]) for i in (0, 2)
    )
    for first in (haiku, sonnet):
        assert "HOLE_1(acc + bias)" in first and "max_pool2d_with_indices" in first
    assert "The best that others have tried" not in haiku
    assert wrong.strip() in sonnet and "FAILED at static" in sonnet
    assert len(sent[2]["messages"]) == 1  # nothing of the other's transcript
    writers = [event.author for event in log_of(where) if isinstance(event, AuthorStarted)]
    assert writers == ["ladder", "composer", f"claude:{HAIKU}", f"claude:{SONNET}"]


def test_the_last_one_to_give_up_ends_the_run(where: Workspace, served: Serve) -> None:
    served(lambda _, number: Reply([call("give_up", {"reason": f"no {number}"}, "a")]))
    outcome = climb(where, made(where, models=(HAIKU,), samples=2))
    assert (outcome.passed, outcome.reason) == (False, "gave up: no 1")


def test_a_model_that_refuses_leaves_the_run_to_the_next(where: Workspace, served: Serve) -> None:
    refusal = Reply([], stop_reason="refusal", details={"type": "refusal", "category": "x"})
    give_up = Reply([call("give_up", {"reason": "too hard"}, "a")])
    server = served(lambda _, number: [refusal, give_up][number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET)))
    assert outcome.reason == "gave up: too hard" and len(server.requests()) == 2
    served(lambda _, number: refusal)
    with pytest.raises(Stopped, match="the model refused: x"):
        climb(where, made(where, models=(HAIKU,)), SPECS / "catalogue" / "gemm_probit.md")


def test_an_interrupted_climb_goes_on_with_its_rung(where: Workspace, served: Serve) -> None:
    solution = SOLUTION.read_text("utf-8")
    give_up = Reply([call("give_up", {"reason": "too hard"}, "a")])
    write = Reply([call("write_candidate", {"text": solution}, "b")])
    stop = error(400, "invalid_request_error")
    served(lambda _, number: [give_up, write, stop][number])
    who = made(where, models=(HAIKU, SONNET))
    with pytest.raises(Stopped):
        climb(where, who)
    server = served(lambda *_: Reply([call("submit", {}, "c")]))
    outcome = pipeline.resume(where, run_of(where), who, lambda *_: None)
    assert outcome.passed
    (body,) = server.requests()
    assert body["model"] == SONNET and len(body["messages"]) == 3
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{SONNET}"


def test_each_rung_has_its_share(where: Workspace, served: Serve) -> None:
    """What is left is shared by the conversations to come, and no more than all of it is spent."""
    pages = Reply([call("list_demos", {}, "d")], usage={"output_tokens": 4000})
    server = served(
        lambda _, number: replace(pages, content=[call("list_demos", {}, f"d{number}")])
    )
    budget = authors.Budget(usd=1.5)
    outcome = climb(where, made(where, models=(SONNET, "claude-opus-5-5"), budget=budget))
    assert not outcome.passed and str(outcome.reason).startswith("budget: $1.50")
    usd = {SONNET: 0.0, "claude-opus-5-5": 0.0}
    for event in log_of(where):
        if isinstance(event, Responded):
            usd[event.model] += event.usd or 0.0
    assert 0.6 < usd[SONNET] <= 0.75 and 1.35 < sum(usd.values()) <= 1.5
    assert len(server.requests()) > 10


def test_a_rung_is_told_what_it_has_itself(where: Workspace, served: Serve) -> None:
    """The first takes a dollar of three; the second is told of the two that are left."""
    opus, dollar = "claude-opus-5-5", {"output_tokens": 100_000}
    give_up = call("give_up", {"reason": "too hard"}, "b")
    script = [Reply([give_up], usage=dollar), Reply([call("list_demos", {}, "a")]),
              Reply([{**give_up, "id": "c"}])]  # fmt: skip
    server = served(lambda _, number: script[number])
    climb(where, made(where, models=(SONNET, opus), budget=authors.Budget(usd=3.0)))
    sent = server.requests()
    first, second = sent[:2]
    assert [body["output_config"]["task_budget"]["total"] for body in (first, second)] == [
        150_000, 99_990,  # of the dollar and 100 tokens of prompt
    ]  # fmt: skip
    told = [body["messages"][0]["content"][-1]["text"] for body in (first, second)]
    assert "$1.50, at $10 for a million tokens of answers; 1000 turns; 120 minutes" in told[0]
    assert "$2.00, at $20 for a million tokens of answers; 999 turns; 120 minutes" in told[1]
    assert sent[2]["messages"][-1]["content"][-1]["text"] == "[$0.00 of $2.00 spent]"


def test_a_ladder_of_an_unknown_model_is_refused_at_once(where: Workspace, served: Serve) -> None:
    served(lambda *_: None)
    with pytest.raises(CodaError, match="use claude-sonnet-5-5"):
        made(where, models=("claude-sonnet-3",))
    with pytest.raises(CodaError, match="--models"):
        authors.make("ladder:x", Options(), where)


def test_one_model_is_the_whole_ladder(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by --model, or by the user's variable; models that are named go before that."""
    served(lambda *_: None)
    assert made(where, model=HAIKU).limits.startswith(f"the composer, then {HAIKU}: at most")
    monkeypatch.setenv("CODA_AGENT_MODEL", SONNET)
    alone = made(where)
    assert alone.limits.startswith(f"the composer, then {SONNET}: at most")
    assert made(where, models=(HAIKU,)).limits.startswith(f"the composer, then {HAIKU}: at most")
    monkeypatch.setenv("CODA_AGENT_MODEL", HAIKU)  # a run that is resumed keeps its own
    kept = TypeAdapter(Options).validate_python(alone.settings()["options"])
    assert authors.make("ladder", kept, where).limits == alone.limits
    with pytest.raises(CodaError, match="--model and --models exclude each other"):
        made(where, model=HAIKU, models=(SONNET,))


def test_what_only_a_ladder_takes_is_refused_by_others(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(lambda *_: None)
    monkeypatch.chdir(where.root)

    def said(*args: str) -> str:
        found = CliRunner().invoke(app, ["generate", "gemm_swiglu", "--device", "cpu", *args])
        assert found.exit_code == 2, found.output
        return found.stderr

    assert "the author claude takes no --samples (--author ladder does" in said(
        "--author", "claude", "--samples", "3"
    )
    assert "the author composer takes no --models" in said(
        "--author", "composer", "--samples", "3", "--models", "a,b"
    )
    assert "the price of unheard-of is not known" in said("--models", f"{HAIKU} , unheard-of")
