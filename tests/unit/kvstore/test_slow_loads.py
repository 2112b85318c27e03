"""Loads that are slower than computing are given up, until the store is quick again.

The fake runner computes a token in 1 ms. No load is given up in less than 0.25 s, the time of
250 tokens, which is more than any prompt here has.
"""

import pytest

from baton.common.errors import AbortedError
from engine.request import FinishReason
from kvstore.jobs import ConnectorWork, LoadJob
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request
from tests.support.fake_model import expected_tokens


class SlowStore:
    """A decode engine with a store that has every block; the test sets the duration of loads."""

    def __init__(self, **config: object) -> None:
        self.driven = DrivenScheduler(
            256, with_connector=True, role="decode", kv_transfer_timeout_s=5.0, **config
        )
        self._num_requests = 0
        self._expected: dict[str, list[int]] = {}

    def count(self, *series: str) -> float:
        return self.driven.metrics.snapshot()[0][series]

    def add_request(self, *, is_handed_over: bool = False) -> LoadJob | None:
        """Adds a request with a new prompt, whose lookup finds two blocks of four tokens.

        Returns:
            The load of the request; None if the engine starts none.
        """
        self._num_requests += 1
        name, first_token = f"r{self._num_requests}", self._num_requests
        make = handed_over if is_handed_over else request
        prompt = (first_token, *(1,) * 9)
        known = (*prompt, 0) if is_handed_over else prompt
        self._expected[name] = expected_tokens(known, 1 if is_handed_over else 2)
        self.driven.add(make(name, prompt_token_ids=prompt, max_tokens=2))
        self.driven.step()
        if not is_handed_over:
            self.end_saves(self.driven.answer(num_found=2))
            self.driven.step()
        work = self.driven.work()
        self.end_saves(work)
        return work.loads[0] if work.loads else None

    def end_saves(self, work: ConnectorWork) -> None:
        """Ends the saves of prompts that were computed."""
        self.driven.end_saves(job.job_id for job in work.saves)

    def end(self, load: LoadJob) -> None:
        tokens = (self._num_requests, *(1,) * 9)
        self.driven.end_load(load, tokens)

    def load(self, seconds: float, *, is_handed_over: bool = False) -> None:
        """Runs a request whose load takes `seconds`, to its end."""
        load = self.add_request(is_handed_over=is_handed_over)
        assert load is not None
        self.driven.now += seconds
        self.driven.scheduler.expire()
        self.end(load)
        self.run()

    def run(self) -> None:
        for name, tokens in self.driven.run().items():
            # Earlier steps may have returned the first tokens.
            assert tokens == self._expected[name][-len(tokens) :]
        self.driven.end_all_saves()
        assert self.driven.scheduler.num_transfers == 0
        self.driven.scheduler.check()


def test_a_load_slower_than_computing_is_given_up_and_its_blocks_stay_fenced():
    store = SlowStore()
    load = store.add_request(is_handed_over=True)
    assert load is not None
    driven = store.driven
    assert driven.scheduler.next_deadline == pytest.approx(0.25)
    driven.now = 0.24
    assert driven.scheduler.expire() == []
    driven.step()
    assert driven.shares == {}

    driven.now = 0.26
    assert driven.scheduler.expire() == []
    driven.step()
    assert driven.shares == {"r1": 11}
    work = driven.work()
    assert work.cancelled_loads == [load.job_id]
    store.end_saves(work)
    assert store.count("baton_kv_loads_given_up", "loading") == 1
    assert store.count("baton_kv_failures", "load", "timed_out") == 0
    driven.run()
    driven.end_all_saves()
    assert driven.num_free == 256 - len(load.block_ids)
    store.end(load)
    store.run()
    assert driven.num_free == 256


def test_a_load_that_was_given_up_and_does_not_end_is_logged(caplog):
    store = SlowStore()
    load = store.add_request(is_handed_over=True)
    store.driven.now = 0.26
    store.driven.scheduler.expire()
    store.driven.now = 5.0
    store.driven.scheduler.expire()
    message = caplog.messages[-1]
    assert message.startswith("r1: a KV load has not reported")
    assert f"{len(load.block_ids)} blocks stay fenced" in message
    assert store.count("baton_kv_failures", "load", "timed_out") == 1


def test_slow_loads_are_logged_once_until_one_succeeds(caplog):
    store = SlowStore()

    def num_lines() -> int:
        return sum("slower than computing" in record.message for record in caplog.records)

    for num_expected in (1, 1):
        store.load(0.3, is_handed_over=True)
        assert num_lines() == num_expected
    store.load(0.001, is_handed_over=True)
    store.load(0.3, is_handed_over=True)
    assert num_lines() == 2


def test_a_load_may_take_until_its_timeout_if_failures_are_not_recomputed():
    store = SlowStore(kv_load_failure_policy="fail")
    for _ in range(5):
        store.load(4.9, is_handed_over=True)
    assert store.add_request(is_handed_over=True) is not None
    store.driven.now += 5.0
    (output,) = store.driven.scheduler.expire()
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, AbortedError)
    assert store.count("baton_kv_failures", "load", "timed_out") == 1
    assert store.count("baton_kv_loads_given_up", "loading") == 0


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_slow_loads_are_replaced_by_computing_until_a_trial_load_is_quick(is_handed_over):
    store = SlowStore()
    for _ in range(4):
        store.load(0.2, is_handed_over=is_handed_over)
    assert store.add_request(is_handed_over=is_handed_over) is None
    store.run()
    assert store.count("baton_kv_loads_given_up", "admission") == 1

    store.driven.now += 5.0
    store.load(0.001, is_handed_over=is_handed_over)  # the trial load
    store.load(0.001, is_handed_over=is_handed_over)
    assert store.count("baton_kv_loads_given_up", "admission") == 1


def test_loads_may_take_longer_behind_a_long_queue_of_prompts():
    store = SlowStore(max_num_batched_tokens=4)
    for _ in range(4):
        store.load(0.06)
    assert store.add_request() is None
    store.run()
    store.driven.add(request("r99", prompt_token_ids=(99, *(1,) * 61), max_tokens=2))
    store.driven.step()
    store.driven.answer()
    store.driven.step()  # the prompt has begun; its other 58 tokens take 58 ms
    assert store.add_request() is not None


def test_a_load_that_was_refused_at_admission_counts_once():
    store = SlowStore()
    for _ in range(4):
        store.load(0.2)
    assert store.add_request() is None
    store.driven.steps(3)
    assert store.count("baton_kv_loads_given_up", "admission") == 1


def test_metrics_count_the_save_time_that_prefill_hides():
    driven = DrivenScheduler(
        with_connector=True, role="prefill", max_num_batched_tokens=8, max_num_seqs=8
    )
    driven.add(request("a", 16))
    driven.step()
    driven.answer()
    driven.step()
    assert driven.shares == {"a": 8}
    (first,) = driven.work().saves  # from 0 s
    driven.now = 2.0
    driven.end_saves([first.job_id])
    driven.now = 3.0
    driven.step()
    assert driven.shares == {"a": 8}
    (second,) = driven.work().saves  # from 3 s, when the first token is drawn
    driven.now = 4.0
    driven.end_saves([second.job_id])
    values, _ = driven.metrics.snapshot()
    assert values["baton_kv_prompt_save_seconds",] == pytest.approx(3.0)
    assert values["baton_kv_hidden_prompt_save_seconds",] == pytest.approx(2.0)
