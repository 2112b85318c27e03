"""Conversations: the prompt of a turn contains the turns before it and what the user adds.

An engine's answer is not known in advance and differs between engines. So the next prompt has
seeded tokens in its place, as many as were generated, and all engines get the same ids. A prefix
cache finds the earlier prompt again, but must compute the tokens in place of the answer.
"""

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

__all__ = ["KIND", "conversations"]


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


KIND = Kind(
    help="conversations, turn after turn",
    build=conversations,
    flags=(
        num_requests_flag(40),
        Flag("num_turns", int, "4", "turns of a conversation"),
        input_len_flag("64"),
        output_len_flag("32"),
    ),
)
