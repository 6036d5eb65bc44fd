"""One turn of the model over HTTP, retried where that can help.

- One policy serves refusals by the server and streams that break. The SDK's own retries would cover
  the first only, and out of sight of the log and the budget.
- An answer counts when it is whole and makes sense (`answer.py`). Anything less is thrown away, and
  what it cost is counted as far as it is known.
- A server may send nothing but pings, or send without end. So each piece of the answer, pings too,
  is held against a deadline and a size.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from coda_agent.agent.authors.claude.answer import Answer, Broken
from coda_agent.agent.judge.records import JsonObject
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
LARGEST = 32 * 2**20
"""Bytes of an answer. One of 20k tokens, each in an event of 140 bytes, has three million."""
FALLBACKS = "server-side-fallback-2026-07-01"
"""With it the server itself asks a request's `fallbacks`, and says which models may be those."""
_FINAL = ("spend_limit", "credit", "billing", "payment")
"""Words of error codes that a retry cannot mend, whatever the status."""


class Stopped(CodaError):
    """The run cannot go on now; it can be resumed."""

    exit_code = 3


class Declined(Stopped):
    """The model refuses to answer; another may not."""


class Client:
    """The Messages API.

    Args:
        key: API key or token, by the name of its variable.
        fallback: The model that answers where the first refuses. The SDK asks it, unless the
            request names it as one of `fallbacks`, which the server asks.
        base_url: The server; empty for Anthropic's, or the SDK's own setting.
        clock: Seconds; `sleep` waits for some. Tests bring their own.
    """

    def __init__(
        self,
        key: dict[str, str],
        fallback: str | None = None,
        base_url: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._key, self._fallback, self.clock, self.sleep = key, fallback, clock, sleep
        self._base_url = base_url or None
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
                base_url=self._base_url,
                api_key=self._key.get("ANTHROPIC_API_KEY"),
                auth_token=self._key.get("ANTHROPIC_AUTH_TOKEN"),
                max_retries=0,
                timeout=httpx2.Timeout(SILENCE_S, connect=10.0),
                http_client=DefaultHttpxClient(event_hooks={"response": [self._watch]}),
                middleware=[BetaRefusalFallbackMiddleware(chain)] if chain else [],
            )
        return self._sdk

    def respond(
        self, request: JsonObject, left_s: float, failed: Callable[..., None]
    ) -> JsonObject:
        """The model's whole answer (`Answer.whole`).

        Args:
            request: The parameters of the call.
            left_s: Seconds of the run's time; no wait goes beyond them.
            failed: Told of each attempt that failed: `error`, `wait_s` (None: no further attempt)
                and `usage`: empty where nothing was used, None where it cannot be known.

        Raises:
            Stopped: no attempt succeeded, or none could.
        """
        sent = (block for message in request["messages"] for block in message["content"])
        taken = {block["id"] for block in sent if block["type"] == "tool_use"}
        answer = Answer(taken)

        def read() -> JsonObject:
            nonlocal answer
            answer = Answer(taken)
            return self._read(request, answer)

        return self._tried(read, left_s, lambda **about: failed(**about, usage=answer.used()))

    def model(self, name: str, left_s: float, failed: Callable[..., None]) -> JsonObject:
        """Ask what the API says about a model; `failed` as of `respond`.

        Raises:
            Stopped: no attempt succeeded, or none could.
        """

        def read() -> JsonObject:
            models = self.sdk.beta.models.with_raw_response
            if self._fallback:
                raw = models.retrieve(name, betas=[FALLBACKS]).http_response.content
            else:
                raw = models.retrieve(name).http_response.content
            try:
                info = from_json(raw, allow_inf_nan=False)
            except ValueError as error:
                raise Broken(f"what is said about {name} is no JSON: {error}") from error
            if not isinstance(info, dict):
                raise Broken(f"what is said about {name} is no object")
            return info

        return self._tried(read, left_s, lambda **about: failed(**about, usage={}))

    def _tried(
        self, call: Callable[[], JsonObject], left_s: float, failed: Callable[..., None]
    ) -> JsonObject:
        """What `call` returns; it is called again where that can help."""
        import anthropic
        import httpx2

        end = self.clock() + max(left_s, LAST_S)
        for attempt in range(1, ATTEMPTS + 1):
            self._deadline = min(end, self.clock() + CALL_S)
            try:
                return call()
            except (anthropic.APIError, httpx2.HTTPError, Broken) as error:
                wait_s = retry_after(error, attempt)
                if attempt == ATTEMPTS or (wait_s and self.clock() + wait_s > end):
                    wait_s = None
                failed(error=f"{type(error).__name__}: {_told(error)}"[:2000], wait_s=wait_s)
                if wait_s is None:
                    said = getattr(error, "api_message", None) or _told(error)
                    raise Stopped(f"the model did not answer: {_first_line(str(said))}") from error
                self.sleep(wait_s)
        raise AssertionError("unreachable")

    def _read(self, request: JsonObject, answer: Answer) -> JsonObject:
        """Read one stream to its end."""
        from anthropic import APIStatusError

        sdk = self.sdk.with_options(middleware=[]) if "fallbacks" in request else self.sdk
        with sdk.beta.messages.create(**request, stream=True) as stream:
            answer.accepted = True
            for data in _events(stream.response):
                if (event := answer.take(data))["type"] == "error":
                    raise APIStatusError(data[:2000], response=stream.response, body=event)
        return answer.whole()

    def _watch(self, response: "httpx2.Response") -> None:
        response.stream = _watched()(response.stream, self)  # pyright: ignore[reportCallIssue]

    def check(self, size: int) -> None:
        """Raise Broken where this attempt took too long, or too many bytes."""
        if self.clock() > self._deadline:
            raise Broken("no answer before the deadline")
        if size > LARGEST:
            raise Broken(f"more than {LARGEST} bytes")


@cache
def _watched() -> "type[httpx2.SyncByteStream]":
    """The class of streams of bytes, each piece of which a client checks.

    One for all: a class of each stream's own was a cycle that kept its request until Python
    collected its garbage, 90 MB in 400 calls.
    """
    import httpx2

    class Watched(httpx2.SyncByteStream):
        def __init__(self, stream: Any, client: Client) -> None:
            self._stream, self._client = stream, client

        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for piece in self._stream:
                size += len(piece)
                self._client.check(size)
                yield piece

        def close(self) -> None:
            self._stream.close()

    return Watched


def _events(response: "httpx2.Response") -> Iterator[str]:
    """The data of a stream's events, or Broken in whatever way."""
    import anthropic
    import httpx2

    try:
        for event in anthropic.Stream.raw_events(response):
            if event.data:
                yield event.data
    except (anthropic.APIError, httpx2.HTTPError, Broken):
        raise
    except Exception as error:
        raise Broken(f"the stream cannot be read: {type(error).__name__}: {error}") from error


def retry_after(error: Exception, attempt: int) -> float | None:
    """Choose the seconds before the next attempt; None for no further one.

    What the server asks for is obeyed, where it is a time. Otherwise the wait doubles from half a
    second to half a minute, less a random quarter, so that many clients do not come back at once.
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
                wait_s = float(headers[name]) * unit
            except (KeyError, ValueError):
                continue
            if 0 <= wait_s < math.inf:
                return wait_s
    return min(30.0, 0.5 * 2 ** (attempt - 1)) * (1 - 0.25 * random.random())


def _told(error: Exception) -> str:
    """What an error says; of a connection that was not made also where to, and why."""
    from anthropic import APIConnectionError

    said = str(error) or type(error).__name__
    if isinstance(error, APIConnectionError) and error.__cause__:
        said += f" ({error.request.url.copy_with(raw_path=b'')}: {error.__cause__})"
    return said


def _first_line(said: str) -> str:
    return said.partition("\n")[0][:500]
