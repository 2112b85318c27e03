"""`TokenLog`: the tokens of cached blocks, for followers that compute keys of their own. Pure.

The events of `engine.kv_cache.events` name blocks by Baton's keys, which routers compute. Others,
such as llm-d's, compute keys from the tokens. A block is named here once a sequence that has it in
its table is offered to the prefix cache, since a block that is loaded ahead of its request comes
without tokens.

Pending events are bounded: if a follower takes them too late, the whole content replaces them.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv_cache.block_table import BlockTable, runs_of

__all__ = ["TokenEvent", "TokenLog", "TokensCleared", "TokensRemoved", "TokensStored"]


@dataclass(frozen=True, slots=True)
class TokensStored:
    """Cached blocks that follow each other in a sequence.

    Attributes:
        layer_group: number of their layer group.
        keys: their keys.
        parent: key of the block before them; None at the start of a sequence.
        token_ids: the tokens of all of them.
        cache_salt: the salt of their sequence; only sequences with the same one share them.
    """

    layer_group: int
    keys: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TokensRemoved:
    """Blocks of one layer group that left the prefix cache, and were named before."""

    layer_group: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TokensCleared:
    """No block is cached. It also begins the whole content."""


TokenEvent = TokensStored | TokensRemoved | TokensCleared


class _NamedBlock(NamedTuple):
    parent: bytes | None
    token_ids: "array[int]"
    cache_salt: str


class TokenLog:
    """The tokens of the cached blocks, and a bounded log of their changes. The log begins with the
    whole content.

    Args:
        is_cached: whether the prefix cache has the block of a key in a layer group.
        num_layer_groups: number of layer groups.
        block_size: tokens per block.
        max_pending: number of keys in pending events beyond which the whole content replaces them.
    """

    def __init__(
        self,
        is_cached: Callable[[bytes, int], bool],
        num_layer_groups: int,
        block_size: int,
        max_pending: int,
    ) -> None:
        self._is_cached = is_cached
        self._block_size = block_size
        self._max_pending = max_pending
        self._blocks: list[dict[bytes, _NamedBlock]] = [{} for _ in range(num_layer_groups)]
        self._pending: list[TokenEvent] = []
        self._num_pending = 0
        self._is_whole_due = True

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has something to return."""
        return self._is_whole_due or bool(self._pending)

    def record(
        self, table: BlockTable, keys: Sequence[bytes], token_ids: Sequence[int], cache_salt: str
    ) -> None:
        """Names the blocks of a sequence that are cached and have not been named yet.

        Args:
            table: the sequence's table, just offered to the prefix cache.
            keys: keys of its full blocks, at least of those that were offered.
            token_ids: its tokens.
            cache_salt: its salt.
        """
        start, table.num_named = table.num_named, table.num_registered
        for layer_group, blocks in enumerate(self._blocks):
            new = [
                index
                for index in range(start, table.num_registered)
                if keys[index] not in blocks and self._is_cached(keys[index], layer_group)
            ]
            for index in new:
                first = index * self._block_size
                blocks[keys[index]] = _NamedBlock(
                    keys[index - 1] if index else None,
                    array("I", token_ids[first : first + self._block_size]),
                    cache_salt,
                )
            for run in runs_of(new):
                self._append(self._stored(layer_group, keys[run.start : run.stop]))

    def forget(self, keys: Sequence[bytes], layer_group: int) -> None:
        """Records that blocks have left the prefix cache."""
        blocks = self._blocks[layer_group]
        named = tuple(key for key in keys if blocks.pop(key, None) is not None)
        if named:
            self._append(TokensRemoved(layer_group, named))

    def clear(self) -> None:
        """Records that all blocks have left the prefix cache."""
        for blocks in self._blocks:
            blocks.clear()
        self.start_over()

    def start_over(self) -> None:
        """Makes the next events the whole content."""
        self._pending, self._num_pending, self._is_whole_due = [], 0, True

    def take_events(self) -> Sequence[TokenEvent]:
        """Returns the events since the last call, or the whole content."""
        if self._is_whole_due:
            self._is_whole_due = False
            return [TokensCleared(), *self._whole()]
        events, self._pending, self._num_pending = self._pending, [], 0
        return events

    def _append(self, event: TokensStored | TokensRemoved) -> None:
        if self._is_whole_due:
            return
        self._pending.append(event)
        self._num_pending += len(event.keys)
        if self._num_pending > self._max_pending:
            self.start_over()

    def _stored(self, layer_group: int, keys: Sequence[bytes]) -> TokensStored:
        blocks, token_ids = self._blocks[layer_group], array("I")
        for key in keys:
            token_ids.extend(blocks[key].token_ids)
        first = blocks[keys[0]]
        return TokensStored(
            layer_group, tuple(keys), first.parent, tuple(token_ids), first.cache_salt
        )

    def _whole(self) -> Iterator[TokensStored]:
        """Yields all blocks, each after the one before it in its sequence."""
        for layer_group, blocks in enumerate(self._blocks):
            seen: set[bytes] = set()
            for key in reversed(blocks):  # ends of sequences come first, so that runs are long
                run: list[bytes] = []
                before: bytes | None = key
                while before is not None and before in blocks and before not in seen:
                    seen.add(before)
                    run.append(before)
                    before = blocks[before].parent
                if run:
                    yield self._stored(layer_group, run[::-1])
