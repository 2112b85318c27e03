"""Backends of KV connectors whose faults a test begins and ends, with real servers and folders."""

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from redis import Redis

from tests.support.kv_urls import fresh_shm_name
from tests.support.redis_deployments import running_cluster, running_sentinels
from tests.support.redis_server import RedisServer, running_redis_server
from tests.support.two_hosts import TwoHosts

__all__ = ["PLANTED", "Cable", "FaultyBackend", "running_backend"]

PLANTED = "planted5ecret"
"""The password of each server that has one."""


class FaultyBackend(ABC):
    """A backend with faults.

    Attributes:
        url: of the connector, with a password if the backend has one.
    """

    url: str

    @abstractmethod
    def begin(self, fault: str) -> None:
        """Begins a fault."""

    @abstractmethod
    def end(self, fault: str) -> None:
        """Ends a fault."""


_SETTINGS = {
    "read-only": ("min-replicas-to-write", "1", "0"),
    "full": ("maxmemory", "1mb", "0"),
    "rotated": ("requirepass", "another", PLANTED),
}
"""By fault: a setting of a server, and its value during the fault and otherwise."""


class _Redis(FaultyBackend):
    """Servers that stop, hang, refuse writes, are full, or get another password."""

    def __init__(self, url: str, servers: list[RedisServer], password: str = "") -> None:
        self.url = url
        self._servers, self._password = servers, password

    def begin(self, fault: str) -> None:
        for server in self._servers:
            if fault == "down":
                server.kill()
            elif fault == "hangs":
                server.pause()
            else:
                name, value, _ = _SETTINGS[fault]
                self._set(server, self._password, name, value)

    def end(self, fault: str) -> None:
        for server in self._servers:
            if fault == "down":
                server.start()
            elif fault == "hangs":
                server.resume()
            else:
                name, value, before = _SETTINGS[fault]
                self._set(server, value if fault == "rotated" else self._password, name, before)

    def _set(self, server: RedisServer, password: str, name: str, value: str) -> None:
        """Changes a setting, and ends the connections that were made before."""
        with Redis(port=server.port, password=password or None, single_connection_client=True) as c:
            c.execute_command("CONFIG", "SET", name, value)
            c.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


class _Folder(FaultyBackend):
    """A folder that is removed, or whose lock another process holds, as one that is stopped."""

    def __init__(self, url: str, folder: Path, lock: str) -> None:
        self.url = url
        self._folder, self._lock = folder, folder / lock
        self._held = -1

    def begin(self, fault: str) -> None:
        if fault == "removed":
            # In one go, as workers make files meanwhile.
            gone = self._folder.with_name(f"{self._folder.name}-gone")
            self._folder.rename(gone)
            shutil.rmtree(gone)
            return
        self._lock.parent.mkdir(mode=0o700, exist_ok=True)
        self._held = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def end(self, fault: str) -> None:
        if fault == "locked":
            with suppress(OSError):
                os.close(self._held)


class _Peers(FaultyBackend):
    """Workers that lend each other blocks; a test restarts them."""

    def __init__(self, url: str) -> None:
        self.url = url

    def begin(self, fault: str) -> None:
        """Does nothing: the fault is a restart."""

    def end(self, fault: str) -> None:
        """Does nothing."""


class Cable(FaultyBackend):
    """The network between workers that lend each other blocks, each on a host."""

    def __init__(self, hosts: TwoHosts) -> None:
        self._hosts = hosts

    def begin(self, fault: str) -> None:
        self._hosts.lose_packets()

    def end(self, fault: str) -> None:
        self._hosts.deliver_packets()


@contextmanager
def running_backend(name: str, folder: Path, timeout_s: float) -> Iterator[FaultyBackend]:
    """Runs a backend: redis, sentinel, cluster, file, shm, grpc, nixl, or multi."""
    wait = f"timeout_s={timeout_s:g}"
    with ExitStack() as stack:
        if name == "redis":
            server = stack.enter_context(running_redis_server("--requirepass", PLANTED))
            url = f"redis://:{PLANTED}@127.0.0.1:{server.port}/0?{wait}"
            yield _Redis(url, [server], PLANTED)
        elif name == "multi":
            server = stack.enter_context(running_redis_server("--requirepass", PLANTED))
            url = f"redis://:{PLANTED}@127.0.0.1:{server.port}/0?{wait}"
            yield _Redis(f"multi://grpc://?{wait},{url}", [server], PLANTED)
        elif name == "sentinel":
            deployment = stack.enter_context(running_sentinels(folder))
            servers = [deployment.master, deployment.replica]
            yield _Redis(f"{deployment.url}?{wait}", servers)
        elif name == "cluster":
            cluster = stack.enter_context(running_cluster(folder))
            yield _Redis(f"{cluster.url}?{wait}", cluster.servers[:1])
        elif name == "file":
            yield _Folder(f"file://{folder}/kv?max_bytes=64MiB&{wait}", folder / "kv", "ledger")
        elif name == "shm":
            shm_name = stack.enter_context(fresh_shm_name())
            url = f"shm://{shm_name}?max_bytes=64MiB&{wait}"
            yield _Folder(url, Path(f"/dev/shm/baton-{shm_name}"), "lock")
        else:
            yield _Peers(f"{name}://?{wait}")
