"""`KvCacheSpec`: which layers share a block, and how many blocks tokens take. Pure.

Layers that attend to everything and layers that attend to a window need
different blocks: behind its window, a layer's KV is never read again. So the
layers form *groups* of equal size, all layers of a group with one window, and
each group has a block table of its own. All blocks have one shape, that of a
group's layers, and come from one pool: memory flows between groups. After
vLLM's hybrid KV cache manager and Jenga (Zhang et al. 2025).

A model whose layers all attend alike has one group, and nothing changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig

__all__ = ["KvCacheSpec", "LayerGroups", "group_layers", "spec_of"]


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How a model's layers share blocks.

    Attributes:
        windows: per group, how many tokens a query sees, itself included;
            None for all.
        slots: per layer, (group, index within the group's blocks).
        layers_per_block: layers in one block.
    """

    windows: tuple[int | None, ...]
    slots: tuple[tuple[int, int], ...]
    layers_per_block: int


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Groups layers by window, in groups of the smallest kind's size.

    A kind whose layers do not fill its last group leaves the rest of that
    group's blocks unused.

    Args:
        windows: one entry per layer.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in layers_of.values())
    slots: dict[int, tuple[int, int]] = {}
    group_windows: list[int | None] = []
    for window, layers in layers_of.items():
        for index, layer in enumerate(layers):
            slots[layer] = (len(group_windows) + index // size, index % size)
        group_windows += [window] * -(-len(layers) // size)
    return LayerGroups(
        windows=tuple(group_windows),
        slots=tuple(slots[layer] for layer in range(len(windows))),
        layers_per_block=size,
    )


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """How many blocks tokens take.

    Attributes:
        block_size: tokens per block.
        windows: as in `LayerGroups`.
        max_chunk: the most tokens of one sequence in steps that have not been committed,
            the one being built included.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_chunk: int = 1

    @property
    def num_groups(self) -> int:
        """Block tables per sequence."""
        return len(self.windows)

    def first_live(self, group: int, position: int) -> int:
        """Index of the first block that a query at `position`, or a later one, reads."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def max_live(self, group: int, num_tokens: int) -> int:
        """The most blocks that the group needs at once on the way to `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        window = self.windows[group]
        if window is None:
            return num_blocks
        # A chunk's first query sees `window - 1` tokens before it, from any offset in a block.
        span = window - 1 + self.max_chunk
        return min(num_blocks, (span + self.block_size - 2) // self.block_size + 1)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that one sequence of `num_tokens` tokens needs at once."""
        return sum(self.max_live(group, num_tokens) for group in range(self.num_groups))

    def blocks_for_branches(self, num_shared: int, num_tokens: int, num_branches: int) -> int:
        """As `blocks_for`, for branches that share their first `num_shared` tokens' full blocks."""
        if num_branches == 1:
            return self.blocks_for(num_tokens)
        return sum(
            self._branch_blocks(group, num_shared, num_tokens, num_branches)
            for group in range(self.num_groups)
        )

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that `num_blocks` blocks hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.blocks_for(middle) <= num_blocks else (low, middle - 1)
            )
        return low

    def _branch_blocks(
        self, group: int, num_shared: int, num_tokens: int, num_branches: int
    ) -> int:
        if self.windows[group] is not None:
            return num_branches * self.max_live(group, num_tokens)
        num_common = num_shared // self.block_size
        return num_common + num_branches * (-(-num_tokens // self.block_size) - num_common)


def spec_of(config: EngineConfig, windows: tuple[int | None, ...]) -> KvCacheSpec:
    """How many blocks tokens take on an engine.

    Args:
        config: the engine's. With overlapped steps, a chunk may be in flight while
            the next one gets its blocks, and nothing that the first reads is released.
        windows: as in `LayerGroups`.
    """
    num_open_steps = 2 if config.async_scheduling else 1
    return KvCacheSpec(config.block_size, windows, config.max_chunk * num_open_steps)
