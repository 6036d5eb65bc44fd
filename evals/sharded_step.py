"""The training step of `train_step` on several GPUs of a host, one process each, under FSDP2.

Each contender trains weights of its own, sharded by layers and by what is left, in bf16. A step's
time goes by the host's clock from where all GPUs wait to where the last one is done, in one random
order of contenders a round. What torch.compile is given is sharded.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from coda_agent.agent.judge.samples import Samples
from coda_agent.evals.contest import Clock
from coda_agent.evals.train_step import COURSE, Step, Training, adamw
from coda_agent.evals.workers import leave_with_parent
from coda_agent.primitives.errors import CodaError, MachineError

ALONE = {"ours alone": "ours on one GPU", "eager alone": "PyTorch on one GPU"}
"""What a course is kept of beside contenders."""


@dataclass(frozen=True)
class Sharded(Training):
    """A Llama, and the tokens of a step on each GPU."""

    RANKS: ClassVar = 2

    def on(self, device: str, shrink: int) -> Any:
        """The case on devices of a kind, so many times as small.

        Raises:
            MachineError: there are too few GPUs.
        """
        import torch

        if device == "cuda" and (there := torch.cuda.device_count()) < self.RANKS:
            raise MachineError(f"it trains on {self.RANKS} GPUs, and this machine has {there}")
        return Processes(self.shrunk(shrink) if shrink > 1 else self, device)


class Processes:
    """A training step in as many processes as there are ranks."""

    def __init__(self, what: Sharded, device: str) -> None:
        self.what, self.device = what, device
        self.tokens = what.RANKS * what.batch * what.length

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """As of `Step`, with the largest peak of any GPU, and losses of `COURSE` steps beside those
        of one GPU that has all sequences.

        Raises:
            CodaError: a process failed; the line names its error, such as that there is no
                transformers.
        """
        from torch.multiprocessing.spawn import ProcessException, spawn

        with tempfile.TemporaryDirectory() as folder:
            given = folder, self.what, self.device, sorted(wanted), rounds
            try:
                spawn(_rank, given, nprocs=self.what.RANKS)
            except ProcessException as fault:
                line = str(fault).strip().splitlines()[-1].strip()
                raise CodaError(f"a process of a training step failed: {line}") from fault
            return json.loads((Path(folder) / "found.json").read_text("utf-8"))


def _rank(
    rank: int, folder: str, what: Sharded, device: str, wanted: list[str], rounds: int
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    leave_with_parent()
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=what.RANKS)
    try:
        step = ShardedStep(what, device, init_device_mesh(device, (what.RANKS,)))
        clock: Any = Rounds(device)
        found = step.measured(wanted, clock, rounds)
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found), "utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class ShardedStep(Step):
    """A rank's part of a training step: of all sequences, which ranks take in turn."""

    def __init__(self, what: Sharded, device: str, mesh: Any) -> None:
        super().__init__(replace(what, batch=what.RANKS * what.batch), device)
        self.mesh, self.all = mesh, self.ids
        self.ids = self.all[mesh.get_rank() :: what.RANKS]

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        import torch.distributed as dist

        found = super().measured(wanted, clock, rounds)
        peaks: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(peaks, found["peak_mib"])
        found["peak_mib"] = {name: max(p[name] for p in peaks) for name in peaks[0]}
        names = ("ours", "eager", *ALONE)
        found["course"] = {name: self._course(name) for name in names}
        return found

    def mean(self, loss: Any) -> float:
        """Of a loss, over ranks."""
        import torch.distributed as dist

        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.mesh.size()

    def _made(self, name: str, found: dict[str, Any]) -> tuple[Any, Any]:
        model = copy.deepcopy(self.model)
        self._changed(model, name, found)
        self._shard(model)
        return model, adamw(model)

    def _course(self, name: str) -> list[float]:
        """Losses of `COURSE` steps on first sequences of all ranks, from the first weights on."""
        model, kept = copy.deepcopy(self.model), self.home.apply_rotary_pos_emb
        each = max(1, len(self.ids) // 4)
        ids = self.all[: each * self.mesh.size()] if name in ALONE else self.ids[:each]
        if name.startswith("ours"):
            self._patched(model, name)
        if name not in ALONE:
            self._shard(model)
        optimizer = adamw(model, 3e-4)
        losses = list[float]()
        for _ in range(COURSE):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(self.mean(loss), 4))
        self.home.apply_rotary_pos_emb = kept
        return losses

    def _shard(self, model: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for part in (*model.model.layers, model):
            fully_shard(part, mesh=self.mesh)


class Rounds:
    """A clock of calls that all ranks make together."""

    def __init__(self, device: str) -> None:
        self.device = device

    def interleave(
        self, contenders: Mapping[str, Callable[[int], Any]], rounds: int
    ) -> dict[str, Samples]:
        """Each contender once a round, after one that does not count."""
        order, times = random.Random(0), {name: list[float]() for name in contenders}
        for i in range(-1, rounds):
            for name in order.sample([*contenders], len(contenders)):
                took = self._took(contenders[name], i)
                times[name] += [took] * (i >= 0)
        return {name: Samples(tuple(found)) for name, found in times.items()}

    def _took(self, call: Callable[[int], Any], i: int) -> float:
        """Microseconds from where all ranks wait to where the last one is done."""
        import torch
        import torch.distributed as dist

        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        wait()
        dist.barrier()
        wait()
        began = time.perf_counter()
        call(i)
        wait()
        took = torch.tensor((time.perf_counter() - began) * 1e6, device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()
