"""Connections of clients that are slow, greedy or gone: each costs bounded time and memory."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest

from router.config.http import HttpConfig
from router.http import connection
from router.http.server import HttpServer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.loop_watch import watched_loops
from tests.support.running_http import RunningHttp, running_http
from tests.support.running_router import script_of

ENDLESS = [50 + i % 200 for i in range(4000)]
SHORT = {"prompt": "x", "max_tokens": 2}
LONG = {"prompt": "x", "max_tokens": 4000, "stream": True}
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
NO_REQUESTS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: 9999999999999999999999\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip, x\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    b"GET /health HTTP/1.1\r\nA\x00: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\n : b\r\n\r\n",
    b"\x00" * 5000,
)


async def opened(api: RunningHttp):
    return await asyncio.open_connection("127.0.0.1", api.server.port)


def post(body, *headers: str, path: str = "/v1/completions") -> bytes:
    text = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All bytes up to the connection's end, which may be a reset."""
    parts = []
    async with asyncio.timeout(20):
        try:
            while part := await reader.read(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
    return b"".join(parts)


async def _until(condition) -> None:
    """Waits for a state of the server that has no event."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in 20 s")


def reset(writer: asyncio.StreamWriter) -> None:
    """Leaves as a client that crashes: the server gets RST."""
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_empty_lines_do_not_keep_a_connection():
    limits = {"header_timeout_s": 0.2, "keep_alive_timeout_s": 1}
    async with running_http(FakeDecode([50]), http=limits) as api:
        reader, writer = await opened(api)
        writer.write(GET)
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"\r\n")
        assert await rest_of(reader) == b""
        writer.close()


async def test_a_byte_now_and_then_does_not_keep_a_connection():
    async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
        for i in range(len(data)):
            writer.write(data[i : i + 1])
            await asyncio.sleep(0.01)

    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3}
    async with running_http(FakeDecode([50]), http=limits) as api:
        head, head_writer = await opened(api)
        body, body_writer = await opened(api)
        whole = post({"prompt": "x" * 9000})
        body_writer.write(whole[:200])
        trickles = [
            asyncio.ensure_future(trickle(head_writer, GET[:-4] + b"\r\nX-A: " + b"a" * 9000)),
            asyncio.ensure_future(trickle(body_writer, whole[200:])),
        ]
        assert await rest_of(head) == b""
        assert (await rest_of(body)).startswith(b"HTTP/1.1 408 ")
        for task in trickles:
            task.cancel()
        for writer in (head_writer, body_writer):
            writer.close()


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nX-A: "])
async def test_heads_that_are_too_large_are_refused(head):
    async with running_http(FakeDecode([50])) as api:
        reader, writer = await opened(api)
        writer.write(head + b"a" * 2**20)
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 431 ") or not await rest_of(reader)
        writer.close()
        assert (await api.http.get("/health")).status_code == 200


@pytest.mark.parametrize("frame", [b"1;" + b"e" * 9000 + b"\r\n \r\n", b"0\r\nT: " + b"t" * 99999])
async def test_framing_that_is_too_large_ends_the_connection(frame, monkeypatch):
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 4096)
    async with running_http(FakeDecode([50]), http={"max_request_bytes": 4096}) as api:
        reader, writer = await opened(api)
        head = post({}).partition(b"\r\n\r\n")[0]
        writer.write(
            head.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"\r\n\r\n"
        )
        for _ in range(200):
            writer.write(frame[:9000])
            frame = frame[9000:] or frame
            await asyncio.sleep(0)
        assert b" 200 " not in await rest_of(reader)
        writer.close()
        assert (await api.http.get("/health")).status_code == 200


async def test_pipelined_requests_are_answered_in_order():
    decode = FakeDecode(script_of("abcdef"))
    async with running_http(decode) as api:
        reader, writer = await opened(api)
        writer.write(post(SHORT) + GET + post(SHORT | {"stream": True}, "Connection: close"))
        answer = await rest_of(reader)
        writer.close()
    parts = answer.split(b"HTTP/1.1 ")[1:]
    assert [part[:3] for part in parts] == [b"200"] * 3
    assert b'"text":"ab"' in parts[0]
    assert b'"status":"ok"' in parts[1]
    assert b"[DONE]" in parts[2]


async def test_a_client_that_leaves_frees_pipelined_requests_too():
    prefill, decode = FakePrefill(ENDLESS), FakeDecode(ENDLESS, pause_after=3)
    async with running_http(prefill, decode) as api:
        reader, writer = await opened(api)
        writer.write(post(LONG) + post(LONG))
        await reader.readuntil(b"data: ")
        reset(writer)
        await decode.changes.until(lambda: decode.cancels)
        assert (await api.http.get("/health")).status_code == 200
    assert len(decode.starts) == 1
    assert not decode.running


async def test_the_head_of_the_next_request_has_time_while_an_answer_is_under_way():
    decode = FakeDecode(script_of("abcdef"), pause_after=1)
    async with running_http(decode, http={"header_timeout_s": 0.2}) as api:
        reader, writer = await opened(api)
        writer.write(post(SHORT) + GET[:9])
        await decode.changes.until(lambda: decode.running)
        other, other_writer = await opened(api)
        other_writer.write(GET[:9])
        assert await rest_of(other) == b""  # the time for a head has passed
        other_writer.close()
        decode.resume()
        await reader.readuntil(b'"text":"ab"')
        writer.write(GET[9:])
        await asyncio.wait_for(reader.readuntil(b'"status":"ok"'), 20)
        writer.close()


async def test_too_many_pipelined_requests_end_the_connection():
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with running_http(decode) as api:
        reader, writer = await opened(api)
        writer.write(post(LONG) + GET * 1000)
        await rest_of(reader)
        writer.close()
        await decode.changes.until(lambda: decode.cancels)


async def test_bodies_that_arrive_at_once_have_a_limit_together():
    """Twenty clients send all of their bodies but the last byte."""
    size = 100_000
    decode = FakeDecode(script_of("abcdef"))
    async with running_http(decode, http={"max_request_bytes": size}) as api:
        clients = [await opened(api) for _ in range(20)]
        body = post({"prompt": "x" * (size - 50), "max_tokens": 2})
        for _, writer in clients:
            writer.write(body[:-1])
        reads = [asyncio.ensure_future(reader.readline()) for reader, _ in clients]
        await _until(lambda: sum(read.done() for read in reads) >= 4)
        refused = [read.result() for read in reads if read.done()]
        assert all(line.startswith(b"HTTP/1.1 503 ") for line in refused)
        for (_, writer), read in zip(clients, reads, strict=True):
            read.cancel()
            writer.close()
        answer = await api.http.post("/v1/completions", json=SHORT)
    assert answer.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_offer_of_another_protocol_changes_nothing(is_chunked):
    """Java's client offers HTTP/2 with its first request."""
    decode = FakeDecode(script_of("abcdef"))
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    head, _, body = post(SHORT, *offer).partition(b"\r\n\r\n")
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with running_http(decode) as api:
        reader, writer = await opened(api)
        writer.write(head + b"\r\n\r\n" + body[:9])
        await writer.drain()
        await api.http.get("/health")  # by now the first part has arrived
        writer.write(body[9:] + GET + post(SHORT, "Connection: close"))
        answer = await rest_of(reader)
        writer.close()
    parts = answer.split(b"HTTP/1.1 ")[1:]
    assert [part[:3] for part in parts] == [b"200"] * 3
    assert b'"text":"ab"' in parts[0]
    assert b'"text":"ab"' in parts[2]


async def test_bytes_that_are_no_request_are_refused(caplog):
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "keep_alive_timeout_s": 1}
    async with running_http(FakeDecode([50]), http=limits) as api:

        async def answer_to(data: bytes) -> bytes:
            reader, writer = await opened(api)
            writer.write(data)
            answer = await rest_of(reader)
            writer.close()
            return answer

        answers = await asyncio.gather(*map(answer_to, NO_REQUESTS))
        assert (await api.http.get("/health")).status_code == 200
    for answer in answers:
        assert not answer or answer[:10] in (b"HTTP/1.1 1", b"HTTP/1.1 2", b"HTTP/1.1 4"), answer
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_large_answer_that_is_not_read_ends(monkeypatch):
    """The close that follows it would wait for ever for a client that does not read."""
    limits = {"keep_alive_timeout_s": 1, "send_timeout_s": 0.5}
    decode = FakeDecode(ENDLESS)
    async with running_http(decode, http=limits) as api:
        protocols = api.server._server.server_state.connections
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", api.server.port))
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 60)
        await _until(lambda: protocols)
        await _until(lambda: not protocols)
        client.close()


async def test_a_thousand_idle_connections_leave_room_for_others():
    decode = FakeDecode(script_of("abcdef"))
    async with running_http(decode, http={"max_connections": 1001}) as api:
        idle = [await opened(api) for _ in range(1000)]
        answer = await api.http.post("/v1/completions", json=SHORT)
        late, late_writer = await opened(api)  # one without a request makes room for it
        late_writer.write(GET)
        assert await late.readuntil(b'{"status":"ok"}')
        for _, writer in (*idle, (late, late_writer)):
            writer.close()
    assert answer.json()["choices"][0]["text"] == "ab"


UNCLEAR_ENDS = (
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: identity",
    "Transfer-Encoding:\r\n chunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 2",
    "Content-Length: 2\r\nTransfer-Encoding: chunked",
    "Content-Length: 2\r\nContent-Length: 2",
    "Content-Length: 2, 2",
    "Content-Length: +2",
    "Content-Length: 2\r\nX: a\r\n b",
    "X: a\nContent-Length: 2",
)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("is_offer", [False, True])
async def test_a_body_whose_end_is_unclear_ends_the_connection(version: str, is_offer: bool):
    offer = "Connection: Upgrade\r\nUpgrade: h2c\r\n" if is_offer else ""
    async with running_http(FakeDecode([50])) as api:
        for headers in (*UNCLEAR_ENDS, *("Transfer-Encoding: chunked",) * (version == "1.0")):
            reader, writer = await opened(api)
            head = f"POST /tokenize HTTP/{version}\r\nHost: x\r\n{offer}{headers}\r\n\r\n"
            writer.write(head.encode() + b"2\r\n{}\r\n0\r\n\r\n" + GET)
            answer = await rest_of(reader)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400 "), (headers, answer)
            assert answer.count(b"HTTP/1.1 ") == 1, (headers, answer)


class HeadersSeen:
    """An application that answers with the names of a request's headers, behind its body."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(context=SimpleNamespace())

    async def __call__(self, scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        names = b",".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": names})


async def test_fields_behind_a_body_are_no_headers_of_the_request():
    server = HttpServer(HeadersSeen(), HttpConfig())  # type: ignore[arg-type]
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2\r\n{}\r\n0\r\nAuthorization: Bearer k\r\n\r\n")
        assert b"\r\nconnection,transfer-encoding\r\n" in await rest_of(reader)
        writer.close()
    finally:
        await server.stop(0)


async def test_many_offers_of_another_protocol_on_one_connection_end_it():
    offer = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with running_http(FakeDecode([50])) as api:
        few, few_writer = await opened(api)
        few_writer.write(offer * 20 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert (await rest_of(few)).count(b'{"status":"ok"}') == 21
        few_writer.close()
        with watched_loops() as watch:
            many, many_writer = await opened(api)
            many_writer.write(offer * 2500)
            await rest_of(many)
            many_writer.close()
        watch.assert_never_blocked()
        assert (await api.http.get("/health")).status_code == 200


async def test_garbage_behind_a_request_does_not_become_part_of_its_answer():
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with running_http(decode) as api:
        reader, writer = await opened(api)
        writer.write(post(LONG))
        await reader.readuntil(b"data: ")
        writer.write(b"\x00\r\n\r\n")
        assert b" 400 " not in await rest_of(reader)  # of a status line; ids may have these digits
        writer.close()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "x"])
async def test_compressed_bodies_are_refused(coding: str):
    async with running_http(FakeDecode([50])) as api:
        headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/messages"):
            answer = await api.http.post(path, content=b"\x1f\x8b", headers=headers)
            assert answer.status_code == 415
            assert answer.json()["error"]["message"] == (
                f"Content-Encoding is {coding!r}; the body must not be compressed"
            )
