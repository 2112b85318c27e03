"""Deadlines of requests, in the heap and in the scheduler."""

from dataclasses import dataclass

import pytest

from baton.errors import DeadlineExceededError
from engine.schedule.scheduler import Deadlines
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request


@dataclass
class Live:
    arrival: int


def test_the_earliest_is_told_first_and_each_once() -> None:
    deadlines = Deadlines({"a": Live(0), "b": Live(1), "c": Live(2)})
    for deadline, arrival, request_id in ((3.0, 0, "a"), (1.0, 1, "b"), (9.0, 2, "c")):
        deadlines.add(deadline, arrival, request_id)

    assert deadlines.next == 1.0
    assert deadlines.take_passed(3.0) == ["b", "a"]
    assert deadlines.take_passed(3.0) == []
    assert deadlines.next == 9.0


def test_an_ended_request_is_not_told_though_its_id_lives_again() -> None:
    live = {"a": Live(0)}
    deadlines = Deadlines(live)
    deadlines.add(1.0, 0, "a")
    live["a"] = Live(1)
    deadlines.add(5.0, 1, "a")

    assert deadlines.take_passed(2.0) == []
    assert deadlines.take_passed(5.0) == ["a"]
    assert deadlines.next is None


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    live: dict[str, Live] = {}
    deadlines = Deadlines(live)
    for index in range(1000):
        live["a"] = Live(index)
        deadlines.add(1e9, index, "a")

    assert len(deadlines._heap) < 100
    assert deadlines.take_passed(1e9) == ["a"]


def test_requests_end_in_any_state() -> None:
    driven = DrivenScheduler(max_num_seqs=1)
    driven.add(request("running", deadline=5.0), request("waiting", deadline=6.0))
    driven.step()
    assert driven.scheduler.next_deadline == 5.0
    driven.now = 7.0

    outputs = driven.scheduler.expire()

    assert [output.request_id for output in outputs] == ["running", "waiting"]
    assert all(isinstance(output.error, DeadlineExceededError) for output in outputs)
    assert driven.num_free == 32


def test_a_swapped_request_ends_and_frees_the_host() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, preemption_mode="swap")
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9, deadline=5.0))
    while driven.scheduler.load().num_swapped_blocks == 0:
        driven.step()
    driven.now = 5.0

    assert [output.request_id for output in driven.scheduler.expire()] == ["b"]
    assert driven.scheduler.load().num_swapped_blocks == 0
    driven.run()


@pytest.mark.parametrize("answers", [False, True])
def test_a_loading_request_ends_and_its_blocks_wait_for_the_load(answers: bool) -> None:
    driven = DrivenScheduler(with_connector=True, role="decode", kv_transfer_timeout_s=50.0)
    asked = handed_over("a", deadline=5.0)
    driven.add(asked)
    driven.step()
    (load,) = driven.work().loads
    driven.now = 5.0

    (output,) = driven.scheduler.expire()
    assert isinstance(output.error, DeadlineExceededError)
    assert driven.num_free == 32 - 3
    if answers:
        assert driven.end_load(load, asked.spec.prompt_token_ids) == []
    else:
        driven.now = 60.0
        assert driven.scheduler.expire() == []
    assert driven.num_free == (32 if answers else 32 - 3)
    driven.scheduler.check()
