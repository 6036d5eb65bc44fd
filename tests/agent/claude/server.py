"""A server that speaks the Messages API from a script: real HTTP, real server-sent events.

A script is a function of the request's body and its number; it returns a `Reply`, or bytes and
headers that are no proper reply. What was received is kept, byte for byte.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coda_agent.agent.judge.records import JsonObject

MODEL = "claude-opus-5-5"
Edit = Callable[[list[Any]], list[Any]]


@dataclass
class Reply:
    """One answer. `cut` sends only so many bytes of the stream and drops the connection; `before`
    is called before each event is sent; `edit` changes the events, and may put bytes in
    the place of one, or what is no object."""

    content: list[JsonObject] = field(default_factory=list)
    stop_reason: str | None = "tool_use"
    usage: JsonObject = field(default_factory=dict)
    details: JsonObject | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: JsonObject | bytes | None = None
    cut: int | None = None
    chunked: bool = True
    pings: int = 0
    before: Callable[[int], None] = lambda _: None
    edit: Edit = lambda events: events
    model: str = MODEL


def text(said: str) -> JsonObject:
    return {"type": "text", "text": said}


def call(name: str, given: object, id: str) -> JsonObject:
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def error(status: int, type: str, message: str = "no", **more: Any) -> Reply:
    details = more.pop("details", None)
    body = {"type": type, "message": message} | ({"details": details} if details else {})
    return Reply(status=status, error=body, headers=more)


def events(reply: Reply, number: int) -> Iterator[bytes]:
    """The stream of a reply, one event at a time."""
    for event in reply.edit(list(_events(reply, number))):
        yield event if isinstance(event, bytes) else _encoded(event)


def _encoded(event: object) -> bytes:
    name = event.get("type") if isinstance(event, dict) else "odd"
    data = event if isinstance(event, str) else json.dumps(event)
    return f"event: {name}\ndata: {data}\n\n".encode()


def _events(reply: Reply, number: int) -> Iterator[JsonObject]:
    used = {"input_tokens": 100, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    used |= reply.usage
    start = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
    }
    start |= {"stop_reason": None, "stop_sequence": None, "usage": {**used, "output_tokens": 1}}
    yield _event("message_start", {"message": start})
    for _ in range(reply.pings):
        yield _event("ping", {})
    for i, block in enumerate(reply.content):
        bare = dict(block)
        deltas: list[JsonObject] = []
        if block["type"] == "text":
            bare["text"] = ""
            deltas = [{"type": "text_delta", "text": part} for part in _parts(block["text"])]
        elif block["type"] == "thinking":
            bare |= {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            if block.get("signature"):
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            bare["input"] = {}
            given = block["input"]
            raw = given if isinstance(given, str) else json.dumps(given)
            deltas = [{"type": "input_json_delta", "partial_json": part} for part in _parts(raw)]
        yield _event("content_block_start", {"index": i, "content_block": bare})
        for delta in deltas:
            yield _event("content_block_delta", {"index": i, "delta": delta})
        yield _event("content_block_stop", {"index": i})
    delta = {"stop_reason": reply.stop_reason, "stop_sequence": None}
    delta |= {"stop_details": reply.details} if reply.details else {}
    final = {"output_tokens": used.get("output_tokens", 50)}
    final |= {"iterations": used["iterations"]} if "iterations" in used else {}
    yield _event("message_delta", {"delta": delta, "usage": final})
    yield _event("message_stop", {})


def _event(type: str, data: JsonObject) -> JsonObject:
    return {"type": type, **data}


def _parts(raw: str) -> list[str]:
    return [raw[i : i + 37] for i in range(0, len(raw), 37)] or [""]


class Server(ThreadingHTTPServer):
    """Serves a script until closed; `bodies` are the Messages requests it received, `infos` the
    status, the document and the headers of the first answers about the model."""

    daemon_threads = True

    def __init__(self, script: Callable[[JsonObject, int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.bodies = script, list[bytes]()
        self.headers: list[dict[str, str]] = []
        self.number, self.keep = 0, True
        self.model: str | None = MODEL  # or every one
        self.infos: list[Any] = []
        self.models: Any = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def requests(self) -> list[JsonObject]:
        return [json.loads(body) for body in self.bodies]


Serve = Callable[..., Server]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was killed
            super().handle()

    def setup(self) -> None:
        super().setup()
        # Without this each small piece waits 40 ms for the other side's acknowledgement.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        info = {
            "type": "model", "id": self.server.model or name, "display_name": "M", "created_at": "2026-09-22T00:00:00Z",
            "lifecycle": "active", "max_input_tokens": 200_000, "max_tokens": 64_000,
        }  # fmt: skip
        if name == "models":
            some = {"data": [info], "has_more": False, "first_id": None, "last_id": None}
            self._json(200, self.server.models or some)
        elif name == self.server.model and self.server.infos:
            self._json(*self.server.infos.pop(0))
        elif name == self.server.model or not self.server.model:
            self._json(200, info)
        else:
            self._json(
                404, {"type": "error", "error": {"type": "not_found_error", "message": name}}
            )

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        if "count_tokens" in self.path:
            self._json(200, {"input_tokens": 12345})
            return
        number, self.server.number = self.server.number, self.server.number + 1
        if self.server.keep:
            self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
            self.server.bodies.append(sent)
        reply = self.server.script(json.loads(sent), number)
        if reply.error is not None:
            body = reply.error
            body = body if isinstance(body, bytes) else {"type": "error", "error": body}
            self._json(reply.status, body, reply.headers)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if reply.chunked:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("connection", "close")
        self.end_headers()
        left = reply.cut if reply.cut is not None else 1 << 40
        try:
            for i, event in enumerate(events(reply, number)):
                reply.before(i)
                piece, left = event[:left], left - len(event)
                self.wfile.write(f"{len(piece):x}\r\n".encode() * reply.chunked)
                self.wfile.write(piece + b"\r\n" * reply.chunked)
                self.wfile.flush()
                if left <= 0:
                    self.close_connection = True
                    self.connection.shutdown(2)
                    return
            if reply.chunked:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client has had enough
        self.close_connection = self.close_connection or not reply.chunked

    def _json(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
