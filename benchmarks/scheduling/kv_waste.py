"""Measures KV waste: allocated slots without a token.

Kwon et al. 2023 (PagedAttention) state less than 4%: at most one block per sequence is partly
empty. Each step samples the slots of the blocks of all running sequences, and two kinds of slots
that are used:

- slots of known tokens: the prompt, generated tokens, and the token that the step computes
- slots of computed tokens: those that this step or an earlier one computes. A prompt gets all its
  blocks at once, so slots for later chunks count as waste.
"""

import random
import statistics
from typing import Any

from benchmarks.scheduling.served_load import (
    SHAREGPT,
    NullRunner,
    greedy_request,
    new_scheduler,
    random_prompt,
    running_groups,
    serve,
)
from engine.request import EngineRequest
from engine.schedule.scheduler import Scheduler

__all__ = ["measure_kv_waste"]

_BLOCK_SIZES = (8, 16, 32)
_NUM_REQUESTS = 1000
_MAX_NUM_SEQS = 64
_MAX_NUM_BATCHED_TOKENS = 512


def measure_kv_waste() -> list[dict[str, Any]]:
    """Returns the waste at each block size, as means over the steps."""
    return [_measure(block_size) for block_size in _BLOCK_SIZES]


def _measure(block_size: int) -> dict[str, Any]:
    scheduler = new_scheduler(
        _MAX_NUM_SEQS,
        num_blocks=_MAX_NUM_SEQS * 4096 // block_size,
        block_size=block_size,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
    )
    samples: list[tuple[float, float]] = []
    lengths = SHAREGPT.draw(_NUM_REQUESTS, seed=0)
    requests = _make_requests(lengths)
    outputs = serve(scheduler, NullRunner(), requests, lambda: samples.append(_sample(scheduler)))
    for request in requests:
        max_tokens = request.spec.params.max_tokens
        num_tokens = sum(len(output.token_ids) for output in outputs[request.spec.request_id])
        if num_tokens != max_tokens:
            raise RuntimeError(f"{num_tokens} tokens came, {max_tokens} were asked for")
    known, computed = zip(*samples, strict=True)
    return {
        "block_size": block_size,
        "num_requests": _NUM_REQUESTS,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "mean_prompt": round(statistics.mean(prompt for prompt, _ in lengths), 1),
        "mean_output": round(statistics.mean(output for _, output in lengths), 1),
        "num_steps": len(samples),
        "waste_of_known": round(1 - statistics.mean(known), 4),
        "waste_of_computed": round(1 - statistics.mean(computed), 4),
    }


def _make_requests(lengths: list[tuple[int, int]]) -> list[EngineRequest]:
    draw = random.Random(1)
    return [
        greedy_request(f"request-{index}", random_prompt(draw, num_prompt), num_output)
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


def _sample(scheduler: Scheduler) -> tuple[float, float]:
    """Returns the shares of the allocated slots with known tokens and with computed tokens."""
    num_known = num_computed = num_blocks = 0
    for group in running_groups(scheduler):
        (sequence,) = group.running
        num_blocks += sum(1 for _ in group.held_blocks())
        num_known += len(sequence.token_ids)
        decodes = sequence in scheduler._decoding
        num_computed += len(sequence.token_ids) if decodes else sequence.num_scheduled
    pool = scheduler.kv.pool
    if num_blocks != pool.num_blocks - pool.num_free:
        raise RuntimeError(
            "the blocks of running sequences are not those that the pool has allocated"
        )
    num_slots = num_blocks * scheduler.kv.spec.block_size
    return num_known / num_slots, num_computed / num_slots
