"""`SessionHomes`: which replicas served the last turn of a session. Pure.

A session is a conversation that its client names by a header (`rpc.call_sessions`). Its home is
where its KV most likely is. The index of caches knows the same by the replicas' events; the home
helps before these have come, and keeps a session together where several replicas are as good.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

__all__ = ["SessionHomes", "session_key"]

_KEY_BYTES = 16
# Sessions per model. Beyond that, the one that was silent for longest is forgotten.
_MAX_SESSIONS = 65_536
# By then other prompts have most likely evicted its KV.
_SESSION_TTL_S = 3600.0
# Sessions that one call drops at most: more than it adds, so that old ones leave, and few enough
# that no call delays others after an hour without requests.
_DROPPED_AT_ONCE = 4


def session_key(tenant: str, session: str) -> bytes:
    """Returns what a session is known by: equal names of different clients are different sessions.

    Args:
        tenant: the client's name; empty if clients have none.
        session: the client's name for the session; if it is empty, so is the result.
    """
    if not session:
        return b""
    return blake2b(f"{tenant}\0{session}".encode(), digest_size=_KEY_BYTES).digest()


@dataclass(slots=True)
class _Home:
    """Replicas by tier, and the clock time of the last turn."""

    replicas: dict[str, str] = field(default_factory=dict)
    noted_at: float = 0.0


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
        self._homes: OrderedDict[bytes, _Home] = OrderedDict()  # the longest silent first

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, session: bytes, tier: str, replica_id: str) -> None:
        """Notes that a replica serves a turn of a session. Does nothing without a session."""
        if not session:
            return
        home = self._homes.setdefault(session, _Home())
        home.replicas[tier] = replica_id
        home.noted_at = self._clock()
        self._homes.move_to_end(session)
        for _ in range(_DROPPED_AT_ONCE):
            if len(self._homes) > self._max_sessions or self._is_over(self._longest_silent):
                self._homes.popitem(last=False)

    def homes(self, session: bytes) -> Mapping[str, str]:
        """Returns the replicas of a session's last turn, by tier; none if it is unknown."""
        home = self._homes.get(session)
        if home is None or self._is_over(home):
            return {}
        return home.replicas

    @property
    def _longest_silent(self) -> _Home:
        return next(iter(self._homes.values()))

    def _is_over(self, home: _Home) -> bool:
        return self._clock() - home.noted_at >= self._ttl_s
