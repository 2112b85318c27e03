"""The model of `FakeRunner`: the next token is a hash of the sequence."""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b

from engine.batch import TokenLogprobs
from engine.config import EngineConfig
from engine.draw_params import DrawParams
from engine.runner import ModelInfo
from kvstore.layout import KvLayout, StateLayout, StatePart
from tests.support.draw_params import GREEDY

VOCAB_SIZE = 2


def fake_info(
    block_size: int,
    max_model_len: int,
    *,
    vocab_size: int = VOCAB_SIZE,
    windows: tuple[int | None, ...] = (None,),
    has_states: bool = False,
) -> ModelInfo:
    """Returns a model's description; at least one window must exceed 1 to carry any context."""
    assert any(window is None or window > 1 for window in windows)
    return ModelInfo(
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(),
        fingerprint=b"fake",
        layout=KvLayout(2, 1, block_size, 1, "float32"),
        windows=windows,
        # Moved in as many parts as a transfer block of four tokens has bytes less.
        states=StateLayout(2, (StatePart("sum", 1, 5, "float32"),)) if has_states else None,
    )


def fake_config(**overrides: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": "fake",
        "block_size": 4,
        "max_num_seqs": 4,
        "kv_publish": "off",
    }
    return EngineConfig(**(defaults | overrides))


def log_probabilities(token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> list[float]:
    """Returns the log-probability of every token after a sequence; no two are equal."""
    return list(_log_probabilities(tuple(token_ids), vocab_size))


@lru_cache(10_000)
def _log_probabilities(token_ids: tuple[int, ...], vocab_size: int) -> tuple[float, ...]:
    scores = [hash_of(token_ids, token) / 2**61 for token in range(vocab_size)]
    total = math.log(sum(math.exp(score) for score in scores))
    return tuple(score - total for score in scores)


def top_tokens(
    token_ids: Sequence[int], num_top: int, vocab_size: int = VOCAB_SIZE
) -> list[tuple[int, float]]:
    """Returns the most likely tokens after a sequence with their log-probabilities."""
    ranked = sorted(enumerate(log_probabilities(token_ids, vocab_size)), key=lambda pair: -pair[1])
    return ranked[:num_top]


def token_logprobs(
    token_ids: Sequence[int], token_id: int, num_top: int, vocab_size: int = VOCAB_SIZE
) -> TokenLogprobs:
    """Returns the log-probabilities at the place of a token after a sequence."""
    ranked = top_tokens(token_ids, vocab_size, vocab_size)
    rank = [other for other, _ in ranked].index(token_id)
    tops = ranked[:num_top]
    return TokenLogprobs(
        ranked[rank][1], rank + 1, tuple(t for t, _ in tops), tuple(value for _, value in tops)
    )


def next_token(
    token_ids: Sequence[int],
    draw: DrawParams = GREEDY,
    vocab_size: int = VOCAB_SIZE,
    allowed: Collection[int] | None = None,
) -> int:
    """Returns the token that the fake model draws after a sequence, of those that are allowed."""
    allowed = range(vocab_size) if allowed is None else allowed
    if draw.params.temperature == 0:
        return next(t for t, _ in top_tokens(token_ids, vocab_size, vocab_size) if t in allowed)
    return sorted(allowed)[hash_of(token_ids, draw.seed) % len(allowed)]


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    draw: DrawParams = GREEDY,
    vocab_size: int = VOCAB_SIZE,
) -> list[int]:
    sequence = list(prompt)
    for _ in range(max_tokens):
        sequence.append(next_token(sequence, draw, vocab_size))
    return sequence[len(prompt) :]


def hash_of(token_ids: Sequence[int], number: int) -> int:
    """Returns a 64-bit hash."""
    data = bytes(token_ids) + b"|" + number.to_bytes(8, "big")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
