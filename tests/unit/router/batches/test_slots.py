"""Places of batches' requests: their number, their bytes, their order, who leaves and who rests."""

import asyncio

import pytest

from router.batches.slots import BatchSlots, Slots, num_places


@pytest.mark.parametrize(
    ("num_seats", "quiet_s", "expected"),
    [
        *((64, float("inf"), 32), (64, 60.0, 32), (64, 59.9, 2), (1, 0.0, 1), (0, 99.0, 1)),
        *((10_000, 99.0, 128), (10_000, 0.0, 128), (1000, 0.0, 31)),
    ],
)
def test_batches_have_few_places_beside_clients_who_wait(num_seats, quiet_s, expected):
    assert num_places(num_seats, quiet_s) == expected


async def started(slots: Slots, *sizes: int) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.create_task(slots.take(size)) for size in sizes]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def done(tasks) -> list[bool]:
    return [task.done() for task in tasks]


async def test_the_limit_may_grow_and_the_order_is_that_of_arrival():
    limit = 1
    slots = Slots(lambda: limit, 100)
    tasks = await started(slots, 1, 1, 1, 1)
    assert done(tasks) == [True, False, False, False]
    limit = 2
    slots.grant()
    await asyncio.sleep(0)
    assert done(tasks) == [True, True, False, False]
    slots.release(1)
    await asyncio.sleep(0)
    assert done(tasks) == [True, True, True, False]
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_request_runs_alone():
    slots = Slots(lambda: 9, 10)
    tasks = await started(slots, 5, 100, 5)
    assert done(tasks) == [True, False, False]
    slots.release(5)
    await asyncio.sleep(0)
    assert done(tasks) == [True, True, False]
    slots.release(100)
    await asyncio.sleep(0)
    assert done(tasks) == [True, True, True]


async def test_who_leaves_gives_the_place_back():
    slots = Slots(lambda: 1, 10)
    tasks = await started(slots, 1, 1, 1)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    slots.release(1)  # the third gets the place, and is cancelled before it sees that
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    assert tasks[2].cancelled()
    assert slots.num_taken == 0
    await slots.take(1)
    assert slots.num_taken == 1


async def test_who_rests_leaves_the_place_to_others():
    slots = Slots(lambda: 1, 10)
    await slots.take(5)
    (other,) = await started(slots, 5)
    resting = asyncio.create_task(slots.rest(0))
    await asyncio.gather(other)
    assert not resting.done()
    slots.release(5)
    await asyncio.gather(resting)
    assert slots.num_taken == 1


async def test_who_is_cancelled_at_rest_has_a_place_to_give_back():
    slots = Slots(lambda: 1, 10)
    for duration_s, num_others in ((60, 0), (0, 1)):
        await slots.take(1)
        others = await started(slots, *[1] * num_others)
        resting = asyncio.create_task(slots.rest(duration_s))
        for _ in range(3):
            await asyncio.sleep(0)  # it sleeps, or waits for the place that another one has got
        assert done(others) == [True] * num_others
        resting.cancel()
        await asyncio.gather(resting, return_exceptions=True)
        assert resting.cancelled()
        slots.release(1)
        for _ in others:
            slots.release(1)
        assert slots.num_taken == 0


async def test_a_batch_of_which_several_rest_takes_no_further_places():
    slots = BatchSlots(Slots(lambda: 9, 100))
    for _ in range(4):
        await slots.take(1)
    resting = [asyncio.create_task(slots.rest(60)) for _ in range(4)]
    await asyncio.sleep(0)
    further = asyncio.create_task(slots.take(1))
    await asyncio.sleep(0)
    assert not further.done()
    resting[0].cancel()
    await asyncio.gather(further)
    for task in resting:
        task.cancel()
    await asyncio.gather(*resting, return_exceptions=True)
