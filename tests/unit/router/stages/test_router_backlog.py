"""`Backlog`: which requests are refused since they would not end by their deadline."""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from baton.common.errors import Reason, ResourceExhaustedError
from baton.common.request.slo import Slo
from router.fleet.fair_shares import Share
from router.stages.backlog import Backlog, Place

NUM_TOKENS = 16
STEP_S = 0.01
SECONDS = 12


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_backlog(num_seats: int = 64, num_entering: int = 0) -> tuple[Backlog, Clock]:
    clock = Clock()
    return Backlog(lambda: num_seats, lambda: num_entering, clock), clock


@dataclass(eq=False)
class Job:
    """A request on the simulated cluster; `left` is the share of its work that is not done."""

    place: Place
    ends: ExitStack
    deadline: float
    left: float = 1.0


@dataclass
class Cluster:
    """Requests get seats in their order, and share the rate at which the cluster does its work.

    Attributes:
        rate: requests that it ends in a second, if enough of them run.
        solo_s: how long a request takes that runs alone.
    """

    backlog: Backlog
    clock: Clock
    rate: float
    solo_s: float
    num_seats: int
    queue: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    num_good: int = 0
    num_late: int = 0
    num_refused: int = 0

    def arrive(self, timeout_s: float) -> None:
        try:
            self.backlog.check(0, timeout_s, NUM_TOKENS)
        except ResourceExhaustedError:
            self.num_refused += 1
            return
        ends = ExitStack()
        place = ends.enter_context(self.backlog.place(0))
        self.queue.append(Job(place, ends, self.clock.now + timeout_s))

    def step(self) -> None:
        self.clock.now += STEP_S
        while self.queue and len(self.running) < self.num_seats:
            job = self.queue.pop(0)
            self.backlog.begin(job.place)
            self.running.append(job)
        work = STEP_S * min(1 / self.solo_s, self.rate / max(len(self.running), 1))
        for job in self.running:
            job.left -= work
            job.place.num_tokens = 1 + (NUM_TOKENS - 1) * (1 - max(job.left, 0.0))
        for jobs in (self.queue, self.running):
            for job in list(jobs):
                self._end(jobs, job)

    def _end(self, jobs: list[Job], job: Job) -> None:
        is_late = self.clock.now >= job.deadline
        if is_late or job.left <= 0:
            jobs.remove(job)
            job.ends.close()
            self.num_late += is_late
            self.num_good += not is_late


def run_open_loop(
    *, arrivals_per_s: float, timeout_s: float, rate: float = 80.0, num_seats: int = 64
) -> Cluster:
    """Simulates arrivals at a steady rate, whatever the answers are."""
    backlog, clock = make_backlog(num_seats)
    cluster = Cluster(backlog, clock, rate, solo_s=0.2, num_seats=num_seats)
    num_arrived = 0
    while clock.now < SECONDS:
        while num_arrived < arrivals_per_s * clock.now:
            cluster.arrive(timeout_s)
            num_arrived += 1
        cluster.step()
    return cluster


@pytest.mark.parametrize(
    ("overload", "num_seats"), [(1.5, 16), (1.5, 256), (3, 16), (3, 64), (3, 256), (5, 64)]
)
@pytest.mark.parametrize("timeout_s", [2.0, 4.0, 10.0])
def test_most_of_the_capacity_is_of_use_under_overload(overload, num_seats, timeout_s):
    rate = 80.0
    cluster = run_open_loop(
        arrivals_per_s=overload * rate, timeout_s=timeout_s, rate=rate, num_seats=num_seats
    )
    assert cluster.num_good >= 0.7 * rate * SECONDS
    assert cluster.num_late <= 0.25 * cluster.num_refused


@pytest.mark.parametrize("timeout_s", [1.0, 4.0, 600.0])
def test_nothing_is_refused_below_the_capacity(timeout_s):
    cluster = run_open_loop(arrivals_per_s=60, timeout_s=timeout_s)
    assert (cluster.num_refused, cluster.num_late) == (0, 0)


def test_requests_with_time_enough_are_not_refused_under_overload():
    cluster = run_open_loop(arrivals_per_s=120, timeout_s=600)
    assert cluster.num_refused == 0


def test_nothing_is_refused_while_nothing_is_known():
    backlog, _ = make_backlog()
    with ExitStack() as ends:
        for _ in range(1000):
            backlog.check(0, 0.1)
            ends.enter_context(backlog.place(0))


def begin_and_end(
    backlog: Backlog, clock: Clock, *, wait_s: float, token_s: float, num_tokens: int
) -> None:
    """Runs one request to its end."""
    with backlog.place(0) as place:
        clock.now += wait_s
        backlog.begin(place)
        clock.now += token_s * (num_tokens - 1)
        place.num_tokens = num_tokens


def test_a_short_request_is_not_judged_by_the_length_of_others():
    backlog, clock = make_backlog()
    for _ in range(3):
        begin_and_end(backlog, clock, wait_s=0.1, token_s=0.05, num_tokens=1000)
    with backlog.place(0):
        backlog.check(0, 4.0, max_tokens=16)
        with pytest.raises(ResourceExhaustedError, match="about 50"):
            backlog.check(0, 4.0, max_tokens=1000)
        with pytest.raises(ResourceExhaustedError, match="deadline"):
            backlog.check(0, 4.0)


def test_long_answers_without_stated_deadlines_are_not_refused_while_they_end_in_time():
    backlog, clock = make_backlog(num_seats=256)
    jobs: deque[tuple[float, Place, ExitStack]] = deque()
    for second in range(0, 1500, 5):
        while jobs and jobs[0][0] <= second:
            clock.now, place, ends = jobs.popleft()
            place.num_tokens = 20_000
            ends.close()
        clock.now = second
        backlog.check(0, 600.0, is_deadline_stated=False)
        ends = ExitStack()
        place = ends.enter_context(backlog.place(0))
        backlog.begin(place)
        jobs.append((second + 400, place, ends))


def test_a_request_without_a_stated_deadline_is_refused_if_it_would_not_end_in_time():
    backlog, clock = make_backlog()
    begin_and_end(backlog, clock, wait_s=0.1, token_s=0.61, num_tokens=1000)
    with backlog.place(0), pytest.raises(ResourceExhaustedError, match="deadline"):
        backlog.check(0, 600.0, is_deadline_stated=False)


def test_a_client_that_reads_slowly_says_nothing_of_the_pace():
    backlog, clock = make_backlog()
    begin_and_end(backlog, clock, wait_s=0.1, token_s=0.01, num_tokens=100)
    with backlog.place(0):
        with backlog.place(0) as place:
            backlog.begin(place)
            clock.now += 300
            place.num_tokens, place.send_wait_s = 100, 299
        begin_and_end(backlog, clock, wait_s=0.1, token_s=0.0, num_tokens=1)
        backlog.check(0, 4.0)


@pytest.mark.parametrize("num_requests", [65, 256, 500])
def test_a_burst_after_a_single_request_finds_its_seats(num_requests):
    backlog, clock = make_backlog(num_seats=256)
    begin_and_end(backlog, clock, wait_s=0.2, token_s=0.02, num_tokens=50)
    with ExitStack() as ends:
        for _ in range(num_requests):
            backlog.check(0, 40.0, max_tokens=50)
            ends.enter_context(backlog.place(0))


def test_the_end_of_a_burst_that_is_too_large_is_refused():
    backlog, clock = make_backlog(num_seats=16)
    begin_and_end(backlog, clock, wait_s=1.0, token_s=0.0, num_tokens=1)
    with ExitStack() as ends:
        for _ in range(72):
            backlog.check(0, 10.0)
            ends.enter_context(backlog.place(0))
        with pytest.raises(ResourceExhaustedError):
            backlog.check(0, 10.0)


def test_a_request_with_none_before_it_is_never_refused():
    backlog, clock = make_backlog()
    begin_and_end(backlog, clock, wait_s=60.0, token_s=1.0, num_tokens=100)
    backlog.check(0, 0.1)


def test_an_estimate_of_which_nothing_new_is_heard_is_forgotten():
    backlog, clock = make_backlog()
    begin_and_end(backlog, clock, wait_s=60.0, token_s=0.0, num_tokens=1)
    with backlog.place(0):
        clock.now += 10
        with pytest.raises(ResourceExhaustedError):
            backlog.check(0, 4.0)
        clock.now += 12
        backlog.check(0, 4.0)


def test_a_request_that_just_ends_in_time_is_not_refused_while_there_is_room():
    backlog, clock = make_backlog()
    begin_and_end(backlog, clock, wait_s=0.5, token_s=0.1, num_tokens=31)
    with backlog.place(0), backlog.place(0):
        backlog.check(0, 5.0, max_tokens=31)
        with pytest.raises(ResourceExhaustedError):
            backlog.check(0, 4.0, max_tokens=31)


def test_urgent_requests_do_not_wait_for_others():
    backlog, clock = make_backlog(num_seats=1)
    with ExitStack() as ends:
        places = [ends.enter_context(backlog.place(0)) for _ in range(100)]
        for place in places[:50]:
            clock.now += 0.1
            backlog.begin(place)
        with pytest.raises(ResourceExhaustedError):
            backlog.check(0, 4.0)
        backlog.check(-1, 4.0)


def test_requests_that_leave_without_having_begun_count_if_they_waited_long():
    backlog, clock = make_backlog()
    with backlog.place(0):
        with backlog.place(0):
            clock.now += 5
        assert backlog.expected_s(0) == pytest.approx(5)
        with backlog.place(0):
            clock.now += 0.1  # the client has left: it says nothing of the others
        assert backlog.expected_s(0) == pytest.approx(5)


def test_the_wait_for_a_new_grammar_says_nothing_of_others():
    backlog, clock = make_backlog()
    with backlog.place(0):
        for wait_s, expected_s in ((30.0, 0.0), (0.2, 0.2)):  # the second finds it compiled
            with backlog.place(0) as place:
                place.grammar = b"key"
                clock.now += wait_s
                backlog.begin(place)
            assert backlog.expected_s(0) == pytest.approx(expected_s)


def test_the_wait_of_a_request_that_no_client_awaits_says_nothing_of_others():
    """One of a batch may wait for hours beside clients; its pace is that of others, too."""
    backlog, clock = make_backlog(num_seats=1)
    with backlog.place(0):
        for begins in (False, True):
            with backlog.place(100, is_awaited=False) as place:
                backlog.start(place)
                clock.now += 7200
                if begins:
                    backlog.begin(place)
                    clock.now += 1.5
                    place.num_tokens = 16
        assert backlog.expected_s(0) == pytest.approx(3.2)
        backlog.check(0, 4.0, slo=Slo(ttft_s=0.1))
        backlog.check_start(4.0, first_left_s=0.1)


def test_requests_that_wait_to_be_prepared_count_too():
    idle, clock = make_backlog(num_seats=1)
    busy, busy_clock = make_backlog(num_seats=1, num_entering=98)
    for backlog, time in ((idle, clock), (busy, busy_clock)):
        begin_and_end(backlog, time, wait_s=1.0, token_s=0.0, num_tokens=1)
    with idle.place(0), busy.place(0):
        assert idle.expected_s(0) == pytest.approx(2)
        assert busy.expected_s(0) == pytest.approx(100)


def test_the_time_of_retry_grows_with_the_wait():
    backlog, clock = make_backlog(num_seats=1)
    begin_and_end(backlog, clock, wait_s=5.0, token_s=0.0, num_tokens=1)
    with backlog.place(0), pytest.raises(ResourceExhaustedError) as caught:
        backlog.check(0, 5.0)
    assert caught.value.retry_after_s == pytest.approx(17.0)


def test_a_request_that_waited_is_not_started_if_it_could_not_even_end_alone():
    backlog, clock = make_backlog()
    backlog.check_start(0.1)
    begin_and_end(backlog, clock, wait_s=0.5, token_s=0.1, num_tokens=16)
    backlog.check_start(2.2, max_tokens=16)
    backlog.check_start(1.2, max_tokens=4)
    with pytest.raises(ResourceExhaustedError, match="about 2"):
        backlog.check_start(2.0, max_tokens=16)


def test_a_request_that_waited_is_not_started_if_its_first_token_would_be_late():
    backlog, clock = make_backlog()
    backlog.check_start(9.0, 16, 0.001)
    with backlog.place(0) as place:
        clock.now += 5.0  # waits for a replica
        backlog.start(place)
        clock.now += 0.3
        backlog.begin(place)
    backlog.check_start(9.0, 16, 0.4)
    with pytest.raises(ResourceExhaustedError, match="x-slo-ttft-ms") as caught:
        backlog.check_start(9.0, 16, 0.2)
    assert caught.value.reason == Reason.SLO_TTFT
    clock.now += 60.0  # nothing was heard for long
    backlog.check_start(9.0, 16, 0.2)
    with pytest.raises(ResourceExhaustedError, match="waited too long"):
        backlog.check_start(9.0, 16, -0.1)


@pytest.mark.parametrize("has_started", [False, True])
def test_requests_that_are_refused_or_leave_do_not_make_starts_look_fast(has_started):
    backlog, clock = make_backlog()
    with backlog.place(0) as place:
        backlog.start(place)
        clock.now += 0.3
        backlog.begin(place)
    for _ in range(10):
        with backlog.place(0) as place:
            clock.now += 0.1  # waits for a replica
            if has_started:
                backlog.start(place)  # and its client leaves at once
    with pytest.raises(ResourceExhaustedError, match=r"about 0\.3"):
        backlog.check_start(9.0, 16, 0.2)


def test_a_tenant_waits_for_its_own_requests_and_for_as_many_turns_of_others():
    backlog, clock = make_backlog(num_seats=1)
    begin_and_end(backlog, clock, wait_s=1.0, token_s=0.0, num_tokens=1)
    flood, other, heavy = Share("flood"), Share("other"), Share("heavy", 4)
    with ExitStack() as ends:
        for _ in range(100):
            ends.enter_context(backlog.place(0, flood))
        assert backlog.expected_s(0, share=flood) == pytest.approx(101)
        assert backlog.expected_s(0, share=other) == pytest.approx(2)
        assert backlog.expected_s(0, share=heavy) == pytest.approx(1.25)
        ends.enter_context(backlog.place(0, other))
        assert backlog.expected_s(0, share=other) == pytest.approx(4)
        with pytest.raises(ResourceExhaustedError):
            backlog.check(0, 20.0, share=flood)
        backlog.check(0, 20.0, share=other)
    assert backlog.expected_s(0, share=flood) == 0


def test_a_tenants_turns_do_not_come_before_more_urgent_requests():
    backlog, clock = make_backlog(num_seats=1)
    begin_and_end(backlog, clock, wait_s=1.0, token_s=0.0, num_tokens=1)
    with ExitStack() as ends:
        for _ in range(50):
            ends.enter_context(backlog.place(-1, Share("flood")))
        assert backlog.expected_s(0, share=Share("other")) == pytest.approx(51)
        assert backlog.expected_s(-1, share=Share("other")) == pytest.approx(2)


def refusal_of(backlog: Backlog, slo: Slo) -> ResourceExhaustedError | None:
    try:
        backlog.check(0, 600.0, is_deadline_stated=False, slo=slo)
    except ResourceExhaustedError as error:
        return error
    return None


def test_a_request_that_would_not_meet_its_objectives_is_refused():
    backlog, clock = make_backlog(num_seats=64)
    assert refusal_of(backlog, Slo(1e-3, 1e-3)) is None
    with backlog.place(0):
        with backlog.place(0) as place:
            clock.now += 0.4
            backlog.note_first_token(place)
            clock.now += 0.2
            backlog.begin(place)
            clock.now += 2.0
            place.num_tokens = 41
        assert refusal_of(backlog, Slo(0.5, 0.06)) is None
        late, slow = refusal_of(backlog, Slo(ttft_s=0.45)), refusal_of(backlog, Slo(tpot_s=0.04))
    assert late is not None
    assert late.reason == Reason.SLO_TTFT
    assert "0.400 s" in late.message
    assert "x-slo-ttft-ms 450" in late.message
    assert slow is not None
    assert slow.reason == Reason.SLO_TPOT
    assert "50.0 ms" in slow.message
    assert slow.retry_after_s is not None


def test_requests_that_wait_do_not_make_the_pace_seem_slower():
    backlog, clock = make_backlog(num_seats=2)
    with backlog.place(0):
        begin_and_end(backlog, clock, wait_s=0.1, token_s=0.05, num_tokens=10)
        with ExitStack() as ends:
            for _ in range(20):
                ends.enter_context(backlog.place(0))
            assert refusal_of(backlog, Slo(tpot_s=0.06)) is None


def test_refused_clients_come_back_one_after_the_other():
    backlog, clock = make_backlog(num_seats=1)
    begin_and_end(backlog, clock, wait_s=1.0, token_s=0.0, num_tokens=1)
    with ExitStack() as ends:
        for _ in range(10):
            ends.enter_context(backlog.place(0))
        times = []
        for _ in range(100):
            with pytest.raises(ResourceExhaustedError) as caught:
                backlog.check(0, 4.0)
            times.append(caught.value.retry_after_s)
    first = times[0]
    assert times[:20] == pytest.approx([first + number for number in range(20)])
    assert max(times) <= 60
    assert min(times) >= first - 1e-6


def test_a_burst_is_not_judged_by_the_pace_of_few_requests():
    """Thousands get seats at once, and tokens at the pace of full replicas, which these report."""
    clock, step_s = Clock(), [0.0]
    backlog = Backlog(lambda: 10_000, clock=clock, full_step_s=lambda: step_s[0])
    for _ in range(4):
        with backlog.place(0) as place:
            clock.now += 0.02
            backlog.begin(place)
            place.num_tokens = 101
            clock.now += 1.0
    with ExitStack() as places:
        for _ in range(5000):
            places.enter_context(backlog.place(0))
        assert backlog.expected_s(0) > 100  # nothing else is known
        step_s[0] = 0.03
        assert 3 < backlog.expected_s(0) < 7
        assert backlog.expected_s(0, max_tokens=1) < 4
        for _ in range(6000):
            places.enter_context(backlog.place(0))
        assert backlog.expected_s(0) > 100  # they wait for seats
