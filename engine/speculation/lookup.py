"""Draft tokens from text that repeats: the tokens that once followed a sequence's latest ones.

Prompt lookup decoding (Saxena 2023) searches the sequence itself; suffix decoding (Oliaro et al.
2024) searches earlier answers too. Here the longest match counts, and the latest of several.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from engine.groups.states import SEPARATOR
from engine.speculative_config import SpeculativeConfig

__all__ = ["AnswerLookup", "Proposer", "SequenceLookup", "make_proposer"]

_KEY_WIDTH = 3
_MAX_PLACES = 1024
_BITS_PER_TOKEN = 21  # three tokens fill an int64; larger vocabularies do not exist


class Proposer(ABC):
    """Drafts the tokens that follow a sequence."""

    @abstractmethod
    def propose(self, tokens: np.ndarray, limit: int, *, is_private: bool) -> list[int]:
        """Returns the draft tokens, the next token first; empty if there are none.

        Args:
            tokens: `[n]` int32; the sequence, after its prediction and `SEPARATOR` if it has one.
            limit: the most draft tokens.
            is_private: whether nothing of other requests may be used for this one.
        """

    def keep_answer(self, token_ids: Sequence[int], num_prompt: int) -> None:  # noqa: B027 - optional
        """Takes a sequence that has ended, for later ones.

        Args:
            token_ids: the sequence.
            num_prompt: how many of them are its prompt.
        """

    def forget_answers(self) -> None:  # noqa: B027 - optional
        """Forgets the sequences that have ended."""


class _Match(NamedTuple):
    """An earlier occurrence of a sequence's latest tokens.

    Attributes:
        width: number of equal tokens.
        end: index of the token after them.
    """

    width: int
    end: int


class SequenceLookup(Proposer):
    """Searches the sequence itself and its prediction, so that texts that repeat the prompt, the
    prediction or themselves are drafted.

    Args:
        config: the widths.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    @override
    def propose(self, tokens: np.ndarray, limit: int, *, is_private: bool) -> list[int]:
        match = self.match(tokens)
        return [] if match is None else _continuation(tokens, match.end, limit)

    def match(self, tokens: np.ndarray) -> _Match | None:
        """Returns the latest of the longest matches; None if none is long enough."""
        last = len(tokens) - 1
        ends, width = np.flatnonzero(tokens[:last] == tokens[last]), 1
        # Nothing follows the prediction's last token. Old places of a frequent token are left out.
        ends = ends[tokens[ends + 1] != SEPARATOR][-_MAX_PLACES:]
        while len(ends) and width < self._most:
            earlier = ends[ends >= width]
            longer = earlier[tokens[earlier - width] == tokens[last - width]]
            if not len(longer):
                break
            ends, width = longer, width + 1
        if not len(ends) or width < self._least:
            return None
        return _Match(width, int(ends[-1]) + 1)


class AnswerLookup(Proposer):
    """Searches the sequence itself and earlier answers; the longer match counts.

    Answers lie one after the other in a ring of `max_cached_tokens`; the oldest are overwritten.

    Args:
        config: the widths, and the size of the ring.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._own = SequenceLookup(config)
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._ring = np.full(config.max_cached_tokens, SEPARATOR, np.int32)
        self._next = 0
        self._latest: dict[int, int] = {}  # by the key of three tokens: the index after them

    @override
    def propose(self, tokens: np.ndarray, limit: int, *, is_private: bool) -> list[int]:
        own = self._own.match(tokens)
        other = None if is_private else self._match(tokens)
        if other is not None and (own is None or other.width > own.width):
            return _before_end(self._ring[other.end : other.end + limit])
        return [] if own is None else _continuation(tokens, own.end, limit)

    @override
    def forget_answers(self) -> None:
        self._ring.fill(SEPARATOR)
        self._next = 0
        self._latest.clear()

    @override
    def keep_answer(self, token_ids: Sequence[int], num_prompt: int) -> None:
        first = max(0, num_prompt - _KEY_WIDTH)  # so that the answer's beginning is found
        kept = np.array([*token_ids[first:], SEPARATOR], np.int32)
        size = len(self._ring)
        if len(kept) > size:
            return
        if self._next + len(kept) > size:
            self._overwrite(np.full(size - self._next, SEPARATOR, np.int32))
            self._next = 0
        start = self._next
        self._overwrite(kept)
        self._next = start + len(kept)
        ends = range(start + _KEY_WIDTH, self._next - 1)
        self._latest.update(zip(_keys(kept[:-1]).tolist()[:-1], ends, strict=True))

    def _overwrite(self, tokens: np.ndarray) -> None:
        """Writes tokens to the ring, and forgets those that were there."""
        start, end = self._next, self._next + len(tokens)
        first = max(0, start - _KEY_WIDTH)
        old = self._ring[first : end + _KEY_WIDTH]
        for index, key in enumerate(_keys(old).tolist(), first + _KEY_WIDTH):
            if self._latest.get(key) == index and index >= start:
                del self._latest[key]
        self._ring[start:end] = tokens

    def _match(self, tokens: np.ndarray) -> _Match | None:
        if len(tokens) < _KEY_WIDTH:
            return None
        (key,) = _keys(tokens[-_KEY_WIDTH:]).tolist()
        end = self._latest.get(key)
        if end is None:
            return None
        most = min(self._most, len(tokens), end)
        earlier, latest = self._ring[end - most : end], tokens[-most:]
        differing = np.flatnonzero((earlier != latest) | (latest == SEPARATOR))
        width = most - 1 - int(differing[-1]) if len(differing) else most
        return _Match(width, end) if width >= self._least else None


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """Returns the proposer of a method; None if the runner makes the draft tokens."""
    if config.has_model:
        return None
    return SequenceLookup(config) if config.method == "ngram" else AnswerLookup(config)


def _continuation(tokens: np.ndarray, start: int, limit: int) -> list[int]:
    """Returns the tokens from `start` on. At the sequence's end they begin again, as in text with a
    period; at the prediction's end they end.
    """
    following = tokens[start : start + limit]
    known = _before_end(following)
    if len(known) < len(following):
        return known
    return [int(token) for token in np.resize(following, limit)]


def _before_end(tokens: np.ndarray) -> list[int]:
    """Returns the tokens before the first `SEPARATOR`."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    known = tokens[: ends[0]] if len(ends) else tokens
    return [int(token) for token in known]


def _keys(tokens: np.ndarray) -> np.ndarray:
    """Returns the keys of each three adjacent tokens, `[len(tokens) - 2]` int64."""
    wide = tokens.astype(np.int64)
    first, second, third = wide[:-2], wide[1:-1], wide[2:]
    return (first << 2 * _BITS_PER_TOKEN) | (second << _BITS_PER_TOKEN) | third
