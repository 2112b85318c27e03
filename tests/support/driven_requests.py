"""Drives a `ModelRunner` step by step: prompts in chunks, then rows that decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import ChunkOutput, ScheduledBatch, ScheduledChunk, TableUpdate
from engine.draw_params import DrawParams
from engine.runtime.model_runner import ModelRunner
from tests.support.draw_params import GREEDY


@dataclass
class DrivenRequest:
    """A request that runs in its own blocks; `tables` has their ids, one tuple per layer group."""

    prompt: tuple[int, ...]
    row: int
    tables: Sequence[tuple[int, ...]]
    chunk_size: int = 10**6
    first_step: int = 0
    draw: DrawParams = GREEDY
    wants_logprobs: bool = False
    num_computed: int = 0
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return bool(self.drawn)

    def next_chunk(self) -> ScheduledChunk:
        token_ids = self.prompt[self.num_computed :][: self.chunk_size]
        is_last = self.num_computed + len(token_ids) == len(self.prompt)
        return ScheduledChunk(
            row=self.row,
            token_ids=token_ids,
            start_position=self.num_computed,
            draws=(self.draw,) if is_last else (),
            wants_logprobs=self.wants_logprobs,
        )

    def table_updates(self) -> tuple[TableUpdate, ...]:
        return tuple(
            TableUpdate(self.row, layer_group, 0, table)
            for layer_group, table in enumerate(self.tables)
        )

    def take_chunk(self, chunk: ScheduledChunk, output: ChunkOutput | None) -> None:
        self.num_computed += chunk.num_tokens
        if output is not None:
            self.drawn += output.token_ids
            self.logprobs += output.logprobs

    def take_token(self, token_id: int, logprob: float | None) -> None:
        self.num_computed += 1
        self.drawn.append(token_id)
        if self.wants_logprobs:
            self.logprobs.append(logprob)


def run_step(runner: ModelRunner, step: int, requests: Sequence[DrivenRequest]) -> None:
    """Runs one step of all `requests`; those whose prompt is computed decode."""
    prompts = [request for request in requests if not request.decodes]
    decoding = [request for request in requests if request.decodes]
    new = [request for request in prompts if request.num_computed == 0]
    batch = ScheduledBatch(
        step=step,
        chunks=tuple(request.next_chunk() for request in prompts),
        decode_rows=tuple(request.row for request in decoding),
        table_updates=tuple(update for request in new for update in request.table_updates()),
    )
    output = runner.execute(batch)
    assert output.step == step
    for request, chunk, answer in zip(prompts, batch.chunks, output.chunks, strict=True):
        assert (answer is None) == (not chunk.needs_logits)
        request.take_chunk(chunk, answer)
    logprobs = output.decoded_logprobs or (None,) * len(decoding)
    for request, token_id, logprob in zip(decoding, output.decoded, logprobs, strict=True):
        request.take_token(token_id, logprob)


def generate(
    runner: ModelRunner, requests: Sequence[DrivenRequest], num_tokens: int
) -> list[list[int]]:
    """Runs steps until every request has `num_tokens`; adds each at its `first_step`."""
    step = 0
    while any(len(request.drawn) < num_tokens for request in requests):
        running = [
            request
            for request in requests
            if request.first_step <= step and len(request.drawn) < num_tokens
        ]
        if running:
            run_step(runner, step, running)
        step += 1
    return [request.drawn for request in requests]


def scattered_tables(
    num_sequences: int,
    blocks_each: int = 8,
    num_layer_groups: int = 1,
    num_blocks: int = 64,
    seed: int = 0,
) -> list[list[tuple[int, ...]]]:
    """Returns disjoint block tables over the pool, by sequence and layer group."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    assert num_sequences * num_layer_groups * blocks_each <= num_blocks
    taken = iter(order)
    return [
        [tuple(next(taken) for _ in range(blocks_each)) for _ in range(num_layer_groups)]
        for _ in range(num_sequences)
    ]
