"""compute-sanitizer on a candidate's kernels: memory errors, races and uninitialised reads.

The numerics of the default tile run at the smallest check shape in a device child of their own,
under one tool of compute-sanitizer, whose report becomes findings.
"""

import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from coda_agent.agent.execution.answers import Ok, read_answer
from coda_agent.agent.execution.child import Child, ChildError
from coda_agent.agent.execution.device import environment, exclusive
from coda_agent.agent.judge.job import Job
from coda_agent.agent.judge.machine import DEVICE_CHILD, Gpu
from coda_agent.agent.judge.records import SANITIZERS, Finding, JsonObject, Outcome, Progress
from coda_agent.primitives.errors import CodaError, MachineError

LIMIT_S = 1800.0
MAX_FINDINGS = 8
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def tools(asked: str) -> tuple[str, ...]:
    """Read tools such as `memcheck,racecheck`, in `SANITIZERS` order.

    Raises:
        CodaError: a name is none of `SANITIZERS`.
        MachineError: compute-sanitizer is not installed.
    """
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in SANITIZERS:
            raise CodaError(f"no sanitizer tool {name!r}", hint=f"one of {', '.join(SANITIZERS)}")
    _sanitizer()
    return tuple(name for name in SANITIZERS if name in names)


def _sanitizer() -> str:
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    places = [str(Path(home) / "bin") for home in (*homes, "/usr/local/cuda") if home]
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *places]))
    if path is None:
        hint = "part of the CUDA toolkit; looked for on PATH and in CUDA_HOME"
        raise MachineError("compute-sanitizer is not installed here", hint=hint)
    return path


def sanitize(
    gpu: Gpu, job: Job[Any], progress: Progress, module: str = DEVICE_CHILD
) -> Outcome[Any]:
    """Run a job's programs under its tool, at the smallest check shape.

    Raises:
        MachineError: compute-sanitizer is missing, or left no complete report.
    """
    smallest = min(job.spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    spec = job.spec.model_copy(update={"check_shapes": (smallest,)})
    work = job.model_copy(update={"spec": spec, "tool": None})
    tool, wrong = str(job.tool), tuple[Finding, ...]()
    # Without PyTorch's cache every tensor is an allocation of its own, whose end is watched.
    variables = {**environment(gpu), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as folder, exclusive([gpu], progress):
        log = Path(folder) / "report.txt"
        command = [_sanitizer(), "--tool", tool, "--log-file", str(log), "--print-limit", "100"]
        child = Child(module, environment=variables, prefix=command)
        progress(0, 0, f"{tool}, at {'x'.join(map(str, smallest.values()))}")
        how = "it did not end"
        try:
            answer = read_answer(child.call(work.model_dump(mode="json"), timeout_s=LIMIT_S))
            if isinstance(answer, Ok):
                wrong = work.answer.model_validate(answer.result).findings
            child.call({"kind": "end"}, timeout_s=LIMIT_S)  # the report is written at the end
        except ChildError as error:
            how = error.detail
        finally:
            child.close()
        report = log.read_text("utf-8", "replace") if log.exists() else ""
    found = parse(tool, report)
    if not found and not _SUMMARY.search(report):
        raise MachineError(f"compute-sanitizer --tool {tool} left no report: {how}")
    return Outcome(findings=(*found, *wrong))


def parse(tool: str, report: str) -> list[Finding]:
    """List a report's errors, at most `MAX_FINDINGS`, equal ones as one.

    An error is a line after `=========` and one space. Its lines of detail are indented further, up
    to a backtrace of the host.
    """
    errors: dict[tuple[str, str], JsonObject] = {}
    for block in re.split(r"^=+ (?=\S)", report, flags=re.M):
        head, *details = [re.sub(r"^=+\s*", "", line).strip() for line in block.splitlines()] or [
            ""
        ]
        if not head.startswith(("Invalid", "Error: Race", "Uninitialized", "Misaligned")):
            continue
        text = "\n".join(details)
        at = re.search(r"\bat (\S.*)", head + "\n" + text)
        place = at[1][:160] if at else ""
        where = errors.setdefault((head, place), {"tool": tool, "at": place, "times": 0})
        where["times"] += 1
        if address := re.search(r"Address (0x[0-9a-f]+)", text):
            where.setdefault("address", address[1])
        if thread := re.search(r"by thread (\(.*?\)) in block (\(.*?\))", text):
            where.setdefault("thread", thread[1])
            where.setdefault("block", thread[2])
    found = [Finding(message=f"{tool}: {head}", where=where) for (head, _), where in errors.items()]
    return found[:MAX_FINDINGS]
