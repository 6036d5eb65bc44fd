"""One turn of the model over HTTP: a stream read to its end, retried where that can help.

- One policy for refusals by the server and for streams that break: the SDK's own retries would
  cover the first only, and out of sight of the log and the budget.
- An answer counts when `message_stop` has arrived. Anything less is thrown away, and what it
  cost is counted as far as it is known.
- A server may send pings and nothing else; each piece of the answer, pings too, is held
  against a deadline.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    import httpx2
    from anthropic import Anthropic

ATTEMPTS = 9
CALL_S = 1800.0
"""No answer takes longer: 128k tokens at 70 tokens a second."""
LAST_S = 600.0
"""A run's last turn may take this long after its time is up."""
SILENCE_S = 120.0
"""Without a byte for this long the connection is dead; the server pings every few seconds."""
_FINAL = ("spend_limit", "credit", "billing", "payment")
"""Words of error codes that a retry cannot mend, whatever the status."""


class Stopped(CodaError):
    """The run cannot go on now; it can be resumed."""

    exit_code = 3


class Broken(Exception):
    """A stream that ended early, stalled, or made no sense."""


class Client:
    """The Messages API.

    Args:
        key: API key or token, by the name of its variable.
        fallback: The model that answers where the first refuses.
        clock: Seconds; `sleep` waits for some. Tests bring their own.
    """

    def __init__(
        self,
        key: dict[str, str],
        fallback: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._key, self._fallback, self.clock, self.sleep = key, fallback, clock, sleep
        self._deadline = float("inf")
        self._sdk: Anthropic | None = None

    @property
    def sdk(self) -> "Anthropic":
        """The SDK's client; importing it takes two seconds."""
        if self._sdk is None:
            import httpx2
            from anthropic import Anthropic, DefaultHttpxClient
            from anthropic.lib.middleware import BetaRefusalFallbackMiddleware
            from anthropic.types.beta import BetaFallbackParam

            chain = [BetaFallbackParam(model=self._fallback)] if self._fallback else []
            self._sdk = Anthropic(
                api_key=self._key.get("ANTHROPIC_API_KEY"),
                auth_token=self._key.get("ANTHROPIC_AUTH_TOKEN"),
                max_retries=0,
                timeout=httpx2.Timeout(SILENCE_S, connect=10.0),
                http_client=DefaultHttpxClient(event_hooks={"response": [self._watch]}),
                middleware=[BetaRefusalFallbackMiddleware(chain)] if chain else [],
            )
        return self._sdk

    def respond(
        self, request: dict[str, Any], left_s: float, failed: Callable[..., None]
    ) -> dict[str, Any]:
        """The model's whole answer, as the API's message.

        Args:
            request: The parameters of the call.
            left_s: Seconds of the run's time; no wait goes beyond them.
            failed: Told of each attempt that failed: `error`, `wait_s` (None: no further attempt)
                and `usage`, as far as it is known.

        Raises:
            Stopped: no attempt succeeded, or none could.
        """
        import anthropic
        import httpx2

        end = self.clock() + max(left_s, LAST_S)
        for attempt in range(1, ATTEMPTS + 1):
            self._deadline = min(end, self.clock() + CALL_S)
            snapshot: dict[str, Any] = {}
            try:
                return self._stream(request, snapshot)
            except (anthropic.APIError, httpx2.TransportError, Broken, ValueError) as error:
                wait_s = retry_after(error, attempt)
                if attempt == ATTEMPTS or (wait_s and self.clock() + wait_s > end):
                    wait_s = None
                usage = _known_usage(snapshot)
                failed(error=f"{type(error).__name__}: {error}", wait_s=wait_s, usage=usage)
                if wait_s is None:
                    raise Stopped(f"the model did not answer: {_first_line(error)}") from error
                self.sleep(wait_s)
        raise AssertionError("unreachable")

    def _stream(self, request: dict[str, Any], snapshot: dict[str, Any]) -> dict[str, Any]:
        """Reads one stream; `snapshot` holds what has come of it when it breaks."""
        inputs: dict[int, str] = {}
        with self.sdk.beta.messages.stream(**request) as stream:
            whole = False
            for event in stream:
                if event.type == "message_start":
                    snapshot["message"] = event.message.to_dict()
                elif event.type == "content_block_delta":
                    delta = event.delta.to_dict()
                    said = sum(len(str(v)) for k, v in delta.items() if k != "type")
                    snapshot["characters"] = snapshot.get("characters", 0) + said
                    if event.delta.type == "input_json_delta":
                        inputs[event.index] = inputs.get(event.index, "") + event.delta.partial_json
                whole = whole or event.type == "message_stop"
            if not whole:
                raise Broken("the stream ended before its message did")
            final = stream.get_final_message()
        if final.stop_reason is None:
            raise Broken("the message has no stop reason")
        if final.stop_reason == "tool_use":
            # The SDK's parser takes an object that breaks off; acting on half an input is worse
            # than asking again.
            for raw in inputs.values():
                if raw and not isinstance(json.loads(raw), dict):
                    raise Broken(f"the input of a tool is no object: {raw[:80]}")
        return dict(final.to_dict(mode="json"))

    def _watch(self, response: "httpx2.Response") -> None:
        response.stream = _watched(response.stream, self)  # type: ignore[assignment]

    def check_deadline(self) -> None:
        """Raises Broken where this attempt has taken too long."""
        if self.clock() > self._deadline:
            raise Broken("no answer before the deadline")


def _watched(stream: Any, client: Client) -> Any:
    """The bytes of `stream`, each piece held against the client's deadline."""
    import httpx2

    class Watched(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for piece in stream:
                client.check_deadline()
                yield piece

        def close(self) -> None:
            stream.close()

    return Watched()


def retry_after(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None where another would end the same.

    What the server asks for is obeyed. Otherwise the wait doubles from half a second to half a
    minute, less a random quarter, so that many clients do not come back at once.
    """
    import anthropic

    if isinstance(error, anthropic.APIStatusError):
        code = f"{error.error_code} {error.type}"
        headers = error.response.headers
        wanted = headers.get("x-should-retry")
        status = error.status_code
        # An error inside a stream comes under the status of the stream, which is 200.
        again = status in (200, 408, 409, 429) or status >= 500
        if any(word in code for word in _FINAL) or wanted == "false":
            return None
        if not again and wanted != "true":
            return None
        for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
            try:
                return float(headers[name]) * unit
            except (KeyError, ValueError):
                continue
    return min(30.0, 0.5 * 2 ** (attempt - 1)) * (1 - 0.25 * random.random())


def _known_usage(snapshot: dict[str, Any]) -> dict[str, Any]:
    """What a broken stream is known to have used: its prompt, and the answer as far as it came (a
    token for three characters)."""
    if "message" not in snapshot:
        return {}
    usage = dict(snapshot["message"]["usage"])
    said = round(snapshot.get("characters", 0) / 3)
    usage["output_tokens"] = max(usage.get("output_tokens") or 0, said)
    return usage


def _first_line(error: Exception) -> str:
    said = getattr(error, "api_message", None) or str(error) or type(error).__name__
    return str(said).splitlines()[0]
