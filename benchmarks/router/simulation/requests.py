"""`SimulatedRequest`: the requests of a trace as block keys and times. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from benchmarks.workloads.trace import TraceLine, read_trace

__all__ = ["BLOCK_TOKENS", "SimulatedRequest", "make_requests", "read_lines", "synthetic_trace"]

BLOCK_TOKENS = 512
"""Tokens of a trace's block, which is also a block of the simulated pools."""
_QUANTUM_MS = 3000.0
"""Times of Mooncake's traces are multiples of it; within it a seed spreads them."""
_FOLLOW_UP_SHARE = 0.5
_NUM_SYNTHETIC = 12_000
"""About as many requests as Mooncake's conversation trace has."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request, and what became of it.

    Attributes:
        number: its place in the trace.
        arrival_s: when it arrives.
        num_tokens: tokens of its prompt.
        num_output_tokens: tokens of its answer.
        keys: keys of the prompt's full blocks.
        num_shared_tokens: leading tokens that an earlier prompt had, too: what a cache without
            limits would hold.
        cached_tokens: leading tokens that were cached where the prompt was computed.
        first_token_s: seconds from its arrival to its first token.
        num_generated: tokens of its answer when it left decode.
    """

    number: int
    arrival_s: float
    num_tokens: int
    num_output_tokens: int
    keys: Sequence[bytes]
    num_shared_tokens: int = 0
    cached_tokens: int = field(default=0, init=False)
    first_token_s: float = field(default=0.0, init=False)
    num_generated: int = field(default=0, init=False)

    @property
    def max_cached_blocks(self) -> int:
        """Leading blocks that a cache can serve: at least one token is computed."""
        return (self.num_tokens - 1) // BLOCK_TOKENS

    @property
    def is_follow_up(self) -> bool:
        """Whether it goes on where an earlier request was, as a conversation's next turn does."""
        return self.num_shared_tokens >= _FOLLOW_UP_SHARE * self.num_tokens


def make_requests(
    lines: Sequence[TraceLine],
    *,
    num_folds: int = 1,
    time_scale: float = 1.0,
    max_total_tokens: int,
    seed: int,
) -> Sequence[SimulatedRequest]:
    """Returns the requests of a trace, in the order of their arrival.

    Args:
        lines: the trace.
        num_folds: the trace is cut into so many parts of equal duration, which arrive at the same
            time. A rate that is raised so leaves conversations the pauses between their turns.
            Parts have nothing in common but first blocks, as of a system prompt.
        time_scale: arrival times are multiplied by it.
        max_total_tokens: longer requests, prompt and answer, are left out.
        seed: spreads the requests of one moment of the trace.
    """
    part_ms = (lines[-1].timestamp_ms + _QUANTUM_MS) / num_folds
    source = random.Random(seed)
    requests = [
        SimulatedRequest(
            number=number,
            arrival_s=_within(line, part_ms, source.uniform(0, _QUANTUM_MS)) * time_scale,
            num_tokens=line.input_length,
            num_output_tokens=line.output_length,
            keys=_keys_of(line, int(line.timestamp_ms // part_ms)),
        )
        for number, line in enumerate(lines)
        if line.input_length + line.output_length <= max_total_tokens
    ]
    requests.sort(key=lambda request: request.arrival_s)
    seen: set[bytes] = set()
    for request in requests:
        num_shared = min(_num_leading(request.keys, seen), request.max_cached_blocks)
        request.num_shared_tokens = BLOCK_TOKENS * num_shared
        seen.update(request.keys)
    return requests


def _within(line: TraceLine, part_ms: float, delay_ms: float) -> float:
    """Returns the seconds from the start of its part to a request."""
    return (line.timestamp_ms % part_ms + delay_ms) / 1000


def _num_leading(keys: Sequence[bytes], seen: set[bytes]) -> int:
    return next((place for place, key in enumerate(keys) if key not in seen), len(keys))


def _keys_of(line: TraceLine, fold: int) -> Sequence[bytes]:
    """The chained keys of the prompt's full blocks, from the second on those of its part alone."""
    keys: list[bytes] = []
    key = b""
    for hash_id in line.hash_ids[: line.input_length // BLOCK_TOKENS]:
        part = fold.to_bytes(4, "little") if keys else b""
        key = blake2b(key + part + hash_id.to_bytes(8, "little"), digest_size=16).digest()
        keys.append(key)
    return keys


def read_lines(trace: Path | None) -> Sequence[TraceLine]:
    """Returns a trace.

    Args:
        trace: a file in Mooncake's format; None for conversations that are made up.

    Raises:
        ConfigurationError: the file is bad.
    """
    return synthetic_trace(_NUM_SYNTHETIC) if trace is None else list(read_trace(trace))


def synthetic_trace(num_requests: int, seed: int = 0) -> Sequence[TraceLine]:
    """Returns conversations of several turns below one system prompt, as a trace has them.

    Args:
        num_requests: the number of requests, about eight per conversation.
        seed: draws their lengths and order.
    """
    source = random.Random(seed)
    next_id = iter(range(1, 10**9))
    conversations: list[list[int]] = []
    lines = []
    for number in range(num_requests):
        if not conversations or source.random() < 1 / 8:
            conversations.append([0])
        ids = source.choice(conversations[-64:])
        ids += [next(next_id) for _ in range(source.randint(2, 12))]
        length = BLOCK_TOKENS * len(ids) - source.randint(0, BLOCK_TOKENS - 1)
        timestamp_ms = number // 10 * _QUANTUM_MS
        lines.append(TraceLine(timestamp_ms, length, source.randint(16, 600), tuple(ids)))
        if len(ids) > 60:
            conversations.remove(ids)
    return lines
