"""What a load generator needs of an endpoint."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.request import BenchRequest

__all__ = ["EndpointDescription", "LostRequestError", "Target"]


class LostRequestError(Exception):
    """A request failed, or its stream broke off; the text says why, in a line."""


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """What an endpoint serves.

    Attributes:
        model: the name that requests give.
        vocab_size: token ids are below it; None where the endpoint does not tell.
    """

    model: str
    vocab_size: int | None


class Target(Protocol):
    """An endpoint. Made and used in one event loop."""

    async def describe(self) -> EndpointDescription:
        """Asks what is served.

        Raises:
            BatonError: nobody answers, or not so.
        """

    def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        """Generates greedily past the end of sequence, and yields for each message how many
        tokens it brings. Closing the generator cancels the request.

        Raises:
            LostRequestError: the request failed, or the stream ended before its end.
        """

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
