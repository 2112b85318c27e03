"""`DeviceStageSteps`: computes steps on a GPU for the stages of a pipeline before the last one.

Hidden states go through the host: a copy to pinned memory is launched behind each step, and sent
when it is complete.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runtime.device import fetch
from engine.runtime.steps.arriving_tokens import ArrivingTokens
from engine.runtime.steps.device_decode import GraphRecorder
from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.steps.steps import LaunchedStep, StepModel

__all__ = ["DeviceStageSteps"]


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
        hidden = self._compute_chunks(batch) if batch.chunks else self._run_decode()
        self._decode.advance(len(self._decode_ids))

        def send(tensors: Sequence[torch.Tensor]) -> StepOutput:
            self._ranks.send_hidden(tensors[0])
            return StepOutput(batch.step)

        return LaunchedStep(fetch(self._model.device, [hidden]), send, self._group)

    @override
    def finish(self) -> None:
        if self._tokens is not None:
            self._tokens.drop()

    def _compute_chunks(self, batch: ScheduledBatch) -> torch.Tensor:
        """Computes a step of chunks and decoding rows; returns the hidden states of all tokens."""
        inputs, model = self._chunk_inputs(batch), self._model
        kv = model.paged_kv(inputs.layer_groups)
        hidden: torch.Tensor = model.model(inputs.of_model, inputs.positions, kv)
        return hidden
