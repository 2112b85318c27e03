"""`Hedging`: the first answer of two calls wins, and few calls are hedged at a time."""

import asyncio

import pytest

from baton.common.errors import InvalidArgumentError, UnavailableError
from router.stages.hedging import Hedging

AFTER_S = 0.001


class FakeCall:
    """A call that answers, or fails, when the test says so."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.Future()
        self.has_begun = asyncio.Event()
        self.is_cancelled = False
        self.num_withdrawn = 0

    async def answer(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.shield(self.ended)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise

    async def withdraw(self) -> None:
        self.num_withdrawn += 1


class Scene:
    """A call that is slow, and its hedge."""

    def __init__(self, hedging: Hedging | None = None) -> None:
        self.hedging = hedging or Hedging(AFTER_S)
        self.first, self.second = FakeCall(), FakeCall()
        self.num_asked = 0
        self.task = asyncio.create_task(self.hedging.first(self.first, self.start))

    def start(self) -> FakeCall:
        self.num_asked += 1
        return self.second


async def turns_of_the_loop() -> None:
    """Lets all tasks go on that wait for nothing outside of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def hedged_scene(hedging: Hedging | None = None) -> Scene:
    scene = Scene(hedging)
    async with asyncio.timeout(10):
        await scene.second.has_begun.wait()
    return scene


@pytest.mark.parametrize("after_s", [None, 60])
async def test_a_call_that_answers_in_time_is_not_hedged(after_s):
    scene = Scene(Hedging(after_s))
    await scene.first.has_begun.wait()
    scene.first.ended.set_result(None)
    assert await scene.task is scene.first
    assert scene.num_asked == scene.first.num_withdrawn == 0


@pytest.mark.parametrize("winner_is_hedge", [True, False])
async def test_the_first_answer_wins_and_the_other_call_is_withdrawn(winner_is_hedge):
    scene = await hedged_scene()
    winner, loser = scene.first, scene.second
    if winner_is_hedge:
        winner, loser = loser, winner
    winner.ended.set_result(None)
    assert await scene.task is winner
    await turns_of_the_loop()
    assert (winner.is_cancelled, winner.num_withdrawn) == (False, 0)
    assert (loser.is_cancelled, loser.num_withdrawn) == (True, 1)
    assert scene.num_asked == 1


async def test_of_two_answers_at_the_same_time_the_first_calls_is_used():
    scene = await hedged_scene()
    scene.second.ended.set_result(None)
    scene.first.ended.set_result(None)
    assert await scene.task is scene.first
    await turns_of_the_loop()
    assert scene.second.num_withdrawn == 1


@pytest.mark.parametrize("failing_is_hedge", [True, False])
async def test_a_failure_ends_nothing_while_the_other_call_runs(failing_is_hedge):
    scene = await hedged_scene()
    failing, other = scene.first, scene.second
    if failing_is_hedge:
        failing, other = other, failing
    failing.ended.set_exception(UnavailableError("stops"))
    await turns_of_the_loop()
    other.ended.set_result(None)
    assert await scene.task is other
    assert failing.num_withdrawn == 0


async def test_the_last_error_is_raised_if_all_calls_fail():
    scene = await hedged_scene()
    scene.second.ended.set_exception(UnavailableError("stops"))
    await turns_of_the_loop()
    scene.first.ended.set_exception(InvalidArgumentError("is bad"))
    with pytest.raises(InvalidArgumentError):
        await scene.task


async def test_a_call_that_fails_alone_is_not_hedged():
    scene = Scene(Hedging(60))
    scene.first.ended.set_exception(UnavailableError("stops"))
    with pytest.raises(UnavailableError):
        await scene.task
    assert scene.num_asked == 0


async def test_both_calls_are_withdrawn_if_their_caller_is_cancelled():
    scene = await hedged_scene()
    scene.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scene.task
    await turns_of_the_loop()
    for call in (scene.first, scene.second):
        assert (call.is_cancelled, call.num_withdrawn) == (True, 1)


async def test_a_hedge_is_asked_for_again_until_there_is_one():
    asked = asyncio.Event()
    calls = []

    def start():
        calls.append(None)
        if len(calls) == 3:
            asked.set()

    first = FakeCall()
    task = asyncio.create_task(Hedging(AFTER_S).first(first, start))
    async with asyncio.timeout(10):
        await asked.wait()
    first.ended.set_result(None)
    assert await task is first


@pytest.mark.parametrize(("num_running", "num_hedged"), [(2, 1), (39, 1), (40, 2)])
async def test_a_twentieth_of_the_calls_is_hedged_at_a_time_and_at_least_one(
    num_running, num_hedged
):
    hedging = Hedging(AFTER_S)
    scenes = [Scene(hedging) for _ in range(num_running)]

    def hedged():
        return [scene for scene in scenes if scene.num_asked]

    async def check_hedged(number):
        async with asyncio.timeout(10):
            while len(hedged()) < number:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(AFTER_S)
        await asyncio.sleep(20 * AFTER_S)  # every call has been due several times
        assert len(hedged()) == number

    await check_hedged(num_hedged)
    begun = hedged()
    begun[0].first.ended.set_result(None)
    await begun[0].task
    await check_hedged(num_hedged + (num_running != 40))
    for scene in scenes:
        scene.task.cancel()
    await asyncio.gather(*(scene.task for scene in scenes), return_exceptions=True)
    alone = await hedged_scene(hedging)  # nothing is counted any more
    alone.second.ended.set_result(None)
    await alone.task
