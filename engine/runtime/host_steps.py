"""`HostSteps`: steps on the CPU, from recordings where it can."""

from engine.batch import ScheduledBatch, StepOutput
from engine.runtime.batch_inputs import StepInputs
from engine.runtime.drawing import ChunkDraws, DecodeRows, draw_by_sampling
from engine.runtime.recorded_steps import RecordedSteps
from engine.runtime.rows import Rows
from engine.runtime.steps import FinishedStep, StepModel, Steps

__all__ = ["HostSteps"]


class HostSteps(Steps):
    """See `Steps`.

    Args:
        model: what runs.
    """

    num_spare_blocks = 0
    is_asynchronous = False

    def __init__(self, model: StepModel) -> None:
        self._device = model.device
        self._rows = Rows(model.num_groups, model.max_rows, model.max_blocks)
        inputs = StepInputs(self._rows, model.max_tokens, model.block_size, model.device)
        self._recorded = RecordedSteps(model.model, model.kv, model.layer_slots, inputs)
        self._decode_rows = DecodeRows.of((), self._rows, self._device)

    def update(self, batch: ScheduledBatch) -> None:
        """See `Steps.update`."""
        self._rows.update_tables(batch.table_updates)
        if batch.decode_rows is not self._decode_rows.rows:
            self._decode_rows = DecodeRows.of(batch.decode_rows, self._rows, self._device)

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        """See `Steps.launch`; computes the whole step."""
        rows, decode = self._rows, self._decode_rows
        self._recorded.inputs.fill(batch, rows, decode.ids)
        rows.advance(batch.chunks, decode.ids)
        scores = self._recorded.scores()
        decoded, decoded_logprobs = decode.draw(scores, rows.positions)
        draws = ChunkDraws(batch.chunks)
        chunks = draws.outputs(draws.draw(scores, draw_by_sampling))
        rows.keep_drawn(batch.chunks, chunks, decode.ids, decoded)
        return FinishedStep(StepOutput(batch.step, tuple(chunks), decoded, decoded_logprobs))

    def graph_bytes(self) -> int:
        """See `Steps.graph_bytes`."""
        return 0

    def warm_up(self) -> None:
        """Nothing: sizes are recorded when they come."""
