"""`StepLoop`: runs scheduled steps on the runner and commits them, one at a time or overlapped."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from typing_extensions import override

from baton.common.errors import InternalError
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.metrics.counts import EngineMetrics, StepTimer
from engine.request import EngineOutput
from engine.runner import PendingOutput, Runner
from engine.schedule.scheduler import Scheduler
from engine.step_watch import StepWatch
from kernels.ranks import RanksLostError
from kvstore.connector import KvConnectorWorker

__all__ = ["OneStepLoop", "OverlappedLoop", "StepLoop"]

# If this many steps of a single request fail in a row, the device is lost. Steps of several do not
# count: their requests are tried alone next.
_MAX_FAILED_STEPS = 3

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    batch: ScheduledBatch
    output: PendingOutput


class StepLoop(ABC):
    """Executes the scheduler's batches and commits what they compute.

    Args:
        config: how many steps may be in flight.
        scheduler: commits steps, and ends the requests of those that fail.
        runner: executes batches.
        connector: learns which steps have ended.
        watch: learns how many tokens a step runs.
        timer: times the phases of steps.
        metrics: counts failed steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        connector: KvConnectorWorker,
        watch: StepWatch,
        timer: StepTimer,
        metrics: EngineMetrics,
    ) -> None:
        self._max_open_steps = config.max_open_steps
        self._scheduler = scheduler
        self._runner = runner
        self._connector = connector
        self._watch = watch
        self._timer = timer
        self._metrics = metrics
        self._num_failed_steps = 0
        self._submitted: deque[_SubmittedStep] = deque()  # the one to commit next first

    @property
    def is_in_flight(self) -> bool:
        """Whether a step was submitted and is not committed."""
        return bool(self._submitted)

    @abstractmethod
    def run(self, batch: ScheduledBatch | None) -> list[EngineOutput]:
        """Runs a step; returns the outputs of the steps that it commits.

        Args:
            batch: the step; None to commit a step in flight.

        Raises:
            Exception: what the runner raised, if several steps in a row have failed, or a rank is
                lost.
        """

    def abandon(self) -> None:
        """Ends the requests of interrupted steps, when the device has ended these."""
        for submitted in self._submitted:
            with suppress(Exception):
                submitted.output.result()
        self._submitted.clear()
        for step in self._scheduler.steps_in_flight:
            self._connector.step_ended(step, computed=False)
        self._scheduler.abandon_steps(InternalError("the step was interrupted"))

    def forget(self) -> None:
        """Drops the steps in flight, which refer to the model. For a runner that is closed."""
        self._submitted.clear()

    def num_run(self, batch: ScheduledBatch | None) -> int:
        """Returns how many tokens a step runs; a draft model's work counts as tokens that take as
        long.
        """
        if batch is None:
            return 0
        costs = self._runner.costs
        return batch.num_tokens + round(costs.draft_s(batch) / costs.prompt_token_s)

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
        return self._scheduler.commit(batch, output)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[EngineOutput]:
        """Ends the request of a failed step, or retries its requests if there are several.

        Raises the error if several steps in a row have failed, or a rank is lost.
        """
        self._connector.step_ended(batch.step, computed=False)
        self._metrics.step_failed()
        outputs = self._scheduler.fail(batch, InternalError("the engine failed on this request"))
        self._num_failed_steps += bool(outputs)
        if isinstance(error, RanksLostError) or self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        _logger.error("step %d failed", batch.step, exc_info=error)
        return outputs


class OneStepLoop(StepLoop):
    """The readable loop: execute, then commit."""

    @override
    def run(self, batch: ScheduledBatch | None) -> list[EngineOutput]:
        assert batch is not None, "no step is in flight that could be committed"
        return self._finish(batch, lambda: self._runner.execute(batch))


class OverlappedLoop(StepLoop):
    """The overlapped loop: submits a step, then commits the oldest one, unless there may be more in
    flight.
    """

    @override
    def run(self, batch: ScheduledBatch | None) -> list[EngineOutput]:
        num_open = len(self._submitted)
        is_full = num_open == self._max_open_steps - 1
        num_due = min(num_open, int(is_full or batch is None))
        if num_due:  # its result is waited for
            self._watch.compute(max(self.num_run(self._submitted[0].batch), self.num_run(batch)))
        error = self._submit(batch) if batch is not None else None
        self._timer.end_phase("execute")
        outputs: list[EngineOutput] = []
        # Steps end in order, so all earlier ones before one that could not be submitted.
        for _ in range(num_due if error is None else num_open):
            before = self._submitted[0]
            outputs += self._finish(before.batch, before.output.result)
            self._submitted.popleft()
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
