"""One answer of the model, put together from its stream's events.

Whatever a server or a proxy sends is checked here and nowhere else. The SDK's own accumulation
checks nothing: it appends a block whatever its index, goes on after the end, and fails with any
Python error. An answer that cannot be acted on, logged and sent back is `Broken` as a whole. One
whose token counts make no sense stands; its bill is then not known.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from coda_agent.agent.judge.records import JsonObject

Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
"""Tokens; no call takes a billion."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
"""What the API takes back as the id or the name of a call."""


class Broken(Exception):
    """An answer that ended early, stalled, or made no sense."""


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _Redacted(BaseModel):
    type: Literal["redacted_thinking"]
    data: str


class _Call(BaseModel):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject


class _Compaction(BaseModel):
    type: Literal["compaction"]
    content: str | None = None
    encrypted_content: str | None = None


class _Fallback(BaseModel):
    """Where another model took over from one that declined."""

    type: Literal["fallback"]
    from_: JsonObject = Field(alias="from")
    to: JsonObject
    trigger: JsonObject | None = None


class _Details(BaseModel):
    explanation: str | None = None
    category: str | None = None


class _Message(BaseModel):
    id: str
    model: str
    stop_reason: Name
    stop_details: _Details | None = None
    content: list[
        Annotated[
            _Text | _Thinking | _Redacted | _Call | _Compaction | _Fallback,
            Field(discriminator="type"),
        ]
    ]


class _Written(BaseModel):
    ephemeral_1h_input_tokens: Count | None = None


class _Counts(BaseModel):
    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    cache_creation: _Written | None = None
    model: str | None = None


class _Usage(_Counts):
    iterations: list[_Counts] | None = None


_EVENTS = {"message_start", "message_delta", "message_stop"} | {
    f"content_block_{what}" for what in ("start", "delta", "stop")
}
_BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "compaction", "fallback"}
_DECLINED = _BLOCKS - {"thinking", "redacted_thinking", "tool_use"}
"""What of a model that declined is sent back before the answer of the one after it."""
_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
    "compaction_delta": ("compaction", "content"),
}
"""The block that a delta belongs to, and its field."""


class Answer:
    """A stream as far as it has come.

    Args:
        taken: The ids of earlier calls; the API takes no request in which an id comes twice.

    Attributes:
        accepted: Whether the server took the request on, so that it may be billed.
    """

    def __init__(self, taken: set[str]) -> None:
        self.accepted = False
        self._taken = taken
        self._message: JsonObject = {}
        self._blocks: list[JsonObject] = []
        self._characters = 0
        self._state: Literal["new", "between", "block", "closing", "whole"] = "new"

    def take(self, data: str) -> JsonObject:
        """Take the next event, and return it.

        Raises:
            Broken: it is no event, or cannot stand where it does.
        """
        try:
            event = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise Broken(f"an event is no JSON: {error}") from error
        last = len(self._blocks) - 1
        match self._state, event:
            case "new", {"type": "message_start", "message": {"usage": {}} as message}:
                self._message, self._state = message, "between"
            case "between", {
                "type": "content_block_start", "index": at,
                "content_block": {"type": str()} as block,
            } if at == last + 1:  # fmt: skip
                self._blocks.append(block)
                self._state = "block"
            case "block", {
                "type": "content_block_delta", "index": at, "delta": {"type": str()} as delta
            } if at == last:  # fmt: skip
                self._add(self._blocks[-1], delta)
            case "block", {"type": "content_block_stop", "index": at} if at == last:
                self._state = "between"
            case "between" | "closing", {
                "type": "message_delta", "delta": {} as delta, "usage": {} as usage
            }:  # fmt: skip
                # Counts are totals, and what is left out stays as it was; but the count of output
                # tokens that the start has is no total.
                told = {key: count for key, count in usage.items() if count is not None}
                self._message["usage"] |= {"output_tokens": None, **told}
                self._message |= {key: delta.get(key) for key in ("stop_reason", "stop_details")}
                self._state = "closing"
            case "closing", {"type": "message_stop"}:
                self._state = "whole"
            case _, {"type": "error"}:
                self.accepted = self._state != "new"
            case _, {"type": str(kind)} if kind not in _EVENTS:
                pass  # a ping; the API may add others
            case _:
                raise Broken(f"an event out of place, or incomplete: {data[:200]}")
        return event

    def _add(self, block: JsonObject, delta: JsonObject) -> None:
        kind, field = _DELTAS.get(delta["type"], ("", ""))
        if not kind or block["type"] not in _BLOCKS:
            return
        if kind == "compaction" == block["type"]:
            block |= delta | {"type": kind}
            return
        before, piece = block.get(field) or "", delta.get(field)
        if kind != block["type"] or not isinstance(before, str) or not isinstance(piece, str):
            raise Broken(f"a delta that does not fit its {block['type']}: {str(delta)[:200]}")
        block[field] = before + piece
        self._characters += len(piece)

    def whole(self) -> JsonObject:
        """The message: id, model, stop reason and details, content, and usage.

        Of `content` only what the API takes back is left. Blank text, thinking cut off before its
        signature, and blocks and fields of unknown kinds are dropped. So are thoughts and calls of
        a model that then declined. A call that has the id of an earlier one gets another.

        Raises:
            Broken: it is not whole, or makes no sense.
        """
        if self._state != "whole":
            raise Broken("the stream ended before its message did")
        acts = self._message.get("stop_reason") == "tool_use"
        kinds = [block["type"] for block in self._blocks]
        declined = len(kinds) - kinds[::-1].index("fallback") if "fallback" in kinds else 0
        blocks = [
            _parsed(block, cut=not acts)
            for i, block in enumerate(self._blocks)
            if block["type"] in (_DECLINED if i < declined else _BLOCKS)
        ]
        try:
            message = _Message.model_validate({**self._message, "content": blocks}, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Broken(f"the message makes no sense: {where}: {first['msg']}") from error
        calls = [block for block in message.content if isinstance(block, _Call)]
        if len({call.id for call in calls}) < len(calls):
            raise Broken(f"two calls have one id: {', '.join(call.id for call in calls)}")
        if acts and not calls:
            raise Broken("the model stopped for a tool, and calls none")
        for call in calls:  # some proxies count from one in each turn
            while call.id in self._taken:
                call.id += "_"
            self._taken.add(call.id)
        content = [
            block.model_dump(exclude_unset=True, by_alias=True)
            for block in message.content
            if _sendable(block)
        ]
        return {**message.model_dump(), "content": content, "usage": self.used()}

    def used(self) -> JsonObject | None:
        """Count the tokens used: empty for none, None where nobody knows.

        For an answer that broke off it counts the prompt and the answer as far as it came, a token
        for three characters.
        """
        if not self.accepted:
            return {}
        usage = dict(self._message.get("usage", {}))
        if self._state in ("between", "block") and isinstance(usage.get("output_tokens"), int):
            usage["output_tokens"] = max(usage["output_tokens"], round(self._characters / 3))
        try:
            _Usage.model_validate(usage)
        except ValidationError:
            return None
        return usage


def _parsed(block: JsonObject, *, cut: bool) -> JsonObject:
    """Parse a block's input, which a turn that was `cut` breaks off."""
    if not (raw := block.pop("partial_json", "")):
        return block
    try:
        return {**block, "input": from_json(raw, allow_inf_nan=False, allow_partial=cut)}
    except ValueError as error:
        raise Broken(f"the input of a tool is no JSON: {error}: {raw[:80]}") from error


def _sendable(block: BaseModel) -> bool:
    if isinstance(block, _Thinking):
        return bool(block.signature)
    return not isinstance(block, _Text) or bool(block.text.strip())
