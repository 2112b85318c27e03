"""`StageSteps`: computes steps on a CPU for the stages of a pipeline before the last one."""

from collections import deque

import numpy as np
from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runtime.host_steps import HostSteps
from engine.runtime.rows import drawing_rows
from engine.runtime.steps import FinishedStep, StepModel

__all__ = ["StageSteps"]


class StageSteps(HostSteps):
    """`Steps` of a stage whose results are hidden states, which it sends to the next stage.

    Args:
        model: the stage's layers, and the limits.
    """

    def __init__(self, model: StepModel) -> None:
        super().__init__(model)
        # Rows of the steps whose tokens have not arrived, in order.
        self._undrawn: deque[np.ndarray] = deque()

    @override
    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        assert self._ranks is not None, "one rank has one stage"
        decode_ids = self._decode_rows.ids
        if self._model.part.is_first:
            self._keep_drawn(decode_ids)
        self._fill_inputs(batch)
        self._ranks.send_hidden(self._recorded.run(self._on_layer(batch)))
        if self._model.part.is_first:
            self._undrawn.append(drawing_rows(batch.chunks, decode_ids))
        return FinishedStep(StepOutput(batch.step))

    @override
    def finish(self) -> None:
        assert self._ranks is not None, "one rank has one stage"
        while self._undrawn:
            self._ranks.receive_tokens()
            self._undrawn.popleft()

    def _keep_drawn(self, decode_ids: np.ndarray) -> None:
        """Stores the tokens that have arrived; waits for those that the next step runs."""
        assert self._ranks is not None
        while self._undrawn:
            is_needed = any(np.isin(decode_ids, rows).any() for rows in self._undrawn)
            tokens = self._ranks.receive_tokens(waits=is_needed)
            if tokens is None:
                return
            self._rows.keep_drawn(self._undrawn.popleft(), np.frombuffer(tokens, np.int64))
