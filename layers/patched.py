"""A decoder layer of Hugging Face's by the kernels, in the place of its forward (`patch.py`).

Attention itself is the model's own code: it runs on a copy of the attention module that lives for
one call, whose projections hand over what one product gave. So masks, caches, scalings and windows
are the model's, and a call has no state but its own.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.layers.fingerprint import Fingerprint
from coda_agent.layers.fit import (
    MLP,
    QKV,
    Form,
    check_whole,
    eps,
    fsdp,
    gamma,
    linears,
    norms,
    taken,
)
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
from coda_agent.runtime.sharded import distributed

ROTATION = "apply_rotary_pos_emb"
"""What the rotation is called in the module of an attention's class."""


@dataclass(frozen=True, eq=False)
class Carried:
    """The `Normed` of a stream by a norm, as an attribute of the stream's tensor."""

    norm: nn.Module
    normed: Normed
    versions: tuple[int, int]

    @classmethod
    def put(cls, x: Tensor, norm: Any, result: Normed) -> None:
        x._coda_carried = cls(norm, result, (_version(x), _version(norm.weight)))  # pyright: ignore

    @classmethod
    def take(cls, x: Tensor, norm: Any, offset: float) -> Normed:
        """Return what came with x, else what PyTorch computes. It is taken off, or it would live as
        long as x does, which the backward pass keeps."""
        carried = getattr(x, "_coda_carried", None)
        if carried is not None:
            del x._coda_carried  # pyright: ignore[reportAttributeAccessIssue]
            versions = _version(x), _version(norm.weight)
            if carried.norm is norm and carried.versions == versions:
                return carried.normed
        return normed(x.flatten(0, -2), gamma(norm, offset), eps(norm))


class _Handed:
    """A linear, or a norm of heads, for one call: what it gives is there already.

    All but the call is the module's own.
    """

    def __init__(self, module: nn.Module, value: Tensor | None = None) -> None:
        self._module, self._value = module, value

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._value is None else self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Layer:
    """A decoder layer by the kernels; it is the layer's forward once `patch` has put it there.

    Args:
        layer: The module.
        name: Its name.
        after: The norm behind it.
        form: How it is written down.
        report: `patch.Report`, which knows the layers beside this one.
        fp8: Whether it multiplies in e4m3 in training.
    """

    def __init__(
        self, layer: Any, name: str, after: Any, form: Form, report: Any, fp8: bool = False
    ) -> None:
        self.layer, self.name, self.after, self.form = layer, name, after, form
        self.report, self.place, self.fp8 = report, len(report._layers), fp8
        self.original: Callable[..., Any] = layer.forward
        self.attention = attention = layer.self_attn
        self.linears = [getattr(attention, n) for n in QKV]
        self.sizes = [linear.out_features for linear in self.linears]
        self.heads = [size // attention.head_dim for size in self.sizes[:2]]
        self.norms: list[Any] = [getattr(attention, n, None) for n in ("q_norm", "k_norm")]
        self.packed: Packed | None = None
        self.kept: tuple[Any, list[Any], tuple[Tensor, Tensor]] | None = None
        self.attend = inspect.unwrap(type(attention).forward)
        self.rotation = self.attend.__globals__.get(ROTATION)
        self.forward = inspect.unwrap(type(layer).forward)
        # In transformers 5.24 a layer's own forward does the checkpointing, in 5.17 its call.
        self.checkpoints = type(layer).__call__ is nn.Module.__call__
        self.owners = [m for m in layer.modules() if m._parameters]

    def seal(self) -> None:
        """Take the fingerprint of what was proved; packing comes before."""
        layer, attention = self.layer, self.attention
        parts = {"": layer, "self_attn": attention, "mlp": layer.mlp, **norms(layer)}
        parts |= {"mlp.act_fn": layer.mlp.act_fn}
        weights = {f"{name}.weight": (norm, "weight") for name, norm in norms(layer).items()}
        for name, linear in linears(layer).items():
            path = f"{'mlp' if name in MLP else 'self_attn'}.{name}"
            parts[path] = linear
            if linear.weight is not None:
                weights[f"{path}.weight"] = linear, "weight"
        if self.form.rotates and self.norms[0] is not None:
            for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=True):
                parts[f"self_attn.{name}"] = norm
                weights[f"self_attn.{name}.weight"] = norm, "weight"
        for path in PLACES if self.packed else ():
            owner, _, leaf = path.partition(".")
            weights[path] = layer.get_submodule(owner), leaf
        self.fingerprint = Fingerprint(parts, weights)

    def describe(self) -> str:
        """Say what of the layer runs by what."""
        qkv = "norm + QKV + RoPE" if self.form.rotates else "norm + QKV (RoPE is the model's)"
        if self.form.rotates and self.norms[0] is not None:
            qkv = "norm + QKV, QK norms + RoPE by PyTorch"
        activation = self.form.activation
        gated = "SwiGLU" if activation == "silu" else f"gate and up, {activation} by PyTorch"
        return f"{qkv}, o + residual, norm + {gated}, down + residual{self._options()}"

    def _options(self) -> str:
        options = "; weights packed" if self.packed else ""
        if self.fp8:
            options += "; FP8 in training"
            biased = self.linears[0].bias is not None
            options += ", but not of query, key and value, which have biases" if biased else ""
        return options

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(hidden_states, *args, **kwargs)
        self._check_sharding()
        if why := self._difference(hidden_states, args, kwargs):
            self.report.warn(self.name, why)
            return self.original(hidden_states, *args, **kwargs)
        layer = self.layer
        if (
            self.checkpoints
            and getattr(layer, "gradient_checkpointing", False)
            and layer.training
            and torch.is_grad_enabled()
        ):
            kwargs = {k: None if hasattr(v, "get_seq_length") else v for k, v in kwargs.items()}
            return layer._gradient_checkpointing_func(partial(self.run, **kwargs), hidden_states)
        return self.run(hidden_states, **kwargs)

    def _difference(self, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Say why a call is not one that was proved; "" if it is one."""
        if args:
            return "it is called with positional arguments"
        if why := self.fingerprint.difference(x):
            return why
        if not taken(x):
            return f"its input is {x.dtype}"
        if inspect.unwrap(type(self.layer).forward) is not self.forward:
            return f"{type(self.layer).__name__}.forward is another function now"
        if self.attention.head_dim * self.heads[0] != self.sizes[0]:
            return "self_attn.head_dim has changed"
        if self.form.rotates:
            places = kwargs.get("position_embeddings")
            if places is None or places[0].shape[-1] != self.attention.head_dim:
                return "its positions are others than whole heads' cosines and sines"
            if self.attend.__globals__.get(ROTATION) is not self.rotation:
                return f"{ROTATION} of {self.attend.__module__} is another function now"
            # Of a copy without its decorators, which rename what has an older name.
            parameters = self.attend.__code__.co_varnames[: self.attend.__code__.co_argcount]
            for name, value in kwargs.items():
                if hasattr(value, "get_seq_length") and name not in parameters:
                    return f"it is called with {name}, expected another name for the cache"
        return ""

    def run(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return the stream behind the layer, by kernels.

        Args:
            x: (B, S, d), the stream.
            kwargs: What attention takes.
        """
        rotates, norm = self.form.rotates, self.layer.input_layernorm
        qkv, gate_up = self.packed.both() if self.packed else self._packed(rotates)
        table = None
        if rotates:
            places = kwargs["position_embeddings"]
            table = self.report._tables.find(places, len(x), sum(self.heads), len(qkv))
        by_heads = table is not None and self.norms[0] is not None
        bias, rotated = self._bias(rotates), (sum(self.heads), self.attention.head_dim)
        stream = x.flatten(0, 1), Carried.take(x, norm, self.form.offset)
        *parts, rows = norm_linear(
            *stream,
            self.gamma(norm).to(x.dtype),
            qkv,
            self.sizes,
            None if by_heads else table,
            bias,
            rotated,
            fp8=self._in_fp8() and bias is None,
        )
        if by_heads and table is not None:
            cuts = table.split(self.sizes, dim=1)
            for i, norm in enumerate(self.norms):
                weight = pair_halves(self.gamma(norm), 1)
                parts[i] = qk_norm_rope(parts[i], weight, eps(norm), cuts[i])
        parts = [t.unflatten(0, x.shape[:2]) for t in parts]
        attended = self._attended(x, parts, kwargs).flatten(0, 1)
        rows = self._finished(rows, attended, gate_up)
        out, carried = rows.view_as(x), getattr(rows, "_coda_carried", None)
        if carried is not None:
            Carried.put(out, carried.norm, carried.normed)
        return out

    def _attended(self, x: Tensor, parts: Sequence[Tensor], kwargs: dict[str, Any]) -> Tensor:
        """Return what attention gives before its last projection, of query, key and value.

        It is called as a module, so that hooks which record its outputs run.
        """
        attention = self.attention
        copy: Any = object.__new__(type(attention))
        modules: dict[str, Any] = dict(attention._modules)
        for name, linear, part in zip(QKV, self.linears, parts, strict=True):
            modules[name] = _Handed(linear, part)
        modules["o_proj"] = _Handed(attention.o_proj)
        vars(copy).update(vars(attention), _modules=modules)
        if self.form.rotates:
            for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=True):
                if norm is not None:
                    modules[name] = _Handed(norm)
            own = self.attend
            names = {**own.__globals__, ROTATION: _rotated_already}
            forward = FunctionType(
                own.__code__, names, own.__name__, own.__defaults__, own.__closure__
            )
            forward.__kwdefaults__ = own.__kwdefaults__
            vars(copy)["forward"] = MethodType(forward, copy)
        try:
            return copy(hidden_states=x, **kwargs)[0]
        finally:
            vars(copy).clear()  # a cycle with its own forward would keep query, key and value

    def _check_sharding(self) -> None:
        """Refuse weights that are not whole here, and a `main_grad` that FSDP knows nothing of: it
        would stay as it is, or have one rank's gradient. The layer behind still shows what its
        sharded parameters have."""
        if distributed(p for m in self.owners for p in m._parameters.values()):
            check_whole(self.name, self.layer)
        if not self._by_fsdp():
            return
        near = self.report._layers[self.place : self.place + 2]
        owners = [m for layer in near for m in layer.owners]
        if any(hasattr(p, "main_grad") for m in owners for p in m._parameters.values()):
            raise TypeError(
                f"a parameter of {self.name} or of the layer behind it has a main_grad, which gets "
                "no gradients under fully_shard; take those in .grad, and delete main_grad"
            )

    def _by_fsdp(self) -> bool:
        """Return whether FSDP gathers the layer's weights."""
        return bool(fsdp((*self.report._around, self.layer)))

    def gamma(self, norm: Any) -> Tensor:
        """Return what one of the layer's norms multiplies by."""
        return gamma(norm, self.form.offset)

    def _in_fp8(self) -> bool:
        """Return whether to multiply in e4m3 now. A checkpointed layer's first pass has no
        gradients, and its second one must give the same."""
        return self.fp8 and (self.layer.training or torch.is_grad_enabled())

    def _finished(self, rows: Tensor, attended: Tensor, gate_up: Tensor) -> Tensor:
        """Return the stream behind the layer, of that in front of it and what attention gave."""
        o, norm, after = self.attention.o_proj, self.layer.post_attention_layernorm, self.after
        rows, fp8 = rows if o.bias is None else rows + o.bias, self._in_fp8()
        last = self.gamma(norm), eps(norm)
        rows, statistics = linear_residual_norm(attended, o.weight, rows, *last, fp8=fp8)
        # FSDP has not gathered the next layer's weights yet, or they are elsewhere by now: then
        # that layer starts anew.
        weight = after.weight
        ready = type(weight) in (Tensor, nn.Parameter) and (weight.dtype, weight.device) == (
            rows.dtype,
            rows.device,
        )
        behind = self.gamma(after if ready else norm)
        weights = gate_up, self.layer.mlp.down_proj.weight, behind
        options = eps(after), self.form.activation
        rows, statistics = mlp(rows, statistics, self.gamma(norm), *weights, *options, fp8=fp8)
        if ready:
            Carried.put(rows, after, statistics)
        return rows

    def _bias(self, rotates: bool) -> Tensor | None:
        """Return that of query, key and value, whose weights have one each or none."""
        q, k, v = (linear.bias for linear in self.linears)
        return None if q is None else pack_qkv(q, k, v, self.heads if rotates else None)

    def _packed(self, rotates: bool) -> tuple[Tensor, Tensor]:
        """Return weights of query, key and value, and of gate and up."""
        block = self.layer.mlp
        weights = [m.weight for m in (*self.linears, block.gate_proj, block.up_proj)]
        q, k, v, gate, up = weights
        heads = self.heads if rotates else None
        key = rotates, [(w.data_ptr(), _version(w)) for w in weights]
        keeps = not torch.is_grad_enabled() and not self.layer.training
        # FSDP gathers anew into the same memory and counts no write to it.
        keeps = keeps and not self._by_fsdp()
        kept = self.kept
        # By identity too, since other weights may come to lie where these were.
        if (
            keeps
            and kept
            and kept[0] == key
            and all(r() is w for r, w in zip(kept[1], weights, strict=True))
        ):
            return kept[2]
        packed = pack_qkv(q, k, v, heads), interleave(gate, up)
        self.kept = (key, [weakref.ref(w) for w in weights], packed) if keeps else None
        return packed


class Sandwich(Layer):
    """A decoder layer with norms behind attention and the MLP, too, as Gemma 3 has it. Those, with
    the residuals, are passes of PyTorch: between a product and a residual there is a whole row."""

    def describe(self) -> str:
        """Say what of the layer runs by what."""
        return f"norm + QKV, norm + gate and up{self._options()}; by PyTorch: what else"

    def _finished(self, rows: Tensor, attended: Tensor, gate_up: Tensor) -> Tensor:
        layer, o = self.layer, self.attention.o_proj
        attended, behind = F.linear(attended, o.weight, o.bias), layer.post_attention_layernorm
        rows = add_normed(rows, attended, self.gamma(behind), eps(behind))
        norm, down = layer.pre_feedforward_layernorm, layer.mlp.down_proj.weight
        weight, sizes = self.gamma(norm), (len(gate_up),)
        statistics = normed(rows, weight, eps(norm))
        z, rows = norm_linear(
            rows, statistics, weight.to(rows.dtype), gate_up, sizes, fp8=self._in_fp8()
        )
        y, behind = F.linear(gate(z, self.form.activation), down), layer.post_feedforward_layernorm
        return add_normed(rows, y, self.gamma(behind), eps(behind))


def make_layer(*args: Any, **options: Any) -> Layer:
    """Return the layer of a form, by `Layer`'s arguments."""
    return (Sandwich if args[3].sandwich else Layer)(*args, **options)


def forward_by_parts(name: str, linear: Any, packed: Packed) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear whose weight is packed: it copies its part out."""
    return lambda x: F.linear(x, packed.weight(name), linear.bias)


def _rotated_already(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q, k


class Tables:
    """The table of `norm_linear` for the last cosines: all layers of a call are given the same."""

    last: tuple[Any, Any, Tensor] | None = None

    def find(self, places: tuple[Tensor, Tensor], batch: int, heads: int, columns: int) -> Tensor:
        """Return the table of cosines and sines (B or 1, S, D)."""
        key, last = (batch, heads, columns), self.last
        if last and last[1] == key:
            # FSDP's mixed precision gives each layer a tuple of its own, of the same tensors.
            if all(one is t for one, t in zip(last[0], places, strict=True)):
                return last[2]
        cos, sin = (t.detach().expand(batch, -1, -1) for t in places)
        table = rotary_table(cos, sin, heads, columns)
        self.last = places, key, table
        return table


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
