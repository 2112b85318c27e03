"""Requests of a file in ShareGPT's format: a JSON list of conversations.

    [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

As in vLLM's benchmark, a conversation's first question is the prompt, and the
length of its answer is how many tokens are generated.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.request import BenchRequest, Workload
from benchmarks.workloads.kind import Flag, Kind, num_requests_flag, refuse_below

__all__ = ["KIND", "read_exchanges", "sharegpt", "sharegpt_requests"]

_ASKERS = ("human", "user")
_ANSWERERS = ("gpt", "assistant", "chatgpt", "bing", "bard")


def sharegpt(
    *,
    num_requests: int,
    dataset: Path,
    tokenizer: str,
    max_total_len: int,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns exchanges of a file, in random order.

    Args:
        num_requests: the most requests.
        dataset: the file.
        tokenizer: folder or Hugging Face Hub name of the model whose tokenizer to use.
        max_total_len: longer exchanges, prompt and answer together, are left out.
        vocab_size: every token id must be smaller.
        seed: seed of the order.

    Raises:
        ConfigurationError: the file or the tokenizer is bad, or no exchange is left.
    """
    from router.requests.tokenizer import Tokenizer

    refuse_below(1, num_requests=num_requests)
    exchanges = read_exchanges(dataset)
    random.Random(seed).shuffle(exchanges)
    requests = sharegpt_requests(
        exchanges,
        Tokenizer.load(tokenizer).encode,
        num_requests=num_requests,
        max_total_len=max_total_len,
    )
    if not requests:
        raise ConfigurationError(
            f"--dataset {dataset} has no exchange of up to {max_total_len} tokens"
        )
    _check_ids(requests, tokenizer, vocab_size)
    return Workload(f"ShareGPT {dataset.name}", requests)


def read_exchanges(dataset: Path) -> list[tuple[str, str]]:
    """Returns (question, answer) of each conversation that starts with them.

    Raises:
        ConfigurationError: the file cannot be read, or has another format.
    """
    try:
        conversations = json.loads(dataset.read_text())
        turns = [conversation["conversations"][:2] for conversation in conversations]
        return [exchange for pair in turns for exchange in _exchange(pair)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"--dataset {dataset} is no JSON in ShareGPT's format: {error!r}"
        ) from error


def _exchange(turns: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Returns the two turns, if they are a question and its answer."""
    if len(turns) == 2 and turns[0]["from"] in _ASKERS and turns[1]["from"] in _ANSWERERS:
        yield turns[0]["value"], turns[1]["value"]


def sharegpt_requests(
    exchanges: Sequence[tuple[str, str]],
    encode: Callable[[str, bool], Sequence[int]],
    *,
    num_requests: int,
    max_total_len: int,
) -> list[BenchRequest]:
    """Returns requests of the first exchanges that are neither empty nor too long.

    Args:
        exchanges: pairs of question and answer.
        encode: returns the token ids of a text, with or without the model's special tokens.
        num_requests: the most requests.
        max_total_len: most tokens of an exchange, prompt and answer together.
    """
    requests: list[BenchRequest] = []
    for question, answer in exchanges:
        if len(requests) == num_requests:
            break
        prompt, num_output_tokens = encode(question, True), len(encode(answer, False))
        is_short = len(prompt) + num_output_tokens <= max_total_len
        if question and answer and is_short:
            requests.append(BenchRequest(tuple(prompt), num_output_tokens))
    return requests


def _check_ids(requests: Sequence[BenchRequest], tokenizer: str, vocab_size: int) -> None:
    largest = max(max(request.prompt_token_ids) for request in requests)
    if largest >= vocab_size:
        raise ConfigurationError(
            f"--tokenizer {tokenizer} made token {largest}; the model has {vocab_size} tokens"
        )


KIND = Kind(
    help="the questions and answer lengths of a file in ShareGPT's format",
    build=sharegpt,
    flags=(
        num_requests_flag(100),
        Flag("dataset", Path, None, "JSON file in ShareGPT's format", "FILE", is_required=True),
        Flag("tokenizer", str, None, "model whose tokenizer to use", "MODEL", is_required=True),
        Flag("max_total_len", int, "2048", "leave out requests of more tokens, prompt and output"),
    ),
)
