"""Row state and inputs of decode steps, and their expected values in plain Python."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from engine.runtime.draws.sampler import draw_table
from kernels import DRAW_RECORD, DecodeInputs, RowState

__all__ = ["RowCase"]

_UNWRITTEN = -77


@dataclass(frozen=True)
class RowCase:
    """Rows with random tables and contexts, the last of them spare, on `device`."""

    rows: RowState
    block_size: int
    device: torch.device

    @classmethod
    def make(cls, device, *, num_layer_groups=2, num_rows=6, max_blocks=9, block_size=4, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape, below):
            return torch.randint(below, shape, generator=generator)

        tables = integers(num_layer_groups, num_rows, max_blocks, below=2**31 - 1).int()
        positions = integers(num_rows, below=max_blocks * block_size)
        positions[0] = max_blocks * block_size - 1  # the last slot of the last block
        positions[-1] = 0
        rows = RowState(
            tables=tables.to(device),
            positions=positions.to(device),
            last_tokens=integers(num_rows, below=10**6).to(device),
            draws=draw_table(np.zeros(num_rows, DRAW_RECORD), device),
        )
        return cls(rows, block_size, device)

    def new_inputs(self, count, spare=0):
        """Returns unwritten inputs of `count` sequences, in memory for `spare` more."""
        num_layer_groups, _, max_blocks = self.rows.tables.shape

        def unwritten(*shape, dtype=torch.int64):
            return torch.full(shape, _UNWRITTEN, dtype=dtype, device=self.device)

        size = count + spare
        return DecodeInputs(
            token_ids=unwritten(size)[:count],
            positions=unwritten(size)[:count],
            draw_positions=unwritten(size)[:count],
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=self.device),
            context_lens=unwritten(size, dtype=torch.int32)[:count],
            tables=unwritten(num_layer_groups, size, max_blocks, dtype=torch.int32)[:, :count],
            slots=unwritten(num_layer_groups, size)[:, :count],
        )

    def check_laid_out(self, row_ids, inputs):
        """Asserts that `inputs` are those of `row_ids`, in this order."""
        positions = [int(self.rows.positions[row]) for row in row_ids]
        assert inputs.token_ids.tolist() == [int(self.rows.last_tokens[row]) for row in row_ids]
        assert inputs.positions.tolist() == positions
        assert inputs.draw_positions.tolist() == [position + 1 for position in positions]
        assert inputs.context_lens.tolist() == [position + 1 for position in positions]
        assert inputs.query_starts.tolist() == list(range(len(row_ids) + 1))
        for layer_group, tables in enumerate(self.rows.tables.tolist()):
            for index, (row, position) in enumerate(zip(row_ids, positions, strict=True)):
                block, offset = divmod(position, self.block_size)
                used = slice(block + 1)
                assert inputs.tables[layer_group, index, used].tolist() == tables[row][used]
                expected = tables[row][block] * self.block_size + offset
                assert int(inputs.slots[layer_group, index]) == expected

    def state(self):
        """Returns the rows' state, except for draws, as plain lists."""
        return {
            field.name: getattr(self.rows, field.name).tolist()
            for field in fields(RowState)
            if field.name != "draws"
        }
