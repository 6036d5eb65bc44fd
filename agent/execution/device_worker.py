"""The device child: runs kernels, and holds seeds, truth and clock.

A kernel that hangs or faults costs this process and not the command.

`device.Device` starts it. Only trusted code runs here: programs come as data, and their kernels are
objects that the compile children left in the cache. The supervisor is told of each launch before it
goes to the GPU, so that a hang or a lost context leaves the name of its cause behind.
"""

import importlib
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch

from coda_agent.agent.execution.answers import Answer, Bug, Fault, Ok, Refused
from coda_agent.agent.execution.child import Limits, serve
from coda_agent.agent.judge.job import read_job
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.imports import import_quack
from coda_agent.primitives.objects import use_cache
from coda_agent.runtime.launch import Arguments, launcher

Tell = Callable[[JsonObject], None]
LIMITS = Limits(memory_bytes=64 << 30)
"""Of the host's memory; a kernel's tensors are on the GPU."""

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

    Compiling comes before that, since it takes seconds and a kernel milliseconds. While kernels are
    timed, only a kernel's first launch is told and waited for; the later ones cost a look-up.

    Args:
        synchronize: Waits for the GPU.
    """

    def __init__(self, launch: Callable[..., Any], synchronize: Callable[[], None]) -> None:
        self._launch, self._synchronize = launch, synchronize
        self._seen: set[tuple[object, ...]] = set()
        self._tell: Tell = lambda _: None
        self._every = False

    def begin(self, tell: Tell, *, every: bool) -> None:
        """Begin a job, told to `tell`; with `every`, every launch of it."""
        self._tell, self._every = tell, every
        self._seen.clear()

    def __call__(self, given: Arguments, *, run: bool = True) -> Any:
        program, a, b, config = given.program, given.a, given.b, given.config
        key = (id(program), config, a.dtype, a.shape, b.shape)
        if key in self._seen and not self._every and run:
            return self._launch(given)
        self._tell({"launch": None})
        plan = self._launch(given, run=False)
        if not run:
            return plan
        self._seen.add(key)
        sizes = {"m": a.shape[0], "n": b.shape[0], "k": a.shape[1]}
        about = {"program": program.name, "dtype": str(a.dtype).removeprefix("torch."), **sizes}
        self._tell({"launch": {**about, "config": config.to_dict()}})
        plan = self._launch(given)
        if not self._every:
            self._synchronize()
            self._tell({"launch": None})
        return plan


def main() -> None:
    """Serve jobs; imports come first, while the other gates still run."""
    LIMITS.take()
    use_cache()
    watch = Watch(launcher.get(), torch.cuda.synchronize)
    launcher.set(watch)
    import_quack()
    for name in ("coda_agent.primitives.stores", "coda_agent.agent.judge.performance"):
        importlib.import_module(name)
    serve(lambda job, tell: handle(job, tell, watch))


def handle(job: JsonObject, tell: Tell, watch: Watch) -> JsonObject:
    """Do one job, of the judge or of `COMMANDS`."""
    watch.begin(tell, every=job["kind"] == "numerics")

    def progress(done: int, total: int, note: str) -> None:
        tell({"done": done, "total": total, "note": note})

    try:
        command = COMMANDS.get(job["kind"])
        result = command() if command else read_job(job).run(progress).model_dump(mode="json")
        torch.cuda.empty_cache()  # an idle child leaves the memory to others
        answer: Answer = Ok(result=result)
    except CodaError as error:
        answer = Refused.of(error)
    except Exception as error:
        if fault := named(error):
            answer = Fault(fault=fault, detail=str(error).strip().partition("\n")[0])
        else:
            answer = Bug(trace=traceback.format_exc())
    return answer.model_dump()


def named(error: Exception) -> str | None:
    """Name what an exception says of the GPU; None where nothing."""
    return next((name for said, name in _FAULTS.items() if re.search(said, str(error))), None)


def probe() -> bool:
    """Tell whether the GPU multiplies, by small integers, whose product is exact."""
    a = torch.arange(256 * 256).reshape(256, 256).float() % 7 - 3
    product = (a.cuda() @ a.cuda().t()).double().cpu()
    return torch.equal(product, a.double() @ a.double().t())


def end() -> None:
    """Leave as a process that is done, for tools that report then."""
    raise SystemExit(0)


COMMANDS: dict[str, Callable[[], object]] = {"probe": probe, "end": end}


if __name__ == "__main__":
    main()
