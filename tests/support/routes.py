"""Routes of KV from prefill to decode that a test can block in the middle of a transfer."""

import fcntl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from tests.support.cluster import Cluster, ServerProcess, get_load
from tests.support.kv_urls import fresh_shm_name
from tests.support.ports import reserved_port
from tests.support.redis_server import RedisServer
from tests.support.tcp_proxy import TcpProxy, running_proxy

__all__ = ["HELD_S", "LEASE_S", "Route", "open_route"]

LEASE_S = 5
HELD_S = 30.0
"""A `timeout_s` so long that a blocked transfer waits until the test releases it."""
_OTHER_HOST = "127.0.0.2"  # this machine too; decode uses it as prefill's address
# More than the bytes that precede a transfer's blocks, and less than any prompt's blocks.
_SOME_BYTES = 8_000


class Route(ABC):
    """One connector over which a prefill and a decode process meet.

    Attributes:
        prefill_url: connector URL of prefill.
        decode_url: connector URL of decode.
        held_decode_url: connector URL of decode with which `hold_loads` has an effect.
        paths: network paths between the two.
    """

    prefill_url: str
    decode_url: str
    held_decode_url: str
    paths: Sequence[TcpProxy] = ()

    @abstractmethod
    def hold_saves(self) -> None:
        """Blocks prefill's saves from now on, or loads if the connector's saves move nothing."""

    @abstractmethod
    def hold_loads(self) -> None:
        """Blocks decode's loads from now on."""

    @abstractmethod
    def release(self) -> None:
        """Unblocks all transfers."""

    @abstractmethod
    async def is_holding(self, cluster: Cluster) -> bool:
        """Returns whether a transfer is blocked now; called after a first token."""


class _PeerRoute(Route):
    """`grpc://` and `nixl://`, with a proxy before prefill's service for its peers."""

    def __init__(self, scheme: str, options: str, port: int, path: TcpProxy) -> None:
        common = f"lease_s={LEASE_S}&{options}"
        self.prefill_url = f"{scheme}://127.0.0.1:{port}?advertise={_OTHER_HOST}&{common}"
        self.decode_url = self.held_decode_url = f"{scheme}://?{common}"
        self.paths = [path]
        # nixl reads blocks past the proxy, so the proxy blocks the first call instead.
        self._num_bytes = _SOME_BYTES if scheme == "grpc" else 0

    def hold_saves(self) -> None:
        self.hold_loads()

    def hold_loads(self) -> None:
        self.paths[0].hold_after(self._num_bytes, "answers")

    def release(self) -> None:
        self.paths[0].let_pass()

    async def is_holding(self, cluster: Cluster) -> bool:
        return self.paths[0].is_holding.is_set()


class _RedisRoute(Route):
    """`redis://`, with a proxy before the server for each tier."""

    def __init__(self, options: str, saves: TcpProxy, loads: TcpProxy) -> None:
        self.prefill_url = f"redis://127.0.0.1:{saves.port}/0?{options}"
        self.decode_url = f"redis://127.0.0.1:{loads.port}/0?{options}"
        self.held_decode_url = self.decode_url
        self.paths = [saves, loads]

    def hold_saves(self) -> None:
        self.paths[0].hold_after(_SOME_BYTES, "requests")

    def hold_loads(self) -> None:
        self.paths[1].hold_after(_SOME_BYTES, "answers")

    def release(self) -> None:
        for path in self.paths:
            path.let_pass()

    async def is_holding(self, cluster: Cluster) -> bool:
        return any(path.is_holding.is_set() for path in self.paths)


class _ShmRoute(Route):
    """`shm://`: holding the store's lock blocks saves, and an injected delay blocks loads."""

    def __init__(self, name: str, options: str) -> None:
        self._folder = Path(f"/dev/shm/baton-{name}")
        self.prefill_url = self.decode_url = f"shm://{name}?max_bytes=64MiB&{options}"
        self.held_decode_url = f"faulty+{self.decode_url}&faults=delay:1&fault_delay_s=60"
        self._lock: IO[bytes] | None = None
        self._holds_loads = False

    def hold_saves(self) -> None:
        self._lock = (self._folder / "lock").open("rb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def hold_loads(self) -> None:
        self._holds_loads = True

    def release(self) -> None:
        self._holds_loads = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def is_holding(self, cluster: Cluster) -> bool:
        return await _holds_blocks((cluster.decode if self._holds_loads else cluster.prefill)[0])


async def _holds_blocks(worker: ServerProcess) -> bool:
    load = await get_load(worker.address)
    return load.num_free_blocks < load.num_blocks


@asynccontextmanager
async def open_route(
    name: str, redis_server: RedisServer, timeout_s: float = HELD_S
) -> AsyncIterator[Route]:
    """Opens the route "redis", "shm", "grpc" or "nixl"; unblocks its transfers at the end."""
    options = f"timeout_s={timeout_s:g}"
    if name == "redis":
        server = ("127.0.0.1", redis_server.port)
        async with running_proxy(server) as saves, running_proxy(server) as loads:
            yield _RedisRoute(options, saves, loads)
    elif name == "shm":
        with fresh_shm_name() as shm_name:
            route = _ShmRoute(shm_name, options)
            yield route
            route.release()
    else:
        port = reserved_port()
        async with running_proxy(("127.0.0.1", port), _OTHER_HOST, port) as path:
            yield _PeerRoute(name, options, port, path)
