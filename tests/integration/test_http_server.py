"""What the HTTP server does about clients: bad ones, slow ones, those that leave; and its end."""

import asyncio
import json
import logging
import socket

import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.common.errors import ConfigurationError, UnavailableError
from router.config.http import HttpConfig
from router.config.served_model import ServedModelConfig
from router.http.server import HttpServer
from router.models import RouterFiles
from tests.support.bench_requests import completion_body, read_result
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_http import RunningHttp, running_http
from tests.support.running_router import script_of, tokenizer
from tests.support.tokenizer_folders import write_byte_level_folder

MODEL = "scripted"
ENDLESS = [50 + i % 200 for i in range(4000)]
LONG_NAME = "a" * 100_000
"""Each chunk of a stream has the model's name, so that a stream of this one soon blocks."""
REQUEST = {"model": MODEL, "prompt": "x", "max_tokens": 4000}


async def open_connection(api: RunningHttp):
    return await asyncio.open_connection("127.0.0.1", api.server.port)


async def open_narrow_connection(api: RunningHttp):
    """A connection whose reader does not read yet, and holds few bytes."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", api.server.port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.transport.pause_reading()
    return reader, writer


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """All bytes up to the connection's end, which may be a reset."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_client_that_leaves_a_stream_frees_the_request():
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with running_http(decode) as api:
        stream = await api.openai.completions.create(**REQUEST, stream=True)
        await anext(stream)
        await stream.close()
        await decode.changes.until(lambda: decode.cancels)
    assert not decode.running


async def test_a_client_that_leaves_while_it_waits_frees_the_request():
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with running_http(decode) as api:
        _, writer = await open_connection(api)
        writer.write(post("/v1/completions", json.dumps(REQUEST).encode()))
        await decode.changes.until(lambda: decode.running)
        writer.close()
        await decode.changes.until(lambda: decode.cancels)


async def test_a_client_that_leaves_during_prefill_frees_the_request():
    prefill, decode = FakePrefill(ENDLESS, hold=True), FakeDecode(ENDLESS)
    async with running_http(prefill, decode) as api:
        _, writer = await open_connection(api)
        body = json.dumps({**REQUEST, "prompt": list(range(100, 140)), "stream": True})
        writer.write(post("/v1/completions", body.encode()))
        await prefill.changes.until(lambda: prefill.requests)
        writer.close()
        await prefill.changes.until(lambda: prefill.num_cancelled)


async def test_a_client_that_does_not_read_gets_every_token_in_fewer_chunks():
    script = ENDLESS[:600]
    decode = FakeDecode(script)
    async with running_http(decode, served_model_name=(MODEL, LONG_NAME)) as api:
        reader, writer = await open_narrow_connection(api)
        body = json.dumps({"model": LONG_NAME, "prompt": "x", "max_tokens": 600, "stream": True})
        writer.write(post("/v1/completions", body.encode(), "Connection: close"))
        await decode.changes.until(lambda: decode.num_sent == len(script))
        writer.transport.resume_reading()
        answer = (await reader.read()).decode()
        writer.close()
    assert "[DONE]" in answer
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in answer.split("\n")
        if line.startswith("data: {")
    ]
    assert "".join(texts) == tokenizer().decode(script)
    assert len(texts) < len(script) / 2


async def test_a_client_that_never_reads_is_cut_off():
    decode = FakeDecode(ENDLESS, pause_after=600)
    name, limits = LONG_NAME * 50, {"send_timeout_s": 0.2}  # one chunk fills every buffer
    async with running_http(decode, served_model_name=(MODEL, name), http=limits) as api:
        _, writer = await open_narrow_connection(api)
        body = json.dumps({**REQUEST, "model": name, "stream": True})
        writer.write(post("/v1/completions", body.encode()))
        await decode.changes.until(lambda: decode.cancels)
        writer.transport.abort()


async def test_a_silent_stream_gets_keepalive_comments():
    decode = FakeDecode(script_of("abcdef"), pause_after=1)
    async with running_http(decode, http={"keepalive_interval_s": 0.05}) as api:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True}
        lines = []
        async with api.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if line.startswith(":") and decode.pause_after is not None:
                    decode.resume()
    assert ": keep-alive" in lines
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


async def test_comments_do_not_hide_events_from_a_client_that_strips_what_it_receives():
    decode = FakeDecode(script_of("abcdef"), pause_after=1)
    async with running_http(decode, http={"keepalive_interval_s": 0.05}) as http_server:
        body = completion_body(MODEL, "x", 3)

        async def pieces(answer):
            async for piece in answer.aiter_raw():
                if piece.startswith(b":") and decode.pause_after is not None:
                    decode.resume()
                yield piece

        async with http_server.http.stream("POST", "/v1/completions", json=body) as answer:
            result = await read_result(pieces(answer))
    assert result.text == tokenizer().decode(script_of("abcdef")[:3])
    assert result.usage["completion_tokens"] == 3


async def test_an_error_in_a_stream_is_an_event():
    decode = FakeDecode(ENDLESS, pause_after=2)
    async with running_http(decode, resume_timeout_s=0.0) as api:
        stream = await api.openai.completions.create(**REQUEST, stream=True)
        await anext(stream)
        decode.fail_running(UnavailableError("the engine has failed"))
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_deadline_of_the_client_holds():
    decode = FakeDecode(ENDLESS, pause_after=2)
    async with running_http(decode) as api:
        headers = {"X-Request-Timeout-S": "0.2"}
        whole = await api.http.post("/v1/completions", json=REQUEST, headers=headers)
        streamed = await api.http.post(
            "/v1/completions", json={**REQUEST, "stream": True}, headers=headers
        )
        bad = await api.http.post(
            "/v1/completions", json=REQUEST, headers={"X-Request-Timeout-S": "soon"}
        )
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "deadline_exceeded"
    assert "deadline_exceeded" in streamed.text
    assert bad.status_code == 400


async def test_official_clients_do_not_repeat_what_took_too_long():
    decode = FakeDecode(ENDLESS, pause_after=1)
    async with running_http(decode) as api:
        client = api.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(
                model="scripted", prompt="a", extra_headers={"X-Request-Timeout-S": "0.2"}
            )
        assert caught.value.status_code == 504
        assert len(decode.starts) == 1


async def test_errors_have_openais_shape():
    async with running_http(FakeDecode([50]), http={"max_request_bytes": 1000}) as api:
        http = api.http
        json_type = {"content-type": "application/json"}
        answers = {
            404: await http.get("/nothing"),
            405: await http.get("/v1/completions"),
            413: await http.post("/v1/completions", json={"prompt": "x" * 2000}),
            415: await http.post("/v1/completions", content=b"{}", headers={}),
            501: await http.post("/v1/embeddings", json={"input": "x"}),
        }
        bad_bodies = [
            await http.post("/v1/completions", content=content, headers=json_type)
            for content in (b"{", b"", b"[]", b"\xff", b'{"prompt": {}}', b"[" * 900, b"null")
        ]
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    for answer in bad_bodies:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_chunked_body_is_refused_while_it_is_read():
    async with running_http(FakeDecode([50]), http={"max_request_bytes": 5000}) as api:
        reader, writer = await open_connection(api)
        head = post("/v1/completions", b"").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        writer.write(head + b"3e8\r\n" + b" " * 1000 + b"\r\n")
        for _ in range(6):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_slow_clients_are_cut_off():
    limits = {"header_timeout_s": 0.1, "body_timeout_s": 0.1, "keep_alive_timeout_s": 1}
    async with running_http(FakeDecode([50]), http=limits) as api:
        silent, silent_writer = await open_connection(api)
        heads, heads_writer = await open_connection(api)
        heads_writer.write(b"GET /health HTTP/1.1\r\nX-A: ")
        bodies, bodies_writer = await open_connection(api)
        bodies_writer.write(post("/v1/completions", b"{", length=100))
        async with asyncio.timeout(10):
            assert await silent.read() == b""
            assert await heads.read() == b""
            answer = await bodies.read()
        for writer in (silent_writer, heads_writer, bodies_writer):
            writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_connections_beyond_the_limit_are_closed():
    async with running_http(FakeDecode([50]), http={"max_connections": 1}) as api:
        reader, writer = await open_connection(api)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        second, second_writer = await open_connection(api)
        async with asyncio.timeout(10):
            assert await _all_of(second) == b""
        writer.close()
        second_writer.close()


async def test_a_bug_is_logged_and_not_shown(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="baton.http")

    async with running_http(FakeDecode([50])) as api:
        monkeypatch.setattr(api.router.service.models, "find", lambda name: 1 / 0)
        answer = await api.http.post(
            "/v1/completions", json=REQUEST, headers={"X-Request-Id": "the-id"}
        )
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "the-id"
    assert "division" not in answer.text
    assert "the-id" in answer.json()["error"]["message"]
    failure = next(r for r in caplog.records if r.getMessage().startswith("failed"))
    assert failure.exc_info[0] is ZeroDivisionError
    assert "the-id" in failure.getMessage()


async def test_request_ids_are_taken_if_they_are_fit():
    decode = FakeDecode([50] * 9)
    async with running_http(decode) as api:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        taken = await api.http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "trace-7"}
        )
        unfit = await api.http.get("/health", headers={"X-Request-Id": "a b"})
    assert taken.headers["x-request-id"] == "trace-7"
    assert taken.json()["id"] == "cmpl-trace-7"
    assert decode.starts[0].spec.request_id.startswith("trace-7")
    assert len(unfit.headers["x-request-id"]) == 32


async def test_concurrent_requests_may_share_an_http_request_id():
    decode = FakeDecode([50] * 9, pause_after=1)
    async with running_http(decode) as api:
        calls = [
            asyncio.ensure_future(
                api.http.post(
                    "/v1/completions",
                    json={"model": MODEL, "prompt": "x", "max_tokens": 3},
                    headers={"X-Request-Id": "same"},
                )
            )
            for _ in range(2)
        ]
        await decode.changes.until(lambda: len(decode.running) == 2)
        decode.resume()
        answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_too_many_requests_get_503_and_retry_after():
    decode = FakeDecode(ENDLESS, pause_after=1)
    async with running_http(decode, max_concurrent_requests=1) as api:
        running = asyncio.ensure_future(api.http.post("/v1/completions", json=REQUEST))
        await decode.changes.until(lambda: decode.running)
        refused = await api.http.post("/v1/completions", json=REQUEST)
        running.cancel()
        await asyncio.wait([running])
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-baton-reason"] == "router-full"
    assert refused.json()["error"]["code"] == "overloaded"


async def readiness(api: RunningHttp) -> tuple[int, list[bool], str]:
    """Returns the status of `/ready`, its models' readiness, and the status of gRPC's health."""
    answer = await api.http.get("/ready")
    stub = health_pb2_grpc.HealthStub(api.router.channel)
    health = await stub.Check(health_pb2.HealthCheckRequest())
    models = [model["ready"] for model in answer.json()["models"]]
    return (
        answer.status_code,
        models,
        health_pb2.HealthCheckResponse.ServingStatus.Name(health.status),
    )


READY, NOT_READY = (200, [True], "SERVING"), (503, [False], "NOT_SERVING")


@pytest.mark.parametrize(
    ("policy", "without_prefill"), [("local", READY), ("wait", NOT_READY), ("fail", NOT_READY)]
)
async def test_readiness_follows_the_prefill_tier_if_decode_may_not_do_its_work(
    policy, without_prefill
):
    prefill, decode = FakePrefill([50]), FakeDecode([50])
    async with running_http(prefill, decode, no_prefill_policy=policy) as api:
        assert await readiness(api) == READY
        await prefill.stop()
        await api.router.until(lambda: not api.router.fleet.prefill.candidates)
        assert await readiness(api) == without_prefill
        successor = await FakePrefill([50]).start(prefill.port)
        await api.router.until_connected(successor)
        assert await readiness(api) == READY
        await decode.stop()
        await api.router.until(lambda: not api.router.fleet.decode.candidates)
        assert await readiness(api) == NOT_READY
        await successor.stop()


async def test_each_model_has_its_own_readiness():
    """gRPC's health has one status for all: SERVING while a model can be served."""
    prefill, decode = FakePrefill([50]), FakeDecode([50])
    other = FakeDecode([50], model="other")
    async with running_workers(other):
        more = ServedModelConfig(model="x", served_model_name=("other",), decode=(other.address,))
        async with running_http(
            prefill, decode, more_models=[more], no_prefill_policy="fail"
        ) as api:
            await api.router.until(
                lambda: all(m.fleet.can_serve for m in api.router.service.models)
            )
            await prefill.stop()
            await api.router.until(lambda: not api.router.fleet.can_serve)
            assert await readiness(api) == (503, [False, True], "SERVING")


async def test_the_tokenizer_is_described_with_the_template_in_use(tmp_path):
    folder = write_byte_level_folder(tmp_path)
    files = RouterFiles.load(
        ServedModelConfig(model=str(folder), decode=("x:1",), chat_template="{{ 1 }}\n")
    )
    settings = files.tokenizer_settings
    assert settings["bos_token"] == "<s>"
    fields = {"chat_template": files.chat_template, "tokenizer_settings": settings}
    async with running_http(FakeDecode([50]), **fields) as api:
        answer = await api.http.get("/tokenizer_info", params={"model": "scripted"})
        missing = await api.http.get("/tokenizer_info?model=other")
    assert answer.json() == {**settings, "chat_template": "{{ 1 }}\n"}
    assert answer.json()["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert missing.status_code == 404
    async with running_http(FakeDecode([50])) as api:
        bare = await api.http.get("/tokenizer_info")
    assert bare.json() == {"tokenizer_class": "PreTrainedTokenizerFast"}


async def test_models_health_and_tokens():
    decode = FakeDecode([50])
    names = ("scripted", "alias")
    async with running_http(decode, served_model_name=names, queue_timeout_s=0.1) as api:
        models = await api.openai.models.list()
        alias = await api.openai.models.retrieve("alias")
        missing = await api.http.get("/v1/models/other")
        paths = ("/health", "/ready", "/ping", "/version", "/openapi.json")
        health = [await api.http.get(path) for path in paths]
        encoded = (
            await api.http.post(
                "/tokenize", json={"model": "alias", "prompt": "abc", "return_token_strs": True}
            )
        ).json()
        decoded = await api.http.post("/detokenize", json={"tokens": encoded["tokens"]})
        negative = await api.http.post("/detokenize", json={"tokens": [-1]})
        await decode.stop()
        await api.router.until(lambda: not api.router.service.models.can_serve)
        not_ready = await api.http.get("/ready")
        refused = await api.http.post("/v1/completions", json={"prompt": "x"})
    assert [model.id for model in models.data] == list(names)
    assert alias.owned_by == "baton"
    assert alias.max_model_len == 4096
    assert missing.status_code == 404
    assert [answer.status_code for answer in health] == [200] * 5
    assert encoded["tokens"] == [0, *script_of("abc")]
    assert "".join(encoded["token_strs"]) == "<s>abc"
    assert encoded["count"] == len(encoded["tokens"])
    assert decoded.json() == {"prompt": "<s>abc"}
    assert negative.status_code == 400
    assert not_ready.status_code == 503
    assert not_ready.json()["models"][0]["ready"] is False
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_pages_of_allowed_origins_may_call():
    origins = {"allowed_origins": ("https://a.example",)}
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with running_http(FakeDecode([50]), http=origins) as api:
        asked = await api.http.options("/v1/completions", headers=headers)
        failed = await api.http.post("/v1/completions", content=b"x" * 9, headers=headers)
    async with running_http(FakeDecode([50])) as api:
        closed = await api.http.options("/v1/completions", headers=headers)
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    assert failed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in closed.headers


async def test_a_stop_that_is_announced_takes_requests_and_is_not_ready():
    async with running_http(FakeDecode(script_of("abc"))) as api:
        api.router.service.announce_stop()
        statuses = {}
        for path in ("/ready", "/health", "/version"):
            reader, writer = await open_connection(api)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            statuses[path] = (await reader.readline()).split()[1]
            writer.close()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        answer = await api.http.post("/v1/completions", json=body)
    assert statuses == {"/ready": b"503", "/health": b"200", "/version": b"200"}
    assert answer.status_code == 200


async def test_a_drain_lets_answers_end_and_takes_no_more_connections():
    decode = FakeDecode(script_of("abcdef"), pause_after=1)
    async with running_http(decode) as api:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        running = asyncio.ensure_future(api.http.post("/v1/completions", json=body))
        await decode.changes.until(lambda: decode.running)
        kept = [await open_connection(api) for _ in range(2)]
        for reader, writer in kept:
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"}]}")
        api.server.begin_drain()
        with pytest.raises(ConnectionRefusedError):
            await open_connection(api)
        # Each connection that is open has one more answer.
        (ready, ready_writer), (reader, writer) = kept
        ready_writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await ready.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close\r\n" in answer
        writer.write(post("/v1/completions", json.dumps(body).encode()))
        await decode.changes.until(lambda: len(decode.running) == 2)
        assert api.server.num_requests == 2
        decode.resume()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        for _, writer in kept:
            writer.close()


async def test_a_connection_of_full_age_has_one_more_answer():
    async with running_http(FakeDecode([50]), http={"max_connection_age_s": 1e-9}) as api:
        reader, writer = await open_connection(api)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        writer.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_stopping_cancels_answers_that_do_not_end(streams):
    decode = FakeDecode(ENDLESS, pause_after=2)
    async with running_http(decode) as api:
        _, writer = connection = await open_connection(api)
        body = json.dumps({**REQUEST, "stream": streams})
        writer.write(post("/v1/completions", body.encode()))
        if streams:
            await connection[0].readuntil(b"data: ")
        await decode.changes.until(lambda: decode.running)
        async with asyncio.timeout(10):
            await api.server.stop(0.05)
            answer = await connection[0].read()
        await decode.changes.until(lambda: decode.cancels)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ") or (streams and b"[DONE]" in answer)
    assert b"the server is stopping" in answer


async def test_an_address_in_use_is_refused():
    async with running_http(FakeDecode([50])) as api:
        config = HttpConfig(port=api.server.port)
        second = HttpServer(api.server._app, config)
        with pytest.raises(ConfigurationError, match="cannot listen on"):
            await second.start()
