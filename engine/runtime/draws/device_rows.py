"""`DeviceRows`: the rows' state on the device, updated by small copies from the host.

A decode step updates positions and drawn tokens on the device itself. The host sends only its
own decisions: new block ids, and the positions and draw parameters that chunks set.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

import kernels
from engine.batch import ScheduledChunk, TableUpdate
from engine.runtime.device import to_device
from engine.runtime.draws.rows import Rows
from engine.runtime.draws.sampler import draw_table, draw_words
from kernels import DRAW_RECORD, DrawTable, RowState

__all__ = ["DeviceRows"]


class DeviceRows:
    """The rows' state on host and device.

    Args:
        num_layer_groups: number of layer groups.
        num_rows: maximum number of sequences that run at once.
        max_blocks: maximum number of blocks of one sequence in one layer group.
        spare_block: the block of the pool for `spare_row`.
        device: the device of `state`.

    Attributes:
        host: the state that the host knows, which is all but the tokens drawn.
        state: the state on the device, of `num_rows` rows and the spare row.
        spare_row: a row without a sequence; all its KV goes to the spare block.
    """

    def __init__(
        self,
        num_layer_groups: int,
        num_rows: int,
        max_blocks: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        self.host = Rows(num_layer_groups, num_rows, max_blocks)
        self.spare_row = num_rows
        num_rows += 1
        tables = torch.zeros(
            (num_layer_groups, num_rows, max_blocks), dtype=torch.int32, device=device
        )
        tables[:, self.spare_row] = spare_block
        self.state = RowState(
            tables=tables,
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            last_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draws=draw_table(np.zeros(num_rows, DRAW_RECORD), device),
        )

    def update_tables(self, updates: Sequence[TableUpdate]) -> None:
        """Writes new block ids into the tables."""
        if not updates:
            return
        self.host.update_tables(updates)
        indices, block_ids = _last_entries(updates, tuple(self.state.tables.shape))
        sent = to_device(np.stack((indices, block_ids)), self.state.tables.device)
        kernels.write_table_entries(self.state.tables, sent[0], sent[1].int())

    def advance(self, chunks: Sequence[ScheduledChunk], decode_ids: np.ndarray) -> None:
        """Advances rows as `Rows.advance` does; the device itself advances those that decode."""
        self.host.advance(chunks, decode_ids)
        if not chunks:
            return
        ids = np.array([chunk.row for chunk in chunks], np.int64)
        positions = self.state.positions
        sent = to_device(np.stack((ids, self.host.positions[ids])), positions.device)
        positions.index_copy_(0, sent[0], sent[1])

    def keep_drawn(
        self, drawing: Sequence[tuple[int, ScheduledChunk]], tokens: torch.Tensor
    ) -> None:
        """Stores the tokens that chunks drew, and their draw parameters, in their rows.

        Args:
            drawing: pairs of an index into `tokens` and the chunk that drew that token.
            tokens: `[n]` int64 on the device.
        """
        state = self.state
        ids = np.array([chunk.row for _, chunk in drawing], np.int64)
        which = np.array([index for index, _ in drawing], np.int64)
        words = np.concatenate((np.stack((ids, which)), draw_words(self.host.draws[ids])))
        sent = to_device(words, state.positions.device)
        rows, table = sent[0], DrawTable.of_words(sent[2:])
        state.last_tokens.index_copy_(0, rows, tokens.index_select(0, sent[1]).clamp(min=0))
        for column, sent_column in zip(state.draws.columns, table.columns, strict=True):
            column.index_copy_(0, rows, sent_column)

    def keep_tokens(self, row_ids: np.ndarray, tokens: np.ndarray) -> None:
        """Stores tokens that another rank drew, as `Rows.keep_drawn` does.

        Args:
            row_ids: `[n]` int64, all different.
            tokens: `[n]` int64.
        """
        last_tokens = self.state.last_tokens
        sent = to_device(np.stack((row_ids, np.maximum(tokens, 0))), last_tokens.device)
        last_tokens.index_copy_(0, sent[0], sent[1])


def _last_entries(
    updates: Iterable[TableUpdate], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns flat indices into tables of `shape`, and the block id for each, both int64.

    Each index occurs once: if several updates change an entry, the last one counts.
    """
    _, num_rows, max_blocks = shape
    indices, block_ids = [], []
    for update in updates:
        first = (update.layer_group * num_rows + update.row) * max_blocks + update.first_index
        indices.append(np.arange(first, first + len(update.block_ids)))
        block_ids.append(np.array(update.block_ids, np.int64))
    all_indices, all_ids = np.concatenate(indices), np.concatenate(block_ids)
    unique, from_end = np.unique(all_indices[::-1], return_index=True)
    return unique, all_ids[::-1][from_end]
