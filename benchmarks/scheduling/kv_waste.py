"""KV waste: slots that are allocated and hold no token.

Kwon et al. 2023 (PagedAttention) promise under 4%: at most a block per
sequence is partly empty. Each step samples, over all running sequences, the
slots of the blocks that they hold, and two kinds of used ones:

- of known tokens: the prompt, what was generated, and the token being run;
- of computed tokens: those that this step or one before it runs. Blocks are
  given to a prompt all at once, so what later chunks will fill counts as waste.
"""

import random
import statistics
from typing import Any

from baton.request_spec import RequestSpec
from baton.sampling_params import SamplingParams
from benchmarks.scheduling.lengths import SHAREGPT
from benchmarks.scheduling.null_runner import NullRunner, new_scheduler
from benchmarks.scheduling.served_load import random_prompt, running_groups, serve
from engine.request import EngineRequest
from engine.schedule.scheduler import Scheduler

__all__ = ["measure_kv_waste"]

_BLOCK_SIZES = (8, 16, 32)
_NUM_REQUESTS = 1000
_MAX_NUM_SEQS = 64
_MAX_NUM_BATCHED_TOKENS = 512


def measure_kv_waste() -> list[dict[str, Any]]:
    """Waste at each block size, as means over the steps."""
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
        num_tokens = sum(len(output.token_ids) for output in outputs[request.spec.request_id])
        if num_tokens != request.spec.params.max_tokens:
            raise RuntimeError(
                f"{num_tokens} tokens came, {request.spec.params.max_tokens} were asked for"
            )
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
        EngineRequest(
            spec=RequestSpec(
                request_id=f"request-{index}",
                prompt_token_ids=random_prompt(draw, num_prompt),
                params=SamplingParams(temperature=0.0, seed=0, max_tokens=num_output),
            )
        )
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


def _sample(scheduler: Scheduler) -> tuple[float, float]:
    """Shares of the slots in use that hold known, and computed, tokens."""
    num_known = num_computed = num_blocks = 0
    for group in running_groups(scheduler):
        (sequence,) = group.running
        num_blocks += sum(1 for _ in group.held_blocks())
        num_known += len(sequence.token_ids)
        decodes = sequence in scheduler._decoding
        num_computed += len(sequence.token_ids) if decodes else sequence.num_scheduled
    pool = scheduler.kv.pool
    if num_blocks != pool.num_blocks - pool.num_free:
        raise RuntimeError("running sequences hold other blocks than the pool lent")
    num_slots = num_blocks * scheduler.kv.spec.block_size
    return num_known / num_slots, num_computed / num_slots
