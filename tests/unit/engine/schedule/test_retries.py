"""After a step that fails, each of its requests is tried alone, and only the cause of it ends."""

import itertools
from collections.abc import Callable

import pytest

from baton.common.errors import InternalError
from engine.batch import ScheduledBatch, StepOutput
from engine.request import EngineOutput, FinishReason
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.engine_work import has_work
from tests.support.fake_model import expected_tokens, fake_info

PROMPTS = {name: (token, *(1,) * 5) for token, name in enumerate("abcd", 1)}
LOOPS = pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
Breaks = Callable[[ScheduledBatch], bool]


class Engine:
    """An engine with four blocks of four tokens per request, and outputs by request."""

    def __init__(self, breaks: Breaks, *, overlaps: bool, **config: object) -> None:
        info = fake_info(4, 64)
        self.engine = CheckedEngine(info, 32, async_scheduling=overlaps, submits="late", **config)
        self.core, self.runner = self.engine.core, self.engine.runner
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.num_steps = 0
        self._breaks, self._execute = breaks, self.runner.execute
        self.runner.execute = self._execute_or_break

    def add(self, *names: str, **fields: object) -> None:
        for index, name in enumerate(names, 1):
            self.core.scheduler.add(request(name, first_token=index, **fields))

    def run(self) -> None:
        while has_work(self.core):
            self.core.run_step(self._take)
            self.core.scheduler.check()
            self.num_steps += 1
            assert self.num_steps < 300
        self.engine.check_is_empty()

    def _execute_or_break(self, batch: ScheduledBatch) -> StepOutput:
        if self._breaks(batch):
            self.runner.fault = "raise"
        return self._execute(batch)

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.is_last:
                self.ends[output.request_id] = output


def rows_of(engine: Engine, name: str) -> set[int]:
    group = engine.core.scheduler._groups.get(name)
    return {s.row for s in group.running} if group is not None else set()


def poisoned(name: str, after: int = 0) -> tuple[Breaks, list[Engine]]:
    """Returns a check that breaks every step with request `name` that has so many tokens."""
    holder: list[Engine] = []

    def breaks(batch: ScheduledBatch) -> bool:
        (engine,) = holder
        rows = {chunk.row for chunk in batch.chunks} | set(batch.decode_rows)
        return bool(rows & rows_of(engine, name)) and len(engine.tokens.get(name, ())) >= after

    return breaks, holder


@LOOPS
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("culprit", "abc")
def test_only_the_request_that_fails_alone_ends(culprit: str, after: int, overlaps: bool) -> None:
    breaks, holder = poisoned(culprit, after)
    engine = Engine(breaks, overlaps=overlaps)
    holder.append(engine)
    engine.add("a", "b", "c")
    engine.run()

    end = engine.ends.pop(culprit)
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, InternalError)
    for name in {"a", "b", "c"} - {culprit}:
        assert engine.tokens[name] == expected_tokens(PROMPTS[name], 4)
    assert {end.finish_reason for end in engine.ends.values()} == {FinishReason.LENGTH}


@LOOPS
def test_two_bad_requests_of_three_leave_the_engine_and_the_third(overlaps: bool) -> None:
    checks = [poisoned("a"), poisoned("b", 1)]
    engine = Engine(lambda batch: any(breaks(batch) for breaks, _ in checks), overlaps=overlaps)
    for _, holder in checks:
        holder.append(engine)
    engine.add("a", "b", "c")
    engine.run()

    assert engine.tokens["c"] == expected_tokens(PROMPTS["c"], 4)
    assert {name for name, end in engine.ends.items() if end.error} == {"a", "b"}


@LOOPS
def test_a_step_that_fails_once_ends_no_request(overlaps: bool) -> None:
    numbers = iter(range(100))
    engine = Engine(lambda batch: next(numbers) == 2, overlaps=overlaps, max_num_seqs=8)
    engine.add("a", "b", "c", n=2, seed=7, max_tokens=6)
    engine.run()
    assert {end.finish_reason for end in engine.ends.values()} == {FinishReason.LENGTH}
    counted = engine.core.metrics.snapshot().values
    assert counted["baton_engine_retried_requests", "passed"] == 3
    assert counted["baton_engine_retried_requests", "failed"] == 0


@LOOPS
def test_the_engine_ends_when_three_requests_fail_alone_in_a_row(overlaps: bool) -> None:
    engine = Engine(lambda batch: True, overlaps=overlaps)
    engine.add("a", "b", "c", "d")
    with pytest.raises(RuntimeError, match="injected"):
        engine.run()
    assert engine.core.scheduler.num_unfinished == 1
    assert engine.num_steps < 12


def test_a_long_prompt_is_past_the_failure_when_its_chunk_is_computed() -> None:
    driven = DrivenScheduler(max_num_batched_tokens=8)
    driven.add(request("a", 3), request("b", 30, first_token=2))
    driven.step()
    batch = driven.begin()
    assert driven.shares == {"a": 1, "b": 7}
    assert driven.fail(batch) == []

    driven.step()
    assert driven.shares == {"a": 4}
    driven.step()
    assert driven.shares == {"b": 8}, "the first five tokens are computed: one block is cached"
    driven.step()
    assert driven.shares == {"a": 1, "b": 7}
    assert driven.run()["b"] == expected_tokens((2, *(1,) * 29), 4)


def test_no_request_is_admitted_beside_one_that_is_tried_alone() -> None:
    driven = DrivenScheduler()
    driven.add(request("a"), request("b", first_token=2))
    driven.fail(driven.begin())
    driven.add(request("c", first_token=3))
    for shares in ({"a": 6}, {"b": 6}, {"a": 1, "b": 1, "c": 6}):
        driven.step()
        assert driven.shares == shares


def test_a_request_that_ends_before_its_turn_is_not_tried() -> None:
    driven = DrivenScheduler()
    driven.add(request("a"), request("b", first_token=2))
    driven.fail(driven.begin())
    batch = driven.begin()
    driven.scheduler.abort(["a", "b"])
    assert driven.fail(batch) == []
    driven.add(request("c", first_token=3))
    assert driven.run() == {"c": expected_tokens((3, *(1,) * 5), 4)}


@LOOPS
def test_candidates_and_beams_are_tried_alone_with_all_that_they_compute(overlaps: bool) -> None:
    """Every third step with both fails, whatever these compute: the prompt, or the rest again."""
    engine = CheckedEngine(
        fake_info(4, 24),
        40,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        async_scheduling=overlaps,
        submits="now",
    )
    counts, execute = itertools.count(1), engine.runner.execute

    def execute_or_break(batch: ScheduledBatch) -> StepOutput:
        if len(engine.core.scheduler._in_flight[-1].ends()) == 2 and next(counts) % 3 == 0:
            engine.runner.fault = "raise"
        return execute(batch)

    engine.runner.execute = execute_or_break
    for name, params in (("n", {"n": 3, "temperature": 1.0}), ("beams", {"beam_width": 3, "n": 2})):
        prompt = {"prompt_token_ids": (0, 1, 0, 1, 0), "max_tokens": 15, "seed": 1}
        submitted = request(name, **(prompt | params))
        engine.add(CheckedRequest.of(submitted, engine.info))
    while has_work(engine.core):
        engine.step()
    engine.check_is_empty()
    assert next(counts) > 6
    assert all(checked.is_over for checked in engine.finished.values())
