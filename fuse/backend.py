"""`torch.compile(model, backend="coda")`: Inductor, with kernels in its graphs where they pay.

Dynamo and AOTAutograd read the model. `joint.Kernels` puts kernels into the graph of both passes
before Inductor parts it, and Inductor makes the rest. Without a GPU the interpreter stands for
kernels and PyTorch for Inductor's code: results are checked everywhere, without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from coda_agent.fuse.attention import fold_masks
from coda_agent.fuse.joint import Kernels, copy_graph, left_where_it_fails
from coda_agent.fuse.loops import join_loops
from coda_agent.fuse.losses import spell_by_rows
from coda_agent.fuse.masks import by_masks, fold_given_masks
from coda_agent.primitives.errors import CodaError


def coda(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Any:
    """Compile a graph of Dynamo's: the backend "coda" of torch.compile.

    Args:
        module: The graph.
        inputs: Its arguments at the first call.
        mode: As torch.compile's, such as "reduce-overhead".
        options: Inductor's. `{"fp8": "forward"}` is ours: products of weights in FP8, in the
            forward pass of a graph with gradients.

    Returns:
        The compiled graph.

    Raises:
        CodaError: `fp8` is something else.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    general: fx.GraphModule | None = None
    values: dict[int, torch.Tensor] = {}
    with left_where_it_fails(module.graph):
        for change in fold_masks, join_loops, spell_by_rows:
            change(module.graph)
        before = copy_graph(module.graph)
        if values := fold_given_masks(module.graph, inputs):
            general = fx.GraphModule(module, before)
    module.recompile()
    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
    patches = {name.replace("-", "_"): value for name, value in patches.items()}
    if (fp8 := patches.pop("fp8", None)) not in (None, "forward"):
        raise CodaError(f"the option fp8 is {fp8!r}, expected 'forward' or none")
    first = patches.get("joint_custom_post_pass")
    patches["joint_custom_post_pass"] = Kernels(first, fp8=fp8 is not None)
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    inner = compile_fx_inner if on_gpu else _called
    found: Any = compile_fx(module, inputs, inner, patches)
    if general is None:
        return found

    def compiled(args: Sequence[Any]) -> Any:
        return compile_fx(general, args, inner, patches)

    return by_masks(values, found, general, compiled)


def _called(module: fx.GraphModule, _: object, **__: object) -> Any:
    """Make code that runs a graph's calls, in place of Inductor's."""
    from torch._inductor.output_code import OutputCode

    iota = torch.ops.prims.iota.default
    for node in module.graph.find_nodes(op="call_function", target=iota):
        if node.kwargs["dtype"] is torch.uint16:  # of torch.eye; a CPU counts in no such numbers
            node.kwargs = {**node.kwargs, "dtype": torch.int64}
    module.recompile()

    class Calls(OutputCode):
        def __init__(self) -> None:
            self._boxed_call = True  # of the instance: wrappers take its dict along

        def __call__(self, *inputs: object) -> object:
            if len(inputs) != 1 or not isinstance(inputs[0], list):
                return module(*inputs)
            given = [*inputs[0]]
            inputs[0].clear()  # so that what is needed no more is freed
            return module(*given)

        def post_compile(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

        def set_triton_bundle(self, triton_bundle: object) -> None:
            pass

    return Calls()
