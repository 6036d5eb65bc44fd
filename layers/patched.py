"""A decoder layer of Hugging Face's by the kernels, in the place of its forward (`patch.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.generated.sharded import distributed
from coda_agent.layers.fit import activation, check_whole, eps, fsdp, gamma, norm_offset
from coda_agent.layers.functional import (
    Normed,
    add_normed,
    gate,
    linear_residual_norm,
    mlp,
    norm_linear,
    normed,
    qk_norm_rope,
)
from coda_agent.layers.packed import PLACES, Packed
from coda_agent.layers.packing import interleave, pack_qkv, pair_halves, rotary_table


@dataclass(frozen=True, eq=False)
class Carried:
    """The `Normed` of a stream by a norm, as an attribute of the stream's tensor."""

    norm: nn.Module
    given: Normed
    versions: tuple[int, int]

    @classmethod
    def put(cls, x: Tensor, norm: Any, given: Normed) -> None:
        if not torch.compiler.is_compiling():
            x._coda_carried = cls(norm, given, (_version(x), _version(norm.weight)))  # pyright: ignore

    @classmethod
    def take(cls, x: Tensor, norm: Any, offset: float) -> Normed:
        """What came with `x`, else what PyTorch computes. It is taken off, or it would live as long
        as x does, which the backward pass keeps."""
        carried = None if torch.compiler.is_compiling() else getattr(x, "_coda_carried", None)
        if carried is not None:
            del x._coda_carried  # pyright: ignore[reportAttributeAccessIssue]
            versions = _version(x), _version(norm.weight)
            if carried.norm is norm and carried.versions == versions:
                return carried.given
        return anew(x.flatten(0, -2), norm, offset)


def anew(x: Tensor, norm: Any, offset: float) -> Normed:
    """The `Normed` of rows by a norm, computed by PyTorch."""
    return normed(x, gamma(norm, offset), eps(norm))


class Layer:
    """A decoder layer by the kernels; it is the layer's forward.

    Args:
        layer: The module.
        name: Its name.
        after: The norm behind it.
        report: `patch.Report`, which undoes what is done here.
        pack: Whether its weights are packed.
        fp8: Whether it multiplies in e4m3 in training.
    """

    def __init__(
        self, layer: Any, name: str, after: Any, report: Any, pack: bool, fp8: bool
    ) -> None:
        self.layer, self.name, self.after, self.original = layer, name, after, layer.forward
        self.report, self.place, self.fp8 = report, len(report._layers), fp8
        self.attention = attention = layer.self_attn
        self.linears = [getattr(attention, n) for n in ("q_proj", "k_proj", "v_proj")]
        self.sizes = [linear.out_features for linear in self.linears]
        self.heads = [size // attention.head_dim for size in self.sizes[:2]]
        self.activation = activation(layer.mlp)
        self.offset = norm_offset(layer.input_layernorm) or 0.0
        self.norms: list[Any] = [getattr(attention, n, None) for n in ("q_norm", "k_norm")]
        self.rotates = self._fits(self.norms) and _rotation(attention, report)
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
        self.owners = [m for m in layer.modules() if m._parameters]

    def _fits(self, norms: list[Any]) -> bool:
        """Whether norms of query and key, if there are any, are RMSNorms of heads."""
        dim = self.attention.head_dim
        return norms == [None, None] or all(
            norm is not None and norm_offset(norm) is not None and len(norm.weight) == dim
            for norm in norms
        )

    def says(self) -> str:
        """What of the layer runs by what."""
        qkv = "norm + QKV + RoPE" if self.rotates else "norm + QKV (RoPE is the model's)"
        if self.rotates and self.norms[0]:
            qkv = "norm + QKV, QK norms + RoPE by PyTorch"
        gate = (
            "SwiGLU" if self.activation == "silu" else f"gate and up, {self.activation} by PyTorch"
        )
        return f"{qkv}, o + residual, norm + {gate}, down + residual{self._also()}"

    def _also(self) -> str:
        also = "; weights packed" if self.packed else ""
        if self.fp8:
            also += "; FP8 in training"
            biased = self.linears[0].bias is not None
            also += ", but not of query, key and value, which have biases" if biased else ""
        return also

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_sharding()
        x, places = hidden_states, kwargs.get("position_embeddings")
        norm = self.layer.input_layernorm
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
            table = self.report._tables.find(places, len(x), sum(self.heads), len(qkv))
        given = Carried.take(x, norm, self.offset)
        self.headed = table is not None and self.norms[0] is not None
        bias, rotated = self._bias(rotates), (sum(self.heads), self.attention.head_dim)
        turns = None if self.headed else table, bias, rotated
        first = x.flatten(0, 1), given, self.gamma(norm).to(x.dtype)
        fp8 = self._in_fp8() and bias is None
        *parts, rows = norm_linear(*first, qkv, self.sizes, *turns, fp8=fp8)
        if self.headed and table is not None:
            cuts = table.split(self.sizes, dim=1)
            for i, norm in enumerate(self.norms):
                weight = pair_halves(self.gamma(norm), 1)
                parts[i] = qk_norm_rope(parts[i], weight, eps(norm), cuts[i])
        self.handed = tuple(t.unflatten(0, x.shape[:2]) for t in parts)
        try:
            attended = self.attention(hidden_states=x, **kwargs)[0].flatten(0, 1)
        finally:
            self.handed = None
        rows = self._finished(rows, attended, gate_up)
        out, carried = rows.view_as(x), getattr(rows, "_coda_carried", None)
        if carried is not None:
            Carried.put(out, carried.norm, carried.given)
        return out

    def _check_sharding(self) -> None:
        """Refuse weights that are not whole here, and a `main_grad` that FSDP knows nothing of: it
        would stay as it is, or have one rank's gradient. The layer behind still shows what its
        sharded parameters have."""
        if distributed(p for m in self.owners for p in m._parameters.values()):
            check_whole(self.name, self.layer)
        if torch.compiler.is_compiling() or not self._by_fsdp():
            return
        near = self.report._layers[self.place : self.place + 2]
        owners = [m for layer in near for m in layer.owners]
        if any(hasattr(p, "main_grad") for m in owners for p in m._parameters.values()):
            raise TypeError(
                f"a parameter of {self.name} or of the layer behind it has a main_grad, which gets "
                "no gradients under fully_shard; take those in .grad, and delete main_grad"
            )

    def _by_fsdp(self) -> bool:
        """Whether FSDP gathers the layer's weights."""
        return bool(fsdp((*self.report._around, self.layer)))

    def gamma(self, norm: Any) -> Tensor:
        """What one of the layer's norms multiplies by."""
        return gamma(norm, self.offset)

    def _in_fp8(self) -> bool:
        """Whether to multiply in e4m3 now. A checkpointed layer's first pass has no gradients, and
        its second one must give the same."""
        return self.fp8 and (self.layer.training or torch.is_grad_enabled())

    def _finished(self, rows: Tensor, attended: Tensor, gate_up: Tensor) -> Tensor:
        """The stream behind the layer, by that in front of it and what attention gave."""
        o, norm, after = self.attention.o_proj, self.layer.post_attention_layernorm, self.after
        rows, fp8 = rows if o.bias is None else rows + o.bias, self._in_fp8()
        last = self.gamma(norm), eps(norm)
        rows, given = linear_residual_norm(attended, o.weight, rows, *last, fp8=fp8)
        # FSDP has not gathered the next layer's weights yet: then that layer starts anew.
        there = type(after.weight) in (Tensor, nn.Parameter)
        behind = self.gamma(after if there else norm)
        weights = gate_up, self.layer.mlp.down_proj.weight, behind
        options = eps(after), self.activation
        rows, given = mlp(rows, given, self.gamma(norm), *weights, *options, fp8=fp8)
        if there:
            Carried.put(rows, after, given)
        return rows

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
        # FSDP gathers anew into the same memory and counts no write to it.
        keeps = keeps and not self._by_fsdp()
        if keeps and self.kept is not None and self.kept[0] == key:
            return self.kept[1]
        packed = pack_qkv(q, k, v, heads), interleave(gate, up)
        self.kept = (key, packed) if keeps else None
        return packed


class Sandwich(Layer):
    """A decoder layer with norms behind attention and the MLP, too, as Gemma 3 has it. Those, with
    the residuals, are passes of PyTorch: between a product and a residual there is a whole row."""

    def says(self) -> str:
        return f"norm + QKV, norm + gate and up{self._also()}; by PyTorch: what else"

    def _finished(self, rows: Tensor, attended: Tensor, gate_up: Tensor) -> Tensor:
        layer, o = self.layer, self.attention.o_proj
        attended, behind = F.linear(attended, o.weight, o.bias), layer.post_attention_layernorm
        rows = add_normed(rows, attended, self.gamma(behind), eps(behind))
        norm, down = layer.pre_feedforward_layernorm, layer.mlp.down_proj.weight
        given, sizes = anew(rows, norm, self.offset), (len(gate_up),)
        weight = self.gamma(norm).to(rows.dtype)
        z, rows = norm_linear(rows, given, weight, gate_up, sizes, fp8=self._in_fp8())
        y, behind = F.linear(gate(z, self.activation), down), layer.post_feedforward_layernorm
        return add_normed(rows, y, self.gamma(behind), eps(behind))


def _rotation(attention: Any, report: Any) -> bool:
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


class Tables:
    """The table of `norm_linear` for the last cosines: all layers of a call are given the same."""

    last: tuple[Any, Any, Tensor] | None = None

    def find(self, places: tuple[Tensor, Tensor], batch: int, heads: int, columns: int) -> Tensor:
        key = batch, heads, columns
        traced = torch.compiler.is_compiling()
        if not traced and self.last and self.last[1] == key:
            # FSDP's mixed precision gives each layer a tuple of its own, of the same tensors.
            if all(known is t for known, t in zip(self.last[0], places, strict=True)):
                return self.last[2]
        cos, sin = (t.detach().expand(batch, -1, -1) for t in places)
        table = rotary_table(cos, sin, heads, columns)
        self.last = None if traced else (places, key, table)
        return table


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
