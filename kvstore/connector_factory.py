"""What a connector of its own is made from, and what it can do.

A third party names such an object in its package's metadata:

    [project.entry-points."baton.kv_connectors"]
    myscheme = "my_package.my_module:MyConnector"

A store needs none: see `kvstore.registry`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstore.connector import KvConnectorScheduler, KvConnectorWorker

__all__ = ["Connector", "ConnectorCapabilities", "ConnectorFactory"]

Connector = tuple[KvConnectorScheduler, KvConnectorWorker]
"""Both halves."""


@dataclass(frozen=True, slots=True)
class ConnectorCapabilities:
    """What a connector can do, declared and not guessed.

    Attributes:
        shared_between_processes: what one process of a host saves, others that
            open the same URL can load.
        shared_between_hosts: so can processes of other hosts.
        finds_by_key: look-ups find what others saved; else only a handoff leads to blocks.
        keeps_leases: what a handoff names stays until its lease ends; else it may be evicted.
        lends_blocks: what is saved stays in the engine's pool until its lease ends.
    """

    shared_between_processes: bool
    shared_between_hosts: bool
    finds_by_key: bool = True
    keeps_leases: bool = False
    lends_blocks: bool = False


@runtime_checkable
class ConnectorFactory(Protocol):
    """Opens a connector. A class with a class method `open` is one, and so is a module."""

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """What its connectors can do. A plain attribute will do."""

    def open(self, url: str) -> Connector:
        """Opens both halves. That others are not there yet is no reason to fail.

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """
