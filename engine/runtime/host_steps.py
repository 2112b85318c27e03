"""`HostSteps`: steps on the CPU, from recordings where it can."""

from collections.abc import Sequence

from engine.batch import ScheduledBatch, StepOutput
from engine.runner import LayersComputed
from engine.runtime.batch_inputs import StepInputs
from engine.runtime.drawing import ChunkDraws, DecodeRows, draw_by_sampling
from engine.runtime.recorded_steps import OnLayer, RecordedSteps
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
        self._leading = _leading_layers(model.layer_slots, model.num_groups)
        self._tell_layers: LayersComputed | None = None

    def watch_layers(self, tell: LayersComputed) -> None:
        """See `Steps.watch_layers`."""
        self._tell_layers = tell

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
        scores = self._recorded.scores(self._on_layer(batch))
        decoded, decoded_logprobs = decode.draw(scores, rows.positions)
        draws = ChunkDraws(batch.chunks)
        chunks = draws.outputs(draws.draw(scores, draw_by_sampling))
        rows.keep_drawn(batch.chunks, chunks, decode.ids, decoded)
        return FinishedStep(StepOutput(batch.step, tuple(chunks), decoded, decoded_logprobs))

    def _on_layer(self, batch: ScheduledBatch) -> OnLayer | None:
        """Whom a step's layers are told to; None where nobody waits for what it computes."""
        tell, leading = self._tell_layers, self._leading
        if tell is None or not batch.chunks:
            return None
        return lambda num_layers: tell(batch.step, leading[num_layers])

    def graph_bytes(self) -> int:
        """See `Steps.graph_bytes`."""
        return 0

    def warm_up(self) -> None:
        """Nothing: sizes are recorded when they come."""


def _leading_layers(slots: Sequence[tuple[int, int]], num_groups: int) -> list[int]:
    """How many leading layers of every group's blocks are computed, by how many of the model's."""
    counts = [0] * num_groups
    leading = [0]
    for group, _ in slots:
        counts[group] += 1
        leading.append(min(counts))
    return leading
