"""`PoolObjects`: a pool as the objects that it is cut into, read and written by number.

If the pool consists of the objects, a read or write is one copy. Otherwise the objects of one call
are selected together, converted and written in the other form, on the pool's device. Slots for
states consist of objects in every form.

`view_blocks`: K, V and their factors as tensors over the bytes of blocks (`kvstore.layout`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from typing_extensions import override

from baton.common.errors import ConfigurationError
from kernels import gather_blocks, scatter_blocks
from kernels.reference.cache import quantize_kv
from kvstore.layout import DTYPE_BYTES, NARROW_DTYPES, KvLayout
from kvstore.transfer_form import BlockSlicing

__all__ = [
    "BlockViews",
    "ConvertedObjects",
    "MixedObjects",
    "PlainObjects",
    "PoolObjects",
    "as_objects",
    "convert",
    "open_pool",
    "view_blocks",
]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class BlockViews:
    """Blocks as kernels take them: views of the same memory.

    Attributes:
        states: `[..., num_layers, num_parts, num_kv_heads, block_size, head_dim]`.
        scales: `[..., num_layers, num_parts, num_kv_heads, block_size]` float32, the factor of each
            vector of `states`; None if the type has no factors.
        group_shapes: per layer group, `(num_layers, num_kv_heads, head_dim)` of its blocks; empty
            if all have the shape of `states`.
    """

    states: torch.Tensor
    scales: torch.Tensor | None
    group_shapes: tuple[tuple[int, int, int], ...] = ()


def view_blocks(blocks: torch.Tensor, layout: KvLayout) -> BlockViews:
    """Views blocks as K and V and their factors, without a copy.

    Args:
        blocks: `[..., *layout.block_shape]` of `layout.pool_dtype`, contiguous. Blocks and their
            factors start at multiples of 4 bytes, so `block_size * head_dim` is a multiple of 4.
        layout: of a block.
    """
    if not layout.has_scales:
        shapes = layout.group_shapes
        sizes = tuple((shape.num_layers, shape.num_kv_heads, shape.head_dim) for shape in shapes)
        return BlockViews(blocks, None, sizes)
    num_elements = layout.block_size * layout.head_dim
    states = blocks[..., :num_elements].view(getattr(torch, NARROW_DTYPES[layout.dtype]))
    scales = blocks[..., num_elements:].view(torch.float32)
    return BlockViews(states.view(*scales.shape, layout.head_dim), scales)


class PoolObjects(Protocol):
    """Reads and writes objects of a pool, as `BlockSlicing` numbers them."""

    def read(
        self,
        object_ids: Sequence[int],
        payload: torch.Tensor,
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Copies objects of the pool into payloads.

        Args:
            object_ids: `[n]`.
            payload: `[n, object_bytes]` uint8, with rows as `kernels.gather_blocks` takes them.
            device_ids: `object_ids` on the pool's device; None if they must be copied there.

        Returns:
            Whether a number became infinite, a bool scalar on the pool's device; None if none
            can.
        """

    def write(
        self,
        payload: torch.Tensor,
        object_ids: Sequence[int],
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Copies payloads into objects of the pool, whose ids are all different; see `read`."""


def open_pool(pool: torch.Tensor, slicing: BlockSlicing) -> PoolObjects:
    """Opens a pool as objects.

    Args:
        pool: `[num_blocks, *slicing.layout.block_shape]`, contiguous; slots for states lie behind
            the blocks for tokens.
        slicing: how the pool is cut into objects.

    Raises:
        ConfigurationError: blocks of several shapes cannot be converted; names the flag.
    """
    if slicing.layout.group_shapes and not slicing.is_native:
        raise ConfigurationError(
            f"--kv-transfer-head-slices is {slicing.form.num_head_slices}; it must be the "
            f"{slicing.share.degree} ranks that share the heads, as the model's layers have K and "
            "V of different shapes"
        )
    if slicing.is_native:
        return PlainObjects(as_objects(pool, slicing))
    blocks = ConvertedObjects(pool, slicing)
    if slicing.slots is None:
        return blocks
    object_bytes = slicing.object_layout.block_bytes
    slots = pool[slicing.share.num_blocks :].view(-1).view(torch.uint8)
    slots = slots[: len(slots) // object_bytes * object_bytes].view(-1, object_bytes)
    return MixedObjects(blocks, PlainObjects(slots), slicing.first_state_object)


def as_objects(pool: torch.Tensor, slicing: BlockSlicing) -> torch.Tensor:
    """Views a pool as its objects, `[num_objects, *slicing.object_layout.block_shape]`.

    Args:
        pool: see `open_pool`.
        slicing: a native one.
    """
    return pool.view(-1, *slicing.object_layout.block_shape)


class PlainObjects(PoolObjects):
    """Objects that the pool consists of: blocks, layers of blocks, or parts of slots.

    Args:
        pool: the objects, `[num_objects, ...]`, contiguous.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    @override
    def read(
        self,
        object_ids: Sequence[int],
        payload: torch.Tensor,
        device_ids: torch.Tensor | None = None,
    ) -> None:
        gather_blocks(self._pool, object_ids if device_ids is None else device_ids, payload)

    @override
    def write(
        self,
        payload: torch.Tensor,
        object_ids: Sequence[int],
        device_ids: torch.Tensor | None = None,
    ) -> None:
        scatter_blocks(payload, self._pool, object_ids if device_ids is None else device_ids)


class MixedObjects(PoolObjects):
    """Objects of blocks and of slots.

    Args:
        blocks: objects of blocks.
        slots: objects of slots, numbered from 0.
        first_state_object: number of the first object of a slot.
    """

    def __init__(self, blocks: PoolObjects, slots: PoolObjects, first_state_object: int) -> None:
        self._blocks = blocks
        self._slots = slots
        self._first = first_state_object

    @override
    def read(
        self,
        object_ids: Sequence[int],
        payload: torch.Tensor,
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return _any(
            objects.read(ids, payload[rows], on_device)
            for objects, rows, ids, on_device in self._runs(object_ids, device_ids)
        )

    @override
    def write(
        self,
        payload: torch.Tensor,
        object_ids: Sequence[int],
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return _any(
            objects.write(payload[rows], ids, on_device)
            for objects, rows, ids, on_device in self._runs(object_ids, device_ids)
        )

    def _runs(
        self, object_ids: Sequence[int], device_ids: torch.Tensor | None
    ) -> Iterator[tuple[PoolObjects, slice, list[int], torch.Tensor | None]]:
        """Yields runs of objects of one kind: these, their rows, and their ids among them."""
        start = 0
        for are_states, run in groupby(object_ids, lambda object_id: object_id >= self._first):
            offset = self._first if are_states else 0
            ids = [object_id - offset for object_id in run]
            rows = slice(start, start + len(ids))
            on_device = None if device_ids is None else device_ids[rows] - offset
            yield self._slots if are_states else self._blocks, rows, ids, on_device
            start = rows.stop


def _any(flags: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Returns whether any of some flags is set; None if there are none."""
    tensors = [flag for flag in flags if flag is not None]
    return torch.stack(tensors).any() if tensors else None


class ConvertedObjects(PoolObjects):
    """Objects that are parts of blocks, or of another type, or both.

    Args:
        pool: see `open_pool`.
        slicing: how the pool is cut into objects.
    """

    def __init__(self, pool: torch.Tensor, slicing: BlockSlicing) -> None:
        self._device = pool.device
        self._slicing = slicing
        self._word = _word_of(slicing)
        views = view_blocks(pool, slicing.layout)
        self._states = _cut_up(self._in_words(views.states), slicing)
        self._scales = None if views.scales is None else _cut_up(views.scales, slicing)

    @override
    def read(
        self,
        object_ids: Sequence[int],
        payload: torch.Tensor,
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        places = self._places(object_ids if device_ids is None else device_ids)
        states = self._states[places]
        scales = None if self._scales is None else self._scales[places]
        views, overflowed = BlockViews(states, scales), None
        if self._word is None:
            views, overflowed = convert(views, self._slicing.form.dtype)
        objects = _view_objects(payload, self._slicing.object_layout)
        self._in_words(objects.states).copy_(self._in_words(views.states))
        if objects.scales is not None and views.scales is not None:
            objects.scales.copy_(views.scales)
        return overflowed

    @override
    def write(
        self,
        payload: torch.Tensor,
        object_ids: Sequence[int],
        device_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        places = self._places(object_ids if device_ids is None else device_ids)
        views, overflowed = _view_objects(payload, self._slicing.object_layout), None
        if self._word is None:
            views, overflowed = convert(views, self._slicing.layout.dtype)
        self._states[places] = self._in_words(views.states)
        if self._scales is not None and views.scales is not None:
            self._scales[places] = views.scales
        return overflowed

    def _places(self, object_ids: Sequence[int] | torch.Tensor) -> tuple[slice | torch.Tensor, ...]:
        """Returns the index of `_cut_up` that selects `[n, layers, parts, heads, tokens, ...]`."""
        ids = torch.as_tensor(object_ids, dtype=torch.int64, device=self._device)
        num_slices, every = len(self._slicing.head_slices), slice(None)
        heads, ids = ids % num_slices, ids // num_slices
        layers, ids = (
            ids % len(self._slicing.layer_slices),
            ids // len(self._slicing.layer_slices),
        )
        tokens, blocks = ids % self._slicing.transfer_blocks, ids // self._slicing.transfer_blocks
        return blocks, layers, every, every, heads, every, tokens

    def _in_words(self, states: torch.Tensor) -> torch.Tensor:
        """Views K and V as words if the type stays; otherwise 8-bit floats as bytes, because not
        every torch operation supports them.
        """
        if self._word is not None:
            return states.view(self._word)
        return states.view(torch.uint8) if states.dtype is torch.float8_e4m3fn else states


def convert(views: BlockViews, dtype: str) -> tuple[BlockViews, torch.Tensor | None]:
    """Converts K and V to another type, with the rounding of the KV cache.

    Args:
        views: K and V of any type; 8-bit floats may be viewed as bytes.
        dtype: the new type; see `KvLayout`.

    Returns:
        K and V of that type, and whether a finite number became infinite: a bool scalar, or None
        if certainly none did.
    """
    wide = views.states
    if views.scales is not None:
        wide = _widened(wide) * views.scales.unsqueeze(-1)
    if dtype in NARROW_DTYPES:
        return BlockViews(*quantize_kv(wide, getattr(torch, NARROW_DTYPES[dtype]))), None
    narrow = wide.to(getattr(torch, dtype))
    return BlockViews(narrow, None), _overflowed(wide, narrow)


def _widened(narrow: torch.Tensor) -> torch.Tensor:
    """Converts 8-bit elements to float32: floats, which may be viewed as bytes, by a table, because
    torch's own conversion takes five times as long on a CPU.
    """
    if narrow.dtype is torch.int8:
        return narrow.float()
    narrow = narrow.view(torch.uint8)
    table = torch.arange(256, dtype=torch.uint8, device=narrow.device).view(torch.float8_e4m3fn)
    return table.float().index_select(0, narrow.flatten().int()).view(narrow.shape)


def _overflowed(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor | None:
    """Returns whether a finite number became infinite; see `convert`."""
    most = torch.finfo(narrow.dtype).max
    if most >= torch.finfo(wide.dtype).max:
        return None
    if wide.is_cpu:  # on other devices, reading the result would wait
        least, largest = wide.aminmax()
        if float(least) >= -most and float(largest) <= most:
            return None
    return (narrow.isinf() & wide.isfinite()).any()


def _word_of(slicing: BlockSlicing) -> torch.dtype | None:
    """Returns the widest integer type that divides heads' rows in the pool and in objects; None if
    the type changes.
    """
    if slicing.layout.dtype != slicing.form.dtype:
        return None
    layouts = (slicing.layout, slicing.object_layout)
    heads = [layout.head_bytes for layout in layouts]
    row = slicing.layout.head_dim * DTYPE_BYTES[slicing.layout.pool_dtype]
    return _WORDS[math.gcd(8, row, *heads)]


def _cut_up(states: torch.Tensor, slicing: BlockSlicing) -> torch.Tensor:
    """Views `[blocks, num_layers, parts, heads, tokens, ...]` with three axes split: layers and
    heads into slices, and tokens into transfer blocks.
    """
    part = slicing.object_layout
    layers = (len(slicing.layer_slices), part.num_layers)
    heads = (len(slicing.head_slices), part.num_kv_heads)
    tokens = (slicing.transfer_blocks, slicing.form.block_size)
    return states.view(len(states), *layers, part.num_parts, *heads, *tokens, *states.shape[5:])


def _view_objects(payload: torch.Tensor, layout: KvLayout) -> BlockViews:
    objects = payload.view(getattr(torch, layout.pool_dtype))
    return view_blocks(objects.view(len(payload), *layout.block_shape), layout)
