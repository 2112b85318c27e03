"""`register:///?label=value`: workers that announced themselves to this process.

A worker states its model and its role as labels, beside those of its flag `--label`. A target
takes the workers that have all of its labels. It asks for the model and the role of the tier in
whose list it stands, unless it states others itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote_plus

from typing_extensions import override

from baton.common.errors import ConfigurationError, InvalidArgumentError
from rpc.discovery.announcements import Announcements, check_labels
from rpc.discovery.source import Scope, Source

__all__ = ["MODEL_LABEL", "ROLE_LABEL", "AnnouncedTarget"]

MODEL_LABEL = "model"
ROLE_LABEL = "role"
_BOTH_ROLES = "both"


@dataclass(frozen=True, slots=True)
class AnnouncedTarget:
    """Workers that announced themselves with some labels.

    Attributes:
        labels: names and values, which all of the workers have.
    """

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "AnnouncedTarget":
        """Parses nothing, or `?label=value&label=value` with percent-encoded parts.

        Raises:
            ConfigurationError: it is neither, or states a label twice.
        """
        query = text.removeprefix("?")
        try:
            labels = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
            check_labels(dict(labels))
        except (ValueError, InvalidArgumentError) as error:
            raise ConfigurationError(f"bad labels {query!r}: {error}") from None
        if (text and text == query) or len(dict(labels)) != len(labels):
            raise ConfigurationError(f"{text!r} is not ?label=value&label=value")
        return cls(tuple(labels))

    def __str__(self) -> str:
        query = "&".join(f"{quote_plus(name)}={quote_plus(value)}" for name, value in self.labels)
        return "register:///" + (query and f"?{query}")

    def open(self, scope: Scope) -> Source:
        """Makes the source of the workers.

        Raises:
            ConfigurationError: no worker can announce itself to this process.
        """
        if scope.announcements is None:
            raise ConfigurationError(
                f"target {str(self)!r}: workers announce themselves to the gRPC port of a router"
            )
        return _AnnouncedSource(scope.announcements, {**scope.labels, **dict(self.labels)})


class _AnnouncedSource(Source):
    """The announced workers with some labels."""

    def __init__(self, announcements: Announcements, labels: Mapping[str, str]) -> None:
        self._announcements = announcements
        self._wanted = labels
        self._addresses: set[str] = set()

    @property
    @override
    def addresses(self) -> frozenset[str]:
        return frozenset(self._addresses)

    @override
    async def follow(self, on_change: Callable[[], None]) -> None:
        def note(address: str, labels: Mapping[str, str] | None) -> None:
            is_wanted = labels is not None and self._is_wanted(labels)
            if is_wanted != (address in self._addresses):
                (self._addresses.add if is_wanted else self._addresses.discard)(address)
                on_change()

        with self._announcements.watching(note):
            await asyncio.Event().wait()

    def _is_wanted(self, labels: Mapping[str, str]) -> bool:
        """Whether labels have the wanted values; a worker of both roles has each of them."""
        return all(
            value == labels.get(name) or (name == ROLE_LABEL and labels.get(name) == _BOTH_ROLES)
            for name, value in self._wanted.items()
        )
