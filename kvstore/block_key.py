"""Block keys: content addresses of KV blocks, the same in every process.

    root  = H("root", namespace, lora, salt)
    key_i = H("full", key_{i-1}, tokens of block i)
    tail  = H("tail", key_{n-1}, tokens of the partial block, handoff id)
    group = H("group", key, number), where a model's layers form groups
    slice = H("slice", key, number), where a block's layers and heads go in slices

A key names the tokens of its block, all tokens before it and, through the
namespace, everything else KV bytes depend on. Equal keys therefore mean equal
bytes. A partial tail's key carries the handoff's id as well: tails are made
for one handoff and deleted with it, so two requests must never share one.

Pure: the standard library only. The router imports this module.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

__all__ = [
    "KEY_BYTES",
    "KEY_FORMAT_VERSION",
    "BlockKeyChain",
    "derive_namespace",
    "describe_namespace",
    "layer_group_key",
    "slice_key",
    "tail_key",
]

KEY_FORMAT_VERSION = 1
KEY_BYTES = 32


def derive_namespace(
    *,
    model_fingerprint: bytes,
    kv_dtype: str,
    layout_version: int,
    block_size: int,
    num_head_slices: int = 1,
    num_layer_slices: int = 1,
) -> bytes:
    """Digest of everything KV bytes depend on except tokens, LoRA and salt.

    They are those in transfer form (`kvstore.transfer_form`): engines that convert to it from
    other types share its keys, and round as they convert.

    Args:
        model_fingerprint: digest of the model's config and weights.
        kv_dtype: element type of stored KV, say "bfloat16".
        layout_version: version of the pool layout (`kvstore.layout`).
        block_size: tokens per block.
        num_head_slices: parts that a block's heads go in.
        num_layer_slices: parts that its layers go in.
    """
    slices = [num_head_slices.to_bytes(4, "little")] if num_head_slices != 1 else []
    if num_layer_slices != 1:
        slices += [b"layers", num_layer_slices.to_bytes(4, "little")]
    return _hash(
        b"namespace",
        KEY_FORMAT_VERSION.to_bytes(4, "little"),
        model_fingerprint,
        kv_dtype.encode(),
        layout_version.to_bytes(4, "little"),
        block_size.to_bytes(4, "little"),
        *slices,
    )


def describe_namespace(
    *,
    model_fingerprint: str,
    kv_dtype: str,
    layout_version: int,
    block_size: int,
    num_head_slices: int = 1,
    num_layer_slices: int = 1,
) -> str:
    """In words, what `derive_namespace` makes a digest of: for people who compare two.

    Args:
        model_fingerprint: hex digits; the first twelve are told.
        kv_dtype: as there.
        layout_version: as there.
        block_size: as there.
        num_head_slices: as there; told where there is more than one.
        num_layer_slices: as `num_head_slices`.
    """
    slices = f"{num_head_slices} head slices, " if num_head_slices != 1 else ""
    slices += f"{num_layer_slices} layer slices, " if num_layer_slices != 1 else ""
    return (
        f"model {model_fingerprint[:12]}, {kv_dtype}, {block_size} tokens per block, "
        f"{slices}layout {layout_version}"
    )


class BlockKeyChain:
    """The keys of one sequence's full blocks, extended as the sequence grows.

    A pool whose blocks are `blocks_per_pool_block` times as long goes by the same chain: the
    key of a pool block is that of the last block in it, which names all tokens before.

    Args:
        namespace: from `derive_namespace`.
        block_size: tokens per block.
        cache_salt: separates tenants' caches.
        lora: digest of the LoRA in use; empty without one.
        blocks_per_pool_block: blocks that lie in one block of the pool.
    """

    __slots__ = ("_block_size", "_keys", "_per_pool_block", "_pool_keys", "_root")

    def __init__(
        self,
        namespace: bytes,
        block_size: int,
        *,
        cache_salt: str = "",
        lora: bytes = b"",
        blocks_per_pool_block: int = 1,
    ) -> None:
        self._root = _hash(b"root", namespace, lora, cache_salt.encode())
        self._block_size = block_size
        self._per_pool_block = blocks_per_pool_block
        self._keys: list[bytes] = []
        # The same list where a pool block is one block.
        self._pool_keys = self._keys if blocks_per_pool_block == 1 else []

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of the full blocks seen so far, in order. Not to be changed."""
        return self._keys

    @property
    def pool_keys(self) -> Sequence[bytes]:
        """As `keys`, of the full pool blocks."""
        return self._pool_keys

    def copy(self) -> "BlockKeyChain":
        """A chain of the same keys, to go on by itself."""
        other = object.__new__(BlockKeyChain)
        other._root, other._block_size = self._root, self._block_size
        other._per_pool_block = self._per_pool_block
        other._keys = self._keys.copy()
        is_same = self._pool_keys is self._keys
        other._pool_keys = other._keys if is_same else self._pool_keys.copy()
        return other

    def extend(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Adds keys for the full blocks of the sequence not keyed yet.

        Args:
            token_ids: the whole sequence, of which the part already keyed must
                be unchanged.

        Returns:
            All keys, as `keys`.
        """
        size, keys = self._block_size, self._keys
        for index in range(len(keys), len(token_ids) // size):
            block = token_ids[index * size : (index + 1) * size]
            keys.append(_hash(b"full", keys[-1] if keys else self._root, _token_bytes(block)))
        if self._pool_keys is not keys:
            step = self._per_pool_block
            self._pool_keys += keys[(len(self._pool_keys) + 1) * step - 1 :: step]
        return keys

    def extend_pool(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """As `extend`; returns `pool_keys`."""
        self.extend(token_ids)
        return self._pool_keys

    def of_prompt(self, token_ids: Sequence[int], handoff_id: str) -> tuple[bytes, ...]:
        """Keys of all blocks of a prompt: the full ones, and a partial tail made for a handoff.

        Args:
            token_ids: the prompt, with which the sequence begins.
            handoff_id: the handoff that the tail is made for.
        """
        num_full = len(token_ids) // self._block_size
        keys = tuple(self.extend(token_ids)[:num_full])
        tail = token_ids[num_full * self._block_size :]
        parent = keys[-1] if keys else self._root
        return (*keys, tail_key(parent, tail, handoff_id)) if tail else keys


def tail_key(parent: bytes, token_ids: Sequence[int], handoff_id: str) -> bytes:
    """Key of the partial block that ends one handoff's prompt.

    Args:
        parent: key of the block before, or the chain's root.
        token_ids: the tokens in the block, fewer than a full block.
        handoff_id: the handoff that the block is made for.
    """
    return _hash(b"tail", parent, _token_bytes(token_ids), handoff_id.encode())


def layer_group_key(key: bytes, group: int) -> bytes:
    """Key of the block that holds one layer group's KV of the tokens that `key` names.

    Group 0's is `key` itself, so a model with one group has plain keys.
    """
    return _hash(b"group", key, group.to_bytes(4, "little")) if group else key


def slice_key(key: bytes, number: int) -> bytes:
    """Key of the object that holds one slice of the layers and heads of the block that `key`
    names.

    Slice 0's is `key` itself, so blocks that go whole have plain keys.
    """
    return _hash(b"slice", key, number.to_bytes(4, "little")) if number else key


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _hash(tag: bytes, *parts: bytes) -> bytes:
    """BLAKE2b over length-prefixed parts, so that no two part lists collide."""
    digest = blake2b(digest_size=KEY_BYTES, person=tag.ljust(16, b"\0"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
