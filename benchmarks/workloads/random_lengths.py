"""Prompts of random tokens that share nothing, of fixed or uniform lengths."""

import random

from benchmarks.request import BenchRequest, Workload
from benchmarks.workloads.kind import (
    Kind,
    LengthRange,
    draw_tokens,
    input_len_flag,
    num_requests_flag,
    output_len_flag,
    refuse_below,
)

__all__ = ["KIND", "random_lengths"]


def random_lengths(
    *,
    num_requests: int,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    seed: int,
) -> Workload:
    """`num_requests` requests whose lengths are drawn independently."""
    refuse_below(1, num_requests=num_requests)
    source = random.Random(seed)
    requests = [
        BenchRequest(
            prompt_token_ids=draw_tokens(source, input_len.draw(source), vocab_size),
            num_output_tokens=output_len.draw(source),
        )
        for _ in range(num_requests)
    ]
    return Workload(f"random {input_len} in, {output_len} out", requests)


KIND = Kind(
    help="random tokens, nothing shared",
    build=random_lengths,
    flags=(num_requests_flag(100), input_len_flag("128"), output_len_flag("64")),
)
