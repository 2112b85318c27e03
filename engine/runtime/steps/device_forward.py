"""Forward passes on the device: `DeviceForward` runs them, `StepGraphs` records them.

    sent sequences, state of the rows -> inputs -> forward pass -> logits and maxima

A stage before a pipeline's last computes hidden states instead of logits. Draws follow outside of
graphs: they launch only what the rows need, and most draw the likeliest token.

All tensors that a pass reads and writes keep their memory, and nothing waits for the device. What
it launches depends on the `StepShape` alone, so `StepGraphs` captures it as a CUDA graph, once
per shape; a step of other sizes is padded to a captured shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kernels
from engine.models.layers import KeptStates
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.sampler import Scores
from engine.runtime.forward.upload import Upload
from engine.runtime.steps.step_shapes import StepShape, smallest_fitting
from engine.runtime.steps.steps import StepModel
from kernels import AttentionMetadata, LogitRows, RecordedStep, SentSequences, SequenceInputs

__all__ = ["DeviceForward", "GraphRecorder", "StepGraphs"]

GraphRecorder = Callable[[Callable[[], torch.Tensor]], RecordedStep]
"""Records what a function launches without running it, as `kernels.CudaGraphRecorder` does."""

_WORDS_PER_ROW, _WORDS_PER_DRAW = 16, 8
"""Room in the upload besides the sequences: for positions and draw parameters."""


class DeviceForward:
    """Runs forward passes of any shape.

    Args:
        model: the model and its limits.
        rows: the rows, whose state it reads.
        hidden: `[max_tokens, hidden_size]`; hidden states of the stage before, which the caller
            fills; None for the first stage.
        shapes: the shapes that steps are padded to.

    Attributes:
        upload: where the step's numbers are sent; `SentStep.words` of the shape come first.
        max_result_rows: most rows of a result of `run` with one of `shapes`.
    """

    def __init__(
        self,
        model: StepModel,
        rows: DeviceRows,
        hidden: torch.Tensor | None,
        shapes: Sequence[StepShape],
    ) -> None:
        self._model, self._rows, self._hidden = model, rows, hidden
        is_last = model.model.part.is_last
        num_tokens = max([model.max_tokens, model.max_rows, *(s.num_tokens for s in shapes)])
        num_seqs = max([model.max_rows, *(shape.num_seqs for shape in shapes)])
        num_logits = model.max_logit_rows if is_last else 0
        self._whole = self._allocate(num_seqs, num_tokens)
        self._alone = self._allocate(num_logits, num_logits)
        self._maxima = torch.zeros(num_logits, device=model.device)
        self._likeliest = torch.zeros(num_logits, dtype=torch.int64, device=model.device)
        self._kept = model.new_kept(num_logits)
        num_words = SentSequences.num_words(num_seqs, num_tokens)
        num_words += num_logits + SentSequences.num_words(num_logits, num_logits)
        num_words += _WORDS_PER_ROW * model.max_rows + _WORDS_PER_DRAW * num_logits
        num_words += 2 * self._whole.tables[:, 0].numel()  # a sequence's table: indices and blocks
        self.upload = Upload(num_words, model.device)
        counts = [s.num_logit_rows if is_last else s.num_tokens for s in shapes]
        self.max_result_rows = max(counts, default=0)

    def run(self, shape: StepShape, out: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the pass of the sequences in `upload`.

        Args:
            shape: the pass's shape.
            out: memory of at least as many rows as the result, which becomes its first rows.

        Returns:
            The logits, `[num_logit_rows, vocab]` float32; of a stage before the last, hidden
            states, `[num_tokens, hidden_size]`.
        """
        sent = self._sent(shape)
        states = self._states(shape, sent, computes_all=False)
        out = None if out is None else out[: len(states)]
        if self._model.model.part.is_last:
            return self._logits(states, out)
        return states if out is None else out.copy_(states)

    def run_with_hidden(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a pass of the last stage; returns logits as `run` does, and the final hidden states
        of all tokens.
        """
        sent = self._sent(shape)
        states = self._states(shape, sent, computes_all=True)
        token_rows = sent.token_rows
        chosen = states if token_rows is None else states.index_select(0, token_rows)
        return self._logits(chosen), states

    def scores(self, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> Scores:
        """Returns the first rows of the logits of the last pass, with what it computed of them."""
        count = len(logits)
        return Scores(logits, self._maxima[:count], self._likeliest[:count], hidden)

    def kept_states(self, num_rows: int) -> torch.Tensor | None:
        """Returns a copy of the states that the last pass has kept of the first logit rows for the
        drafter; None if it reads none.
        """
        return None if self._kept is None else self._kept.memory[:, :num_rows].clone()

    def draw_positions(self, tokens: slice) -> torch.Tensor:
        """Returns the positions that follow some tokens of the last pass, `[n]` int64."""
        return self._whole.draw_positions[tokens]

    def row_ids(self, sequences: slice) -> torch.Tensor:
        """Returns the rows of some sequences that were sent last, `[n]` int64."""
        return self.upload.memory[sequences]

    def _allocate(self, num_seqs: int, num_tokens: int) -> SequenceInputs:
        model = self._model
        return SequenceInputs.allocate(
            model.num_layer_groups, num_seqs, num_tokens, model.max_blocks, model.device
        )

    def _sent(self, shape: StepShape) -> "_Sent":
        words, sizes = self.upload.memory, (shape.num_seqs, shape.num_tokens)
        end = SentSequences.num_words(*sizes)
        whole = SentSequences.of_words(words[:end], *sizes)
        if not shape.has_logit_rows:
            return _Sent(whole)
        count = shape.num_logit_rows
        token_rows, words = words[end : end + count], words[end + count :]
        words = words[: SentSequences.num_words(count, count)]
        return _Sent(whole, token_rows, SentSequences.of_words(words, count, count))

    def _states(self, shape: StepShape, sent: "_Sent", *, computes_all: bool) -> torch.Tensor:
        """Computes final hidden states, of all tokens or of the logit rows."""
        model, inputs = self._model, self._whole.first(shape.num_seqs, shape.num_tokens)
        kernels.lay_out_sequences(self._rows.state, sent.whole, model.block_size, inputs)
        logit_rows = None
        if sent.alone is not None and not computes_all:
            logit_rows = self._logit_rows(shape, sent)
        metadata = _metadata(inputs, shape, keeps_states=model.states is not None)
        kv = model.paged_kv(metadata, logit_rows)
        model_input = inputs.token_ids
        if self._hidden is not None:
            model_input = self._hidden[: shape.num_tokens]
        kept = self._kept_states(shape, sent.token_rows, computes_all=computes_all)
        states: torch.Tensor = model.model(model_input, inputs.positions, kv, kept)
        return states

    def _logit_rows(self, shape: StepShape, sent: "_Sent") -> LogitRows:
        """Returns the logit rows of a pass, laid out as sequences of their own."""
        assert sent.alone is not None
        assert sent.token_rows is not None
        count = shape.num_logit_rows
        inputs, block_size = self._alone.first(count, count), self._model.block_size
        kernels.lay_out_sequences(self._rows.state, sent.alone, block_size, inputs)
        alone = StepShape(count, count, count, 1, shape.max_context_len)
        return LogitRows(sent.token_rows, _metadata(inputs, alone, keeps_states=False))

    def _kept_states(
        self, shape: StepShape, token_rows: torch.Tensor | None, *, computes_all: bool
    ) -> KeptStates | None:
        if self._kept is None:
            return None
        kept, num_rows = self._kept, shape.num_logit_rows
        count = kept.count[:num_rows]
        rows = count if token_rows is None else token_rows
        final_rows = rows if computes_all else count
        return KeptStates(kept.layers, kept.memory[:, :num_rows], rows, final_rows)

    def _logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self._model.model.logits(states, out)
        if len(logits):
            scores = self.scores(logits)
            kernels.row_maxima(logits, (scores.maxima, scores.likeliest))
        return logits


@dataclass(frozen=True, slots=True)
class _Sent:
    """The words of a step.

    Attributes:
        whole: the step's sequences.
        token_rows: `[num_logit_rows]` int64; the tokens whose logits are computed. None for all.
        alone: these tokens as sequences of their own.
    """

    whole: SentSequences
    token_rows: torch.Tensor | None = None
    alone: SentSequences | None = None


def _metadata(
    inputs: SequenceInputs, shape: StepShape, *, keeps_states: bool
) -> tuple[AttentionMetadata, ...]:
    """Returns one per layer group.

    Args:
        inputs: the sequences.
        shape: their sizes.
        keeps_states: whether the model has recurrent layers.
    """
    return tuple(
        AttentionMetadata(
            block_tables=tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slot_mapping=slots,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            num_unkept=inputs.num_unkept if keeps_states else None,
        )
        for tables, slots in zip(inputs.tables, inputs.slots, strict=True)
    )


class StepGraphs:
    """CUDA graphs of forward passes, by shape.

    Args:
        shapes: the shapes to capture, those of the cheapest steps first.
        run: launches a pass of the given shape, always on the same memory; returns its result.
        record: records what a function launches.

    Attributes:
        shapes: the shapes to capture.
    """

    def __init__(
        self,
        shapes: Sequence[StepShape],
        run: Callable[[StepShape], torch.Tensor],
        record: GraphRecorder,
    ) -> None:
        self.shapes = tuple(shapes)
        self._run, self._record = run, record
        self._graphs: dict[StepShape, RecordedStep] = {}

    def largest_first(self) -> list[StepShape]:
        """Returns the shapes by the memory that they need, the most first."""
        return sorted(self.shapes, key=lambda s: (s.num_tokens, s.num_seqs), reverse=True)

    def capture_one(self, shape: StepShape) -> None:
        """Captures one shape, after a run that compiles its kernels.

        The largest shapes should be captured first, because the others reuse their memory.
        """
        self._run(shape)
        self._graphs[shape] = self._record(lambda: self._run(shape))

    def fitting(self, step: StepShape) -> StepShape | None:
        """Returns the cheapest captured shape that a step can be padded to, if any."""
        return smallest_fitting(self._graphs, step)

    def run(self, shape: StepShape) -> torch.Tensor:
        """Runs a pass of a captured shape; returns its result, which the next run overwrites."""
        return self._graphs[shape].run()
