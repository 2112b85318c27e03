"""A router as endpoint picker, asked over gRPC as Envoy asks it."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.common.errors import ConfigurationError
from baton.v1 import endpoint_picker_pb2 as pb
from baton.v1 import worker_pb2
from kvstore.block_key import BlockKeyChain
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from router.config.endpoint_picker import EndpointPickerConfig
from router.config.http import HttpConfig
from router.config.security import (
    PLAIN_CALLS,
    ClientTlsConfig,
    RouterSecurityConfig,
    WorkerTlsConfig,
)
from router.config.tenants import TenantsConfig
from rpc.channels import open_channel
from rpc.probe import check_health, wait_until_serving
from tests.support.certificates import Authority, write_files
from tests.support.ext_proc import (
    CHAT,
    body_message,
    destination_of,
    headers_message,
    passed_body,
    status_of,
)
from tests.support.fake_workers import BLOCK_SIZE, NAMESPACE, FakeDecode, running_workers
from tests.support.pod_servers import pod_server
from tests.support.ports import reserved_port
from tests.support.running_router import running_router, script_of
from tests.support.tenants import KEY, entry_of, write_tenants

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
TEXT = "A prompt whose blocks one of the workers caches, and the other one lacks."
MESSAGES = f'"messages": [{{"role": "user", "content": "{TEXT}"}}], "max_tokens": 5'
BODIES = {
    CHAT: f"{{{MESSAGES}}}",
    "/v1/completions": f'{{"prompt": ["{TEXT}"], "stream": true}}',
    "/v1/messages": f"{{{MESSAGES}}}",
    "/v1/responses": f'{{"input": "{TEXT}"}}',
}
TEMPLATE = ChatTemplate(
    TemplateSource({"default": TemplateText("{{ messages[0].content }}", "test")}, {})
)
ANSWER_BEGINS = pb.ExtProcRequest(response_headers=pb.ExtProcHeaders())


class CachingWorker(FakeDecode):
    """A decode worker that says that it caches the blocks of some prompts."""

    def __init__(self, host, *prompts, salt="", **info):
        super().__init__([50], host=host, **info)
        self.keys = []
        for prompt in prompts:
            chain = BlockKeyChain(NAMESPACE, BLOCK_SIZE, cache_salt=salt)
            self.keys.append(list(chain.extend(script_of(prompt))))

    async def watch_kv_events(self):
        response = worker_pb2.WatchKvEventsResponse()
        response.events.add(sequence_number=1).cleared.SetInParent()
        for keys in self.keys:
            response.events.add(sequence_number=1).stored.keys.extend(keys)
        yield response
        await asyncio.Event().wait()


class RunningPicker:
    """A router whose endpoint picker listens, and a channel to it."""

    def __init__(self, router, address, channel):
        self.router, self.address = router, address
        self._open = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ExtProcRequest.SerializeToString,
            response_deserializer=pb.ExtProcResponse.FromString,
        )
        self.calls = []

    async def ask(self, *messages, num_answers=1):
        """Begins an exchange, which stays open; returns the first answers."""
        call = self._open(timeout=30)
        self.calls.append(call)
        for message in messages:
            await call.write(message)
        return [await call.read() for _ in range(num_answers)]

    async def destination(self, body="{}", path=CHAT, **headers):
        """Asks for one server, and ends the exchange."""
        answers = await self.ask(headers_message(path, **headers), body_message(body.encode()))
        await self.end()
        return destination_of(answers)

    async def end(self):
        """Ends the last exchange, and waits until the picker has noticed."""
        call = self.calls.pop()
        await call.done_writing()
        while await call.read():
            pass


@asynccontextmanager
async def running_picker(*workers, endpoint_port=8000, **config):
    port = reserved_port()
    picker = EndpointPickerConfig(endpoint_picker_port=port, endpoint_port=endpoint_port)
    address = f"127.0.0.1:{port}"
    async with (
        running_workers(*workers),
        running_router(*workers, chat_template=TEMPLATE, picker=picker, **config) as router,
        open_channel(address) as channel,
    ):
        yield RunningPicker(router, address, channel)


async def until_known(picker, *workers):
    """Waits until the picker knows what the workers cache."""
    num_keys = sum(len(keys) for worker in workers for keys in worker.keys)
    async with asyncio.timeout(10):
        while sum(c.believed for c in picker.router.fleet.cache_counts()) < num_keys:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the index notifies nobody


@pytest.mark.parametrize("caches_last", [False, True])
async def test_the_server_that_caches_the_prompt_is_named(caches_last):
    """Whatever the API: the picker computes the block keys that workers have."""
    hosts = ["127.0.0.2", "127.0.0.3"]
    cached, other = hosts[::-1] if caches_last else hosts
    workers = CachingWorker(cached, TEXT), CachingWorker(other)
    async with running_picker(*workers) as picker:
        await until_known(picker, *workers)
        for path, body in BODIES.items():
            assert await picker.destination(body, path) == f"{cached}:8000", path


async def test_the_subset_hint_is_obeyed():
    workers = CachingWorker("127.0.0.2", TEXT), CachingWorker("127.0.0.3")
    async with running_picker(*workers) as picker:
        await until_known(picker, *workers)
        for subset in (["127.0.0.3:8000"], "127.0.0.3:8000,10.0.0.1:8000", ["127.0.0.3"]):
            assert await picker.destination(BODIES[CHAT], subset=subset) == "127.0.0.3:8000"
        for subset in ([], ["127.0.0.3:8001"], ["10.0.0.1:8000"]):
            message = headers_message(subset=subset)
            assert status_of(await picker.ask(message, body_message(b"{}"))) == 503


async def test_without_a_readable_prompt_the_least_loaded_server_is_named():
    workers = CachingWorker("127.0.0.2", TEXT), CachingWorker("127.0.0.3", TEXT)
    for worker, num_running in zip(workers, (9, 3), strict=True):
        worker.current_load.num_running = num_running
    bad_bodies = ("{", "[]", '{"messages": 5}', f'{{"model": "unknown", {MESSAGES}}}')
    async with running_picker(*workers) as picker:
        for body in bad_bodies:
            assert await picker.destination(body) == "127.0.0.3:8000", body
        answers = await picker.ask(headers_message("/v1/models", method="GET", has_body=False))
        assert destination_of(answers) == "127.0.0.3:8000"


async def test_full_servers_are_not_named_until_an_answer_begins():
    worker = FakeDecode([50], host="127.0.0.2", max_num_requests=1)
    async with running_picker(worker) as picker:
        asked = headers_message(), body_message(BODIES[CHAT].encode())
        assert destination_of(await picker.ask(*asked)) == "127.0.0.2:8000"
        (refusal,) = await picker.ask(*asked)
        assert status_of([refusal]) == 429
        sent = {option.header.key for option in refusal.immediate_response.headers.set_headers}
        assert "retry-after" in sent
        first = picker.calls[0]
        await first.write(ANSWER_BEGINS)
        passed = await first.read()
        assert passed.WhichOneof("answer") == "request_body"
        assert (await first.read()).WhichOneof("answer") == "response_headers"
        assert destination_of(await picker.ask(*asked)) == "127.0.0.2:8000"


async def test_an_exchange_that_ends_frees_the_place():
    worker = FakeDecode([50], host="127.0.0.2", max_num_requests=1)
    async with running_picker(worker) as picker:
        for _ in range(3):
            assert await picker.destination(BODIES[CHAT]) == "127.0.0.2:8000"


async def test_an_answer_that_does_not_begin_is_no_error_of_the_picker(monkeypatch):
    """Its server ends the request: an error here would take the place of that answer."""
    monkeypatch.setattr("router.endpoint_picker.service._SLACK_S", 0.1)
    worker = FakeDecode([50], host="127.0.0.2")
    async with running_picker(worker, default_timeout_s=1.0) as picker:
        answers = await picker.ask(headers_message(), body_message(b"{}"), num_answers=2)
        assert destination_of(answers) == "127.0.0.2:8000"
        (call,) = picker.calls
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_a_body_that_does_not_come_ends_the_exchange():
    """Pieces that come do not give it more time, as they would hold bytes for ever."""
    http = HttpConfig(port=None, body_timeout_s=0.5)
    async with running_picker(FakeDecode([50], host="127.0.0.2"), http=http) as picker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await picker.ask(headers_message())
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        slow = picker._open(timeout=30)
        await slow.write(headers_message())

        async def send_pieces():
            while not slow.done():
                await slow.write(body_message(b" ", is_end=False))
                await asyncio.sleep(0.1)

        sending = asyncio.create_task(send_pieces())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await slow.read()
        await asyncio.gather(sending, return_exceptions=True)  # its last piece may come too late
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details().startswith("the body of the request did not arrive")


async def test_without_a_worker_the_answer_is_503_and_health_says_so():
    worker = FakeDecode([50], host="127.0.0.2")
    async with running_picker(worker) as picker:
        await wait_until_serving(picker.address, 10)
        await worker.stop()
        await picker.router.until(lambda: not picker.router.candidate_ids())
        assert status_of(await picker.ask(headers_message(), body_message(b"{}"))) == 503
        server = picker.router.service._servers[1]
        await picker.router.until(lambda: not server.is_serving)
        assert await check_health(picker.address) == "NOT_SERVING"
        assert await check_health(picker.address, service="liveness") == "SERVING"


async def test_the_body_goes_on_whole():
    body = BODIES[CHAT].encode() + b" " * 100_000
    async with running_picker(FakeDecode([50], host="127.0.0.2")) as picker:
        pieces = body_message(body[:50_000], is_end=False), body_message(body[50_000:])
        answers = await picker.ask(headers_message(), *pieces, num_answers=3)
        assert destination_of(answers) == "127.0.0.2:8000"
        assert passed_body(answers) == (body, True)


@pytest.mark.parametrize("num_bytes", [2**24, 2**24 + 1])
async def test_a_buffered_body_may_be_as_large_as_a_request_or_larger(num_bytes):
    """The largest one that is read is one message, and a larger one is sent on unread."""
    http = HttpConfig(port=None, max_request_bytes=2**24)
    worker = FakeDecode([50], host="127.0.0.2")
    options = [("grpc.max_send_message_length", -1)]
    async with (
        running_picker(worker, http=http) as picker,
        grpc.aio.insecure_channel(picker.address, options) as channel,
    ):
        asked = RunningPicker(picker.router, picker.address, channel)
        messages = (
            headers_message(mode=pb.EXT_PROC_BODY_MODE_BUFFERED),
            body_message(BODIES[CHAT].encode().ljust(num_bytes)),
        )
        assert destination_of(await asked.ask(*messages, num_answers=2)) == "127.0.0.2:8000"


async def test_a_clients_prompts_have_its_own_keys(tmp_path):
    """The salt of a client is a part of the keys. A key of nobody costs no tokenizing."""
    path = write_tenants(tmp_path, entry_of("a", KEY))
    security = RouterSecurityConfig(tenants=TenantsConfig(tenants=path))
    async with running_picker(FakeDecode([50], host="127.0.0.4"), security=security) as picker:
        tenant = picker.router.service._security.tenants.find([KEY])
        salt = tenant.cache_salt("")
    salted = CachingWorker("127.0.0.2", TEXT, salt=salt)
    plain = CachingWorker("127.0.0.3", TEXT)
    plain.current_load.num_running = 1  # else chance would decide for the key of nobody
    async with running_picker(salted, plain, security=security) as picker:
        await until_known(picker, salted, plain)
        for name, key in (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)):
            sent = {name: key}
            assert await picker.destination(BODIES[CHAT], headers=sent) == "127.0.0.2:8000"
        assert await picker.destination(BODIES[CHAT], headers={"x-api-key": "x"})


async def test_the_port_has_the_routers_certificate(tmp_path):
    authority = Authority()
    revoked = authority.issue("revoked")
    crl = authority.revoke(revoked)
    own = write_files(tmp_path / "own", authority.issue("router"), authority.certificate, crl)
    security = RouterSecurityConfig(
        clients=ClientTlsConfig(
            certfile=own.certfile,
            keyfile=own.keyfile,
            ca_certs=own.ca_certs,
            crlfile=own.crlfile,
            ssl_cert_reqs="required",
        ),
        workers=WorkerTlsConfig(cluster_ssl_ca_certs=PLAIN_CALLS),
    )
    port = reserved_port()
    picker = EndpointPickerConfig(endpoint_picker_port=port)
    worker = FakeDecode([50], host="127.0.0.2")
    async with running_workers(worker), running_router(worker, picker=picker, security=security):
        for leaf, is_served in ((authority.issue("good"), True), (revoked, False), (None, False)):
            shown = (leaf.key, leaf.certificate) if leaf else ()
            credentials = grpc.ssl_channel_credentials(authority.certificate, *shown)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                asked = RunningPicker(None, "", channel)
                try:
                    answers = await asked.ask(headers_message(), body_message(b"{}"))
                except grpc.aio.AioRpcError:
                    answers = []
            assert any(answers) == is_served


async def test_workers_with_names_are_not_named(caplog):
    worker = FakeDecode([50], host="localhost")
    async with running_picker(worker) as picker:
        assert status_of(await picker.ask(headers_message(), body_message(b"{}"))) == 503
        (warning,) = [r for r in caplog.records if "IP addresses" in r.getMessage()]
        assert worker.address in warning.getMessage()


async def test_a_choice_is_no_probe_of_an_ejected_replica():
    """The picker does not learn how the request ends; one of the router's own does."""
    async with running_picker(FakeDecode([50], host="127.0.0.2")) as picker:
        (replica,) = picker.router.fleet.decode.candidates
        breaker, now = replica._breaker, [0.0]
        breaker._clock = lambda: now[0]
        for _ in range(3):
            breaker.fail(breaker.begin())
        assert replica.is_ejected
        now[0] = 2.0  # after the first cool-down
        assert not replica.is_ejected
        for path, body in ((CHAT, BODIES[CHAT]), (CHAT, "{}")):
            assert await picker.destination(body, path) == "127.0.0.2:8000"
            assert not replica.is_ejected


async def test_servers_that_do_not_answer_come_last(monkeypatch):
    """Their workers are connected, and announce themselves, all the same."""
    monkeypatch.setattr("router.endpoint_picker.servers._INTERVAL_S", 0.02)
    workers = CachingWorker("127.0.0.2", TEXT), CachingWorker("127.0.0.3")
    workers[1].current_load.num_running = 9
    port = reserved_port()
    async with running_picker(*workers, endpoint_port=port) as picker:
        await until_known(picker, *workers)
        assert await picker.destination() == f"127.0.0.2:{port}"
        async with pod_server("127.0.0.3", port):
            async with asyncio.timeout(10):
                while await picker.destination() != f"127.0.0.3:{port}":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # checks notify nobody
            assert await picker.destination(BODIES[CHAT]) == f"127.0.0.3:{port}"
            assert await picker.destination(subset=["127.0.0.2"]) == f"127.0.0.2:{port}"


@pytest.mark.parametrize(
    ("field", "value"), [("endpoint_port", 0), ("endpoint_picker_port", 65536)]
)
def test_bad_ports_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"--{field.replace('_', '-')} is {value}"):
        EndpointPickerConfig(**{field: value})
