"""`Backlog`: how long new requests of a model take, judged by those before them. Pure.

A request that cannot end by its deadline is refused before it costs anything, so that the work
of the workers is for requests whose clients still wait for them. The same holds for one that would
not meet its objectives (`Slo`).

Tenants take turns (`router.fleet.fair_shares`), so that a request has fewer others before it if
its tenant has few. That is why a tenant which sends too much is refused, and others are not.
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from baton.common.errors import Reason, ResourceExhaustedError
from baton.common.request.slo import NO_SLO, TPOT_HEADER, TTFT_HEADER, Slo
from router.fleet.fading import FadingMean
from router.fleet.fair_shares import Share
from router.stages.place import Place
from router.stages.waiting_counts import WaitingCounts

__all__ = ["REFUSALS", "Backlog"]

REFUSALS: Mapping[str, str] = {
    Reason.OVERLOADED: "overload",
    Reason.SLO_TTFT: "slo_ttft",
    Reason.SLO_TPOT: "slo_tpot",
}
"""Names of refusals in metrics, by their reasons."""

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
_MAX_RETRY_AFTER_S = 60.0
"""Official clients of OpenAI and Anthropic ignore a longer time, and come back at once."""
_USUAL_TOKENS = 128
"""The tokens of an answer while nothing is known."""
_ANYBODY = Share()
_MAX_GRAMMARS = 1024


class Backlog:
    """The requests of one model that run or wait, and the times of those that did so last.

    A request begins when decode sends its first output; later outputs come at a pace that all
    requests share. Both times grow with the number of requests that came before and are as
    urgent, since in a tier under full load each of them takes its share. The first requests with a
    grammar also wait for it to be compiled, which says nothing of others. Nor does the wait of a
    request that no client awaits, as those of batches: it may last for hours.

    Args:
        num_seats: returns how many requests the replicas run at the same time.
        num_entering: returns how many requests wait to be prepared, and have no place yet.
        clock: seconds, monotonic.
        full_step_s: returns the seconds in which each request gets a token while all seats are
            taken; 0 if that is not known.
    """

    def __init__(
        self,
        num_seats: Callable[[], int],
        num_entering: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
        full_step_s: Callable[[], float] = float,
    ) -> None:
        self._num_seats = num_seats
        self._full_step_s = full_step_s
        self._num_entering = num_entering
        self._clock = clock
        self._begun: Counter[int] = Counter()  # by priority
        self._waiting = WaitingCounts()
        self._grammars = OrderedDict.fromkeys([b""])  # with which requests have begun
        self._first_s = FadingMean(_MEMORY_S)
        self._start_s = FadingMean(_MEMORY_S)  # from the start on a replica to the first token
        self._wait_s = FadingMean(_MEMORY_S)
        self._ahead = FadingMean(_MEMORY_S)
        self._token_s = FadingMean(_MEMORY_S)
        self._num_tokens = FadingMean(_MEMORY_S)
        self._next_return_at = -math.inf

    @contextmanager
    def place(
        self, priority: int, share: Share = _ANYBODY, *, is_awaited: bool = True
    ) -> Iterator[Place]:
        """Counts a request while the context is open.

        Args:
            priority: the request's; the least is the most urgent.
            share: names its tenant.
            is_awaited: whether a client waits for the answer.
        """
        num_ahead = self._num_ahead(priority, share)
        place = Place(num_ahead, self._clock(), priority, share, is_awaited=is_awaited)
        self._waiting.add(priority, share, 1)
        try:
            yield place
        finally:
            if place.begun_at is None:
                self._waiting.add(priority, share, -1)
            else:
                self._begun[priority] -= 1
                if not self._begun[priority]:
                    del self._begun[priority]
            self._learn_from(place)

    def start(self, place: Place) -> None:
        """Notes that a request is started on a replica: `check_start` has let it pass."""
        place.started_at = self._clock()

    def note_first_token(self, place: Place) -> None:
        """Notes that prefill or decode has sent the first token of a request; later calls change
        nothing.
        """
        if not place.has_first_token:
            place.has_first_token = True
            self._add_first(place, self._clock())

    def begin(self, place: Place) -> None:
        """Notes that decode has sent the first output of a request; later calls change nothing."""
        if place.begun_at is None:
            self.note_first_token(place)
            place.begun_at = self._clock()
            self._waiting.add(place.priority, place.share, -1)
            self._begun[place.priority] += 1
            self._add_wait(place, place.begun_at)
            self._grammars[place.grammar] = None
            self._grammars.move_to_end(place.grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)

    def expected_tokens(self, max_tokens: int) -> float:
        """The tokens that a new answer will probably have.

        Args:
            max_tokens: the most tokens that it gets.
        """
        return min(self._num_tokens.value or _USUAL_TOKENS, max_tokens)

    def expected_s(
        self, priority: int, max_tokens: int | None = None, share: Share = _ANYBODY
    ) -> float:
        """Seconds that a new request will probably take; 0 if nothing is known.

        Args:
            priority: the request's.
            max_tokens: the most tokens that it gets; None if that is not known.
            share: names its tenant.
        """
        return self._expected_s(max_tokens, self._num_before(priority, share))

    def check(
        self,
        priority: int,
        left_s: float,
        max_tokens: int | None = None,
        *,
        is_deadline_stated: bool = True,
        share: Share = _ANYBODY,
        slo: Slo = NO_SLO,
    ) -> None:
        """Refuses a request that would probably not end by its deadline, or not meet its
        objectives.

        Args:
            priority: the request's.
            left_s: seconds until its deadline.
            max_tokens: as `expected_s` takes it.
            is_deadline_stated: whether the deadline is the client's and not the router's default.
            share: names its tenant.
            slo: its objectives.

        Raises:
            ResourceExhaustedError: says how long requests take, and when to try again.
        """
        num_before = self._num_before(priority, share)
        expected_s = self._expected_s(max_tokens, num_before)
        safety = _SAFETY + self._waiting_share() if is_deadline_stated else 1.0
        excess_s = safety * expected_s - left_s
        if excess_s > 0:
            raise ResourceExhaustedError(
                f"requests like this one take about {expected_s:.1f} s now, too long for its "
                f"deadline in {left_s:.1f} s",
                self._retry_after_s(excess_s),
                reason=Reason.OVERLOADED,
            )
        if slo.ttft_s is not None:
            self._check_ttft(slo.ttft_s, num_before)
        if slo.tpot_s is not None:
            self._check_tpot(slo.tpot_s, num_before)

    def _check_ttft(self, ttft_s: float, num_before: float) -> None:
        """The time to the first token is known well while there are free seats, and is a wait else,
        as in `check`.
        """
        expected_s = self._scaled(self._faded(self._first_s), num_before)
        safety = _SAFETY + (num_before >= self._num_seats())
        if safety * expected_s > ttft_s:
            raise ResourceExhaustedError(
                f"first tokens take about {expected_s:.3f} s now, too long for {TTFT_HEADER} "
                f"{1000 * ttft_s:g}",
                self._retry_after_s(safety * expected_s - ttft_s),
                reason=Reason.SLO_TTFT,
            )

    def _check_tpot(self, tpot_s: float, num_before: float) -> None:
        """The pace of tokens does not suffer from requests that wait, only from those that run."""
        expected_s = self._faded(self._token_s)
        expected_s *= min((num_before + 1) / (self._ahead.value + 1), 1.0) if num_before else 0.0
        if expected_s > tpot_s:
            raise ResourceExhaustedError(
                f"each token takes about {1000 * expected_s:.1f} ms now, too long for "
                f"{TPOT_HEADER} {1000 * tpot_s:g}",
                self._retry_after_s((1 - tpot_s / expected_s) * self._usual_s(None)),
                reason=Reason.SLO_TPOT,
            )

    def check_start(
        self,
        left_s: float,
        max_tokens: int | None = None,
        first_left_s: float = math.inf,
    ) -> None:
        """Refuses a request that has waited for a replica, and would not end by its deadline even
        if no other ran beside it, or not get its first token as soon as it asks for.

        Args:
            left_s: seconds until its deadline.
            max_tokens: as `expected_s` takes it.
            first_left_s: seconds until it must have its first token.

        Raises:
            ResourceExhaustedError: says how long requests take.
        """
        alone_s = self._alone_s(max_tokens)
        if alone_s > left_s:
            raise ResourceExhaustedError(
                f"the request waited for a replica until {left_s:.1f} s before its deadline; "
                f"it would take about {alone_s:.1f} s",
                self._retry_after_s(0.0),
                reason=Reason.OVERLOADED,
            )
        start_s = self._faded(self._start_s)
        if start_s > first_left_s:
            raise ResourceExhaustedError(
                f"the request waited too long for a replica: {first_left_s:.3f} s are left of "
                f"{TTFT_HEADER}, and its first token would take about {start_s:.3f} s",
                self._retry_after_s(0.0),
                reason=Reason.SLO_TTFT,
            )

    def _retry_after_s(self, excess_s: float) -> float:
        """When a refused request may come back.

        The requests before it leave one after the other. So each refused client gets a moment of
        its own: if all came back when the first has room, all but one would be refused again.
        """
        now = self._clock()
        earliest = now + max(excess_s, _MIN_RETRY_AFTER_S)
        moment = max(earliest, self._next_return_at)
        if moment > now + _MAX_RETRY_AFTER_S:
            moment = min(earliest, now + _MAX_RETRY_AFTER_S)
        self._next_return_at = moment + self._usual_s(None) / (self._ahead.value + 1)
        return moment - now

    def _learn_from(self, place: Place) -> None:
        """Learns from a request that has ended, in whatever way."""
        now = self._clock()
        waited_s = now - place.entered_at
        if not place.has_first_token and self._is_usual(place):
            # Both times would have been even longer.
            if waited_s > self._scaled(self._faded(self._first_s), place.num_ahead):
                self._first_s.add(waited_s, now)
            if place.started_at is not None and now - place.started_at > self._start_s.value:
                self._start_s.add(now - place.started_at, now)
        if place.begun_at is None:
            if waited_s > self._expected_s(1, place.num_ahead):
                self._add_wait(place, now)  # it would have waited even longer
        elif place.num_tokens > 1:
            self._num_tokens.add(place.num_tokens, now)
            lasted_s = now - place.begun_at
            if place.send_wait_s <= lasted_s / 2:  # else the pace is that of its client
                self._token_s.add(lasted_s / (place.num_tokens - 1), now)

    def _is_usual(self, place: Place) -> bool:
        """Whether the wait of a request says something of others."""
        return place.is_awaited and place.grammar in self._grammars

    def _add_first(self, place: Place, now: float) -> None:
        if self._is_usual(place):
            self._first_s.add(now - place.entered_at, now)
            if place.started_at is not None:
                self._start_s.add(now - place.started_at, now)

    def _add_wait(self, place: Place, now: float) -> None:
        if not self._is_usual(place):
            return
        self._wait_s.add(now - place.entered_at, now)
        self._ahead.add(place.num_ahead, now)

    def _num_before(self, priority: int, share: Share) -> float:
        """How many requests a new one has before it, those that have no place yet included."""
        return self._num_ahead(priority, share) + self._num_entering()

    def _num_ahead(self, priority: int, share: Share) -> float:
        begun = sum(number for each, number in self._begun.items() if each <= priority)
        return begun + self._waiting.num_ahead(priority, share)

    def _expected_s(self, max_tokens: int | None, num_ahead: float) -> float:
        """The time of a request with so many before it. While it gets a seat, its tokens come at
        least as fast as those of replicas that are full, however few ran beside the last requests.
        """
        usual_s = self._usual_s(max_tokens)
        expected_s = self._scaled(usual_s, num_ahead)
        if expected_s <= usual_s or num_ahead >= self._num_seats():
            return expected_s
        if not (step_s := self._full_step_s()):
            return expected_s
        full_s = step_s * self._usual_tokens(max_tokens)
        return min(expected_s, max(usual_s, self._scaled(self._wait_s.value, num_ahead) + full_s))

    def _scaled(self, usual_s: float, num_ahead: float) -> float:
        """A time of the usual request, for one with so many before it. One that has none before it
        is always let in: it finds out how long requests take now, if the last ones took very long.
        """
        if not num_ahead:
            return 0.0
        usual, number = self._ahead.value + 1, num_ahead + 1
        if number <= usual:
            return usual_s * number / usual
        together = max(usual, min(self._num_seats(), _MIN_TOGETHER))
        return usual_s * max(1.0, number / together)

    def _alone_s(self, max_tokens: int | None) -> float:
        """The time of a request that shares its replicas with few others."""
        together = min(self._num_seats(), _MIN_TOGETHER)
        return self._usual_s(max_tokens) * min(together / (self._ahead.value + 1), 1.0)

    def _waiting_share(self) -> float:
        """The part of the time of requests in which they have not begun."""
        wait_s = self._wait_s.value
        return wait_s / max(wait_s + self._token_s.value * self._num_tokens.value, 1e-9)

    def _usual_s(self, max_tokens: int | None) -> float:
        """The time of the requests that were heard of last."""
        usual_s = self._wait_s.value + self._token_s.value * self._usual_tokens(max_tokens)
        heard_at = max(self._wait_s.updated_at, self._token_s.updated_at)
        return usual_s * self._freshness(usual_s, heard_at)

    def _usual_tokens(self, max_tokens: int | None) -> float:
        """The tokens of the requests that were heard of last, but no more than a request gets."""
        num_tokens = self._num_tokens.value
        return num_tokens if max_tokens is None else min(num_tokens, max_tokens)

    def _faded(self, mean: FadingMean) -> float:
        """A mean of the requests that were heard of last."""
        return mean.value * self._freshness(mean.value, mean.updated_at)

    def _freshness(self, usual_s: float, heard_at: float) -> float:
        """The weight of what was heard of last: less and less if that is long ago, as nothing is
        heard any more if all are refused.
        """
        silence_s = self._clock() - heard_at - _MEMORY_S - min(usual_s, _MAX_PATIENCE_S)
        return math.exp(-max(silence_s, 0.0) / _MEMORY_S)
