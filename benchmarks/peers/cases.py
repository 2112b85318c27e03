"""The workloads that engines are compared on, their figures, and the figures' floors. Pure.

A floor is what the machine's ceilings allow: the model's operations over the measured matrix rate,
or its bytes over the measured bandwidth, whichever takes longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.model_cost import Ceilings, ModelShape, floor_s, token_floor_s
from benchmarks.peers.peer_process import PeerRun
from benchmarks.request import BenchRequest, with_fresh_tokens
from benchmarks.workloads.kind import LengthRange
from benchmarks.workloads.synthetic import random_lengths, shared_prefixes

__all__ = [
    "CASE_NAMES",
    "Figure",
    "PeerCase",
    "build_cases",
    "requests_of_round",
]

Requests = Sequence[BenchRequest]

CASE_NAMES = ("batch-1", "mixed", "shared-prefix", "long-prompts")
_MAX_TOKEN_ID = 16_384
"""Limit of the prompts' token ids, so that random models of any vocabulary get equal prompts."""
_MIXED_SEED = 48  # differs from the other cases' seeds, so that no cases share a prefix
"""With 16,384 token ids, the case has 8,855 prompt tokens and 3,750 to generate."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a run of a workload yields.

    Attributes:
        name: the figure's name, with its unit.
        is_less_better: whether smaller numbers are better.
        of_run: returns the number of one run.
        floor: returns the best number that the ceilings allow.
    """

    name: str
    is_less_better: bool
    of_run: Callable[[Requests, PeerRun], float]
    floor: Callable[[Requests, ModelShape, Ceilings], float]


@dataclass(frozen=True, slots=True)
class PeerCase:
    """A workload and the figures that are measured on it."""

    name: str
    requests: Requests
    figures: tuple[Figure, ...]


def build_cases(vocab_size: int) -> dict[str, PeerCase]:
    """Returns the cases by name. Every token id is smaller than `vocab_size`."""
    ids = min(vocab_size, _MAX_TOKEN_ID)
    alone = _random(1, 128, 128, ids, seed=1)
    shared = shared_prefixes(
        num_requests=32,
        num_groups=1,
        prefix_len=768,
        input_len=_exactly(32),
        output_len=_exactly(32),
        vocab_size=ids,
        seed=2,
    )
    contents = (
        (alone, (_TOKEN_MS, _FIRST_TOKEN_MS)),
        (_mixed(ids), (_OUTPUT_RATE, _GAP_RATIO)),
        (shared.requests, (_OUTPUT_RATE,)),
        (_random(4, 3000, 16, ids, seed=3), (_TOTAL_RATE,)),
    )
    return {
        name: PeerCase(name, *content) for name, content in zip(CASE_NAMES, contents, strict=True)
    }


def requests_of_round(case: PeerCase, number: int, vocab_size: int) -> Requests:
    """Returns the case's requests with tokens of this round only, so that no cache finds them."""
    return with_fresh_tokens(case.requests, number, min(vocab_size, _MAX_TOKEN_ID))


def _mixed(ids: int) -> Requests:
    return random_lengths(
        num_requests=48,
        input_len=LengthRange(32, 336),
        output_len=LengthRange(16, 138),
        vocab_size=ids,
        seed=_MIXED_SEED,
    ).requests


def _random(num_requests: int, input_len: int, output_len: int, ids: int, seed: int) -> Requests:
    return random_lengths(
        num_requests=num_requests,
        input_len=_exactly(input_len),
        output_len=_exactly(output_len),
        vocab_size=ids,
        seed=seed,
    ).requests


def _exactly(num_tokens: int) -> LengthRange:
    return LengthRange(num_tokens, num_tokens)


def _token_ms(requests: Requests, run: PeerRun) -> float:
    """Returns the milliseconds per token of one request, from its first token to its last."""
    times_s = run.answers[0].token_times_s
    return 1000 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def _token_floor_ms(requests: Requests, shape: ModelShape, ceilings: Ceilings) -> float:
    return 1000 * token_floor_s(shape, ceilings)


def _first_token_ms(requests: Requests, run: PeerRun) -> float:
    return 1000 * run.answers[0].token_times_s[0]


def _first_token_floor_ms(requests: Requests, shape: ModelShape, ceilings: Ceilings) -> float:
    first = BenchRequest(requests[0].prompt_token_ids, num_output_tokens=1)
    return 1000 * floor_s([first], shape, ceilings)


def _output_rate(requests: Requests, run: PeerRun) -> float:
    return _num_outputs(requests) / run.wall_s


def _output_rate_floor(requests: Requests, shape: ModelShape, ceilings: Ceilings) -> float:
    return _num_outputs(requests) / floor_s(requests, shape, ceilings)


def _gap_ratio(requests: Requests, run: PeerRun) -> float:
    """Returns the 99th percentile of the gaps between two tokens of a request over their median."""
    gaps_s = np.concatenate([np.diff(answer.token_times_s) for answer in run.answers])
    gaps_s = gaps_s[gaps_s > 0]  # else both tokens are of one message
    if not len(gaps_s):
        return 1.0
    p50, p99 = np.percentile(gaps_s, (50, 99))
    return float(p99 / p50)


def _gap_ratio_floor(requests: Requests, shape: ModelShape, ceilings: Ceilings) -> float:
    return 1.0


def _total_rate(requests: Requests, run: PeerRun) -> float:
    return _num_tokens(requests) / run.wall_s


def _total_rate_floor(requests: Requests, shape: ModelShape, ceilings: Ceilings) -> float:
    return _num_tokens(requests) / floor_s(requests, shape, ceilings)


def _num_outputs(requests: Requests) -> int:
    return sum(request.num_output_tokens for request in requests)


def _num_tokens(requests: Requests) -> int:
    return _num_outputs(requests) + sum(len(request.prompt_token_ids) for request in requests)


_TOKEN_MS = Figure("ms per token", True, _token_ms, _token_floor_ms)
_FIRST_TOKEN_MS = Figure("ms to first token", True, _first_token_ms, _first_token_floor_ms)
_OUTPUT_RATE = Figure("output tokens/s", False, _output_rate, _output_rate_floor)
_GAP_RATIO = Figure("p99 / p50 of gaps", True, _gap_ratio, _gap_ratio_floor)
_TOTAL_RATE = Figure("total tokens/s", False, _total_rate, _total_rate_floor)
