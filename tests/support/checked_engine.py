"""An engine on the fake model, whose every output is checked against the reference decoder."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from baton.common.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
)
from engine.batch import ScheduledBatch
from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from engine.kv_cache.spec import slicing_of
from engine.loop.core import EngineCore
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.runner import ModelInfo
from engine.validation import num_blocks_needed
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from tests.support.engine_work import has_work
from tests.support.fake_connector import FakeWorker, Store
from tests.support.fake_grammar import FakeGrammars
from tests.support.fake_model import fake_config, token_logprobs
from tests.support.fake_runner import FakeRunner
from tests.support.prefill_core import with_role
from tests.support.reference_decoding import Expected, candidates, expected_results, first_beams

__all__ = ["CheckedEngine", "CheckedRequest"]


@dataclass
class CheckedRequest:
    """A request, its expected outputs, and its outputs so far on all tiers.

    Attributes:
        request: the request.
        expected: expected outputs by candidate, or by returned hypothesis of a ranked request.
        received: tokens so far, by the same index.
        ended: the indices that have ended.
        has_prompt: whether its first tokens, with the prompt's log-probabilities, have come.
    """

    request: EngineRequest
    expected: list[Expected]
    received: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    has_prompt: bool = False

    @classmethod
    def of(cls, request: EngineRequest, info: ModelInfo) -> "CheckedRequest":
        self = cls(request, expected_results(request, info.max_model_len))
        if not request.spec.params.is_ranked and request.progress:
            self.received = {p.index: list(p.output_token_ids) for p in request.progress}
            self.ended = set(range(request.spec.params.num_candidates)) - self.received.keys()
        return self

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.expected)

    def check_output(self, output: EngineOutput) -> None:
        """Checks and records tokens of a candidate, or its end by STOP or LENGTH."""
        index, request = output.index, self.request
        assert index not in self.ended, "a candidate that has ended has another output"
        assert output.finish_reason or (output.token_ids and not request.spec.params.is_ranked)
        expected, tokens = self.expected[index], self.received.setdefault(index, [])
        tokens += output.token_ids
        assert tuple(tokens) == expected.token_ids[: len(tokens)]
        before = tuple(tokens[: len(tokens) - len(output.token_ids)])
        self._check_details(output, self._prefixes(before, output.token_ids), output.token_ids)
        self._check_prompt(output)
        if output.finish_reason:
            score = output.score if request.spec.params.is_ranked else expected.score
            assert Expected(tuple(tokens), output.finish_reason, score).same_as(expected)
            self.ended.add(index)
        assert output.is_last == self.is_over

    def _prefixes(self, before: tuple[int, ...], newest: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the generated tokens before each of the newest ones."""
        return [(*before, *newest[:index]) for index in range(len(newest))]

    def _check_details(
        self,
        output: EngineOutput,
        prefixes: Sequence[tuple[int, ...]],
        token_ids: Sequence[int],
    ) -> None:
        """Checks that each token comes with its log-probabilities, if they are asked for."""
        num_top, prompt = self.request.spec.params.logprobs, self.request.spec.prompt_token_ids
        if num_top is None:
            assert not output.logprobs
            return
        expected = [
            token_logprobs((*prompt, *prefix), token_id, num_top)
            for prefix, token_id in zip(prefixes, token_ids, strict=True)
        ]
        assert list(output.logprobs) == expected

    def _check_prompt(self, output: EngineOutput) -> None:
        """Checks that the prompt's log-probabilities come whole and once, with the first tokens."""
        num_top, prompt = (
            self.request.spec.params.prompt_logprobs,
            self.request.spec.prompt_token_ids,
        )
        is_first = not (self.has_prompt or self.request.has_begun)
        self.has_prompt = True
        expected = [
            token_logprobs(prompt[:index], prompt[index], num_top)
            for index in range(1, len(prompt))
            if num_top is not None and is_first
        ]
        assert list(output.prompt_logprobs) == expected

    def check_first_tokens(self, output: EngineOutput, info: ModelInfo) -> None:
        """Checks prefill's tokens: the first tokens of the candidates, or the first beams."""
        request, is_ranked = self.request, self.request.spec.params.is_ranked
        assert not output.is_last
        assert not self.received
        if request.spec.params.beam_width is not None:
            pairs = tuple(zip(output.token_ids, output.first_logprobs, strict=True))
            assert pairs == first_beams(request)
            return
        firsts = [each.token_ids[0] for each in candidates(request, info.max_model_len)]
        assert list(output.token_ids) == firsts
        assert bool(output.first_logprobs) == is_ranked
        self._check_details(output, [()] * len(firsts), firsts)
        self._check_prompt(output)


class CheckedEngine:
    """One engine core with its runner and connector worker, and the requests that run on it.

    Args:
        info: the fake model's description.
        num_blocks: KV blocks in the pool.
        store: the connector's store; None runs without a connector.
        clock: the engine's clock.
        num_host_blocks: KV blocks in the host pool.
        num_slots: slots for states, if the model has some.
        num_host_slots: slots in the host pool.
        submits: see `FakeRunner`.
        lends: see `FakeWorker`.
        ends_in_steps: whether transfers end while steps compute.
        role: "prefill" hands every request over.
        config: fields of the engine's configuration.
    """

    def __init__(
        self,
        info: ModelInfo,
        num_blocks: int,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        num_host_blocks: int = 0,
        num_slots: int = 0,
        num_host_slots: int = 0,
        submits: str = "late",
        lends: bool = False,
        ends_in_steps: bool = False,
        role: str = "both",
        **config: object,
    ) -> None:
        if store is not None:
            config["kv_connector"] = "fake://"
        self.config = fake_config(block_size=info.layout.block_size, **config)
        states = slicing_of(self.config, info.layout, info.states).slots
        self.info = info = replace(info, states=states)
        self.clock = clock
        self.worker = FakeWorker(
            store if store is not None else {}, lends=lends, ends_in_steps=ends_in_steps
        )
        self.runner = FakeRunner(
            info,
            num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            num_host_slots=num_host_slots,
            max_rows=self.config.max_running,
            submits=submits,
        )
        scheduler = KvConnectorScheduler(
            "fake", lease_s=1, finds_by_key=not lends, saves_ahead=not lends
        )
        connector = (scheduler, self.worker)
        self.hands_over = role == "prefill"
        used = connector if store is not None else None
        self.core = with_role(EngineCore(self.config, self.runner, used, clock), role)
        self._grammars = FakeGrammars()
        self.core.scheduler._guides._grammars = self._grammars
        self.live: dict[str, CheckedRequest] = {}
        self.finished: dict[str, CheckedRequest] = {}
        self.handed_over: list[tuple[CheckedRequest, EngineOutput, KvHandoff | None]] = []
        self.saved: list[KvHandoff] = []
        self.moved: list[tuple[CheckedRequest, KvHandoff | None]] = []
        self._first_tokens: dict[str, EngineOutput] = {}
        self._num_saved = Counter[str]()  # by handoff
        self.followed_keys: set[tuple[int, bytes]] = set()
        self.counts = Counter[str]()
        self._next_event = 0  # 0 while nobody follows
        self._num_fallible_steps = 0  # steps that may still end requests as not finite
        self._bad_request = ""  # every step with it raises
        self._failed_alone = set[str]()
        self.runner.breaks = self._breaks

    # Operations.

    def add(self, checked: CheckedRequest) -> None:
        """Queues a request; checks that the engine refuses one that can never fit."""
        request = checked.request
        submitted = replace(request, hands_over=self.hands_over)
        num_branches = 1 if self.hands_over else request.spec.params.num_candidates
        lacks_slots = self.info.states is not None and num_branches > self.runner.num_slots
        needed = num_blocks_needed(submitted, self.config, self.info)
        if lacks_slots or needed > self.core.num_blocks:
            with pytest.raises(ResourceExhaustedError):
                self.core.check(request)
            return
        self.core.check(request)
        if request.spec.request_id == self._bad_request:
            self._bad_request = ""  # that one has ended; this one has its id
        self.live[request.spec.request_id] = checked
        for output in self.core.scheduler.add(request):
            self._on_output(output)

    def abort(self, request_id: str) -> None:
        outputs = self.core.scheduler.abort([request_id, "unknown"])
        assert [(o.finish_reason, o.is_last) for o in outputs] == [(FinishReason.ABORTED, True)]
        del self.live[request_id]
        self._first_tokens.pop(request_id, None)

    def move(self, request_id: str) -> None:
        """Ends a request that continues elsewhere, now or when its KV is saved."""
        for output in self.core.scheduler.move(request_id):
            self._on_output(output)

    def finish_candidate(self, request_id: str, index: int) -> None:
        """Ends a candidate, as a router does when it finds a stop text."""
        checked = self.live[request_id]
        outputs = self.core.scheduler.finish_candidate(request_id, index)
        checked.ended.add(index)
        ends = [(output.finish_reason, output.is_last) for output in outputs]
        assert ends == ([(FinishReason.ABORTED, True)] if checked.is_over else [])
        if checked.is_over:
            del self.live[request_id]

    def break_next_step(self, fault: str) -> None:
        """Injects a fault, but not so often in a row that the engine gives up."""
        if fault == "raise" and self._ends_when_a_step_fails:
            return
        if self.runner.num_raised_in_row == 0 and self.runner.fault is None:
            self.runner.fault = fault

    def break_request(self, request_id: str) -> None:
        """Makes every step with a request raise, until it has ended. Only one at a time."""
        if self._ends_when_a_step_fails:
            return
        if self.runner.num_raised_in_row == 0 and self._bad_request not in self.live:
            self._bad_request = request_id

    @property
    def _ends_when_a_step_fails(self) -> bool:
        """Whether the engine would have several ranks, which end when a step fails."""
        return self.core.config.num_ranks > 1

    def heal(self) -> None:
        """Injects no further fault."""
        self.runner.fault = None
        self._bad_request = ""

    def step(self) -> None:
        """Runs one step and checks outputs, batches and invariants."""
        if self.runner.fault == "not finite":
            # The failure is seen when the step is committed, with the next ones in flight.
            self._num_fallible_steps = 3 + self.config.max_open_steps
        self._grammars.end_one()
        self.core.run_step(self._on_outputs)
        self._check_runner()
        if not self.core.is_stalled and self.runner.fault is None:
            self._num_fallible_steps = max(0, self._num_fallible_steps - 1)
        self._check_batches()
        self.check()

    def watch(self) -> None:
        """Starts or restarts following the prefix cache's events."""
        events, snapshot = self.core.scheduler.kv.events.start_recording()
        if self._next_event:
            self._follow(events)
        self._next_event = snapshot[0].sequence_number
        self._follow(snapshot)
        self.check()

    def unwatch(self) -> None:
        self.core.scheduler.kv.events.stop_recording()
        self.followed_keys, self._next_event = set(), 0

    # Checks.

    def check(self) -> None:
        self.core.scheduler.check()
        self._check_runner()
        self._follow(self.core.scheduler.kv.events.take_events())
        if self.core.scheduler.kv.events.is_recording:
            pool, groups = (
                self.core.scheduler.kv.pool,
                range(self.core.scheduler.kv.spec.num_layer_groups),
            )
            assert self.followed_keys == {(g, key) for g in groups for key in pool.cached_keys(g)}

    def finish(self, most_steps: int) -> None:
        """Steps until there is no work; checks that nothing is left."""
        for _ in range(most_steps):
            if not has_work(self.core):
                break
            self.step()
        self.step()  # with async scheduling, the last step is still to be committed
        self.check_is_empty()

    def check_is_empty(self) -> None:
        """Checks that no request is left and no block is held."""
        load = self.core.scheduler.load()
        assert not self.live, "a request starved"
        assert not has_work(self.core)
        assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
        assert load.num_free_blocks == self.core.num_blocks, "a block leaked"
        assert self.core.scheduler.kv.pool.num_free_slots == self.runner.num_slots, "a slot leaked"
        assert load.num_swapped_blocks == 0, "a host block leaked"

    def _check_runner(self) -> None:
        if self.runner.failures:
            raise self.runner.failures[0]

    def _check_batches(self) -> None:
        for batch in self.runner.batches:
            assert batch.num_tokens <= self.config.max_step_tokens
            assert all(chunk.num_tokens <= self.config.max_chunk for chunk in batch.chunks)
            self.counts["swapped blocks"] += len(batch.swap_outs)
            self.counts["copied blocks"] += len(batch.block_copies)
        self.runner.batches.clear()

    def _follow(self, events: tuple[KvEvent, ...]) -> None:
        for event in events:
            # The parts of a snapshot have one number.
            assert self._next_event - 1 <= event.sequence_number <= self._next_event
            self._next_event = event.sequence_number + 1
            match event:
                case BlocksStored():
                    keys = {(event.layer_group, key) for key in event.keys}
                    assert self.followed_keys.isdisjoint(keys)
                    self.followed_keys |= keys
                case BlocksRemoved():
                    keys = {(event.layer_group, key) for key in event.keys}
                    assert self.followed_keys >= keys
                    self.followed_keys -= keys
                case CacheCleared():
                    self.followed_keys.clear()

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        assert outputs
        self._check_runner()
        counts = Counter[tuple[str, int]]()
        for output in outputs:
            if output.finish_reason is not FinishReason.ERROR and output.token_ids:
                counts[output.request_id, output.index] += 1
            self._on_output(output)
        assert max(counts.values(), default=1) == 1, "a candidate has two outputs in a step"

    def _on_output(self, output: EngineOutput) -> None:
        checked = self.live[output.request_id]
        if output.saved is not None:
            self._on_saved(checked.request, output.saved)
            return
        match output.finish_reason:
            case None if self.hands_over:
                checked.check_first_tokens(output, self.info)
                self._first_tokens[output.request_id] = output
            case None | FinishReason.STOP | FinishReason.LENGTH:
                checked.check_output(output)
            case FinishReason.HANDOFF:
                assert output.is_last
                assert not output.token_ids
                if not self.hands_over:
                    self.moved.append((checked, output.handoff))
                    del self.live[output.request_id]
                    return
                first = self._first_tokens.pop(output.request_id)
                self.handed_over.append((checked, first, output.handoff))
            case FinishReason.ERROR:
                assert output.is_last
                self._check_error(checked.request, output)
            case unexpected:
                raise AssertionError(unexpected)
        if output.is_last:
            self._first_tokens.pop(output.request_id, None)
            self.finished[output.request_id] = self.live.pop(output.request_id)

    def _on_saved(self, request: EngineRequest, saved: KvHandoff) -> None:
        """Checks a report of saved blocks: full ones, in order, each once per handoff id."""
        self._num_saved[saved.handoff_id] += len(saved.block_keys)
        num_tokens = self._num_saved[saved.handoff_id] * self.config.transfer_block_size
        assert saved.block_keys
        assert saved.num_tokens == num_tokens <= len(request.spec.prompt_token_ids)
        self.saved.append(saved)

    def _check_error(self, request: EngineRequest, output: EngineOutput) -> None:
        match output.error:
            case DeadlineExceededError():
                assert request.spec.deadline is not None
                assert request.spec.deadline <= self.clock()
            case AbortedError():
                assert "could not be loaded" in output.error.message
                assert self.config.kv_load_failure_policy == "fail"
                assert request.handoff is not None or request.prefix is None
            case _:
                assert isinstance(output.error, InternalError)
                if "not finite" in output.error.message:
                    assert self._num_fallible_steps > 0, "no step was broken"
                    return
                assert request.spec.request_id in self._failed_alone
                self._failed_alone.discard(request.spec.request_id)

    def _breaks(self, batch: ScheduledBatch) -> bool:
        """Whether the step has the bad request. Notes the request of a step that fails alone."""
        in_flight = self.core.scheduler._in_flight
        (record,) = (record for record in in_flight if record.batch is batch)
        names = [group.request_id for group in record.ends()]
        breaks = self._bad_request in names
        if (breaks or self.runner.fault == "raise") and len(names) == 1:
            self._failed_alone.add(names[0])
        return breaks
