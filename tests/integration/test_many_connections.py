"""Idle connections leave room for others, over HTTP and gRPC, also without descriptors."""

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from router.config.http import HttpConfig
from router.http import acceptor
from router.server import connection_limits
from rpc import channels, process_limits
from rpc.server import RpcServer
from rpc.server_access import ServerAccess
from rpc.server_config import ServerConfig
from tests.support.fake_workers import FakeDecode
from tests.support.loop_watch import watched_loops
from tests.support.running_http import running_http
from tests.support.running_router import request, router_config_of, script_of, text_of

IDLE_CLIENT = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, number = map(int, sys.argv[1:])
opened = []
for _ in range(number):
    opened.append(socket.socket())
    opened[-1].setblocking(False)
    opened[-1].connect_ex(("127.0.0.1", port))
print("opened", flush=True)
sys.stdin.read()
"""
"""Opens connections and says nothing, until its input ends."""


@contextmanager
def idle_connections(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Opens connections that send nothing, as far as descriptors allow."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            connection = socket.socket()
            stack.enter_context(connection)
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            opened.append(connection)
        yield opened


@contextmanager
def descriptor_limit(limit: int) -> Iterator[None]:
    """Lets this process open few files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed a connection."""
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what a server does to sockets, which has no event here."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in 20 s")


@pytest.mark.parametrize(
    ("limit", "http", "grpc"),
    [(1024, 512, 256), (4096, 2389, 1195), (20_000, 8192, 8192), (100, 33, 17)],
)
def test_both_doors_share_the_open_files_of_the_process(limit: int, http: int, grpc: int):
    config = router_config_of({"model": "a", "decode": ("a:1",), "http": HttpConfig()})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_limits.resource, "getrlimit", lambda kind: (limit, limit))
        assert connection_limits(config) == (http, grpc)
        assert sum(connection_limits(config)) < limit


async def test_a_server_without_descriptors_accepts_again_and_logs_once(caplog, monkeypatch):
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.05)
    async with running_http(FakeDecode(script_of("ab"))) as api:
        accepted = asyncio.Event()
        refused = asyncio.Event()
        pause = acceptor.Acceptor._pause_accepting

        def note(self, error):
            pause(self, error)
            (accepted if refused.is_set() else refused).set()

        monkeypatch.setattr(acceptor.Acceptor, "_pause_accepting", note)
        with (
            idle_connections(api.server.port, 50) as idle,
            descriptor_limit(max(c.fileno() for c in idle) + 1),
            watched_loops() as watch,
        ):
            async with asyncio.timeout(20):
                await refused.wait()
                await accepted.wait()  # it was tried a second time
        answer = await api.http.get("/health")
    assert answer.status_code == 200
    watch.assert_never_blocked()
    lines = [record for record in caplog.records if "cannot accept" in record.getMessage()]
    assert len(lines) == 1


async def test_grpc_connections_beyond_the_limit_are_closed():
    server = RpcServer(ServerConfig(), (), ServerAccess(max_connections=5))
    await server.listen()
    try:
        with idle_connections(server.port, 20) as idle:
            await until(lambda: sum(map(is_open, idle)) <= 5)
            assert sum(map(is_open, idle)) == 5
    finally:
        await server.stop(0)


async def test_grpc_connections_that_say_nothing_or_do_nothing_end(monkeypatch):
    options = dict(channels.SERVER_OPTIONS)
    assert 0 < options["grpc.max_connection_idle_ms"] <= 600_000
    options |= {"grpc.max_connection_idle_ms": 500, "grpc.server_handshake_timeout_ms": 500}
    monkeypatch.setattr("rpc.server.SERVER_OPTIONS", tuple(options.items()))
    server = RpcServer(ServerConfig(), ())
    await server.listen()
    try:
        with idle_connections(server.port, 2) as (silent, greeted):
            await asyncio.sleep(0)
            greeted.setblocking(True)
            greeted.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            greeted.setblocking(False)
            await until(lambda: not is_open(silent) and not is_open(greeted))
    finally:
        await server.stop(0)


@asynccontextmanager
async def idle_client(port: int, number: int) -> AsyncIterator[None]:
    """Opens idle connections from a process of its own, which has descriptors of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IDLE_CLIENT, str(port), str(number)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        await process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(
    ("limit", "number"), [(300, 400), pytest.param(20_000, 10_000, marks=pytest.mark.slow)]
)
async def test_idle_connections_leave_room_for_others(
    protocol: str, limit: int, number: int, caplog
):
    process_limits.raise_descriptor_limit()
    # Tests before this one may have left files open in this process, which has the client, too.
    limit = min(limit + num_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with descriptor_limit(limit):
        async with running_http(FakeDecode(script_of("ab"))) as api:
            port = api.server.port if protocol == "http" else api.router.server.port
            await api.router.generate(request("a", max_tokens=2))  # connects
            async with idle_client(port, number):
                assert (await api.http.get("/health")).status_code == 200
                responses = await api.router.generate(request("a", max_tokens=2))
                assert text_of(responses) == "ab"
            assert (await api.http.get("/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
