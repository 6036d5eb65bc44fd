"""The training: models in turn, interrupted at any step and gone on with."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda_agent.demos.train_llama.model import SIZES, Llama, LlamaByKernels
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole

# Steps after a start that are not timed: kernels are compiled in them.
_WARM = 5


@dataclass(frozen=True)
class Settings:
    """What decides the result.

    Attributes:
        steps: Of each model.
        seeds: 0 and up, so many.
        size: One of `model.SIZES`.
        device: "cuda" or "cpu"; on a CPU kernels are interpreted.
        compare: Whether PyTorch trains too, and on a GPU torch.compile with the first seed.
    """

    steps: int
    seeds: int
    size: str
    device: str
    compare: bool

    def forms(self, seed: int) -> list[str]:
        """What trains with a seed."""
        compiles = seed == 0 and self.device == "cuda"
        plain = ["PyTorch", *["torch.compile"] * compiles] if self.compare else []
        return [*plain, "coda-agent"]


def text() -> bytes:
    """What is learned: every shipped spec, one behind the other."""
    specs = files("coda_agent.specs")
    pages = [p for f in (specs, specs / "catalogue") for p in f.iterdir() if p.name.endswith(".md")]
    return b"\n".join(p.read_bytes() for p in sorted(pages, key=lambda p: p.name))


def train(
    settings: Settings,
    out: Path,
    *,
    save_every: int = 0,
    tick: Callable[[int, str], None] = lambda done, said: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]] | None:
    """Train, or go on with what `out` holds.

    Args:
        settings: Those of the run that `out` holds, if it holds one.
        out: A folder, made if it is not there.
        save_every: Steps from one state on disk to the next; 0 writes one only when stopped.
        tick: Called after each step of all models: steps done of all seeds, and the losses.
        stopped: Asked after each step.

    Returns:
        A record of each model: `form`, `seed`, `losses`, `seconds` of the steps that were timed,
        and `peak_mib`, what its own tensors and those of a step take at most, None on a CPU. None
        in place of records where training was stopped.

    Raises:
        CodaError: `out` holds another run, or what cannot be read.
    """
    data = text()
    said = asdict(settings) | {"text": hashlib.sha256(data).hexdigest()[:16]}
    results, kept = out / "results.json", out / "state.pt"
    if results.is_file():
        return _read(results, said)["records"]
    out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"settings": said, "seed": 0, "runs": {}, "records": []}
    if kept.is_file():
        state = _read(kept, said)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(settings.device)
    for seed in range(state["seed"], settings.seeds):
        runs = {form: _Run(form, seed, settings) for form in settings.forms(seed)}
        if state["seed"] == seed:
            for form, held in state["runs"].items():
                runs[form].load(held)
        for step in range(len(runs["coda-agent"].losses), settings.steps):
            batch = _batch(tokens, seed, step, settings.size)
            turn = step % len(runs)
            for form in [*runs][turn:] + [*runs][:turn]:
                runs[form].step(*batch)
            done, stop = step + 1, stopped()
            losses = ", ".join(f"{form} {run.losses[-1]:.3f}" for form, run in runs.items())
            tick(seed * settings.steps + done, f"seed {seed}: {losses}")
            if stop or (save_every and done % save_every == 0 and done < settings.steps):
                held = {form: run.state() for form, run in runs.items()}
                _write(kept, state | {"seed": seed, "runs": held})
            if stop:
                return None
        state["records"] += [run.record for run in runs.values()]
    machine = {"device": settings.device, "torch": torch.__version__}
    if settings.device == "cuda":
        machine["device"] = torch.cuda.get_device_name()
    _write(results, {"settings": said, "machine": machine, "records": state["records"]})
    kept.unlink(missing_ok=True)
    return state["records"]


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Up for a tenth of the steps, then down by a cosine to a tenth."""
    up = max(1, steps // 10)
    if step < up:
        return highest * (step + 1) / up
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - up) / max(1, steps - up)))


class _Run:
    """One model in training."""

    def __init__(self, form: str, seed: int, settings: Settings) -> None:
        sizes = SIZES[settings.size]
        self.cuda, self.steps, self.rate = settings.device == "cuda", settings.steps, sizes.rate
        torch.manual_seed(seed)
        model = Llama(sizes)
        if form == "coda-agent":
            weights = model.state_dict()
            model = LlamaByKernels(sizes)
            model.load_state_dict(weights)
        model = model.to(settings.device, torch.bfloat16)
        self.weights = [*model.parameters()]
        self.loss: Any = torch.compile(model, dynamic=False) if form == "torch.compile" else model
        self.masters = [p.detach().float() for p in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, betas=(0.9, 0.95), weight_decay=0.1, fused=self.cuda
        )
        self.losses = list[float]()
        self.record: dict[str, Any] = {
            "form": form, "seed": seed, "losses": self.losses, "seconds": [], "peak_mib": None,
        }  # fmt: skip
        self.taken = 0

    def step(self, ids: Tensor, targets: Tensor) -> None:
        """One step, timed until its loss is known."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - self._bytes()
        else:
            others = 0
        began = time.perf_counter()
        self.optimizer.param_groups[0]["lr"] = learning_rate(
            len(self.losses), self.steps, self.rate
        )
        loss = self.loss(ids, targets)
        loss.backward()
        for master, p in zip(self.masters, self.weights, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self._round()
        self.losses.append(loss.item())
        if self.cuda:
            torch.cuda.synchronize()
        self.taken += 1
        if self.taken > _WARM:
            self.record["seconds"].append(time.perf_counter() - began)
            if self.cuda:
                peak = round((torch.cuda.max_memory_allocated() - others) / 2**20)
                self.record["peak_mib"] = max(peak, self.record["peak_mib"] or 0)

    def state(self) -> dict[str, Any]:
        """What `load` goes on from."""
        return {
            "masters": self.masters, "optimizer": self.optimizer.state_dict(),
            "record": self.record,
        }  # fmt: skip

    def load(self, held: dict[str, Any]) -> None:
        self.record = held["record"]
        self.losses = self.record["losses"]
        with torch.no_grad():
            for master, kept in zip(self.masters, held["masters"], strict=True):
                master.copy_(kept)
            self._round()
        self.optimizer.load_state_dict(held["optimizer"])

    def _round(self) -> None:
        for p, master in zip(self.weights, self.masters, strict=True):
            p.copy_(master)

    def _bytes(self) -> int:
        """Of weights, masters and moments."""
        moments = [t for held in self.optimizer.state.values() for t in held.values()]
        return sum(t.nbytes for t in (*self.weights, *self.masters, *moments))


def _batch(tokens: Tensor, seed: int, step: int, size: str) -> tuple[Tensor, Tensor]:
    """Bytes (B, S) and those behind them, from places that seed and step decide."""
    sizes = SIZES[size]
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - sizes.context, (sizes.batch, 1), generator=drawn)
    places = starts + torch.arange(sizes.context + 1)
    rows = tokens[places.to(tokens.device)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _read(path: Path, said: dict[str, Any]) -> dict[str, Any]:
    """What `_write` wrote, of a run as it is said."""
    mend = "remove it, or give another --out"
    try:
        if path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = json.loads(path.read_text("utf-8"))
        settings = found["settings"]
    except Exception as fault:  # a damaged file: anything may come out of it
        raise CodaError(f"{path} cannot be read, expected a run of this demo", hint=mend) from fault
    for name, value in said.items():
        if settings.get(name) != value:
            message = f"{path} is of a run with {name} {settings.get(name)}, expected {value}"
            raise CodaError(message, hint=mend)
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    """All of it or nothing."""
    if path.suffix != ".pt":
        write_whole(path, json.dumps(value, indent=1))
        return
    new = path.with_name(f"{path.name}.new")
    torch.save(value, new)
    new.replace(path)
