"""The API server of Kubernetes, as far as EndpointSlices go, by HTTPS in this process."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.support.certificates import Authority, write_files

PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
SELECTOR = "kubernetes.io/service-name=decode"
TOKEN = "the-token-of-the-account"


def endpoint_slice(name: str, *pods: str | tuple[str, Mapping[str, bool]], port: int = 50062):
    """Returns a slice of pods: each an address, or an address with its conditions."""
    endpoints = [
        {"addresses": [pod], "conditions": {"ready": True, "serving": True}}
        if isinstance(pod, str)
        else {"addresses": [pod[0]], "conditions": dict(pod[1])}
        for pod in pods
    ]
    return {
        "metadata": {"name": name},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9000}, {"name": "grpc", "port": port}],
        "endpoints": endpoints,
    }


class FakeKubernetes:
    """An API server with the slices of one Service.

    Attributes:
        port: where it listens on 127.0.0.1.
        token: the one that it accepts.
        refusal: the status of its answers; None for proper ones.
        page_size: slices in one answer to a list.
        lists: the number of lists that were begun.
        watches: the versions from which watches were asked for.
    """

    def __init__(self) -> None:
        self.port = 0
        self.token = TOKEN
        self.refusal: int | None = None
        self.page_size = 500
        self.lists = 0
        self.watches: list[str] = []
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._oldest = 100  # events up to this version are forgotten
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def put(self, item: dict[str, Any]) -> None:
        """Adds or changes a slice."""
        kind = "MODIFIED" if item["metadata"]["name"] in self._slices else "ADDED"
        self._record(kind, item)
        self._slices[item["metadata"]["name"]] = item

    def delete(self, name: str) -> None:
        """Removes a slice."""
        self._record("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Tells watchers the present version."""
        self._record("BOOKMARK", {"metadata": {}})

    def fail_watches(self, status: Mapping[str, Any]) -> None:
        """Sends an error to watchers."""
        self._record("ERROR", dict(status))

    def forget_events(self) -> None:
        """Forgets all events so far: who has not read them must list again."""
        self._oldest = self._version
        self._events.clear()

    def cut(self) -> None:
        """Ends all connections at once."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def _record(self, kind: str, item: dict[str, Any]) -> None:
        self._version += 1
        item.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(item))))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and closes its connection."""
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            self._writers.discard(writer)
            writer.close()
            with suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.decode().split("\r\n")
        url = urlsplit(first.split()[1])
        query = dict(parse_qsl(url.query))
        headers = {
            name.lower(): text.strip() for name, _, text in (ln.partition(":") for ln in lines)
        }
        assert url.path == PATH
        assert query["labelSelector"] == SELECTOR
        if headers.get("authorization") != f"Bearer {self.token}":
            _write(writer, 401, b"{}")
            return
        if self.refusal is not None:
            _write(writer, self.refusal, b"{}")
            return
        if query.get("watch") != "true":
            _write(writer, 200, json.dumps(self._page(query)).encode())
            return
        assert query["allowWatchBookmarks"] == "true"
        self.watches.append(query["resourceVersion"])
        await self._stream(int(query["resourceVersion"]), writer)

    def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns the answer to a list."""
        begin = int(query.get("continue", 0))
        self.lists += begin == 0
        size = min(self.page_size, int(query["limit"]))
        items = list(self._slices.values())
        metadata = {"resourceVersion": str(self._version)}
        if begin + size < len(items):
            metadata["continue"] = str(begin + size)
        return {"metadata": metadata, "items": items[begin : begin + size]}

    async def _stream(self, version: int, writer: asyncio.StreamWriter) -> None:
        if version < self._oldest:
            _write(writer, 410, b"{}")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            changed = self._changed
            for number, kind, item in [event for event in self._events if event[0] > version]:
                _write_chunk(writer, json.dumps({"type": kind, "object": item}).encode() + b"\n")
                version = number
            await writer.drain()
            await changed.wait()


def _write(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} Status\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Writes a chunk in two pieces, so that lines do not come whole."""
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


@asynccontextmanager
async def running_kubernetes(
    folder: Path, items: Sequence[dict[str, Any]] = ()
) -> AsyncIterator[FakeKubernetes]:
    """Runs an API server; writes the files of a service account to a folder."""
    authority = Authority()
    files = write_files(folder / "server", authority.issue(), authority.certificate)
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "ca.crt").write_bytes(authority.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certfile, files.keyfile)
    kubernetes = FakeKubernetes()
    for item in items:
        kubernetes.put(item)
    server = await asyncio.start_server(kubernetes.serve, "127.0.0.1", 0, ssl=context)
    kubernetes.port = server.sockets[0].getsockname()[1]
    try:
        yield kubernetes
    finally:
        server.close()
        kubernetes.cut()
        await server.wait_closed()
