"""`WaitingRequests`: who gets what becomes free, and when."""

import asyncio
import contextlib
import time

from hypothesis import given
from hypothesis import strategies as st

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from router.fleet.fair_shares import Share
from router.fleet.waiting import Turn, WaitingRequests
from tests.support.loop_watch import watched_loops

turns = st.builds(Turn, st.booleans(), st.integers(-2, 2), st.sampled_from([1.0, 2.0, 3.0]))


class Seats:
    """Seats that requests find, and reserve when they go on."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.taken: list[int] = []

    def find(self) -> bool | None:
        return True if self.free else None

    async def take(self, waiting: WaitingRequests, name: int, turn: Turn, timeout_s: float) -> None:
        if await waiting.wait(self.find, turn, timeout_s):
            assert self.free, "two requests found one seat"
            self.free -= 1
            self.taken.append(name)


async def settle() -> None:
    """Lets all that can run do so; nothing in these tests waits for I/O."""
    for _ in range(20):
        await asyncio.sleep(0)


@given(st.lists(turns, min_size=1, max_size=8), st.lists(st.integers(1, 3), max_size=6))
def test_requests_go_on_in_the_order_of_their_turns_and_each_seat_is_taken_once(wanted, freed):
    async def run() -> None:
        waiting, seats = WaitingRequests(), Seats()
        tasks = [
            asyncio.create_task(seats.take(waiting, name, turn, 30))
            for name, turn in enumerate(wanted)
        ]
        await settle()
        assert len(waiting) == len(wanted)
        for number in freed:
            seats.free += number
            waiting.offer()
            await settle()
        done = min(sum(freed), len(wanted))
        order = sorted(range(len(wanted)), key=lambda name: (wanted[name], name))
        assert seats.taken == order[:done]
        assert len(waiting) == len(wanted) - done
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(waiting) == 0

    asyncio.run(run())


async def test_a_new_request_does_not_overtake_one_that_waits():
    waiting, seats = WaitingRequests(), Seats()
    first = asyncio.create_task(seats.take(waiting, 0, Turn(True, 0, 1.0), 30))
    await settle()
    seats.free = 1
    second = asyncio.create_task(seats.take(waiting, 1, Turn(True, 0, 2.0), 30))
    await settle()
    assert seats.taken == [0]
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_a_request_that_leaves_lets_the_next_one_look():
    waiting, seats = WaitingRequests(), Seats()
    first = asyncio.create_task(seats.take(waiting, 0, Turn(True, 0, 1.0), 30))
    second = asyncio.create_task(seats.take(waiting, 1, Turn(True, 0, 2.0), 30))
    await settle()
    seats.free = 1
    waiting.offer()
    first.cancel()  # it has found a seat, and does not take it
    await second
    assert seats.taken == [1]
    assert len(waiting) == 0


async def test_a_request_that_cannot_use_a_replica_does_not_block_the_others():
    waiting, seats = WaitingRequests(), Seats()
    wide = asyncio.create_task(waiting.wait(lambda: None, Turn(False, 0, 1.0), 30))
    narrow = asyncio.create_task(seats.take(waiting, 1, Turn(True, 0, 2.0), 30))
    await settle()
    seats.free = 1
    waiting.offer()
    await narrow
    wide.cancel()
    await asyncio.gather(wide, return_exceptions=True)


async def test_waiting_ends_with_the_timeout():
    waiting, seats = WaitingRequests(), Seats(1)
    turn = Turn.of(
        RequestSpec(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), deadline=1.0),
        Share(),
    )
    assert await waiting.wait(lambda: None, turn, 0) is None
    assert await waiting.wait(seats.find, turn, 0) is True
    assert await waiting.wait(lambda: None, turn, 0.01) is None
    assert len(waiting) == 0


class Kinds:
    """Places of several kinds. A request takes a place of any kind that it can use.

    Attributes:
        num_looks: how often requests have looked for a place.
        taken: names of requests, with the kinds of their places, in order.
    """

    def __init__(self) -> None:
        self.free: dict[int, int] = dict.fromkeys(range(3), 0)
        self.num_looks = 0
        self.taken: list[tuple[int, int]] = []

    def find(self, usable: frozenset[int]) -> int | None:
        self.num_looks += 1
        return next((kind for kind in sorted(usable) if self.free[kind]), None)

    def take(self, name: int, kind: int) -> None:
        assert self.free[kind], "two requests found one place"
        self.free[kind] -= 1
        self.taken.append((name, kind))


class SimpleRule:
    """The rule that `WaitingRequests` must keep: all look in the order of their turns."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.waiting: dict[int, tuple[Turn, frozenset[int]]] = {}

    def place(self) -> None:
        for name in sorted(self.waiting, key=lambda name: (self.waiting[name][0], name)):
            kind = self.kinds.find(self.waiting[name][1])
            if kind is not None:
                self.kinds.take(name, kind)
                del self.waiting[name]


class Queue:
    """Requests of several needs that wait in a `WaitingRequests`."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.waiting = WaitingRequests()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def arrive(self, name: int, turn: Turn, usable: frozenset[int], timeout_s: float = 30) -> None:
        self.tasks[name] = asyncio.create_task(self._wait(name, turn, usable, timeout_s))

    async def _wait(self, name: int, turn: Turn, usable: frozenset[int], timeout_s: float) -> None:
        kind = await self.waiting.wait(
            lambda: self.kinds.find(usable), turn, timeout_s, lambda: usable
        )
        if kind is not None:
            self.kinds.take(name, kind)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert len(self.waiting) == 0


usable_kinds = st.frozensets(st.integers(0, 2), min_size=1)
events = st.one_of(
    st.tuples(st.just("arrive"), turns, usable_kinds),
    st.tuples(st.just("free"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("leave"), st.integers(0, 20), st.none()),
    st.tuples(st.just("regroup"), st.none(), st.none()),
)


@given(st.lists(events, max_size=30))
def test_queues_by_need_place_the_same_requests_as_if_all_looked(script):
    async def run() -> None:
        rule, queue = SimpleRule(), Queue()
        for name, (event, first, second) in enumerate(script):
            match event:
                case "arrive":
                    rule.waiting[name] = first, second
                    queue.arrive(name, first, second)
                case "free":
                    rule.kinds.free[first] += second
                    queue.kinds.free[first] += second
                    queue.waiting.offer()
                case "leave" if rule.waiting:
                    leaving = sorted(rule.waiting)[first % len(rule.waiting)]
                    del rule.waiting[leaving]
                    queue.tasks[leaving].cancel()
                case "regroup":
                    queue.waiting.regroup()
            rule.place()
            await settle()
            await settle()
            assert queue.kinds.taken == rule.kinds.taken
            assert len(queue.waiting) == len(rule.waiting)
        await queue.close()

    asyncio.run(run())


@given(st.lists(st.one_of(events, st.just(None)), max_size=40))
def test_no_request_waits_for_what_is_free_however_events_fall_together(script):
    """None in the script lets all tasks run; events between two of them come at once."""

    async def run() -> None:
        queue = Queue()
        needs: dict[int, frozenset[int]] = {}
        for name, event in enumerate([*script, None]):
            match event:
                case None:
                    await settle()
                case ("arrive", turn, usable):
                    needs[name] = usable
                    queue.arrive(name, turn, usable)
                case ("free", kind, number):
                    queue.kinds.free[kind] += number
                    queue.waiting.offer()
                case ("leave", number, _) if queue.tasks:
                    list(queue.tasks.values())[number % len(queue.tasks)].cancel()
                case ("regroup", _, _):
                    queue.waiting.regroup()
        for _ in script:
            await settle()
        still_waiting = [name for name, task in queue.tasks.items() if not task.done()]
        assert len(queue.waiting) == len(still_waiting)
        for name in still_waiting:
            assert queue.kinds.find(needs[name]) is None
        await queue.close()

    asyncio.run(run())


async def until_empty(waiting: WaitingRequests) -> None:
    """Lets tasks run until no request waits."""
    while len(waiting):  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


async def test_the_looks_for_places_grow_with_the_requests_and_not_with_their_square():
    queue, number, needs = Queue(), 4000, [frozenset({kind}) for kind in range(3)]
    for name in range(number):
        queue.arrive(name, Turn(True, 0, float(name)), needs[name % 3])
    await settle()
    assert len(queue.waiting) == number
    for name in range(number):
        queue.kinds.free[name % 3] += 1
        queue.waiting.offer()
        await asyncio.sleep(0)
    await until_empty(queue.waiting)
    assert queue.kinds.num_looks <= 4 * len(needs) * number
    assert sorted(name for name, _ in queue.kinds.taken) == list(range(number))
    await queue.close()


async def test_thousands_of_requests_that_come_wait_and_leave_do_not_block_the_loop():
    queue, number, usable = Queue(), 4000, frozenset({0})
    started = time.thread_time()
    with watched_loops() as watch:
        for batch in range(number // 100):
            for name in range(100 * batch, 100 * (batch + 1)):
                queue.arrive(name, Turn(True, 0, -float(name)), usable)
            await asyncio.sleep(0)
        await settle()
        for name in range(0, number, 2):
            queue.tasks[name].cancel()
            await asyncio.sleep(0)
        queue.kinds.free[0] = number
        queue.waiting.offer()
        await until_empty(queue.waiting)
    watch.assert_never_blocked()
    assert time.thread_time() - started < 5, "thousands of waiting requests are no work"
    odd = range(number - 1, 0, -2)  # the deadlines of later ones are earlier
    assert [name for name, _ in queue.kinds.taken] == list(odd)
    await queue.close()


async def test_requests_whose_time_is_over_are_forgotten_without_a_look():
    waiting, number, num_looks = WaitingRequests(), 1000, 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1

    turn = Turn(True, 0, 1.0)
    found = await asyncio.gather(*(waiting.wait(look, turn, 0.01) for _ in range(number)))
    assert found == [None] * number
    assert len(waiting) == 0
    assert num_looks <= 2


async def test_short_deadlines_overtake_a_request_only_until_it_is_about_to_give_up():
    waiting, seats, clock = WaitingRequests(), Seats(), time.monotonic()
    patient = asyncio.create_task(seats.take(waiting, 0, Turn(True, 0, clock + 600), 30))
    short = asyncio.create_task(seats.take(waiting, 1, Turn(True, 0, clock + 4), 30))
    later = asyncio.create_task(seats.take(waiting, 2, Turn(True, 0, clock + 40), 60))
    await settle()
    for _ in range(3):
        seats.free += 1
        waiting.offer()
        await settle()
    assert seats.taken == [1, 0, 2]
    await asyncio.gather(patient, short, later)


async def test_a_need_that_changes_is_asked_for_again_by_regroup():
    waiting, seats, need = WaitingRequests(), Seats(), ["wide"]
    turn = Turn(True, 0, 1.0)
    never = asyncio.create_task(waiting.wait(lambda: None, turn, 30, lambda: "wide"))
    other = asyncio.create_task(waiting.wait(seats.find, turn, 30, lambda: need[0]))
    await settle()
    seats.free = 1
    waiting.offer()
    await settle()
    assert not other.done()  # it counts as one that needs the same as the first
    need[0] = "narrow"
    waiting.regroup()
    assert await other is True
    never.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await never


async def test_a_policy_that_fails_ends_its_request_and_not_the_others():
    """A routing policy may be of another package."""
    waiting, seats = WaitingRequests(), Seats()
    may_fail = False

    def find() -> bool | None:
        if may_fail:
            raise ZeroDivisionError
        return None

    turn = Turn(True, 0, 1.0)
    failing = asyncio.create_task(waiting.wait(find, turn, 30, lambda: "same"))
    await settle()
    other = asyncio.create_task(waiting.wait(seats.find, turn, 30, lambda: "same"))
    await settle()
    may_fail, seats.free = True, 1
    waiting.offer()
    await settle()
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert other.result() is True
    assert len(waiting) == 0
