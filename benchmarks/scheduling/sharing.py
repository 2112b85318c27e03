"""Measures the memory that parallel sampling and beam search save by sharing blocks.

The saved share is 1 - distinct blocks / sum of the tables' lengths, over all running requests, as
a mean over the steps. Kwon et al. 2023 (PagedAttention) report it in section 6.3, on OPT-13B.

No model computes, so beams choose among random distributions of tokens, which have a peak like
those of language models. The higher the peak, the sooner one beam replaces the others, and the more
beams share. So two heights are measured.
"""

import math
import random
import statistics
from itertools import accumulate
from typing import Any

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from benchmarks.scheduling.served_load import (
    ALPACA,
    SHAREGPT,
    Lengths,
    NullRunner,
    new_scheduler,
    random_prompt,
    running_groups,
    serve,
)
from engine.batch import ChunkOutput
from engine.request import EngineRequest
from engine.schedule.scheduler import Scheduler

__all__ = ["PAPER", "measure_sharing"]

PAPER = {
    ("parallel", "Alpaca"): (0.061, 0.098),
    ("parallel", "ShareGPT"): (0.162, 0.305),
    ("beam", "Alpaca"): (0.376, 0.552),
    ("beam", "ShareGPT"): (0.443, 0.663),
}
"""The paper's savings with 2 and with 6 sequences per request."""
_WIDTHS = (2, 4, 6)
_PEAKS = (0.45, 0.85)
_NUM_REQUESTS = {"Alpaca": 200, "ShareGPT": 64}
_NUM_CONCURRENT = 16
_BLOCK_SIZE = 16
_SAMPLE_EVERY = 4  # steps
_NUM_REPORTS = 4096
_NUM_TOP = 8
_VOCAB_SIZE = 1 << 15


def measure_sharing() -> list[dict[str, Any]]:
    """Returns the saved memory for each method, set of lengths, width and peak of beams."""
    cases: list[tuple[str, float | None]] = [("parallel", None), *(("beam", p) for p in _PEAKS)]
    return [
        _measure(method, lengths, width, peak)
        for method, peak in cases
        for lengths in (ALPACA, SHAREGPT)
        for width in _WIDTHS
    ]


def _measure(method: str, lengths: Lengths, width: int, peak: float | None) -> dict[str, Any]:
    scheduler = new_scheduler(
        _NUM_CONCURRENT * width,
        num_blocks=_NUM_CONCURRENT * width * 4096 // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
    )
    watch = _Watch(scheduler)
    reports = _make_reports(peak) if peak else []
    num_requests = _NUM_REQUESTS[lengths.name]
    requests = _make_requests(lengths.draw(num_requests, seed=0), width, is_beam=method == "beam")
    outputs = serve(scheduler, NullRunner(reports), requests, watch.look)
    for request in requests:
        own = outputs[request.spec.request_id]
        max_tokens = request.spec.params.max_tokens
        num_tokens = sum(len(output.token_ids) for output in own)
        if num_tokens != max_tokens * width or not own[-1].is_last:
            raise RuntimeError(f"{num_tokens} tokens came of {width} x {max_tokens}")
    return {
        "method": method,
        "lengths": lengths.name,
        "width": width,
        "mean_top_probability": round(_mean_top(reports), 3) if reports else None,
        "block_size": _BLOCK_SIZE,
        "num_requests": num_requests,
        "num_samples": len(watch.saved),
        "saved": round(statistics.mean(watch.saved), 4),
    }


class _Watch:
    """Samples the saved share of blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.saved: list[float] = []
        self._scheduler = scheduler
        self._num_steps = 0

    def look(self) -> None:
        self._num_steps += 1
        if self._num_steps % _SAMPLE_EVERY == 0:
            groups = running_groups(self._scheduler)
            held = [block for group in groups for block in group.held_blocks()]
            self.saved.append(1 - len(set(held)) / len(held))


def _make_requests(
    lengths: list[tuple[int, int]], width: int, *, is_beam: bool
) -> list[EngineRequest]:
    draw = random.Random(1)
    return [
        EngineRequest(
            spec=RequestSpec(
                request_id=f"request-{index}",
                prompt_token_ids=random_prompt(draw, num_prompt),
                params=SamplingParams(
                    seed=index,
                    max_tokens=num_output,
                    n=width,
                    beam_width=width if is_beam else None,
                ),
            )
        )
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


def _make_reports(peak: float) -> list[ChunkOutput]:
    """Returns random most likely tokens. The first ones have a mean probability of about `peak`."""
    low, high = 0.1, 20.0
    while high - low > 0.01:
        middle = (low + high) / 2
        is_low = _mean_top(_draw_reports(middle, 512)) < peak
        low, high = (middle, high) if is_low else (low, middle)
    return _draw_reports(low, _NUM_REPORTS)


def _draw_reports(scale: float, count: int) -> list[ChunkOutput]:
    draw = random.Random(0)
    return [_draw_report(draw, scale) for _ in range(count)]


def _draw_report(draw: random.Random, scale: float) -> ChunkOutput:
    """Draws the log-probabilities of the most likely tokens.

    The gaps of the logits are exponential, the first one the largest: they are ordered exponential
    variables (Renyi). Their scale is random too, because some next tokens are clear and some are
    not.
    """
    own_scale = scale * draw.expovariate(1)
    gaps = (own_scale * draw.expovariate(rank) for rank in range(1, 4 * _NUM_TOP))
    logits = list(accumulate((-gap for gap in gaps), initial=0.0))
    total = math.log(sum(math.exp(logit) for logit in logits))
    token_ids = tuple(draw.sample(range(_VOCAB_SIZE), _NUM_TOP))
    return ChunkOutput(token_ids, tuple(logit - total for logit in logits[:_NUM_TOP]))


def _mean_top(reports: list[ChunkOutput]) -> float:
    return statistics.mean(math.exp(report.logprobs[0]) for report in reports)
