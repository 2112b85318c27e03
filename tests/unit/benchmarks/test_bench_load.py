"""The load generator: order, concurrency, arrival times, lost requests."""

import asyncio

import pytest

from baton.common.errors import ConfigurationError, UnavailableError
from benchmarks.load import LoadLimits, run_load, warm_up, warm_up_requests
from benchmarks.request import BenchRequest, LostRequestError

NO_LIMITS = LoadLimits(max_concurrency=None, request_timeout_s=30)


class FakeTarget:
    """Sends a request's tokens in messages of two. A prompt with 13 is lost, one with 14 hangs.

    Attributes:
        began: prompts in the order in which they arrived.
        ended: prompts in the order in which they ended.
        peak: the most requests at once.
    """

    def __init__(self):
        self.began, self.ended, self.peak = [], [], 0

    async def stream(self, request):
        prompt = tuple(request.prompt_token_ids)
        self.began.append(prompt)
        self.peak = max(self.peak, len(self.began) - len(self.ended))
        try:
            for start in range(0, request.num_output_tokens, 2):
                await asyncio.sleep(0)
                yield min(2, request.num_output_tokens - start)
                if 13 in prompt:
                    raise LostRequestError("gone")
                if 14 in prompt:
                    await asyncio.Event().wait()
        finally:
            self.ended.append(prompt)


def numbered_requests(count, **fields):
    return [BenchRequest((index,), 5, **fields) for index in range(count)]


async def test_records_are_in_order_and_hold_every_token():
    requests = [BenchRequest((1,) * length, length) for length in (3, 1, 2)]
    records = await run_load(requests, FakeTarget(), NO_LIMITS)
    assert [record.num_prompt_tokens for record in records] == [3, 1, 2]
    assert [len(record.token_times_s) for record in records] == [3, 1, 2]
    assert all(record.error is None for record in records)
    times = records[0].token_times_s
    assert records[0].sent_s <= times[0] == times[1] <= times[2] <= records[0].ended_s


@pytest.mark.parametrize(("cap", "peak"), [(None, 7), (3, 3), (1, 1)])
async def test_concurrency_reaches_and_never_exceeds_the_cap(cap, peak):
    target = FakeTarget()
    await run_load(numbered_requests(7), target, LoadLimits(cap, 30))
    assert target.peak == peak
    assert target.began == [(index,) for index in range(7)]


async def test_a_turn_waits_for_the_previous_turn_even_if_that_one_is_lost():
    target = FakeTarget()
    turns = [BenchRequest((13,), 2), BenchRequest((1,), 2, after=0), BenchRequest((2,), 2, after=1)]
    records = await run_load(turns, target, NO_LIMITS)
    assert target.began == target.ended == [(13,), (1,), (2,)]
    assert target.peak == 1
    assert [record.error for record in records] == ["gone", None, None]


async def test_requests_are_sent_at_their_arrival_times():
    requests = [BenchRequest((1,), 1, arrival_s=0.06), BenchRequest((2,), 1, arrival_s=0.03)]
    target = FakeTarget()
    late, early = await run_load(requests, target, NO_LIMITS)
    assert target.began == [(2,), (1,)]
    assert late.sent_s >= 0.06
    assert early.sent_s >= 0.03


async def test_a_hanging_request_counts_as_lost_and_is_cancelled():
    target = FakeTarget()
    (record,) = await run_load([BenchRequest((14,), 4)], target, LoadLimits(None, 0.05))
    assert record.error == "no end within 0.05 s"
    assert len(record.token_times_s) == 2
    assert target.ended == [(14,)]


async def test_every_end_is_reported():
    ends = []
    records = await run_load(numbered_requests(3), FakeTarget(), NO_LIMITS, ends.append)
    assert sorted(ends, key=id) == sorted(records, key=id)


async def test_warm_up_prompts_have_equal_lengths_and_different_tokens():
    requests = [BenchRequest((1,) * 8, 5, arrival_s=9.0), *numbered_requests(3)]
    warm_ups = warm_up_requests(requests, 2, vocab_size=100)
    assert [len(request.prompt_token_ids) for request in warm_ups] == [8, 1]
    assert warm_ups[0].arrival_s is None
    assert warm_ups[0].prompt_token_ids != requests[0].prompt_token_ids
    await warm_up(FakeTarget(), NO_LIMITS, warm_ups)
    with pytest.raises(UnavailableError, match="no warm-up request succeeded: gone"):
        await warm_up(FakeTarget(), NO_LIMITS, [BenchRequest((13,), 2)])


@pytest.mark.parametrize(
    ("limits", "message"),
    [((0, 1.0), "--max-concurrency is 0"), ((1, 0.0), "--request-timeout-s is 0")],
)
def test_impossible_limits_are_refused(limits, message):
    with pytest.raises(ConfigurationError, match=message):
        LoadLimits(*limits)
