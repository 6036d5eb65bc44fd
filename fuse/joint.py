"""The pass that puts kernels into a graph, before Inductor parts it."""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from coda_agent.agent.authors.composer.retrace import share
from coda_agent.fuse.around import Around, alone, around
from coda_agent.fuse.build import build, compilers
from coda_agent.fuse.choice import compile_ahead, timed, untimed
from coda_agent.fuse.codegen import call_past_dispatcher
from coda_agent.fuse.hints import hinted
from coda_agent.fuse.kept import SOURCES, path_of, remember, remembered
from coda_agent.fuse.kernels import Kernel, chosen
from coda_agent.fuse.nodes import PRODUCTS, described, is_tangent, mark_backward
from coda_agent.fuse.replace import replace_regions
from coda_agent.fuse.rules import CARRIED, carried_for_nothing, carry_back, prepare
from coda_agent.fuse.show import Shown, shown
from coda_agent.fuse.spelling import spell_logsumexp
from coda_agent.fuse.verify import known_fault
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import fingerprint
from coda_agent.runtime.function import supported
from coda_agent.runtime.program_operator import kernel_operator

kernel_operator()  # a graph out of a cache calls it, and no pass of ours runs before
call_past_dispatcher()

SEEN: ContextVar[list[Shown] | None] = ContextVar("SEEN", default=None)
"""Where graphs that are compiled are described, for who asks."""


class Kernels(CustomGraphPass):
    """A pass that puts kernels in the place of a graph's regions.

    Args:
        first: Another pass, which runs before.
        fp8: Whether products of a training graph's forward pass are in FP8.
    """

    def __init__(self, first: Any = None, *, fp8: bool = False) -> None:
        self._fp8 = fp8
        self._first: Any = config.joint_custom_post_pass if first is None else first

    def uuid(self) -> str | None:
        """What a compiled graph in Inductor's caches depends on."""
        parts = [fingerprint(*SOURCES), torch.__version__, str(self._fp8)]
        if self._first is not None:
            if (own := self._first.uuid()) is None:
                return None
            parts.append(str(own))
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_device_name())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        if self._first is not None:
            self._first(graph)
        stable_topological_sort(graph)  # Inductor's passes leave it in another order
        with left_where_it_fails(graph):
            put_kernels(graph, fp8=self._fp8)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a module's graph, with what AOTAutograd reads of its nodes."""
    copy = fx.Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    (end,), (last,) = (g.find_nodes(op="output") for g in (graph, copy))
    last.meta, copy._codegen = dict(end.meta), graph._codegen
    for new, old in zip(copy.nodes, graph.nodes, strict=True):
        vars(new).update({name: x for name, x in vars(old).items() if name == "_dynamo_source"})
    return copy


@contextmanager
def left_where_it_fails(graph: fx.Graph) -> Iterator[None]:
    """Leave a module's graph as it was where a change fails; warn."""
    module: Any = graph.owning_module
    before = copy_graph(graph)
    try:
        yield
    except Exception as error:  # whatever it is, the graph as it was is right
        warnings.warn(f"coda-agent: a graph is left as it was: {error!r}", stacklevel=3)
        module.graph = before


def put_kernels(graph: fx.Graph, *, fp8: bool = False) -> None:
    """Put kernels that are right and pay into a functional ATen graph.

    Args:
        graph: It.
        fp8: As that of `Kernels`.
    """
    products = [n for n in graph.nodes if n.target in (*PRODUCTS, torch.ops.aten.bmm.default)]
    devices = {node.meta["val"].device for node in products}
    if len(devices) != 1 or ((device := devices.pop()).type == "cuda" and not supported(device)):
        return
    timing = device.type == "cuda"
    made = compilers() if timing else nullcontext()
    with _disable_current_modes(), unset_fake_temporarily(), hinted(graph), made as pool:
        path = path_of("graph", described(graph))
        if pool and not remembered(path):  # there is something to compile
            pool.start()
        mark_backward(graph)
        notes = prepare(graph, fp8=fp8)
        known, kernels = chosen(graph)
        placed = partial(around, known, constants=_constants(graph)) if timing else alone
        places = {region: placed(region) for region in known.regions}
        new = {_key(x, kernels[r]): (x, kernels[r]) for r, x in places.items()} if timing else {}
        left = [pair for key, pair in new.items() if key not in _JUDGED]
        left = [(x, kernel) for x, kernel in left if untimed(x, kernel, device)]
        if pool:

            def meanwhile() -> None:
                for place, _ in left:
                    compile_ahead(place, device)

            build(pool, [(x.region, kernel) for x, kernel in left], device, meanwhile)
            remember(path, True)
        for region, place in places.items():
            found = _judged(place, kernels[region], device)
            if isinstance(found, str):
                known.leave(region, found)
            else:
                kernels[region] = found
        if left:
            # Frames of imports that fail inside Inductor hold their callers', and what these drew,
            # until Python collects its garbage (seen on a CPU). A step of Llama had 4.6 GB more on
            # an H200, as much as one region draws.
            gc.collect()
        back = carried_for_nothing(graph, known.taken)
        notes = [note for note in notes if note not in map(CARRIED.format, back)]
        seen = SEEN.get()
        found = None if seen is None else shown(known, kernels, notes)
    replace_regions(known, {region: kernels[region].text for region in known.regions})
    carry_back(back.values())
    spell_logsumexp(graph)
    share(graph)
    if seen is not None and found is not None:
        seen.append(found)  # it is true only now


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Find weights that Inductor freezes, and what is made of them."""
    context, inputs = TracingContext.try_get(), graph.find_nodes(op="placeholder")
    if not config.freezing or context is None or any(map(is_tangent, inputs)):
        return set()
    weights = context.params_flat or ()
    found = set(inputs[: len(weights)])
    for node in graph.nodes:
        if node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _judged(place: Around, kernel: Kernel, device: torch.device) -> Kernel | str:
    """Judge a kernel, once for layers alike; give it or a reason."""
    if (key := _key(place, kernel)) not in _JUDGED:
        try:
            found = timed(place, kernel, device) if device.type == "cuda" else kernel
            text = None if isinstance(found, str) else found.text
            reason = found if text is None else known_fault(place.region, text, device)
            _JUDGED[key] = reason or found
        except CodaError as error:  # sizes that no kernel takes
            _JUDGED[key] = error.message
        except torch.OutOfMemoryError:
            _JUDGED[key] = "what it computes twice, to be compared, does not fit"
    return _JUDGED[key]


def _key(place: Around, kernel: Kernel) -> tuple[str, str]:
    return place.described, kernel.text


_JUDGED: dict[tuple[str, str], Kernel | str] = {}
