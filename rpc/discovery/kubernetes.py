"""`k8s:///namespace/service:port`: the pods of a Service, by the API of its EndpointSlices.

The source lists the slices and then watches them, each watch from the version of the last event, so
that a lost connection costs no new list. A pod counts while it is ready and does not terminate. A
pod that is not ready any more is not tried again, and is used until its connection ends.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError
from rpc.discovery.kubernetes_api import EndpointSlices, KubernetesError, VersionGoneError
from rpc.discovery.source import Problems, Scope, Source

__all__ = ["MAX_ADDRESSES", "KubernetesTarget", "slice_addresses"]

_LOGGER = logging.getLogger("baton.discovery")
MAX_ADDRESSES = 10_000
"""Pods of a Service that are used at most."""
_FORM = re.compile(
    r"(?P<namespace>[a-z0-9-]{1,63})/(?P<service>[a-z0-9-]{1,63}):(?P<port>[a-z0-9-]{1,63})"
)
_MIN_WATCH_S = 1.0
"""What ends sooner is a failure that does not reset the backoff: a broken server is not asked all
the time.
"""
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    """A Service of Kubernetes.

    Attributes:
        namespace: of the Service.
        service: its name.
        port: the number of the pods' port, or the name that the Service gives it.
    """

    namespace: str
    service: str
    port: str

    @classmethod
    def parse(cls, text: str) -> "KubernetesTarget":
        """Parses `namespace/service:port`.

        Raises:
            ConfigurationError: it has another form, or the port is out of range.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"{text!r} is not namespace/service:port")
        if match["port"].isdecimal() and not 0 < int(match["port"]) <= 65535:
            raise ConfigurationError(f"port {match['port']} must be in [1, 65535]")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        return f"k8s:///{self.namespace}/{self.service}:{self.port}"

    def open(self, scope: Scope) -> Source:
        """Makes the source of the Service's pods.

        Raises:
            ConfigurationError: this process is in no pod of Kubernetes.
        """
        return _KubernetesSource(self, EndpointSlices.in_cluster(self.namespace, self.service))


class _KubernetesSource(Source):
    """The pods of a Service.

    Args:
        target: the Service, and the port of its pods.
        slices: lists and watches its slices.
    """

    def __init__(self, target: KubernetesTarget, slices: EndpointSlices) -> None:
        self._target = target
        self._api = slices
        self._problems = Problems(str(target))
        self._slices: dict[str, frozenset[str]] = {}
        self._addresses: frozenset[str] = frozenset()
        self._version: str | None = None  # of the last event; None before the list
        self._backoff_s = _FIRST_BACKOFF_S

    @property
    @override
    def addresses(self) -> frozenset[str]:
        return self._addresses

    @override
    def name_of(self, address: str) -> str | None:
        if address not in self._addresses:
            return None
        return f"{self._target.service}.{self._target.namespace}.svc"

    @override
    async def follow(self, on_change: Callable[[], None]) -> None:
        self._version = None  # what came while nobody followed was missed
        while True:
            began_at = time.monotonic()
            try:
                await self._follow_once(on_change)
            except VersionGoneError:
                self._version = None
                await self._wait(began_at)
            except KubernetesError as error:
                self._problems.report(str(error))
                await self._wait(began_at)

    async def _follow_once(self, on_change: Callable[[], None]) -> None:
        """Lists the slices if that is needed, and watches them until the watch ends.

        Raises:
            VersionGoneError: events were missed; the slices must be listed.
            KubernetesError: the API cannot be reached, or refuses.
        """
        if self._version is None:
            slices, self._version = await self._api.list()
            self._slices = {_name(item): self._read(item) for item in slices}
            self._update(on_change)
        began_at = time.monotonic()
        async with aclosing(self._api.watch(self._version)) as events:
            async for kind, item in events:
                self._version = item.get("metadata", {}).get("resourceVersion", self._version)
                if kind in ("ADDED", "MODIFIED"):
                    self._slices[_name(item)] = self._read(item)
                elif kind == "DELETED":
                    self._slices.pop(_name(item), None)
                self._update(on_change)
        if time.monotonic() - began_at < _MIN_WATCH_S:
            raise KubernetesError("the server ends watches at once")

    def _update(self, on_change: Callable[[], None]) -> None:
        addresses = frozenset().union(*self._slices.values())
        if len(addresses) > MAX_ADDRESSES:
            self._problems.report(f"{len(addresses)} pods; {MAX_ADDRESSES} of them are used")
            addresses = frozenset(sorted(addresses)[:MAX_ADDRESSES])
        else:
            self._problems.end(len(addresses))
        if addresses != self._addresses:
            self._addresses = addresses
            on_change()

    def _read(self, item: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(slice_addresses(item, self._target.port))

    async def _wait(self, began_at: float) -> None:
        """Waits after a failure of what began at a time. The wait doubles with each failure that
        came soon. It is random, so that routers spread out.
        """
        if time.monotonic() - began_at >= _MIN_WATCH_S:
            self._backoff_s = _FIRST_BACKOFF_S
        delay_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, _MAX_BACKOFF_S)
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))


def slice_addresses(item: Mapping[str, Any], port: str) -> Sequence[str]:
    """Returns the addresses of the pods of an EndpointSlice that take new connections.

    Args:
        item: an object of discovery.k8s.io/v1.
        port: the number of the pods' port, or its name in the slice.
    """
    number = int(port) if port.isdecimal() else _named_port(item, port)
    if number is None:
        return ()
    return [
        join_host_port(address, number)
        for endpoint in item.get("endpoints") or ()
        if _takes_connections(endpoint.get("conditions") or {})
        for address in endpoint.get("addresses") or ()
    ]


def _named_port(item: Mapping[str, Any], name: str) -> int | None:
    ports = (port.get("port") for port in item.get("ports") or () if port.get("name") == name)
    return next(ports, None)


def _takes_connections(conditions: Mapping[str, Any]) -> bool:
    """Whether a pod is ready, which an absent condition means too, and does not terminate.

    `serving` adds nothing to that: it differs from `ready` while a pod terminates, and for Services
    with `publishNotReadyAddresses`, which want their pods to be used.
    """
    return conditions.get("ready") is not False and conditions.get("terminating") is not True


def _name(item: Mapping[str, Any]) -> str:
    return str(item.get("metadata", {}).get("name", ""))
