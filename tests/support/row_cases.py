"""State of rows and inputs of steps, and their expected values in plain Python."""

from dataclasses import dataclass, fields
from itertools import accumulate, chain

import numpy as np
import torch

from engine.runtime.draws.sampler import draw_table
from kernels import DRAW_RECORD, RowState, SentSequences, SequenceInputs

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

    def new_inputs(self, num_seqs, num_tokens, spare=0):
        """Returns unwritten inputs, in memory for `spare` more sequences and tokens."""
        num_layer_groups, _, max_blocks = self.rows.tables.shape
        sizes = num_seqs + spare, num_tokens + spare
        inputs = SequenceInputs.allocate(num_layer_groups, *sizes, max_blocks, self.device)
        for field in fields(SequenceInputs):
            getattr(inputs, field.name).fill_(_UNWRITTEN)
        return inputs.first(num_seqs, num_tokens)

    def sent(self, sequences):
        """Returns what the host sends of sequences (row, start or None, token ids, num_unkept).

        A start of None stands for the row's own position, a token of None for the token that it
        drew last.
        """
        ends = list(accumulate([len(tokens) for _, _, tokens, _ in sequences], initial=0))
        columns = (
            [row for row, _, _, _ in sequences],
            [-1 if start is None else start for _, start, _, _ in sequences],
            ends,
            [num_unkept for _, _, _, num_unkept in sequences],
            [-1 if token is None else token for _, _, tokens, _ in sequences for token in tokens],
        )
        words = torch.tensor([*chain(*columns)], dtype=torch.int64, device=self.device)
        return SentSequences.of_words(words, len(sequences), ends[-1])

    def check_laid_out(self, sequences, inputs):
        """Asserts that `inputs` are those of `sequences`, in this order."""
        first = 0
        for index, (row, start, tokens, num_unkept) in enumerate(sequences):
            own = int(self.rows.positions[row]) if start is None else start
            last, end = int(self.rows.last_tokens[row]), own + len(tokens)
            places, positions = slice(first, first + len(tokens)), range(own, end)
            expected = [last if token is None else token for token in tokens]
            assert inputs.token_ids[places].tolist() == expected
            assert inputs.positions[places].tolist() == list(positions)
            assert inputs.draw_positions[places].tolist() == [p + 1 for p in positions]
            assert inputs.query_starts[index : index + 2].tolist() == [first, places.stop]
            assert int(inputs.context_lens[index]) == end
            assert int(inputs.num_unkept[index]) == num_unkept
            used = slice(-(-end // self.block_size))
            for layer_group, tables in enumerate(self.rows.tables.tolist()):
                table = tables[row]
                assert inputs.tables[layer_group, index, used].tolist() == table[used]
                slots = [divmod(position, self.block_size) for position in positions]
                assert inputs.slots[layer_group, places].tolist() == [
                    table[block] * self.block_size + offset for block, offset in slots
                ]
            first = places.stop

    def state(self):
        """Returns the rows' state, except for draws, as plain lists."""
        return {
            field.name: getattr(self.rows, field.name).tolist()
            for field in fields(RowState)
            if field.name != "draws"
        }
