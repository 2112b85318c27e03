"""KV events in vLLM's form: msgpack arrays that begin with the name of their kind. Pure.

    batch      [seconds since 1970, [event, ...], rank]
    stored     ["BlockStored", hashes, hash before them, token ids, tokens per block, LoRA's number,
                medium, LoRA's name, extra keys, group, its kind, its window]
    removed    ["BlockRemoved", hashes, medium, group]
    cleared    ["AllBlocksCleared"]

A hash is the block's key, 32 bytes. The salt of a sequence is an extra key of its first block. The
last three fields are null for a model with one layer group, as subscribers take blocks of some
kinds of groups only. After vLLM's `vllm/distributed/kv_events.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.kv_cache.spec import KvCacheSpec
from engine.kv_cache.token_log import TokenEvent, TokensCleared, TokensRemoved, TokensStored

__all__ = ["EventBatch", "VllmEvents"]

_MEDIUM = "GPU"
"""vLLM's name of the pool that its engine computes in, whatever the device is."""
_MAX_BLOCKS, _MAX_TOKENS = 512, 8192
"""The most of them in a message, so that one has at most some 60 KB."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one message.

    Attributes:
        events: as lists, ready to be encoded.
        num_keys: number of blocks that they name.
        starts_over: whether what came before no longer matters.
    """

    events: list[list[Any]]
    num_keys: int
    starts_over: bool

    def payload(self, timestamp_s: float, rank: int) -> list[Any]:
        """Returns the message's payload, ready to be encoded.

        Args:
            timestamp_s: seconds since 1970.
            rank: number of the worker among those with its topic.
        """
        return [timestamp_s, self.events, rank]


class VllmEvents:
    """Converts an engine's events to vLLM's.

    Args:
        spec: the engine's layer groups.
    """

    def __init__(self, spec: KvCacheSpec) -> None:
        self._block_size = spec.block_size
        self._groups = list(_describe_groups(spec))
        self._max_blocks = max(1, min(_MAX_BLOCKS, _MAX_TOKENS // spec.block_size))

    def batches(self, events: Iterable[TokenEvent]) -> Iterator[EventBatch]:
        """Yields events as messages of bounded size."""
        batch: list[list[Any]] = []
        num_keys, starts_over = 0, False
        for event, size in self._parts(events):
            is_cleared = isinstance(event, TokensCleared)
            if batch and (is_cleared or num_keys + size > self._max_blocks):
                yield EventBatch(batch, num_keys, starts_over)
                batch, num_keys, starts_over = [], 0, False
            starts_over |= is_cleared
            batch.append(self._converted(event))
            num_keys += size
        if batch:
            yield EventBatch(batch, num_keys, starts_over)

    def _parts(self, events: Iterable[TokenEvent]) -> Iterator[tuple[TokenEvent, int]]:
        """Yields events, the large ones in several parts, with their numbers of blocks."""
        for event in events:
            if isinstance(event, TokensCleared):
                yield event, 0
                continue
            for start in range(0, len(event.keys), self._max_blocks):
                keys = event.keys[start : start + self._max_blocks]
                if isinstance(event, TokensRemoved):
                    yield TokensRemoved(event.layer_group, keys), len(keys)
                else:
                    yield self._part(event, keys, start), len(keys)

    def _part(self, event: TokensStored, keys: tuple[bytes, ...], start: int) -> TokensStored:
        first = start * self._block_size
        return TokensStored(
            event.layer_group,
            keys,
            event.keys[start - 1] if start else event.parent,
            event.token_ids[first : first + len(keys) * self._block_size],
            event.cache_salt,
        )

    def _converted(self, event: TokenEvent) -> list[Any]:
        if isinstance(event, TokensCleared):
            return ["AllBlocksCleared"]
        group = self._groups[event.layer_group]
        if isinstance(event, TokensRemoved):
            return ["BlockRemoved", event.keys, _MEDIUM, group[0]]
        fields = [event.keys, event.parent, event.token_ids, self._block_size]
        extra_keys: list[Any] | None = None
        if event.cache_salt and event.parent is None:
            extra_keys = [[event.cache_salt], *[None] * (len(event.keys) - 1)]
        return ["BlockStored", *fields, None, _MEDIUM, None, extra_keys, *group]


def _describe_groups(spec: KvCacheSpec) -> Iterator[tuple[int | None, str | None, int | None]]:
    """Yields the number, kind and window of each layer group."""
    if spec.num_layer_groups == 1:
        yield None, None, None
        return
    for number, window in enumerate(spec.windows):
        yield number, "full_attention" if window is None else "sliding_window", window
    if spec.state_group is not None:
        yield spec.state_group, "mamba", None
