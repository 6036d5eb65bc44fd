"""An accepted kernel's best configurations at shapes of a user's own."""

from collections.abc import Callable, Sequence

from coda_agent.agent import accept as acceptance
from coda_agent.agent import events as e
from coda_agent.agent import execution, judge, publish
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.log import short_run
from coda_agent.agent.plain import plain
from coda_agent.agent.workspace import Kernel, Run, Workspace
from coda_agent.primitives.errors import CompileError, SpecError
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Shape, propose
from coda_agent.runtime.kernel import Kernel as Function
from coda_agent.runtime.loading import load_kernel, user_tuning
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.faults import size_faults

PROPOSED = 10
"""Configurations that are compiled and timed at a shape, for each element type.

Over 1,368 problems of all kernels on an H200, the best of ten was 0.9998 of the best of thirty in
geometric mean where a table was fitted, which saw other shapes near, and 0.9955 by the prior. The
worst were 0.915 and 0.838.
"""


def tune(
    kernel: Kernel,
    shapes: Sequence[Shape],
    observer: Observer,
    *,
    new_run: Callable[[], Run],
    commit: Workspace | None = None,
) -> tuple[JsonObject, str | None]:
    """Find a kernel's best configurations at shapes on this GPU.

    They go to the user's cache, shape by shape, so that what was measured stays measured. What the
    cache holds is not measured again.

    Args:
        observer: Told of gates, and by `shape.tuned` of each shape that is kept.
        new_run: Makes the run, where there is anything to do.
        commit: The workspace that has the kernel; its tuned.json then gets the lines too.

    Returns:
        The lines of these shapes as tuned.json holds them, and the commit; None where there is
        none, or nothing new to it.

    Raises:
        CompileError: no proposed tile compiles, or computes the right result.
        MachineError: there is no Hopper GPU.
        SpecError: the spec, or a kernel of its types, does not allow a shape.
        WorkspaceError: the kernel is not what its evidence was made for, or nothing could be
            committed.
        OSError: the cache cannot be written to; said before anything is measured.
    """
    if commit:
        publish.check_place(commit, kernel.name)
    spec = load_spec(kernel.spec)
    for shape in shapes:
        check_shape(spec, shape)
    gpu = execution.hopper()
    function, user = load_kernel(kernel.folder), user_tuning(kernel.folder)
    user.add({})  # what fails, fails before anything is measured
    dtypes = sorted({spec.dtype_of(spec.gemm[0], types) for types in spec.type_choices()})

    def lines() -> JsonObject:
        held = user.lines().get(gpu.name, {})
        chosen = {d: [plain(x) for x in held.get(d, []) if x.shape in shapes] for d in dtypes}
        return {gpu.name: chosen}

    missing = [s for s in shapes if not all(user.find(gpu.name, dtype, s) for dtype in dtypes)]
    if not missing and not commit:
        return lines(), None
    with short_run(new_run(), observer, "tune", kernel.name) as log:
        for shape in missing:
            tiles = _proposed(function, shape, dtypes[0], gpu.name)
            measured = _measured(spec, kernel.text, shape, tiles, log.observer)
            if measured.get(gpu.name, {}).keys() != set(dtypes):
                raise CompileError(f"{kernel.name}: no proposed tile compiles in every type")
            user.add(plain(measured))
            log.observer("shape.tuned", {"shape": " x ".join(map(str, shape))})
        sha = acceptance.store_tuned(commit, kernel.name, lines()) if commit else None
        log.append(e.Stored.of(sha, kernel.level))
    return lines(), sha


def check_shape(spec: Spec, shape: Shape) -> None:
    """Refuse a shape that a kernel of the spec does not take.

    Raises:
        SpecError: it is refused.
    """
    sizes = dict(zip(spec.gemm_dims, shape, strict=True))
    spec.check_sizes(sizes)
    for fault, _ in size_faults(spec, sizes):
        raise SpecError(f"{spec.name}: {fault}")


def _measured(
    spec: Spec, text: str, shape: Shape, tiles: Sequence[TileConfig], observer: Observer
) -> JsonObject:
    sizes = dict(zip(spec.gemm_dims, shape, strict=True))
    at = spec.model_copy(update={"bench_shapes": (sizes,)})
    return judge.tune_candidate(at, text, execution.executor(), observer=observer, tiles=tiles)


def _proposed(function: Function, shape: Shape, dtype: str, gpu: str) -> list[TileConfig]:
    """List the right configurations to time at a shape, the likeliest first."""
    program, *_ = function.programs.values()
    tiles = function.tiles
    found = propose(program, shape, model=tiles.model(gpu, dtype), spills=tiles.spills)
    return [config for config in found if config.label not in tiles.refused][:PROPOSED]
