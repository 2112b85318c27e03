"""`RedisDiagnosis`: servers, room and refusals of a redis store. `Allowance`: what they refuse."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from redis import RedisError
from typing_extensions import override

from kvstore.store import KvObject, StoreDiagnosis, unused_key
from kvstore.stores.redis.messages import is_refusal
from kvstore.stores.redis.objects import MAX_VALUE_BYTES, object_name
from kvstore.stores.redis.pipeline import Command, run_commands
from kvstore.stores.redis.servers import RedisServers, name_of

__all__ = ["Allowance", "RedisDiagnosis"]

_RETRY_S = 10.0
_logger = logging.getLogger("baton.kvstore")
_MAX_DRAWS = 100_000  # a server with few slots is hit seldom


class Allowance:
    """Remembers that servers refuse a kind of command, which is tried again after ten seconds.

    Logs the refusal once, and its end. Any thread may use it.

    Args:
        consequence: what the store does without the commands, for the log.
        clock: returns seconds.

    Attributes:
        refusal: why the commands are refused; empty while they are allowed.
    """

    def __init__(self, consequence: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.refusal = ""
        self._consequence = consequence
        self._clock = clock
        self._again_at = 0.0

    def __bool__(self) -> bool:
        """Returns whether to try the commands."""
        return not self.refusal or self._clock() >= self._again_at

    @property
    def remark(self) -> str:
        """The refusal and its consequence; empty while the commands are allowed."""
        return f"{self._consequence}: {self.refusal}" if self.refusal else ""

    def refuse(self, reason: str) -> None:
        """Notes a refusal."""
        self._again_at = self._clock() + _RETRY_S
        was_allowed, self.refusal = not self.refusal, reason
        if was_allowed:
            _logger.warning("redis: %s", self.remark)

    def allow(self) -> None:
        """Notes that the commands were taken."""
        if self.refusal:
            _logger.info("redis: no longer: %s", self._consequence)
            self.refusal = ""


class RedisDiagnosis(StoreDiagnosis):
    """Asks the servers of a store.

    Args:
        servers: the store's.
        call: makes the context of one call, which bounds its time.
        allowances: what the store does without where it is refused.
    """

    def __init__(
        self,
        servers: RedisServers,
        call: Callable[[], AbstractContextManager[None]],
        allowances: Sequence[Allowance],
    ) -> None:
        self._servers = servers
        self._call = call
        self._allowances = allowances

    @override
    def new_keys(self) -> Mapping[str, bytes]:
        with self._call():
            left = set(self._servers.primaries())
            keys: dict[str, bytes] = {}
            for _ in range(_MAX_DRAWS):
                if not left:
                    break
                key = unused_key()
                (pool,) = self._servers.pools_of([object_name(key)])
                if pool in left:
                    left.discard(pool)
                    keys[name_of(pool)] = key
            return keys

    @override
    def has_room(self, key: bytes, num_bytes: int) -> bool:
        """Reads INFO. If the server refuses it, nothing is known, and there is none."""
        with self._call():
            (reply,) = run_commands(self._servers, [Command(object_name(key), ("INFO", "memory"))])
            if isinstance(reply, RedisError) and not is_refusal(reply):
                raise reply
        return isinstance(reply, bytes) and _free_bytes(reply.decode()) > num_bytes

    @override
    def rehearse_put(self, key: bytes, num_bytes: int) -> None:
        """Sets a key that is absent if it is there, which stores nothing."""
        name = object_name(key)
        value = KvObject.split(memoryview(bytes(min(num_bytes, MAX_VALUE_BYTES))), 0)
        with self._call():
            (reply,) = run_commands(self._servers, [Command(name, ("SET", name, value, "XX"))])
            if isinstance(reply, RedisError):
                raise reply

    @override
    def remarks(self) -> Sequence[str]:
        return [allowance.remark for allowance in self._allowances if allowance.remark]


def _free_bytes(info: str) -> float:
    """Returns how many bytes a server can take before it evicts, by its INFO."""
    fields = dict(line.split(":", 1) for line in info.split() if ":" in line)
    max_bytes = int(fields.get("maxmemory", 0))
    return max_bytes - int(fields["used_memory"]) if max_bytes else float("inf")
