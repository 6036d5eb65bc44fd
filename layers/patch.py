"""Models of Hugging Face's Llama and its kin, run by the kernels.

- A layer's forward is replaced, and so are those of its attention's projections, which hand over
  what one product gave. Attention itself is the model's own code: masks, caches, head norms.
- Parameters keep their names, and stay the optimizer's. In training, weights are packed at each
  call: query, key and value, and gate and up, are copied, and the copies live until the backward
  pass. In eval without gradients they are packed once and kept beside the parameters, until a
  parameter changes in place. What is written by `.data` is not noticed: call `Report.forget`.
- With `pack`, what is packed are the parameters (`packed.py`), and nothing is copied.
- In training with labels, the loss comes without logits; the output's are then None.
- With `fp8`, products of layers are in e4m3 in training, forward. Parameters, the stream, attention
  and the head stay bfloat16, and so does all that runs in eval without gradients.
- What does not fit is left as it is, and the report says why. What does not fit in a single call
  (another type, autocast) runs by the model's own code.
- FSDP2 may shard layers, before or after. Where the kernels run, weights are whole: DTensors, as of
  tensor parallelism, are refused. Its sums over ranks are between products that are fused here.
- Between layers the `Normed` of a stream travels as an attribute of its tensor. Where it gets lost,
  as by checkpoints and hooks, PyTorch computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.layers.fit import (
    TYPES,
    check_whole,
    fsdp,
    gamma,
    gathered,
    norm_offset,
    unfit,
    unfit_head,
)
from coda_agent.layers.functional import Normed
from coda_agent.layers.head import head_loss
from coda_agent.layers.packed import unpackable
from coda_agent.layers.patched import Carried, Layer, Sandwich, Tables


@dataclass
class Report:
    """What `apply_coda_kernels` did.

    Attributes:
        replaced: What runs by kernels, and which parts of it.
        left: What does not, and why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _layers: list[Layer] = field(default_factory=list)
    _around: tuple[nn.Module, ...] = ()
    _tables: Tables = field(default_factory=lambda: Tables())
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def revert(self) -> None:
        """Give the model its own code back.

        Raises:
            TypeError: packed weights have been sharded since; nothing is undone then.
        """
        for layer in self._layers if self._undo else ():
            if layer.packed is not None:
                layer.packed.check()
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Drop what is kept for later calls: packed weights, and the table of rotations."""
        self._tables.last = None
        for layer in self._layers:
            layer.kept = None

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give `module` another forward, which may have one of another patch."""
        before = vars(module).get("forward")

        @wraps(module.forward)  # its signature is what trainers look at
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        module.forward = replaced
        if not hasattr(module, "_coda_bound"):
            module._coda_bound = _Bound()  # pyright: ignore[reportArgumentType]
            self._undo.append(lambda: delattr(module, "_coda_bound"))
        if before is None:
            self._undo.append(lambda: delattr(module, "forward"))
        else:
            self._undo.append(lambda: setattr(module, "forward", before))

    def __str__(self) -> str:
        lines = [f"{name}: by kernels: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: left as it is: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


class _Bound:
    """Kept in a module whose forward belongs to it alone."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "a model that runs by the kernels was copied, and the copy would run the weights of "
            "this one; copy it before apply_coda_kernels, or after revert()"
        )


def apply_coda_kernels(model: nn.Module, *, pack: bool = False, fp8: bool = False) -> Report:
    """Run a causal language model by the kernels, from its next call on.

    Args:
        model: One with `model.layers`, `model.norm` and `lm_head`, as Hugging Face's Llama,
            Mistral, Qwen2, Qwen3 and Gemma 3 have them, in bfloat16 or float16.
        pack: Whether the weights of query, key and value, and of gate and up, become one parameter
            each. A training step then spends neither time nor memory on copies of them. Make the
            optimizer, and call `fully_shard`, afterwards: these parameters are new ones. State
            dicts stay as they were.
        fp8: Whether layers in bfloat16 multiply in FP8 in training: forward, by scales that each
            step finds. Gradients are those of bfloat16 products at the values that were computed.

    Returns:
        What was replaced and what was not. `revert()` undoes it.

    Raises:
        TypeError: the model has no such layers, or one has weights that are sharded otherwise than
            FSDP2 shards whole layers, as tensor parallelism does; nothing is replaced then.
    """
    stack = getattr(model, "model", model)
    report = Report(_around=(model, stack))
    layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, nn.Module):
        raise TypeError(
            f"{type(model).__name__} has no model.layers and model.norm, "
            "expected a causal language model of Llama's structure"
        )
    if pack and fsdp((model, *stack.modules())):
        raise TypeError(f"{type(model).__name__} is sharded already; pack=True before fully_shard")
    try:
        with gathered(model, stack):
            _patch(model, stack, report, pack, fp8)
    except BaseException:
        report.revert()
        raise
    return report


def _patch(model: Any, stack: Any, report: Report, pack: bool, fp8: bool) -> None:
    last = stack.norm
    for i, (layer, behind) in enumerate(zip(stack.layers, (*stack.layers[1:], last), strict=True)):
        after = getattr(behind, "input_layernorm", behind)
        with gathered(layer, behind):
            check_whole(f"layers.{i}", layer)
            check_whole("norm" if after is last else f"layers.{i + 1}.input_layernorm", after)
            _replace(layer, f"layers.{i}", after, report, pack, fp8)
    head = getattr(model, "lm_head", nn.Module())
    with gathered(last, head):
        check_whole("lm_head", head)
        if why := unfit_head(model, last):
            report.left["lm_head"] = why
        else:
            _Head(model, last, report)
            report.replaced["lm_head"] = "norm + cross-entropy, in training with labels"


def _replace(layer: Any, name: str, after: Any, report: Report, pack: bool, fp8: bool) -> None:
    types = (torch.bfloat16,) if fp8 else TYPES
    if why := unfit(layer, after, types) or (unpackable(layer) if pack else ""):
        report.left[name] = why
        return
    kind = Sandwich if hasattr(layer, "pre_feedforward_layernorm") else Layer
    patched = kind(layer, name, after, report, pack, fp8)
    report._layers.append(patched)
    report.replaced[name] = patched.says()


apply_coda_kernels_to_llama = apply_coda_kernels_to_mistral = apply_coda_kernels
apply_coda_kernels_to_qwen2 = apply_coda_kernels_to_qwen3 = apply_coda_kernels
apply_coda_kernels_to_gemma3 = apply_coda_kernels


class _Head:
    """The final norm, the head and the loss by the kernels, in training with labels. Norm and head
    are called as modules, so FSDP gathers their weights: the norm gives its stream, and the head,
    which is given that, the loss."""

    def __init__(self, model: Any, norm: Any, report: Report) -> None:
        self.model, self.norm, self.original = model, norm, model.forward
        self.offset = norm_offset(norm) or 0.0
        self.held = False
        self.normed: tuple[Normed, Tensor] | None = None  # what the norm leaves to the head
        self.asked: tuple[Tensor, int, Any] | None = None
        # Outside of torch.compile's graphs: a loss of an export, which takes gradients in its
        # forward pass too, was zeros by Inductor on an H200 (torch 2.11), and right on a CPU.
        self.loss: Any = torch.compiler.disable(head_loss)
        plain, project = norm.forward, model.lm_head.forward
        report.replace(norm, lambda x: self._norm(x) if self.held else plain(x))
        report.replace(model.lm_head, lambda x: self._loss(x) if self.asked else project(x))
        report.replace(model, self)

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        model = self.model
        plain = (
            not model.training
            or len(args) > 5
            or kwargs.get("logits_to_keep", 0) != 0
            or kwargs.get("return_dict") is False
            or torch.is_autocast_enabled(model.lm_head.weight.device.type)
        )
        if labels is None or plain:
            return self.original(*args, labels=labels, **kwargs)
        from transformers.modeling_outputs import (  # pyright: ignore[reportMissingImports]
            CausalLMOutputWithPast,
        )

        for name in ("logits_to_keep", "return_dict"):
            kwargs.pop(name, None)
        self.held = True
        try:
            outputs = model.model(*args, **kwargs)
            x, ignored = outputs.last_hidden_state, kwargs.get("ignore_index", -100)
            targets = kwargs.get("shift_labels")
            if targets is None:
                targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
            targets = targets.flatten().to(x.device)
            self.asked = targets, ignored, kwargs.get("num_items_in_batch")
            loss = model.lm_head(x)
        finally:
            self.held, self.normed, self.asked = False, None, None
        return CausalLMOutputWithPast(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _norm(self, x: Tensor) -> Tensor:
        check_whole("norm", self.norm)
        # Cloned, since FSDP may take the weight back before the head runs.
        weight = gamma(self.norm, self.offset).to(x.dtype).clone()
        self.normed = Carried.take(x, self.norm, self.offset), weight
        return x

    def _loss(self, x: Tensor) -> Tensor:
        check_whole("lm_head", self.model.lm_head)
        assert self.normed is not None and self.asked is not None
        (given, weight), (targets, ignored, count) = self.normed, self.asked
        return self.loss(
            x.flatten(0, 1),
            given,
            weight,
            self.model.lm_head.weight,
            targets,
            ignore_index=ignored,
            count=count,
        )
