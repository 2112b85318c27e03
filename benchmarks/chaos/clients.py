"""`RouterClient`: a client with several connections to a router."""

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc

from baton import AsyncClient
from baton.results import CompletionChunk
from rpc.channels import open_channel

__all__ = ["RouterClient"]


class _Connection(AsyncClient):
    """A client whose connection is no other client's."""

    @staticmethod
    def _open_channel(target: str, *arguments: Any, options: Any = ()) -> grpc.aio.Channel:
        own = ("grpc.use_local_subchannel_pool", 1)
        return open_channel(target, *arguments, options=(*options, own))


class RouterClient:
    """Uses several connections in turn, each of which leads to one of the router's processes.

    Args:
        address: the router's `host:port`.
        num_connections: their number.

    Attributes:
        connections: the clients of the connections.
    """

    def __init__(self, address: str, num_connections: int) -> None:
        self.connections = [_Connection(address) for _ in range(num_connections)]
        self._next = itertools.cycle(self.connections)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "RouterClient":
        for connection in self.connections:
            await self._opened.enter_async_context(connection)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._opened.aclose()

    def stream(self, *arguments: Any, **options: Any) -> AsyncIterator[CompletionChunk]:
        """Streams a request as `AsyncClient.stream` does."""
        return next(self._next).stream(*arguments, **options)
