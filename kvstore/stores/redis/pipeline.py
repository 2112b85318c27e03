"""Pipelines of Redis commands, with a bounded number of bytes under way.

Commands are repeated only if a cluster redirects them. If a server fails, its connection is closed,
because its replies were not read to the end; those of the other servers are read.
"""

import select
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from redis import ConnectionError as RedisConnectionError
from redis import ConnectionPool, ReadOnlyError, RedisError
from redis.exceptions import AskError, MovedError

from kvstore.store import KvObject, StoreUnavailableError
from kvstore.stores.redis.connection import Argument, CallDeadline, pack
from kvstore.stores.redis.messages import CLOSED, describe
from kvstore.stores.redis.reply import Reply
from kvstore.stores.redis.servers import RedisServers, borrowed, name_of

__all__ = ["Command", "UnansweredError", "run_commands"]

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


class ServerFailedError(RedisConnectionError):  # type: ignore[misc]  # redis-py is untyped
    """An exchange with a server failed; the text names it."""


class UnansweredError(RedisConnectionError):  # type: ignore[misc]  # as above
    """The reply to a command whose server, one of several, does not answer."""


def run_commands(servers: RedisServers, commands: Iterable[Command]) -> list[Reply]:
    """Runs commands; returns their replies in order. An error of a command is a reply.

    Raises:
        redis.RedisError, OSError: a server did not answer, or cannot serve. Of a cluster, none
            answers; otherwise its replies are `UnansweredError`.
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
    pools = servers.pools_of(command.name for command in batch)
    replies = _exchange(servers, batch, pools)
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
        for index, error in sent_on.items():
            pools[index] = servers.redirected(error, pools[index], batch[index].name)
        new_pools = [pools[index] for index in sent_on]
        for index, reply in zip(sent_on, _exchange(servers, again, new_pools), strict=True):
            replies[index] = reply
    return replies


_Talk: TypeAlias = Generator[Any, None, list[Reply]]
"""Yields its connection once, when its commands are sent; the next step reads the replies."""


def _exchange(
    servers: RedisServers, commands: Sequence[Command], pools: Sequence[ConnectionPool]
) -> list[Reply]:
    """Sends all servers their commands and then reads, so that the servers work in parallel."""
    shares: dict[ConnectionPool, list[int]] = {}
    for index, pool in enumerate(pools):
        shares.setdefault(pool, []).append(index)
    if servers.is_one:
        (pool,) = shares
        talk = _talk(servers, pool, commands)
        next(talk)
        return _finish(talk)
    replies: list[Reply] = [None] * len(commands)
    for pool, answer in _answers(servers, commands, shares):
        for index, reply in zip(shares[pool], answer, strict=True):
            replies[index] = reply
    if any(isinstance(reply, UnansweredError) for reply in replies):
        servers.forget()
    return replies


def _answers(
    servers: RedisServers,
    commands: Sequence[Command],
    shares: dict[ConnectionPool, list[int]],
) -> Iterator[tuple[ConnectionPool, Sequence[Reply]]]:
    """Yields the replies of each of several servers, or an error for each of its commands.

    No server that is silent takes the time of the others: each may take a share of it to connect
    and to receive its commands, and those whose replies arrive are read first.
    """
    deadline, waiting = servers.deadline, dict[Any, tuple[ConnectionPool, _Talk]]()
    for position, (pool, indices) in enumerate(shares.items()):
        talk = _talk(servers, pool, [commands[index] for index in indices])
        try:
            with deadline.within_share(1 / (len(shares) - position + 1)):
                waiting[next(talk)] = pool, talk
        except _FAILURES as error:
            yield pool, _unanswered(error, len(indices))
    # Commands without objects are followed by others, for which time must be left.
    has_objects = any(command.num_bytes for command in commands)
    with deadline.within_share(1 if has_objects else 1 / 2):
        for connection in _in_order_of_arrival(list(waiting), deadline):
            pool, talk = waiting[connection]
            try:
                answer: Sequence[Reply] = _finish(talk)
            except _FAILURES as error:
                answer = _unanswered(error, len(shares[pool]))
            yield pool, answer


_FAILURES = (RedisError, OSError, StoreUnavailableError)


def _unanswered(error: Exception, num_commands: int) -> list[Reply]:
    return [UnansweredError(str(error))] * num_commands


def _talk(servers: RedisServers, pool: ConnectionPool, commands: Sequence[Command]) -> _Talk:
    """Sends commands to a server, yields the connection, and then reads the replies.

    Raises:
        ServerFailedError: the server fails.
        NotAskedError: it did not answer a moment ago.
    """
    server = name_of(pool)
    try:
        with servers.guard(pool), borrowed(pool) as connection:
            server = connection.server
            _send(connection, commands)
            yield connection
            replies = [_read(connection, command, server) for command in commands]
            if any(isinstance(reply, ReadOnlyError) for reply in replies):
                connection.disconnect()  # the next one may lead to another server
            return replies
    except (RedisError, OSError) as error:
        raise ServerFailedError(f"{server}: {describe(error)}") from error


def _finish(talk: _Talk) -> list[Reply]:
    """Makes the last step of a talk; returns the replies."""
    try:
        next(talk)
    except StopIteration as end:
        replies: list[Reply] = end.value
        return replies
    raise AssertionError("a talk has two steps")


def _in_order_of_arrival(connections: list[Any], deadline: CallDeadline) -> Iterator[Any]:
    """Yields the connections whose replies begin to arrive, and last those where time is over."""
    while connections:
        arrived = [connection for connection in connections if connection.can_read()]
        if not arrived:
            arrived = _poll(connections, deadline) or connections
        yield from arrived
        connections = [connection for connection in connections if connection not in arrived]


def _poll(connections: Sequence[Any], deadline: CallDeadline) -> list[Any]:
    """Waits for bytes; returns the connections that have some, or none if the time is over."""
    poller = select.poll()
    by_fd = {connection.socket.fileno(): connection for connection in connections}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    try:
        return [by_fd[fd] for fd, _ in poller.poll(deadline.left_s() * 1000)]
    except TimeoutError:
        return []


def _send(connection: Any, commands: Iterable[Command]) -> None:
    """Sends commands.

    Raises:
        redis.RedisError: the server refuses them while they are sent, and closes the connection.
        OSError: it is gone, or does not take them in time.
    """
    arguments: list[tuple[Argument, ...]] = []
    for command in commands:
        if command.is_asking:
            arguments.append(("ASKING",))
        arguments.append(command.arguments)
    try:
        connection.send(pack(arguments))
    except ConnectionError:
        raise connection.refusal() or RedisConnectionError(CLOSED) from None


def _read(connection: Any, command: Command, server: str) -> Reply:
    if command.is_asking:
        connection.read_reply()
    reply: Reply = connection.read_reply(command.into)
    if isinstance(reply, RedisError):
        reply.add_note(server)
    return reply
