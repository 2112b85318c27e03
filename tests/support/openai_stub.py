"""A scripted server of OpenAI's HTTP API on a free port of 127.0.0.1."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What a request gets: a JSON body or a stream of events.

    Attributes:
        body: of a whole answer.
        events: of a stream; None for a whole answer. A string is sent as it is.
        hold: before the stream ends, it is held until this is set or the client has left.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Any] | None = None
    is_complete: bool = True
    hold: threading.Event | None = None


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: Any


class OpenAiStub:
    """Answers each request with what `script(request)` returns.

    Attributes:
        url: the base URL.
        requests: all POST requests, in the order of arrival.
        client_left: is set when a client left a stream before its end.
    """

    def __init__(self, script: Callable[[Seen], Reply]) -> None:
        self.requests: list[Seen] = []
        self.client_left = threading.Event()
        self._script = script
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub._send(self, Reply({"data": [{"id": "stub-model"}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                seen = Seen(self.path, dict(self.headers), body)
                with stub._lock:
                    stub.requests.append(seen)
                stub._send(self, stub._script(seen))

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.events is None:
            data = json.dumps(reply.body).encode()
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
            return
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        self._send_events(handler, reply)

    def _send_events(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        assert reply.events is not None
        try:
            for event in reply.events:
                text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
                handler.wfile.write(text.encode())
            while reply.hold is not None and not reply.hold.wait(0.01):
                handler.wfile.write(b": keep-alive\n\n")
            if reply.is_complete:
                handler.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.client_left.set()


@contextmanager
def running_openai_stub(script: Callable[[Seen], Reply]) -> Iterator[OpenAiStub]:
    stub = OpenAiStub(script)
    thread = threading.Thread(target=stub._server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub._server.shutdown()
        stub._server.server_close()
        thread.join()


def chat_events(*texts: str, reasoning: str = "") -> list[Any]:
    """Returns the chunks of a chat completion."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": reasoning}] if reasoning else []
    deltas += [{"content": text} for text in texts]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return [": keep-alive\n\n", *events, last, {"choices": [], "usage": usage}]
