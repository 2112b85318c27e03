"""Two hosts connected by a cable, made of network namespaces; needs root."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from tests.support.cluster import Cluster, Place
from tests.support.routes import LEASE_S, Route

__all__ = ["TwoHosts", "other_host", "running_two_hosts", "why_unavailable"]

_PEER_PORT = 7100
_namespaces = count()
# What `ip netns exec` shows as /etc/resolv.conf.
_RESOLV_CONF = "/etc/netns/{}/resolv.conf"
_NOBODY = "02:00:00:00:00:01"
"""The hardware address of no device."""
_STARTED_BYTES = (
    10_000  # more than the bytes before a transfer's blocks, less than a whole transfer
)


def why_unavailable() -> str:
    """Returns why this machine cannot make network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"not on PATH: {', '.join(missing)}"
    name = f"bt{os.getpid()}x"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces: {error}"
    _run("ip", "netns", "delete", name)
    return ""


class TwoHosts(Route):
    """The hosts of prefill and decode, and a cable between them that carries only KV.

    Args:
        scheme: scheme of the peer connector that uses the cable.
        options: options of its URL.

    Attributes:
        places: places of the tiers' processes; this process reaches them by other links.
    """

    def __init__(self, scheme: str, options: str) -> None:
        self._names = {tier: f"veth{os.getpid()}{tier[0]}" for tier in ("prefill", "decode")}
        # 198.18.0.0/15 is reserved for benchmarks; this process has the addresses in `_here`.
        subnet = f"198.18.{os.getpid() % 250}"
        self._here = {"prefill": f"{subnet}.1", "decode": f"{subnet}.5"}
        hosts = {"prefill": f"{subnet}.2", "decode": f"{subnet}.6"}
        self._on_cable = {"prefill": f"{subnet}.9", "decode": f"{subnet}.10"}
        # Both hosts are one machine, on which nixl would read memory through the kernel.
        environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "cable"}
        self.places = {
            tier: Place(hosts[tier], ("ip", "netns", "exec", name), environment)
            for tier, name in self._names.items()
        }
        options += f"&lease_s={LEASE_S}"
        self.prefill_url = f"{scheme}://{self._on_cable['prefill']}:{_PEER_PORT}?{options}"
        self.decode_url = f"{scheme}://{self._on_cable['decode']}?{options}"
        self.held_decode_url = self.decode_url
        self._num_received = 0

    def set_up(self, stack: ExitStack) -> None:
        """Makes hosts and links; the stack removes them."""
        for tier, name in self._names.items():
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", "here", "netns", name)
            stack.callback(_run, "ip", "link", "delete", name)  # deleting a namespace may take time
            _run("ip", "address", "add", f"{self._here[tier]}/30", "dev", name)
            _run("ip", "link", "set", name, "up")
            _run("ip", "-n", name, "address", "add", f"{self.places[tier].host}/30", "dev", "here")
            _run("ip", "-n", name, "link", "set", "here", "up")
        prefill, decode = self._names.values()
        _run(
            *("ip", "-n", prefill, "link", "add", "cable", "type", "veth"),
            *("peer", "name", "cable", "netns", decode),
        )
        for tier, name in self._names.items():
            _run("ip", "-n", name, "address", "add", f"{self._on_cable[tier]}/30", "dev", "cable")
        self._set_cable("up")

    def hold_saves(self) -> None:
        self.hold_loads()

    def hold_loads(self) -> None:
        """Limits the cable to a rate at which a block takes seconds."""
        limit = ("tbf", "rate", "80kbit", "burst", "4kb", "latency", "60s")
        _run("tc", "-n", self._names["prefill"], "qdisc", "add", "dev", "cable", "root", *limit)
        self._num_received = self._count_received()

    def lose_packets(self) -> None:
        """Lets all packets on the cable get lost, as a broken switch does: neither end notices."""
        for name, peer in self._neighbours():
            address = ("lladdr", _NOBODY, "nud", "permanent")
            _run("ip", "-n", name, "neighbour", "replace", peer, *address, "dev", "cable")

    def deliver_packets(self) -> None:
        """Ends `lose_packets`."""
        for name, peer in self._neighbours():
            _run("ip", "-n", name, "neighbour", "delete", peer, "dev", "cable")

    def unplug(self) -> None:
        """Cuts the cable; neither end sees a closed connection."""
        self._set_cable("down")

    def release(self) -> None:
        self._set_cable("up")
        _run("tc", "-n", self._names["prefill"], "qdisc", "delete", "dev", "cable", "root")

    async def is_holding(self, cluster: Cluster) -> bool:
        return self._count_received() - self._num_received > _STARTED_BYTES

    def _neighbours(self) -> list[tuple[str, str]]:
        """By host: its name, and the address of the other one."""
        return list(zip(self._names.values(), reversed(self._on_cable.values()), strict=True))

    def _set_cable(self, state: str) -> None:
        for name in self._names.values():
            _run("ip", "-n", name, "link", "set", "cable", state)

    def _count_received(self) -> int:
        """Returns the bytes that decode's host has received over the cable."""
        links = _run("ip", "-n", self._names["decode"], "-s", "-j", "link", "show", "cable")
        return int(json.loads(links)[0]["stats64"]["rx"]["bytes"])


@contextmanager
def running_two_hosts(scheme: str, options: str) -> Iterator[TwoHosts]:
    """Yields the hosts, and removes them at the end."""
    hosts = TwoHosts(scheme, options)
    with ExitStack() as stack:
        hosts.set_up(stack)
        yield hosts


@contextmanager
def other_host() -> Iterator[tuple[str, str]]:
    """Makes a host beside this one; yields this host's address on the cable, which ends in 1 while
    the other's ends in 2, and the name of the other's namespace.
    """
    name, subnet = f"rank{os.getpid()}-{next(_namespaces)}", f"198.18.{os.getpid() % 250}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "there", "netns", name)
        _run("ip", "address", "add", f"{subnet}.1/30", "dev", name)
        _run("ip", "link", "set", name, "up")
        _run("ip", "-n", name, "address", "add", f"{subnet}.2/30", "dev", "there")
        for device in ("there", "lo"):
            _run("ip", "-n", name, "link", "set", device, "up")
        # UCX reads the host's routes once in a process: of later ones it knows only the default
        # one, and sends from its device's address.
        _run("ip", "-n", name, "route", "add", "default", "via", f"{subnet}.1")
        with _refused_name_server(name):
            yield f"{subnet}.1", name
        _run("ip", "link", "delete", name)  # a namespace ends with the last of its sockets
    finally:
        _run("ip", "netns", "delete", name)


@contextmanager
def _refused_name_server(namespace: str) -> Iterator[None]:
    """Names a name server that refuses at once. This machine's cannot be reached from a namespace,
    and gloo and TCPStore would wait ten seconds for the name of each caller.
    """
    path = Path(_RESOLV_CONF.format(namespace))
    path.parent.mkdir(parents=True)
    path.write_text("nameserver 127.0.0.1\n")
    try:
        yield
    finally:
        shutil.rmtree(path.parent)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
