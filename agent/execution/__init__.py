"""Where the judge's jobs run: on this machine (`local.py`).

The judge knows none of this: it is handed an `agent.judge.executor.Executor`. It is imported when
it is first asked for, so that commands which run no job start sooner.
"""

from coda_agent.agent.judge.executor import Executor, usable
from coda_agent.agent.judge.machine import Gpu, demanded


def executor() -> Executor:
    """Return this machine's executor, the same at each call."""
    from coda_agent.agent.execution.local import here

    return here()


def usable_gpu(device: str) -> Gpu | None:
    """Choose the GPU to run on: "cuda" demands one, "cpu" takes none.

    Raises:
        MachineError: "cuda", and there is no Hopper GPU.
    """
    return usable(executor(), device)


def hopper() -> Gpu:
    """Return a GPU of this machine.

    Raises:
        MachineError: there is no Hopper GPU.
    """
    return demanded(executor().gpu())
