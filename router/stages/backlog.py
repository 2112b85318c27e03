"""`Backlog`: how long new requests of a model take, judged by those before them. Pure.

A request that cannot end by its deadline is refused before it costs anything, so that the work
of the workers is for requests whose clients still wait for them.
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.common.errors import Reason, ResourceExhaustedError

__all__ = ["Backlog", "Place"]

_MEMORY_S = 2.0
"""How long a request counts: its weight falls to 1/e in this time."""
_SAFETY = 1.2
"""Estimates are multiplied by it, and the part of them for which requests wait to begin counts
twice, as it is known least exactly. Without a client's deadline nobody would be late: the plain
estimate counts.
"""
_MIN_TOGETHER = 32
"""As many requests, if there are seats, are taken to run as fast as one. Beyond them, and beyond as
many as there were, their time grows with their number.
"""
_MAX_PATIENCE_S = 10.0
"""For as long, or as long as a request takes, an estimate holds of which nothing new is heard."""
_MIN_RETRY_AFTER_S = 1.0
_MAX_GRAMMARS = 1024


class _FadingMean:
    """The mean of numbers that weigh less the older they are.

    Attributes:
        value: the mean; 0 without numbers.
        updated_at: when the last number came.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.updated_at = 0.0
        self._weight = 0.0

    def add(self, number: float, now: float) -> None:
        self._weight = self._weight * math.exp((self.updated_at - now) / _MEMORY_S) + 1.0
        self.updated_at = now
        self.value += (number - self.value) / self._weight


class Place:
    """One request in a backlog.

    Args:
        num_ahead: how many requests were there before it that are as urgent.
        entered_at: when it came.

    Attributes:
        begun_at: when decode sent its first output; None until then.
        grammar: the key of its structured outputs, empty without any.
        num_tokens: those that it has, of one candidate.
        send_wait_s: how long it waited for its client to take them.
    """

    def __init__(self, num_ahead: int, entered_at: float) -> None:
        self.num_ahead = num_ahead
        self.entered_at = entered_at
        self.begun_at: float | None = None
        self.grammar = b""
        self.num_tokens = 0.0
        self.send_wait_s = 0.0


class Backlog:
    """The requests of one model that run or wait, and the times of those that did so last.

    A request begins when decode sends its first output; later outputs come at a pace that all
    requests share. Both times grow with the number of requests that came before and are as
    urgent, since in a tier under full load each of them takes its share. The first requests with a
    grammar also wait for it to be compiled, which says nothing of others.

    Args:
        num_seats: returns how many requests the replicas run at the same time.
        num_entering: returns how many requests wait to be prepared, and have no place yet.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        num_seats: Callable[[], int],
        num_entering: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_seats = num_seats
        self._num_entering = num_entering
        self._clock = clock
        self._running: Counter[int] = Counter()  # by priority
        self._grammars = OrderedDict.fromkeys([b""])  # with which requests have begun
        self._wait_s = _FadingMean()
        self._ahead = _FadingMean()
        self._token_s = _FadingMean()
        self._num_tokens = _FadingMean()

    @contextmanager
    def place(self, priority: int) -> Iterator[Place]:
        """Counts a request while the context is open.

        Args:
            priority: the request's; the least is the most urgent.
        """
        place = Place(self._num_ahead(priority), self._clock())
        self._running[priority] += 1
        try:
            yield place
        finally:
            self._running[priority] -= 1
            if not self._running[priority]:
                del self._running[priority]
            self._learn_from(place)

    def begin(self, place: Place) -> None:
        """Notes that decode has sent the first output of a request; later calls change nothing."""
        if place.begun_at is None:
            place.begun_at = self._clock()
            self._add_wait(place, place.begun_at)
            self._grammars[place.grammar] = None
            self._grammars.move_to_end(place.grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)

    def expected_s(self, priority: int, max_tokens: int | None = None) -> float:
        """Seconds that a new request will probably take; 0 if nothing is known.

        Args:
            priority: the request's.
            max_tokens: the most tokens that it gets; None if that is not known.
        """
        return self._expected_s(self._num_ahead(priority) + self._num_entering(), max_tokens)

    def check(
        self,
        priority: int,
        left_s: float,
        max_tokens: int | None = None,
        *,
        is_deadline_stated: bool = True,
    ) -> None:
        """Refuses a request that would probably not end by its deadline.

        Args:
            priority: the request's.
            left_s: seconds until its deadline.
            max_tokens: as `expected_s` takes it.
            is_deadline_stated: whether the deadline is the client's and not the router's default.

        Raises:
            ResourceExhaustedError: says how long requests take, and when to try again.
        """
        expected_s = self.expected_s(priority, max_tokens)
        safety = _SAFETY + self._waiting_share() if is_deadline_stated else 1.0
        excess_s = safety * expected_s - left_s
        if excess_s > 0:
            raise ResourceExhaustedError(
                f"requests like this one take about {expected_s:.1f} s now, too long for its "
                f"deadline in {left_s:.1f} s",
                max(excess_s, _MIN_RETRY_AFTER_S),
                reason=Reason.OVERLOADED,
            )

    def check_start(self, left_s: float, max_tokens: int | None = None) -> None:
        """Refuses a request that has waited for a replica, and would not end by its deadline even
        if no other ran beside it.

        Args:
            left_s: seconds until its deadline.
            max_tokens: as `expected_s` takes it.

        Raises:
            ResourceExhaustedError: says how long requests take.
        """
        alone_s = self._alone_s(max_tokens)
        if alone_s > left_s:
            raise ResourceExhaustedError(
                f"the request waited for a replica until {left_s:.1f} s before its deadline; "
                f"it would take about {alone_s:.1f} s",
                _MIN_RETRY_AFTER_S,
                reason=Reason.OVERLOADED,
            )

    def _learn_from(self, place: Place) -> None:
        """Learns from a request that has ended, in whatever way."""
        now = self._clock()
        if place.begun_at is None:
            if now - place.entered_at > self._expected_s(place.num_ahead, 1):
                self._add_wait(place, now)  # it would have waited even longer
        elif place.num_tokens > 1:
            self._num_tokens.add(place.num_tokens, now)
            lasted_s = now - place.begun_at
            if place.send_wait_s <= lasted_s / 2:  # else the pace is that of its client
                self._token_s.add(lasted_s / (place.num_tokens - 1), now)

    def _add_wait(self, place: Place, now: float) -> None:
        if place.grammar not in self._grammars:
            return
        self._wait_s.add(now - place.entered_at, now)
        self._ahead.add(place.num_ahead, now)

    def _num_ahead(self, priority: int) -> int:
        return sum(number for each, number in self._running.items() if each <= priority)

    def _expected_s(self, num_ahead: int, max_tokens: int | None) -> float:
        """The time of a request with so many before it. One that has none before it is always let
        in: it finds out how long requests take now, if the last ones took very long.
        """
        if not num_ahead:
            return 0.0
        usual_s = self._usual_s(max_tokens)
        usual, number = self._ahead.value + 1, num_ahead + 1
        together = max(usual, min(self._num_seats(), _MIN_TOGETHER))
        if number > usual:
            return usual_s * max(1.0, number / together)
        return usual_s * number / usual

    def _alone_s(self, max_tokens: int | None) -> float:
        """The time of a request that shares its replicas with few others."""
        together = min(self._num_seats(), _MIN_TOGETHER)
        return self._usual_s(max_tokens) * min(together / (self._ahead.value + 1), 1.0)

    def _waiting_share(self) -> float:
        """The part of the time of requests in which they have not begun."""
        wait_s = self._wait_s.value
        return wait_s / max(wait_s + self._token_s.value * self._num_tokens.value, 1e-9)

    def _usual_s(self, max_tokens: int | None) -> float:
        """The time of the requests that were heard of last; less and less if that is long ago, as
        nothing is heard any more if all are refused.
        """
        num_tokens = self._num_tokens.value
        if max_tokens is not None:
            num_tokens = min(num_tokens, max_tokens)
        usual_s = self._wait_s.value + self._token_s.value * num_tokens
        heard_at = max(self._wait_s.updated_at, self._token_s.updated_at)
        silence_s = self._clock() - heard_at - _MEMORY_S - min(usual_s, _MAX_PATIENCE_S)
        return usual_s * math.exp(-max(silence_s, 0.0) / _MEMORY_S)
