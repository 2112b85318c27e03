"""Replays a trace in Mooncake's format: a JSON object per line.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

`hash_ids` are ids of the prompt's blocks of 512 tokens. The tokens of a block are a function of its
id and the seed, so that requests with common ids share a prefix. Mooncake: Qin et al. 2024,
https://arxiv.org/abs/2407.00079
"""

import json
import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from baton.common.errors import ConfigurationError
from benchmarks.request import BenchRequest, Workload
from benchmarks.workloads.kind import Flag, Kind, num_requests_flag, refuse_below

__all__ = ["KIND", "TraceLine", "parse_line", "read_trace", "trace"]

_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A request of a trace. Lengths are in tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def trace(
    *,
    num_requests: int,
    trace: Path,
    length_scale: float,
    time_scale: float,
    max_total_len: int | None = None,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns the first requests of a trace, with their times.

    Args:
        num_requests: the most requests.
        trace: the file.
        length_scale: lengths of blocks, prompts and outputs are multiplied by it.
        time_scale: arrival times are multiplied by it; 0.5 is twice as fast.
        max_total_len: requests that are longer after scaling are left out.
        vocab_size: every token id is smaller.
        seed: seed of the blocks' tokens.

    Raises:
        ConfigurationError: the file or a scale is bad, or no request is left.
    """
    refuse_below(1, num_requests=num_requests)
    refuse_below(1e-6, length_scale=length_scale, time_scale=time_scale)
    tokens_of = _block_maker(math.ceil(_BLOCK_TOKENS * length_scale), vocab_size, seed)
    scaled = (_scale(line, length_scale, time_scale) for line in read_trace(trace))
    kept = (line for line in scaled if _total(line) <= (max_total_len or math.inf))
    requests = [_request(line, tokens_of) for line in islice(kept, num_requests)]
    if not requests:
        raise ConfigurationError(f"--trace {trace} has no request of up to {max_total_len} tokens")
    return Workload(f"trace {trace.stem}, lengths x {length_scale:g}", requests)


def read_trace(path: Path) -> Iterator[TraceLine]:
    """Reads the requests of a trace, in order.

    Raises:
        ConfigurationError: the file cannot be read, or a line has another format.
    """
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                yield parse_line(line, f"--trace {path}, line {number}")
    except OSError as error:
        raise ConfigurationError(f"--trace {path} cannot be read: {error.strerror}") from error


def parse_line(text: str, where: str) -> TraceLine:
    """Reads one line.

    Raises:
        ConfigurationError: the line has another format; names `where` and what is wrong.
    """
    try:
        fields = json.loads(text)
        line = TraceLine(
            timestamp_ms=float(fields["timestamp"]),
            input_length=int(fields["input_length"]),
            output_length=int(fields["output_length"]),
            hash_ids=tuple(fields["hash_ids"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{where} is not in Mooncake's format: {error!r}") from error
    if not 1 <= line.input_length <= _BLOCK_TOKENS * len(line.hash_ids):
        raise ConfigurationError(
            f"{where}: input_length is {line.input_length}; {len(line.hash_ids)} hash_ids "
            f"are for 1 to {_BLOCK_TOKENS * len(line.hash_ids)} tokens"
        )
    return line


def _scale(line: TraceLine, length_scale: float, time_scale: float) -> TraceLine:
    return TraceLine(
        timestamp_ms=line.timestamp_ms * time_scale,
        input_length=max(1, round(line.input_length * length_scale)),
        output_length=max(1, round(line.output_length * length_scale)),
        hash_ids=line.hash_ids,
    )


def _total(line: TraceLine) -> int:
    return line.input_length + line.output_length


def _block_maker(num_tokens: int, vocab_size: int, seed: int) -> Callable[[int], "array[int]"]:
    """Returns a function that makes the tokens of a block from its hash id."""

    @cache
    def tokens_of(hash_id: int) -> "array[int]":
        source = random.Random(f"{seed} {hash_id}")
        return array("I", source.choices(range(vocab_size), k=num_tokens))

    return tokens_of


def _request(line: TraceLine, tokens_of: Callable[[int], "array[int]"]) -> BenchRequest:
    """Makes a request. Its prompt is an array, because a trace has a hundred million tokens."""
    prompt = array("I")
    for hash_id in line.hash_ids:
        prompt.extend(tokens_of(hash_id))
    return BenchRequest(
        prompt_token_ids=prompt[: line.input_length],
        num_output_tokens=line.output_length,
        arrival_s=line.timestamp_ms / 1000,
    )


KIND = Kind(
    help="replay of a trace in Mooncake's format",
    build=trace,
    flags=(
        num_requests_flag(100),
        Flag("trace", Path, None, "JSONL file in Mooncake's format", "FILE", is_required=True),
        Flag("length_scale", float, "1", "multiply lengths by this", "X"),
        Flag("time_scale", float, "1", "multiply arrival times by this", "X"),
        Flag("max_total_len", int, None, "leave out requests of more tokens, prompt and output"),
    ),
)
