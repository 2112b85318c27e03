"""How many draft tokens a sequence gets, by the times of steps."""

import pytest

from engine.batch import DraftWork, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.groups.states import DraftState, TokenHistory
from engine.metrics.counts import EngineMetrics
from engine.runner import StepCosts
from engine.speculation.drafts import Drafts
from tests.support.draw_params import GREEDY

DECODE = ScheduledBatch(1, decode_rows=(0,))
MS = 1e-3


def _drafting(num_drafts: int, work: DraftWork | None = None) -> ScheduledBatch:
    tokens = (1,) * (1 + num_drafts)
    chunk = ScheduledChunk(0, tokens, 9, (GREEDY,), num_drafts=num_drafts, draft_work=work)
    return ScheduledBatch(1, (chunk,))


class Steps:
    """Drafts whose steps take given times; a token takes one millisecond."""

    def __init__(
        self, draft_token_s: float = 0.0, proposal_s: float = 0.0, *, runs_again: bool = False
    ) -> None:
        config = EngineConfig(model="m", speculative_config={"method": "ngram"}, max_num_seqs=4)
        costs = StepCosts(1 * MS, 0.0, draft_token_s, proposal_s)
        self._now = 0.0
        self._drafts = Drafts(
            config, costs, EngineMetrics(), lambda: self._now, runs_again=runs_again
        )

    def run(self, batch: ScheduledBatch, seconds: float, times: int = 1, num_rows: int = 1) -> None:
        for _ in range(times):
            self._drafts.scheduling_began()
            self._drafts.scheduled(num_rows)
            self._now += seconds
            self._drafts.committed(batch)

    def num_drafts(self, right_share: float) -> int:
        """Returns how many draft tokens a sequence gets that are right with this probability."""
        return self._drafts._plan(DraftState(TokenHistory(), 1.0, right_share)).num_drafts


def test_the_more_often_draft_tokens_are_right_the_more_are_made() -> None:
    steps = Steps()
    steps.run(DECODE, 10 * MS, 50)
    steps.run(_drafting(4), 14 * MS, 50)

    numbers = [steps.num_drafts(share) for share in (0.0, 0.05, 0.3, 0.6, 0.9, 1.0)]
    assert numbers == sorted(numbers)
    assert numbers[:2] == [0, 0]
    assert 1 <= numbers[2] < 3 <= numbers[3] < 8 == numbers[5]


def test_accepted_draft_tokens_that_run_again_cost_time() -> None:
    numbers = []
    for runs_again in (False, True):
        steps = Steps(runs_again=runs_again)
        steps.run(DECODE, 3 * MS, 50)
        steps.run(_drafting(4), 7 * MS, 50)
        numbers.append(steps.num_drafts(0.7))
    assert numbers[0] > numbers[1] > 0


def test_no_draft_tokens_are_made_where_tokens_take_their_full_time() -> None:
    steps = Steps()
    steps.run(ScheduledBatch(1, decode_rows=tuple(range(64))), 70 * MS, 50, num_rows=64)

    assert steps.num_drafts(0.6) == 0


def test_one_slow_step_keeps_no_useless_draft_tokens() -> None:
    """A decode step is never slower than one with draft tokens, whatever was measured long ago."""
    steps = Steps()
    steps.run(DECODE, 60 * MS)
    steps.run(_drafting(2), 14 * MS, 5)

    assert steps.num_drafts(0.05) == 0
    assert steps.num_drafts(0.9) > 2


def test_slow_steps_with_draft_tokens_are_forgotten() -> None:
    steps = Steps()
    steps.run(DECODE, 10 * MS, 10)
    steps.run(_drafting(2), 1.0, 100)
    assert steps.num_drafts(0.9) == 0

    steps.run(DECODE, 10 * MS, 6000)
    assert steps.num_drafts(0.9) > 0


@pytest.mark.parametrize(("proposal_ms", "pays"), [(0.5, True), (20.0, False)])
def test_what_a_draft_model_takes_counts(proposal_ms: float, pays: bool) -> None:
    steps = Steps(0.1 * MS, proposal_ms * MS)
    steps.run(DECODE, 10 * MS, 10)
    work = DraftWork(4, (1,) * 5, 4)  # it runs five tokens and the chunk's first one
    seconds = (9 + 5 + 6 * 0.1 + 4 * proposal_ms) * MS
    steps.run(_drafting(4, work), seconds, 50)

    assert (steps.num_drafts(0.8) > 0) == pays
    assert steps._drafts._drafting_s == pytest.approx(9 * MS)
