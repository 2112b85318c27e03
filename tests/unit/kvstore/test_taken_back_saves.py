"""Saved blocks of a request with invalid logits are deleted from the store."""

from kvstore.jobs import ConnectorWork, SaveJob
from tests.support.driven_scheduler import DrivenScheduler, handed_over

PUBLISHES = {"with_connector": True, "role": "decode", "kv_publish": "1"}


class Published:
    """The saves and deletes of a scheduler so far.

    Attributes:
        keys: keys of all saves.
        open: save jobs without a result.
        deleted: keys that were deleted.
    """

    def __init__(self, driven: DrivenScheduler) -> None:
        self._driven = driven
        self.keys: set[bytes] = set()
        self.open: list[SaveJob] = []
        self.deleted: set[bytes] = set()

    def take(self) -> ConnectorWork:
        work = self._driven.work()
        self.open += work.saves
        self.keys |= {key for save in work.saves for key in save.keys}
        self.deleted |= set(work.deletes)
        return work

    def end(self) -> None:
        self._driven.end_saves([save.job_id for save in self.open])
        self.open.clear()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._driven.step()
            self.take()


def load(driven: DrivenScheduler, **fields: object) -> None:
    """Adds a request of ten tokens and ends the load of its KV."""
    submitted = handed_over("a", **fields)
    driven.add(submitted)
    driven.step()
    (job,) = driven.work().loads
    driven.end_load(job, submitted.spec.prompt_token_ids)


def fail_as_not_finite(driven: DrivenScheduler) -> None:
    driven.runner.fault = "not finite"
    driven.step()
    assert driven.scheduler.num_unfinished == 0


class TestInvalidRequest:
    def test_its_generated_blocks_are_deleted_too(self) -> None:
        driven = DrivenScheduler(**PUBLISHES)
        published = Published(driven)
        load(driven, max_tokens=30)
        published.steps(12)
        published.end()
        assert len(published.keys) >= 2
        fail_as_not_finite(driven)
        published.take()
        published.end()
        published.take()
        assert published.deleted > published.keys, "the loaded blocks of the prompt are deleted too"

    def test_blocks_of_candidates_that_ended_before_are_deleted(self) -> None:
        driven = DrivenScheduler(64, **PUBLISHES)
        published = Published(driven)
        load(driven, max_tokens=40, n=3)
        published.steps(14)
        num_before = len(published.keys)
        driven.scheduler.finish_candidate("a", 0)
        published.steps(8)
        published.end()
        assert len(published.keys) > num_before
        fail_as_not_finite(driven)
        published.take()  # a save may have begun with the step
        published.end()
        published.take()
        assert published.deleted >= published.keys

    def test_blocks_of_candidates_that_ended_before_leave_the_prefix_cache(self) -> None:
        driven = DrivenScheduler(64, **PUBLISHES)
        load(driven, max_tokens=40, n=3, temperature=1.0, seed=1)
        driven.steps(14)
        num_before = len(driven.scheduler.kv.pool.cached_keys())
        driven.scheduler.finish_candidate("a", 0)
        assert len(driven.scheduler.kv.pool.cached_keys()) > num_before
        fail_as_not_finite(driven)
        assert driven.scheduler.kv.pool.cached_keys() == ()

    def test_blocks_are_deleted_after_saves_in_progress_have_ended(self) -> None:
        driven = DrivenScheduler(**PUBLISHES)
        published = Published(driven)
        load(driven, max_tokens=30)
        published.steps(12)
        fail_as_not_finite(driven)
        published.take()
        assert published.deleted == set()
        published.end()
        published.take()
        assert published.deleted >= published.keys

    def test_blocks_are_deleted_at_the_timeout_and_again_after_their_saves(self) -> None:
        driven = DrivenScheduler(kv_transfer_timeout_s=5.0, **PUBLISHES)
        published = Published(driven)
        load(driven, max_tokens=30)
        published.steps(12)
        fail_as_not_finite(driven)
        driven.now = 5.0
        driven.scheduler.expire()
        published.take()
        assert published.deleted >= published.keys
        published.deleted.clear()
        published.end()
        published.take()
        assert published.deleted >= published.keys
