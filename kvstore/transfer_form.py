"""`TransferForm`: what KV looks like between engines. `BlockSlicing`: how a pool is cut for it.

    pool block  [num_layers, parts, heads here, tokens of a pool block, head_dim]
    object      [layers of a slice, parts, heads of a slice, tokens of a transfer block, head_dim]

The parts are K and V, or one latent vector; see `kvstore.layout`.

Tiers may differ in the block size of their pools, in how many ranks share a model's heads, and in
the type of their KV. They agree on a form: the number of tokens in a transfer block, the number of
slices of its layers and of its heads, and the element type. Pool block `b` is cut into the transfer
blocks `b * n` to `b * n + n - 1`, and each of these into one object per layer slice and head slice
that the pool has. Jobs name transfer blocks; stores and peers move objects.

A pool of a model with recurrent layers has slots for their states behind its `num_blocks` blocks
(`kvstore.layout.StateLayout`). A slot is cut into the same slices, and each slice into `units`
objects, so its states are moved as `units` further transfer blocks: unit `u` of slot `s` is number
`num_blocks * n + s * units + u`. States are bytes, which no form converts. So a slot lies in memory
in whole objects, which are as long as those of blocks:

    slot        [slices here, units, bytes of an object]

Pure: imports no torch. `kvstore.mover.pool_objects` reads and writes the bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from baton.common.errors import ConfigurationError
from kvstore.block_key import derive_namespace, describe_namespace, slice_key
from kvstore.layout import DTYPE_BYTES, LAYOUT_VERSION, SCALE_BYTES, KvLayout, StateLayout

__all__ = ["WHOLE", "BlockSlicing", "PoolShare", "RangeError", "TransferForm", "object_runs"]


@dataclass(frozen=True, slots=True)
class TransferForm:
    """The form of blocks that both sides of a transfer agree on.

    Attributes:
        block_size: tokens of a transfer block; divides the block size of every pool.
        dtype: element type; see `KvLayout`.
        num_head_slices: number of equal parts of a model's KV heads; a multiple of every tier's
            degree of tensor parallelism.
        num_layer_slices: number of equal parts of a block's layers; a multiple of every tier's
            number of pipeline stages. Each can be saved once its layers are computed.
        states: layout of the states of the whole model's recurrent layers; None for a model
            without.
    """

    block_size: int
    dtype: str
    num_head_slices: int = 1
    num_layer_slices: int = 1
    states: StateLayout | None = None

    @classmethod
    def of(cls, layout: KvLayout) -> "TransferForm":
        """The form in which blocks of this layout are moved unchanged."""
        return cls(layout.block_size, layout.dtype)

    def namespace(self, model_fingerprint: bytes) -> bytes:
        """Returns the namespace of the keys of a model's blocks in this form."""
        return derive_namespace(
            model_fingerprint=model_fingerprint,
            kv_dtype=self.dtype,
            layout_version=LAYOUT_VERSION,
            block_size=self.block_size,
            num_head_slices=self.num_head_slices,
            num_layer_slices=self.num_layer_slices,
            states=self.states.describe() if self.states is not None else "",
        )

    def describe(self, model_fingerprint: bytes) -> str:
        """Returns the contents of `namespace` in words."""
        return describe_namespace(
            model_fingerprint=model_fingerprint.hex(),
            kv_dtype=self.dtype,
            layout_version=LAYOUT_VERSION,
            block_size=self.block_size,
            num_head_slices=self.num_head_slices,
            num_layer_slices=self.num_layer_slices,
            states=self.states.describe() if self.states is not None else "",
        )


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The KV heads and the layers of a model that a pool has, each one of several equal parts.

    The heads of states are divided in the same way.

    Attributes:
        rank: number of the part of the heads.
        degree: number of parts of the heads.
        stage: number of the part of the layers, as pipelines divide them.
        num_stages: number of parts of the layers.
        num_blocks: number of the pool's blocks for tokens, behind which its slots for states lie;
            without meaning if it has none.
    """

    rank: int = 0
    degree: int = 1
    stage: int = 0
    num_stages: int = 1
    num_blocks: int = 0

    @classmethod
    def of(
        cls, rank: int, num_ranks: int, num_kv_heads: int, stage: int = 0, num_stages: int = 1
    ) -> "PoolShare":
        """Returns the share of one of several ranks; several may have the same heads.

        Args:
            rank: number of the rank, among those of its stage.
            num_ranks: number of ranks of a stage; this and the number of heads must be equal, or
                one a multiple of the other.
            num_kv_heads: of the model.
            stage: number of the stage.
            num_stages: number of stages, which divides the number of layers.
        """
        degree = min(num_ranks, num_kv_heads)
        return cls(rank * degree // num_ranks, degree, stage, num_stages)

    def layout_of(self, layout: KvLayout) -> KvLayout:
        """Returns the layout of the part of a block that has these heads and layers."""
        return layout.part_of(self.degree, self.num_stages)

    def states_of(self, states: StateLayout) -> StateLayout:
        """Returns the layout of the part of a slot that has these heads and layers; that of a slot
        of one slice has one slice, too.
        """
        parts = [replace(part, num_heads=part.num_heads // self.degree) for part in states.parts]
        return replace(
            states,
            num_layers=states.num_layers // self.num_stages,
            parts=tuple(parts),
            num_layer_slices=max(1, states.num_layer_slices // self.num_stages),
            num_head_slices=max(1, states.num_head_slices // self.degree),
        )


WHOLE = PoolShare()


class RangeError(RuntimeError):
    """A finite number became infinite in the type that a block was converted to."""

    def __init__(self) -> None:
        super().__init__("KV has numbers that the type converted to cannot hold")


@dataclass(frozen=True)
class BlockSlicing:
    """How one pool is cut into objects.

    The objects of the pool are numbered by pool block, then by transfer block, then by layer slice,
    then by head slice, as far as the pool has them.

    Attributes:
        layout: of the pool's blocks; counts only the heads and layers that the pool has.
        form: of the objects.
        share: which of the model's heads and layers the pool has.

    Raises:
        ConfigurationError: the pool cannot be cut into this form; names the flag and the limit.
    """

    layout: KvLayout
    form: TransferForm
    share: PoolShare = WHOLE

    @classmethod
    def of(
        cls, layout: KvLayout, form: TransferForm | None = None, share: PoolShare = WHOLE
    ) -> "BlockSlicing":
        """The slicing into `form`; if None, blocks are objects, and each share is a slice."""
        native = TransferForm(layout.block_size, layout.dtype, share.degree, share.num_stages)
        return cls(layout, form or native, share)

    def __post_init__(self) -> None:
        form, layout = self.form, self.layout
        if form.block_size < 1 or layout.block_size % form.block_size:
            limit = f"a divisor of --block-size {layout.block_size}"
            raise _bad_form("block-size", form.block_size, limit)
        num_heads, slices = layout.num_kv_heads * self.share.degree, form.num_head_slices
        if slices < 1 or num_heads % slices:
            heads = f"{num_heads} KV heads" if num_heads > 1 else "only KV head"
            raise _bad_form("head-slices", slices, f"a divisor of the model's {heads}")
        if slices % self.share.degree:
            limit = f"a multiple of the {self.share.degree} ranks that share the heads"
            raise _bad_form("head-slices", slices, limit)
        num_layers, slices = layout.num_layers * self.share.num_stages, form.num_layer_slices
        if slices < 1 or num_layers % slices:
            raise _bad_form(
                "layer-slices", slices, f"a divisor of the {num_layers} layers of a block"
            )
        if slices % self.share.num_stages:
            limit = f"a multiple of the {self.share.num_stages} stages that divide the layers"
            raise _bad_form("layer-slices", slices, limit)
        if self.object_layout.has_scales and form.block_size * layout.head_dim % SCALE_BYTES:
            whole = SCALE_BYTES // math.gcd(SCALE_BYTES, layout.head_dim)
            limit = f"a multiple of {whole} for {form.dtype} and heads of {layout.head_dim}"
            raise _bad_form("block-size", form.block_size, limit)
        if layout.group_shapes:
            self._check_group_shapes()
        if form.states is not None:
            self._check_states(form.states)

    def _check_group_shapes(self) -> None:
        """Checks that blocks of several shapes need no conversion, but for slices of heads, which
        depend on the share of the pool that is opened.
        """
        form, layout = self.form, self.layout
        why = ", as the model's layers have K and V of different shapes"
        if form.block_size != layout.block_size:
            raise _bad_form("block-size", form.block_size, f"{layout.block_size}{why}")
        if form.dtype != layout.dtype:
            raise _bad_form("dtype", form.dtype, f"{layout.dtype}{why}")
        for shape in layout.group_shapes:
            if shape.num_layers % len(self.layer_slices):
                limit = f"a divisor of the {shape.num_layers} layers of a block{why}"
                raise _bad_form("layer-slices", form.num_layer_slices, limit)

    def _check_states(self, states: StateLayout) -> None:
        if states.num_layers % self.form.num_layer_slices:
            limit = f"a divisor of the {states.num_layers} recurrent layers"
            raise _bad_form("layer-slices", self.form.num_layer_slices, limit)
        for part in states.parts:
            if part.num_heads % self.form.num_head_slices:
                limit = f"a divisor of the {part.num_heads} heads of the states' {part.name}"
                raise _bad_form("head-slices", self.form.num_head_slices, limit)

    @cached_property
    def transfer_blocks(self) -> int:
        """Number of transfer blocks in a pool block."""
        return self.layout.block_size // self.form.block_size

    @cached_property
    def head_slices(self) -> range:
        """Numbers of the head slices that the pool has."""
        count = self.form.num_head_slices // self.share.degree
        return range(self.share.rank * count, (self.share.rank + 1) * count)

    @cached_property
    def layer_slices(self) -> range:
        """Numbers of the layer slices that the pool has."""
        count = self.form.num_layer_slices // self.share.num_stages
        return range(self.share.stage * count, (self.share.stage + 1) * count)

    @cached_property
    def objects_per_block(self) -> int:
        """Number of objects in a transfer block."""
        return len(self.layer_slices) * len(self.head_slices)

    @cached_property
    def object_layout(self) -> KvLayout:
        """Layout of one object."""
        part = self.layout.part_of(len(self.head_slices), len(self.layer_slices))
        return replace(part, block_size=self.form.block_size, dtype=self.form.dtype)

    @property
    def is_native(self) -> bool:
        """Whether the pool's bytes are those of its objects, in their order."""
        layers = {name: getattr(self.layout, name) for name in ("num_layers", "group_shapes")}
        return replace(self.object_layout, **layers) == self.layout

    @property
    def max_runs(self) -> int:
        """Most runs of bytes that an object consists of, in pools of any block size and share."""
        part = self.object_layout
        return part.num_layers * part.num_parts * part.num_kv_heads * (2 if part.has_scales else 1)

    def object_keys(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Returns the keys of the objects of transfer blocks, in order."""
        if self.slice_numbers == (0,):
            return tuple(keys)
        return tuple(slice_key(key, number) for key in keys for number in self.slice_numbers)

    def object_ids(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of the objects of transfer blocks, in order.

        In a native form they count the objects from the beginning of the pool's memory. In others,
        those of slots count from where the slots begin, on from the number of all others.
        """
        count = self.objects_per_block
        if count == 1:
            return tuple(block_ids)
        object_ids: list[int] = []
        for block in block_ids:
            start, step = block * count, 1
            if self.holds_state(start):
                assert self.slots is not None
                step = self.slots.units
                unit = (block - self.first_state_object // count) % step
                start = (block - unit) * count + unit
            object_ids += range(start, start + count * step, step)
        return tuple(object_ids)

    def objects_in(self, num_blocks: int) -> int:
        """Returns the number of the objects of some blocks for tokens."""
        return num_blocks * self.transfer_blocks * self.objects_per_block

    @cached_property
    def slots(self) -> StateLayout | None:
        """Layout of the pool's slots; None without any."""
        form = self.form
        if form.states is None:
            return None
        object_bytes = self.object_layout.block_bytes
        slots = form.states.sliced(form.num_layer_slices, form.num_head_slices, object_bytes)
        return self.share.states_of(slots)

    @cached_property
    def first_state_object(self) -> int:
        """Number of the first object of a slot."""
        return self.objects_in(self.share.num_blocks)

    def holds_state(self, object_id: int) -> bool:
        """Whether an object belongs to a slot, rather than to a block."""
        return self.form.states is not None and object_id >= self.first_state_object

    @cached_property
    def slice_numbers(self) -> tuple[int, ...]:
        """Numbers of a transfer block's objects, among those of all ranks."""
        return tuple(
            layer_slice * self.form.num_head_slices + head_slice
            for layer_slice in self.layer_slices
            for head_slice in self.head_slices
        )


def object_runs(
    slicing: BlockSlicing, object_id: int
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Returns where an object's bytes lie in the pool, for peers that read them there.

    Args:
        slicing: how the pool is slicing.
        object_id: number of the object.

    Returns:
        The pool block, and (offset, number of bytes) of the runs in it that make up the object, in
        order; None if the types differ, so that no bytes of the pool are the object's. For an
        object of a slot, the block is that at which the slots begin.
    """
    if slicing.holds_state(object_id):
        num_bytes = slicing.object_layout.block_bytes
        offset = (object_id - slicing.first_state_object) * num_bytes
        return slicing.share.num_blocks, ((offset, num_bytes),)
    if slicing.layout.dtype != slicing.form.dtype:
        return None
    block_id, index = divmod(object_id, slicing.transfer_blocks * slicing.objects_per_block)
    return block_id, _runs_in_block(slicing, index)


@lru_cache(maxsize=1024)
def _runs_in_block(slicing: BlockSlicing, index: int) -> tuple[tuple[int, int], ...]:
    """Returns the runs of one of a block's objects; adjacent runs are joined."""
    layout, part = slicing.layout, slicing.object_layout
    sub_block, index = divmod(index, slicing.objects_per_block)
    layer_slice, head_slice = divmod(index, len(slicing.head_slices))
    row = layout.head_dim * DTYPE_BYTES["uint8" if layout.has_scales else layout.dtype]
    pieces = [(sub_block * part.block_size * row, part.block_size * row)]
    if layout.has_scales:
        factors = layout.block_size * row + sub_block * part.block_size * SCALE_BYTES
        pieces.append((factors, part.block_size * SCALE_BYTES))
    runs: list[tuple[int, int]] = []
    num_states = part.num_layers * part.num_parts
    for states in range(layer_slice * num_states, (layer_slice + 1) * num_states):
        first = states * layout.num_kv_heads + head_slice * part.num_kv_heads
        for head in range(first, first + part.num_kv_heads):
            for offset, num_bytes in pieces:
                _append_run(runs, head * layout.head_bytes + offset, num_bytes)
    return tuple(runs)


def _append_run(runs: list[tuple[int, int]], offset: int, num_bytes: int) -> None:
    if runs and sum(runs[-1]) == offset:
        start, before = runs.pop()
        offset, num_bytes = start, before + num_bytes
    runs.append((offset, num_bytes))


def _bad_form(flag: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"--kv-transfer-{flag} is {value}; it must be {limit}")
