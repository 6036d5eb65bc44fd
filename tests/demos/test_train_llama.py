"""The training demonstration: losses beside plain PyTorch's, going on after interruptions, bad input."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from coda_agent.demos.train_llama import results, training
from coda_agent.demos.train_llama.__main__ import app
from coda_agent.demos.train_llama.model import SIZES, Llama, LlamaByKernels
from coda_agent.demos.train_llama.training import Settings, learning_rate, train
from coda_agent.primitives.errors import CodaError, MachineError
from tests.layers import llama

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper")
SETTINGS = Settings(steps=3, seeds=2, size="tiny", device="cpu", compare=True)
Losses = dict[tuple[str, int], list[float]]


def losses(records: list[dict[str, Any]] | None) -> Losses:
    assert records is not None
    return {(r["form"], r["seed"]): r["losses"] for r in records}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Of a run that nothing interrupted."""
    return losses(train(SETTINGS, tmp_path_factory.mktemp("whole") / "out"))


def test_the_plain_model_is_a_llama() -> None:
    """Its loss and gradients are those of another one, of Hugging Face's structure, in float32."""
    torch.manual_seed(0)
    s = SIZES["tiny"]
    config = llama.Config(256, s.width, s.ffn, s.layers, s.heads, s.kv_heads, s.head_dim)
    ours, theirs = Llama(s), llama.Llama(config)
    renamed = {"embed.": "model.embed_tokens.", "head.": "lm_head."}
    state = ours.state_dict()
    for name, tensor in state.items():
        head = name.split(".")[0] + "."
        theirs.get_parameter(renamed.get(head, f"model.{head}") + name[len(head) :]).data.copy_(
            tensor
        )
    ids = torch.randint(0, 256, (2, 17))
    loss, expected = ours(ids[:, :-1], ids[:, 1:]), theirs(ids, ids).loss
    # The other one rounds its cosines to bfloat16.
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(
        ours.embed.weight.grad, theirs.model.embed_tokens.weight.grad, rtol=0, atol=2e-4
    )


def test_loss_and_gradient_are_no_further_from_float64_than_pytorch_s() -> None:
    """With weights so large that each part counts: turned the wrong way, the gradient's error was 57 times as large."""
    torch.manual_seed(3)
    plain = Llama(SIZES["tiny"])
    for p in plain.parameters():
        p.data = (p * 3).bfloat16()
    ours, exact = LlamaByKernels(SIZES["tiny"]).bfloat16(), copy.deepcopy(plain).double()
    ours.load_state_dict(plain.state_dict())
    # float64 gets the cosines that the others get: they are inputs.
    exact.places = lambda ids, dtype: tuple(t.to(dtype) for t in plain.places(ids, torch.bfloat16))  # pyright: ignore
    ids = torch.randint(0, 256, (4, 33))
    errors = []
    for model in (ours, plain):
        loss, truth = model(ids[:, :-1], ids[:, 1:]), exact(ids[:, :-1], ids[:, 1:])
        grad, expected = (
            torch.autograd.grad(v, m.embed.weight)[0] for v, m in ((loss, model), (truth, exact))
        )
        apart = (grad - expected).norm() / expected.norm(), abs(loss.detach() - truth.detach())
        errors.append([float(t) for t in apart])
    assert errors[0][0] <= errors[1][0]
    assert errors[0][1] <= 0.01


def test_losses_are_those_of_pytorch(whole: Losses) -> None:
    """In three steps bfloat16 took them 0.0009 apart at most; attention times 0.9 took them 0.008."""
    for seed in range(SETTINGS.seeds):
        plain, ours = whole["PyTorch", seed], whole["coda-agent", seed]
        assert plain[0] - plain[-1] > 0.2
        assert ours == pytest.approx(plain, abs=0.003)
    assert whole["PyTorch", 0] != whole["PyTorch", 1]


def test_it_goes_on_wherever_it_was_interrupted(whole: Losses, tmp_path: Path) -> None:
    """After each step it is stopped and begun again."""
    said = list[int]()
    for _ in range(SETTINGS.steps * SETTINGS.seeds):
        assert not (tmp_path / "results.json").exists()
        found = train(
            SETTINGS, tmp_path, tick=lambda done, _: said.append(done), stopped=lambda: True
        )
        assert found is None
    assert said == [1, 2, 3, 4, 5, 6]
    assert losses(train(SETTINGS, tmp_path)) == whole
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert losses(train(SETTINGS, tmp_path)) == whole  # out of results.json


def test_a_killed_run_goes_on_from_the_last_state(whole: Losses, tmp_path: Path) -> None:
    def die(done: int, _: str) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, tmp_path, save_every=2, tick=die)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (state["seed"], len(state["runs"]["PyTorch"]["record"]["losses"])) == (1, 2)
    assert losses(train(SETTINGS, tmp_path)) == whole


def test_batches_are_of_the_text_and_of_seed_and_step() -> None:
    tokens = torch.frombuffer(bytearray(training.text()), dtype=torch.uint8)
    ids, targets = training._batch(tokens, 0, 0, "tiny")
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()) in training.text() for row in ids)
    for seed, step in ((0, 1), (1, 0)):
        assert not torch.equal(ids, training._batch(tokens, seed, step, "tiny")[0])


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def record(form: str, seed: int, end: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "form": form, "seed": seed, "losses": [5.0] * 18 + [end + 0.5, end - 0.5],
        "seconds": seconds, "peak_mib": 100 + seed,
    }  # fmt: skip


# Twenty steps, so that the last tenth ends at `end` where all of them have a mean of 0.9 · 5 + 0.1 · end.
@pytest.mark.parametrize(
    ("end", "early", "within"),
    [
        (2.03, 5.0, True),
        (2.11, 5.0, True),
        (2.12, 5.0, False),
        (1.9, 5.0, False),
        (2.02, 5.02, False),
    ],
)
def test_seed_noise(end: float, early: float, within: bool) -> None:
    """Ends of 2.00, 2.02 and 2.04 have s = 0.02; t of two degrees of freedom is 4.303."""
    plain = [record("PyTorch", seed, 2 + 0.02 * seed, []) for seed in range(3)]
    ours = [record("coda-agent", seed, 2.02, []) for seed in range(2)]
    other = record("coda-agent", 2, end, [])
    other["losses"][:18] = [early] * 18
    found, (whole, last) = results.verdict([*plain, *ours, other])
    half = 4.303 * 0.02 * (4 / 3) ** 0.5
    assert found is within
    assert f"2.0200 ± {half:.4f}" in last and f"4.7020 ± {half / 10:.4f}" in whole
    assert ("not all" in last) == (abs(end - 2.02) > half)
    assert ("not all" in whole) == (abs(0.9 * early + 0.1 * end - 4.702) > half / 10)
    assert f"most {max(abs(end - 2.04), 0.02):.4f} from" in last


def test_one_seed_shows_no_noise() -> None:
    found, lines = results.verdict(
        [record("PyTorch", 0, 2.0, []), record("coda-agent", 0, 9.0, [])]
    )
    assert found and "not measured" in lines[0]


def test_the_page_is_of_its_record() -> None:
    """docs/training.md says what the record says."""
    root = Path(__file__).parents[2]
    held = json.loads((root / "evals/results/train-llama-nvidia-h200.json").read_text())
    page, records = (root / "docs/training.md").read_text(), held["records"]
    sizes = SIZES[held["settings"]["size"]]
    for row in results.rows(records, sizes.batch * sizes.context):
        assert f"| {' | '.join(row)} |" in page
    for line in results.verdict(records)[1]:
        assert line in page
    assert held["machine"]["device"] in page


def test_the_table() -> None:
    records = [
        record("PyTorch", 0, 2.0, [0.03, 0.02, 0.02]),
        record("coda-agent", 0, 2.25, [0.02, 0.01, 0.016]),
        record("PyTorch", 1, 3.0, [0.02]),
        record("coda-agent", 1, 3.5, [0.02]),
    ]
    _, plain, ours = results.rows(records, 8192)
    assert plain == ("PyTorch", "2.0000 3.0000", "20.00 (20.00–27.50)", "1.000", "409600", "101")
    # Ratios are 1.5, 2, 1.25 and 1.
    assert ours == ("coda-agent", "2.2500 3.5000", "18.00 (11.50–20.00)", "1.375", "455111", "101")
    assert results.rows(records[1:2], 8192)[1][3] == ""


def test_the_curves(tmp_path: Path) -> None:
    records = [
        record(form, seed, 2.0 + seed, []) for form in ("PyTorch", "coda-agent") for seed in (0, 1)
    ]
    losses, apart = results.panels(records)
    assert {form: len(lines) for form, lines in losses.lines.items()} == {
        "PyTorch": 2, "coda-agent": 2
    }  # fmt: skip
    assert losses.lines["PyTorch"] == losses.lines["coda-agent"] and losses.band is None
    # Both of ours lie on an edge of the band, since they are PyTorch's two.
    assert apart.band and [*apart.band] == apart.lines["coda-agent"] and len(apart.lines) == 1
    # Of the last ten steps two differ, by 1 between seeds.
    assert -apart.band[0][-1] == apart.band[1][-1] == pytest.approx(0.1)
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MachineError, match="a figure needs matplotlib"):
            results.draw(records, tmp_path / "loss.svg")
    else:
        results.draw(records, tmp_path / "loss.svg")
        assert "<svg" in (tmp_path / "loss.svg").read_text()


def invoked(*args: str) -> Result:
    return CliRunner().invoke(app, [*args, "--device", "cpu"])


def test_the_command_goes_on_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Losses
) -> None:
    args = "--steps", "3", "--seeds", "2", "--out", str(tmp_path / "out")
    plain, calls = training._Run.step, list[int]()

    def struck(self: Any, *batch: Any) -> None:
        calls.append(0)
        if len(calls) == 9:  # the first of two models, in the second seed's second step
            os.kill(os.getpid(), signal.SIGINT)
        plain(self, *batch)

    monkeypatch.setattr(training._Run, "step", struck)
    done = invoked(*args)
    assert (done.exit_code, len(calls)) == (130, 10)
    assert "state.pt" in done.output
    done = invoked(*args)
    assert (done.exit_code, len(calls)) == (0, 12), done.output
    assert "95 of 100 lie" in done.output and "not timed" in done.output
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert losses(kept["records"]) == whole


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--size", "huge"], "no size 'huge', expected tiny or 180m"),
        (["--steps", "0"], "--steps"),
        (["--seeds", "x"], "--seeds"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_bad_arguments(args: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "out"), *args])
    assert done.exit_code == 2 and said in done.output
    assert "Traceback" not in done.output and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--out", str(tmp_path), "--device", "cuda"])
    assert done.exit_code == 3 and "needs a Hopper GPU" in done.output


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = invoked("--out", str(file), "--steps", "1")
    assert done.exit_code == 2 and "file" in done.output and "Traceback" not in done.output
    (tmp_path / "state.pt").write_bytes(b"no state")
    with pytest.raises(CodaError, match=r"state\.pt cannot be read.*remove it"):
        train(SETTINGS, tmp_path)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    assert train(SETTINGS, tmp_path, stopped=lambda: True) is None
    with pytest.raises(CodaError, match=r"state\.pt is of a run with steps 3, expected 4"):
        train(replace(SETTINGS, steps=4), tmp_path)
    alone = replace(SETTINGS, steps=1, seeds=1, compare=False)
    (tmp_path / "state.pt").unlink()
    assert [r["form"] for r in train(alone, tmp_path) or []] == ["coda-agent"]
    with pytest.raises(CodaError, match=r"results\.json is of a run with compare False"):
        train(replace(alone, compare=True), tmp_path)
