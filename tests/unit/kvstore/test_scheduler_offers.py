"""Leases on the blocks of a prompt, from offer to end, and the saved tails of prompts."""

from collections.abc import Collection

from kvstore.jobs import LookupResult, SaveResult, TransferResults
from tests.support.driven_scheduler import DrivenScheduler, request


class LendingEngine:
    """A prefill engine with a connector that lends blocks.

    Args:
        num_blocks: KV blocks in its pool.
        failing: numbers of the saves that fail, counted from 0.

    Attributes:
        handoffs: ids of the handoffs that were sent; None for a prompt without one.
        offered: ids of the leases that were offered, in order.
        ended: ids of the leases that ended, in order.
        late: ids of the leases that had a save after their end.
    """

    def __init__(self, num_blocks: int, failing: Collection[int] = ()) -> None:
        self.driven = DrivenScheduler(
            num_blocks,
            windows=(None, 4),
            with_connector=True,
            role="prefill",
            max_num_batched_tokens=8,
            long_prefill_token_threshold=4,
            max_num_partial_prefills=2,
            enable_prefix_caching=False,
        )
        self.handoffs: list[str | None] = []
        self.offered: list[str] = []
        self.ended: list[str] = []
        self.late: set[str] = set()
        self._lent: dict[int, str] = {}
        self._failing = failing
        self._num_saves = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driven.step()
            self.work()

    def work(self) -> None:
        """Ends all jobs of the connector at once."""
        work = self.driven.work()
        self.offered += work.offered
        self.ended += work.ended
        lookups = tuple(LookupResult(job.job_id, 0) for job in work.lookups)
        saves = []
        for job in work.saves:
            is_over = job.lease_id in self.ended
            self.late |= {job.lease_id} if is_over else set()
            is_lent = not is_over and self._num_saves not in self._failing
            self._num_saves += 1
            self._lent |= {job.job_id: job.lease_id} if is_lent else {}
            saves.append(SaveResult(job.job_id, committed=is_lent, is_held=is_lent))
        released = tuple(job for job, lease in self._lent.items() if lease in self.ended)
        for job_id in released:
            del self._lent[job_id]
        results = TransferResults(lookups=lookups, saves=tuple(saves), released=released)
        for output in self.driven.scheduler.apply(results):
            if output.is_last:
                handoff = output.handoff
                self.handoffs.append(handoff.handoff_id if handoff else None)
                if handoff:
                    self.driven.scheduler.release_handoff(handoff.handoff_id)
        self.driven.scheduler.check()


def test_a_lease_is_offered_once_its_handoff_is_sent() -> None:
    lender = LendingEngine(64)
    lender.driven.add(request("a", 10))
    while not lender.handoffs:
        assert lender.offered == []
        lender.steps(1)
    lender.work()
    assert lender.offered == lender.handoffs


def test_a_preempted_prompt_ends_its_lease_and_makes_another_handoff() -> None:
    lender = LendingEngine(24)
    lender.driven.add(request("a", 32), request("b", 32, first_token=0))
    lender.steps(40)
    assert lender.driven.scheduler.load().num_preemptions == 1
    preempted = lender.ended[0]
    assert len(lender.handoffs) == 2
    assert preempted not in lender.handoffs
    assert lender.offered == lender.handoffs
    assert lender.ended == [preempted, *lender.handoffs]
    assert lender.driven.num_free == 24


def test_a_save_that_failed_before_a_preemption_does_not_affect_the_next_handoff() -> None:
    lender = LendingEngine(24, failing=[1])
    lender.driven.add(request("a", 32), request("b", 32, first_token=0))
    lender.steps(40)
    assert lender.driven.scheduler.load().num_preemptions == 1
    assert len(lender.handoffs) == 2
    assert None not in lender.handoffs


def test_a_prompt_that_waits_for_its_own_lent_blocks_ends_without_a_handoff() -> None:
    """Blocks behind a window would be free if they were not lent."""
    lender = LendingEngine(12)
    lender.driven.add(request("a", 32))
    lender.steps(40)
    assert lender.driven.scheduler.num_unfinished == 0
    assert lender.handoffs == [None]
    assert set(lender.ended) == lender.late
    assert lender.offered == []
    assert lender.driven.num_free == 12


class TestTails:
    """The saved tail of a prompt, its last partial block, serves only its own request."""

    def test_the_tail_of_an_aborted_prompt_is_deleted_when_its_save_ends(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 6))
        driven.step()
        driven.answer()
        driven.step()
        saves = driven.work().saves
        (tail,) = [save for save in saves if save.num_tail_tokens]
        driven.scheduler.abort(["a"])
        assert driven.work().deletes == []
        driven.end_saves([save.job_id for save in saves])
        assert driven.work().deletes == list(tail.keys)

    def test_the_tail_of_a_prompt_with_a_failed_save_is_deleted(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 6))
        driven.step()
        driven.answer()
        driven.step()
        full, tail = driven.work().saves
        driven.end_saves([tail.job_id])
        driven.end_saves([full.job_id], committed=False)
        assert driven.work().deletes == list(tail.keys)

    def test_a_prompt_whose_tail_is_not_saved_hands_over_its_full_blocks(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 6))
        driven.step()
        driven.answer()
        driven.step()
        full, tail = driven.work().saves
        driven.end_saves([full.job_id])
        (output,) = driven.end_saves([tail.job_id], committed=False)

        assert (output.handoff.block_keys, output.handoff.num_tokens) == (full.keys, 4)
        work = driven.work()
        assert work.offered == [output.handoff.handoff_id]
        assert work.deletes == list(tail.keys)
        driven.scheduler.release_handoff(output.handoff.handoff_id)
        assert driven.work().ended == work.offered

    def test_a_prompt_whose_lease_ended_before_its_tail_hands_over_nothing(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 6))
        driven.step()
        driven.answer()
        driven.step()
        full, tail = driven.work().saves
        driven.end_saves([full.job_id])
        ended = SaveResult(tail.job_id, committed=False, error="cancelled")
        (output,) = driven.scheduler.apply(TransferResults(saves=(ended,)))

        assert output.is_last
        assert output.handoff is None

    def test_a_tail_saved_after_the_timeout_is_deleted_again(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill", kv_transfer_timeout_s=5.0)
        driven.add(request("a", 3))
        driven.step()
        (tail,) = driven.work().saves
        driven.now = 5.0
        driven.scheduler.expire()
        assert driven.work().deletes == list(tail.keys)
        driven.end_saves([tail.job_id])
        assert driven.work().deletes == list(tail.keys)

    def test_a_full_block_of_an_aborted_prompt_is_kept(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 8))
        driven.step()
        driven.answer()
        driven.step()
        (full,) = driven.work().saves
        driven.scheduler.abort(["a"])
        driven.end_saves([full.job_id])
        assert driven.work().deletes == []
