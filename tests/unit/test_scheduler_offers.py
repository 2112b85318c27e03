"""When leases on a prompt's blocks are offered or end, and what else is for one handoff alone."""

from collections.abc import Collection

from kvstore.jobs import LookupResult, SaveResult, TransferResults
from tests.support.driven_scheduler import DrivenScheduler, request


class Lender:
    """A prefill engine whose blocks are lent.

    Args:
        num_blocks: KV blocks in its pool.
        failing: whether each save fails, in order.

    Attributes:
        handoffs: handoffs that were sent; None for a prompt without one.
        offered: leases, in order.
        ended: leases, in order.
        late: leases that something was saved for after their end.
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
        """Does what is asked for, at once."""
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


def test_a_lease_is_offered_once_its_handoff_is_told() -> None:
    lender = Lender(64)
    lender.driven.add(request("a", 10))
    while not lender.handoffs:
        assert lender.offered == []
        lender.steps(1)
    lender.work()
    assert lender.offered == lender.handoffs


def test_a_prompt_that_gives_way_ends_its_lease_and_makes_another_handoff() -> None:
    lender = Lender(24)
    lender.driven.add(request("a", 32), request("b", 32, first_token=0))
    lender.steps(40)
    assert lender.driven.scheduler.load().num_preemptions == 1
    given_way = lender.ended[0]
    assert len(lender.handoffs) == 2
    assert given_way not in lender.handoffs
    assert lender.offered == lender.handoffs
    assert lender.ended == [given_way, *lender.handoffs]
    assert lender.driven.num_free == 24


def test_what_failed_before_it_gave_way_does_not_count_against_the_other_handoff() -> None:
    lender = Lender(24, failing=[1])
    lender.driven.add(request("a", 32), request("b", 32, first_token=0))
    lender.steps(40)
    assert lender.driven.scheduler.load().num_preemptions == 1
    assert len(lender.handoffs) == 2
    assert None not in lender.handoffs


def test_a_prompt_that_waits_for_what_it_lends_itself_hands_nothing_over() -> None:
    """What lies behind a window would be free, if it were not lent."""
    lender = Lender(12)
    lender.driven.add(request("a", 32))
    lender.steps(40)
    assert lender.driven.scheduler.num_unfinished == 0
    assert lender.handoffs == [None]
    assert set(lender.ended) == lender.late
    assert lender.offered == []
    assert lender.driven.num_free == 12


class TestTails:
    """What a prompt's last, partial block is saved as serves its own request alone."""

    def test_that_of_an_aborted_prompt_is_deleted_when_its_save_has_ended(self) -> None:
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

    def test_so_is_that_of_a_handoff_of_which_a_save_failed(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 6))
        driven.step()
        driven.answer()
        driven.step()
        full, tail = driven.work().saves
        driven.end_saves([tail.job_id])
        driven.end_saves([full.job_id], committed=False)
        assert driven.work().deletes == list(tail.keys)

    def test_one_that_comes_late_is_deleted_again(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill", kv_transfer_timeout_s=5.0)
        driven.add(request("a", 3))
        driven.step()
        (tail,) = driven.work().saves
        driven.now = 5.0
        driven.scheduler.expire()
        assert driven.work().deletes == list(tail.keys)
        driven.end_saves([tail.job_id])
        assert driven.work().deletes == list(tail.keys)

    def test_a_whole_block_stays_for_others(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 8))
        driven.step()
        driven.answer()
        driven.step()
        (full,) = driven.work().saves
        driven.scheduler.abort(["a"])
        driven.end_saves([full.job_id])
        assert driven.work().deletes == []
