"""The device child: runs kernels and holds seeds, truth and clock, so that a kernel that hangs or
faults costs this process and not the command.

Started by `device.Device`. Only trusted code runs here: programs come as data, and their kernels
are objects that the compile children left in the cache. Each launch is told to the supervisor
before it goes to the GPU, so that a hang or a lost context leaves the name of its cause behind.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.job import Job, Tiles
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.judge.numerics import NumericsReport
    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec

Tell = Callable[[dict[str, Any]], None]

_FAULTS = {
    r"out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)": "out of memory",
    r"illegal memory access|ILLEGAL_ADDRESS|Error Code: 700": "illegal address",
    r"misaligned address|MISALIGNED_ADDRESS|Error Code: 716": "misaligned address",
    r"launch failure|LAUNCH_FAILED|Error Code: 719": "launch failure",
    r"CUDA|CUBLAS|NVIDIA driver": "CUDA error",
}
"""What an error says of the GPU. cuBLAS says that it is not initialised when memory is short, and
CuTeDSL's launcher numbers the errors as cudaError_t does."""


class Watch:
    """A launcher (`primitives.launch.launcher`) that tells of a launch before it happens.

    Compiling comes first and is not part of what is told: it takes seconds, a kernel milliseconds.
    While kernels are timed only a kernel's first launch is told, and waited for; the later ones
    cost a look-up.

    Args:
        launch: The launcher that launches.
        synchronize: Waits for the GPU.
    """

    def __init__(self, launch: Callable[..., Any], synchronize: Callable[[], None]) -> None:
        self._launch, self._synchronize = launch, synchronize
        self._seen: set[Any] = set()
        self._tell: Tell = lambda _: None
        self._every = False

    def begin(self, tell: Tell, *, every: bool) -> None:
        """A new job, told to `tell`; with `every`, every launch of it."""
        self._tell, self._every = tell, every
        self._seen.clear()

    def __call__(self, *given: Any, run: bool = True) -> Any:
        program, a, b, *_, config = given
        key = (id(program), config, a.dtype, a.shape, b.shape)
        if key in self._seen and not self._every and run:
            return self._launch(*given)
        self._tell({"launch": None})
        plan = self._launch(*given, run=False)
        if not run:
            return plan
        self._seen.add(key)
        sizes = {"m": a.shape[0], "n": b.shape[0], "k": a.shape[1]}
        about = {"program": program.name, "dtype": str(a.dtype).removeprefix("torch."), **sizes}
        self._tell({"launch": {**about, "config": config.to_dict()}})
        plan = self._launch(*given)
        if not self._every:
            self._synchronize()
            self._tell({"launch": None})
        return plan


def main() -> None:
    """Serves jobs; the imports come first, while the other gates still run."""
    import torch

    from coda_agent.agent.execution.child import serve
    from coda_agent.primitives.launch import launcher
    from coda_agent.primitives.target import use_cache

    use_cache()
    watch = Watch(launcher.get(), torch.cuda.synchronize)
    launcher.set(watch)
    for name in ("coda_agent.primitives.stores", "coda_agent.agent.judge.performance"):
        importlib.import_module(name)
    serve(lambda job, tell: handle(job, tell, watch))


def handle(job: dict[str, Any], tell: Tell, watch: Watch) -> dict[str, Any]:
    """One job: `ok` with its result, `error` where it was refused, `fault` where the GPU or its
    memory failed, or `bug`."""
    import torch

    watch.begin(tell, every=job["kind"] == "numerics")
    try:
        result = JOBS[job["kind"]](job, tell)
        torch.cuda.empty_cache()  # an idle child leaves the memory to others
        return {"ok": result}
    except CodaError as error:
        return {"error": [type(error).__name__, error.message, error.hint]}
    except Exception as error:
        if fault := named(error):
            return {"fault": fault, "detail": str(error).strip().partition("\n")[0]}
        return {"bug": traceback.format_exc()}


def named(error: Exception) -> str | None:
    """What an exception says of the GPU; None where it says nothing of it."""
    return next((name for said, name in _FAULTS.items() if re.search(said, str(error))), None)


def probe(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Whether the GPU allocates and multiplies: small integers, so that the product is exact."""
    import torch

    a = torch.arange(256 * 256).reshape(256, 256).float() % 7 - 3
    product = (a.cuda() @ a.cuda().t()).double().cpu()
    return {"right": torch.equal(product, a.double() @ a.double().t())}


def numerics(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The numerics gate over some tiles."""
    from coda_agent.agent.judge.numerics import check_numerics

    return as_record(check_numerics(*_given(job), device="cuda", progress=_progress(tell)))


def as_record(report: NumericsReport) -> dict[str, Any]:
    """A numerics report as JSON data."""
    return {
        **vars(report),
        "findings": [f.model_dump() for f in report.findings],
        "admitted": [[*key, [c.to_dict() for c in kept]] for key, kept in report.admitted.items()],
    }


def prepare(job: dict[str, Any], tell: Tell) -> None:
    """What the performance gate needs beside the candidate."""
    from coda_agent.agent.judge import performance

    spec, _, tiles = _given(job)
    performance.prepare(spec, [element for _, element in tiles])


def performance(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The performance gate over some tiles."""
    from coda_agent.agent.judge.performance import check_performance

    findings, data, tuned = check_performance(*_given(job), progress=_progress(tell))
    found = [f.model_dump() for f in findings]
    return {**data, "findings": found, "tuned": tuned}


def tune(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The fastest right tiles at the spec's bench shapes."""
    from coda_agent.agent.judge import tuner

    return {"tuned": tuner.tune(*_given(job), progress=_progress(tell))}


def call(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The function that a user would import, in the tiles that it dispatches."""
    from coda_agent.agent.judge.imported import check_imported

    spec, programs, tiles = _given(job)
    types = list(dict.fromkeys(element for _, element in tiles))
    found = check_imported(spec, programs, types, device="cuda", **job["stored"])
    return {"findings": [f.model_dump() for f in found]}


def end(job: dict[str, Any], tell: Tell) -> None:
    """Leaves as a process does that is done, for tools that write their report then."""
    raise SystemExit(0)


JOBS: dict[str, Callable[[dict[str, Any], Tell], Any]] = {
    f.__name__: f for f in (probe, numerics, prepare, performance, tune, call, end)
}


def _given(data: dict[str, Any]) -> tuple[Spec, Mapping[str, Program], Tiles]:
    job = Job.from_dict(data)
    return job.spec, job.programs, job.tiles


def _progress(tell: Tell) -> Callable[[int, int, str], None]:
    return lambda done, total, note: tell({"done": done, "total": total, "note": note})


if __name__ == "__main__":
    main()
