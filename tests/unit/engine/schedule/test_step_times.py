"""Steps bounded by time: a simulated device, on which a step of n tokens takes a + b * n."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledChunk
from engine.runner import NoTurns, StepCosts, TurnWish
from engine.schedule import step_times
from engine.schedule.step_times import NO_BOUND, StepTimes
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_model import fake_config

MS = 1e-3


class Device:
    """Step times on a device, which change when steps are run on it.

    Args:
        fixed_s: time of a step besides its tokens.
        token_s: time of a token.
        costs_s: time of a token, as it was measured at start.
        config: fields of the engine's configuration.
    """

    def __init__(
        self, fixed_s: float, token_s: float, costs_s: float | None = None, **config: object
    ) -> None:
        self.now = 100.0
        self.turns = NoTurns()
        self._fixed_s, self._token_s = fixed_s, token_s
        fields = {"max_step_ms": "auto", "max_num_batched_tokens": 2048, "max_num_seqs": 64}
        costs = StepCosts(costs_s or token_s, 0.0)
        self.times = StepTimes(
            fake_config(**(fields | config)), costs, lambda: self.now, self.turns
        )

    def run(self, num_decoding: int, num_prompt: int = 0, *, delay_s: float = 0.0) -> None:
        """Runs a step."""
        chunks = (ScheduledChunk(99, (0,) * num_prompt, 0, ()),) if num_prompt else ()
        batch = ScheduledBatch(1, chunks, decode_rows=tuple(range(num_decoding)))
        began_at = self.times.now()
        self.now += self._fixed_s + self._token_s * batch.num_tokens + delay_s
        self.times.record_step(batch, began_at)

    def limit_s(self) -> float:
        """Returns the limit of a step in which one sequence decodes."""
        self.budget(1)
        return self.times.limit_s

    def budget(self, num_decoding: int, num_present: int = 0, num_leaving: int = 0) -> int:
        return self.times.prompt_budget(
            num_decoding, num_present, lambda limit: min(limit, num_leaving)
        )

    def seconds(self, num_tokens: int) -> float:
        return self._fixed_s + num_tokens * self._token_s


def test_nothing_is_bounded_while_nobody_decodes() -> None:
    device = Device(2 * MS, MS)
    assert device.budget(0, 40) == NO_BOUND
    assert (device.times.limit_s, device.turns.wish) == (0.0, None)
    assert device.budget(1, 40) < 2048
    assert device.times.limit_s > 0


@pytest.mark.parametrize("costs_s", [0.7 * MS, 1.5 * MS, 5 * MS])
def test_budgets_become_right(costs_s: float) -> None:
    """Whatever the first estimate was, and with steps of both kinds."""
    device = Device(9 * MS, 1.5 * MS, costs_s)
    for _ in range(20):
        device.run(0, 2048)
        device.run(48)
    longest = 4 * device.seconds(48)
    num_tokens = 48 + device.budget(48)
    assert num_tokens % 64 == 0, "few sizes of steps, which are recorded"
    assert device.seconds(num_tokens) < 1.05 * longest < device.seconds(num_tokens + 70)


@pytest.mark.parametrize(("max_step_ms", "num_tokens"), [(1, 84), (140, 128), (270.5, 256)])
def test_a_number_of_milliseconds_is_the_limit(max_step_ms: float, num_tokens: int) -> None:
    device = Device(0.0, MS, max_step_ms=max_step_ms)
    assert device.budget(20) == num_tokens - 20
    assert Device(0.0, MS, max_step_ms=0).budget(20) == NO_BOUND


def test_a_burst_is_bounded_by_what_will_decode_soon() -> None:
    device = Device(0.0, MS)
    assert device.budget(1, 200) == 4 * 64 - 1  # at most as many run as the engine has seats
    assert device.budget(1, 48) == 3 * 64 - 1
    assert device.times.limit_s == pytest.approx(4 * 48 * MS)
    assert device.budget(1, 1) == 64


def test_one_disturbed_step_changes_little() -> None:
    device = Device(2 * MS, MS)
    for _ in range(20):
        device.run(48)
    before = device.budget(48)
    device.run(48, 100, delay_s=60.0)
    device.run(48, delay_s=60.0)
    assert 0.5 * before < device.budget(48) < 2 * before


def test_the_wish_of_an_engine_that_waits_for_its_turn_bounds_others_steps() -> None:
    prompts, streams = Device(0.0, MS), Device(0.0, MS)
    streams.budget(30, 60)
    wish = streams.turns.wish
    assert wish is not None
    assert wish.turn_s == pytest.approx((4 * 60 - 2 * 30) * MS)

    prompts.turns.others_wish = wish
    assert prompts.budget(0, 40) == 128
    assert prompts.turns.wish is None
    assert prompts.budget(10) == 64, "its own streams wish for less"
    off = Device(0.0, MS, max_step_ms=0)
    off.turns.others_wish = TurnWish(0.01, 0.0, 0.01)
    assert off.budget(0) == NO_BOUND


def test_the_wish_of_streams_is_there_whenever_another_thread_reads_it() -> None:
    wishes: list[TurnWish | None] = []

    class ReadTurns(NoTurns):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            wishes.append(self.wish)

    turns = ReadTurns()
    times = StepTimes(fake_config(max_step_ms="auto"), StepCosts(MS, 0.0), lambda: 0.0, turns)
    wishes.clear()
    for _ in range(2):
        times.prompt_budget(1, 1, lambda limit: 0)
    assert None not in wishes
    assert len(wishes) == 2


def test_requests_that_will_decode_elsewhere_lengthen_the_turns_that_others_bear_there() -> None:
    """As if they waited where the streams are, up to the seats there."""
    prompts, streams = Device(0.0, MS), Device(0.0, MS)
    for num_decoding, num_present, num_leaving in ((1, 1, 0), (1, 4, 30), (10, 0, 54), (20, 0, 99)):
        streams.budget(num_decoding, num_present)
        prompts.turns.others_wish = streams.turns.wish
        prompts.budget(0, 99, num_leaving)
        num_soon = min(64, max(num_decoding, num_present) + num_leaving)
        assert prompts.times.limit_s == pytest.approx((4 * num_soon - 2 * num_decoding) * MS)
    numbered = Device(0.0, MS, max_step_ms=100)
    numbered.budget(10)
    assert numbered.turns.wish == TurnWish(pytest.approx(80 * MS), 0.0, pytest.approx(80 * MS))


def test_turns_learn_of_a_handover_before_the_next_step_is_scheduled() -> None:
    class ToldTurns(NoTurns):
        num_handed_over = 0

        def handed_over(self) -> None:
            self.num_handed_over += 1

    turns = ToldTurns()
    driven = DrivenScheduler(
        with_connector=True, role="prefill", turns=turns, max_num_batched_tokens=8
    )
    driven.add(request("a", 10))
    driven.step()
    driven.answer()
    driven.step()
    assert turns.num_handed_over == 0, "the rest of its prompt is still to be computed"
    driven.step()
    assert turns.num_handed_over == 1


def test_waits_for_turns_are_no_times_of_steps() -> None:
    device = Device(0.0, MS)
    began_at = device.times.now()
    device.now += 1.0
    device.turns.waited_s += 0.9
    device.times.record_step(ScheduledBatch(1, decode_rows=(0,)), began_at)
    assert device.limit_s() == pytest.approx(4 * 0.1)


def test_steps_in_flight_count_from_the_end_of_the_one_before() -> None:
    device = Device(0.0, MS)
    batch, first = ScheduledBatch(1, decode_rows=(0,)), device.times.now()
    device.now += 1.0
    second = device.times.now()  # scheduled while the first one computes
    device.now += 1.0
    device.times.record_step(batch, first)
    assert device.limit_s() == pytest.approx(4 * 2.0)
    device.now += 0.5
    device.times.record_step(batch, second)
    assert device.limit_s() == pytest.approx(4 * (2.0 - 0.2 * 1.5))


def test_draft_tokens_are_none_of_a_prompt() -> None:
    device = Device(0.0, MS)
    drafting = ScheduledChunk(0, (0,) * 65, 0, (), num_drafts=64)
    began_at = device.times.now()
    device.now += 0.2
    device.times.record_step(ScheduledBatch(1, (drafting,)), began_at)
    assert device.limit_s() == pytest.approx(4 * (0.2 - 64 * MS))


@given(
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 2048)), max_size=20),
)
def test_some_prompt_tokens_always_fit(
    fixed_s: float, token_s: float, steps: list[tuple[int, int]]
) -> None:
    device = Device(fixed_s, token_s)
    for num_decoding, num_prompt in steps:
        assert device.budget(num_decoding, num_decoding) >= 64
        device.run(num_decoding, num_prompt)


class TimedScheduler(DrivenScheduler):
    """A scheduler whose steps take 2 ms, and 1 ms for each token.

    Attributes:
        steps_run: of each step, the tokens of each request, and the seconds that it took.
    """

    def __init__(self, **config: object) -> None:
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
        super().__init__(num_blocks=400, **(limits | config))
        self.steps_run: list[tuple[dict[str, int], float]] = []

    def begin(self) -> ScheduledBatch | None:
        batch = super().begin()
        if batch is not None:
            seconds = (2 + batch.num_tokens) * MS
            self.now += seconds
            self.steps_run.append((self.shares, seconds))
        return batch


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows chunks of a few tokens, as sequences of the fake model have at most 64."""
    monkeypatch.setattr(step_times, "_MIN_TOKENS", 4)


def _run_burst(**config: object) -> tuple[dict[str, list[int]], list[float]]:
    """Returns the tokens of 48 requests, and the seconds of steps with several prompts' tokens in
    which others decode.
    """
    driven = TimedScheduler(**config)
    driven.add(*(request(f"r{i}", 40, first_token=i % 2, max_tokens=9) for i in range(48)))
    tokens = driven.run()
    shared = [seconds for shares, seconds in driven.steps_run if 1 in shares.values()]
    return tokens, shared


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_gaps_of_a_burst_are_bounded_and_tokens_the_same(async_scheduling: bool) -> None:
    config = {"enable_prefix_caching": False, "async_scheduling": async_scheduling}
    tokens, unbounded = _run_burst(max_step_ms=0, **config)
    same_tokens, bounded = _run_burst(max_step_ms="auto", **config)
    assert same_tokens == tokens
    assert max(unbounded) == pytest.approx(0.258)
    assert 0.06 < max(bounded) < 1.1 * 4 * (2 + 16) * MS
    assert len(bounded) < 2 * len(unbounded)


@pytest.mark.usefixtures("short_chunks")
def test_sequences_with_draft_tokens_run_in_every_step_beside_prompts() -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    driven = TimedScheduler(max_step_ms=1, speculative_config=drafting)
    driven.add(*(request(f"s{i}", 8, max_tokens=40) for i in range(8)))
    driven.steps(3)
    driven.add(*(request(f"p{i}", 60, first_token=0, max_tokens=1) for i in range(3)))
    num_prompts = 0
    for _ in range(12):
        driven.step()
        streams = {name: share for name, share in driven.shares.items() if name[0] == "s"}
        assert len(streams) == 8
        num_prompts += sum(driven.shares.values()) - sum(streams.values())
    assert 24 < num_prompts < 100, "the bound is four tokens of prompts in a step"


@pytest.mark.usefixtures("short_chunks")
def test_short_prompts_overtake_a_partial_one_within_the_bound() -> None:
    driven = TimedScheduler(max_step_ms=24, long_prefill_token_threshold=8)
    driven.add(request("stream", 5, max_tokens=50))
    driven.step()
    driven.add(request("long", 50, first_token=0), request("other long", 50))
    driven.add(*(request(f"short {i}", 4, first_token=0) for i in range(5)))
    driven.step()
    assert driven.shares == {"stream": 1, "long": 8, "short 0": 4, "short 1": 4}
    driven.run()


@pytest.mark.usefixtures("short_chunks")
def test_a_long_prompt_ends_though_every_step_is_longer_than_the_limit() -> None:
    driven = TimedScheduler(max_step_ms=1)
    driven.add(*(request(f"stream {i}", 5, max_tokens=40) for i in range(10)))
    driven.step()
    driven.add(request("long", 50, first_token=0, max_tokens=1))
    driven.step()
    assert driven.shares["long"] == 4
    driven.steps(13)
    assert "long" not in driven.shares


@pytest.mark.parametrize("max_step_ms", ["auto", 0, None])
def test_speeds_are_measured_with_and_without_a_bound(max_step_ms):
    device = Device(9 * MS, 1.5 * MS, costs_s=5 * MS, max_step_ms=max_step_ms)
    assert device.times.prompt_token_s == 5 * MS
    assert device.times.full_step_s == pytest.approx(64 * 5 * MS)
    for _ in range(40):
        device.run(0, 2048)
        device.run(48)
    assert device.times.prompt_token_s == pytest.approx(1.5 * MS, rel=0.05)
    assert device.times.full_step_s == pytest.approx(device.seconds(64), rel=0.05)


def test_speeds_do_not_change_while_the_engine_idles():
    device = Device(9 * MS, 1.5 * MS)
    for _ in range(20):
        device.run(0, 2048)
        device.run(48)
    before = device.times.prompt_token_s, device.times.full_step_s
    device.now += 3600.0
    device.run(48)
    device.run(0, 2048)
    after = device.times.prompt_token_s, device.times.full_step_s
    assert after == pytest.approx(before, rel=0.05)
