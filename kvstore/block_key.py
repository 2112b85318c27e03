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

Pure: needs the standard library only, because the router imports this module. The keys of long
prompts come from `kvstore.native_keys` if its library was built, so other threads run meanwhile.
"""

import logging
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

from kvstore.formats import KEY_FORMAT_VERSION, describe_formats, format_parts
from kvstore.native_keys import HashBlocks, load_library

__all__ = [
    "KEY_BYTES",
    "BlockKeyChain",
    "derive_namespace",
    "describe_namespace",
    "layer_group_key",
    "slice_key",
    "state_key",
    "tail_key",
]

KEY_BYTES = 32
_FULL = b"full"
_LOGGER = logging.getLogger("baton.kvstore")
_MIN_NATIVE_BLOCKS = 4
"""Python computes the keys of fewer blocks as soon as the library is called."""
_MAX_PIECE_TOKENS = 4096
"""The most token ids that are converted at once; other threads run in between."""


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
    slices += format_parts()
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
        f"{slices}layout {layout_version}, {describe_formats()}" + (f", {states}" if states else "")
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
        missing = range(len(keys), len(token_ids) // size)
        step = max(_MAX_PIECE_TOKENS // size, 1)
        for start in missing[::step]:
            piece = token_ids[start * size : min(start + step, missing.stop) * size]
            keys += _block_keys(keys[-1] if keys else self._root, piece, size)
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


def _block_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the keys of successive full blocks."""
    hash_blocks = _native() if len(token_ids) >= _MIN_NATIVE_BLOCKS * block_size else None
    if hash_blocks is None:
        return _python_block_keys(parent, token_ids, block_size)
    return _hash_blocks(hash_blocks, parent, token_ids, block_size)


def _python_block_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    keys = []
    for start in range(0, len(token_ids), block_size):
        parent = _hash(_FULL, parent, _token_bytes(token_ids[start : start + block_size]))
        keys.append(parent)
    return keys


def _hash_blocks(
    hash_blocks: HashBlocks, parent: bytes, token_ids: Sequence[int], block_size: int
) -> list[bytes]:
    joined = hash_blocks(_person(_FULL), parent, array("I", token_ids), block_size, KEY_BYTES)
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


@cache
def _native() -> HashBlocks | None:
    """Returns the library's function, if it computes the same keys as Python does: one that was
    built from other sources may not.
    """
    hash_blocks = load_library()
    if hash_blocks is None:
        return None
    parent = _hash(b"root")
    for block_size in (1, 20, 23):  # hashes of less than a chunk of BLAKE2b, of one, and of more
        token_ids = range(2**32 - 3 * block_size, 2**32)
        expected = _python_block_keys(parent, token_ids, block_size)
        if _hash_blocks(hash_blocks, parent, token_ids, block_size) != expected:
            _LOGGER.warning("block keys are computed in Python: their library has another format")
            return None
    return hash_blocks


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _hash(tag: bytes, *parts: bytes) -> bytes:
    """Returns BLAKE2b over length-prefixed parts, so that no two lists of parts collide."""
    digest = blake2b(digest_size=KEY_BYTES, person=_person(tag))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _person(tag: bytes) -> bytes:
    return tag.ljust(blake2b.PERSON_SIZE, b"\0")
