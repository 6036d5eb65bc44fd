"""Models of Hugging Face's Llama and its kin, run by the kernels.

- A layer's forward is replaced, and so are those of its attention's projections, which hand over
  what one product gave. Attention itself is the model's own code: masks, caches, head norms.
- Parameters keep their names, and stay the optimizer's. In training, weights are packed at each
  call: query, key and value, and gate and up, are copied, and the copies live until the backward
  pass. In eval without gradients they are packed once and kept beside the parameters, until a
  parameter changes in place. What is written by `.data` is not noticed: call `Report.forget`.
- With `pack`, what is packed are the parameters (`packed.py`), and nothing is copied.
- In training with labels, the loss comes without logits; the output's are then None.
- What does not fit is left as it is, and the report says why. What does not fit in a single call
  (another type, autocast) runs by the model's own code.
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

from coda_agent.layers.fit import gamma, norm_offset, unfit, unfit_head
from coda_agent.layers.functional import head_loss
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
    _tables: Tables = field(default_factory=lambda: Tables())
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def revert(self) -> None:
        """Give the model its own code back."""
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


def apply_coda_kernels(model: nn.Module, *, pack: bool = False) -> Report:
    """Run a causal language model by the kernels, from its next call on.

    Args:
        model: One with `model.layers`, `model.norm` and `lm_head`, as Hugging Face's Llama,
            Mistral, Qwen2, Qwen3 and Gemma 3 have them, in bfloat16 or float16.
        pack: Whether the weights of query, key and value, and of gate and up, become one parameter
            each. A training step then spends neither time nor memory on copies of them. Make the
            optimizer afterwards: these parameters are new ones. State dicts stay as they were.

    Returns:
        What was replaced and what was not. `revert()` undoes it.

    Raises:
        TypeError: the model has no such layers.
    """
    report, stack = Report(), getattr(model, "model", model)
    layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, nn.Module):
        raise TypeError(
            f"{type(model).__name__} has no model.layers and model.norm, "
            "expected a causal language model of Llama's structure"
        )
    norms = [*[getattr(layer, "input_layernorm", None) for layer in layers[1:]], last]
    for i, (layer, after) in enumerate(zip(layers, norms, strict=True)):
        name = f"layers.{i}"
        if why := unfit(layer, after) or (unpackable(layer) if pack else ""):
            report.left[name] = why
            continue
        kind = Sandwich if hasattr(layer, "pre_feedforward_layernorm") else Layer
        patched = kind(layer, after, report, pack)
        report._layers.append(patched)
        report.replaced[name] = patched.says()
    if why := unfit_head(model, last):
        report.left["lm_head"] = why
    else:
        _Head(model, last, report)
        report.replaced["lm_head"] = "norm + cross-entropy, in training with labels"
    return report


apply_coda_kernels_to_llama = apply_coda_kernels_to_mistral = apply_coda_kernels
apply_coda_kernels_to_qwen2 = apply_coda_kernels_to_qwen3 = apply_coda_kernels
apply_coda_kernels_to_gemma3 = apply_coda_kernels


class _Head:
    """The final norm, the head and the loss by the kernels, in training with labels."""

    def __init__(self, model: Any, norm: Any, report: Report) -> None:
        self.model, self.norm, self.original = model, norm, model.forward
        self.held, self.offset = False, norm_offset(norm) or 0.0
        # Outside of torch.compile's graphs: a loss of an export, which takes gradients in its
        # forward pass too, was zeros by Inductor on an H200 (torch 2.11), and right on a CPU.
        self.loss: Any = torch.compiler.disable(head_loss)
        plain = norm.forward
        report.replace(norm, lambda x: x if self.held else plain(x))
        report.replace(model, self)

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        model, weight = self.model, self.model.lm_head.weight
        plain = (
            not model.training
            or len(args) > 5
            or kwargs.get("logits_to_keep", 0) != 0
            or kwargs.get("return_dict") is False
            or torch.is_autocast_enabled(weight.device.type)
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
        finally:
            self.held = False
        x = outputs.last_hidden_state
        ignored = kwargs.get("ignore_index", -100)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        loss = self.loss(
            x.flatten(0, 1),
            Carried.take(x, self.norm, self.offset),
            gamma(self.norm, self.offset).to(x.dtype),
            weight,
            targets.flatten().to(x.device),
            ignore_index=ignored,
            count=kwargs.get("num_items_in_batch"),
        )
        return CausalLMOutputWithPast(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
