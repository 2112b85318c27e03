"""All servers of a process listen at the same addresses: gRPC's, HTTP's and that of metrics."""

import asyncio
import errno
import http.client
import os
import socket

import pytest

from baton.common.addresses import join_host_port
from router.config.http import HttpConfig
from rpc.listeners import open_listeners, reserve_port
from rpc.probe import check_health
from rpc.server_config import MetricsConfig, ServerConfig
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.ports import reserved_port
from tests.support.running_router import running_router

LOOPBACKS = ["127.0.0.1", "::1"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


async def serves_http(host: str, port: int, path: str) -> bool:
    def ask() -> bool:
        connection = http.client.HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
        except ConnectionRefusedError:
            return False
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def serves_grpc(host: str, port: int) -> bool:
    return await check_health(join_host_port(host, port), timeout_s=5) == "SERVING"


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", LOOPBACKS),
        ("::", LOOPBACKS),
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
    ],
)
async def test_all_servers_answer_at_the_same_addresses(host, expected):
    metrics_port = reserved_port()
    servers = {
        "grpc": ServerConfig(host=host),
        "http": HttpConfig(host=host),
        "metrics": MetricsConfig(host=host, port=metrics_port),
    }
    decode = FakeDecode([5])
    async with running_workers(decode), running_router(decode, **servers) as router:
        http_port, grpc_port = router.service.http.port, router.server.port
        reached = {
            "grpc": [a for a in LOOPBACKS if await serves_grpc(a, grpc_port)],
            "http": [a for a in LOOPBACKS if await serves_http(a, http_port, "/health")],
            "metrics": [a for a in LOOPBACKS if await serves_http(a, metrics_port, "/metrics")],
        }
    assert reached == {"grpc": expected, "http": expected, "metrics": expected}


def refuses_ipv6(monkeypatch, number):
    """Lets sockets of IPv6 fail as on a machine without it."""
    make = socket.socket

    def make_or_fail(family=socket.AF_INET, *arguments, **options):
        if family == socket.AF_INET6:
            raise OSError(number, "no IPv6")
        return make(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", make_or_fail)


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_machine_without_ipv6_listens_at_its_ipv4_addresses(monkeypatch, host, number):
    refuses_ipv6(monkeypatch, number)
    (listener,) = open_listeners(host, 0, 1)
    with listener:
        assert listener.family == socket.AF_INET


def test_a_name_is_each_of_its_addresses_that_the_machine_has(monkeypatch):
    def resolve(host, port, **_):
        addresses = ["127.0.0.1", "192.0.2.1", "127.0.0.2", "127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listeners = open_listeners("name.test", 0, 1)
    names = [listener.getsockname() for listener in listeners]
    for listener in listeners:
        listener.close()
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_a_host_that_is_elsewhere_is_an_error():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        open_listeners("192.0.2.1", 0, 1)


@needs_ipv6
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_port_in_use_in_one_family_is_in_use(host):
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as other,
        pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)),
    ):
        open_listeners(host, other.getsockname()[1], 1)


def close(sockets):
    for one in sockets:
        one.close()


def test_a_reserved_port_is_in_use_for_others_before_anybody_listens_there():
    reserved = reserve_port("127.0.0.1", 0)
    port = reserved[0].getsockname()[1]
    with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        reserve_port("127.0.0.1", port)
    close(open_listeners("127.0.0.1", port, 1, shares_port=True))
    close(reserved)
    close(reserve_port("127.0.0.1", port))
