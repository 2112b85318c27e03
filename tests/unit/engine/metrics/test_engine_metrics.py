"""`EngineMetrics` over an engine on the fake model, whose steps take one second each."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from baton.common.observe.metrics import Histogram, Snapshot
from baton.common.request.structured_outputs import StructuredOutputs
from engine.batch import ScheduledBatch, StepOutput
from engine.loop.core import EngineCore
from engine.metrics.counts import METRICS, RankReport
from engine.metrics.export import (
    VLLM_METRICS,
    EngineDescription,
    EngineExport,
    StatsLog,
    VllmExport,
)
from engine.request import EngineOutput, EngineRequest
from tests.support.driven_scheduler import DrivenScheduler, handed_over
from tests.support.fake_grammar import FakeGrammars
from tests.support.fake_model import fake_config, fake_info
from tests.support.fake_runner import FakeRunner
from tests.support.requests import engine_request

LABELS = EngineDescription(model="fake", block_size=4, kv_dtype="float32", caches_prefixes=True)


class SlowRunner(FakeRunner):
    """Each step takes a second, or fails."""

    now = 0.0
    fails = False

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.now += 1.0
        if self.fails:
            raise RuntimeError("injected by the test")
        return super().execute(batch)


class Rig:
    """An engine with blocks of four tokens, and all its outputs with their times."""

    def __init__(
        self, num_blocks: int = 32, num_host_blocks: int = 0, num_slots: int = 0, **config: object
    ) -> None:
        info = fake_info(4, 64, has_states=num_slots > 0)
        self.runner = SlowRunner(
            info, num_blocks, num_host_blocks=num_host_blocks, num_slots=num_slots
        )
        self.core = EngineCore(fake_config(**config), self.runner, clock=lambda: self.runner.now)
        self.export = EngineExport(self.core.metrics, self.core.scheduler.load, LABELS)
        self.outputs: list[EngineOutput] = []
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, request_id: str, num_tokens: int = 6, **fields: object) -> None:
        prompt = tuple(sum(map(ord, request_id)) >> i & 1 for i in range(num_tokens))
        fields = {"max_tokens": 4, "ignore_eos": True} | fields
        self.take(self.core.scheduler.add(request(request_id, prompt, **fields)))

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        self.outputs += outputs
        for output in outputs:
            self.times[output.request_id, output.index] += [self.runner.now] * len(output.token_ids)

    def run(self, num_steps: int = 500) -> None:
        for _ in range(num_steps):
            if not self.core.scheduler.num_unfinished:
                return
            self.core.run_step(self.take)

    def value(self, name: str, *labels: str) -> float:
        return self.export.snapshot().values[name, *labels]

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self.export.snapshot().histograms[name, *labels]

    def summary(self, name: str, *labels: str) -> tuple[int, float]:
        """Returns the number and the sum of a histogram's values."""
        found = self.histogram(name, *labels)
        return sum(found.counts), pytest.approx(found.total)


def request(request_id: str, prompt: tuple[int, ...], **fields: object) -> EngineRequest:
    return engine_request(request_id=request_id, prompt_token_ids=prompt, **fields)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_blocks": 7, "preemption_mode": "recompute"},
        {"num_blocks": 7, "num_host_blocks": 8, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 5},
    ],
)
def test_counts_agree_with_the_outputs(config):
    rig = Rig(async_scheduling=False, **config)
    rig.add("a", max_tokens=9)
    rig.add("b", max_tokens=12, presence_penalty=0.5)
    rig.add("c", num_tokens=5, n=2, max_tokens=3)
    rig.add("d", num_tokens=7, max_tokens=8, logprobs=2)
    rig.add("e", max_tokens=30)
    rig.run(6)
    rig.take(rig.core.scheduler.abort(["e"]))
    rig.run()
    assert rig.value("baton_engine_generated_tokens") == sum(map(len, rig.times.values()))
    ends = Counter(out.finish_reason.value for out in rig.outputs if out.is_last)
    counted = {name: rig.value("baton_engine_requests", name) for name in ("length", "abort")}
    assert counted == {"length": ends["length"], "abort": 1}
    assert ends["length"] == 4
    gaps = [later - time for times in rig.times.values() for time, later in pairwise(times)]
    assert rig.summary("baton_engine_inter_token_seconds") == (len(gaps), sum(gaps))
    assert rig.summary("baton_engine_request_seconds")[0] == 5
    kind = config.get("preemption_mode", "recompute")
    assert rig.value("baton_engine_preemptions", kind) == rig.core.scheduler.load().num_preemptions
    assert bool(rig.core.scheduler.load().num_preemptions) == ("preemption_mode" in config)


def test_overlapped_steps_count_the_same():
    rig = Rig(async_scheduling=True)
    for name in ("a", "b"):
        rig.add(name, max_tokens=9)
    rig.add("c", n=2, max_tokens=5)
    rig.run()
    assert rig.value("baton_engine_generated_tokens") == 9 + 9 + 2 * 5
    assert rig.summary("baton_engine_inter_token_seconds")[0] == 8 + 8 + 2 * 4
    assert rig.summary("baton_engine_first_token_seconds")[0] == 3


def test_stages_of_a_request():
    rig = Rig(max_num_seqs=1, async_scheduling=False)
    rig.add("first", max_tokens=4)
    rig.add("second", max_tokens=2)
    rig.run()
    assert rig.summary("baton_engine_queue_seconds") == (2, 0 + 4)
    assert rig.summary("baton_engine_prefill_seconds") == (2, 1 + 1)
    assert rig.summary("baton_engine_first_token_seconds") == (2, 1 + 5)
    assert rig.summary("baton_engine_request_seconds") == (2, 4 + 6)
    assert rig.summary("baton_engine_load_seconds") == (0, 0)


def test_a_request_that_ends_in_the_queue_has_no_first_token():
    rig = Rig(max_num_seqs=1, async_scheduling=False)
    rig.add("first")
    rig.add("second")
    rig.run(1)
    rig.core.scheduler.abort(["second"])
    assert rig.summary("baton_engine_first_token_seconds")[0] == 1
    assert rig.value("baton_engine_requests", "abort") == 1


def test_prompt_tokens_found_in_the_cache_are_local():
    rig = Rig(async_scheduling=False)
    for _ in range(2):
        rig.add("a", num_tokens=10)
        rig.run()
    assert rig.value("baton_engine_prompt_tokens") == 20
    assert rig.value("baton_engine_cached_prompt_tokens", "local") == 8
    assert rig.value("baton_engine_cached_prompt_tokens", "loaded") == 0
    assert rig.value("baton_engine_prefix_cache_hits") == 8
    assert rig.value("baton_engine_cached_kv_blocks") > 0


def test_states_that_are_kept_and_tokens_that_lack_one():
    rig = Rig(async_scheduling=False, num_slots=9, state_interval=16)
    prompt = (0, 1) * 13  # of which the states at 16, to go back to, and at 24 are kept
    values = ("state_ends", "kept"), ("state_ends", "skipped"), ("state_hits",)
    for number, (tokens, counts, lost) in enumerate(
        [
            (prompt, (2, 0, 0), 0),
            (prompt, (3, 0, 1), 0),  # it begins at 24, and leaves that state behind
            (prompt[:22] + (0,) * 4, (5, 0, 2), 4),  # it begins at 16
        ]
    ):
        rig.take(rig.core.scheduler.add(request(str(number), tokens, max_tokens=2)))
        rig.run(1)
        assert rig.value("baton_engine_used_state_slots") > 0
        rig.run()
        counted = [rig.value(f"baton_engine_{name}", *labels) for name, *labels in values]
        assert (*counted, rig.value("baton_engine_state_lost_tokens")) == (*counts, lost)
    assert rig.value("baton_engine_state_slots") == 9
    assert rig.value("baton_engine_used_state_slots") == 0
    assert rig.value("baton_engine_cached_state_slots") == 3


def test_states_that_no_slot_is_free_for_are_counted():
    rig = Rig(async_scheduling=False, num_slots=1, state_interval=16)
    rig.add("a", num_tokens=26)
    rig.run()
    assert rig.value("baton_engine_state_ends", "kept") == 0
    assert rig.value("baton_engine_state_ends", "skipped") == 2


def test_prompt_tokens_of_a_handoff_are_loaded():
    driven = DrivenScheduler(with_connector=True, role="decode")
    handed = handed_over("a", num_tokens=10)
    driven.add(handed)
    driven.begin()
    assert driven.scheduler.load().num_loading == 1
    (job,) = driven.work().loads
    driven.now = 0.5
    driven.end_load(job, handed.spec.prompt_token_ids)
    driven.step()
    values, histograms = driven.scheduler._metrics.snapshot()
    assert values["baton_engine_cached_prompt_tokens", "loaded"] == 10
    assert values["baton_engine_cached_prompt_tokens", "local"] == 0
    assert histograms["baton_engine_load_seconds",].total == 0.5
    assert sum(histograms["baton_engine_inter_token_seconds",].counts) == 0


def test_steps_and_their_phases():
    rig = Rig(async_scheduling=False)
    rig.add("a", num_tokens=6, max_tokens=3)
    rig.run()
    rig.core.run_step(rig.take)  # finds nothing to do, so it is not counted
    assert rig.summary("baton_engine_step_seconds", "execute") == (3, 3.0)
    assert rig.summary("baton_engine_step_seconds", "schedule") == (3, 0.0)
    assert rig.summary("baton_engine_step_seconds", "commit") == (3, 0.0)
    assert rig.summary("baton_engine_step_rows") == (3, 3)
    assert rig.summary("baton_engine_step_tokens") == (3, 6 + 1 + 1)


def test_the_seconds_of_each_step_are_passed_to_a_hook():
    rig = Rig(async_scheduling=False)
    steps = []
    rig.core.step_timer.on_step = steps.append
    rig.add("a", num_tokens=6, max_tokens=3)
    rig.run()
    rig.core.run_step(rig.take)  # executes nothing
    assert [step["execute"] for step in steps] == [1.0, 1.0, 1.0]
    assert all(set(step) == {"transfers", "schedule", "execute", "commit"} for step in steps)


def test_rows_with_rules_are_counted_until_their_sequence_ends():
    rig = Rig(async_scheduling=False)
    rig.add("a", max_tokens=5, frequency_penalty=1.0)
    rig.add("b", max_tokens=9)
    rig.run()
    assert rig.value("baton_engine_ruled_rows") == 5
    assert rig.value("baton_engine_constrained_rows") == 0


def test_constrained_rows_and_the_wait_for_a_grammar():
    rig = Rig(async_scheduling=False)
    grammars = FakeGrammars()
    rig.core.scheduler._guides._grammars = grammars
    rig.add("a", max_tokens=20, logprobs=0, structured_outputs=StructuredOutputs(regex="x" * 9))
    assert rig.value("baton_engine_waiting_requests", "grammar") == 1
    assert rig.value("baton_engine_waiting_requests", "blocks") == 0
    grammars.end_one()
    rig.run()
    assert rig.value("baton_engine_constrained_rows") == len(rig.times["a", 0]) > 1
    gaps = len(rig.times["a", 0]) - 1
    assert rig.summary("baton_engine_inter_token_seconds") == (gaps, gaps)


def test_swapped_requests_and_blocks():
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode="swap", async_scheduling=False)
    rig.add("a", max_tokens=12)
    rig.add("b", max_tokens=12)
    while not rig.value("baton_engine_preemptions", "swap"):
        rig.run(1)
    assert rig.value("baton_engine_waiting_requests", "swapped") == 1
    assert rig.value("baton_engine_swapped_kv_blocks") > 0
    assert rig.value("baton_engine_running_sequences") == 1
    rig.run()
    assert rig.value("baton_engine_waiting_requests", "swapped") == 0


def test_a_failed_step():
    rig = Rig(async_scheduling=False)
    rig.add("a")
    rig.runner.fails = True
    rig.run(1)
    assert rig.value("baton_engine_failed_steps") == 1
    assert rig.value("baton_engine_requests", "error") == 1


def test_every_metric_of_the_tables_is_exported():
    rig = Rig()
    rig.core.metrics.rank_reported(RankReport(1, 0.0, 0.0, 0.0, 1))
    for source, table in ((rig.export, METRICS), (VllmExport(rig.export), VLLM_METRICS)):
        values, histograms = source.snapshot()
        assert {name for name, *_ in (*values, *histograms)} == set(table)
        for name, *labels in (*values, *histograms):
            assert len(labels) == len(table[name].labels)


def test_the_names_of_vllm_have_the_same_values():
    rig = Rig(num_blocks=20, async_scheduling=False)
    rig.add("a")
    rig.add("b", max_tokens=30)
    rig.run(4)
    values, histograms = VllmExport(rig.export).snapshot()
    labels = ("fake", "0")
    assert values["vllm:num_requests_running", *labels] == 1
    assert values["vllm:num_requests_waiting", *labels] == 0
    assert values["vllm:prompt_tokens", *labels] == 12
    assert values["vllm:generation_tokens", *labels] == 8
    assert values["vllm:request_success", *labels, "length"] == 1
    assert values["vllm:kv_cache_usage_perc", *labels] == 3 / 20
    assert values["vllm:cache_config_info", *labels, "4", "20", "float32", "True"] == 1
    assert histograms["vllm:time_to_first_token_seconds", *labels].total == 2
    assert sum(histograms["vllm:inter_token_latency_seconds", *labels].counts) == 6


def test_statistics_are_logged_while_the_engine_works(caplog):
    caplog.set_level("INFO", "baton.engine")
    rig = Rig(num_blocks=20, async_scheduling=False)
    stats = StatsLog(rig.export, interval_s=2.0)
    assert stats.next_line() is None
    rig.add("a", num_tokens=8, max_tokens=30)
    rig.run(4)
    assert stats.next_line() == (
        "stats running=1 waiting=0 kv_usage=15.0% prompt_tokens_per_s=4.0"
        " generated_tokens_per_s=2.0 prefix_hit_rate=0.0% preemptions=0"
    )
    rig.run()
    assert "running=0" in (stats.next_line() or "")
    assert stats.next_line() is None


def test_statistics_are_logged_again_and_again_until_close(caplog):
    caplog.set_level("INFO", "baton.engine")
    rig = Rig(async_scheduling=False)
    rig.add("a")

    async def log_twice() -> None:
        logged = asyncio.Event()
        stats = StatsLog(
            _Watched(rig.export, lambda: len(caplog.records) < 2 or logged.set()), 1e-4
        )
        stats.start()
        async with asyncio.timeout(10):
            await logged.wait()
        stats.close()
        assert stats._timer.cancelled()

    asyncio.run(log_twice())
    assert {record.name for record in caplog.records} == {"baton.engine"}


class _Watched(EngineExport):
    """Calls a function before each snapshot."""

    def __init__(self, export: EngineExport, on_snapshot: Callable[[], object]) -> None:
        self.infos = export.infos
        self._export, self._on_snapshot = export, on_snapshot

    def snapshot(self) -> Snapshot:
        self._on_snapshot()
        return self._export.snapshot()
