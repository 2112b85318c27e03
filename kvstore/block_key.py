"""Block keys: content addresses of KV blocks, the same in every process.

    root  = H("root", namespace, lora, salt)
    key_i = H("full", key_{i-1}, tokens of block i)
    tail  = H("tail", key_{n-1}, tokens of the partial block, handoff id)
    group = H("group", key, number), if a model's layers form groups
    state = H("state", key, number), a part of the states of recurrent layers after its tokens
    slice = H("slice", key, number), if a block's layers and heads are cut into slices

A key identifies the tokens of its block, all tokens before it and, through the
namespace, everything else that KV bytes depend on. So equal keys mean equal
bytes. A partial tail's key also depends on the handoff's id: tails are made for
one handoff and deleted with it, so two requests must never share one.

Pure: imports the standard library only, because the router imports this module.
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
    "state_key",
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
    states: str = "",
) -> bytes:
    """Returns a digest of everything KV bytes depend on except tokens, LoRA and salt.

    The bytes are those in transfer form (`kvstore.transfer_form`). Engines that convert from other
    types to this form share its keys, and round as they convert.

    Args:
        model_fingerprint: digest of the model's config and weights.
        kv_dtype: element type of stored KV, say "bfloat16".
        layout_version: version of the pool layout (`kvstore.layout`).
        block_size: tokens per block.
        num_head_slices: number of slices of a block's heads.
        num_layer_slices: number of slices of its layers.
        states: layout of the states of recurrent layers; empty for a model without.
    """
    slices = [num_head_slices.to_bytes(4, "little")] if num_head_slices != 1 else []
    if num_layer_slices != 1:
        slices += [b"layers", num_layer_slices.to_bytes(4, "little")]
    if states:
        slices += [b"states", states.encode()]
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
    states: str = "",
) -> str:
    """Returns the contents of `derive_namespace` in words, for people who compare two.

    Args:
        model_fingerprint: hex digits, of which the first twelve are shown.
        kv_dtype: see `derive_namespace`.
        layout_version: see there.
        block_size: see there.
        num_head_slices: see there; shown if there is more than one.
        num_layer_slices: see there; shown if there is more than one.
        states: see there; shown if there are any.
    """
    slices = f"{num_head_slices} head slices, " if num_head_slices != 1 else ""
    slices += f"{num_layer_slices} layer slices, " if num_layer_slices != 1 else ""
    return (
        f"model {model_fingerprint[:12]}, {kv_dtype}, {block_size} tokens per block, "
        f"{slices}layout {layout_version}" + (f", {states}" if states else "")
    )


class BlockKeyChain:
    """The keys of one sequence's full blocks, extended as the sequence grows.

    It also serves a pool whose blocks are `blocks_per_pool_block` times as long: the key of a pool
    block is that of its last block, which depends on all tokens before.

    Args:
        namespace: from `derive_namespace`.
        block_size: tokens per block.
        cache_salt: separates tenants' caches.
        lora: digest of the LoRA in use; empty without one.
        blocks_per_pool_block: number of blocks in one block of the pool.
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
        """Keys of the full blocks so far, in order. Callers must not change it."""
        return self._keys

    @property
    def pool_keys(self) -> Sequence[bytes]:
        """Keys of the full pool blocks so far; see `keys`."""
        return self._pool_keys

    def copy(self) -> "BlockKeyChain":
        """Returns an independent chain with the same keys."""
        other = object.__new__(BlockKeyChain)
        other._root, other._block_size = self._root, self._block_size
        other._per_pool_block = self._per_pool_block
        other._keys = self._keys.copy()
        is_same = self._pool_keys is self._keys
        other._pool_keys = other._keys if is_same else self._pool_keys.copy()
        return other

    def extend(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Adds the keys of full blocks that have none yet.

        Args:
            token_ids: the whole sequence; the part that has keys must be
                unchanged.

        Returns:
            All keys; see `keys`.
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
        """Does the same as `extend`, and returns `pool_keys`."""
        self.extend(token_ids)
        return self._pool_keys

    def of_prompt(self, token_ids: Sequence[int], handoff_id: str) -> tuple[bytes, ...]:
        """Returns the keys of all blocks of a prompt: full ones, and a partial tail for a handoff.

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
    """Returns the key of the partial block that ends one handoff's prompt.

    Args:
        parent: key of the block before, or the chain's root.
        token_ids: the tokens in the block, fewer than a full block.
        handoff_id: the handoff that the block is made for.
    """
    return _hash(b"tail", parent, _token_bytes(token_ids), handoff_id.encode())


def layer_group_key(key: bytes, group: int) -> bytes:
    """Returns the key of the block with one layer group's KV of the tokens of `key`.

    For group 0 it is `key` itself, so a model with one group has plain keys.
    """
    return _hash(b"group", key, group.to_bytes(4, "little")) if group else key


def state_key(key: bytes, unit: int) -> bytes:
    """Returns the key of one part of the states of recurrent layers after the tokens of `key`.

    Args:
        key: key of the block that these tokens end with.
        unit: number of the part; a slot is moved in parts that are as long as objects of blocks.
    """
    return _hash(b"state", key, unit.to_bytes(4, "little"))


def slice_key(key: bytes, number: int) -> bytes:
    """Returns the key of the object with one slice of the layers and heads of the block of `key`.

    For slice 0 it is `key` itself, so blocks that are one object have plain keys.
    """
    return _hash(b"slice", key, number.to_bytes(4, "little")) if number else key


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _hash(tag: bytes, *parts: bytes) -> bytes:
    """Returns BLAKE2b over length-prefixed parts, so that no two lists of parts collide."""
    digest = blake2b(digest_size=KEY_BYTES, person=tag.ljust(16, b"\0"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
