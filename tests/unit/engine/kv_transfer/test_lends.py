"""Lends: blocks of the prefix cache that another engine loads stay until its lease is over."""

import pytest

from engine.kv_transfer import lends
from engine.request import PrefixRequest
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff
from kvstore.jobs import SaveJob, SaveResult, TransferResults
from tests.support.driven_scheduler import NAMESPACE, DrivenScheduler, request

PROMPT = tuple(range(1, 15))  # three full blocks of four tokens


class Lender(DrivenScheduler):
    """An engine that has computed `PROMPT`, and what it answered."""

    def __init__(self, num_blocks: int = 8, **config: object) -> None:
        super().__init__(num_blocks, with_connector=True, finds_by_key=False, **config)
        self.answers: list[KvHandoff | None] = []
        self.add(request("first", prompt_token_ids=PROMPT, max_tokens=1))
        self.run()
        self.work()

    def ask(self, prompt: tuple[int, ...] = PROMPT, lease_id: str = "lease") -> None:
        keys = tuple(BlockKeyChain(NAMESPACE, 4).extend(prompt))
        self.scheduler.lend_prefix(PrefixRequest(lease_id, keys, self.answers.append))
        self.scheduler.check()

    def save(self) -> SaveJob:
        (job,) = self.work().saves
        return job

    def report(self, result: SaveResult, *released: int) -> None:
        self.scheduler.apply(TransferResults(saves=(result,), released=released))
        self.scheduler.check()

    def lend(self) -> SaveJob:
        """Asks, and lets the connector lend the blocks."""
        self.ask()
        job = self.save()
        self.report(SaveResult(job.job_id, committed=True, is_held=True))
        return job


def test_the_answer_comes_when_the_blocks_can_be_loaded() -> None:
    lender = Lender()
    lender.ask()
    job = lender.save()
    assert (len(job.keys), job.lease_id, job.num_tail_tokens) == (3, "lease", 0)
    assert lender.num_free == 5
    assert lender.answers == []
    lender.report(SaveResult(job.job_id, committed=True, is_held=True))
    (handoff,) = lender.answers
    assert handoff is not None
    assert (handoff.handoff_id, handoff.num_tokens) == ("lease", 12)
    assert handoff.block_keys == job.keys
    assert lender.work().offered == ["lease"]
    assert lender.scheduler.lends_blocks


def test_blocks_are_free_and_still_cached_when_the_lease_is_over() -> None:
    lender = Lender()
    job = lender.lend()
    lender.work()
    lender.scheduler.release_handoff("lease")
    assert lender.work().ended == ["lease"]
    assert lender.num_free == 5
    lender.scheduler.apply(TransferResults(released=(job.job_id,)))
    assert lender.num_free == 8
    lender.ask(lease_id="again")
    assert len(lender.save().keys) == 3


def test_only_the_leading_blocks_that_are_cached_are_lent() -> None:
    lender = Lender()
    lender.ask((*PROMPT[:9], 9, 9, 9, 9, 9))
    assert len(lender.save().keys) == 2


def test_nothing_is_lent_of_an_unknown_prompt() -> None:
    lender = Lender()
    lender.ask((9,) * 12)
    assert lender.answers == [None]
    assert not lender.work()


@pytest.mark.parametrize("has_late_result", [False, True])
def test_a_save_that_fails_or_is_late_lends_nothing(has_late_result: bool) -> None:
    lender = Lender(kv_transfer_timeout_s=5.0)
    lender.ask()
    job = lender.save()
    if has_late_result:
        lender.now += 6.0
        lender.scheduler.expire()
        assert lender.answers == [None]
        assert lender.num_free == 5, "bytes may still move"
    lender.report(SaveResult(job.job_id, committed=False, error="failed"))
    assert lender.answers == [None]
    assert lender.work().ended[:1] == ["lease"]
    assert lender.num_free == 8


def test_a_lease_that_ends_before_the_save_answers_with_nothing() -> None:
    lender = Lender()
    lender.ask()
    job = lender.save()
    lender.scheduler.release_handoff("lease")
    lender.report(SaveResult(job.job_id, committed=False, error="cancelled"))
    assert lender.answers == [None]
    assert lender.num_free == 8


def test_blocks_that_waiting_requests_need_are_not_lent() -> None:
    lender = Lender(num_blocks=8)
    lender.add(request("large", 21, first_token=0, max_tokens=8))
    lender.step()
    lender.add(request("waits", 5, first_token=2, max_tokens=2))
    lender.ask()
    assert lender.answers == [None]


def test_a_request_that_lacks_blocks_ends_the_leases() -> None:
    lender = Lender(num_blocks=8)
    job = lender.lend()
    lender.work()
    lender.add(request("large", 24, first_token=0, max_tokens=4))
    lender.step()
    assert lender.work().ended == ["lease"]
    lender.scheduler.apply(TransferResults(released=(job.job_id,)))
    assert len(lender.run()["large"]) == 4


def test_a_running_request_that_grows_ends_the_leases() -> None:
    lender = Lender(num_blocks=8)
    lender.add(request("grows", 16, first_token=0, max_tokens=12))
    lender.step()
    job = lender.lend()
    for _ in range(12):
        if ended := lender.work().ended:
            break
        lender.step()
    assert ended == ["lease"]
    lender.scheduler.apply(TransferResults(released=(job.job_id,)))
    assert len(lender.run()["grows"]) > 0
    assert lender.scheduler.load().num_preemptions == 0


def test_only_so_many_prefixes_are_lent_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lends, "_MAX_LENDS", 2)
    lender = Lender()
    for number in range(3):
        lender.ask(lease_id=f"lease {number}")
    assert lender.answers == [None]
    assert len(lender.work().saves) == 2
