"""`PagedSession`: runs sequences of one model step by step over their own pool."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

from engine.batch import ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.runtime.draws.rows import Rows
from engine.runtime.forward.batch_inputs import BatchInputs
from engine.runtime.kv_pool import decide_layout
from engine.runtime.weights.loader import LoadedModel, layer_groups_of, load_model
from kernels.paged_kv import LogitRows, PagedKv
from kvstore.mover.pool_objects import view_blocks
from tests.support.checkpoints import tiny_checkpoint
from tests.support.driven_requests import GREEDY
from tests.support.paged_batches import shuffled_tables, step_metadata

__all__ = ["BLOCK_SIZE", "PagedSession", "loaded"]

BLOCK_SIZE = 8


@cache
def loaded(variant: str, dtype: str = "auto") -> LoadedModel:
    """Returns a tiny checkpoint's model."""
    return load_model(str(tiny_checkpoint(variant)), dtype, "cpu", progress=False)


def _poisoned_states(model: LoadedModel, num_slots: int) -> tuple[torch.Tensor, ...]:
    """Returns the parts of one layer's states, full of NaN."""
    return tuple(
        torch.full(
            (num_slots, 1, shape.num_heads, shape.width),
            torch.nan,
            dtype=getattr(torch, shape.dtype or model.dtype),
        )
        for shape in model.model.config.state_shapes
    )


class PagedSession:
    """Sequences whose cache starts full of NaN, in shuffled blocks.

    Recurrent layers keep the state at the end of each block, in slots numbered as blocks.

    Args:
        model: the model.
        context_lens: maximum length of each sequence.
        seed: seed of the shuffling.
        kv_dtype: `KvLayout.dtype`; None for the model's.
    """

    def __init__(
        self,
        model: LoadedModel,
        context_lens: Sequence[int],
        seed: int = 0,
        kv_dtype: str | None = None,
    ) -> None:
        self.model = model
        config = model.model.config
        self.layer_groups = layer_groups_of(config)
        num_layer_groups = len(self.layer_groups.windows) + bool(config.recurrent_layers)
        self.state_group = len(self.layer_groups.windows) if config.recurrent_layers else None
        tables, num_blocks = shuffled_tables([*context_lens] * num_layer_groups, BLOCK_SIZE, seed)
        self.tables = [
            tables[layer_group * len(context_lens) :][: len(context_lens)]
            for layer_group in range(num_layer_groups)
        ]
        flags = EngineConfig(model="m", block_size=BLOCK_SIZE, kv_cache_dtype=kv_dtype or "auto")
        layout = decide_layout(flags, model, self.layer_groups)
        # Bytes of ones are NaN in every type.
        blocks = torch.full((num_blocks, layout.block_bytes), 0xFF, dtype=torch.uint8)
        blocks = blocks.view(getattr(torch, layout.pool_dtype))
        self.views = view_blocks(blocks.view(num_blocks, *layout.block_shape), layout)
        self.pool, self.scales = self.views.states, self.views.scales
        self.states = [_poisoned_states(model, num_blocks) for _ in config.recurrent_layers]
        self.done = [0] * len(context_lens)

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Runs (sequence, its next tokens); returns each one's logits `[tokens, vocab]`."""
        logits = self._run(self.inputs(work))
        return list(logits.split([len(tokens) for _, tokens in work]))

    @torch.inference_mode()
    def step_with_logits_of(
        self, work: Sequence[tuple[int, Sequence[int]]], indices: Sequence[int]
    ) -> torch.Tensor:
        """Runs a step in which only the sequences at `indices` of `work` need logits.

        Returns:
            `[num_logit_rows, vocab]`.
        """
        return self._run(self.inputs(work, indices))

    def inputs(
        self, work: Sequence[tuple[int, Sequence[int]]], logit_indices: Sequence[int] | None = None
    ) -> BatchInputs:
        """Returns the inputs of a step of `work`, which then counts as done.

        Args:
            work: (sequence, its next tokens).
            logit_indices: sequences whose last token needs logits; None: all tokens need them.
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
            layer_groups=tuple(meta for _, meta in steps),
            logit_rows=None if logit_indices is None else self._logit_rows(work, logit_indices),
        )

    def batch(
        self, work: Sequence[tuple[int, Sequence[int]]], drawing: Sequence[int] | None = None
    ) -> tuple[ScheduledBatch, Rows]:
        """Returns the same step as a batch of chunks, and the rows of all sequences."""
        chunks = []
        for index, (sequence, tokens) in enumerate(work):
            draws = (GREEDY,) if drawing is None or index in drawing else ()
            chunks.append(ScheduledChunk(sequence, tuple(tokens), self.done[sequence], draws))
            self.done[sequence] += len(tokens)
        return ScheduledBatch(1, tuple(chunks)), self.rows()

    def rows(self) -> Rows:
        """Returns a row per sequence, with its tables."""
        max_blocks = max(len(table) for tables in self.tables for table in tables)
        rows = Rows(len(self.tables), len(self.done), max_blocks)
        for layer_group, tables in enumerate(self.tables):
            for row, table in enumerate(tables):
                rows.tables[layer_group, row, : len(table)] = table
        return rows

    def _logit_rows(
        self, work: Sequence[tuple[int, Sequence[int]]], indices: Sequence[int]
    ) -> LogitRows:
        ends = list(accumulate(len(tokens) for _, tokens in work))
        chosen = [work[index][0] for index in indices]
        spans = [(self.done[sequence] - 1, 1) for sequence in chosen]
        steps = [
            step_metadata(spans, [tables[sequence] for sequence in chosen], BLOCK_SIZE)
            for tables in self.tables
        ]
        rows = torch.tensor([ends[index] - 1 for index in indices], dtype=torch.int64)
        return LogitRows(rows, tuple(meta for _, meta in steps))

    def kv(self, inputs: BatchInputs) -> PagedKv:
        """Returns the cache as a step with these inputs sees it."""
        return PagedKv(
            self.pool,
            inputs.layer_groups,
            self.layer_groups.slots,
            inputs.logit_rows,
            scales=self.scales,
            state_group=self.state_group,
            states=self.states,
            group_shapes=self.views.group_shapes,
        )

    def _run(self, inputs: BatchInputs) -> torch.Tensor:
        model = self.model.model
        return model.logits(model(inputs.token_ids, inputs.positions, self.kv(inputs)))
