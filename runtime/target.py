"""Compile without a GPU, for an architecture, and read what came out.

- quack asks the driver one thing on the compile path, how many clusters fit, and only a launch
  needs the answer.
- The DSL reads its architecture once; its environment manager's setter changes it, so one warm
  process serves all architectures.
- A cached object file carries the cubin as an embedded ELF image of machine 190 (EM_CUDA).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    from coda_agent.runtime.launch import Arguments

ARCHITECTURES = {"sm_90a": "90", "sm_100a": "100", "sm_120a": "120"}
# Any size compiles the same kernel, M, N and K being run-time arguments, but that a launch splits
# only a K that is long enough.
_M, _N, _K = 512, 1024, 4096


@contextmanager
def target(arch: str) -> Iterator[None]:
    """Compile for `arch` inside the block, in a process that never launches.

    Raises:
        CompileError: `arch` is not one of `ARCHITECTURES`.
    """
    if arch not in ARCHITECTURES:
        raise CompileError(
            f"unknown architecture {arch!r}, expected one of {', '.join(ARCHITECTURES)}"
        )
    os.environ.update(QUACK_ARCH=ARCHITECTURES[arch], CUTE_DSL_ARCH=arch)
    from cutlass.cutlass_dsl import CuTeDSL
    from quack import cute_dsl_utils
    from quack.gemm_runtime import host

    dsl = CuTeDSL._get_dsl()
    dsl.envar.arch = arch
    # What does not run here needs no function that calls it: that takes 0.25 s of 3 s a kernel.
    vars(dsl)["_runtime_can_run_compiled"] = lambda *_: False
    cute_dsl_utils._get_device_capacity_cached.cache_clear()
    cute_dsl_utils.get_compile_target_capacity.cache_clear()
    clusters = host.get_max_active_clusters
    host.get_max_active_clusters = lambda *_, **__: 132
    try:
        yield
    finally:
        host.get_max_active_clusters = clusters
        del vars(dsl)["_runtime_can_run_compiled"]


class Tensors(NamedTuple):
    """What a program is compiled for.

    Attributes:
        dtype: Of A and B.
        read_scalars: Whether scalars are read from device memory, as those of tensors are.
        turned: Those of A and B that are transposes of contiguous matrices, as "B".
        tables: Extents of tables, on whose columns the code depends.
    """

    dtype: str
    operands: Mapping[str, str]
    outputs: Mapping[str, str]
    read_scalars: bool = False
    turned: str = ""
    tables: Mapping[str, tuple[int, ...]] = {}

    def given(self, program: Program, config: TileConfig) -> Arguments:
        """Make the arguments of a launch, without data."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from coda_agent.runtime.launch import Arguments, allocate

        def meta(*shape: int, name: str) -> torch.Tensor:
            return torch.empty(*shape, dtype=getattr(torch, name), device="meta")

        def scalar() -> torch.Tensor | float:
            if not self.read_scalars:
                return 1.0
            with FakeTensorMode():  # quack asks whether it is on a GPU
                return torch.empty((), dtype=torch.float32, device="cuda")

        extents = {o: kind.extents(_M, _N) for o, kind in program.operands.items()}
        extents |= self.tables
        rows = _N // 2 if program.spread else _N
        extents |= {program.spread: (rows, _K)} if program.spread else {}
        operands = {
            o: meta(*shape, name=self.operands[o]) if shape else scalar()
            for o, shape in extents.items()
        }
        dtypes = {o: getattr(torch, name) for o, name in self.outputs.items()}
        outputs = allocate(program, _M, _N, dtypes, config, "meta")
        a, b = (
            meta(_K, rows, name=self.dtype).mT
            if x in self.turned
            else meta(rows, _K, name=self.dtype)
            for x, rows in (("A", _M), ("B", rows))
        )
        return Arguments(program, a, b, operands, outputs, config)


def compile_blind(
    program: Program, config: TileConfig, arch: str, tensors: Tensors, *, read: bool = True
) -> dict[str, Any]:
    """Compile a program on meta tensors, and report what came out.

    Returns:
        `object` (path of the cached object file), `order` (of a fused kernel's arguments, as
        `launch.order`), `shared_bytes` (dynamic, None when the object came from the cache without
        its record), and what `resources` reads, where `read` asks for it.

    Raises:
        CompileError: the program does not lower or compile.
    """
    from coda_agent.primitives.lower import forget
    from coda_agent.runtime import unfused
    from coda_agent.runtime.launch import launch, order

    with target(arch), _recorded() as record:
        forget()
        unfused.forget()
        given = tensors.given(program, config)
        launch(given, run=False)
        ordered = order(given) if config.fused else None
    path = record.get("object")
    if path is None or not Path(path).exists():
        raise CompileError(f"{program.name}: the compiler left no object file for {config.label}")
    report = {"shared_bytes": None, **_kept(Path(path))}
    if read and "registers" not in report:  # reading them takes 0.35 s an object
        report |= resources(Path(path))
        _keep(Path(path), report)
    return {"object": path, "order": ordered, **report}


def _keep(path: Path, report: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(report))
    part.replace(path.with_suffix(".json"))


def _kept(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):  # none yet, or cut off by a full disk
        return json.loads(path.with_suffix(".json").read_text())
    return {}


@contextmanager
def _recorded() -> Iterator[dict[str, Any]]:
    """Note quack's object file, and the shared memory of a traced kernel."""
    from quack.cache import jit
    from quack.gemm_runtime import host

    record: dict[str, Any] = {}
    key_to_hash, build = jit._key_to_hash, host.compile_gemm_kernel

    def hashed(key: tuple[object, ...]) -> str:
        sha = key_to_hash(key)
        folder = jit.get_cache_path() / jit._compute_source_fingerprint()
        record["object"] = str(folder / f"{sha}.o")
        return sha

    def built(*args: Any, post_init: Callable | None = None, **kwargs: Any) -> object:
        kernels: list[object] = []

        def keep(kernel: object) -> None:
            kernels.append(kernel)
            if post_init is not None:
                post_init(kernel)

        compiled = build(*args, post_init=keep, **kwargs)
        storage = getattr(kernels[0], "shared_storage", None)
        if storage is not None:
            record["shared_bytes"] = int(storage.size_in_bytes())
            _keep(Path(record["object"]), {"shared_bytes": record["shared_bytes"]})
        return compiled

    jit._key_to_hash, host.compile_gemm_kernel = hashed, built
    try:
        yield record
    finally:
        jit._key_to_hash, host.compile_gemm_kernel = key_to_hash, build


def cubin(path: Path) -> bytes:
    """Read the cubin inside an object file."""
    data = path.read_bytes()
    at = data.find(b"\x7fELF", 4)
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == 190:
            return data[at:]
        at = data.find(b"\x7fELF", at + 4)
    raise CompileError(f"{path.name} carries no cubin")


def resources(path: Path) -> dict[str, Any]:
    """Read registers, stack bytes, local stores and `instructions` of an object file."""
    with _cubin_file(path) as image:
        usage = _tool("cuobjdump", "--dump-resource-usage", image)
        # Without the analysis of branches, a third faster.
        found = instructions(_tool("nvdisasm", "-c", "-ndf", image))
    used = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used.get("REG", 0),
        "stack_bytes": used.get("STACK", 0) + used.get("LOCAL", 0),
        "local_stores": found.get("STL", 0),
        "mma_instructions": sum(n for name, n in found.items() if is_mma(name)),
        "instructions": found,
    }


# An address, perhaps a predicate, then the instruction with its suffixes.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.M)
_MMA = re.compile(r"[HQI]G?MMA|UTC\w*MMA")
_MOVES = re.compile(r"UTMALDG|UTMASTG|UTMAREDG|STL|LDL")


def instructions(sass: str) -> dict[str, int]:
    """Count a disassembly's instructions that say how a kernel works.

    They are tensor-core ones with their types but without their shape, such as `HGMMA.F32.BF16`;
    TMA's loads, stores and reduce-adds; accesses to local memory.
    """
    counts: Counter[str] = Counter()
    for found in _INSTRUCTION.findall(sass):
        name, *suffixes = found.split(".")
        if _MMA.fullmatch(name):
            counts[".".join([name, *(s for s in suffixes if not s[0].isdigit())])] += 1
        elif _MOVES.fullmatch(name):
            counts[name] += 1
    return dict(counts)


def is_mma(instruction: str) -> bool:
    """Tell whether one of `instructions` runs on the tensor cores."""
    return _MMA.match(instruction) is not None


def sass(path: Path) -> str:
    """Disassemble the kernel in an object file."""
    with _cubin_file(path) as image:
        return _tool("nvdisasm", "-c", image)


@contextmanager
def _cubin_file(path: Path) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(path))
        file.flush()
        yield file.name


def find_tool(name: str) -> str | None:
    """Find a tool on the path, in CUDA_HOME, or in triton's package."""
    import importlib.util

    found = shutil.which(name)
    if found:
        return found
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / name]
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        candidates.append(Path(spec.origin).parent / "backends/nvidia/bin" / name)
    return next((str(c) for c in candidates if c.exists()), None)


def _tool(name: str, *args: str) -> str:
    path = find_tool(name)
    if path is None:
        raise MachineError(
            f"{name} was not found", hint="it ships with triton and with the CUDA toolkit"
        )
    done = subprocess.run([path, *args], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise CompileError(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
