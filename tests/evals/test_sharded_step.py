"""A training step in two processes: the losses of one process, and the time of the slower one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.evals import layer_speed
from coda_agent.evals.layer_speed import CASES, measure, write_page
from coda_agent.evals.sharded_step import Rounds, Sharded
from coda_agent.evals.train_step import COURSE, Step, Training
from coda_agent.primitives.errors import CodaError, MachineError
from tests.evals.test_layer_speed import MACHINE, Clock
from tests.ranks import on_two_ranks

CASE = "train-1b on 2 GPUs"


@pytest.mark.sampled(0.34, "two ranks")
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    said = list[str]()
    file = measure(tmp_path, clock=Clock(), machine=MACHINE, cases=[CASE], rounds=10, device="cpu",
                   names=["packed", "compile"], shrink=64, say=said.append)  # fmt: skip
    cell = json.loads(file.read_text("utf-8"))["cells"][CASE]
    assert cell["absent"] == {"compile": "needs a GPU"} and cell["tokens"] == 2 * 64
    assert cell["step"]["times"].keys() == {"ours", "packed"}

    both = Training(32, 128, 2, 2, 1, 2016, 500000.0, batch=2, length=64)
    plain = Step(both, "cpu")
    expected, losses = list[float](), list[float]()
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=3e-4)
    for _ in range(COURSE):
        loss = plain.model(input_ids=plain.ids, labels=plain.ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert cell["losses"]["ours"] == cell["losses"]["packed"]
    assert cell["losses"]["ours"] == pytest.approx(expected[0], rel=1e-4)
    assert expected[-1] < expected[0] - 0.3
    assert cell["course"].keys() == {"ours", "eager", "ours alone", "eager alone"}
    for losses in cell["course"].values():
        assert losses == pytest.approx(expected, rel=1e-3)
    text = write_page(tmp_path)[1].read_text()
    assert f"In {CASE} each GPU has 8 sequences of its own" in text
    assert f"| {CASE} | ours on one GPU | {cell['course']['ours alone'][0]:.3f} |" in text


def test_a_machine_with_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(layer_speed, "CASES", {CASE: CASES[CASE]})
    monkeypatch.setitem(layer_speed.SUITES, "layers", layer_speed.CASES)
    said = list[str]()
    given: dict[str, Any] = {"clock": Clock(), "machine": MACHINE, "say": said.append}
    measure(tmp_path, **given)
    why = "it trains on 2 GPUs, and this machine has 1"
    assert said == [f"{CASE}: left, since {why}"]
    with pytest.raises(MachineError, match=why):
        measure(tmp_path, cases=[CASE], **given)


def test_what_a_process_raises_is_one_line() -> None:
    what = Sharded(32, 128, 2, 3, 2, 2016, 500000.0, batch=1, length=64)
    with pytest.raises(CodaError, match=r"a process of a training step failed: [^ ]+Error: .+"):
        what.on("cpu", 1).measured({"ours"}, Clock(), 10)


@pytest.mark.sampled(0.34, "two ranks")
def test_a_round_takes_as_long_as_the_slower_rank() -> None:
    on_two_ranks(_rounds)


def _rounds(mesh: Any) -> None:
    rank, seen = mesh.get_rank(), list[tuple[str, int]]()

    def call(name: str, us: float) -> Any:
        def run(i: int) -> None:
            seen.append((name, i))
            time.sleep(us / 1e6)

        return run

    pause = {"ours": (20e3, 60e3)[rank], "other": (120e3, 30e3)[rank]}
    found = Rounds("cpu").interleave({n: call(n, us) for n, us in pause.items()}, 4)
    assert 60e3 <= found["ours"].median_us < 120e3 <= found["other"].median_us
    assert all(len(samples.times_us) == 4 for samples in found.values())
    assert sorted(seen) == [(n, i) for n in ("other", "ours") for i in range(-1, 4)]
    orders: list[Any] = [None, None]
    torch.distributed.all_gather_object(orders, seen)
    assert orders[0] == orders[1]  # ranks that are not in one call together wait for ever
