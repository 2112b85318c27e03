"""Deployments of real Redis processes: a cluster, a master with sentinels; and certificates."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from tests.support.ports import reserved_port
from tests.support.redis_server import RedisServer, await_true, running_redis_server

__all__ = [
    "Certificate",
    "RedisCluster",
    "SentinelDeployment",
    "acl_rules",
    "ask",
    "make_certificate",
    "running_cluster",
    "running_sentinels",
]

_DOCS = Path(__file__).parents[2] / "docs" / "connectors.md"
_NUM_SLOTS = 16384
_SERVICE = "kv"
_NODE_TIMEOUT_MS = "60000"  # long, as no test is about failover between nodes


@dataclass(frozen=True)
class Certificate:
    """A certificate for 127.0.0.1 that is its own authority.

    Attributes:
        path: path of the certificate.
        key: path of its private key.
    """

    path: str
    key: str

    def server_arguments(self, tls_port: int, *, clients: bool = False) -> tuple[str, ...]:
        """Returns flags of a server that listens with it and may require client certificates."""
        # fmt: off
        return (
            "--tls-port", str(tls_port), "--tls-cert-file", self.path, "--tls-key-file", self.key,
            "--tls-ca-cert-file", self.path, "--tls-auth-clients", "yes" if clients else "no",
        )
        # fmt: on


def make_certificate(folder: Path) -> Certificate:
    """Makes a certificate in a folder."""
    certificate = Certificate(str(folder / "certificate.pem"), str(folder / "key.pem"))
    # fmt: off
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", certificate.key, "-out", certificate.path,
        ],
        check=True, capture_output=True,
    )
    # fmt: on
    return certificate


def ask(server: RedisServer, *command: Any) -> Any:
    """Sends a server one command; returns the reply or the error."""
    with Redis(port=server.port, socket_timeout=10) as client:
        try:
            return client.execute_command(*command)
        except RedisError as error:
            return error


def acl_rules(who: str) -> list[str]:
    """Returns the rules of the ACL that docs/connectors.md lists for workers or for another."""
    (rules,) = re.findall(rf"^- {who}[^:\n]*: `([^`]*)`", _DOCS.read_text(), re.MULTILINE)
    return str(rules).split()


@dataclass(frozen=True)
class RedisCluster:
    """A cluster's servers.

    Attributes:
        servers: the primaries, then the replicas.
        url: `redis+cluster://` with all of them.
    """

    servers: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def id_of(self, index: int) -> str:
        """Returns a server's node id in the cluster."""
        return str(ask(self.servers[index], "CLUSTER", "MYID").decode())


@contextmanager
def running_cluster(
    folder: Path, num_servers: int = 3, num_replicas: int = 0
) -> Iterator[RedisCluster]:
    """Runs a cluster in which every server knows the owners of all slots.

    Args:
        folder: folder for the servers' files.
        num_servers: number of servers with slots.
        num_replicas: number of replicas of the first server.
    """
    with ExitStack() as stack:
        servers, bus_ports = [], []
        for index in range(num_servers + num_replicas):
            bus_ports.append(reserved_port())
            # fmt: off
            server = running_redis_server(
                "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
                "--cluster-port", str(bus_ports[-1]), *_own_folder(folder, f"node-{index}"),
                "--cluster-node-timeout", _NODE_TIMEOUT_MS,
            )
            # fmt: on
            servers.append(stack.enter_context(server))
        for index, server in enumerate(servers):
            ask(server, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            ask(servers[0], "CLUSTER", "MEET", "127.0.0.1", server.port, bus_ports[index])
        for index, server in enumerate(servers[:num_servers]):
            first, end = (_NUM_SLOTS * edge // num_servers for edge in (index, index + 1))
            ask(server, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        await_true(lambda: all(_is_whole(server, num_servers) for server in servers), "a cluster")
        cluster = RedisCluster(servers)
        for replica in servers[num_servers:]:
            ask(replica, "CLUSTER", "REPLICATE", cluster.id_of(0))
            await_true(partial(_is_connected, replica), "a connected replica")
        yield cluster


def _own_folder(folder: Path, name: str) -> tuple[str, ...]:
    """Returns flags for a server's own folder, and for a shutdown that awaits no replica."""
    (folder / name).mkdir()
    return "--dir", str(folder / name), "--shutdown-timeout", "0"


def _is_whole(server: RedisServer, num_servers: int) -> bool:
    info = ask(server, "CLUSTER INFO")
    slots = ask(server, "CLUSTER", "SLOTS")
    return info["cluster_state"] == "ok" and len(slots) == num_servers


@dataclass(frozen=True)
class SentinelDeployment:
    """A master, its replica, and three sentinels that watch them.

    Attributes:
        master: the initial master.
        replica: the initial replica.
        sentinels: the processes of the sentinels.
    """

    master: RedisServer
    replica: RedisServer
    sentinels: list[RedisServer]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{_SERVICE}/0"

    def await_replicated(self) -> None:
        """Waits until the replica has all of the master's data."""
        await_true(lambda: _offset(self.replica) == _offset(self.master), "replicated")


@contextmanager
def running_sentinels(folder: Path, down_after_ms: int = 500) -> Iterator[SentinelDeployment]:
    """Runs a deployment whose sentinels know each other and the replica.

    Args:
        folder: folder for the servers' files.
        down_after_ms: how long the master may be silent before the replica takes its place.
    """
    with ExitStack() as stack:
        master = stack.enter_context(
            running_redis_server(*_own_folder(folder, "master"), "--repl-diskless-sync-delay", "0")
        )
        replica = stack.enter_context(
            running_redis_server(
                *_own_folder(folder, "replica"), "--replicaof", "127.0.0.1", str(master.port)
            )
        )
        await_true(partial(_is_connected, replica), "a connected replica")
        sentinels = []
        for index in range(3):
            config = folder / f"sentinel-{index}.conf"
            settings = {"port": master.port, "down_after_ms": down_after_ms}
            config.write_text(_SENTINEL_CONFIG.format(service=_SERVICE, **settings))
            sentinels.append(
                stack.enter_context(running_redis_server("--sentinel", config=str(config)))
            )
        await_true(lambda: all(map(_is_ready, sentinels)), "sentinels know all")
        yield SentinelDeployment(master, replica, sentinels)


_SENTINEL_CONFIG = """\
sentinel monitor {service} 127.0.0.1 {port} 2
sentinel down-after-milliseconds {service} {down_after_ms}
sentinel failover-timeout {service} 3000
"""


def _is_connected(replica: RedisServer) -> bool:
    return bool(ask(replica, "ROLE")[3:4] == [b"connected"])


def _is_ready(sentinel: RedisServer) -> bool:
    master = ask(sentinel, "SENTINEL MASTER", _SERVICE)
    return master["num-other-sentinels"] == 2 and master["num-slaves"] == 1


def _offset(server: RedisServer) -> int:
    info = ask(server, "INFO", "replication")
    return int(info["slave_repl_offset" if info["role"] == "slave" else "master_repl_offset"])
