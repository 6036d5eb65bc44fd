"""The steps of a layer, forward and backward: whose kernel each is, and what it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.capture.config import Layer
from coda_agent.agent.capture.pieces import STEPS, Piece, pieces
from coda_agent.agent.capture.pullback import Moved, moved, pulled_back, total
from coda_agent.agent.capture.pullback import product as _product
from coda_agent.agent.derive.backward import (
    WEIGHT_GRADIENT,
    bytes_of_tiles,
    derive,
    weight_gradient,
)
from coda_agent.agent.derive.checking import check
from coda_agent.agent.derive.kernel import Asked, Form
from coda_agent.agent.plans.choice import Made, planned
from coda_agent.agent.plans.cut import Kernel, Plan
from coda_agent.agent.plans.kernels import Composed, equal
from coda_agent.agent.plans.rules import as_called, product
from coda_agent.agent.plans.show import shown
from coda_agent.agent.plans.trace import Value, record
from coda_agent.primitives.errors import CodaError, ProgramError
from coda_agent.primitives.inspect import launches
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.admission import admit
from coda_agent.specs.layout import extent

FORWARD, BACKWARD = "forward", "backward"
_CONSTANT = frozenset({"cos", "sin"})


@dataclass(frozen=True)
class Step:
    """One step of the plan of a piece.

    Attributes:
        piece: "layer", "heads" or "exit".
        direction: "forward" or "backward".
        name: What is computed.
        kernel: The accepted kernel, or the spec that was written; "" of PyTorch's.
        accepted: Whether it is an accepted one.
        moved: Bytes, launches, and the least seconds on an H200.
        note: Why PyTorch has it, or what the derivation chose.
    """

    piece: str
    direction: str
    name: str
    kernel: str
    accepted: bool
    moved: Moved
    note: str = ""

    @property
    def single(self) -> bool:
        """Whether it is one call of PyTorch."""
        return self.name.startswith("of ") or " = " in self.name


@dataclass
class Captured:
    """A model's layer.

    Attributes:
        steps: In order, of each piece its forward ones first.
        eager: What each piece and direction moves where every call is one of PyTorch.
        specs: Texts, by name, of the steps that no accepted kernel computes.
    """

    steps: list[Step] = field(default_factory=list)
    eager: dict[tuple[str, str], Moved] = field(default_factory=dict)
    specs: dict[str, str] = field(default_factory=dict)

    def planned(self, piece: str, direction: str) -> Moved:
        """What the plan of a piece moves."""
        return total(s.moved for s in self.steps if (s.piece, s.direction) == (piece, direction))


def captured(layer: Layer, batch: int = 2, positions: int = 4096) -> Captured:
    """The steps of a model's layer at so many tokens, in bfloat16.

    Raises:
        Unplanned: a piece cannot be recorded.
    """
    found = Captured()
    for piece in pieces(layer, batch, positions):
        _Piece(layer, piece, found).add()
    return found


class _Piece:
    """One piece's steps on their way to `found`."""

    def __init__(self, layer: Layer, piece: Piece, found: Captured) -> None:
        self.layer, self.piece, self.found = layer, piece, found

    def add(self) -> None:
        import torch

        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, kind or "bfloat16"), device="meta")
            for name, (shape, kind) in self.piece.inputs.items()
        }

        def function(**t: torch.Tensor) -> object:
            return self.piece.function(self.layer, t)

        function.__name__ = f"{self.layer.name}_{self.piece.name}"
        graph = record(function, (), tensors, list(tensors))
        plan, called = planned(graph, kept=False), as_called(graph)
        costs = shown(graph, plan)
        if sum(c.floor_us for c in costs.steps) > costs.eager.floor_us:
            plan = Plan(called, [*called.values], [])
            costs = shown(graph, plan)
        eager = Moved(costs.eager.bytes, costs.eager.launches, costs.eager.floor_us / 1e6)
        back = total(pulled_back(called.values, _CONSTANT).values())
        name = self.piece.name
        self.found.eager |= {(name, FORWARD): eager, (name, BACKWARD): back}
        kernels = {k.name: k for k in plan.kernels}
        for cost in costs.steps:
            moves = Moved(cost.bytes, cost.launches, cost.floor_us / 1e6)
            if kernel := kernels.get(cost.step):
                about = _about(kernel)
                known = about.accepted or self._spec(kernel, "", about.spec.text)
                accepted = bool(about.accepted)
                self._step(FORWARD, self._name(kernel), known, moves, accepted=accepted)
            else:
                self._step(FORWARD, cost.step, "", moves, cost.what)
        steps, specs = [*self.found.steps], {**self.found.specs}
        self._backward(plan)
        if self.found.planned(name, BACKWARD).seconds > back.seconds:
            self.found.steps, self.found.specs = steps, specs
            self._step(BACKWARD, "all of it", "", back, "PyTorch: kernels would take longer")

    def _backward(self, plan: Plan) -> None:
        pulled = pulled_back(plan.graph.values, _CONSTANT)
        brought = set[Value]()
        for kernel in plan.kernels:
            self._derived(kernel, plan, pulled, brought)
        for kernel in plan.kernels:
            self._products(self._name(kernel), _sides(kernel.members), brought)
        for value in plan.steps:
            if isinstance(value, Value) and value in pulled:
                moves = pulled[value]
                if (sides := product(value)) and _source(sides[0]) in brought:
                    k, n = sides[0].shape[-1], value.shape[-1]
                    moves = moves.less(_product(sides[0].count // k, k, n))
                self._step(BACKWARD, f"of {value.called} {value.name}", "", moves)

    def _derived(
        self, kernel: Kernel, plan: Plan, pulled: Mapping[Value, Moved], brought: set[Value]
    ) -> None:
        """The gradient of what follows a kernel's product."""
        into, columns, norm = _next(kernel, plan)
        name = f"{self._name(kernel)}_bwd"
        rest = total(m for v, m in pulled.items() if v in kernel.members and not product(v))
        try:
            derived = derive(_about(kernel).spec, Asked(into.name if into else "", norm))
            check(derived)
            texts = {x: text for x, text in derived.files.items() if x != WEIGHT_GRADIENT}
            specs = {x: load_spec(Path(f"{x}.md"), text=text) for x, text in texts.items()}
            for found in specs.values():
                admit(found)
        except CodaError as error:
            self._step(BACKWARD, name, "", rest, f"PyTorch: {error.message}")
            return
        sides = _sides(kernel.members)
        a, k, _ = sides[0]
        m, wide = a.count // k, sum(n for *_, n in sides)
        sizes = {"M": m, "N": wide, "K": k}
        if derived.kernel.form is Form.MERGED and into:
            brought.add(into)
            sizes = {"M": m, "N": into.shape[-1], "K": columns}
        if derived.kernel.form is Form.ELEMENTWISE and derived.kernel.computes:
            one = moved(bytes_of_tiles(derived.kernel, m, wide))
            self._step(BACKWARD, name, "", one, "PyTorch: one pass, where torch.compile fuses it")
        for file, found in specs.items():
            suffix = file[-4:]
            twin, count, note = "", 1, ""
            try:
                written = read_programs(Composer().write(found, lambda *_: None))
                program = written[found.variant(found.bind())]
                twin, count = equal(program, found), launches(program, DEFAULT_CONFIGS["sm_90a"])
            except ProgramError as error:
                note = f"the composer leaves it to an author: {error.message}"
            if suffix == "_bwd":
                moves = moved(_bytes(found, sizes), 2 * math.prod(sizes.values()), count)
            else:
                moves = moved(2 * m * wide, launches=0)
                note = note or "what its forward stores as well"
            known = twin or self._spec(kernel, suffix, texts[file])
            own = f"{self._name(kernel)}{suffix}"
            self._step(BACKWARD, own, known, moves, note, accepted=bool(twin))

    def _products(
        self, name: str, sides: Sequence[tuple[Value, int, int]], brought: set[Value]
    ) -> None:
        """The gradients of a product's operands, as far as no kernel has them already."""
        a, k, _ = sides[0]
        m, n = a.count // k, sum(n for _, _, n in sides)
        if _source(a) not in brought:
            self._step(BACKWARD, f"{name}: input", "", _product(m, k, n))
        # It is added to what .grad holds: read and written.
        self.found.specs[WEIGHT_GRADIENT] = weight_gradient()
        self._step(BACKWARD, f"{name}: weight", WEIGHT_GRADIENT, _product(n, k, m, 2 * n * k))

    def _step(
        self, direction: str, name: str, kernel: str, moves: Moved, note: str = "",
        accepted: bool = False,
    ) -> None:  # fmt: skip
        name = name.removeprefix(f"{self.layer.name}_")
        step = Step(self.piece.name, direction, name, kernel, accepted, moves, note)
        self.found.steps += [step] if moves.bytes else []

    def _name(self, kernel: Kernel) -> str:
        """A kernel's name, by the weight that it multiplies."""
        weight = next(s[1].name for v in kernel.members if (s := product(v)))
        step = STEPS.get(weight.removeprefix("w_"), "projections")
        last = "_last" * (self.piece.name == "exit" and step != "head")
        return f"{self.layer.name}_{step}{last}"

    def _spec(self, kernel: Kernel, suffix: str, text: str) -> str:
        """Keeps a kernel's spec under a name of the model's, unless one with the same words is
        there; says which."""
        stem, count = self._name(kernel), 1
        while True:
            name = f"{stem}{f'_{count}' if count > 1 else ''}"
            own = text.replace(kernel.name, name)
            known = self.found.specs.setdefault(f"{name}{suffix}", own)
            if known == own:
                return f"{name}{suffix}"
            count += 1


def _about(kernel: Kernel) -> Composed:
    assert isinstance(kernel.made, Made)
    return kernel.made.about


def _sides(values: Iterable[Value]) -> list[tuple[Value, int, int]]:
    """Of each product among these its A, and the widths of what it sums over and gives."""
    found = ((v, product(v)) for v in values)
    return [(s[0], s[0].shape[-1], v.shape[-1]) for v, s in found if s]


def _source(x: Value) -> Value:
    while x.view and x.inputs:
        x = x.inputs[0]
    return x


def _next(kernel: Kernel, plan: Plan) -> tuple[Value | None, int, str]:
    """The output that the next product alone takes, that product's columns, and the statistic that
    scales its rows; of several products only where they are one kernel."""
    for output in kernel.outputs:
        takers = [v for v in plan.graph.values if any(_source(x) is output for x in v.inputs)]
        takers = [v for v in takers if not v.view]
        products = [v for v in takers if (s := product(v)) and _source(s[0]) is output]
        homes = {id(k) for k in plan.kernels for v in products if v in k.members}
        if not products or products != takers or output in plan.graph.results:
            continue
        if len(products) > 1 and (len(homes) > 1 or not homes):
            continue
        means = [v.name for v in kernel.outputs if v.called == "mean" and products[0].of]
        return output, sum(v.shape[-1] for v in products), (means or [""])[0]
    return None, 0, ""


def _bytes(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Of all inputs and outputs, each once; 16 bits where the type is left open."""
    widths = {"float32": 4, "int32": 4, "int64": 8}
    return sum(
        math.prod(extent(e, sizes) for e in spec.symbolic_shape(x)) * widths.get(t.dtype, 2)
        for tensors in (spec.inputs, spec.outputs)
        for x, t in tensors.items()
    )
