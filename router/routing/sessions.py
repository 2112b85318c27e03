"""`SessionHomes`: which replicas served the last turn of a session. Pure.

A session is a conversation that its client names by a header (`rpc.call_sessions`). Its home is
where its KV most likely is. The index of caches knows the same by the replicas' events; the home
helps before these have come, and keeps a session together where several replicas are as good.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

__all__ = ["SessionHomes", "session_key"]

_KEY_BYTES = 16
# Sessions per model. Beyond that, the one that was silent for longest is forgotten.
_MAX_SESSIONS = 65_536
# By then other prompts have most likely evicted its KV.
_SESSION_TTL_S = 3600.0


def session_key(tenant: str, session: str) -> bytes:
    """Returns what a session is known by: equal names of different clients are different sessions.

    Args:
        tenant: the client's name; empty if clients have none.
        session: the client's name for the session; if it is empty, so is the result.
    """
    if not session:
        return b""
    return blake2b(f"{tenant}\0{session}".encode(), digest_size=_KEY_BYTES).digest()


class SessionHomes:
    """The homes of one model's sessions: a replica per tier.

    Args:
        max_sessions: sessions that are remembered.
        ttl_s: seconds after its last turn in which a session has a home.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_sessions: int = _MAX_SESSIONS,
        ttl_s: float = _SESSION_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._clock = clock
        # Per session and tier: the replica, and when it was noted; the oldest first.
        self._homes: OrderedDict[tuple[bytes, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, session: bytes, tier: str, replica_id: str) -> None:
        """Notes that a replica serves a turn of a session. Does nothing without a session."""
        if not session:
            return
        now = self._clock()
        self._homes[session, tier] = replica_id, now
        self._homes.move_to_end((session, tier))
        while len(self._homes) > self._max_sessions * 2 or self._oldest_is_over(now):
            self._homes.popitem(last=False)

    def home(self, session: bytes, tier: str) -> str:
        """Returns the replica of a tier that served a session's last turn; empty if none did."""
        replica_id, noted_at = self._homes.get((session, tier), ("", 0.0))
        return replica_id if self._clock() - noted_at < self._ttl_s else ""

    def _oldest_is_over(self, now: float) -> bool:
        _, noted_at = next(iter(self._homes.values()))
        return now - noted_at >= self._ttl_s
