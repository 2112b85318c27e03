"""`EngineCore`: scheduler, runner and connector as one synchronous engine.

    core.run_step(on_outputs)  # schedule -> execute -> commit -> outputs -> saves
    core.wait()                # sleeps while nothing can run

An engine that computes in turn with others waits for its turn before it schedules, so that the step
has the requests that came or were loaded meanwhile. Calls, transfers, deadlines and `wake` end that
wait; the next `run_step` goes on with it.

With `--async-scheduling` a step is schedule k + 1 -> commit k, while k + 1 computes: the
scheduler works while the runner does. With pipeline stages as many steps are in flight as stages.

The caller owns the thread: `AsyncEngine` runs a core behind asyncio, `LLM` runs one in the
caller's thread.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from engine.batch import ScheduledBatch
from engine.config import EngineConfig
from engine.constraints.grammars import Grammars
from engine.kv_cache.spec import slicing_of
from engine.loop.step_loop import OneStepLoop, OverlappedLoop
from engine.metrics.counts import EngineMetrics, StepTimer
from engine.request import EngineOutput, EngineRequest
from engine.runner import ModelInfo, Runner
from engine.schedule.parts import SchedulerParts
from engine.schedule.scheduler import Scheduler
from engine.step_watch import StepWatch
from engine.validation import check_request
from kvstore.connector import Connector, null_connector
from kvstore.guard.metrics import KvMetrics, TransferMetrics
from kvstore.guard.status import BackendStatus
from kvstore.transfer_form import PoolShare

__all__ = ["EngineCore", "OnOutputs"]

Outputs = list[EngineOutput]
OnOutputs = Callable[[Outputs], None]


class _Waker:
    """Ends an engine's waits; any thread may call it.

    Threads of the connector and of the grammars call it, and it does not refer to the engine: an
    engine that nobody uses any more is freed at once, and not when Python's collector finds it.

    Attributes:
        woken: ends a wait.
        has_results: whether the connector has reported results since the last poll.
    """

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.has_results = False

    def wake(self) -> None:
        """Ends the engine's wait."""
        self.woken.set()

    def note_results(self) -> None:
        """Ends the engine's wait, as the connector's worker half has results."""
        self.has_results = True
        self.woken.set()


class EngineCore:
    """One engine. Not safe to call from two threads at once.

    `scheduler` adds, ends and moves requests between steps, once `check` has accepted them.

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
        lends_prefixes: whether its connector lends blocks of its prefix cache.
        kv_metrics: counts of transfers.
        metrics: counts of requests and steps.
        step_watch: notices a step that hangs.
        scheduler: holds the requests.
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
        self.form = slicing_of(config, runner.info.layout, runner.info.states).form
        self.namespace = self.form.namespace(runner.info.fingerprint)
        self.kv_metrics = KvMetrics()
        self.metrics = EngineMetrics()
        self._timer = StepTimer(self.metrics, clock)
        self.step_watch = StepWatch(
            clock, runner.costs.prompt_token_s, lambda: runner.turns.waited_s
        )
        self._runner = runner
        self._clock = clock
        self._waker = _Waker()
        self._on_outputs: OnOutputs | None = None  # while a step computes
        self._early_error: Exception | None = None
        self._end_error: Exception | None = None
        self._grammars = Grammars(config, runner.info, self._waker.wake, self.metrics)
        connector_scheduler, self._connector = connector or null_connector()
        self.lends_prefixes = (
            config.enable_prefix_caching
            and connector is not None
            and not connector_scheduler.finds_by_key
        )
        parts = SchedulerParts.build(
            config,
            runner.info,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            num_slots=runner.num_slots,
            num_host_slots=runner.num_host_slots,
            costs=runner.costs,
            turns=runner.turns,
            namespace=self.namespace,
            connector=connector_scheduler,
            grammars=self._grammars,
            clock=clock,
            metrics=self.metrics,
            transfer_metrics=self._connect(connector) if connector else None,
        )
        self.scheduler = Scheduler(parts)
        self._loop = (OverlappedLoop if config.async_scheduling else OneStepLoop)(
            config,
            self.scheduler,
            runner,
            self._connector,
            self.step_watch,
            self._timer,
            self.metrics,
        )

    def _connect(self, connector: Connector) -> TransferMetrics:
        """Prepares the connector's worker half; returns the metrics for its jobs."""
        scheme, worker = connector[0].scheme, connector[1]
        worker.measure(self.kv_metrics, scheme)
        share = PoolShare(num_blocks=self.num_blocks)
        worker.register_pool(self._runner.kv_pool, self.info.layout, self.form, share)
        worker.set_waker(self._waker.note_results)
        worker.watch()
        if not self.config.async_scheduling:
            self._runner.watch_layers(self._between_layers)
        return self.kv_metrics.of(scheme)

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

    def check(self, request: EngineRequest) -> None:
        """Raises for a request that could never finish (`engine.validation`). Thread-safe."""
        check_request(
            request,
            config=self.config,
            info=self.info,
            num_blocks=self.num_blocks,
            num_slots=self._runner.num_slots,
            namespace=self.namespace,
        )
        if args := request.spec.params.extra_args:
            self._runner.check_extra_args(args)
        if request.spec.params.structured_outputs is not None:
            self._grammars.check()

    def run_step(
        self, on_outputs: OnOutputs, on_scheduled: Callable[[int], None] = lambda num_tokens: None
    ) -> None:
        """Runs one engine step, delivers its outputs, then starts its KV saves.

        If transfers or grammars have brought outputs, the step delivers these and computes
        nothing: their requests should not wait for a forward pass. Except with
        `--async-scheduling`, outputs of transfers that end while the step computes are delivered
        between its layers.

        Args:
            on_outputs: called with outputs, at most one per candidate of a request in one call.
                It may add and end requests.
            on_scheduled: called before a step computes, with the number of its tokens.

        Raises:
            Exception: what the runner raised, if several steps in a row have failed; the engine
                cannot be used any more. Or what `on_outputs` raised.
            BaseException: an interrupt, which ends the requests of the steps in flight; the
                caller aborts the others. The engine can go on, unless it has several ranks.
        """
        self.step_watch.begin()
        try:
            self._run_step(on_outputs, on_scheduled)
        except Exception:
            raise
        except BaseException:
            self._loop.abandon()
            raise
        finally:
            self.step_watch.end()

    def _run_step(self, on_outputs: OnOutputs, on_scheduled: Callable[[int], None]) -> None:
        if self._end_error is not None:
            raise self._end_error
        self._timer.start()
        outputs = self._poll() + self.scheduler.take_compiled() + self.scheduler.expire()
        self._timer.end_phase("transfers")
        self.is_stalled = False
        if not outputs:
            outputs = self._compute_step(on_outputs, on_scheduled)
        if outputs:
            on_outputs(self._counted(outputs))
        self._timer.end_phase("commit")
        self._start_transfers()
        self._timer.end()

    def wait(self) -> None:
        """Sleeps while nothing can run: until a transfer ends, a grammar is compiled, a deadline
        passes, or `wake`.

        Call it right after a step. It returns at once unless that step found nothing to run.
        """
        if self.is_stalled:
            self._waker.woken.wait(min(self._time_left_s(), threading.TIMEOUT_MAX))
        self._waker.woken.clear()

    def wake(self) -> None:
        """Ends `wait`. Any thread may call it."""
        self._waker.wake()

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
            self._waker.woken.wait(left_s)
            self._waker.woken.clear()

    def close(self) -> None:
        """Closes the runner, which frees the model, the connector and the compiler of grammars.
        Idempotent.
        """
        with ExitStack() as closing:
            closing.callback(self._grammars.close)
            closing.callback(self._connector.close)
            closing.callback(self._loop.forget)
            closing.callback(self._runner.close)

    # A step.

    def _compute_step(self, on_outputs: OnOutputs, on_scheduled: Callable[[int], None]) -> Outputs:
        if self.config.async_scheduling:  # a thread of the runner waits for turns
            return self._schedule_and_run(on_outputs, on_scheduled)
        try:
            return self._schedule_and_run(on_outputs, on_scheduled) if self._take_turn() else []
        finally:
            self._runner.turns.end()

    def _take_turn(self) -> bool:
        """Waits for the engine's turn if there may be something to compute. Loads run meanwhile.

        Returns:
            False if `wake` or a deadline has ended the wait.
        """
        turns = self._runner.turns
        if turns.take():
            return True
        may_compute = self.scheduler.start_loads()
        self._start_transfers()
        if not may_compute:
            return True
        if not turns.take(self._waker.woken, self._time_left_s()):
            self._waker.woken.clear()
            return False
        self._timer.end_phase("execute")
        return True

    def _time_left_s(self) -> float:
        """Returns the seconds until `Scheduler.expire` is due; infinite without deadlines."""
        deadline = self.scheduler.next_deadline
        return math.inf if deadline is None else max(0.0, deadline - self._clock())

    def _schedule_and_run(
        self, on_outputs: OnOutputs, on_scheduled: Callable[[int], None]
    ) -> Outputs:
        batch = self.scheduler.schedule()
        self._timer.end_phase("schedule")
        num_tokens = self._loop.num_run(batch)
        self.step_watch.compute(num_tokens)
        self._start_transfers()  # loads run beside the forward pass
        if batch is None and not self._loop.is_in_flight:
            self.is_stalled = True
            return []
        on_scheduled(num_tokens)
        return self._run_watched(batch, on_outputs)

    def _start_transfers(self) -> None:
        if work := self.scheduler.build_work():
            self._connector.start(work)
        self._timer.end_phase("transfers")

    def _counted(self, outputs: list[EngineOutput]) -> Outputs:
        """Counts the tokens of outputs and returns them."""
        self.metrics.outputs_made(outputs)
        return outputs

    def _run_watched(self, batch: ScheduledBatch | None, on_outputs: OnOutputs) -> Outputs:
        """Runs a step; delivers the outputs of transfers that end meanwhile."""
        self._on_outputs = on_outputs
        try:
            outputs = self._loop.run(batch)
        finally:
            self._on_outputs = None
        error, self._early_error = self._early_error, None
        if error is not None:
            raise error
        return outputs

    # The connector.

    def _poll(self) -> Outputs:
        """Processes what transfers have brought."""
        self._waker.has_results = False
        return self.scheduler.apply(self._connector.poll())

    def _between_layers(self, step: int, num_layers: int) -> None:
        """Called between layers: delivers finished transfers while the step runs."""
        self._connector.layers_computed(step, num_layers)
        if self._on_outputs is None or not self._waker.has_results or self._early_error is not None:
            return
        try:
            if outputs := self._poll():
                self._on_outputs(self._counted(outputs))
        except Exception as error:  # raised after the step, which has not failed itself
            self._early_error = error
