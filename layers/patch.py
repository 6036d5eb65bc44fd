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

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.layers.fit import activation, eps, is_rms_norm, unfit, unfit_head
from coda_agent.layers.functional import (
    Normed,
    head_loss,
    linear_residual_norm,
    mlp,
    norm_linear,
    normed,
    qk_norm_rope,
)
from coda_agent.layers.packed import PLACES, Packed, unpackable
from coda_agent.layers.packing import interleave, pack_qkv, pair_halves, rotary_table


@dataclass
class Report:
    """What `apply_coda_kernels` did.

    Attributes:
        replaced: What runs by kernels, and which parts of it.
        left: What does not, and why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _layers: list[_Layer] = field(default_factory=list)
    _tables: _Tables = field(default_factory=lambda: _Tables())
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
        if before is None:
            self._undo.append(lambda: delattr(module, "forward"))
        else:
            self._undo.append(lambda: setattr(module, "forward", before))

    def __str__(self) -> str:
        lines = [f"{name}: by kernels: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: left as it is: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def apply_coda_kernels(model: nn.Module, *, pack: bool = False) -> Report:
    """Run a causal language model by the kernels, from its next call on.

    Args:
        model: One with `model.layers`, `model.norm` and `lm_head`, as Hugging Face's Llama,
            Mistral, Qwen2 and Qwen3 have them, in bfloat16 or float16.
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
        patched = _Layer(layer, after, report, pack)
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


@dataclass(frozen=True, eq=False)
class _Carried:
    """The `Normed` of a stream by a norm, as an attribute of the stream's tensor."""

    norm: nn.Module
    given: Normed
    versions: tuple[int, int]

    @classmethod
    def put(cls, x: Tensor, norm: Any, given: Normed) -> None:
        if not torch.compiler.is_compiling():
            x._coda_carried = cls(norm, given, (_version(x), _version(norm.weight)))  # pyright: ignore

    @classmethod
    def take(cls, x: Tensor, norm: Any) -> Normed:
        """What came with `x`, else what PyTorch computes. It is taken off, or it would live as long
        as x does, which the backward pass keeps."""
        carried = None if torch.compiler.is_compiling() else getattr(x, "_coda_carried", None)
        if carried is not None:
            del x._coda_carried  # pyright: ignore[reportAttributeAccessIssue]
            versions = _version(x), _version(norm.weight)
            if carried.norm is norm and carried.versions == versions:
                return carried.given
        return normed(x.flatten(0, -2), norm.weight, eps(norm))


class _Layer:
    """A decoder layer by the kernels; it is the layer's forward."""

    def __init__(self, layer: Any, after: Any, report: Report, pack: bool) -> None:
        self.layer, self.after, self.original = layer, after, layer.forward
        self.attention = attention = layer.self_attn
        self.linears = [getattr(attention, n) for n in ("q_proj", "k_proj", "v_proj")]
        self.sizes = [linear.out_features for linear in self.linears]
        self.heads = [size // attention.head_dim for size in self.sizes[:2]]
        self.activation = activation(layer.mlp)
        self.norms: list[Any] = [getattr(attention, n, None) for n in ("q_norm", "k_norm")]
        self.rotates = self._fits(self.norms) and _rotation(attention, report)
        self.tables = report._tables
        self.handed: tuple[Tensor, ...] | None = None
        self.headed = False
        self.kept: tuple[Any, tuple[Tensor, Tensor]] | None = None
        for i, linear in enumerate(self.linears):
            report.replace(linear, self._projection(i, linear.forward))
        report.replace(attention.o_proj, self._projection(None, attention.o_proj.forward))
        for norm in self.norms if self.rotates and self.norms[0] else ():
            report.replace(norm, self._passed(norm.forward))
        report.replace(layer, self)
        self.packed: Packed | None = None
        if pack:
            self.packed = packed = Packed(layer, self.sizes, self.heads if self.rotates else None)
            for name in sum(PLACES.values(), ()):
                linear = layer.get_submodule(name)
                report.replace(linear, self._unpacked(name, linear))
            report._undo.append(packed.undo)

    def _fits(self, norms: list[Any]) -> bool:
        """Whether norms of query and key, if there are any, are RMSNorms of heads."""
        dim = self.attention.head_dim
        return norms == [None, None] or all(
            norm is not None and is_rms_norm(norm) and len(norm.weight) == dim for norm in norms
        )

    def says(self) -> str:
        """What of the layer runs by what."""
        qkv = "norm + QKV + RoPE" if self.rotates else "norm + QKV (RoPE is the model's)"
        if self.rotates and self.norms[0]:
            qkv = "norm + QKV, QK norms + RoPE by PyTorch"
        gate = (
            "SwiGLU" if self.activation == "silu" else f"gate and up, {self.activation} by PyTorch"
        )
        packed = "; weights packed" if self.packed else ""
        return f"{qkv}, o + residual, norm + {gate}, down + residual{packed}"

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x, places = hidden_states, kwargs.get("position_embeddings")
        layer, norm, after = self.layer, self.layer.input_layernorm, self.after
        rotates = places is not None and places[0].shape[-1] == self.attention.head_dim
        rotates = rotates and self.rotates
        if (
            args
            or places is None
            or x.dtype != self.attention.o_proj.weight.dtype
            or torch.is_autocast_enabled(x.device.type)
            or (self.packed is not None and rotates != self.rotates)
        ):
            return self.original(hidden_states, *args, **kwargs)
        qkv, gate_up = self.packed.both() if self.packed else self._packed(rotates)
        table = None
        if rotates:
            kwargs["position_embeddings"] = None, None
            table = self.tables.find(places, len(x), sum(self.heads), len(qkv))
        given = _Carried.take(x, norm)
        self.headed = table is not None and self.norms[0] is not None
        packed = qkv, self.sizes, None if self.headed else table, self._bias(rotates)
        *parts, rows = norm_linear(x.flatten(0, 1), given, norm.weight, *packed)
        if self.headed and table is not None:
            cuts = table.split(self.sizes, dim=1)
            for i, norm in enumerate(self.norms):
                gamma = pair_halves(norm.weight, 1)
                parts[i] = qk_norm_rope(parts[i], gamma, eps(norm), cuts[i])
        self.handed = tuple(t.unflatten(0, x.shape[:2]) for t in parts)
        try:
            attended = self.attention(hidden_states=x, **kwargs)[0].flatten(0, 1)
        finally:
            self.handed = None
        o, norm = self.attention.o_proj, layer.post_attention_layernorm
        rows = rows if o.bias is None else rows + o.bias
        rows, given = linear_residual_norm(attended, o.weight, rows, norm.weight, eps(norm))
        # FSDP has not gathered the next layer's weights yet: then that layer starts anew.
        there = type(after.weight) in (Tensor, nn.Parameter)
        weights = gate_up, layer.mlp.down_proj.weight, (after if there else norm).weight
        rows, given = mlp(rows, given, norm.weight, *weights, eps(after), self.activation)
        out = rows.view_as(x)
        if there:
            _Carried.put(out, after, given)
        return out

    def _projection(self, part: int | None, original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a projection: while this layer runs, what was computed for it; that of the
        output gives what it gets."""

        def forward(x: Tensor) -> Any:
            if self.handed is None:
                return original(x)
            return x if part is None else self.handed[part]

        return forward

    def _passed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a norm of heads, which while this layer runs may be done already."""
        return lambda x: x if self.handed is not None and self.headed else original(x)

    def _unpacked(self, name: str, linear: Any) -> Callable[..., Any]:
        """The forward of a linear whose weight is packed: before it, what was its forward, where
        that does not need the weight."""
        before, packed = linear.forward, self.packed
        assert packed is not None

        def forward(x: Tensor) -> Any:
            if self.handed is not None:
                return before(x)
            return F.linear(x, packed.weight(name), linear.bias)

        return forward

    def _bias(self, rotates: bool) -> Tensor | None:
        """That of query, key and value, whose weights have one each or none."""
        q, k, v = (linear.bias for linear in self.linears)
        return None if q is None else pack_qkv(q, k, v, self.heads if rotates else None)

    def _packed(self, rotates: bool) -> tuple[Tensor, Tensor]:
        """Weights of query, key and value, and of gate and up."""
        block = self.layer.mlp
        weights = [m.weight for m in (*self.linears, block.gate_proj, block.up_proj)]
        q, k, v, gate, up = weights
        heads = self.heads if rotates else None
        if torch.compiler.is_compiling():
            return pack_qkv(q, k, v, heads), interleave(gate, up)
        key = rotates, [(w.data_ptr(), _version(w)) for w in weights]
        keeps = not torch.is_grad_enabled() and not self.layer.training
        if keeps and self.kept is not None and self.kept[0] == key:
            return self.kept[1]
        packed = pack_qkv(q, k, v, heads), interleave(gate, up)
        self.kept = (key, packed) if keeps else None
        return packed


def _rotation(attention: Any, report: Report) -> bool:
    """Whether the kernel may rotate: then the model's own rotation skips what has no cosines."""
    home = sys.modules[type(attention).__module__]
    rotate = getattr(home, "apply_rotary_pos_emb", None)
    if rotate is None:
        return False
    users = getattr(rotate, "_coda_users", None)
    if users is None:
        q = torch.linspace(-1, 2, 2 * 3 * attention.head_dim).view(1, 2, 3, -1)
        cos, sin = q[:, 0].cos(), q[:, 1].sin()
        a, b = q.chunk(2, dim=-1)
        turned = q * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
        if not torch.allclose(rotate(q, q, cos, sin)[0], turned):
            return False

        def skipping(q: Tensor, k: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
            return (q, k) if cos is None else rotate(q, k, cos, sin, *args, **kwargs)

        users = skipping._coda_users = [rotate]  # pyright: ignore[reportFunctionMemberAccess]
        home.apply_rotary_pos_emb = skipping  # pyright: ignore[reportAttributeAccessIssue]
    users.append(attention)

    def undo() -> None:
        users.remove(attention)
        if len(users) == 1:
            home.apply_rotary_pos_emb = users[0]  # pyright: ignore[reportAttributeAccessIssue]

    report._undo.append(undo)
    return True


class _Tables:
    """The table of `norm_linear` for the last cosines: all layers of a call are given the same."""

    last: tuple[Any, Any, Tensor] | None = None

    def find(self, places: tuple[Tensor, Tensor], batch: int, heads: int, columns: int) -> Tensor:
        key = batch, heads, columns
        traced = torch.compiler.is_compiling()
        if not traced and self.last and self.last[0] is places and self.last[1] == key:
            return self.last[2]
        cos, sin = (t.detach().expand(batch, -1, -1) for t in places)
        table = rotary_table(cos, sin, heads, columns)
        self.last = None if traced else (places, key, table)
        return table


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


class _Head:
    """The final norm, the head and the loss by the kernels, in training with labels."""

    def __init__(self, model: Any, norm: Any, report: Report) -> None:
        self.model, self.norm, self.original = model, norm, model.forward
        self.held = False
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
        loss = head_loss(
            x.flatten(0, 1),
            _Carried.take(x, self.norm),
            self.norm.weight,
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
