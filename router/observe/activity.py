"""`Activity`: errors and recent times of a router's requests, for operators.

`router.observe.metrics` has the other counts.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.common.errors import AlreadyExistsError, BatonError, InvalidArgumentError, NotFoundError
from router.observe.request_record import RequestRecord

__all__ = ["MAX_ERRORS", "Activity", "RecentTimes", "RequestError"]

MAX_ERRORS = 20
"""The last errors that are kept."""
_MAX_TIMES = 1000
_WINDOW_S = 60.0
_MAX_MESSAGE_CHARS = 256
_MAX_ID_CHARS = 128
_CLIENTS_MISTAKES = (AlreadyExistsError, InvalidArgumentError, NotFoundError)
"""Errors whose messages may quote a request. Operators can do nothing about them."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """An error that ended a request.

    Attributes:
        time_s: when, in seconds since 1970.
        code: the name of a gRPC status.
        message: what went wrong.
        request_id: the client's name for the request.
    """

    time_s: float
    code: str
    message: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """Times of the requests that ended lately.

    Attributes:
        count: how many requests.
        p50_ms: their median.
        p99_ms: one percent of the times are longer.
    """

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0

    @classmethod
    def of(cls, times_ms: Iterable[float]) -> "RecentTimes":
        """Returns the summary of times, in any order."""
        times = sorted(times_ms)
        if not times:
            return cls()
        return cls(len(times), _quantile(times, 0.5), _quantile(times, 0.99))


class Activity:
    """Keeps the errors of requests, and the times of the last minute.

    Args:
        clock: monotonic seconds.

    Attributes:
        failed: requests that were refused or failed, by status name; refused ones have no record.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed: Counter[str] = Counter()
        self._clock = clock
        self._started_at = clock()
        self._errors: deque[RequestError] = deque(maxlen=MAX_ERRORS)
        self._first_token = _RecentTimes(clock)
        self._token = _RecentTimes(clock)

    @property
    def uptime_s(self) -> float:
        """Seconds since this object was made, which is at the router's start."""
        return self._clock() - self._started_at

    @property
    def errors(self) -> Sequence[RequestError]:
        """The last errors, the latest first, without clients' mistakes."""
        return list(reversed(self._errors))

    @property
    def first_token_ms(self) -> Sequence[float]:
        """Times of the last minute, from arrival to the first token."""
        return self._first_token.recent()

    @property
    def token_ms(self) -> Sequence[float]:
        """Times of the last minute between two tokens, on average over each request."""
        return self._token.recent()

    @contextmanager
    def watching(self, request_id: str) -> Iterator[None]:
        """Counts the error that ends a request within the context, if there is one.

        Args:
            request_id: the client's name for the request.
        """
        try:
            yield
        except Exception as error:
            self._note(request_id, error)
            raise

    def ended(self, record: RequestRecord) -> None:
        """Notes the times of a request that has its end, unless it is one of a batch, which may
        wait for hours. `watching` counts its error.
        """
        if not record.is_awaited:
            return
        if record.first_token_s is not None:
            self._first_token.add(record.first_token_s * 1000)
        if record.token_s is not None:
            self._token.add(record.token_s * 1000)

    def _note(self, request_id: str, error: Exception) -> None:
        code, message = "INTERNAL", type(error).__name__
        if isinstance(error, BatonError):
            code, message = error.code, error.message
        self.failed[code] += 1
        if not isinstance(error, _CLIENTS_MISTAKES):
            found = RequestError(
                time.time(), code, message[:_MAX_MESSAGE_CHARS], request_id[:_MAX_ID_CHARS]
            )
            self._errors.append(found)


class _RecentTimes:
    """Times of the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[tuple[float, float]] = deque(maxlen=_MAX_TIMES)

    def add(self, time_ms: float) -> None:
        self._times.append((self._clock(), time_ms))

    def recent(self) -> Sequence[float]:
        oldest = self._clock() - _WINDOW_S
        return [time_ms for at, time_ms in self._times if at >= oldest]


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]
