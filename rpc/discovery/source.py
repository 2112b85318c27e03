"""`Source`: the addresses of one target. `Target`: a parsed target, which makes its source."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from rpc.discovery.announcements import Announcements

__all__ = ["LookedUpSource", "Problems", "Scope", "Source", "Target"]

_LOGGER = logging.getLogger("baton.discovery")


@dataclass(frozen=True, slots=True)
class Scope:
    """The place of a list of targets in its process.

    Attributes:
        announcements: workers that announced themselves; None where none can.
        labels: the labels of the workers that are wanted, unless a target states others.
    """

    announcements: Announcements | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Problems:
    """The reason why a target's addresses are not known, which the log shows once.

    Args:
        target: the target's text.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._last: str | None = None

    def report(self, problem: str) -> None:
        """Logs a problem unless it repeats the last one."""
        if problem != self._last:
            self._last = problem
            _LOGGER.warning("cannot find the addresses of %s: %s", self._target, problem)

    def end(self, num_addresses: int) -> None:
        """Logs the end of the problem, if there was one."""
        if self._last is not None:
            self._last = None
            _LOGGER.info("%s is found again; addresses: %d", self._target, num_addresses)


class Source(ABC):
    """The addresses of one target. Addresses that cannot be found out now keep their last value."""

    @property
    @abstractmethod
    def addresses(self) -> frozenset[str]:
        """Each as `host:port`."""

    def name_of(self, address: str) -> str | None:
        """The DNS name that the certificate of an address has; None for that of the address."""
        return None

    async def follow(self, on_change: Callable[[], None]) -> None:  # noqa: B027 - not for all kinds
        """Keeps the addresses current until it is cancelled. Returns at once for a source that
        is not informed of changes.

        Args:
            on_change: called after each change.
        """


class LookedUpSource(Source):
    """A source that has to be asked again and again.

    Args:
        target: the target's text.
    """

    def __init__(self, target: str) -> None:
        self._addresses: frozenset[str] = frozenset()
        self.problems = Problems(target)

    @property
    @override
    def addresses(self) -> frozenset[str]:
        return self._addresses

    @abstractmethod
    def look_up(self) -> frozenset[str]:
        """Finds out the addresses. Blocks, possibly for ever.

        Raises:
            OSError: they cannot be read.
            ValueError: they are malformed.
            ConfigurationError: they are malformed.
        """

    def note(self, addresses: frozenset[str]) -> None:
        """Takes over the addresses of the last look-up."""
        self._addresses = addresses
        self.problems.end(len(addresses))


class Target(Protocol):
    """A parsed target."""

    def open(self, scope: Scope) -> Source:
        """Makes the target's source.

        Raises:
            ConfigurationError: the target does not work in this scope or on this machine.
        """
