"""Seeded prompts of random tokens: alone, long among short ones, with shared prefixes, in turns.

An engine's answer is not known in advance and differs between engines. So the next prompt of a
conversation has seeded tokens in its place, as many as were generated, and all engines get the same
ids. A prefix cache finds the earlier prompt again, but must compute the tokens in place of the
answer.
"""

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

__all__ = [
    "CONVERSATION",
    "LONG",
    "RANDOM",
    "SHARED_PREFIX",
    "conversations",
    "long_prompts",
    "random_lengths",
    "shared_prefixes",
]


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


SHARED_PREFIX = Kind(
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


def conversations(
    *,
    num_requests: int,
    num_turns: int,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns all first turns, then all second turns, and so on. Each waits for the turn before.

    Args:
        num_requests: turns of all conversations together. If `num_turns` does not divide it, some
            conversations are a turn shorter.
        num_turns: turns of a conversation.
        input_len: tokens that the user adds per turn.
        output_len: tokens to generate per turn.
        vocab_size: every token id is smaller.
        seed: seed of all draws.
    """
    refuse_below(1, num_requests=num_requests, num_turns=num_turns)
    num_conversations = -(-num_requests // num_turns)
    source = random.Random(seed)
    requests: list[BenchRequest] = []
    for index in range(num_requests):
        before = index - num_conversations
        history = _history(requests[before], source, vocab_size) if before >= 0 else ()
        requests.append(
            BenchRequest(
                prompt_token_ids=history + draw_tokens(source, input_len.draw(source), vocab_size),
                num_output_tokens=output_len.draw(source),
                after=before if before >= 0 else None,
            )
        )
    return Workload(
        f"{num_conversations} conversations of {num_turns} turns, +{input_len} in, "
        f"{output_len} out",
        requests,
    )


def _history(turn: BenchRequest, source: random.Random, vocab_size: int) -> tuple[int, ...]:
    """Returns the turn's prompt and the tokens in place of its answer."""
    answer = draw_tokens(source, turn.num_output_tokens, vocab_size)
    return tuple(turn.prompt_token_ids) + answer


CONVERSATION = Kind(
    help="conversations, turn after turn",
    build=conversations,
    flags=(
        num_requests_flag(40),
        Flag("num_turns", int, "4", "turns of a conversation"),
        input_len_flag("64"),
        output_len_flag("32"),
    ),
)
