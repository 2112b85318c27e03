"""A scripted OpenAI-style HTTP endpoint on a free port, for tests of the load generator."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeCompletions(ThreadingHTTPServer):
    """Answers every completion with `events`, one server-sent event each.

    Attributes:
        url: URL of the API, to `/v1`.
        events: objects, or texts that are sent unchanged.
        status: HTTP status of every completion.
        bodies: bodies of the requests.
        headers: headers of the last request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.events: list[object] = []
        self.status = 200
        self.bodies: list[dict] = []
        self.headers: dict[str, str] = {}


class _Handler(BaseHTTPRequestHandler):
    server: FakeCompletions

    def do_GET(self):
        self._answer(200, "application/json", json.dumps({"data": [{"id": "fake-http"}]}))

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        self.server.headers = dict(self.headers)
        events = (e if isinstance(e, str) else json.dumps(e) for e in self.server.events)
        text = "".join(f": a comment\ndata: {event}\n\n" for event in events)
        self._answer(self.server.status, "text/event-stream", text)

    def _answer(self, status, content_type, text):
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@contextmanager
def running_fake_completions() -> Iterator[FakeCompletions]:
    """Serves until the block ends."""
    with FakeCompletions() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
