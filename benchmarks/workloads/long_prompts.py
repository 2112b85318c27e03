"""Long prompts, alone or among short ones."""

import random

from baton.errors import ConfigurationError
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

__all__ = ["KIND", "long_prompts"]


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
    """Requests of which a share is long, at random places.

    Args:
        num_requests: long and short ones together.
        long_len: tokens of a long prompt.
        long_share: how many of the prompts are long, in (0, 1]; at least one is.
        input_len: tokens of the other prompts.
        output_len: tokens to generate.
        vocab_size: ids are below it.
        seed: of all draws.
    """
    refuse_below(1, num_requests=num_requests)
    if not 0 < long_share <= 1:
        raise ConfigurationError(f"--long-share is {long_share}; it must be in (0, 1]")
    source = random.Random(seed)
    num_long = max(1, round(long_share * num_requests))
    places = set(source.sample(range(num_requests), num_long))
    requests = []
    for index in range(num_requests):
        length = (long_len if index in places else input_len).draw(source)
        requests.append(
            BenchRequest(
                prompt_token_ids=draw_tokens(source, length, vocab_size),
                num_output_tokens=output_len.draw(source),
            )
        )
    others = f", {num_requests - num_long} of {input_len}" if num_long < num_requests else ""
    return Workload(f"{num_long} prompts of {long_len}{others} in, {output_len} out", requests)


KIND = Kind(
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
