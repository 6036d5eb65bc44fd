"""Functions by `fuse` beside PyTorch: at reduced size, interpreted, by a clock that is no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.plans.fused import fuse
from coda_agent.evals import fuse_functions, pages
from coda_agent.evals.fuse_cases import CASES
from coda_agent.evals.layer_speed import measure, write_page
from coda_agent.primitives.errors import CodaError

SMALL = ["gelu", "cross_entropy", "modulated_gelu"]


class Clock:
    PROTOCOL = 0

    def interleave(self, contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> Any:
        for call in contenders.values():
            call(0)
        return {n: Samples(({"ours": 10.0, "eager": 15.0}[n],) * rounds) for n in contenders}

    def steady(self, contenders: Any) -> Any: ...
    def gpu_state(self) -> Any: ...


def run(root: Path, **options: Any) -> list[str]:
    said = list[str]()
    machine = {"gpu": {"name": "NVIDIA H200"}, "packages": {}}
    measure(root, "fuse", clock=Clock(), machine=machine, rounds=10, device="cpu", shrink=64,
            say=said.append, **options)  # fmt: skip
    return said


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_thirty_functions_take_what_their_cases_give() -> None:
    assert len(CASES) == 30
    for name, case in CASES.items():
        function = getattr(fuse_functions, name)
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        assert (name, *case.shapes) == (case.name, *arguments)
        with torch.device("meta"):  # at their own sizes
            function(*(torch.empty(s, dtype=torch.int64 if x == "target" else torch.bfloat16)
                       for x, s in case.shapes.items()))  # fmt: skip


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(0.34)
def test_each_is_as_right_as_pytorchs(name: str) -> None:
    case = CASES[name].on("cpu", 64)
    function, given = getattr(fuse_functions, name), case.values | case.constants
    args = [given[x] for x in CASES[name].shapes]
    fused = fuse(function, judged=False)

    def results(call: Any, *args: Any) -> list[torch.Tensor]:
        found = call(*args)
        return [x.double() for x in (found if isinstance(found, tuple) else (found,))]

    truth = results(function, *(x.double() if x.is_floating_point() else x for x in args))
    for got, own, true in zip(results(fused, *args), results(function, *args), truth, strict=True):
        assert (got - true).norm() <= 1.1 * (own - true).norm() + 1e-4 * true.norm()


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
def test_cases_are_kept_and_a_page_says_how_fast_they_are(tmp_path: Path) -> None:
    assert [line.partition(":")[0] for line in run(tmp_path, cases=SMALL)] == SMALL
    file = tmp_path / "evals" / "results" / "fuse-nvidia-h200.json"
    cells = json.loads(file.read_text())["cells"]
    for cell in cells.values():
        assert cell["tokens"] in (128, 512)
        assert cell["forward"]["over"]["eager"] == {"ratio": 1.5, "low": 1.5, "high": 1.5}
        assert cell["absent"] == {"compile": "needs a GPU"} and cell["way"] == "the plan"
        assert 0.0 < cell["errors"]["ours"] <= 1.1  # at these sizes single roundings count
    assert run(tmp_path, cases=SMALL) == [f"{case}: in the record" for case in SMALL]
    for name, ratio, high in zip(SMALL, (0.5, 2.0, 0.9), (0.9, 2.5, 1.1), strict=True):
        over = {"ratio": ratio, "low": ratio, "high": high}
        cells[name]["forward"]["over"]["compile"] = over
    cells["gelu"]["way"] = "torch.compile"
    pages.write_record(file, {"suite": "fuse", "date": "2026-11-23"}, cells)
    text = write_page(tmp_path, "fuse")[1].read_text()
    assert "0.965 times as fast in geometric mean of 3 functions" in text  # the third root of 0.9
    assert "Slower by their whole interval: gelu." in text
    assert "Ours is torch.compile in: gelu." in text
    assert "| gelu | forward | 10 | 1.500 (1.500–1.500) | 0.500 (0.500–0.900) |" in text
    left = [case for case in CASES if case not in SMALL]
    assert f"Not measured yet: {', '.join(left)}." in text


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match=r"no case .attention., expected gelu, gelu_tanh"):
        run(tmp_path, cases=["attention"])
    with pytest.raises(CodaError, match="no record of fuse"):
        write_page(tmp_path, "fuse")
