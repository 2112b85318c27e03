"""Prompts of random tokens that share nothing: of one range of lengths, or some of them long."""

import random

from baton.common.errors import ConfigurationError
from benchmarks.request import BenchRequest, Workload
from benchmarks.workloads.kind import (
    Flag,
    Kind,
    LengthRange,
    draw_tokens,
    input_len_flag,
    num_requests_flag,
    output_len_flag,
    parse_length_range,
    refuse_below,
)

__all__ = ["LONG", "RANDOM", "long_prompts", "random_lengths"]


def random_lengths(
    *,
    num_requests: int,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns `num_requests` requests whose lengths are drawn independently."""
    refuse_below(1, num_requests=num_requests)
    source = random.Random(seed)
    requests = [
        _draw_request(source, input_len, output_len, vocab_size) for _ in range(num_requests)
    ]
    return Workload(f"random {input_len} in, {output_len} out", requests)


def long_prompts(
    *,
    num_requests: int,
    long_len: LengthRange,
    long_share: float,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns requests of which a share, at random places, has long prompts.

    Args:
        num_requests: long and short prompts together.
        long_len: tokens of a long prompt.
        long_share: the share of long prompts, in (0, 1]; at least one prompt is long.
        input_len: tokens of the other prompts.
        output_len: tokens to generate.
        vocab_size: every token id is smaller.
        seed: seed of all draws.
    """
    refuse_below(1, num_requests=num_requests)
    if not 0 < long_share <= 1:
        raise ConfigurationError(f"--long-share is {long_share}; it must be in (0, 1]")
    source = random.Random(seed)
    num_long = max(1, round(long_share * num_requests))
    places = set(source.sample(range(num_requests), num_long))
    requests = [
        _draw_request(source, long_len if index in places else input_len, output_len, vocab_size)
        for index in range(num_requests)
    ]
    others = f", {num_requests - num_long} of {input_len}" if num_long < num_requests else ""
    return Workload(f"{num_long} prompts of {long_len}{others} in, {output_len} out", requests)


def _draw_request(
    source: random.Random, input_len: LengthRange, output_len: LengthRange, vocab_size: int
) -> BenchRequest:
    return BenchRequest(
        prompt_token_ids=draw_tokens(source, input_len.draw(source), vocab_size),
        num_output_tokens=output_len.draw(source),
    )


RANDOM = Kind(
    help="random tokens, nothing shared",
    build=random_lengths,
    flags=(num_requests_flag(100), input_len_flag("128"), output_len_flag("64")),
)
LONG = Kind(
    help="long prompts, alone or among short ones",
    build=long_prompts,
    flags=(
        num_requests_flag(4),
        Flag("long_len", parse_length_range, "3000", "tokens of a long prompt", "N|MIN:MAX"),
        Flag("long_share", float, "1", "share of the prompts that are long", "X"),
        input_len_flag("128"),
        output_len_flag("16"),
    ),
)
