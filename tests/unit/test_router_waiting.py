"""`WaitingRequests`: who gets what becomes free, and when."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.request_spec import RequestSpec
from baton.sampling_params import SamplingParams
from router.waiting import Turn, WaitingRequests

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
        RequestSpec(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), deadline=1.0)
    )
    assert await waiting.wait(lambda: None, turn, 0) is None
    assert await waiting.wait(seats.find, turn, 0) is True
    assert await waiting.wait(lambda: None, turn, 0.01) is None
    assert len(waiting) == 0
