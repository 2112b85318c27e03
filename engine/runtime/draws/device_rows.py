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
from engine.runtime.draws.sampler import draw_words
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
        words = draw_words(np.zeros(num_rows, DRAW_RECORD))
        self._draw_words = to_device(words, device)  # the memory of `state.draws`
        self.state = RowState(
            tables=tables,
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            last_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draws=DrawTable.of_words(self._draw_words),
        )
        self._unsent: list[TableUpdate] = []

    def update_tables(self, updates: Sequence[TableUpdate]) -> None:
        """Writes new block ids into the host's tables; `table_words` are those that the device
        lacks.
        """
        self.host.update_tables(updates)
        self._unsent += updates

    @property
    def has_unsent_tables(self) -> bool:
        """Whether the host's tables have entries that those of the device lack."""
        return bool(self._unsent)

    def chunk_words(self, chunks: Sequence[ScheduledChunk]) -> np.ndarray:
        """Returns rows, their positions and their draw parameters, `[2 + columns of a DrawTable,
        n]` int64.

        Args:
            chunks: those of the step, which `Rows.advance` has advanced `host` by.
        """
        ids = np.array([chunk.row for chunk in chunks], np.int64)
        order = np.stack((ids, self.host.positions[ids]))
        return np.concatenate((order, draw_words(self.host.draws[ids])))

    def store_chunks(self, words: torch.Tensor) -> None:
        """Writes what `chunk_words` returned, sent to the device, into the rows' state."""
        if words.shape[1]:
            self.state.positions.index_copy_(0, words[0], words[1])
            self._draw_words.index_copy_(1, words[0], words[2:])

    def table_words(self) -> np.ndarray:
        """Returns the entries that the device's tables lack, `[2, n]` int64: indices and block
        ids.
        """
        if not self._unsent:
            return np.zeros((2, 0), np.int64)
        return np.stack(_last_entries(self._unsent, tuple(self.state.tables.shape)))

    def store_tables(self, words: torch.Tensor) -> None:
        """Writes what `table_words` returned, sent to the device, into the device's tables."""
        if words.shape[1]:
            kernels.write_table_entries(self.state.tables, words[0], words[1].int())
        self._unsent = []

    def keep_drawn(self, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Stores the tokens that chunks drew for their rows.

        Args:
            row_ids: `[n]` int64, all different.
            tokens: `[n]` int64.
        """
        self.state.last_tokens.index_copy_(0, row_ids, tokens.clamp(min=0))

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
