"""`Places`: bounds the calls that are open at the same time, each kind of them apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from baton.common.errors import Reason, ResourceExhaustedError
from rpc.call import Call

__all__ = ["CallPlaces", "Places"]

_HEALTH = "/grpc.health.v1.Health/"
_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection."
_MAX_HEALTH_CALLS = 1000
_MAX_REFLECTION_STREAMS = 100
_RETRY_AFTER_S = 1.0


class Places:
    """Bounds the calls at the same time.

    If all places are taken, a new call gets that of the oldest one whose request has not come: such
    calls are many only if no client means to send one.

    Args:
        most: how many; None for no limit.
        name: of these calls, for errors.

    Attributes:
        num_taken: how many calls are open.
    """

    def __init__(self, most: int | None, name: str) -> None:
        self.num_taken = 0
        self._most = most
        self._name = name
        self._silent: dict[Call, None] = {}

    @contextmanager
    def taken_by(self, call: Call) -> Iterator[None]:
        """Gives a call a place.

        Raises:
            ResourceExhaustedError: there is none.
        """
        if self._most is not None and self.num_taken >= self._most:
            self._make_room()
        self.num_taken += 1
        self._silent[call] = None
        call.on_request = partial(self._silent.pop, call, None)
        try:
            yield
        finally:
            self._silent.pop(call, None)
            self.num_taken -= 1

    def _make_room(self) -> None:
        error = ResourceExhaustedError(
            f"this server answers {self._most} {self._name} at the same time; try again later",
            _RETRY_AFTER_S,
            reason=Reason.CALLS_FULL,
        )
        oldest = next(iter(self._silent), None)
        if oldest is None:
            raise error
        del self._silent[oldest]
        oldest.end(error)


class CallPlaces:
    """The places of a server's calls.

    Health is open to all, and calls without an end may be open for as long as their connection:
    neither takes the places of the other calls, nor does one of them take those of the other.

    Args:
        most_calls: the most calls of all other methods; None for no limit.
        most_watches: the most streams of the health service. A connection with client-side health
            checks has one of them.

    Attributes:
        calls: the places of all other methods.
    """

    def __init__(self, most_calls: int | None, most_watches: int | None) -> None:
        self.calls = Places(most_calls, "calls")
        self._by_prefix = (
            (_HEALTH_WATCH, Places(most_watches, "health watches")),
            (_HEALTH, Places(_MAX_HEALTH_CALLS, "health checks")),
            (_REFLECTION, Places(_MAX_REFLECTION_STREAMS, "reflection streams")),
        )

    def of_method(self, method: str) -> Places:
        """The places of a method, by its full name."""
        for prefix, places in self._by_prefix:
            if method.startswith(prefix):
                return places
        return self.calls
