"""`Places`: bounds the calls that are open at the same time, each kind of them apart."""

from baton.errors import ResourceExhaustedError
from baton.reasons import Reason

__all__ = ["CallPlaces", "Places"]

_HEALTH = "/grpc.health.v1.Health/"
_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection."
_MAX_HEALTH_CALLS = 1000
_MAX_REFLECTION_STREAMS = 100
_RETRY_AFTER_S = 1.0


class Places:
    """Bounds the calls at the same time.

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

    def __enter__(self) -> None:
        if self.num_taken == self._most:
            raise ResourceExhaustedError(
                f"this server answers {self._most} {self._name} at the same time; try again later",
                _RETRY_AFTER_S,
                reason=Reason.CALLS_FULL,
            )
        self.num_taken += 1

    def __exit__(self, *exc_info: object) -> None:
        self.num_taken -= 1


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
