"""`EngineCore`: scheduler, runner and connector as one synchronous engine.

    core.run_step(on_outputs)  # schedule -> execute -> commit -> outputs -> saves
    core.wait()                # sleeps while nothing can run

With `--async-scheduling` a step is schedule k + 1 -> commit k, while k + 1 computes: the
scheduler works while the runner does. With pipeline stages as many steps are in flight as stages.

The caller owns the thread: `AsyncEngine` runs a core behind asyncio, `LLM` runs one in the
caller's thread.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.common.errors import BatonError, ConfigurationError, InternalError
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.constraints.grammars import Grammars
from engine.kv_cache.events import KvEvent
from engine.metrics.counts import EngineMetrics, StepTimer
from engine.request import EngineLoad, EngineOutput, EngineRequest
from engine.runner import ModelInfo, PendingOutput, Runner
from engine.schedule.scheduler import Scheduler
from engine.step_watch import StepWatch
from engine.validation import check_request
from kernels.ranks import RanksLostError
from kvstore.connector import Connector, null_connector
from kvstore.guard.metrics import KvMetrics, TransferMetrics
from kvstore.guard.status import BackendStatus
from kvstore.handoff import KvHandoff
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm

if TYPE_CHECKING:
    from baton.common.security.cluster import ClusterSecurity

__all__ = ["EngineCore", "OnOutputs"]

OnOutputs = Callable[[list[EngineOutput]], None]

# If this many steps of a single request fail in a row, the device is lost. Steps of several do not
# count: their requests are tried alone next.
_MAX_FAILED_STEPS = 3

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    batch: ScheduledBatch
    output: PendingOutput


class EngineCore:
    """One engine. Not safe to call from two threads at once.

    Args:
        config: limits.
        runner: executes batches.
        connector: both halves of the KV connector; None runs without one.
        clock: monotonic seconds.

    Attributes:
        config: the limits.
        info: the loaded model's facts.
        form: how KV looks between tiers.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
        kv_metrics: counts of transfers.
        metrics: counts of requests and steps.
        step_watch: notices a step that hangs.
        is_stalled: whether the last step found nothing to run, so that `wait` sleeps.
    """

    is_stalled: bool = False

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        connector: Connector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.info: ModelInfo = runner.info
        self.num_blocks = runner.num_blocks
        self.form = _form_of(config, runner.info)
        self.namespace = self.form.namespace(runner.info.fingerprint)
        self.kv_metrics = KvMetrics()
        self.metrics = EngineMetrics()
        self._timer = StepTimer(self.metrics, clock)
        self.step_watch = StepWatch(clock, runner.costs.prompt_token_s, lambda: runner.turn_wait_s)
        self._runner = runner
        self._clock = clock
        self._woken = threading.Event()
        self._has_results = False  # the connector has reported some since the last poll
        self._on_outputs: OnOutputs | None = None  # while a step computes
        self._early_error: Exception | None = None
        self._end_error: Exception | None = None
        self._num_failed_steps = 0
        self._submitted: list[_SubmittedStep] = []  # the one to commit next first
        self._grammars = Grammars(config, runner.info, self.wake, self.metrics)
        connector_scheduler, self._connector = connector or null_connector()
        self.scheduler = Scheduler(
            config,
            runner.info,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            costs=runner.costs,
            namespace=self.namespace,
            connector=connector_scheduler,
            grammars=self._grammars,
            metrics=self._connect(connector) if connector else None,
            engine_metrics=self.metrics,
            clock=clock,
        )

    def _connect(self, connector: Connector) -> TransferMetrics:
        """Prepares the connector's worker half; returns the metrics for its jobs."""
        scheme, worker = connector[0].scheme, connector[1]
        worker.measure(self.kv_metrics, scheme)
        worker.register_pool(self._runner.kv_pool, self.info.layout, self.form)
        worker.set_waker(self._on_connector_ready)
        worker.watch()
        if not self.config.async_scheduling:
            self._runner.watch_layers(self._between_layers)
        return self.kv_metrics.of(scheme)

    @classmethod
    def build(cls, config: EngineConfig, security: "ClusterSecurity | None" = None) -> "EngineCore":
        """Loads the model and opens the connector.

        Args:
            config: limits.
            security: for the connector's calls to other processes.

        Raises:
            ConfigurationError: the checkpoint, a flag or the connector is bad.
        """
        from engine.runtime.device import with_device_defaults
        from engine.runtime.model_runner import ModelRunner
        from engine.runtime.ranks.processes import start_ranks
        from engine.runtime.ranks.transfers import join_transfers, read_reports
        from kvstore.registry import open_connector

        # The connector first: a bad URL is an error before minutes of loading.
        connector = open_connector(config.kv_connector, security) if config.kv_connector else None
        with ExitStack() as opened:
            if connector is not None:
                opened.callback(connector[1].close)
            config = with_device_defaults(config)
            ranks = start_ranks(config, security)
            if ranks is not None:
                opened.callback(ranks.close)
            try:
                runner = ModelRunner(config, ranks=ranks)
                opened.callback(runner.close)
                if ranks is not None and connector is not None:
                    connector = join_transfers(connector, ranks, ranks.transfers, runner)
                core = cls(config, runner, connector)
            except RanksLostError as error:
                raise ConfigurationError(
                    "a rank of --tensor-parallel-size has ended while it loaded; its log has the "
                    "reason"
                ) from error
            if ranks is not None:
                ranks.watch(lambda: core.end(RanksLostError("a rank of the engine has ended")))
                read_reports(connector, ranks.transfers, core.metrics.rank_reported)
            opened.pop_all()
        return core

    @property
    def kv_backends(self) -> Sequence[BackendStatus]:
        """Whether blocks can be loaded from each backend of the connector and saved to it. Any
        thread may read it.
        """
        return self._connector.statuses

    @property
    def step_timer(self) -> StepTimer:
        """Splits the time of steps into phases."""
        return self._timer

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not had its last output."""
        return self.scheduler.num_unfinished > 0

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: for requests, for a step in flight, or for transfers, which
        may be of finished requests.
        """
        is_in_flight = bool(self._submitted)
        return self.has_unfinished or is_in_flight or self.scheduler.num_transfers > 0

    @property
    def has_saves(self) -> bool:
        """Whether KV is being saved, or lent to other engines that may still read it."""
        return self.scheduler.has_open_saves or self.scheduler.lends_blocks

    def check(self, request: EngineRequest) -> None:
        """Raises for a request that could never finish (`engine.validation`). Thread-safe."""
        check_request(
            request,
            config=self.config,
            info=self.info,
            num_blocks=self.num_blocks,
            namespace=self.namespace,
        )
        if args := request.spec.params.extra_args:
            self._runner.check_extra_args(args)
        if request.spec.params.structured_outputs is not None:
            self._grammars.check()

    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        """Queues a request that `check` accepts; its id must not be live.

        Returns:
            The outputs of candidates that end at once because of the tokens they have.
        """
        self.is_stalled = False
        return self._counted(self.scheduler.add(request))

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests and frees what they hold; returns their last outputs."""
        self.is_stalled = False
        return self.scheduler.abort(request_ids)

    def fail_request(self, request_id: str, error: BatonError) -> EngineOutput:
        """Ends a request that `add_request` has failed to add; returns its output."""
        self.is_stalled = False
        return self.scheduler.fail_request(request_id, error)

    def finish_candidate(self, request_id: str, index: int) -> list[EngineOutput]:
        """Ends one candidate without an output. Unknown ids and indices are ignored.

        If it was the last one, its request ends: its last output, ABORTED, is returned.
        """
        self.is_stalled = False
        return self.scheduler.finish_candidate(request_id, index)

    def move(self, request_id: str) -> list[EngineOutput]:
        """Ends a request that continues on another engine, at once or when its KV is saved.

        Its last output has the reason HANDOFF. Unknown ids are ignored.
        """
        self.is_stalled = False
        return self.scheduler.move(request_id)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache, and forgets the answers that draft tokens come from; returns
        how many blocks the cache held.

        A KV store keeps its blocks.
        """
        return self.scheduler.reset_prefix_cache()

    def watch_kv_events(self, on: bool) -> tuple[KvEvent, ...]:
        """Starts or stops the recording of changes of the prefix cache.

        Returns:
            A snapshot of the cache if `on`, even if recording was on before.
        """
        events = self.scheduler.kv.events
        if on:
            return events.start_recording()
        events.stop_recording()
        return ()

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Returns the changes recorded since the last call."""
        return self.scheduler.kv.events.take_events()

    def release_handoff(self, handoff_id: str) -> None:
        """Ends a handoff's lease and deletes what was saved for it alone."""
        self.scheduler.release_handoff(handoff_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Starts to load blocks of a prompt that a prefill engine is still computing.

        They enter the prefix cache, as far as there is room. The handoff must be for this engine.
        """
        self.is_stalled = False
        self.scheduler.prefetch(handoff)

    def load(self) -> EngineLoad:
        """Returns how busy the engine is."""
        return self.scheduler.load()

    def run_step(self, on_outputs: OnOutputs) -> None:
        """Runs one engine step, delivers its outputs, then starts its KV saves.

        If transfers or grammars have brought outputs, the step delivers these and computes
        nothing: their requests should not wait for a forward pass. Except with
        `--async-scheduling`, outputs of transfers that end while the step computes are delivered
        between its layers.

        Args:
            on_outputs: called with outputs, at most one per candidate of a request in one call.
                It may add and end requests.

        Raises:
            Exception: what the runner raised, if several steps in a row have failed; the engine
                cannot be used any more. Or what `on_outputs` raised.
            BaseException: an interrupt, which ends the requests of the steps in flight; the
                caller aborts the others. The engine can go on, unless it has several ranks.
        """
        self.step_watch.begin()
        try:
            self._run_step(on_outputs)
        except Exception:
            raise
        except BaseException:
            self._abandon_steps()
            raise
        finally:
            self.step_watch.end()

    def _run_step(self, on_outputs: OnOutputs) -> None:
        if self._end_error is not None:
            raise self._end_error
        self._timer.start()
        outputs = self._poll() + self.scheduler.take_compiled() + self.scheduler.expire()
        self._timer.end_phase("transfers")
        if outputs:
            self.is_stalled = False
        else:
            outputs = self._compute_step(on_outputs)
        if outputs:
            on_outputs(self._counted(outputs))
        self._timer.end_phase("commit")
        self._start_transfers()
        self._timer.end()

    def wait(self) -> None:
        """Sleeps while nothing can run: until a transfer ends, a grammar is compiled, a deadline
        passes, or `wake`.

        Call it between steps. It returns at once unless the last step found nothing to run.
        """
        if self.is_stalled:
            deadline = self.scheduler.next_deadline
            left_s = math.inf if deadline is None else deadline - self._clock()
            self._woken.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX))
        self._woken.clear()

    def wake(self) -> None:
        """Ends `wait`. Any thread may call it."""
        self._woken.set()

    def end(self, error: Exception) -> None:
        """Makes the next step raise an error. Any thread may call it."""
        self._end_error = error
        self.wake()

    def finish_saves(self, timeout_s: float) -> None:
        """Waits until no KV is being saved, for at most `timeout_s`. Computes nothing meanwhile.

        Call it before `close`, which cuts saves off.
        """
        give_up_at = self._clock() + timeout_s
        while True:
            self._start_transfers()
            self._poll()
            left_s = give_up_at - self._clock()
            if left_s <= 0 or not self.scheduler.has_open_saves:
                return
            self._woken.wait(left_s)
            self._woken.clear()

    def close(self) -> None:
        """Closes the runner, the connector and the compiler of grammars. Idempotent."""
        with ExitStack() as closing:
            closing.callback(self._grammars.close)
            closing.callback(self._connector.close)
            closing.callback(self._runner.close)

    # A step.

    def _compute_step(self, on_outputs: OnOutputs) -> list[EngineOutput]:
        batch = self.scheduler.schedule()
        self._timer.end_phase("schedule")
        self.step_watch.compute(0 if batch is None else self._num_run(batch))
        self._start_transfers()  # loads run beside the forward pass
        self.is_stalled = batch is None and not self._submitted
        if self.is_stalled:
            return []
        if self.config.async_scheduling:
            return self._overlap(batch)
        assert batch is not None
        return self._run(batch, on_outputs)

    def _start_transfers(self) -> None:
        if work := self.scheduler.build_work():
            self._connector.start(work)
        self._timer.end_phase("transfers")

    def _counted(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Counts the tokens of outputs and returns them."""
        self.metrics.outputs_made(outputs)
        return outputs

    def _run(self, batch: ScheduledBatch, on_outputs: OnOutputs) -> list[EngineOutput]:
        """The readable loop: execute, then commit."""
        self._on_outputs = on_outputs
        try:
            outputs = self._finish(batch, lambda: self._runner.execute(batch))
        finally:
            self._on_outputs = None
        error, self._early_error = self._early_error, None
        if error is not None:
            raise error
        return outputs

    def _num_run(self, batch: ScheduledBatch) -> int:
        """Returns how many tokens a step runs; a draft model's work counts as tokens that take as
        long.
        """
        costs = self._runner.costs
        return batch.num_tokens + round(costs.draft_s(batch) / costs.prompt_token_s)

    def _overlap(self, batch: ScheduledBatch | None) -> list[EngineOutput]:
        """The overlapped loop: submit this step, then commit the oldest one, unless there may be
        more in flight.
        """
        num_open = len(self._submitted)
        is_full = num_open == self.config.max_open_steps - 1
        num_due = min(num_open, int(is_full or batch is None))
        if num_due:  # its result is waited for
            num_tokens = self._num_run(self._submitted[0].batch)
            self.step_watch.compute(max(num_tokens, self._num_run(batch) if batch else 0))
        error = self._submit(batch) if batch is not None else None
        self._timer.end_phase("execute")
        outputs = []
        # Steps end in order, so all earlier ones before one that could not be submitted.
        for _ in range(num_due if error is None else num_open):
            before = self._submitted[0]
            outputs += self._finish(before.batch, before.output.result)
            del self._submitted[0]
        if batch is not None and error is not None:
            # Now, as the next step must not build on KV that this one has not computed.
            outputs += self._fail(batch, error)
        return outputs

    def _submit(self, batch: ScheduledBatch) -> Exception | None:
        """Submits a step; returns the error if that failed."""
        try:
            self._submitted.append(_SubmittedStep(batch, self._runner.submit(batch)))
        except Exception as error:
            return error
        return None

    def _finish(
        self, batch: ScheduledBatch, get_output: Callable[[], StepOutput]
    ) -> list[EngineOutput]:
        try:
            output = get_output()
        except Exception as error:
            return self._fail(batch, error)
        finally:
            self._timer.end_phase("execute")
        self._num_failed_steps = 0
        self._connector.step_ended(batch.step, computed=True)
        return self.scheduler.commit(batch, output)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[EngineOutput]:
        """Ends the request of a failed step, or retries its requests if there are several.

        Raises the error if several steps in a row have failed, or a rank is lost.
        """
        self._connector.step_ended(batch.step, computed=False)
        self.metrics.step_failed()
        outputs = self.scheduler.fail(batch, InternalError("the engine failed on this request"))
        self._num_failed_steps += bool(outputs)
        if isinstance(error, RanksLostError) or self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        _logger.error("step %d failed", batch.step, exc_info=error)
        return outputs

    def _abandon_steps(self) -> None:
        """Ends the requests of interrupted steps, when the device has ended these."""
        for submitted in self._submitted:
            with suppress(Exception):
                submitted.output.result()
        self._submitted.clear()
        for step in self.scheduler.steps_in_flight:
            self._connector.step_ended(step, computed=False)
        self.scheduler.abandon_steps(InternalError("the step was interrupted"))

    # The connector.

    def _poll(self) -> list[EngineOutput]:
        """Processes what transfers have brought."""
        self._has_results = False
        return self.scheduler.apply(self._connector.poll())

    def _on_connector_ready(self) -> None:
        """Called by any thread when the connector's worker half has results."""
        self._has_results = True
        self.wake()

    def _between_layers(self, step: int, num_layers: int) -> None:
        """Called between layers: delivers finished transfers while the step runs."""
        self._connector.layers_computed(step, num_layers)
        if self._on_outputs is None or not self._has_results or self._early_error is not None:
            return
        try:
            if outputs := self._poll():
                self._on_outputs(self._counted(outputs))
        except Exception as error:  # raised after the step, which has not failed itself
            self._early_error = error


def _form_of(config: EngineConfig, info: ModelInfo) -> TransferForm:
    """Returns how KV looks between tiers.

    Raises:
        ConfigurationError: the model's heads cannot be cut that way; names the flag.
    """
    is_auto = config.kv_transfer_dtype == "auto"
    form = TransferForm(
        config.transfer_block_size,
        info.layout.dtype if is_auto else config.kv_transfer_dtype,
        config.kv_transfer_head_slices
        or PoolShare.of(0, config.tensor_parallel_size, info.layout.num_kv_heads).degree,
        config.transfer_layer_slices,
    )
    return BlockSlicing(info.layout, form).form
