"""`coda-agent bench --suite NAME` and `--numerics`: measure, keep the record, write the pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_agent.agent.cli.report import Reply
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError


def numbers(text: str | None) -> list[int]:
    """`2048,4096` as a list; nothing as an empty one.

    Raises:
        CodaError: something else than positive whole numbers.
    """
    try:
        found = [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(n <= 0 or n % 128 for n in found):
        raise CodaError(f"--sizes is {text!r}, expected multiples of 128, such as 2048,4096")
    return found


def shape(text: str) -> tuple[int, int, int]:
    """`4096,8192,4096` as (M, N, K).

    Raises:
        CodaError: something else than three positive whole numbers.
    """
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3 or not all(p.strip().isdigit() and int(p) for p in parts):
        raise CodaError(f"--shape is {text!r}, expected M,N,K, such as 16384,4096,4096")
    m, n, k = map(int, parts)
    return m, n, k


def suite(
    workspace: Workspace,
    name: str,
    *,
    kernels: list[str],
    sizes: str | None,
    contenders: str | None,
    rounds: int,
    table: bool,
    say: Callable[[str], None],
) -> Reply:
    """Measure what the suite's record lacks, unless only the `table` is wanted; write its pages."""
    from coda_agent.evals.suite import load_suite, run_suite
    from coda_agent.evals.suite_page import write_page

    chosen = load_suite(name)
    if not table:
        from coda_agent.agent.judge import timing
        from coda_agent.primitives.target import use_cache

        use_cache()
        names = [n.strip() for n in (contenders or "").split(",") if n.strip()]
        run_suite(
            workspace.root,
            chosen,
            clock=timing,
            machine=_machine(),
            kernels=kernels,
            sizes=numbers(sizes),
            names=names,
            rounds=rounds,
            say=say,
        )
    return _reply(write_page(workspace.root, chosen))


def numerics(workspace: Workspace, *, table: bool) -> Reply:
    """Measure the error of GEMM - RMSNorm - GEMM, unless only the `table` is wanted; write it."""
    from coda_agent.evals import numerics as evaluation

    if not table:
        from coda_agent.evals.suite import require_hopper
        from coda_agent.primitives.target import use_cache

        require_hopper()
        use_cache()
        evaluation.run_numerics(workspace.root, machine=_machine(), device="cuda")
    return _reply(evaluation.write_page(workspace.root))


def _machine() -> dict[str, Any]:
    from coda_agent.agent.judge.provenance import environment

    found = environment("cuda")
    gpu = {key: found["gpu"].get(key) for key in ("name", "driver_version")}
    return {"gpu": gpu, "cuda": found["cuda"], "packages": found["packages"]}


def _reply(paths: list[Path]) -> Reply:
    record, *pages = paths
    document = {"record": record, "pages": pages, **json.loads(record.read_text("utf-8"))}
    return Reply(document, "\n".join(f"wrote {page}" for page in pages))
