"""Whether kernels compute what a model's own code computes, shown on small copies of its modules.

- A copy has the module's class, attributes and configuration, and few columns: parameters are drawn
  at random, away from values that hide a difference (0, 1). It costs milliseconds at any size.
- The stack's own forward runs over recorders in the place of its layers. So each layer is compared
  on the arguments that the model gives it: masks with padding, positions that differ.
- Both sides run in float32 on the CPU, in eval and in training, forward and gradients; the kernels
  by the interpreter. They differ by the order of sums, some 1e-6.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coda_agent.layers.fit import MLP, Form, form, fsdp, linears, named, norm_offset, norms
from coda_agent.layers.patched import ROTATION, Carried, Layer, make_layer
from coda_agent.layers.patched_head import Head
from coda_agent.layers.report import Report
from coda_agent.runtime.function import exact

_WIDTH, _FFN, _WORDS, _TOKENS = 32, 48, 64, 7
_TOLERANCE = 1e-4
"""Of a tensor's norm. A difference of formulas is larger, one of roundings smaller."""


class Recorder(nn.Module):
    """A layer's place in a stack: it gives back what it gets, and keeps the other arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = [layer]  # no child: its parameters are large
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the stream as it is."""
        self.args, self.kwargs = args, kwargs
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer[0], name)


class _Stack(nn.Module):
    """What a model's head is called behind: the norm of a stream that is a parameter."""

    def __init__(self, norm: nn.Module, output: Any) -> None:
        super().__init__()
        self.norm, self.output = norm, output
        self.stream = nn.Parameter(_stream())

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return what the model's own stack returned, with this stream in its place."""
        output = copy.copy(self.output)
        output.last_hidden_state = self.norm(self.stream)
        return output


class Proof:
    """A model's stack, run once over recorders.

    Args:
        model: The causal language model.
        stack: Its layers and final norm.

    Attributes:
        why: Why nothing can be shown; "" where something can.
    """

    def __init__(self, model: Any, stack: Any) -> None:
        self.why, self.output, self.calls = "", None, list[Recorder]()
        self.configs: dict[int, Any] = {}
        for module in model.modules():
            config = vars(module).get("config")
            if config is not None and id(config) not in self.configs:
                small = copy.deepcopy(config, self.configs)
                if hasattr(small, "_attn_implementation"):
                    small._attn_implementation = "eager"
        try:
            with _drawing():
                self._record(stack)
        except Exception as error:  # foreign code, which may read more than it has here
            self.why = f"its own code does not run on small copies ({_line(error)})"

    def _record(self, stack: Any) -> None:
        width = stack.norm.weight.numel()
        self.calls = [Recorder(layer) for layer in stack.layers]
        shapes = {}
        for module in (m for name, m in stack.named_children() if name != "layers"):
            for part in module.modules():
                for p in part._parameters.values():
                    if isinstance(part, nn.Embedding) and p is not None:
                        shapes[id(p)] = (_WORDS, _WIDTH)
                    elif p is not None and tuple(p.shape) == (width,):
                        shapes[id(p)] = (_WIDTH,)
        small = self.copy(stack, shapes, {id(stack.layers): nn.ModuleList(self.calls)}).eval()
        ids = torch.randint(3, _WORDS, (2, _TOKENS))
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        places = torch.arange(_TOKENS) + torch.tensor([[0], [5]])
        with torch.no_grad():
            self.output = type(small).forward(
                small, input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False
            )

    def layer(self, i: int, layer: Any, after: Any) -> Form | str:
        """Return the form by which kernels compute a layer; else why there is none.

        Args:
            i: Its place in the stack.
            layer: The layer, whose parts fit (`fit.misfit`).
            after: The norm behind it.
        """
        if self.why:
            return self.why
        why = ""
        for rotates in (True, False):
            with _drawing():
                result = self._form(i, layer, after, rotates=rotates)
            if isinstance(result, Form):
                return result
            why = result or why
        return why

    def _form(self, i: int, layer: Any, after: Any, *, rotates: bool) -> Form | str:
        shapes: dict[int, Sequence[int]]
        shapes = {id(norm.weight): (_WIDTH,) for norm in (*norms(layer).values(), after)}
        for name, linear in linears(layer).items():
            rows, columns = linear.out_features, linear.in_features
            if name in MLP:
                rows, columns = (_WIDTH, _FFN) if name == "down_proj" else (_FFN, _WIDTH)
            elif name == "o_proj":
                rows = _WIDTH
                if linear.bias is not None:
                    shapes[id(linear.bias)] = (_WIDTH,)
            else:
                columns = _WIDTH
            shapes[id(linear.weight)] = rows, columns
        try:
            small, behind = self.copy(layer, shapes), self.copy(after, shapes)
            way = form(small, behind, rotates=rotates)
        except Exception as error:  # foreign code
            return f"its own code does not run on a small copy ({_line(error)})"
        if isinstance(way, str):
            return way
        recorder = self.calls[i]
        if rotates and not _rotatable(small, recorder.kwargs):
            return ""
        ours = make_layer(small, "", behind, way, _Trial())
        ours.seal()
        try:
            difference = max(_layer_difference(ours, behind, recorder, train) for train in (0, 1))
        except Exception as error:  # foreign code
            return f"its own code does not run on a small copy ({_line(error)})"
        if difference <= _TOLERANCE:
            return way
        return f"its own code gives another result (by {difference:.2g} of its norm)"

    def head(self, model: Any, stack: Any) -> tuple[float, type] | str:
        """Return the offset of a model's final norm and the class of its output, where kernels
        compute its loss; else why they do not.

        Args:
            model: The model, whose parts fit (`fit.misfit_head`).
            stack: Its layers and final norm.
        """
        if self.why:
            return self.why
        if not hasattr(self.output, "last_hidden_state"):
            return f"{named(stack)} returns a {type(self.output).__name__}, no last_hidden_state"
        shapes = {id(model.lm_head.weight): (_WORDS, _WIDTH), id(stack.norm.weight): (_WIDTH,)}
        try:
            with _drawing():
                return self._head(model, stack, shapes)
        except Exception as error:  # foreign code
            return f"its own code does not run on a small copy ({_line(error)})"

    def _head(self, model: Any, stack: Any, shapes: dict[int, Any]) -> tuple[float, type] | str:
        norm = self.copy(stack.norm, shapes)
        if (offset := norm_offset(norm)) is None:
            return "the final norm is no RMSNorm with a plain weight"
        behind = _Stack(norm, self.output)
        config = copy.copy(self.configs[id(model.config)])
        config.vocab_size = _WORDS
        configs = self.configs | {id(model.config): config}
        small = self.copy(model, shapes, {id(stack): behind}, configs).train()
        if "vocab_size" in vars(small):
            small.vocab_size = _WORDS
        labels = torch.randint(3, _WORDS, (2, _TOKENS))
        some, none = labels.clone(), torch.full_like(labels, -100)
        some[:, :3] = -100
        parameters = [behind.stream, norm.weight, small.lm_head.weight]
        own = partial(type(small).forward, small)
        output = type(own(input_ids=labels, labels=some))
        report = _Trial()
        ours = Head(small, behind, offset, output, report)
        for targets, options in (
            (some, {}),
            (labels, {}),
            (none, {}),
            (some, {"num_items_in_batch": torch.tensor(5)}),
        ):
            theirs = _with_gradients(
                lambda x=targets, o=options: (
                    type(small).forward(small, input_ids=x, labels=x, **o).loss
                ),
                parameters,
            )
            ours.install()
            with _exactly():
                found = _with_gradients(
                    lambda x=targets, o=options: ours(input_ids=x, labels=x, **o).loss, parameters
                )
            report.revert()
            if (difference := _distance(found, theirs)) > _TOLERANCE:
                return f"its own loss is another (by {difference:.2g} of its gradients' norm)"
        return offset, output

    def copy(
        self,
        module: Any,
        shapes: Mapping[int, Sequence[int]],
        instead: dict[int, nn.Module] | None = None,
        configs: dict[int, Any] | None = None,
    ) -> Any:
        """Return a module like another on the CPU in float32, with parameters of its own.

        Args:
            module: The module; none of its hooks, nor an instance's own forward, is taken over.
            shapes: Of parameters, by identity, that get another shape.
            instead: Modules, by the identity of that whose place they take.
            configs: What other attributes become, by identity.
        """
        configs = self.configs if configs is None else configs
        if instead and id(module) in instead:
            return instead[id(module)]
        kind = type(module).__bases__[-1] if fsdp((module,)) else type(module)
        small: Any = object.__new__(kind)
        fresh = vars(nn.Module())
        fresh["training"] = module.training
        for key, value in vars(module).items():
            if key not in fresh and key not in ("forward", "_coda_bound"):
                value = configs.get(id(value), value)
                fresh[key] = value.detach().cpu() if isinstance(value, Tensor) else value
        if "gradient_checkpointing" in fresh:
            fresh["gradient_checkpointing"] = False
        vars(small).update(fresh)
        for name, p in module._parameters.items():
            small._parameters[name] = (
                None if p is None else _drawn(name, shapes.get(id(p), p.shape))
            )
        for name, b in module._buffers.items():
            small._buffers[name] = b if b is None else _widened(b)
        for name, child in module._modules.items():
            small._modules[name] = child and self.copy(child, shapes, instead, configs)
        if isinstance(small, nn.Embedding):
            small.padding_idx = None  # of the model's own vocabulary
        return small


class _Trial(Report):
    """The report of a proof, which raises what another one warns of."""

    def warn(self, name: str, why: str) -> None:
        """Raise the reason why the model's own code would run."""
        raise TypeError(why)


def _rotatable(layer: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer's rotation may be one of whole heads, by what it is called with."""
    attention, places = layer.self_attn, kwargs.get("position_embeddings")
    heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return (
        isinstance(places, tuple)
        and places[0].ndim == 3
        and places[0].shape[-1] == attention.head_dim
        and ROTATION in inspect.unwrap(type(attention).forward).__globals__
        and all(norm is None or len(norm.weight) == attention.head_dim for norm in heads)
    )


def _layer_difference(ours: Layer, behind: Any, recorder: Recorder, train: int) -> float:
    """Return the largest difference of outputs and gradients, as a part of their norms."""
    layer = ours.layer.train(bool(train))
    x = _stream().requires_grad_()
    parameters = [x, *layer.parameters()]
    own = type(layer).forward

    def theirs() -> Tensor:
        return own(layer, x, *recorder.args, **recorder.kwargs)

    carried: list[Tensor] = []

    def by_kernels() -> Tensor:
        out = ours(x, *recorder.args, **recorder.kwargs)
        h, r = Carried.take(out, behind, ours.form.offset)
        carried.append((h * r[:, None]).view_as(out).detach())
        return out

    with _exactly():
        ones = _with_gradients(by_kernels, parameters)
    others = _with_gradients(theirs, parameters)
    with torch.no_grad():
        others.append(behind.forward(others[0]))
    return _distance([*ones, *carried], others)


def _with_gradients(call: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a call's result, and the gradients of what random numbers draw from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        out = call()
        if not isinstance(out, Tensor):
            raise TypeError(f"its forward returns a {type(out).__name__}, expected a tensor")
        weights = torch.randn(out.shape) if out.ndim else torch.tensor(1.5)
    grads = torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return [out.detach(), *(torch.zeros_like(p) if g is None else g for g, p in pairs)]


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, as a part of their norms.

    A tensor that is nearly 0 counts as a thousandth of the largest one. NaN equals NaN.
    """
    if any(one.shape != other.shape for one, other in zip(ones, others, strict=True)):
        return float("inf")
    norms = [other.nan_to_num().norm().item() for other in others]
    floor = max(1e-3 * max(norms), 1e-30)
    parts = list[float]()
    for one, other, norm in zip(ones, others, norms, strict=True):
        gap = torch.where(one.isnan() & other.isnan(), 0, one - other).norm().item()
        parts.append(gap / max(norm, floor))
    return max(float("inf") if part != part else part for part in parts)


def _stream() -> Tensor:
    """Return rows of the stream, of magnitudes from 0.001, where a norm's eps counts, to 10."""
    scale = torch.logspace(-3, 1, 2 * _TOKENS)[torch.randperm(2 * _TOKENS)]
    return torch.randn(2, _TOKENS, _WIDTH) * scale.view(2, _TOKENS, 1)


def _widened(t: Tensor) -> Tensor:
    t = t.detach().cpu()
    return t.float() if t.is_floating_point() else t


def _drawn(name: str, shape: Sequence[int]) -> nn.Parameter:
    if name == "bias":
        values = 0.5 * torch.randn(*shape)
    elif len(shape) > 1:
        values = torch.randn(*shape) * 1.5 / shape[-1] ** 0.5
    else:
        values = torch.rand(*shape) + 0.5
    return nn.Parameter(values)


@contextmanager
def _drawing() -> Iterator[None]:
    """Draw the same numbers each time, and leave the process's generators as they are."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        yield


@contextmanager
def _exactly() -> Iterator[None]:
    token = exact.set(True)
    try:
        yield
    finally:
        exact.reset(token)


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}"
