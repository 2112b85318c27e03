"""`KvCacheSpec`: the layers that share a block, and the blocks that tokens need. Pure.

Layers with full attention and layers with a sliding window need different
blocks, because KV behind a layer's window is never read again. The layers
therefore form *layer groups*. All layers of a layer group have the same window,
and each layer group has its own block tables. All blocks have the same size, that
of one layer group's KV, and come from one pool, so a block can serve any layer
group. After vLLM's hybrid KV cache manager and Jenga (Zhang et al. 2025). If layers
differ in the shape of their KV, so do the numbers of layers in their blocks.

A model whose layers all have the same window has one layer group.

Recurrent layers have no K and V of each token, but one *state*, which sums up all
tokens before. They form one further layer group, the last one. Its block tables name
*slots*: memory for the states of all recurrent layers at one position.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runner import ModelInfo
from kvstore.layout import KvLayout, KvShape, StateLayout
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm

__all__ = [
    "KvCacheSpec",
    "LayerGroups",
    "StateSpacing",
    "default_state_interval",
    "group_layers",
    "slicing_of",
    "spec_of",
]

_MIN_CACHED_INTERVAL = 512
_MAX_INTERVAL = 1024
_KV_PER_STATE = 4


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How a model's layers share blocks.

    Attributes:
        windows: per layer group of attention layers, the number of tokens a query sees,
            itself included; None for all.
        slots: per layer, (layer group, index within the layer group's blocks). For recurrent
            layers, the layer group is `len(windows)`, and the index counts them.
        layers_per_block: number of layers in one block.
        num_recurrent: number of recurrent layers.
        shapes: per layer group of attention layers, the shape of its blocks; empty if all have
            the same. Then `layers_per_block` is the number of layers in the first one's.
    """

    windows: tuple[int | None, ...]
    slots: tuple[tuple[int, int], ...]
    layers_per_block: int
    num_recurrent: int = 0
    shapes: tuple[KvShape, ...] = ()

    def slots_of(self, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
        """Returns the slots of a pipeline stage's layers, in blocks of the stage's layers alone.

        Args:
            stage: number of the stage.
            num_stages: number of stages, which divides the number of layers.

        Raises:
            ConfigurationError: the stages do not have the same part of each layer group.
        """
        num_layers = len(self.slots) // num_stages
        sizes = [shape.num_layers for shape in self.shapes] or (
            [self.layers_per_block] * len(self.windows)
        )
        sizes.append(self.num_recurrent)
        own = [
            (layer_group, index - stage * (sizes[layer_group] // num_stages))
            for layer_group, index in self.slots[stage * num_layers : (stage + 1) * num_layers]
        ]
        if any(size % num_stages for size in sizes) or any(
            not 0 <= index < sizes[layer_group] // num_stages for layer_group, index in own
        ):
            recurrent = f" and {self.num_recurrent} recurrent layers" if self.num_recurrent else ""
            raise ConfigurationError(
                f"--pipeline-parallel-size is {num_stages}; its stages need equally many layers of "
                f"each sliding window of the model, which has {len(self.windows)} groups of "
                f"{self.layers_per_block} layers{recurrent}"
            )
        return tuple(own)


def group_layers(
    windows: Sequence[int | None],
    recurrent_layers: Collection[int] = (),
    shapes: Sequence[KvShape] = (),
    sources: Sequence[int] = (),
) -> LayerGroups:
    """Groups layers by window and shape, and recurrent layers in the last layer group.

    The size of a layer group is the smallest number of layers with the same window, or, if layers
    have different shapes, as `_block_shapes` decides. Layers that do not fill their last layer
    group leave the rest of its blocks unused.

    Args:
        windows: per layer, the number of tokens a query sees; None for all. Those of
            recurrent layers have no meaning.
        recurrent_layers: numbers of the recurrent layers, at least one less than all.
        shapes: per layer, the shape of its K and V; empty if all have the same.
        sources: per layer, the number of the layer whose K and V it reads; empty if each layer
            reads its own.
    """
    layers_of: dict[tuple[int | None, KvShape | None], list[int]] = {}
    for layer, window in enumerate(windows):
        if layer not in recurrent_layers and (not sources or sources[layer] == layer):
            shape = shapes[layer] if shapes else None
            layers_of.setdefault((window, shape), []).append(layer)
    sizes = _sizes_of_groups(layers_of)
    slots: dict[int, tuple[int, int]] = {}
    group_windows: list[int | None] = []
    group_shapes: list[KvShape] = []
    for (window, shape), layers in layers_of.items():
        size = sizes[shape]
        for index, layer in enumerate(layers):
            slots[layer] = (len(group_windows) + index // size, index % size)
        num_groups = -(-len(layers) // size)
        group_windows += [window] * num_groups
        if shape is not None:
            group_shapes += [replace(shape, num_layers=size)] * num_groups
    for index, layer in enumerate(sorted(recurrent_layers)):
        slots[layer] = (len(group_windows), index)
    return LayerGroups(
        windows=tuple(group_windows),
        slots=tuple(slots[sources[layer] if sources else layer] for layer in range(len(windows))),
        layers_per_block=next(iter(sizes.values())),
        num_recurrent=len(recurrent_layers),
        shapes=tuple(group_shapes) if len(set(group_shapes)) > 1 else (),
    )


def _sizes_of_groups(
    layers_of: Mapping[tuple[int | None, KvShape | None], Sequence[int]],
) -> dict[KvShape | None, int]:
    """Returns the number of layers in a block of each shape, so that all blocks have one size.

    Of the possible sizes it is the one with which a token takes the least memory in layers without
    a window, or in all layers if each has one, and of several the one with the fewest layer groups.

    Args:
        layers_of: by window and shape, the numbers of the layers.
    """
    widths = {shape: 1 if shape is None else shape.width for _, shape in layers_of}
    if len(widths) == 1:
        return dict.fromkeys(widths, min(len(layers) for layers in layers_of.values()))
    unit = math.lcm(*widths.values())
    most = max(len(layers) * widths[shape] for (_, shape), layers in layers_of.items())

    def cost(block_width: int) -> tuple[int, int]:
        num_groups = {
            key: -(-len(layers) * widths[key[1]] // block_width)
            for key, layers in layers_of.items()
        }
        unlimited = sum(count for (window, _), count in num_groups.items() if window is None)
        total = sum(num_groups.values())
        return (unlimited or total) * block_width, total

    block_width = min(range(unit, most + unit, unit), key=cost)
    return {shape: block_width // width for shape, width in widths.items()}


@dataclass(frozen=True, slots=True)
class StateSpacing:
    """Positions at which the states of a sequence are kept.

    Attributes:
        interval: a running sequence keeps its state at the last multiple of this many tokens,
            to which it can go back. A multiple of the block size.
        cached_interval: states at multiples of it stay in the prefix cache when their sequence
            needs them no longer. A multiple of `interval`.
    """

    interval: int
    cached_interval: int

    @classmethod
    def of(cls, interval: int) -> "StateSpacing":
        """Returns the spacing with the default `cached_interval`: at least 512 tokens."""
        return cls(interval, interval * -(-_MIN_CACHED_INTERVAL // interval))


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Computes how many blocks a sequence needs.

    Attributes:
        block_size: tokens per block.
        windows: `LayerGroups.windows`.
        max_chunk: maximum number of tokens of one sequence in steps that are not
            committed yet, including the step being built.
        states: where states are kept; None for a model without recurrent layers.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_chunk: int = 1
    states: StateSpacing | None = None

    @property
    def num_layer_groups(self) -> int:
        """Number of layer groups, which is the number of block tables per sequence."""
        return len(self.windows) + (self.states is not None)

    @property
    def state_group(self) -> int | None:
        """Number of the layer group whose block tables name slots; None without one."""
        return None if self.states is None else len(self.windows)

    def first_live(self, layer_group: int, position: int) -> int:
        """Returns the index of the first block that a sequence holds whose tokens before
        `position` are computed: the first that queries at `position` or later read.

        Of its states, it holds that at the last multiple of the interval, and later ones.
        """
        if self.states is not None and layer_group == len(self.windows):
            return max(0, position - self.states.interval) // self.block_size
        window = self.windows[layer_group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def first_needed(self, layer_group: int, num_blocks: int) -> int:
        """Returns the index of the first block without which a prefix of `num_blocks` blocks
        cannot be continued: of the states, only the last one is needed.
        """
        if layer_group == self.state_group:
            return max(0, num_blocks - 1)
        return self.first_live(layer_group, num_blocks * self.block_size)

    def keeps_state(self, index: int, num_known: int) -> bool:
        """Whether a sequence keeps the state at the end of block `index`, to go back to.

        Args:
            index: of the block.
            num_known: number of tokens that the sequence had at admission. It also keeps the
                state at the end of the last full block of these, with which requests of the
                same beginning go on.
        """
        assert self.states is not None, "the model has recurrent layers"
        end = (index + 1) * self.block_size
        return end % self.states.interval == 0 or index == num_known // self.block_size - 1

    def caches_state(self, index: int, num_known: int) -> bool:
        """Whether the state at the end of block `index` stays in the prefix cache once its
        sequence needs it no longer. The arguments are those of `keeps_state`.
        """
        assert self.states is not None, "the model has recurrent layers"
        end = (index + 1) * self.block_size
        return end % self.states.cached_interval == 0 or index == num_known // self.block_size - 1

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
        """Returns the maximum number of blocks that a sequence of `num_tokens` needs at once.

        Slots are not counted: a sequence needs one, and keeps more if others are free.
        """
        return sum(
            self.max_live(layer_group, num_tokens) for layer_group in range(len(self.windows))
        )

    def blocks_for_branches(self, num_shared: int, num_tokens: int, num_branches: int) -> int:
        """Returns the same for branches that share the full blocks of their first `num_shared`
        tokens.
        """
        if num_branches == 1:
            return self.blocks_for(num_tokens)
        return sum(
            self._branch_blocks(layer_group, num_shared, num_tokens, num_branches)
            for layer_group in range(len(self.windows))
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


def spec_of(config: EngineConfig, info: ModelInfo) -> KvCacheSpec:
    """Returns the spec of an engine.

    Args:
        config: the engine's flags. With overlapped steps, the next chunk gets its blocks
            while a chunk is in flight, and no block that the latter reads is released.
        info: the model's layer groups and states.
    """
    max_chunk = config.max_chunk * config.max_open_steps
    states = None
    if info.states is not None:
        states = StateSpacing.of(config.state_interval or default_state_interval(info))
    return KvCacheSpec(config.block_size, info.windows, max_chunk, states)


def slicing_of(config: EngineConfig, layout: KvLayout, states: StateLayout | None) -> BlockSlicing:
    """Returns how an engine's blocks and slots are cut for transfers between tiers.

    Args:
        config: the engine's flags.
        layout: shape of the whole model's blocks.
        states: shape of its slots, however these are cut; None for a model without.

    Raises:
        ConfigurationError: they cannot be cut that way; names the flag.
    """
    is_auto = config.kv_transfer_dtype == "auto"
    form = TransferForm(
        config.transfer_block_size,
        layout.dtype if is_auto else config.kv_transfer_dtype,
        config.kv_transfer_head_slices
        or PoolShare.of(0, config.tensor_parallel_size, layout.num_kv_heads).degree,
        config.transfer_layer_slices,
        states,
    )
    return BlockSlicing(layout, form)


def default_state_interval(info: ModelInfo) -> int:
    """Returns after how many tokens a running sequence keeps its state unless a flag says it.

    It is the smallest number of whole blocks whose K and V are at least four times as large as a
    state, so that going back costs little and keeping states adds at most a quarter; at most
    1,024 tokens.
    """
    assert info.states is not None, "the model has recurrent layers"
    size = info.layout.block_size
    block_bytes = info.layout.block_bytes * len(info.windows)
    num_blocks = -(-_KV_PER_STATE * info.states.state_bytes // block_bytes)
    return size * min(num_blocks, max(1, _MAX_INTERVAL // size))
