"""A runner that answers at once, and a scheduler that it serves."""

import random
from typing import Any

from benchmarks.scheduling.step_loop import engine_config, model_info
from engine.batch import ChunkOutput, ScheduledBatch, ScheduledChunk, StepOutput
from engine.runner import StepCosts
from engine.schedule.scheduler import Scheduler
from kvstore.connector import null_connector

__all__ = ["NullRunner", "new_scheduler"]

_TOKEN_ID = 7
_COSTS = StepCosts(prompt_token_s=1e-4, swapped_block_s=1e-4)


class NullRunner:
    """Draws the same token for everybody, and random most likely tokens for beams.

    Args:
        reports: most likely tokens with log-probabilities, to choose beams' from.
    """

    def __init__(self, reports: list[ChunkOutput] | None = None) -> None:
        self._reports = reports or []
        self._draw = random.Random(0)
        self._decoded: tuple[int, ...] = ()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """A step's output, in no time worth speaking of."""
        if len(self._decoded) != len(batch.decode_rows):
            self._decoded = (_TOKEN_ID,) * len(batch.decode_rows)
        chunks = tuple([self._output_of(chunk) for chunk in batch.chunks])
        return StepOutput(step=batch.step, chunks=chunks, decoded=self._decoded)

    def _output_of(self, chunk: ScheduledChunk) -> ChunkOutput | None:
        if chunk.num_top:
            report = self._draw.choice(self._reports)
            return ChunkOutput(report.token_ids[: chunk.num_top], report.logprobs[: chunk.num_top])
        return ChunkOutput((_TOKEN_ID,) * len(chunk.draws)) if chunk.draws else None


def new_scheduler(
    max_num_seqs: int, num_blocks: int, *, clock: Any = lambda: 0.0, **arguments: Any
) -> Scheduler:
    """A scheduler without swap space or connector; `arguments` are `EngineConfig`'s."""
    config = engine_config(max_num_seqs, **arguments)
    return Scheduler(
        config,
        model_info(config.block_size),
        num_blocks=num_blocks,
        num_host_blocks=0,
        costs=_COSTS,
        namespace=b"benchmark",
        connector=null_connector()[0],
        clock=clock,
    )
