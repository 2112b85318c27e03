"""`Announcements`: the workers that announced themselves to this process, each under a lease."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from baton.common.addresses import split_host_port
from baton.common.errors import InvalidArgumentError, ResourceExhaustedError

__all__ = ["LEASE_S", "MAX_LABELS", "MAX_WORKERS", "Announcements", "check_labels"]

LEASE_S = 15.0
"""How long an announcement counts. Workers renew theirs three times as often."""
MAX_WORKERS = 10_000
MAX_LABELS = 32
_MAX_VALUE_CHARS = 255
_MAX_ADDRESS_CHARS = 262
"""A host name of 255 characters and a port."""
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_RETRY_AFTER_S = LEASE_S

Listener = Callable[[str, Mapping[str, str] | None], None]
"""Called with an address and its labels; with None when the address has left."""


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuses labels that a router would not take.

    Raises:
        InvalidArgumentError: names the label and the limit.
    """
    if len(labels) > MAX_LABELS:
        raise InvalidArgumentError.for_field("labels", len(labels), f"at most {MAX_LABELS}")
    for name, value in labels.items():
        if _LABEL_NAME.fullmatch(name) is None:
            limit = "1 to 63 letters, digits and ._/-, and begin with a letter or digit"
            raise InvalidArgumentError.for_field("labels", name, limit)
        if len(value) > _MAX_VALUE_CHARS or not value.isprintable():
            limit = f"at most {_MAX_VALUE_CHARS} printable characters"
            raise InvalidArgumentError.for_field(f"labels[{name}]", value, limit)


@dataclass(slots=True)
class _Lease:
    labels: Mapping[str, str]
    end: asyncio.TimerHandle


class Announcements:
    """The addresses of workers that announced themselves, with their labels.

    An announcement is forgotten when its lease is over or when it is withdrawn. Their number is
    bounded: further addresses are refused until others are forgotten.

    Args:
        lease_s: seconds for which an announcement counts.
        max_workers: the most addresses at a time.
    """

    def __init__(self, lease_s: float = LEASE_S, max_workers: int = MAX_WORKERS) -> None:
        self.lease_s = lease_s
        self._max_workers = max_workers
        self._leases: dict[str, _Lease] = {}
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._leases)

    def announce(self, address: str, labels: Mapping[str, str]) -> None:
        """Adds an address, or renews its lease and changes its labels.

        Args:
            address: `host:port`.
            labels: what a target may ask for.

        Raises:
            InvalidArgumentError: the address or a label is malformed.
            ResourceExhaustedError: too many workers are known already.
        """
        _check_address(address)
        check_labels(labels)
        lease = self._leases.get(address)
        if lease is None and len(self._leases) >= self._max_workers:
            raise ResourceExhaustedError(
                f"this router knows {self._max_workers} announced workers, the most it takes",
                _RETRY_AFTER_S,
            )
        if lease is not None:
            lease.end.cancel()
        end = asyncio.get_running_loop().call_later(self.lease_s, self.withdraw, address)
        self._leases[address] = _Lease(dict(labels), end)
        if lease is None or lease.labels != labels:
            self._notify(address, labels)

    def withdraw(self, address: str) -> None:
        """Forgets an address; one that is not known is no error."""
        lease = self._leases.pop(address, None)
        if lease is not None:
            lease.end.cancel()
            self._notify(address, None)

    @contextmanager
    def watching(self, listener: Listener) -> Iterator[None]:
        """Calls a listener with each known address, and with each change inside of a block."""
        self._listeners.append(listener)
        try:
            for address, lease in tuple(self._leases.items()):
                listener(address, lease.labels)
            yield
        finally:
            self._listeners.remove(listener)

    def _notify(self, address: str, labels: Mapping[str, str] | None) -> None:
        for listener in self._listeners:
            listener(address, labels)


def _check_address(address: str) -> None:
    if len(address) > _MAX_ADDRESS_CHARS or split_host_port(address) is None:
        raise InvalidArgumentError.for_field("address", address, "host:port")
