"""`Admission` bounds the running requests, `Entrance` those prepared in one round of the loop."""

import asyncio
import itertools
from contextlib import ExitStack

import pytest

from baton.common.errors import AlreadyExistsError, DeadlineExceededError, ResourceExhaustedError
from router.stages.admission import MAX_WAITING, Admission, Entrance

MAX_PER_ROUND = 4


async def test_excess_requests_and_duplicate_ids_are_refused():
    admission = Admission(2)
    with admission.admit("a"):
        with pytest.raises(AlreadyExistsError, match="request_id"), admission.admit("a"):
            pass
        with (
            admission.admit("b"),
            pytest.raises(ResourceExhaustedError, match="2 requests"),
            admission.admit("c"),
        ):
            pass
        with admission.admit("b"):
            pass
    with admission.admit("a"):
        pass


async def test_without_a_limit_as_many_are_admitted_as_replicas_run_and_some_that_wait():
    admission = Admission()
    assert admission.max_requests == MAX_WAITING
    admission.read_num_seats = lambda: 128
    assert admission.max_requests == MAX_WAITING + 128
    assert Admission(7).max_requests == 7


def admit_all(admission: Admission, ends: ExitStack, client: str, weight: int = 1) -> int:
    """Admits requests of a client until one is refused; returns their number."""
    for number in itertools.count():
        try:
            ends.enter_context(admission.admit(f"{client}{number}", client, weight))
        except ResourceExhaustedError:
            return number
    raise AssertionError


def test_a_client_cannot_take_all_places_from_others():
    admission = Admission(1000)
    with ExitStack() as ends:
        assert admit_all(admission, ends, "flood") == 800
        assert admit_all(admission, ends, "late") == 160
        assert admit_all(admission, ends, "heavy", 5) >= 35
        with admission.admit("a", "yet another"):
            pass
    assert admission.num_running == 0
    assert not admission._by_client


def test_without_names_of_clients_all_places_can_be_taken():
    admission = Admission(100)
    with ExitStack() as ends:
        assert admit_all(admission, ends, "") == 100


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
