"""Where the judge's jobs run: on this machine (`local.py`), or on a Dask cluster (`cluster.py`).

The judge knows none of this: it is handed an `agent.judge.executor.Executor`. Either one is
imported when it is first asked for, so that commands which run no job start sooner.
"""

import os
from functools import lru_cache

from coda_agent.agent.judge.executor import Executor, usable
from coda_agent.agent.judge.machine import Gpu, demanded
from coda_agent.primitives.errors import CodaError

VARIABLE = "CODA_AGENT_EXECUTOR"
"""Environment variable: `dask://HOST:PORT`; unset, jobs run on this machine."""


def executor() -> Executor:
    """What `VARIABLE` names.

    Raises:
        CodaError: it names nothing known.
        MachineError: a cluster that does not answer, or cannot be used.
    """
    return _executor(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=1)
def _executor(name: str) -> Executor:
    if not name:
        from coda_agent.agent.execution.local import here

        return here()
    kind, _, address = name.partition("://")
    if kind != "dask" or ":" not in address:
        raise CodaError(f"no executor {name!r}", hint="expected dask://HOST:PORT")
    from coda_agent.agent.execution.cluster import Cluster

    return Cluster(address)


def usable_gpu(device: str) -> Gpu | None:
    """The GPU that kernels run on: "cuda" demands one, "cpu" takes none, "auto" what there is.

    Raises:
        MachineError: "cuda", and there is no Hopper GPU.
    """
    return usable(executor(), device)


def hopper() -> Gpu:
    """A GPU of this machine, for tools that run here whatever the executor.

    Raises:
        MachineError: there is no Hopper GPU.
    """
    from coda_agent.agent.execution.local import here

    return demanded(here().gpu())
