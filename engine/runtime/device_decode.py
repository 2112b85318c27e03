"""`DeviceDecode`: a decode step from the rows' state to the tokens drawn, all on the device.

    row ids -> inputs -> forward pass -> logits and maxima      `run`
    -> tokens -> the rows' state                                `draw`

Everything it reads and writes stays where it is, and nothing in it waits for the device. `run`
depends on nothing that the host knows of a step but its size, so it can be captured as a CUDA
graph. `draw` launches no more than the rows ask for: most draw the likeliest token.
"""

import numpy as np
import torch

import kernels
from engine.runtime.device import to_device
from engine.runtime.device_rows import DeviceRows
from engine.runtime.sampler import Scores, draw_kinds
from engine.runtime.steps import StepModel
from kernels import AttentionMetadata, DecodeInputs

__all__ = ["DeviceDecode"]


class DeviceDecode:
    """Runs decode steps of any size.

    Args:
        model: what runs.
        rows: whose state it reads and moves on.

    Attributes:
        row_ids: `[max_rows]` int64; the rows that decode, then the spare row.
        tokens: `[max_rows]` int64; what the last step drew.
    """

    def __init__(self, model: StepModel, rows: DeviceRows) -> None:
        self._model, self._rows = model, rows
        size, device = model.max_rows, model.device
        self.row_ids = torch.full((size,), rows.spare_row, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(size, device=device)
        self._likeliest = torch.zeros(size, dtype=torch.int64, device=device)
        self._inputs = _new_inputs(model)
        self._is_random = self._is_filtered = False

    @property
    def draw_positions(self) -> torch.Tensor:
        """`[max_rows]` int64; of the tokens to draw after `run`."""
        return self._inputs.draw_positions

    def set_rows(self, row_ids: np.ndarray) -> None:
        """Takes other rows; padding follows them."""
        kinds = draw_kinds(self._rows.host.draws[row_ids])
        self._is_random, self._is_filtered = (bool(kind.any()) for kind in kinds)
        padded = np.full(self._model.max_rows, self._rows.spare_row)
        padded[: len(row_ids)] = row_ids
        self.row_ids.copy_(to_device(padded, self.row_ids.device), non_blocking=True)

    def run(self, size: int) -> torch.Tensor:
        """Runs the first `size` of `row_ids`; returns the logits, `[size, vocab]` float32."""
        model, inputs = self._model, _first(self._inputs, size)
        kernels.lay_out_decode(self._rows.state, self.row_ids[:size], model.block_size, inputs)
        kv = model.paged_kv(_metadata(inputs, model.max_model_len))
        logits = model.model.logits(model.model(inputs.token_ids, inputs.positions, kv))
        scores = self.scores(logits)
        kernels.row_maxima(logits, (scores.maxima, scores.likeliest))
        return logits

    def scores(self, logits: torch.Tensor) -> Scores:
        """Logits that `run` returned, with what it found of them."""
        size = len(logits)
        return Scores(logits, self._maxima[:size], self._likeliest[:size])

    def draw(self, scores: Scores, positions: torch.Tensor) -> None:
        """Draws the next tokens of the first rows into `tokens`, and moves their state on.

        Args:
            scores: a row each.
            positions: `[n]` int64; of the tokens to draw.
        """
        size, state = len(positions), self._rows.state
        row_ids, tokens = self.row_ids[:size], self.tokens[:size]
        if self._is_random:
            kernels.draw_tokens(
                scores.logits,
                scores.maxima,
                scores.likeliest,
                state.draws,
                draw_ids=row_ids,
                positions=positions,
                filtered=self._is_filtered,
                out=tokens,
            )
        else:
            tokens.copy_(scores.likeliest)
        kernels.keep_drawn(state, row_ids, tokens)


def _new_inputs(model: StepModel) -> DecodeInputs:
    size, device, num_groups = model.max_rows, model.device, model.num_groups

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        token_ids=zeros(size),
        positions=zeros(size),
        draw_positions=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        tables=zeros(num_groups, size, model.max_blocks, dtype=torch.int32),
        slots=zeros(num_groups, size),
    )


def _first(inputs: DecodeInputs, size: int) -> DecodeInputs:
    """The part of `size` rows."""
    return DecodeInputs(
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        draw_positions=inputs.draw_positions[:size],
        query_starts=inputs.query_starts[: size + 1],
        context_lens=inputs.context_lens[:size],
        tables=inputs.tables[:, :size],
        slots=inputs.slots[:, :size],
    )


def _metadata(inputs: DecodeInputs, max_model_len: int) -> tuple[AttentionMetadata, ...]:
    """One per layer group. How long the contexts are only the device knows."""
    return tuple(
        AttentionMetadata(
            block_tables=tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slot_mapping=slots,
            max_query_len=1,
            max_context_len=max_model_len,
        )
        for tables, slots in zip(inputs.tables, inputs.slots, strict=True)
    )
