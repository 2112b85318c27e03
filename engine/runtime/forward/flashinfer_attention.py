"""Attention by FlashInfer (https://docs.flashinfer.ai) in steps that are no CUDA graphs.

FlashInfer divides the work of a step on the host, which has to know all lengths, and copies its
plan to the device. A plan holds for all layers that read the same blocks by the same rule, so the
first of these layers makes it. A graph cannot contain that: steps that are graphs keep Triton's
kernel (docs/adr/0095-flashinfer.md).

The pool is read in place. A layer of it has the layout that FlashInfer calls HND, at larger
distances between blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from baton.common.errors import ConfigurationError
from engine.runtime.device import Fetched, fetch, to_device
from kernels import Attend, AttentionMetadata

__all__ = ["FlashInferAttention", "HostSequences", "workspace_bytes"]

_TYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_MIN_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
_MAX_TILE_ROWS = 128
_BLOCKS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class HostSequences:
    """The sequences of a step, as far as the host has to know them.

    Attributes:
        query_starts: `[num_seqs + 1]` int32, as in `AttentionMetadata`.
        context_lens: `[num_seqs]` int32, likewise.
        tables: `[num_layer_groups, num_seqs, max_blocks]` int32; block ids.
    """

    query_starts: np.ndarray
    context_lens: np.ndarray
    tables: np.ndarray

    def pages(self, layer_group: int, block_size: int, sliding_window: int | None) -> "_Pages":
        """Returns the blocks of all contexts in a layer group.

        Blocks before a window may have become another sequence's. FlashInfer multiplies what they
        hold by 0, which may be NaN: they are replaced by the sequence's first block in the window.
        """
        counts = -(-self.context_lens // block_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        columns = np.arange(int(counts.max(initial=0)))
        tables = self.tables[layer_group, :, : len(columns)]
        if sliding_window is not None:
            num_before = self.context_lens - np.diff(self.query_starts)
            firsts = np.maximum(num_before - sliding_window + 1, 0) // block_size
            tables = np.take_along_axis(tables, np.maximum(columns, firsts[:, None]), axis=1)
        last_lens = self.context_lens - block_size * np.maximum(counts - 1, 0)
        return _Pages(starts, tables[columns < counts[:, None]], last_lens.astype(np.int32))


@dataclass(frozen=True, slots=True)
class _Pages:
    """Block tables as FlashInfer takes them.

    Attributes:
        starts: `[num_seqs + 1]` int32; where each sequence's blocks start in `ids`, and their end.
        ids: `[num_blocks]` int32; the blocks of the sequences, one sequence after the other.
        last_lens: `[num_seqs]` int32; tokens in each sequence's last block.
    """

    starts: np.ndarray
    ids: np.ndarray
    last_lens: np.ndarray


@dataclass(frozen=True, slots=True)
class _Rule:
    """The parameters of a plan and its kernel, besides the sequences.

    Attributes:
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values.
        head_dim: elements of a head.
        dtype: type of all tensors.
        scale: as in `kernels.paged_attention`, like the rest.
        sliding_window: None for none.
        soft_cap: None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class FlashInferAttention:
    """Computes `kernels.paged_attention` for one step after the other, on one stream.

    Args:
        block_size: tokens per block.
        device: the GPU.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self._wrappers: dict[tuple[int, _Rule], Any] = {}
        self._planned: set[tuple[int, _Rule]] = set()
        self._workspaces: dict[int, torch.Tensor] = {}
        self._copied: Fetched | None = None

    def begin(self, sequences: HostSequences) -> Sequence[Attend]:
        """Begins a step.

        Waits until the device has the plans of the step before: a new one overwrites the pinned
        memory that they are copied from.

        Returns:
            What computes the attention of each layer group, until the next step begins.
        """
        if self._copied is not None:
            self._copied.wait()
        self._planned.clear()
        return [
            partial(self._attend, sequences, layer_group)
            for layer_group in range(len(sequences.tables))
        ]

    def _attend(
        self,
        sequences: HostSequences,
        layer_group: int,
        query: torch.Tensor,
        kv_layer: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
        value_dim: int | None = None,
    ) -> torch.Tensor:
        """Computes `kernels.paged_attention`.

        Raises:
            ConfigurationError: FlashInfer does not compute such attention; the trial step before
                serving has all layers.
        """
        _check(query, has_sinks=sinks is not None, is_latent=value_dim is not None)
        assert kv_scales is None, "8-bit KV is refused before a model is loaded"
        num_heads, head_dim = query.shape[1:]
        rule = _Rule(
            num_heads, kv_layer.shape[2], head_dim, query.dtype, scale, sliding_window, soft_cap
        )
        place = layer_group, rule
        if place not in self._planned:
            self._plan(sequences, layer_group, rule)
            self._planned.add(place)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._wrappers[place].run(query, kv_layer.unbind(1), out=output)
        return output

    def _plan(self, sequences: HostSequences, layer_group: int, rule: _Rule) -> None:
        """Plans the layers of a group that attend by one rule."""
        place = layer_group, rule
        if place not in self._wrappers:
            self._wrappers[place] = self._new_wrapper(rule)
        window, lens = rule.sliding_window, np.diff(sequences.query_starts)
        pages = sequences.pages(layer_group, self._block_size, window)
        self._wrappers[place].plan(
            self._on_host(sequences.query_starts),
            self._on_host(pages.starts),
            to_device(pages.ids, self._device),
            self._on_host(pages.last_lens),
            rule.num_heads,
            rule.num_kv_heads,
            rule.head_dim,
            self._block_size,
            causal=True,
            sm_scale=rule.scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=rule.soft_cap,
            q_data_type=rule.dtype,
            kv_data_type=rule.dtype,
            seq_lens=self._on_host(sequences.context_lens),
            max_token_per_sequence=int(lens.max()),
        )
        self._copied = fetch(self._device, ())

    def _new_wrapper(self, rule: _Rule) -> Any:
        group_size = rule.num_heads // rule.num_kv_heads
        num_bytes = workspace_bytes(group_size, rule.head_dim, _num_processors(self._device))
        if num_bytes not in self._workspaces:
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._workspaces[num_bytes] = workspace
        flashinfer = import_module("flashinfer")
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[num_bytes], "HND")

    def _on_host(self, values: np.ndarray) -> torch.Tensor:
        """Returns a tensor on the host that can be copied without waiting for the device."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def workspace_bytes(group_size: int, head_dim: int, num_processors: int) -> int:
    """Returns the bytes that FlashInfer needs for partial results of divided contexts.

    It divides contexts only as long as there are at most two tiles per processor over all KV heads.
    Each tile has up to 128 rows of each query head of its KV head, in float32, and a sum per row.

    Args:
        group_size: query heads per KV head.
        head_dim: elements of a head.
        num_processors: streaming multiprocessors of the device.
    """
    rows = _BLOCKS_PER_PROCESSOR * num_processors * group_size * _MAX_TILE_ROWS
    return max(_MIN_WORKSPACE_BYTES, rows * (head_dim + 1) * torch.float32.itemsize)


def _num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(query: torch.Tensor, *, has_sinks: bool, is_latent: bool) -> None:
    """Refuses attention that FlashInfer does not compute here.

    Raises:
        ConfigurationError: names the flag and the reason.
    """
    reason = None
    if query.dtype not in _TYPES:
        reason = f"{str(query.dtype).removeprefix('torch.')} (use --dtype bfloat16)"
    elif is_latent:
        reason = "latent attention"
    elif has_sinks:
        reason = "attention sinks"
    elif query.shape[2] not in _HEAD_DIMS:
        known = ", ".join(map(str, _HEAD_DIMS))
        reason = f"heads of {query.shape[2]} elements, but of {known}"
    if reason is not None:
        raise ConfigurationError(
            f"--attention-backend is flashinfer, which does not compute {reason}; use triton"
        )
