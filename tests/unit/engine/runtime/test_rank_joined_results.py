"""`JoinedResults`: one result for what several ranks have moved."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.ranks.joined_results import JoinedResults
from kvstore.jobs import LoadResult, LookupResult, SaveResult, TransferResults


def joined(num_ranks: int, *reports: TransferResults) -> list[TransferResults]:
    """Returns what holds after each report about job 1."""
    results = JoinedResults()
    results.expect([1], num_ranks)
    found = []
    for report in reports:
        results.add(report)
        found.append(results.take())
    return found


def load(num_blocks: int, error: str = "", seconds: float = 0.0) -> TransferResults:
    return TransferResults(loads=(LoadResult(1, num_blocks, error, seconds),))


def save(**fields: object) -> TransferResults:
    return TransferResults(saves=(SaveResult(1, **fields),))


HELD = save(committed=True, is_held=True)
RELEASED = TransferResults(released=(1,))
NOTHING = TransferResults()


def test_a_load_has_brought_what_all_ranks_have_loaded():
    first, second = joined(2, load(5, seconds=1.0), load(3, "missing", 2.0))
    assert first == NOTHING
    assert second == load(3, "missing")
    assert second.loads[0].seconds == 2.0


def test_a_look_up_that_was_cancelled_is_ignored():
    results = JoinedResults()
    results.expect([1, 2], 2)
    results.forget([1])
    for num_blocks in (4, 2):
        lookups = LookupResult(1, num_blocks), LookupResult(2, num_blocks)
        results.add(TransferResults(lookups=lookups))
    assert results.take() == TransferResults(lookups=(LookupResult(2, 2),))


def test_a_load_is_in_doubt_once_and_ends_with_its_last_rank():
    doubted = TransferResults(doubted=(1,))
    found = joined(2, doubted, doubted, load(0, "unavailable"), load(4))
    assert found == [doubted, NOTHING, NOTHING, load(0, "unavailable")]


def test_blocks_are_held_until_the_last_rank_has_released_them():
    assert joined(2, HELD, HELD, RELEASED, RELEASED) == [NOTHING, HELD, NOTHING, RELEASED]


def test_blocks_that_one_rank_lends_are_held_though_the_save_failed_elsewhere():
    failed = save(committed=False, error="unavailable")
    held = save(committed=False, is_held=True, error="unavailable")
    assert joined(2, HELD, failed, RELEASED) == [NOTHING, held, RELEASED]


def test_a_save_whose_lease_has_ended_before_all_ranks_lend_is_not_committed():
    late = save(committed=False, error="cancelled")
    assert joined(2, HELD, RELEASED, late) == [NOTHING, NOTHING, late]
    still_held = save(committed=False, is_held=True, error="cancelled")
    assert joined(2, HELD, RELEASED, HELD, RELEASED) == [NOTHING, NOTHING, still_held, RELEASED]


@given(st.data())
def test_a_held_save_is_released_once_after_its_result(data):
    """Reports of a rank come in order, and those of different ranks in any."""
    num_ranks = data.draw(st.integers(1, 4))
    reports = [
        data.draw(st.sampled_from([[HELD, RELEASED], [save(committed=False, error="failed")]]))
        for _ in range(num_ranks)
    ]
    results = JoinedResults()
    results.expect([1], num_ranks)
    events = []
    while any(reports):
        (report, *_) = rank = data.draw(st.sampled_from([each for each in reports if each]))
        rank.remove(report)
        results.add(report)
        ended = results.take()
        events += [*ended.saves, *ended.released]
    (result, *releases) = events
    assert isinstance(result, SaveResult)
    assert releases == [1] * result.is_held
    assert not results._jobs
