"""Models of Hugging Face's Llama and its kin, run by the kernels.

- A model is read, not recognised: names of attributes say where a layer's parts may be, and `proof`
  compares each layer, and the head with its loss, with the model's own code before it is replaced.
  What differs is left, and the report says by how much.
- A layer's forward is replaced, and nothing inside it. Attention itself is the model's own code:
  masks, caches, windows, head norms.
- A call that is not what was proved runs by the model's own code, with one warning that says why:
  other modules or attributes, hooks, other types, autocast, torch.compile (`fingerprint`).
- Parameters keep their names, and stay the optimizer's. In training, weights are packed at each
  call: query, key and value, and gate and up, are copied, and the copies live until the backward
  pass. In eval without gradients they are packed once and kept beside the parameters, until a
  parameter changes in place. What is written by `.data` is not noticed: call `Report.forget`.
- With `pack`, what is packed are the parameters (`packed.py`), and nothing is copied.
- In training with labels, the loss comes without logits; the output's are then None.
- With `fp8`, products of layers are in e4m3 in training, forward. Parameters, the stream, attention
  and the head stay bfloat16, and so does all that runs in eval without gradients.
- FSDP2 may shard layers, before or after. Where the kernels run, weights are whole: DTensors, as of
  tensor parallelism, are refused. Its sums over ranks are between products that are fused here.
- Between layers the `Normed` of a stream travels as an attribute of its tensor. Where it gets lost,
  as by checkpoints and hooks, PyTorch computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coda_agent.layers.fit import TYPES, check_whole, fsdp, gathered, misfit, misfit_head
from coda_agent.layers.packed import PLACES, Packed, unpackable
from coda_agent.layers.patched import forward_by_parts, make_layer
from coda_agent.layers.patched_head import Head
from coda_agent.layers.proof import Proof
from coda_agent.layers.report import Report

__all__ = ["Report", "apply_coda_kernels"]


def apply_coda_kernels(model: nn.Module, *, pack: bool = False, fp8: bool = False) -> Report:
    """Run a causal language model by the kernels, from its next call on.

    Args:
        model: One with `model.layers`, `model.norm` and `lm_head`, as Hugging Face's Llama,
            Mistral, Qwen2, Qwen3 and Gemma 3 have them, in bfloat16 or float16. Of a PeftModel the
            model inside is taken.
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
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # a PeftModel's
    stack = getattr(inner, "model", inner)
    report = Report(_around=(inner, stack))
    layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, nn.Module):
        raise TypeError(
            f"{type(model).__name__} has no model.layers and model.norm, "
            "expected a causal language model of Llama's structure"
        )
    if pack and fsdp((inner, *stack.modules())):
        raise TypeError(f"{type(model).__name__} is sharded already; pack=True before fully_shard")
    try:
        with gathered(inner, stack):
            _patch(inner, stack, report, pack, fp8)
    except BaseException:
        report.revert()
        raise
    return report


apply_coda_kernels_to_llama = apply_coda_kernels_to_mistral = apply_coda_kernels
apply_coda_kernels_to_qwen2 = apply_coda_kernels_to_qwen3 = apply_coda_kernels
apply_coda_kernels_to_gemma3 = apply_coda_kernels


def _patch(model: Any, stack: Any, report: Report, pack: bool, fp8: bool) -> None:
    last, proof = stack.norm, Proof(model, stack)
    for i, (layer, behind) in enumerate(zip(stack.layers, (*stack.layers[1:], last), strict=True)):
        after = getattr(behind, "input_layernorm", behind)
        with gathered(layer, behind):
            check_whole(f"layers.{i}", layer)
            check_whole("norm" if after is last else f"layers.{i + 1}.input_layernorm", after)
            _replace(i, layer, after, proof, report, pack, fp8)
    head = getattr(model, "lm_head", nn.Module())
    with gathered(last, head):
        check_whole("lm_head", head)
        result = misfit_head(model, last) or proof.head(model, stack)
    if isinstance(result, str):
        report.left["lm_head"] = result
    else:
        Head(model, stack, *result, report).install()
        report.replaced["lm_head"] = "norm + cross-entropy, in training with labels"


def _replace(
    i: int, layer: Any, after: Any, proof: Proof, report: Report, pack: bool, fp8: bool
) -> None:
    name, types = f"layers.{i}", (torch.bfloat16,) if fp8 else TYPES
    why = misfit(layer, types) or (unpackable(layer) if pack else "")
    form = why or proof.layer(i, layer, after)
    if isinstance(form, str):
        report.left[name] = form
        return
    patched = make_layer(layer, name, after, form, report, fp8)
    if pack:
        packed = Packed(layer, patched.sizes, patched.heads if form.rotates else None)
        patched.packed = packed
        for part in sum(PLACES.values(), ()):
            linear = layer.get_submodule(part)
            report.replace(linear, forward_by_parts(part, linear, packed))
        report._undo.append(packed.undo)
    report.replace(layer, patched)
    patched.seal()
    report._layers.append(patched)
    report.replaced[name] = patched.describe()
