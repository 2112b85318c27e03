"""Grammars of several clients compile in turn, however many one of them sends."""

import threading

import pytest

from baton.common.errors import InvalidArgumentError, ResourceExhaustedError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.compiler import CompileLimits, GrammarCompiler
from engine.constraints.fair_queue import FairQueue

RESULT_S = 30.0


def test_owners_take_turns():
    queue = FairQueue()
    for owner, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        queue.add(owner, item)
    assert [queue.take() for _ in range(7)] == [1, 4, 5, 2, 6, 3, None]


def test_the_owner_with_the_most_makes_room_for_those_with_fewer():
    queue = FairQueue()
    assert queue.make_room("a") is None
    for item in range(3):
        queue.add("a", item)
    queue.add("b", 3)
    assert queue.make_room("a") is None
    assert queue.make_room("b") == 2
    assert queue.make_room("b") is None
    assert queue.make_room("c") == 1
    assert [queue.take() for _ in range(3)] == [0, 3, None]


class HeldCompiler(GrammarCompiler):
    """Refuses each grammar, once the test lets it; notes their order."""

    def __init__(self):
        limits = CompileLimits(num_workers=1, max_waiting=4)
        super().__init__(lambda: None, backend="llguidance", limits=limits)
        self.order, self.may_go, self.has_begun = [], threading.Event(), threading.Event()

    def _compiled(self, outputs):
        self.order.append(outputs.regex)
        self.has_begun.set()
        assert self.may_go.wait(RESULT_S)
        return InvalidArgumentError("refused")


@pytest.fixture
def compiler():
    held = HeldCompiler()
    yield held
    held.may_go.set()
    held.close()


def test_the_grammars_of_one_client_do_not_delay_those_of_another(compiler):
    futures = [compiler.compile(StructuredOutputs(regex=f"a{i}"), "a") for i in range(3)]
    assert compiler.has_begun.wait(RESULT_S)
    futures.append(compiler.compile(StructuredOutputs(regex="b"), "b"))
    compiler.may_go.set()
    for future in futures:
        with pytest.raises(InvalidArgumentError):
            future.result(RESULT_S)
    assert compiler.order == ["a0", "a1", "b", "a2"]


def test_a_full_queue_refuses_the_client_that_filled_it(compiler):
    futures = [compiler.compile(StructuredOutputs(regex=f"a{i}"), "a") for i in range(4)]
    assert compiler.has_begun.wait(RESULT_S)
    with pytest.raises(ResourceExhaustedError, match="4 grammars wait"):
        compiler.compile(StructuredOutputs(regex="a9"), "a").result(0)
    other = compiler.compile(StructuredOutputs(regex="b"), "b")
    with pytest.raises(ResourceExhaustedError, match="4 grammars wait"):
        futures[-1].result(0)
    compiler.may_go.set()
    with pytest.raises(InvalidArgumentError):
        other.result(RESULT_S)
