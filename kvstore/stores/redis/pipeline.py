"""Pipelines of Redis commands, with a bounded number of bytes under way.

Commands are repeated only if a cluster redirects them. If one server fails, the
connections to all servers of the pipeline are closed, because their replies were
not read to the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import ConnectionPool, ReadOnlyError, RedisError
from redis.exceptions import AskError, MovedError

from kvstore.store import KvObject
from kvstore.stores.redis.connection import Argument, pack
from kvstore.stores.redis.reply import Reply
from kvstore.stores.redis.servers import RedisServers, borrowed

__all__ = ["Command", "run_commands"]

_MAX_BATCH_BYTES = 8 << 20
_MAX_BATCH_COMMANDS = 1024
_MAX_REDIRECTIONS = 3


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: the key that selects the server.
        arguments: the command's own name first. Objects are sent from where they lie.
        into: where a bulk reply goes; see `ReplyReader.read_reply`.
        num_bytes: of objects, in either direction.
        is_asking: whether it follows a redirection to the server that its key is migrating to.
    """

    name: bytes
    arguments: tuple[Argument, ...]
    into: KvObject | None = None
    num_bytes: int = field(init=False)
    is_asking: bool = False

    def __post_init__(self) -> None:
        values = (*self.arguments, self.into)
        num_bytes = sum(value.nbytes for value in values if isinstance(value, KvObject))
        object.__setattr__(self, "num_bytes", num_bytes)


def run_commands(servers: RedisServers, commands: Iterable[Command]) -> list[Reply]:
    """Runs commands; returns their replies in order. An error of a command is a reply.

    Raises:
        redis.RedisError, OSError: a server did not answer, or cannot serve.
    """
    replies: list[Reply] = []
    for batch in _batches(commands):
        try:
            replies += _run_batch(servers, batch)
        except (RedisError, OSError):
            servers.forget()
            raise
    return replies


def _batches(commands: Iterable[Command]) -> Iterator[list[Command]]:
    batch: list[Command] = []
    num_bytes = 0
    for command in commands:
        is_full = len(batch) == _MAX_BATCH_COMMANDS
        if batch and (is_full or num_bytes + command.num_bytes > _MAX_BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(command)
        num_bytes += command.num_bytes
    if batch:
        yield batch


def _run_batch(servers: RedisServers, batch: Sequence[Command]) -> list[Reply]:
    replies = _exchange(batch, servers.pools_of(command.name for command in batch))
    for _ in range(_MAX_REDIRECTIONS):
        sent_on = {
            index: reply for index, reply in enumerate(replies) if isinstance(reply, AskError)
        }
        if not sent_on:
            break
        again = [
            replace(batch[index], is_asking=not isinstance(error, MovedError))
            for index, error in sent_on.items()
        ]
        pools = [servers.redirected(error) for error in sent_on.values()]
        for index, reply in zip(sent_on, _exchange(again, pools), strict=True):
            replies[index] = reply
    return replies


def _exchange(commands: Sequence[Command], pools: Sequence[ConnectionPool]) -> list[Reply]:
    """Sends all servers their commands and then reads, so that the servers work in parallel."""
    shares: dict[ConnectionPool, list[int]] = {}
    for index, pool in enumerate(pools):
        shares.setdefault(pool, []).append(index)
    replies: list[Reply] = [None] * len(commands)
    with ExitStack() as opened:
        connections = [opened.enter_context(borrowed(pool)) for pool in shares]
        for connection, indices in zip(connections, shares.values(), strict=True):
            _send(connection, [commands[index] for index in indices])
        for connection, indices in zip(connections, shares.values(), strict=True):
            for index in indices:
                replies[index] = _read(connection, commands[index])
    return replies


def _send(connection: Any, commands: Iterable[Command]) -> None:
    arguments: list[tuple[Argument, ...]] = []
    for command in commands:
        if command.is_asking:
            arguments.append(("ASKING",))
        arguments.append(command.arguments)
    connection.send(pack(arguments))


def _read(connection: Any, command: Command) -> Reply:
    if command.is_asking:
        connection.read_reply()
    reply: Reply = connection.read_reply(command.into)
    if isinstance(reply, ReadOnlyError):
        raise RedisConnectionError("the server is a replica now")
    return reply
