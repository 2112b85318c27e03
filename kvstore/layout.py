"""`KvLayout`: the shape of one KV block, the same in pool, store and transfer.

    pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

All of a block's bytes lie together, so one block is one copy, one store
object and one transfer descriptor; heads are contiguous, so that tiers of
different tensor parallelism can slice them. Index 0 of the third axis is K,
index 1 is V. Pure: no torch here.
"""

from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "LAYOUT_VERSION", "KvLayout"]

LAYOUT_VERSION = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and element type of a KV block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[num_layers, 2, num_kv_heads, block_size, head_dim]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]
