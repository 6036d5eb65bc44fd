"""What the figures of a suite of cases depend on, beside machine, sizes and protocol: what sources
mean, and accepted kernels with their tiles.

A cell of a record has a digest of its sources. A record has a chain of these for each kind of case:
the first is of those that its latest cell was measured by, and each further one was declared to
time the same (`declare_same`), with a reason that the page shows. Kernels are never declared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.evals import fp8_cases, gradient_cases, layer_cases, sharded_step, train_step
from coda_agent.evals.fp8_cases import Fp8Widths
from coda_agent.evals.sharded_step import Sharded
from coda_agent.evals.train_step import Fp8Training
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

Chain = list[dict[str, str]]
"""Digests of sources, and why each but the first times the same."""


class Depends(NamedTuple):
    """Of a kind of case: what its sources mean, by file, and digests of kernels by name."""

    sources: dict[str, str]
    kernels: dict[str, str]


def of(suite: str, kind: type) -> Depends:
    """What figures of a kind of case depend on."""
    if suite == "fuse":
        return Depends(_of_plans(), {})
    if suite == "gradients":
        return _of_gradients()
    if kind is Fp8Training:
        return _of_fp8_training()
    layers = _of_layers()
    if kind is Sharded:
        return Depends(layers.sources | _meant(_file(sharded_step)), layers.kernels)
    return _of_fp8(layers) if kind is Fp8Widths else layers


def digest(value: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def fresh(cell: Mapping[str, Any], about: Sequence[Any], depends: Depends, chain: Chain) -> bool:
    """Whether a cell is of `about`, of these kernels, and of sources that time the same."""
    known = [link["digest"] for link in chain]
    return (
        cell.get("digest") == digest([*about, depends.kernels])
        and cell.get("sources") in known
        and known[-1] == digest(depends.sources)
    )


def measured(chain: Chain, depends: Depends) -> Chain:
    """The chain after a cell was measured: a new one, where it does not end in these sources."""
    now = digest(depends.sources)
    return chain if chain and chain[-1]["digest"] == now else [{"digest": now}]


def declare_same(
    chains: Mapping[str, Chain], suite: str, kinds: Iterable[type], why: str
) -> dict[str, Chain]:
    """The chains, by kind of case, where sources that differ now from their ends time the same.

    Raises:
        CodaError: no reason is given, or no sources differ.
    """
    if not why.strip():
        raise CodaError("--same is empty, expected the reason")
    now = {kind.__name__: digest(of(suite, kind).sources) for kind in kinds}
    differ = [n for n, chain in chains.items() if n in now and chain[-1]["digest"] != now[n]]
    if not differ:
        raise CodaError(f"the sources of {suite} are those of its record: nothing to declare")
    more = {name: [*chains[name], {"digest": now[name], "why": why}] for name in differ}
    return {**chains, **more}


def _of_gradients() -> Depends:
    """Of gradients: the sources that derive, compile and launch them, and the kernels."""
    from coda_agent import generated

    root = Path(__file__).parents[1]
    files = [*root.glob("primitives/gradient*.py"), root / "generated" / "gradients.py"]
    names = {case.kernel for case in gradient_cases.CASES.values()}
    kernels = _of_kernels(getattr(generated, n) for n in sorted(names))
    return Depends(_meant(*files, _file(gradient_cases)), kernels)


def _of_plans() -> dict[str, str]:
    """Of plans: the sources that make a plan out of a function, and those of the cases."""
    evals = Path(__file__).parent
    agent = evals.parent / "agent"
    files = [file for x in ("plans", "authors/composer") for file in (agent / x).glob("*.py")]
    names = "layer_cases", "fuse_cases", "fuse_functions"
    return _meant(*files, *(evals / f"{n}.py" for n in names))


def _of_layers() -> Depends:
    """Of layers in 16 bits: the sources of layers and of their cases, and the accepted kernels that
    they call."""
    from coda_agent.layers import functional, head

    folder = _file(functional).parent
    files = {*folder.glob("*.py")} - {folder / "fp8.py"}
    meant = _meant(*files, _file(layer_cases), _file(train_step))
    return Depends(meant, _called(functional, head))


def _of_fp8(layers: Depends) -> Depends:
    """The same of layers in FP8, which have all sources of the others and their own."""
    from coda_agent.layers import fp8

    return Depends(layers.sources | _meant(_file(fp8), _file(fp8_cases)), _called(fp8))


def _of_fp8_training() -> Depends:
    """The same of training in FP8, which has kernels of both."""
    from coda_agent.layers import fp8_products

    layers, linear = _of_layers(), Path(__file__).with_name("float8_linear.py")
    kernels = layers.kernels | _called(fp8_products)
    return Depends(layers.sources | _meant(linear), kernels)


def _meant(*files: Path) -> dict[str, str]:
    return {f"{file.parent.name}/{file.name}": file.read_text("utf-8") for file in sorted(files)}


def _file(module: ModuleType) -> Path:
    return Path(str(module.__file__))


def _called(*modules: ModuleType) -> dict[str, str]:
    """Of the accepted kernels that modules call. What leaves some of their outputs out follows from
    them."""
    from coda_agent.generated.kernel import Kernel

    found = (value for module in modules for value in vars(module).values())
    kernels = (kernel for kernel in found if isinstance(kernel, Kernel))
    return _of_kernels(kernel for kernel in kernels if not kernel.left_out)


def _of_kernels(kernels: Iterable[Kernel]) -> dict[str, str]:
    return {
        k.spec.name: digest([[p.digest for p in k.programs.values()], sorted(k.refused), k.tuned])
        for k in kernels
    }
