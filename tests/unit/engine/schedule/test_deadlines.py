"""Deadlines of requests: `Deadlines` and the scheduler's `expire`."""

from dataclasses import dataclass

import pytest

from baton.common.errors import DeadlineExceededError
from engine.schedule.deadlines import Deadlines
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request


@dataclass
class Live:
    arrival: int


def test_passed_deadlines_are_returned_once_and_earliest_first() -> None:
    deadlines = Deadlines({"a": Live(0), "b": Live(1), "c": Live(2)})
    for deadline, arrival, request_id in ((3.0, 0, "a"), (1.0, 1, "b"), (9.0, 2, "c")):
        deadlines.add(deadline, arrival, request_id)

    assert deadlines.next == 1.0
    assert deadlines.take_passed(3.0) == ["b", "a"]
    assert deadlines.take_passed(3.0) == []
    assert deadlines.next == 9.0


def test_the_deadline_of_an_ended_request_is_dropped_even_if_its_id_is_reused() -> None:
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


def test_running_and_waiting_requests_end_at_their_deadline() -> None:
    driven = DrivenScheduler(max_num_seqs=1)
    driven.add(request("running", deadline=5.0), request("waiting", deadline=6.0))
    driven.step()
    assert driven.scheduler.next_deadline == 5.0
    driven.now = 7.0

    outputs = driven.scheduler.expire()

    assert [output.request_id for output in outputs] == ["running", "waiting"]
    assert all(isinstance(output.error, DeadlineExceededError) for output in outputs)
    assert driven.num_free == 32


def test_a_swapped_request_ends_and_frees_its_host_blocks() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, preemption_mode="swap")
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9, deadline=5.0))
    while driven.scheduler.load().num_swapped_blocks == 0:
        driven.step()
    driven.now = 5.0

    assert [output.request_id for output in driven.scheduler.expire()] == ["b"]
    assert driven.scheduler.load().num_swapped_blocks == 0
    driven.run()


@pytest.mark.parametrize("answers", [False, True])
def test_a_loading_request_ends_and_keeps_its_blocks_until_the_load_ends(answers: bool) -> None:
    driven = DrivenScheduler(with_connector=True, role="decode", kv_transfer_timeout_s=50.0)
    submitted = handed_over("a", deadline=5.0)
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads
    driven.now = 5.0

    (output,) = driven.scheduler.expire()
    assert isinstance(output.error, DeadlineExceededError)
    assert driven.num_free == 32 - 3
    if answers:
        assert driven.end_load(load, submitted.spec.prompt_token_ids) == []
    else:
        driven.now = 60.0
        assert driven.scheduler.expire() == []
    assert driven.num_free == (32 if answers else 32 - 3)
    driven.scheduler.check()
