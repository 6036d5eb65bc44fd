"""Gate 3: does every program compute what the reference computes?

- `oracle.py` gives the cases, their truth, and what an output may err. They are drawn afresh each
  run from a secret seed, which a finding names.
- On a Hopper GPU the compiled kernel runs, in every tile configuration a tuner may pick. Elsewhere
  the interpreter stands in for it.
- Outputs are filled with NaN before each launch and lie between guard bands.
- Cases of one shape and layout share their tensors, whose contents change between launches. So no
  result can be kept for an address.
- Two runs must agree bit for bit and leave the inputs as they were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from coda_agent.agent.judge.compare import Errors, distances, few_wrong, measure, same, within
from coda_agent.agent.judge.diagnosis import diagnose_stored
from coda_agent.agent.judge.oracle import Case, make_cases
from coda_agent.agent.judge.records import (
    Finding,
    Inputs,
    JsonObject,
    Key,
    NumericsReport,
    Outcome,
    Progress,
    RefusedTile,
    Tiles,
    WorstError,
)
from coda_agent.agent.judge.runners import run_interpreter, run_kernel
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CompileError, LaunchError
from coda_agent.primitives.reductions import ColMax
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Runner


def check_numerics(
    variants: Sequence[Variant], tiles: Tiles, *, device: Literal["cuda", "cpu"],
    progress: Progress, seed: int, run: Runner | None = None,
    approximated: Mapping[str, float] | None = None,
) -> Outcome[NumericsReport]:  # fmt: skip
    """Check every program in every dtype, tile and case.

    The default configuration, or the first where it is not among the tiles, sees every case, and so
    does the first unfused one. The others see those that depend on the tile.

    Args:
        variants: The programs of a spec.
        tiles: Configurations to check.
        device: "cuda" runs kernels, "cpu" the interpreter.
        progress: Called as (done, total, note).
        seed: What all draws follow from.
        run: What produces outputs; `run_kernel` or `run_interpreter` by default.
        approximated: What outputs are off by in float64, as shares, by "program output".

    Returns:
        The faults that refuse the candidate, what was seen, and the tiles that may be dispatched.
    """
    spec = variants[0].spec
    run = run or (run_kernel if device == "cuda" else run_interpreter)
    findings: list[Finding] = []
    worst: dict[str, WorstError] = {}
    refused: list[RefusedTile] = []
    admitted: dict[Key, tuple[TileConfig, ...]] = {}
    total, done, default = sum(map(len, tiles.values())), 0, DEFAULT_CONFIGS["sm_90a"]
    for variant in variants:
        program = variant.program.name
        shares = {o: (approximated or {}).get(f"{program} {o}", 0.0) for o in spec.outputs}
        for element in sorted({e for p, e in tiles if p == program}):
            key, configs = (program, element), tiles[program, element]
            name, kept = " ".join(key), list[TileConfig]()
            drawn = make_cases(spec, variant.binding, element, device, seed)
            cases = (_eased(case, shares) if any(shares.values()) else case for case in drawn)
            worst[name] = WorstError(seed=seed)
            # One of each code: what does not depend on the tile may depend on that.
            full = {
                default if default in configs else next(iter(configs), None),
                next((c for c in configs if not c.fused), None),
            }
            for config in configs:
                progress(done := done + 1, total, f"{name} {config.label}")
                check = TileCheck(variant, element, config, run, seed)
                made, cases = itertools.tee(cases)  # as they are asked for: a fault saves others
                fault = check.fault(made, full=config in full)
                if fault is None:
                    kept.append(config)
                    worst[name] = check.worst(worst[name])
                elif device == "cuda" and config != default:
                    refused.append(RefusedTile.of(fault))
                else:
                    findings.append(fault)
            admitted[key] = tuple(kept)
    report = NumericsReport(
        ran="compiled kernel" if device == "cuda" else "interpreter",
        shapes=tuple(dict(sizes) for sizes in spec.check_shapes),
        worst=worst, refused_tiles=tuple(refused),
        approximated={**approximated} if approximated else None,
    )  # fmt: skip
    return Outcome(findings=tuple(findings), report=report, admitted=admitted)


def _eased(case: Case, shares: Mapping[str, float]) -> Case:
    """Allow shares of each element of outputs that are approximated."""
    bounds, allowed = {**case.bounds}, {**case.allowed}
    for o, truth in case.truth.items():
        known, share = bounds[o], shares[o]
        bounds[o] = replace(known, norm=known.norm + share, tile=known.tile + share)
        if o in allowed:
            allowed[o] = allowed[o] + share * truth.abs()
    return replace(case, bounds=bounds, allowed=allowed)


Place = tuple[object, ...]
"""Shape and layout of a case's tensors."""


@dataclass
class TileCheck:
    """One program in one type and configuration against the cases."""

    variant: Variant
    element: str
    config: TileConfig
    run: Runner
    seed: int
    places: dict[Place, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Input tensors by shape and layout, which cases share."""
    before: dict[Place, tuple[dict[str, torch.Tensor], Case]] = field(default_factory=dict)
    """What the last case in each place gave, and that case."""
    errors: list[tuple[Case, str, Errors, Errors]] = field(default_factory=list)
    """How far each output was off in each case."""

    def fault(self, cases: Iterable[Case], *, full: bool) -> Finding | None:
        """Find the first fault: in all cases, or those of the tile."""
        for case in cases:
            if full or case.structure is None or case.structure.everywhere:
                fault = self._case(case)
                if fault is not None:
                    where = {"program": self.variant.program.name, "dtype": self.element}
                    where |= {"sizes": dict(case.sizes), "tile": self.config.label}
                    where |= {"case": case.label} if case.label else {}
                    fault.where = {**fault.where, **where, "seed": self.seed}
                    return fault
        return None

    def worst(self, known: WorstError) -> WorstError:
        """Give `known`, or what was seen here where that is more."""
        found = known.model_dump()
        for case, o, error, limit in self.errors:
            found["element"] = max(found["element"], error.element)
            ratio = max(error.norm / limit.norm, error.tile / limit.tile)
            if ratio > found["ratio"]:
                about = {"output": o, "sizes": dict(case.sizes), "config": self.config.label}
                found |= {"ratio": ratio, **about}
        return WorstError(**found)

    def _case(self, case: Case) -> Finding | None:
        spec, types = self.variant.spec, dict.fromkeys(self.variant.spec.types, self.element)
        dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
        key, inputs = self._placed(case)
        call = partial(self.run, spec, self.variant.program, inputs, self.config, dtypes)
        try:
            results, again = call(), call()
        except (CompileError, LaunchError) as error:
            return Finding(message=error.message)
        if fault := _misformed(case, inputs, results, dtypes):
            return fault
        former, self.before[key] = self.before.get(key), (results, case)
        judged = {o: self._judged(case, o, results[o]) for o in case.truth}
        errors = torch.stack(
            [
                distances(judged[o], truth, case.allowed.get(o), case.rounding.get(o))
                for o, truth in case.truth.items()
            ]
        )
        # One wait for the device a case.
        found = dict(zip(case.truth, (Errors(*e) for e in errors.tolist()), strict=True))
        seen = list[tuple[Case, str, Errors, Errors]]()
        for o, error in found.items():
            limit = case.bounds[o]
            out, truth = judged[o], case.truth[o]
            if not within(error, limit) and few_wrong(out, truth, case.allowed.get(o)):
                if o in (certain := case.certain()):
                    allowed, rounding, limit = certain[o]
                    error = measure(out, truth, allowed, rounding)
            if not within(error, limit):
                wrong = self._wrong(case, o, (results[o], again[o]), error, former)
                if len(found) > 1:
                    said = {x: within(e, case.bounds[x]) for x, e in found.items()} | {o: False}
                    wrong.where["outputs"] = {x: ("wrong", "passed")[y] for x, y in said.items()}
                return wrong
            if not same(results[o], again[o]):
                return Finding(
                    message=f"{o} differs between two runs on the same inputs", where={"output": o}
                )
            seen.append((case, o, error, limit))
        self.errors += seen
        return None

    def _placed(self, case: Case) -> tuple[Place, Inputs]:
        """Put a case's inputs into tensors that former cases had."""
        structure = case.structure
        layout = structure.layout if structure else ""
        alias = structure.alias if structure else None
        key = tuple(case.sizes.items()), layout, alias
        a, b = self.variant.spec.gemm
        turned = {a} if "A" in self.variant.spec.turned else set()
        turned |= {b} if ("B" in self.variant.spec.turned) != (layout == "transposed") else set()
        if key not in self.places:
            place = {
                name: _room(value, layout, turned=name in turned)
                for name, value in case.inputs.items()
                if hasattr(value, "shape")
            }
            if alias:
                place[alias[1]] = place[alias[0]]
            self.places[key] = place
        place = self.places[key]
        for name, tensor in place.items():
            tensor.copy_(case.inputs[name])
        return key, {**case.inputs, **place}

    def _judged(self, case: Case, o: str, out: torch.Tensor) -> torch.Tensor:
        """Give an output as it is compared.

        Where the truth is NaN or infinite, either will do, but where it is -inf alone, as of a
        mask. So will anything where the reference itself makes NaN of an infinity, and what the
        vocabulary documents: a maximum over rows passes NaN over.
        """
        if case.structure is None or not case.structure.planted:
            return out
        truth, kind = case.truth[o], self.variant.program.outputs[o]
        masks = case.structure.infinite and not bool((truth.isnan() | (truth == math.inf)).any())
        known = ~out.double().isfinite() & ~truth.isfinite() & (not masks)
        passed_over = issubclass(kind, ColMax)
        if passed_over or case.structure.infinite:
            known |= truth.isnan()
        return torch.where(known, truth, out.double())

    def _wrong(
        self, case: Case, o: str, runs: tuple[torch.Tensor, torch.Tensor], error: Errors,
        former: tuple[dict[str, torch.Tensor], Case] | None,
    ) -> Finding:  # fmt: skip
        limit, label = case.bounds[o], f" ({case.label})" if case.label else ""
        said = (
            f"{o} is wrong{label}: error {error.norm:.2e} of its norm, {error.tile:.2e} in the "
            f"worst tile; allowed {limit.norm:.2e} and {limit.tile:.2e}; "
            f"{error.element:.3g} times what an element may err; "
        )
        if not math.isfinite(error.norm):  # no number says by how much
            said = f"{o} is wrong{label}: "
        if o in case.exact:
            said = f"{o} is wrong{label}: it has an exact value, which must be met bit for bit; "
        where: JsonObject = {"output": o}
        if former and _kept(o, runs[0], case, *former):
            said += "it is what the tensors' former contents gave"
        else:
            m, n = self.config.tile_m, self.config.tile_n
            tile = (n, m) if self.config.swap_ab else (m, n)
            one, two = (self._judged(case, o, x).to(x.dtype) for x in runs)  # what is compared
            seen = diagnose_stored(self.variant, case, o, (one, two), tile)
            said += seen.text
            where |= seen.where
        return Finding(message=said, where=where)


def _misformed(
    case: Case, inputs: Inputs, results: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> Finding | None:  # fmt: skip
    """Find a changed input, or an output of another name or form."""
    for name, value in case.inputs.items():
        if hasattr(value, "shape") and not same(value, inputs[name]):
            return Finding(message=f"input {name} was changed", where={"input": name})
    if list(results) != list(dtypes):
        return Finding(message=f"outputs are {list(results)}, expected {list(dtypes)}")
    for o, truth in case.truth.items():
        out = results[o]
        if tuple(out.shape) != tuple(truth.shape) or out.dtype != dtypes[o]:
            message = (
                f"{o} is {tuple(out.shape)} {out.dtype}, expected {tuple(truth.shape)} {dtypes[o]}"
            )
            return Finding(message=message, where={"output": o})
    return None


def _kept(
    o: str, out: torch.Tensor, case: Case, results: Mapping[str, torch.Tensor], former: Case
) -> bool:
    """Whether an output is a former case's, whose truth was mostly another."""
    if o not in former.truth or not same(results[o], out):
        return False
    return bool((former.truth[o] != case.truth[o]).double().mean() > 0.5)


def _room(value: torch.Tensor, layout: str, *, turned: bool) -> torch.Tensor:
    """Take memory for a tensor (M,), (M, N) or (N, K).

    It is contiguous, or with a layout has a row stride beyond its extent and begins 16 bytes into
    its storage. With `turned` it is so too, and its rows are columns in memory.
    """
    if not (layout or turned):
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    step = max(4, 16 // value.element_size())  # quack loads indices by 32 bytes
    rows, columns = reversed(value.shape) if turned else (1, *value.shape)[-2:]
    stride = columns + step + -columns % step
    room = torch.empty(step + rows * stride, dtype=value.dtype, device=value.device)[step:]
    room = room.view(rows, stride)[:, :columns]
    return room.mT if turned else room.view(value.shape) if value.ndim == 1 else room
