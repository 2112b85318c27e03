"""`HostSteps`: computes steps on a CPU, replaying recorded ones when possible."""

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from engine.batch import ScheduledBatch, StepOutput
from engine.runner import LayersComputed
from engine.runtime.draws.drawing import ChunkDraws, DecodeRows
from engine.runtime.draws.logprobs import PromptTokens
from engine.runtime.draws.row_processors import RowProcessors
from engine.runtime.draws.rows import Rows, drawing_rows, drawn_tokens
from engine.runtime.draws.rules import RowRules
from engine.runtime.draws.sampler import Scores
from engine.runtime.forward.batch_inputs import StepInputs
from engine.runtime.forward.recorded_steps import OnLayer, RecordedSteps
from engine.runtime.steps.steps import FinishedStep, StepModel, Steps

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
        self._ranks, self._step_model = model.ranks, model
        self._is_processed = model.reports_processed
        self._rows = Rows(model.num_layer_groups, model.max_rows, model.max_blocks)
        vocab_size = model.model.config.vocab_size
        self._rules = RowRules(model.max_rows, model.max_model_len, vocab_size, model.device)
        self._processors = RowProcessors(model.processors)
        self._hidden = None if model.model.part.is_first else model.new_hidden()
        sizes = model.max_tokens, model.block_size
        inputs = StepInputs(
            self._rows,
            *sizes,
            model.device,
            self._hidden,
            model.max_drafts,
            has_states=model.states is not None,
        )
        kept = model.new_kept(inputs.max_logit_rows)
        self._recorded = RecordedSteps(
            model.model, model.kv, model.layer_slots, inputs, kept, model.states
        )
        self._decode_rows = self._decode_rows_of(())
        self._leading = _leading_layers(model.layer_slots, model.num_layer_groups)
        self._on_layers: LayersComputed | None = None

    @override
    def watch_layers(self, on_layers: LayersComputed) -> None:
        self._on_layers = on_layers

    @override
    def update(self, batch: ScheduledBatch) -> None:
        self._rows.update_tables(batch.table_updates)
        if batch.decode_rows is not self._decode_rows.rows:
            self._decode_rows = self._decode_rows_of(batch.decode_rows)

    def _decode_rows_of(self, rows: tuple[int, ...]) -> DecodeRows:
        return DecodeRows.of(rows, self._rows, self._device, is_processed=self._is_processed)

    @override
    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        """Computes the whole step before it returns."""
        rows, decode = self._rows, self._decode_rows
        self._fill_inputs(batch)
        prompts = PromptTokens(batch)
        scores = self._recorded.scores(self._on_layer(batch))
        drawing = drawing_rows(batch.chunks, decode.ids)
        if self._ranks is not None and self._ranks.rank > 0:  # rank 0 draws
            prompts.compute_part(self._model, scores.hidden)
            if self._model.part.is_first:
                drawn = self._ranks.receive_tokens()
                assert drawn is not None, "it waits"
                rows.keep_drawn(drawing, np.frombuffer(drawn, np.int64))
            return FinishedStep(StepOutput(batch.step))
        of_prompts = prompts.read(prompts.compute(self._model, scores.hidden))
        draws = ChunkDraws(batch.chunks, is_processed=self._is_processed)
        # Until here the logits are the model's own.
        raw = scores.copy() if draws.keeps_raw or decode.reports.keeps_raw else scores
        if draws.with_processors:
            self._processors.apply(draws.with_processors, scores)
        self._apply_rules(draws, scores)
        decoded = decode.draw(scores, raw, rows.positions)
        chunks = draws.outputs(draws.draw(scores, raw))
        tokens = drawn_tokens(batch.chunks, chunks, decoded.tokens)
        rows.keep_drawn(drawing, tokens)
        if self._ranks is not None:
            self._ranks.send_tokens(tokens.tobytes())
        jobs = self._step_model.proposal_jobs(batch, rows)
        chunks = self._step_model.propose(jobs, chunks, scores.states)
        return FinishedStep(StepOutput(batch.step, tuple(chunks), *decoded, of_prompts))

    def _fill_inputs(self, batch: ScheduledBatch) -> None:
        """Fills the inputs of a step, and waits for the hidden states of the stage before."""
        rows, decode, inputs = self._rows, self._decode_rows, self._recorded.inputs
        inputs.fill(batch, rows, decode.ids)
        rows.advance(batch.chunks, decode.ids)
        if self._hidden is not None:
            assert self._ranks is not None, "one rank has one stage"
            self._ranks.receive_hidden(self._hidden[: inputs.num_tokens])

    def _apply_rules(self, draws: ChunkDraws, scores: Scores) -> None:
        """Changes the logits of the rows that have rules, in place."""
        for of_one_place in draws.ruled:
            self._rules.apply_to_chunks(of_one_place, scores)
        decode = self._decode_rows
        if decode.ruled is not None:
            last_tokens = torch.from_numpy(self._rows.last_tokens)
            positions = torch.from_numpy(self._rows.positions[decode.ids])
            scores = scores.last(len(decode.ids))
            self._rules.apply_to_decodes(decode.ruled, scores, last_tokens, positions)

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
