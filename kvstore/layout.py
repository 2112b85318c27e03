"""`KvLayout`: the shape of one KV block, the same in pool, store and transfer.

    pool: [num_blocks, num_layers, num_parts, num_kv_heads, block_size, head_dim]

All bytes of a block lie together, so one block is one copy, one store object
and one transfer descriptor. Heads are contiguous, so that tiers of different
tensor parallelism can slice them. Of two parts, the first is K and the second V.
Latent attention has one part and one head: the vector from which each token's K
and V of all heads are computed.

In "fp8_e4m3" and "int8" each token's vector of a part and head is 8-bit floats, or
integers, with a factor. The factors of a layer, part and head lie behind its elements,
and the pool consists of bytes:

    pool: [num_blocks, num_layers, num_parts, num_kv_heads, block_size * (head_dim + 4)] uint8
               | block_size * head_dim float8_e4m3fn or int8 | block_size float32 |

Recurrent layers have no K and V, but a state per sequence: `StateLayout`.

Pure: imports no torch. `kvstore.mover.pool_objects.view_blocks` makes tensors of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

__all__ = [
    "DTYPE_BYTES",
    "FP8",
    "INT8",
    "LAYOUT_VERSION",
    "NARROW_DTYPES",
    "SCALE_BYTES",
    "KvLayout",
    "KvShape",
    "StateLayout",
    "StatePart",
]

LAYOUT_VERSION = 1
_STATE_LAYOUT_VERSION = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
FP8 = "fp8_e4m3"
INT8 = "int8"
# The types with factors, and the torch names of their elements.
NARROW_DTYPES = {FP8: "float8_e4m3fn", INT8: "int8"}
SCALE_BYTES = DTYPE_BYTES["float32"]
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of K, or V, of layers that share blocks.

    Attributes:
        num_kv_heads: KV heads of a layer.
        head_dim: elements of one token's vector of one part and head.
        num_layers: layers of a block.
    """

    num_kv_heads: int
    head_dim: int
    num_layers: int = 1

    @property
    def width(self) -> int:
        """Elements of one token's K, or V."""
        return self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and element type of a KV block.

    Attributes:
        num_layers: layers of a block.
        num_kv_heads: KV heads of a layer.
        block_size: tokens of a block.
        head_dim: elements of one token's vector of one part and head.
        dtype: element type: a torch name, or one of `NARROW_DTYPES`.
        num_parts: 2 for K and V, 1 for a latent vector.
        group_shapes: per layer group, the shape of a block of its layers, if not all have this
            one. All such blocks have the same size; the first shape is that of the layout.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    num_parts: int = 2
    group_shapes: tuple[KvShape, ...] = ()

    @property
    def max_layers(self) -> int:
        """The largest number of layers in a block, of all layer groups."""
        return max([self.num_layers, *(shape.num_layers for shape in self.group_shapes)])

    def part_of(self, num_head_parts: int, num_layer_parts: int) -> "KvLayout":
        """Returns the layout of one of equal parts of the heads and layers of a block."""
        shapes = [
            replace(
                shape,
                num_kv_heads=shape.num_kv_heads // num_head_parts,
                num_layers=shape.num_layers // num_layer_parts,
            )
            for shape in self.group_shapes
        ]
        return replace(
            self,
            num_kv_heads=self.num_kv_heads // num_head_parts,
            num_layers=self.num_layers // num_layer_parts,
            group_shapes=tuple(shapes),
        )

    def of_group(self, layer_group: int) -> "KvLayout":
        """Returns the layout of the blocks of a layer group."""
        if not self.group_shapes:
            return self
        shape = self.group_shapes[layer_group]
        return replace(
            self,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            group_shapes=(),
        )

    @property
    def has_scales(self) -> bool:
        """Whether each token's vector of a part and head has a factor."""
        return self.dtype in NARROW_DTYPES

    @property
    def pool_dtype(self) -> str:
        """The torch name of the pool's element type."""
        return "uint8" if self.has_scales else self.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """`[num_layers, num_parts, num_kv_heads, block_size, head_dim]`; with factors, the last two
        axes are one axis of bytes.
        """
        heads = (self.num_layers, self.num_parts, self.num_kv_heads)
        if self.has_scales:
            return (*heads, self.block_size * (self.head_dim + SCALE_BYTES))
        return (*heads, self.block_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one layer, part and head of a block."""
        return self.block_bytes // math.prod(self.block_shape[:3])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.pool_dtype]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent layer's state, `[num_heads, width]`.

    Attributes:
        name: of the part, for messages.
        num_heads: heads, which ranks and slices divide. Layers whose channels do not depend on
            each other count each channel as one.
        width: elements of one head.
        dtype: the torch name of the element type.
    """

    name: str
    num_heads: int
    width: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, without what follows until the next one begins."""
        return self.num_heads * self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of one slot: the states of all recurrent layers of a model at one position.

        slot   [layer slices, head slices, bytes of a slice, filled up to whole units]
        slice  [layers of a slice, parts, heads of a slice, width]

    Each part of a slice's layer begins at a multiple of 16 bytes. A slot that no engine transfers
    is one slice.

    Attributes:
        num_layers: number of recurrent layers.
        parts: of one layer's state.
        num_layer_slices: number of equal parts of the layers.
        num_head_slices: number of equal parts of the heads of each part.
        unit_bytes: a slice is a whole number of units of this size, which are transferred.
    """

    num_layers: int
    parts: tuple[StatePart, ...]
    num_layer_slices: int = 1
    num_head_slices: int = 1
    unit_bytes: int = _ALIGNMENT

    def sliced(self, num_layer_slices: int, num_head_slices: int, unit_bytes: int) -> Self:
        """Returns the layout of the same states in slots that are cut differently."""
        return replace(
            self,
            num_layer_slices=num_layer_slices,
            num_head_slices=num_head_slices,
            unit_bytes=unit_bytes,
        )

    @property
    def part_offsets(self) -> tuple[int, ...]:
        """For each part, the byte of a layer's state in a slice at which it begins."""
        sizes = [_align(part.num_bytes // self.num_head_slices) for part in self.parts]
        return tuple([sum(sizes[:index]) for index in range(len(sizes))])

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state in a slice."""
        return _align(self.part_offsets[-1] + self.parts[-1].num_bytes // self.num_head_slices)

    @property
    def units(self) -> int:
        """Number of units of a slice."""
        num_layers = self.num_layers // self.num_layer_slices
        return -(-num_layers * self.layer_bytes // self.unit_bytes)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice."""
        return self.units * self.unit_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_layer_slices * self.num_head_slices * self.slice_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states in a slot, without what fills up its slices."""
        return self.num_layers * sum(part.num_bytes for part in self.parts)

    def describe(self) -> str:
        """Returns in words what the bytes of the states depend on, except how they are cut."""
        parts = ", ".join(
            f"{part.name} [{part.num_heads}, {part.width}] {part.dtype}" for part in self.parts
        )
        return f"{self.num_layers} states of {parts}, state layout {_STATE_LAYOUT_VERSION}"


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
