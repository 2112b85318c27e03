"""`PoolObjects`: a pool as the objects that it is cut into, read and written by number.

Where the pool consists of them, a read or write is one copy. Otherwise the objects of
one call are picked out of the pool together, converted, and laid down in their form, on
whatever device the pool is.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from kernels import gather_blocks, scatter_blocks
from kernels.reference.cache import quantize_kv
from kvstore.block_views import BlockViews, view_blocks
from kvstore.layout import DTYPE_BYTES, FP8, KvLayout
from kvstore.transfer_form import BlockSlicing

__all__ = [
    "ConvertedObjects",
    "PlainObjects",
    "PoolObjects",
    "as_objects",
    "convert",
    "open_pool",
]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PoolObjects(Protocol):
    """Reads and writes objects of a pool, as `BlockSlicing` numbers them."""

    def read(
        self, object_ids: Sequence[int] | torch.Tensor, payload: torch.Tensor
    ) -> torch.Tensor | None:
        """Puts objects of the pool into payloads.

        Args:
            object_ids: `[n]`; a tensor is on the pool's device.
            payload: `[n, object_bytes]` uint8, rows as `kernels.gather_blocks` takes them.

        Returns:
            Whether a number became infinite, a bool scalar on the pool's device; None where
            none can.
        """

    def write(
        self, payload: torch.Tensor, object_ids: Sequence[int] | torch.Tensor
    ) -> torch.Tensor | None:
        """Puts payloads into the pool; as `read`. The ids are all different."""


def open_pool(pool: torch.Tensor, cut: BlockSlicing) -> PoolObjects:
    """The pool as objects.

    Args:
        pool: `[num_blocks, *cut.layout.block_shape]`, contiguous.
        cut: how it is cut.
    """
    return PlainObjects(as_objects(pool, cut)) if cut.is_native else ConvertedObjects(pool, cut)


def as_objects(pool: torch.Tensor, cut: BlockSlicing) -> torch.Tensor:
    """The pool object by object, `[num_objects, *cut.object_layout.block_shape]`; a view.

    Args:
        pool: as `open_pool`.
        cut: a native one.
    """
    return pool.view(-1, *cut.object_layout.block_shape)


class PlainObjects:
    """Objects are what the pool consists of: blocks, or layers of them.

    Args:
        pool: from `as_objects`.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def read(self, object_ids: Sequence[int] | torch.Tensor, payload: torch.Tensor) -> None:
        """See `PoolObjects.read`."""
        gather_blocks(self._pool, object_ids, payload)

    def write(self, payload: torch.Tensor, object_ids: Sequence[int] | torch.Tensor) -> None:
        """See `PoolObjects.write`."""
        scatter_blocks(payload, self._pool, object_ids)


class ConvertedObjects:
    """Objects are parts of blocks, or of another type, or both.

    Args:
        pool: as `open_pool`.
        cut: how it is cut.
    """

    def __init__(self, pool: torch.Tensor, cut: BlockSlicing) -> None:
        self._device = pool.device
        self._cut = cut
        self._word = _word_of(cut)
        views = view_blocks(pool, cut.layout)
        self._states = _cut_up(self._in_words(views.states), cut)
        self._scales = None if views.scales is None else _cut_up(views.scales, cut)

    def read(
        self, object_ids: Sequence[int] | torch.Tensor, payload: torch.Tensor
    ) -> torch.Tensor | None:
        """See `PoolObjects.read`."""
        places = self._places(object_ids)
        states = self._states[places]
        scales = None if self._scales is None else self._scales[places]
        found, overflowed = BlockViews(states, scales), None
        if self._word is None:
            found, overflowed = convert(found, self._cut.form.dtype)
        objects = _view_objects(payload, self._cut.object_layout)
        self._in_words(objects.states).copy_(self._in_words(found.states))
        if objects.scales is not None and found.scales is not None:
            objects.scales.copy_(found.scales)
        return overflowed

    def write(
        self, payload: torch.Tensor, object_ids: Sequence[int] | torch.Tensor
    ) -> torch.Tensor | None:
        """See `PoolObjects.write`."""
        places = self._places(object_ids)
        found, overflowed = _view_objects(payload, self._cut.object_layout), None
        if self._word is None:
            found, overflowed = convert(found, self._cut.layout.dtype)
        self._states[places] = self._in_words(found.states)
        if self._scales is not None and found.scales is not None:
            self._scales[places] = found.scales
        return overflowed

    def _places(self, object_ids: Sequence[int] | torch.Tensor) -> tuple[slice | torch.Tensor, ...]:
        """Index of `_cut_up` that takes objects: `[n, layers, 2, heads, tokens, ...]`."""
        ids = torch.as_tensor(object_ids, dtype=torch.int64, device=self._device)
        num_slices, every = len(self._cut.head_slices), slice(None)
        heads, ids = ids % num_slices, ids // num_slices
        layers, ids = ids % self._cut.form.num_layer_slices, ids // self._cut.form.num_layer_slices
        tokens, blocks = ids % self._cut.transfer_blocks, ids // self._cut.transfer_blocks
        return blocks, layers, every, every, heads, every, tokens

    def _in_words(self, states: torch.Tensor) -> torch.Tensor:
        """As what is copied: words where the type stays, else 8-bit floats as bytes, as not every
        operation knows those.
        """
        if self._word is not None:
            return states.view(self._word)
        return states.view(torch.uint8) if states.dtype is torch.float8_e4m3fn else states


def convert(found: BlockViews, dtype: str) -> tuple[BlockViews, torch.Tensor | None]:
    """K and V as another type, rounded as the cache would if it were given them.

    Args:
        found: K and V of any type; 8-bit floats may come as bytes.
        dtype: as in `KvLayout`.

    Returns:
        Them in that type; and whether a finite number became infinite, a bool scalar, or None
        where none did for sure.
    """
    if dtype == FP8:
        return BlockViews(*quantize_kv(found.states)), None
    wide = found.states
    if found.scales is not None:
        wide = _widened(wide.view(torch.uint8)) * found.scales.unsqueeze(-1)
    narrow = wide.to(getattr(torch, dtype))
    return BlockViews(narrow, None), _overflowed(wide, narrow)


def _widened(narrow: torch.Tensor) -> torch.Tensor:
    """8-bit floats, as bytes, in float32: by a table, as torch's own way takes five times as long
    on a CPU.
    """
    table = torch.arange(256, dtype=torch.uint8, device=narrow.device).view(torch.float8_e4m3fn)
    return table.float().index_select(0, narrow.flatten().int()).view(narrow.shape)


def _overflowed(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor | None:
    """See `convert`."""
    most = torch.finfo(narrow.dtype).max
    if most >= torch.finfo(wide.dtype).max:
        return None
    if wide.is_cpu:  # elsewhere, to look would be to wait
        least, largest = wide.aminmax()
        if float(least) >= -most and float(largest) <= most:
            return None
    return (narrow.isinf() & wide.isfinite()).any()


def _word_of(cut: BlockSlicing) -> torch.dtype | None:
    """The widest integers that heads' rows are made of here and in objects; None where the type
    changes.
    """
    if cut.layout.dtype != cut.form.dtype:
        return None
    layouts = (cut.layout, cut.object_layout)
    heads = [
        layout.block_bytes // (layout.num_layers * 2 * layout.num_kv_heads) for layout in layouts
    ]
    row = cut.layout.head_dim * DTYPE_BYTES[cut.layout.pool_dtype]
    return _WORDS[math.gcd(8, row, *heads)]


def _cut_up(states: torch.Tensor, cut: BlockSlicing) -> torch.Tensor:
    """`[blocks, num_layers, 2, heads, tokens, ...]` with layers and heads as `slices, those of
    one` and tokens as `transfer blocks, tokens of one`.
    """
    part = cut.object_layout
    layers = (cut.form.num_layer_slices, part.num_layers)
    heads = (len(cut.head_slices), part.num_kv_heads)
    tokens = (cut.transfer_blocks, cut.form.block_size)
    return states.view(len(states), *layers, 2, *heads, *tokens, *states.shape[5:])


def _view_objects(payload: torch.Tensor, layout: KvLayout) -> BlockViews:
    objects = payload.view(getattr(torch, layout.pool_dtype))
    return view_blocks(objects.view(len(payload), *layout.block_shape), layout)
