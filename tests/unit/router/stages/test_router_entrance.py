"""`Entrance`: new requests are prepared a few in each round of the event loop."""

import asyncio

import pytest

from baton.common.errors import DeadlineExceededError, ResourceExhaustedError
from router.stages.entrance import Entrance

MAX_PER_ROUND = 4


async def test_a_burst_is_let_in_a_few_a_round_in_its_order():
    entrance, entered, rounds = Entrance(), [], []

    async def enter(number: int) -> None:
        await entrance.turn(30, 1000)
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(50)]
    while not all(task.done() for task in tasks):
        before = len(entered)
        await asyncio.sleep(0)
        rounds.append(len(entered) - before)
    assert entered == list(range(50))
    assert max(rounds) <= MAX_PER_ROUND
    assert len(rounds) <= 50 / MAX_PER_ROUND + 5
    assert len(entrance) == 0


async def test_a_request_that_comes_alone_does_not_wait():
    entrance = Entrance()
    for _ in range(3):
        await asyncio.wait_for(entrance.turn(30, 0), 20)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def fill(entrance: Entrance) -> None:
    """Takes all turns of this round."""
    for _ in range(MAX_PER_ROUND):
        await entrance.turn(30, 0)


async def test_a_request_that_leaves_or_whose_time_is_over_takes_no_turn():
    entrance = Entrance()
    await fill(entrance)
    left = asyncio.ensure_future(entrance.turn(30, 2))
    late = asyncio.ensure_future(entrance.turn(0, 2))
    left.cancel()
    results = await asyncio.gather(left, late, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is None or isinstance(results[1], DeadlineExceededError)
    assert len(entrance) == 0


async def test_too_many_are_refused():
    entrance = Entrance()
    await fill(entrance)
    with pytest.raises(ResourceExhaustedError):
        await entrance.turn(30, 0)
