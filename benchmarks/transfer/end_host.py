"""`EndHost`: a pool of blocks in a process, and all that moves them there.

Connectors' ends, and what they are measured beside: Redis's own client and nixl by itself.
Every block's digest is told, so that nothing is believed to have arrived.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

from benchmarks.transfer.connector_end import ConnectorEnd
from kernels import fresh_zeros
from kvstore.handoff import KvHandoff
from kvstore.layout import KvLayout
from kvstore.peer.transport import RangeTable, make_ranges

__all__ = ["EndHost", "block_keys"]

_NIXL_PEER = "other"
_TRANSFER_S = 60.0
_PIPELINE_BYTES = 8 << 20


def block_keys(run_id: str, count: int) -> list[bytes]:
    """Keys as a prompt's blocks have them: 32 bytes that have nothing in common."""
    return [hashlib.sha256(f"{run_id}/{index}".encode()).digest() for index in range(count)]


class EndHost:
    """One process's side.

    Args:
        layout: of a block.
        num_blocks: of the pool.
        num_filled: the first so many of them hold random bytes, the others zeros.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, num_filled: int) -> None:
        torch.set_num_threads(1)
        words_per_block = layout.block_bytes // 8
        words = fresh_zeros((num_blocks * words_per_block,), torch.int64)
        num_random = num_filled * words_per_block
        words[:num_random].random_()
        words[num_random:].zero_()  # whoever has served for a while has its pages
        dtype = getattr(torch, layout.pool_dtype)
        self._layout = layout
        self._pool = words.view(dtype).view(num_blocks, *layout.block_shape)
        whole = words.view(torch.uint8).numpy().data
        size = layout.block_bytes
        self._blocks = [whole[i * size : (i + 1) * size] for i in range(num_blocks)]
        self._ends: dict[str, ConnectorEnd] = {}
        self._redis: Any = None
        self._nixl: Any = None

    # The pool.

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """Of blocks' bytes."""
        return _digests(self._blocks[block] for block in block_ids)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks."""
        for block in block_ids:
            self._pool[block].zero_()

    # Connectors.

    def open(self, name: str, url: str) -> None:
        """Opens an end."""
        self._ends[name] = ConnectorEnd(url, self._pool, self._layout)

    def save(self, name: str, run_id: str, block_ids: Sequence[int]) -> tuple[float, KvHandoff]:
        """Publishes blocks; how long it took, and what leads to them."""
        end, keys = self._ends[name], block_keys(run_id, len(block_ids))
        return end.save(keys, block_ids, run_id), end.make_handoff(keys, run_id)

    def load(self, name: str, handoff: KvHandoff, block_ids: Sequence[int]) -> float:
        """Loads blocks; how long it took."""
        return self._ends[name].load(handoff, block_ids)

    def forget(self, name: str, run_id: str, num_blocks: int) -> None:
        """Gives back what a run saved."""
        self._ends[name].forget(block_keys(run_id, num_blocks), run_id)

    # Redis's own client: one connection, pipelines of some MiB.

    def open_redis(self, url: str) -> None:
        """Connects."""
        from redis import Redis

        self._redis = Redis.from_url(url)
        self._redis.ping()

    def redis_set(self, run_id: str, block_ids: Sequence[int]) -> float:
        """SETs blocks' bytes; how long it took."""
        names = block_keys(f"raw {run_id}", len(block_ids))
        values = [bytes(self._blocks[block]) for block in block_ids]
        pairs = list(zip(names, values, strict=True))
        began_at = time.perf_counter()
        for first in range(0, len(pairs), self._pipeline_length):
            pipeline = self._redis.pipeline(transaction=False)
            for name, value in pairs[first : first + self._pipeline_length]:
                pipeline.set(name, value)
            pipeline.execute()
        return time.perf_counter() - began_at

    def redis_get(self, run_id: str, num_blocks: int) -> tuple[float, list[bytes]]:
        """GETs them; how long it took, and digests of what came."""
        names = block_keys(f"raw {run_id}", num_blocks)
        values: list[bytes] = []
        began_at = time.perf_counter()
        for first in range(0, len(names), self._pipeline_length):
            pipeline = self._redis.pipeline(transaction=False)
            for name in names[first : first + self._pipeline_length]:
                pipeline.get(name)
            values += pipeline.execute()
        seconds = time.perf_counter() - began_at
        self._redis.delete(*names)
        return seconds, _digests(value or b"" for value in values)

    @property
    def _pipeline_length(self) -> int:
        return max(1, _PIPELINE_BYTES // self._layout.block_bytes)

    # nixl by itself: between the pools, without leases and digests.

    def open_nixl(self) -> tuple[bytes, int]:
        """Registers the pool; what the other side needs, and where the pool begins."""
        from kvstore.peer.nixl.transport import NixlTransport

        self._nixl = NixlTransport()
        address = self._pool.data_ptr()
        self._nixl.register(address, self._pool.nbytes, device="cpu")
        return self._nixl.metadata(), address

    def connect_nixl(self, metadata: bytes) -> None:
        """Reaches the other side."""
        self._nixl.add_peer(_NIXL_PEER, metadata, _TRANSFER_S)

    def read_by_nixl(self, address: int, theirs: Sequence[int], ours: Sequence[int]) -> float:
        """Reads blocks of the other pool into this one; returns the seconds that it took.

        Args:
            address: where the other pool begins.
            theirs: blocks of the other pool.
            ours: blocks of this one.
        """
        targets, sources = self._ranges(self._pool.data_ptr(), ours), self._ranges(address, theirs)
        began_at = time.perf_counter()
        self._nixl.read(_NIXL_PEER, sources, targets, _TRANSFER_S)
        return time.perf_counter() - began_at

    def close(self) -> None:
        """Closes all that is open."""
        for end in self._ends.values():
            end.close()
        for opened in (self._redis, self._nixl):
            if opened is not None:
                opened.close()

    def _ranges(self, address: int, block_ids: Sequence[int]) -> RangeTable:
        size = self._layout.block_bytes
        return make_ranges([address + block * size for block in block_ids], size)


def _digests(values: "Iterator[memoryview] | Iterator[bytes]") -> list[bytes]:
    return [xxhash.xxh3_128_digest(value) for value in values]
