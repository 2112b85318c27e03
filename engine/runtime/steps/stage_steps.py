"""`StageSteps`: computes steps on a CPU for the stages of a pipeline before the last one."""

from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runtime.steps.arriving_tokens import ArrivingTokens
from engine.runtime.steps.host_steps import HostSteps
from engine.runtime.steps.steps import FinishedStep, StepModel

__all__ = ["StageSteps"]


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
