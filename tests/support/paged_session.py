"""`PagedSession`: sequences of one model over a pool of their own, run step by step."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

from engine.batch import ScheduledBatch, ScheduledChunk
from engine.kv_cache.spec import group_layers
from engine.runtime.batch_inputs import BatchInputs
from engine.runtime.loader import LoadedModel, load_model
from engine.runtime.rows import Rows
from kernels.paged_kv import LogitRows, PagedKv
from kvstore.block_views import view_blocks
from kvstore.layout import KvLayout
from tests.support.checkpoints import tiny_checkpoint
from tests.support.driven_requests import GREEDY
from tests.support.paged_batches import shuffled_tables, step_metadata

__all__ = ["BLOCK_SIZE", "PagedSession", "loaded"]

BLOCK_SIZE = 8


@cache
def loaded(variant: str, dtype: str = "auto") -> LoadedModel:
    """A tiny checkpoint's model."""
    return load_model(str(tiny_checkpoint(variant)), dtype, "cpu", progress=False)


class PagedSession:
    """Sequences whose cache starts full of NaN, in shuffled blocks.

    Args:
        model: what runs.
        context_lens: how long each sequence may become.
        seed: of the shuffling.
        kv_dtype: as in `KvLayout`; None: the model's.
    """

    def __init__(
        self,
        model: LoadedModel,
        context_lens: Sequence[int],
        seed: int = 0,
        kv_dtype: str | None = None,
    ) -> None:
        self.model = model
        self.groups = group_layers(model.sliding_windows)
        num_groups = len(self.groups.windows)
        tables, num_blocks = shuffled_tables([*context_lens] * num_groups, BLOCK_SIZE, seed)
        self.tables = [
            tables[group * len(context_lens) :][: len(context_lens)] for group in range(num_groups)
        ]
        layout = KvLayout(
            num_layers=self.groups.layers_per_block,
            num_kv_heads=model.num_kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=model.head_dim,
            dtype=kv_dtype or model.dtype,
        )
        # All ones: NaN in every type.
        blocks = torch.full((num_blocks, layout.block_bytes), 0xFF, dtype=torch.uint8)
        blocks = blocks.view(getattr(torch, layout.pool_dtype))
        self.views = view_blocks(blocks.view(num_blocks, *layout.block_shape), layout)
        self.pool, self.scales = self.views.states, self.views.scales
        self.done = [0] * len(context_lens)

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Runs (sequence, its next tokens); gives each one's logits `[tokens, vocab]`."""
        logits = self._run(self.inputs(work))
        return list(logits.split([len(tokens) for _, tokens in work]))

    @torch.inference_mode()
    def step_asking(
        self, work: Sequence[tuple[int, Sequence[int]]], asking: Sequence[int]
    ) -> torch.Tensor:
        """As `step`, asked for what follows those of `work` at the indices `asking` alone.

        Returns:
            `[num_asking, vocab]`.
        """
        return self._run(self.inputs(work, asking))

    def inputs(
        self, work: Sequence[tuple[int, Sequence[int]]], asking: Sequence[int] | None = None
    ) -> BatchInputs:
        """What a step of `work` feeds the model, which then counts as done.

        Args:
            work: (sequence, its next tokens).
            asking: indices of those whose last token asks; None: all tokens ask.
        """
        spans = [(self.done[sequence], len(tokens)) for sequence, tokens in work]
        steps = [
            step_metadata(spans, [tables[sequence] for sequence, _ in work], BLOCK_SIZE)
            for tables in self.tables
        ]
        for sequence, tokens in work:
            self.done[sequence] += len(tokens)
        positions, _ = steps[0]
        return BatchInputs(
            token_ids=torch.tensor([token for _, tokens in work for token in tokens]),
            positions=positions,
            groups=tuple(meta for _, meta in steps),
            asking=None if asking is None else self._asking(work, asking),
        )

    def batch(
        self, work: Sequence[tuple[int, Sequence[int]]], asking: Sequence[int] | None = None
    ) -> tuple[ScheduledBatch, Rows]:
        """As `inputs`: the step in chunks, and the tables of all sequences."""
        chunks = []
        for index, (sequence, tokens) in enumerate(work):
            draws = (GREEDY,) if asking is None or index in asking else ()
            chunks.append(ScheduledChunk(sequence, tuple(tokens), self.done[sequence], draws))
            self.done[sequence] += len(tokens)
        return ScheduledBatch(1, tuple(chunks)), self.rows()

    def rows(self) -> Rows:
        """A row per sequence, with its tables."""
        max_blocks = max(len(table) for tables in self.tables for table in tables)
        rows = Rows(len(self.tables), len(self.done), max_blocks)
        for group, tables in enumerate(self.tables):
            for row, table in enumerate(tables):
                rows.tables[group, row, : len(table)] = table
        return rows

    def _asking(
        self, work: Sequence[tuple[int, Sequence[int]]], asking: Sequence[int]
    ) -> LogitRows:
        ends = list(accumulate(len(tokens) for _, tokens in work))
        chosen = [work[index][0] for index in asking]
        spans = [(self.done[sequence] - 1, 1) for sequence in chosen]
        steps = [
            step_metadata(spans, [tables[sequence] for sequence in chosen], BLOCK_SIZE)
            for tables in self.tables
        ]
        rows = torch.tensor([ends[index] - 1 for index in asking], dtype=torch.int64)
        return LogitRows(rows, tuple(meta for _, meta in steps))

    def _run(self, inputs: BatchInputs) -> torch.Tensor:
        kv = PagedKv(self.pool, inputs.groups, self.groups.slots, inputs.asking, scales=self.scales)
        model = self.model.model
        return model.logits(model(inputs.token_ids, inputs.positions, kv))
