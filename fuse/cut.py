"""A graph cut into kernels and what is left to PyTorch.

- A product takes along what follows it, as long as the composer can write it: it is asked, and what
  it refuses is left out, with its reason.
- What needs a whole row of its own product is left out too: that row is complete only after the
  kernel. A statistic itself is an output of the kernel.
- Products of one A are one kernel. What follows several products belongs to the last one.
- What is computed element by element of tiles that a kernel reads, is computed in it: for itself,
  where that reads no more bytes, and for others, who then read what it stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coda_agent import primitives
from coda_agent.fuse.rules import (
    CASTS,
    OPAQUE,
    REDUCTIONS,
    Note,
    alive,
    carry_row_factors,
    flatten_rows,
    gather_first,
    product,
    users,
)
from coda_agent.fuse.spell import FIRST_LINE, spelled
from coda_agent.fuse.trace import Graph, Value
from coda_agent.primitives.errors import CodaError

MERGE = "products of one matrix are one kernel"
TAKE = "take along what follows a product"
BESIDE = "compute what is made of tiles that a kernel reads"
STATISTIC = "a row's statistic leaves the kernel as its output"
_TRIES = 12


Step = Callable[..., tuple[Any, ...]]
"""What runs a kernel: from a step's arguments to what it returns."""
Compose = Callable[[str, Mapping[str, Value], str], Step]
"""From a step's text, its arguments and their A to what runs it; raises CodaError where no kernel
computes it."""


@dataclass(eq=False)
class Kernel:
    """A step that is one launch.

    Attributes:
        name: Of the function that it is.
        text: That function.
        inputs: Its arguments, in order.
        members: What it computes.
        outputs: What it returns, in order.
        made: What runs it.
    """

    name: str
    text: str
    inputs: list[Value]
    members: list[Value]
    outputs: list[Value]
    made: Step


@dataclass(eq=False)
class Plan:
    """Steps in order, each a kernel or a call of torch.

    Attributes:
        graph: What they compute.
        steps: A value is a call that PyTorch makes.
        notes: What rules did.
        why: Of values left to PyTorch that follow a product, the reason.
    """

    graph: Graph
    steps: list[Kernel | Value]
    notes: list[Note]
    why: dict[Value, str] = field(default_factory=dict)

    @property
    def kernels(self) -> list[Kernel]:
        return [step for step in self.steps if isinstance(step, Kernel)]


def cut(graph: Graph, compose: Compose) -> Plan:
    """The plan of a graph."""
    barred = frozenset[str]()
    while True:
        notes: list[Note] = []
        changed = flatten_rows(gather_first(graph.copy(), notes), notes)
        changed = carry_row_factors(changed, notes, barred)
        plan = _Cut(_whole(changed), compose, notes).plan()
        members = {v for kernel in plan.kernels for v in kernel.members}
        vain = {x.of for x in plan.graph.values if x.of and product(x) and x not in members}
        if not vain - barred:
            return plan
        barred |= vain  # without its kernel, a factor would be a pass of its own


def _whole(graph: Graph) -> Graph:
    """Calls that were taken apart in vain are whole again: what gives a matrix after a row of its
    own product is a second pass anyhow, and PyTorch has one kernel for it."""
    homes = _Homes(graph, frozenset())
    states = {v: s for h in homes.groups for v, s in homes.states(h, frozenset()).items()}
    for value in graph.values:
        if value.whole and states.get(value) not in ("tile", "statistic"):
            if value.count == value.whole[1][0].count:
                value.func, value.args, value.kwargs = value.whole
        value.whole = None
    return alive(graph)


class _Homes:
    """Which kernel each value may belong to.

    Attributes:
        groups: The products of each kernel.
        home: The last kernel among what a value is made of, or -1.
    """

    def __init__(self, graph: Graph, apart: frozenset[Value]) -> None:
        self.graph = graph
        self.groups: dict[int, list[Value]] = {}
        self.home: dict[Value, int] = dict.fromkeys(graph.inputs, -1)
        by_a: dict[Value, int] = {}
        for v in graph.values:
            late = max([self.home[x] for x in v.inputs], default=-1)
            if (sides := product(v)) is None:
                self.home[v] = late
                continue
            group = by_a.get(sides[0], -1)
            if group <= late or sides[0] in apart:
                group = len(self.groups)
                by_a[sides[0]] = group
            self.groups.setdefault(group, []).append(v)
            self.home[v] = group

    def states(self, group: int, left: frozenset[Value]) -> dict[Value, str]:
        """What of a group's values is a tile of its kernel, a statistic, or known after it; those
        `left` out are not computed in it."""
        found: dict[Value, str] = {}
        products = self.groups[group]
        rows = products[0].count // products[0].shape[-1]
        for v in self.graph.values:
            before = {found[x] for x in v.inputs if x in found}
            if v in products:
                found[v] = "after" if v in left else "tile"
            elif not before or self.home[v] != group:
                continue
            elif v in left or v.called in OPAQUE or before & {"after", "statistic"}:
                found[v] = "after"
            elif v.called in REDUCTIONS and (
                v.count <= rows or v.shape[-1:] == v.inputs[0].shape[-1:]
            ):
                found[v] = "statistic"
            else:
                found[v] = "tile"
        return found


class _Cut:
    def __init__(self, graph: Graph, compose: Compose, notes: list[Note]) -> None:
        self.graph, self.compose, self.notes = graph, compose, notes
        self.users = users(graph)
        self.kernels: dict[int, Kernel] = {}
        self.why: dict[Value, str] = {}
        self.outside: set[Value] = set()  # views that the composer does not take

    def plan(self) -> Plan:
        apart = frozenset[Value]()
        before = len(self.notes)
        while True:
            homes = _Homes(self.graph, apart)
            failed = self._composed(homes)
            if failed is None:
                break
            apart |= {failed}
            self.notes[before:] = [
                n for n in self.notes[before:] if n.rule == MERGE and not n.fired
            ]
        return Plan(self.graph, self._ordered(), self.notes, self.why)

    def _composed(self, homes: _Homes) -> Value | None:
        """Makes the kernels; the A of products that go apart, where together they do not."""
        self.kernels.clear()
        for group, products in homes.groups.items():
            kernel, why = self._kernel(homes, group)
            a = product(products[0])
            if kernel is None and len(products) > 1 and a:
                self.notes.append(Note(MERGE, False, a[0].name, why))
                return a[0]
            if kernel is None:
                self.notes.append(Note(TAKE, False, products[0].name, why))
                self.why[products[0]] = why
                continue
            self.kernels[group] = kernel
            if len(products) > 1 and a:
                joined = ", ".join(p.name for p in products)
                self.notes.append(Note(MERGE, True, a[0].name, f"{kernel.name} computes {joined}"))
            if reduced := [v.name for v in kernel.outputs if v.called in REDUCTIONS]:
                why = f"{kernel.name} gives {', '.join(reduced)}"
                self.notes.append(Note(STATISTIC, True, kernel.name, why))
            others = [v for v in kernel.members if v.called not in CASTS and not v.view]
            if own := [v.name for v in others if homes.home[v] < group]:
                why = f"{', '.join(own)} in {kernel.name}"
                self.notes.append(Note(BESIDE, True, products[0].name, why))
            why = f"{len(others) - len(products)} operations in {kernel.name}"
            self.notes.append(Note(TAKE, True, products[0].name, why))
        return None

    def _kernel(self, homes: _Homes, group: int) -> tuple[Kernel | None, str]:
        """The largest kernel that the composer writes, or why there is none."""
        left: frozenset[Value] = frozenset()
        products = homes.groups[group]
        reasons: dict[Value, str] = {}
        first, beside = "", True
        for _ in range(_TRIES):
            states = homes.states(group, left)
            for v, state in states.items():
                if state == "after" and v not in reasons:
                    reasons[v] = "it needs more of its own product than a tile has"
            members = [v for v, state in states.items() if state != "after"]
            members, outputs = self._trimmed(members, products)
            if all(v in products or v.view or v.called in CASTS for v in members):
                return None, first or "nothing follows it that a kernel could take along"
            asked = self._with_views(members), outputs
            more = self._beside(homes, group, *asked) if beside else asked
            try:
                kernel = self._asked(group, *more, products)
            except _Refused as refused:
                if refused.value and refused.value not in members:
                    self.outside.add(refused.value)
                    continue
                if more != asked:
                    beside = False
                    continue
                first, beside = first or refused.why, True
                place = refused.value
                if place is None or place in products:
                    place = next((v for v in reversed(members) if v not in products), None)
                if place is None:
                    return None, first
                left |= {place}
                reasons[place] = refused.why
                continue
            self.why |= reasons
            return kernel, ""
        return None, first

    def _trimmed(
        self, members: list[Value], products: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Without views that only others take, which cost nothing after the kernel; and what is
        taken by others."""
        kept = list(members)
        while True:
            inside = set(kept)
            last = [v for v in kept if not any(u in inside for u in self.users[v])]
            out = [
                v for v in kept
                if v in self.graph.results or any(u not in inside for u in self.users[v])
            ]  # fmt: skip
            drop = [v for v in last if v not in out or (v.view and v not in products)]
            if not drop:
                return kept, out
            kept = [v for v in kept if v not in drop]

    def _asked(
        self, group: int, members: list[Value], outputs: list[Value], products: list[Value]
    ) -> Kernel:
        """The kernel with these members.

        Raises:
            _Refused: there is none.
        """
        inside = set(members)
        taken = _taken(members)
        if several := [v for v in (*taken, *outputs) if not v.tensor]:
            takers = [v for v in members if several[0] in v.inputs or v is several[0]]
            raise _Refused(takers[0], "it takes a part of what one call returns")
        sides = [side for p in products if (side := product(p))]
        first = self._roots([a for a, _ in sides[:1]], inside)
        inputs = dict.fromkeys([*first, *self._roots([b for _, b in sides], inside), *taken])
        names: dict[Value, str] = {}
        for x in inputs:
            bad = x.name in primitives.__all__ or x.name in ("acc", "F", "torch", "reference")
            names[x] = f"{x.name}_" if bad else x.name
        name = re.sub(r"\W|_(?=_)", "", self.graph.name) or "function"
        name = f"{name.strip('_')}_{group + 1}"
        try:
            text = spelled(name, names, members, outputs, first[0])
        except ValueError as error:
            raise _Refused(None, str(error)) from None
        try:
            made = self.compose(text, {n: x for x, n in names.items()}, names[first[0]])
        except CodaError as error:
            raise _Refused(_blamed(error.message, members), _said(error.message)) from None
        return Kernel(name, text, list(inputs), members, outputs, made)

    def _beside(
        self, homes: _Homes, group: int, members: list[Value], outputs: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """With what is computed of tiles that these members read; and what is taken by others."""
        products = homes.groups[group]
        sides = [side for p in products for side in product(p) or ()]
        known = {v for k in self.kernels.values() for v in k.members} | self.outside
        known |= {*sides, *self._roots(sides, {*members})}
        count = products[0].count
        cheap = lambda v: (
            v not in known and v.count >= count and homes.home[v] < group and _by_elements(v)
        )
        while True:  # for itself
            read = sum(x.bytes for x in _taken(members))
            for x in filter(cheap, _taken(members)):
                more = self._with_views([*members, x])
                pending = [y for y in _taken(more) if cheap(y)]
                while pending:
                    more = self._with_views([*more, *pending])
                    pending = [y for y in _taken(more) if cheap(y)]
                reads = sum(y.bytes for y in _taken(more))
                if reads < read or (reads == read and x not in self._before(_taken(more))):
                    members = more
                    break
            else:
                break
        before, taken = self._before(_taken(members)), _taken(members)
        inside = {*members, *taken}
        made = {v for v in self.graph.values if v.count == count and v not in before and cheap(v)}
        for v in self.graph.values:  # for others
            if v in made and v not in members and all(x in inside for x in v.inputs):
                inside.add(v)
        wanted = [
            v for v in self.graph.values
            if v in inside and v in made and (v in self.graph.results or self._needs(v))
        ]  # fmt: skip
        pending = [*wanted]
        while pending:
            v = pending.pop()
            if v not in members and v not in taken:
                members = [*members, v]
                pending += v.inputs
        members = self._with_views(members)
        outputs = [v for v in self.graph.values if v in outputs or v in wanted]
        return members, outputs

    def _needs(self, v: Value) -> bool:
        """Whether a call takes it that has to find it in memory."""
        return any(
            self._needs(u) if u.view else not _by_elements(u) and u.called not in REDUCTIONS
            for u in self.users[v]
        )

    def _before(self, values: Iterable[Value]) -> set[Value]:
        """These, and all that they are made of, by the kernels there are."""
        by = {v: k for k in self.kernels.values() for v in k.outputs}
        found, pending = set[Value](), [*values]
        while pending:
            if (v := pending.pop()) not in found:
                found.add(v)
                pending += by[v].inputs if v in by else v.inputs
        return found

    def _with_views(self, members: list[Value]) -> list[Value]:
        """With the views and casts of what others give, so that it is taken as it is in memory."""
        found = dict.fromkeys(members)
        given = {v for k in self.kernels.values() for v in k.outputs}
        pending = [x for v in members for x in v.inputs]
        while pending:
            x = pending.pop()
            if x in found or x in given or len(x.inputs) != 1 or not x.tensor:
                continue
            source = x.inputs[0]
            if not source.tensor or x.meta.ndim < source.meta.ndim:
                continue  # rows are flattened before the kernel, which then has one dim of them
            same = source.count == x.count or (
                x.called == "getitem" and x.meta.ndim == source.meta.ndim
            )
            if same and x not in self.outside and (x.view or x.called in CASTS):
                floating = x.meta.is_floating_point() == source.meta.is_floating_point()
                if floating and x.meta.itemsize >= source.meta.itemsize:
                    found[x] = None
                    pending.append(source)
        return [v for v in self.graph.values if v in found]

    def _roots(self, values: list[Value], inside: set[Value]) -> list[Value]:
        found: list[Value] = []
        for v in values:
            while v in inside and len(v.inputs) == 1:
                v = v.inputs[0]
            found.append(v)
        return found

    def _ordered(self) -> list[Kernel | Value]:
        """Steps, each after what it takes; a kernel as late as it is needed."""
        by = {v: k for k in self.kernels.values() for v in k.outputs}
        steps: dict[Kernel | Value, None] = {}

        def need(v: Value) -> None:
            step: Kernel | Value = by.get(v, v)
            if v.func is None or step in steps:
                return
            for x in step.inputs:
                need(x)
            steps[step] = None

        for v in self.graph.values:  # in order, so that no call nests deeply
            if v in by or not any(v in k.members for k in self.kernels.values()):
                need(v)
        for v in self.graph.results:
            need(v)
        return [s for s in steps if isinstance(s, Kernel) or s in self._wanted(list(steps))]

    def _wanted(self, steps: list[Kernel | Value]) -> set[Value]:
        """Values that a later step or the result takes."""
        found = set(self.graph.results)
        for step in reversed(steps):
            if isinstance(step, Kernel) or step in found:
                found |= set(step.inputs)
        return found


def _taken(members: Iterable[Value]) -> dict[Value, None]:
    """What members take that is none of them."""
    inside = {*members}
    return dict.fromkeys(x for v in inside for x in v.inputs if x not in inside)


def _by_elements(v: Value) -> bool:
    """Whether a call computes a matrix of others element by element; the composer knows better."""
    if v.func is None or not v.tensor or not v.meta.is_floating_point():
        return False
    moves = v.view or v.called in OPAQUE or v.called in REDUCTIONS
    return not moves and any(x.tensor and x.shape == v.shape for x in v.inputs)


class _Refused(Exception):
    """What the composer did not take, and why."""

    def __init__(self, value: Value | None, why: str) -> None:
        super().__init__(why)
        self.value, self.why = value, why


def _blamed(message: str, members: list[Value]) -> Value | None:
    """The call that a message names, by its line or by the name that the line gives."""
    if found := re.search(r"`(\w+) = ", message):
        return next((v for v in members if v.name == found[1]), None)
    found = re.match(r"\S+:(\d+): ", message)
    at = int(found[1]) - FIRST_LINE if found else -1
    return members[at] if 0 <= at < len(members) else None


def _said(message: str) -> str:
    """A message without the place in a text that nobody sees."""
    return re.sub(r"^\S+:(\d+: )?\s*(`[^`]*`: )?", "", message)
