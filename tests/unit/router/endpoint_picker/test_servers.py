"""Which of the routers beside decode workers the endpoint picker takes for ready."""

import asyncio
import ssl
from contextlib import asynccontextmanager, nullcontext

import pytest

from router.endpoint_picker import servers as servers_module
from router.endpoint_picker.servers import Servers
from tests.support.certificates import Authority, write_files
from tests.support.conditions import until
from tests.support.pod_servers import pod_server
from tests.support.ports import reserved_port

HOST = "127.0.0.1"
ADDRESS = f"{HOST}:50062"


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    monkeypatch.setattr(servers_module, "_INTERVAL_S", 0.01)


@asynccontextmanager
async def running(port, *, has_tls=False, addresses=(ADDRESS,)):
    """The checks of the server beside one decode worker."""
    servers = Servers(lambda: addresses, port, has_tls=has_tls)
    task = asyncio.create_task(servers.run())
    try:
        async with asyncio.timeout(20):
            yield servers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "failed", [lambda port: nullcontext(), lambda port: pod_server(HOST, port, 503)],
    ids=["refuses", "is not ready"],
)  # fmt: skip
async def test_a_server_that_fails_is_lost_until_it_is_ready_again(failed, caplog):
    caplog.set_level("INFO", "baton.router")
    port = reserved_port()
    async with running(port) as servers:
        assert servers.answers(f"{HOST}:{port}")  # a new one may be
        async with failed(port):
            await until(lambda: not servers.answers(f"{HOST}:{port}"))
        async with pod_server(HOST, port):
            await until(lambda: servers.answers(f"{HOST}:{port}"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"server {HOST}:{port} is not ready; others get its requests",
        f"server {HOST}:{port} is ready again",
    ]


async def test_a_server_that_hangs_is_lost(monkeypatch):
    monkeypatch.setattr(servers_module, "_TIMEOUT_S", 0.1)
    port = reserved_port()
    async with pod_server(HOST, port, status=None), running(port) as servers:
        await until(lambda: not servers.answers(f"{HOST}:{port}"))


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_a_server_with_tls_answers_whatever_its_certificate_is(tmp_path, asks_clients):
    """Also if it wants one of its clients, which the picker has not."""
    authority = Authority()
    files = write_files(tmp_path, authority.issue("pod"), authority.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca_certs)
    context.load_cert_chain(files.certfile, files.keyfile)
    if asks_clients:
        context.verify_mode = ssl.CERT_REQUIRED
    port = reserved_port()
    async with running(port, has_tls=True) as servers:
        await until(lambda: not servers.answers(f"{HOST}:{port}"))
        async with pod_server(HOST, port, context=context):
            await until(lambda: servers.answers(f"{HOST}:{port}"))


async def test_a_worker_that_has_left_is_forgotten():
    port = reserved_port()
    addresses = [ADDRESS]
    async with running(port, addresses=addresses) as servers:
        await until(lambda: not servers.answers(f"{HOST}:{port}"))
        addresses.clear()
        await until(lambda: servers.answers(f"{HOST}:{port}"))
