"""`EngineCore`: scheduler, runner and connector as one synchronous engine.

    outputs = core.step()      # schedule -> execute -> commit
    core.start_transfers()     # of what the step has computed

With `--async-scheduling` a step is schedule k + 1 -> commit k, while k + 1
computes: the scheduler's work hides behind the runner's.

The caller owns the thread: `AsyncEngine` runs a core behind asyncio, `LLM`
runs one in the caller's thread.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from baton.errors import InternalError
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.kv_cache.events import KvEvent
from engine.request import EngineLoad, EngineRequest, RequestOutput
from engine.runner import ModelInfo, PendingOutput, Runner
from engine.schedule.scheduler import Scheduler
from engine.validation import check_request
from kvstore.connector import KvConnectorScheduler, KvConnectorWorker
from kvstore.handoff import KvHandoff
from kvstore.measured import MeasuredWorker
from kvstore.metrics import KvMetrics
from kvstore.transfer_form import BlockSlicing, TransferForm

__all__ = ["EngineCore"]

# As many steps failing in a row mean that the device is lost, not that a request is bad.
_MAX_FAILED_STEPS = 3

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    batch: ScheduledBatch
    output: PendingOutput


class EngineCore:
    """One engine. Not safe to call from two threads at once.

    Args:
        config: limits and role.
        runner: executes batches.
        connector: both halves of the KV connector, if there is one.
        clock: monotonic seconds.

    Attributes:
        config: as given.
        info: the loaded model's facts.
        form: what KV looks like between tiers.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
        kv_metrics: what transfers add up to.
        is_stalled: the last step found nothing to run; see `wait`.
    """

    is_stalled: bool = False

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        connector: tuple[KvConnectorScheduler, KvConnectorWorker] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.info: ModelInfo = runner.info
        self.num_blocks = runner.num_blocks
        self.form = _form_of(config, runner.info)
        self.namespace = self.form.namespace(runner.info.fingerprint)
        self._runner = runner
        self.kv_metrics = KvMetrics()
        self._connector = _measured(connector, self.kv_metrics) if connector else None
        self._woken = threading.Event()
        self._has_news = False  # of the connector's worker half
        self._tell_early: Callable[[list[RequestOutput]], None] | None = None
        self._early_error: Exception | None = None
        self._clock = clock
        self._num_failed_steps = 0
        self._in_flight: _SubmittedStep | None = None
        self.scheduler = Scheduler(
            config,
            runner.info,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            costs=runner.costs,
            namespace=self.namespace,
            connector=connector[0] if connector else None,
            metrics=self.kv_metrics.of(connector[0].scheme) if connector else None,
            clock=clock,
        )
        if self._connector is not None:
            self._connector.register_pool(runner.kv_pool, runner.info.layout, self.form)
            self._connector.set_waker(self._take_news)
            if not config.async_scheduling:
                runner.watch_layers(self._come_by)

    @classmethod
    def build(cls, config: EngineConfig) -> "EngineCore":
        """Loads the model and opens the connector.

        Raises:
            ConfigurationError: the checkpoint, a flag or the connector is bad.
        """
        from engine.runtime.device import with_device_defaults
        from engine.runtime.model_runner import ModelRunner
        from kvstore.registry import open_connector

        # The connector first: a bad URL is told before minutes of loading.
        connector = open_connector(config.kv_connector) if config.kv_connector else None
        with ExitStack() as opened:
            if connector is not None:
                opened.callback(connector[1].close)
            config = with_device_defaults(config)
            runner = ModelRunner(config)
            opened.callback(runner.close)
            core = cls(config, runner, connector)
            opened.pop_all()
        return core

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not had its last output."""
        return self.scheduler.num_unfinished > 0

    @property
    def has_work(self) -> bool:
        """Whether anything is left to step for, transfers of finished requests and a step
        in flight included.
        """
        is_in_flight = self._in_flight is not None
        return self.has_unfinished or is_in_flight or self.scheduler.num_transfers > 0

    def check(self, request: EngineRequest) -> None:
        """Refuses a request that could never finish; see `engine.validation`. Thread-safe."""
        check_request(
            request,
            config=self.config,
            info=self.info,
            num_blocks=self.num_blocks,
            namespace=self.namespace,
        )

    def add_request(self, request: EngineRequest) -> list[RequestOutput]:
        """Queues a request that `check` accepts; its id must not be live.

        Returns:
            The outputs of candidates that end at once because of the tokens they have.
        """
        self.is_stalled = False
        return self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and frees what they hold; returns their last outputs."""
        self.is_stalled = False
        return self.scheduler.abort(request_ids)

    def finish_candidate(self, request_id: str, index: int) -> list[RequestOutput]:
        """Ends one candidate without an output, and with the last one its request: its
        last output, ABORTED, is returned. Unknown ones are passed over.
        """
        self.is_stalled = False
        return self.scheduler.finish_candidate(request_id, index)

    def reset_prefix_cache(self) -> int:
        """Forgets what is cached here, for requests to come; returns how many blocks.

        What a KV store holds stays there.
        """
        return self.scheduler.kv.reset_prefix_cache()

    def watch_kv_events(self, on: bool) -> tuple[KvEvent, ...]:
        """Starts recording what the prefix cache stores and forgets, or stops.

        Returns:
            A snapshot of the cache, where recording starts, also if it did before.
        """
        events = self.scheduler.kv.events
        if on:
            return events.start_recording()
        events.stop_recording()
        return ()

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """What was recorded since the last call."""
        return self.scheduler.kv.events.take_events()

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what the connector kept for one handoff alone."""
        self.scheduler.release_handoff(handoff_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Begins to load full blocks of a prompt that prefill is still computing into the
        prefix cache, as far as there is room. The handoff is for this engine.
        """
        self.is_stalled = False
        self.scheduler.prefetch(handoff)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self.scheduler.load()

    def wake(self) -> None:
        """Ends `wait`. Any thread may call it."""
        self._woken.set()

    def tell_early(self, tell: Callable[[list[RequestOutput]], None]) -> None:
        """Has `tell` hear of what transfers bring while a step computes a prompt, instead of with
        the step's outputs: blocks that are saved of one chunk are loaded by others while the
        next is computed. It is called by the thread that steps, and not in the overlapped loop.
        """
        self._tell_early = tell

    def wait(self) -> None:
        """Sleeps while nothing can run: until a transfer ends, a deadline passes or `wake`."""
        if self.is_stalled:
            deadline = self.scheduler.next_deadline
            left_s = math.inf if deadline is None else deadline - self._clock()
            self._woken.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX))
        self._woken.clear()

    def step(self) -> list[RequestOutput]:
        """One engine step: returns outputs, at most one per candidate of a request.

        What transfers brought is told first, by a step that runs nothing. When the outputs
        are told, `start_transfers` is due.

        Raises:
            Exception: whatever the runner raised, where it failed on several
                steps in a row; the engine is of no more use then.
        """
        outputs = self._poll() + self.scheduler.expire()
        if outputs:
            # Who waits for these shall not wait for a forward pass, too: the next step runs it.
            self.is_stalled = False
            return outputs
        batch = self.scheduler.schedule()
        # Loads go out before the forward pass, to run beside it.
        self.start_transfers()
        self.is_stalled = batch is None and self._in_flight is None
        if not self.is_stalled:
            outputs += self._overlap(batch) if self.config.async_scheduling else self._run(batch)
        return outputs

    def start_transfers(self) -> None:
        """Starts what the last step wants saved, which may take as long as copying it. The next
        step would, too.
        """
        if self._connector is not None and (work := self.scheduler.build_work()):
            self._connector.start(work)

    def close(self) -> None:
        """Ends the runner and closes the connector. Idempotent."""
        try:
            self._runner.close()
        finally:
            if self._connector is not None:
                self._connector.close()

    def _run(self, batch: ScheduledBatch | None) -> list[RequestOutput]:
        """The readable loop: execute, then commit."""
        assert batch is not None
        outputs = self._finish(batch, lambda: self._runner.execute(batch))
        if self._early_error is not None:
            raise self._early_error
        return outputs

    def _overlap(self, batch: ScheduledBatch | None) -> list[RequestOutput]:
        """The overlapped loop: hand this step over, then commit the one before it."""
        before, self._in_flight = self._in_flight, None
        error = self._submit(batch) if batch is not None else None
        outputs = self._finish(before.batch, before.output.result) if before else []
        if batch is not None and error is not None:
            # At once: the next step must not build on what this one left undone.
            outputs += self._fail(batch, error)
        return outputs

    def _submit(self, batch: ScheduledBatch) -> Exception | None:
        """Hands a step over; returns why that failed."""
        try:
            self._in_flight = _SubmittedStep(batch, self._runner.submit(batch))
        except Exception as error:
            return error
        return None

    def _finish(
        self, batch: ScheduledBatch, get_output: Callable[[], StepOutput]
    ) -> list[RequestOutput]:
        try:
            output = get_output()
        except Exception as error:
            return self._fail(batch, error)
        self._num_failed_steps = 0
        self._tell_ended(batch, computed=True)
        return self.scheduler.commit(batch, output)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        """Ends what a step was for; raises the error where several failed in a row."""
        self._tell_ended(batch, computed=False)
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        _logger.error("step %d failed", batch.step, exc_info=error)
        return self.scheduler.fail(batch, InternalError("the engine failed on this request"))

    def _poll(self) -> list[RequestOutput]:
        """What transfers have brought."""
        if self._connector is None:
            return []
        self._has_news = False
        return self.scheduler.apply(self._connector.poll())

    def _take_news(self) -> None:
        """The connector's worker half has news. Any thread."""
        self._has_news = True
        self.wake()

    def _come_by(self, step: int, num_layers: int) -> None:
        """The thread that steps comes by, in the midst of one."""
        assert self._connector is not None
        self._connector.layers_computed(step, num_layers)
        if self._tell_early is None or not self._has_news or self._early_error is not None:
            return
        try:
            if outputs := self._poll():
                self._tell_early(outputs)
        except Exception as error:  # no failure of this step: what transfers brought is lost
            self._early_error = error

    def _tell_ended(self, batch: ScheduledBatch, *, computed: bool) -> None:
        if self._connector is not None:
            self._connector.step_ended(batch.step, computed=computed)


def _measured(
    connector: tuple[KvConnectorScheduler, KvConnectorWorker], metrics: KvMetrics
) -> KvConnectorWorker:
    """The worker half, whose jobs are counted, and what its backend does."""
    scheduler, worker = connector
    worker.measure(metrics, scheduler.scheme)
    return MeasuredWorker(worker, metrics.of(scheduler.scheme))


def _form_of(config: EngineConfig, info: ModelInfo) -> TransferForm:
    """What KV looks like between tiers.

    Raises:
        ConfigurationError: the model's heads cannot go so; names the flag.
    """
    is_auto = config.kv_transfer_dtype == "auto"
    form = TransferForm(
        config.transfer_block_size,
        info.layout.dtype if is_auto else config.kv_transfer_dtype,
        config.kv_transfer_head_slices,
        config.kv_transfer_layer_slices,
    )
    return BlockSlicing(info.layout, form).form
