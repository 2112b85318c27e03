"""Steps on a CPU and on a GPU for the stages of a pipeline before the last one.

Hidden states go through the host: a copy to pinned memory is launched behind each step, and sent
when it is complete.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runtime.device import fetch
from engine.runtime.draws.rows import drawing_rows
from engine.runtime.steps.device_forward import GraphRecorder
from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.steps.host_steps import HostSteps
from engine.runtime.steps.steps import FinishedStep, LaunchedStep, StepModel
from kernels import EngineRanks

__all__ = ["ArrivingTokens", "DeviceStageSteps", "StageSteps"]


class ArrivingTokens:
    """The tokens of steps that a first stage has computed, and that the last stage draws.

    Args:
        ranks: all ranks of the engine.
        keep: stores tokens; called with the rows, `[n]` int64, and their tokens, `[n]` int64.
    """

    def __init__(self, ranks: EngineRanks, keep: Callable[[np.ndarray, np.ndarray], None]) -> None:
        self._ranks, self._keep = ranks, keep
        # Rows of the steps whose tokens have not arrived, in order.
        self._undrawn: deque[np.ndarray] = deque()

    def expect(self, batch: ScheduledBatch, decode_ids: np.ndarray) -> None:
        """Notes that a step was computed.

        Args:
            batch: the step.
            decode_ids: its `decode_rows`, `[n]` int64.
        """
        self._undrawn.append(drawing_rows(batch.chunks, decode_ids))

    def store(self, decode_ids: np.ndarray) -> None:
        """Stores the tokens that have arrived; waits for those that the next step runs.

        Args:
            decode_ids: the rows that decode in the next step, `[n]` int64.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        while self._undrawn:
            is_needed = any(np.isin(decode_ids, rows).any() for rows in self._undrawn)
            tokens = self._ranks.receive_tokens(waits=is_needed)
            if tokens is None:
                return
            self._keep(self._undrawn.popleft(), np.frombuffer(tokens, np.int64))

    def drop(self) -> None:
        """Waits for the tokens of all steps, and stores none.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        while self._undrawn:
            self._ranks.receive_tokens()
            self._undrawn.popleft()


class StageSteps(HostSteps):
    """`Steps` of a stage whose results are hidden states, which it sends to the next stage.

    Args:
        model: the stage's layers, and the limits.
    """

    def __init__(self, model: StepModel) -> None:
        super().__init__(model)
        self._tokens: ArrivingTokens | None = None
        if model.model.part.is_first:
            assert self._ranks is not None, "one rank has one stage"
            self._tokens = ArrivingTokens(self._ranks, self._rows.keep_drawn)

    @override
    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        assert self._ranks is not None, "one rank has one stage"
        decode_ids = self._decode_rows.ids
        if self._tokens is not None:
            self._tokens.store(decode_ids)
            self._tokens.expect(batch, decode_ids)
        self._fill_inputs(batch)
        self._ranks.send_hidden(self._recorded.run(self._on_layer(batch)))
        return FinishedStep(StepOutput(batch.step))

    @override
    def finish(self) -> None:
        if self._tokens is not None:
            self._tokens.drop()


class DeviceStageSteps(DeviceSteps):
    """`Steps` of a stage whose results are hidden states, which it sends to the next stage.

    Args:
        model: the stage's layers, and the limits.
        record: as in `DeviceSteps`.
    """

    def __init__(self, model: StepModel, record: GraphRecorder | None = None) -> None:
        super().__init__(model, record)
        self._tokens: ArrivingTokens | None = None
        if self._part.is_first:
            self._tokens = ArrivingTokens(self._ranks, self._rows.keep_tokens)

    @override
    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        if self._tokens is not None:
            self._tokens.store(self._decode_ids)
            self._tokens.expect(batch, self._decode_ids)
        step = self._begin(batch)
        self._receive_hidden(step.num_tokens)
        hidden = self._run(step)[: step.num_tokens]
        self._decode.advance(self._forward.row_ids(step.decode_seqs))

        def send(tensors: Sequence[torch.Tensor]) -> StepOutput:
            self._ranks.send_hidden(tensors[0])
            return StepOutput(batch.step)

        return LaunchedStep(fetch(self._model.device, [hidden]), send, self._group)

    @override
    def finish(self) -> None:
        if self._tokens is not None:
            self._tokens.drop()
