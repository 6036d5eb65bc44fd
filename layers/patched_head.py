"""A model's final norm, head and loss by the kernels, in training with labels (`patch.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_agent.layers.fingerprint import Fingerprint, unusual
from coda_agent.layers.fit import check_whole, fsdp, gamma, taken
from coda_agent.layers.functional import Normed
from coda_agent.layers.head import head_loss
from coda_agent.layers.patched import Carried

_TARGETS = frozenset(("labels", "shift_labels", "num_items_in_batch", "ignore_index"))
_NAMES = """
input_ids attention_mask position_ids inputs_embeds token_type_ids use_cache cache past_key_values
cache_position output_attentions cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx
"""
_PASSED = frozenset(_NAMES.split())


@dataclass(eq=False)
class _Call:
    """The state of one call of a model.

    Attributes:
        head: The head that is called.
        targets: (M,), int64.
        ignored: The target of rows that do not count.
        count: What the sum of losses is divided by; None for the rows that count.
        stream: What the norm leaves to the head: the stream's `Normed` and the norm's weight.
    """

    head: Head
    targets: Tensor
    ignored: int
    count: Any
    stream: tuple[Normed, Tensor] | None = None


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


class Head:
    """The forward of a causal language model, whose loss comes without logits.

    Norm and head are called as modules, so FSDP gathers their weights: the norm gives its stream,
    and the head, which is given that, the loss.

    Args:
        model: With `model` and `lm_head`.
        stack: Its layers, with `norm`.
        offset: What the norm adds to its weight.
        output: The class of what the model returns.
        report: `patch.Report`.
    """

    def __init__(self, model: Any, stack: Any, offset: float, output: type, report: Any) -> None:
        self.model, self.stack, self.norm, self.report = model, stack, stack.norm, report
        self.offset, self.output = offset, output
        self.original, self.loss_function = model.forward, model.loss_function

    def install(self) -> None:
        """Replace the forwards of norm, head and model."""
        norm, head = self.norm, self.model.lm_head
        self.plain = plain = norm.forward
        project = head.forward
        self.report.replace(norm, lambda x: self._norm(x) if self._called() else plain(x))
        self.report.replace(head, lambda x: self._loss(x) if self._called(x) else project(x))
        self.report.replace(self.model, self)
        parts = {"": self.model, "model": self.stack, "model.norm": norm, "lm_head": head}
        self.fingerprint = Fingerprint(parts, {}, sharded=True)

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None or not self.model.training or torch.compiler.is_compiling():
            return self.original(*args, labels=labels, **kwargs)
        if why := self._difference(args, kwargs):
            self.report.warn("lm_head", why)
            return self.original(*args, labels=labels, **kwargs)
        ignored = kwargs.get("ignore_index", -100)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        device = self.model.lm_head.weight.device
        call = _Call(self, targets.flatten().to(device), ignored, kwargs.get("num_items_in_batch"))
        passed = {k: v for k, v in kwargs.items() if k not in ("logits_to_keep", "return_dict")}
        token = _CALL.set(call)
        try:
            outputs = self.model.model(*args, **passed)
            loss = self.model.lm_head(outputs.last_hidden_state) if call.stream else None
        finally:
            _CALL.reset(token)
        if loss is None:  # FSDP's weights, whose type a forward pass alone shows
            self.report.warn("lm_head", f"its input is {outputs.last_hidden_state.dtype}")
            return self.original(*args, labels=labels, **kwargs)
        fields = self.output.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        others = {k: v for k, v in outputs.items() if k in fields}
        return self.output(loss=loss, **others)

    def _difference(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Say why a call is not one that was proved; "" if it is one."""
        model = self.model
        if len(args) > 1:
            return "it is called with positional arguments"
        if why := self.fingerprint.alteration() or unusual(model.lm_head.weight.device.type):
            return why
        if model.loss_function != self.loss_function:
            return "loss_function has changed"
        if kwargs.get("output_hidden_states") or getattr(
            model.config, "output_hidden_states", False
        ):
            return "hidden states are asked for, of which the last is behind the norm"
        if kwargs.get("return_dict") is False:
            return "a tuple is asked for"
        for name, value in kwargs.items():
            if name not in _PASSED | _TARGETS and not _neutral(name, value):
                return f"it is called with {name}"
        for name, module in (("lm_head", model.lm_head), ("model.norm", self.norm)):
            if not taken(module.weight) and not fsdp((module, self.stack, model)):
                return f"{name}.weight is {module.weight.dtype}"
        return ""

    def _called(self, x: Tensor | None = None) -> bool:
        """Return whether a call of this head is under way; with x, one that has its stream."""
        call = None if torch.compiler.is_compiling() else _CALL.get()
        return call is not None and call.head is self and (x is None or call.stream is not None)

    def _norm(self, x: Tensor) -> Tensor:
        call = _CALL.get()
        assert call is not None
        check_whole("norm", self.norm)
        if not taken(x):
            return self.plain(x)
        # Cloned, since FSDP may take the weight back before the head runs.
        weight = gamma(self.norm, self.offset).to(x.dtype).clone()
        call.stream = Carried.take(x, self.norm, self.offset), weight
        return x

    def _loss(self, x: Tensor) -> Tensor:
        check_whole("lm_head", self.model.lm_head)
        call = _CALL.get()
        assert call is not None and call.stream is not None
        given, weight = call.stream
        return head_loss(
            x.flatten(0, 1),
            given,
            weight,
            self.model.lm_head.weight,
            call.targets,
            ignore_index=call.ignored,
            count=call.count,
        )


def _neutral(name: str, value: Any) -> bool:
    """Return whether an argument asks for nothing that a loss without logits has not."""
    if name == "logits_to_keep":
        return type(value) is int and value == 0
    return value is None or value is False or (name == "return_dict" and value is True)
