"""`evaluate` against numbers computed here, artifacts by pages, and a failed check's text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coda_agent.agent import pipeline, workspace
from coda_agent.agent.events import RunStarted
from coda_agent.agent.judge import Finding, GateResult, Verdict
from coda_agent.agent.workbench import Workbench
from coda_agent.agent.workbench.evaluating import inputs_of, table
from coda_agent.agent.workbench.feedback import LIMIT, feedback, merged
from coda_agent.agent.workbench.measures import PAGE
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import load_spec
from tests.agent.verdicts import call

ROOT = Path(__file__).parents[3]
HEAD = "from coda_agent.primitives import HalfTile, Tile, epilogue, pairs, sigmoid, swiglu\n\n\n"
RIGHT = (
    '@epilogue(D=Tile, O=HalfTile)\ndef gemm_swiglu(acc):\n    """O"""\n'
    '    gate, up = pairs(acc)\n    return {"D": acc, "O": swiglu(gate, up)}\n'
)
WRONG = RIGHT.replace("swiglu(gate, up)", "sigmoid(gate) * up")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    monkeypatch.chdir(tmp_path)
    made, _ = workspace.init(tmp_path)
    spec = ROOT / "specs" / "gemm_swiglu.md"
    begin = RunStarted(author="me", device="cpu", commit=False)
    with pipeline.opened(made, spec, begin, lambda *_: None) as opened:
        yield opened


def say(bench: Workbench, tool: str, **given: object) -> str:
    result = call(bench, tool, given)
    assert result.ok, result.text
    return result.text


def numbers(text: str, name: str) -> list[float]:
    return [float(x) for x in re.findall(rf"{name} (\S+?)[;\s]", text)]


def test_the_candidate_on_given_numbers(bench: Workbench) -> None:
    say(bench, "write_candidate", text=HEAD + WRONG)
    acc = [1.0, 2.0, -3.0, 0.5]
    text = say(bench, "evaluate", values={"acc": acc})
    half = text[text.index("\nO (") :]
    gate, up = torch.tensor(acc[::2]).double(), torch.tensor(acc[1::2]).double()
    assert numbers(half, "reference O") == pytest.approx(
        (gate * gate.sigmoid() * up).tolist(), 1e-5
    )
    assert numbers(half, "candidate") == pytest.approx((gate.sigmoid() * up).tolist(), 1e-5)
    assert "acc (1, 2)" in half and "acc (-3, 0.5)" in half
    assert numbers(text[: text.index("\nO (")], "reference D") == acc


def test_infinities_and_nan_are_shown_as_they_are(bench: Workbench) -> None:
    say(bench, "write_candidate", text=HEAD + RIGHT)
    acc = [math.inf, 1.0, -math.inf, 2.0, math.nan, 3.0, 1e39, 1.0]
    whole, _, half = say(bench, "evaluate", values={"acc": acc}).partition("\nO (")
    shown = ["inf", "1", "-inf", "2", "nan", "3", "1e+39", "1"]
    assert re.findall(r"candidate (\S+) ", whole) == shown
    assert re.findall(r"reference D (\S+);", whole) == shown
    assert re.findall(r"stored (\S+)\)", whole) == [x.replace("1e+39", "inf") for x in shown]
    assert re.findall(r"candidate (\S+) ", half) == ["inf", "nan", "nan", "1e+39"]
    inputs = inputs_of(bench.spec, {}, {"acc": [math.inf, *[1.0] * 400]})
    half_more = read_programs(HEAD + RIGHT.replace('"D": acc', '"D": acc * 1.5'))
    found = table(bench.spec, {}, half_more, inputs)
    places = re.findall(r"\[\d+, (\d+)\]", found)
    assert places[0] != "0"  # equal infinities are not what differs most


def test_an_expression_and_an_earlier_attempt(bench: Workbench) -> None:
    text = say(bench, "evaluate", expression="g, u = pairs(acc)\ng + u", values={"acc": [1.5, 2]})
    assert numbers(text, "expression") == [3.5]
    say(bench, "write_candidate", text=HEAD + WRONG)
    said = say(bench, "check", level="interpret")
    assert "should be" in said or "is due" in said
    assert len(said) <= LIMIT
    say(bench, "write_candidate", text=HEAD + RIGHT)
    text = say(bench, "evaluate", against=1, failing=True)
    assert text.startswith("where attempt 1 failed, gemm_swiglu:\nD (")
    half = text[text.index("\nO (") :]
    truth = numbers(half, "reference O")
    assert numbers(half, "candidate") == pytest.approx(truth, rel=1e-5)
    assert numbers(half, "attempt 1") != pytest.approx(truth, rel=1e-2)


def test_the_failing_case_is_that_of_the_candidate(bench: Workbench) -> None:
    jumps = WRONG.replace(
        "sigmoid(gate) * up", "swiglu(gate, up) + where(equal(up, 0.5), 9.0, 0.0)"
    )
    jumps = HEAD.replace("swiglu", "equal, swiglu, where") + jumps
    say(bench, "write_candidate", text=jumps)
    said = say(bench, "check", level="interpret")
    assert "halves of whole numbers" in said  # which are none of the draws with a case's name
    case = say(bench, "evaluate", failing=True)
    half = case[case.index("\nO (") :]
    truth, got = numbers(half, "reference O")[0], numbers(half, "candidate")[0]
    assert got - truth == pytest.approx(9.0, rel=1e-4)
    say(bench, "write_candidate", text=HEAD + RIGHT)
    say(bench, "check", level="interpret")
    refused = call(bench, "evaluate", {"failing": True})
    assert refused.text.startswith("there is no failing case: attempt 2 passed")
    say(bench, "write_candidate", text=jumps)
    assert say(bench, "evaluate", failing=True) == case


def test_what_cannot_be_evaluated_is_said_in_a_line(bench: Workbench) -> None:
    for given, said in (
        ({}, "there is no candidate yet"),
        ({"expression": "relux(acc)"}, "unknown name 'relux'"),
        ({"expression": "acc", "values": {"zz": 1}}, "no operand named 'zz' (there are acc)"),
        (
            {"expression": "acc", "failing": True},
            "there is no failing case: nothing was checked yet",
        ),
        ({"expression": "acc", "against": 3}, "no attempt named '3'"),
        ({"expression": " "}, "the expression is empty"),
    ):
        result = call(bench, "evaluate", given)
        assert not result.ok and said in result.text and "\n" not in result.text


def test_an_artifact_is_read_in_pages(bench: Workbench) -> None:
    whole = "".join(f"line {i}\n" for i in range(1000))
    name = bench.log.artifact("long.txt", whole)
    pages = []
    for page in range(1, -(-len(whole) // PAGE) + 1):
        head, _, body = say(bench, "read_artifact", name=name, page=page).partition("\n")
        assert head == f"{name}, page {page} of 3"
        pages.append(body)
    assert "".join(pages) == whole
    assert "has 3 pages" in call(bench, "read_artifact", {"name": name, "page": 4}).text
    assert not call(bench, "read_artifact", {"name": "../events.jsonl"}).ok


def copies(count: int, **where: object) -> list[Finding]:
    about = {"output": "O", "fault": "wrong_sign", "program": "k", "dtype": "bfloat16", **where}
    return [
        Finding(message=f"O is wrong: error {i}; `r` has the other sign", where={**about, "tile": f"{i}x{i}"})
        for i in range(count)
    ]  # fmt: skip


def failed(findings: list[Finding]) -> str:
    gates = [GateResult(name="numerics", passed=False, findings=findings)]
    return feedback(Verdict(passed=False, level=None, gates=gates, not_shown=["x"]), "gpu", 2)


def test_a_fault_is_told_once_with_its_other_tiles() -> None:
    found = [*copies(3), *copies(1, output="amax"), Finding(message="spills")]
    assert [len(group) for group in merged(found)] == [3, 1, 1]
    text = failed(found)
    assert "3 faults in 5 findings" in text
    assert text.count("has the other sign") == 2
    assert "also   k bfloat16 1x1, k bfloat16 2x2" in text
    assert "read_artifact artifacts/verdict-2.json" in text


def test_a_failed_check_is_short_however_much_is_wrong() -> None:
    many = [f for i in range(30) for f in copies(40, output=f"O{i}", rows=[[1, 0.5, 0.25]] * 4)]
    text = failed(many)
    assert len(text) <= LIMIT and "30 faults in 1200 findings" in text
    assert "rows   1: got 0.5, due 0.25" in text


@pytest.mark.parametrize(("element", "stored"), [("", "0.333984"), ("float16", "0.333252")])
def test_a_finding_is_shown_in_its_own_element_type(element: str, stored: str) -> None:
    spec = load_spec(ROOT / "specs" / "gemm_swiglu.md")
    inputs = inputs_of(spec, {}, {"acc": 1 / 3})
    programs = {"candidate": read_programs(HEAD + RIGHT)["gemm_swiglu"]}
    text = table(spec, {}, programs, inputs, given=1, element=element)
    assert f"candidate 0.333333 (stored {stored})" in text
