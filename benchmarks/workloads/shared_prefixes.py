"""Groups of prompts that share a prefix, such as a system prompt."""

import random

from benchmarks.request import BenchRequest, Workload
from benchmarks.workloads.kind import (
    Flag,
    Kind,
    LengthRange,
    draw_tokens,
    input_len_flag,
    num_requests_flag,
    output_len_flag,
    refuse_below,
)

__all__ = ["KIND", "shared_prefixes"]


def shared_prefixes(
    *,
    num_requests: int,
    num_groups: int,
    prefix_len: int,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns requests of each group in turn: the group's prefix, then tokens of their own.

    Args:
        num_requests: requests of all groups together.
        num_groups: number of prefixes.
        prefix_len: tokens that the prompts of a group share.
        input_len: tokens of a prompt after the prefix.
        output_len: tokens to generate.
        vocab_size: every token id is smaller.
        seed: seed of all draws.
    """
    refuse_below(1, num_requests=num_requests, num_groups=num_groups, prefix_len=prefix_len)
    source = random.Random(seed)
    prefixes = [draw_tokens(source, prefix_len, vocab_size) for _ in range(num_groups)]
    requests = [
        BenchRequest(
            prompt_token_ids=prefixes[index % num_groups]
            + draw_tokens(source, input_len.draw(source), vocab_size),
            num_output_tokens=output_len.draw(source),
        )
        for index in range(num_requests)
    ]
    groups = f"{num_groups} groups of " if num_groups > 1 else ""
    return Workload(
        f"{groups}shared prefix {prefix_len} + {input_len} in, {output_len} out", requests
    )


KIND = Kind(
    help="groups of prompts with a common prefix",
    build=shared_prefixes,
    flags=(
        num_requests_flag(32),
        Flag("num_groups", int, "1", "groups of prompts, each with a prefix of its own"),
        Flag("prefix_len", int, "768", "tokens that the prompts of a group share"),
        input_len_flag("32"),
        output_len_flag("32"),
    ),
)
