"""`HostSteps`: computes steps on a CPU, replaying recorded ones when possible."""

from collections.abc import Sequence

from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runner import LayersComputed
from engine.runtime.batch_inputs import StepInputs
from engine.runtime.drawing import ChunkDraws, DecodeRows, draw_by_sampling
from engine.runtime.logprobs import PromptTokens
from engine.runtime.recorded_steps import OnLayer, RecordedSteps
from engine.runtime.rows import Rows
from engine.runtime.steps import FinishedStep, StepModel, Steps

__all__ = ["HostSteps"]


class HostSteps(Steps):
    """`Steps` on a CPU.

    Args:
        model: the model and its limits.
    """

    num_spare_blocks = 0
    is_asynchronous = False

    def __init__(self, model: StepModel) -> None:
        self._device, self._model = model.device, model.model
        self._is_processed = model.reports_processed
        self._rows = Rows(model.num_layer_groups, model.max_rows, model.max_blocks)
        inputs = StepInputs(self._rows, model.max_tokens, model.block_size, model.device)
        self._recorded = RecordedSteps(model.model, model.kv, model.layer_slots, inputs)
        self._decode_rows = DecodeRows.of((), self._rows, self._device)
        self._leading = _leading_layers(model.layer_slots, model.num_layer_groups)
        self._on_layers: LayersComputed | None = None

    @override
    def watch_layers(self, on_layers: LayersComputed) -> None:
        self._on_layers = on_layers

    @override
    def update(self, batch: ScheduledBatch) -> None:
        self._rows.update_tables(batch.table_updates)
        if batch.decode_rows is not self._decode_rows.rows:
            self._decode_rows = DecodeRows.of(
                batch.decode_rows, self._rows, self._device, is_processed=self._is_processed
            )

    @override
    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        """Computes the whole step before it returns."""
        rows, decode = self._rows, self._decode_rows
        self._recorded.inputs.fill(batch, rows, decode.ids)
        rows.advance(batch.chunks, decode.ids)
        scores = raw = self._recorded.scores(self._on_layer(batch))
        prompts = PromptTokens(batch.chunks)
        of_prompts = prompts.read(prompts.compute(self._model, scores.hidden))
        decoded = decode.draw(scores, raw, rows.positions)
        draws = ChunkDraws(batch.chunks, is_processed=self._is_processed)
        chunks = draws.outputs(draws.draw(scores, raw, draw_by_sampling))
        rows.keep_drawn(batch.chunks, chunks, decode.ids, decoded.tokens)
        return FinishedStep(StepOutput(batch.step, tuple(chunks), *decoded, of_prompts))

    def _on_layer(self, batch: ScheduledBatch) -> OnLayer | None:
        """Returns the function to call after each layer; None if the step has no chunks."""
        on_layers, leading = self._on_layers, self._leading
        if on_layers is None or not batch.chunks:
            return None
        return lambda num_layers: on_layers(batch.step, leading[num_layers])

    @override
    def graph_bytes(self) -> int:
        return 0

    @override
    def warm_up(self) -> None:
        """Does nothing: steps are recorded when their size first occurs."""


def _leading_layers(slots: Sequence[tuple[int, int]], num_layer_groups: int) -> list[int]:
    """Returns, for each number of computed layers of the model, how many leading layers of the
    blocks are computed in every layer group.
    """
    counts = [0] * num_layer_groups
    leading = [0]
    for layer_group, _ in slots:
        counts[layer_group] += 1
        leading.append(min(counts))
    return leading
