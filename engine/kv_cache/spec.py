"""`KvCacheSpec`: the layers that share a block, and the blocks that tokens need. Pure.

Layers with full attention and layers with a sliding window need different
blocks, because KV behind a layer's window is never read again. The layers
therefore form *layer groups* of equal size. All layers of a layer group have the
same window, and each layer group has its own block tables. All blocks have the
same shape, that of one layer group's KV, and come from one pool, so a block can
serve any layer group. After vLLM's hybrid KV cache manager and Jenga (Zhang et
al. 2025).

A model whose layers all have the same window has one layer group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig

__all__ = ["KvCacheSpec", "LayerGroups", "group_layers", "spec_of"]


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How a model's layers share blocks.

    Attributes:
        windows: per layer group, the number of tokens a query sees, itself
            included; None for all.
        slots: per layer, (layer group, index within the layer group's blocks).
        layers_per_block: number of layers in one block.
    """

    windows: tuple[int | None, ...]
    slots: tuple[tuple[int, int], ...]
    layers_per_block: int

    def slots_of(self, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
        """Returns the slots of a pipeline stage's layers, in blocks of the stage's layers alone.

        Args:
            stage: number of the stage.
            num_stages: number of stages, which divides the number of layers.

        Raises:
            ConfigurationError: the stages do not have the same part of each layer group.
        """
        num_layers, per_block = len(self.slots) // num_stages, self.layers_per_block // num_stages
        first = stage * per_block
        own = [
            (layer_group, index - first)
            for layer_group, index in self.slots[stage * num_layers : (stage + 1) * num_layers]
        ]
        if per_block * num_stages != self.layers_per_block or any(
            not 0 <= index < per_block for _, index in own
        ):
            raise ConfigurationError(
                f"--pipeline-parallel-size is {num_stages}; its stages need equally many layers of "
                f"each sliding window of the model, which has {len(self.windows)} groups of "
                f"{self.layers_per_block} layers"
            )
        return tuple(own)


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Groups layers by window.

    The size of a layer group is the smallest number of layers with the same window.
    Layers that do not fill their last layer group leave the rest of its blocks unused.

    Args:
        windows: per layer, the number of tokens a query sees; None for all.
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
    """Computes how many blocks a sequence needs.

    Attributes:
        block_size: tokens per block.
        windows: `LayerGroups.windows`.
        max_chunk: maximum number of tokens of one sequence in steps that are not
            committed yet, including the step being built.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_chunk: int = 1

    @property
    def num_layer_groups(self) -> int:
        """Number of layer groups, which is the number of block tables per sequence."""
        return len(self.windows)

    def first_live(self, layer_group: int, position: int) -> int:
        """Returns the index of the first block that queries at `position` or later read."""
        window = self.windows[layer_group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def max_live(self, layer_group: int, num_tokens: int) -> int:
        """Returns the maximum number of blocks that one sequence needs at once in a layer group,
        until it has `num_tokens` tokens.
        """
        num_blocks = -(-num_tokens // self.block_size)
        window = self.windows[layer_group]
        if window is None:
            return num_blocks
        # A chunk's first query sees `window - 1` tokens before it, from any offset in a block.
        span = window - 1 + self.max_chunk
        return min(num_blocks, (span + self.block_size - 2) // self.block_size + 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the maximum number of blocks that a sequence of `num_tokens` needs at once."""
        return sum(
            self.max_live(layer_group, num_tokens) for layer_group in range(self.num_layer_groups)
        )

    def blocks_for_branches(self, num_shared: int, num_tokens: int, num_branches: int) -> int:
        """Returns the same for branches that share the full blocks of their first `num_shared`
        tokens.
        """
        if num_branches == 1:
            return self.blocks_for(num_tokens)
        return sum(
            self._branch_blocks(layer_group, num_shared, num_tokens, num_branches)
            for layer_group in range(self.num_layer_groups)
        )

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """Returns the length of the longest sequence, up to `limit`, that `num_blocks` hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.blocks_for(middle) <= num_blocks else (low, middle - 1)
            )
        return low

    def _branch_blocks(
        self, layer_group: int, num_shared: int, num_tokens: int, num_branches: int
    ) -> int:
        if self.windows[layer_group] is not None:
            return num_branches * self.max_live(layer_group, num_tokens)
        num_common = num_shared // self.block_size
        return num_common + num_branches * (-(-num_tokens // self.block_size) - num_common)


def spec_of(config: EngineConfig, windows: tuple[int | None, ...]) -> KvCacheSpec:
    """Returns the spec of an engine.

    Args:
        config: the engine's flags. With overlapped steps, the next chunk gets its blocks
            while a chunk is in flight, and no block that the latter reads is released.
        windows: `LayerGroups.windows`.
    """
    num_open_steps = config.max_open_steps
    return KvCacheSpec(config.block_size, windows, config.max_chunk * num_open_steps)
