"""`EndHost`: one process's side of a transfer: a pool of blocks, and what moves them.

Blocks are moved by connectors, by redis-py alone and by nixl alone. The digest of every block is
available, so that the other side can verify what arrived.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from kernels import fresh_zeros
from kvstore.driver import ConnectorDriver
from kvstore.handoff import KvHandoff
from kvstore.layout import KvLayout
from kvstore.peer.transport import RangeTable, make_ranges
from kvstore.registry import open_connector

__all__ = ["EndHost", "TransferRefusedError", "block_keys"]

_NIXL_PEER = "other"
_TRANSFER_S = 60.0
_JOB_S = 120.0
_PIPELINE_BYTES = 8 << 20


class TransferRefusedError(Exception):
    """The moved bytes or tokens are wrong, so there is no figure."""


def block_keys(run_id: str, count: int) -> list[bytes]:
    """Returns different keys of 32 bytes, such as a prompt's blocks have."""
    return [hashlib.sha256(f"{run_id}/{index}".encode()).digest() for index in range(count)]


class EndHost:
    """A pool, and the connectors and clients that work on it.

    Args:
        layout: the shape of a block.
        num_blocks: size of the pool.
        num_filled: the first blocks, which get random bytes. The others get zeros.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, num_filled: int) -> None:
        torch.set_num_threads(1)
        words_per_block = layout.block_bytes // 8
        words = fresh_zeros((num_blocks * words_per_block,), torch.int64)
        num_random = num_filled * words_per_block
        words[:num_random].random_()
        words[num_random:].zero_()  # writing makes the system provide the pages now
        dtype = getattr(torch, layout.pool_dtype)
        self._layout = layout
        self._pool = words.view(dtype).view(num_blocks, *layout.block_shape)
        whole = words.view(torch.uint8).numpy().data
        size = layout.block_bytes
        self._blocks = [whole[i * size : (i + 1) * size] for i in range(num_blocks)]
        self._drivers: dict[str, ConnectorDriver] = {}
        self._redis: Any = None
        self._nixl: Any = None

    # The pool.

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the digest of each block's bytes."""
        return _digests(self._blocks[block] for block in block_ids)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros."""
        for block in block_ids:
            self._pool[block].zero_()

    # Connectors.

    def open(self, name: str, url: str) -> None:
        """Opens a connector on the pool, with the cluster's token if BATON_CLUSTER_TOKEN has one.

        The other methods refer to it by `name`.
        """
        connector = open_connector(url, ClusterSecurity.from_environment(CredentialsConfig()))
        self._drivers[name] = ConnectorDriver(connector, self._pool, self._layout, timeout_s=_JOB_S)

    def save(self, name: str, run_id: str, block_ids: Sequence[int]) -> tuple[float, KvHandoff]:
        """Saves blocks under the lease `run_id`.

        Returns:
            The seconds from the start of the job to its result, and the handoff of the blocks.

        Raises:
            TransferRefusedError: the save failed.
        """
        driver, keys = self._drivers[name], block_keys(run_id, len(block_ids))
        began_at = time.perf_counter()
        result = driver.save(keys, block_ids, lease_id=run_id)
        seconds = time.perf_counter() - began_at
        if not result.committed:
            raise TransferRefusedError(f"the save failed: {result.error or 'failed'}")
        return seconds, driver.make_handoff(keys, run_id)

    def load(self, name: str, handoff: KvHandoff, block_ids: Sequence[int]) -> float:
        """Loads and verifies blocks; returns the seconds from the start of the job to its result.

        Raises:
            TransferRefusedError: not all blocks were loaded.
        """
        began_at = time.perf_counter()
        result = self._drivers[name].load(handoff, block_ids)
        seconds = time.perf_counter() - began_at
        if result.num_blocks < len(block_ids):
            loaded = f"{result.num_blocks} of {len(block_ids)} blocks"
            raise TransferRefusedError(f"the load brought {loaded}: {result.error or 'missing'}")
        return seconds

    def forget(self, name: str, run_id: str, num_blocks: int) -> None:
        """Ends the lease of a run and deletes its blocks."""
        self._drivers[name].forget(block_keys(run_id, num_blocks), run_id)

    # redis-py alone: one connection, pipelines of a few MiB.

    def open_redis(self, url: str) -> None:
        """Connects to a server."""
        from redis import Redis

        self._redis = Redis.from_url(url)
        self._redis.ping()

    def redis_set(self, run_id: str, block_ids: Sequence[int]) -> float:
        """Sets blocks' bytes; returns the seconds."""
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
        """Gets blocks' bytes; returns the seconds, and the digests of what arrived."""
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

    # nixl alone: from pool to pool, without leases and digests.

    def open_nixl(self) -> tuple[bytes, int]:
        """Registers the pool; returns what a reader needs, and the address of the pool."""
        from kvstore.peer.nixl.transport import NixlTransport

        self._nixl = NixlTransport()
        address = self._pool.data_ptr()
        self._nixl.register(address, self._pool.nbytes, device="cpu")
        return self._nixl.metadata(), address

    def connect_nixl(self, metadata: bytes) -> None:
        """Connects to the other side, whose `open_nixl` returned `metadata`."""
        self._nixl.add_peer(_NIXL_PEER, metadata, _TRANSFER_S)

    def read_by_nixl(self, address: int, theirs: Sequence[int], ours: Sequence[int]) -> float:
        """Reads blocks of the other pool into this one; returns the seconds.

        Args:
            address: the address of the other pool.
            theirs: blocks of the other pool.
            ours: blocks of this pool, as many.
        """
        sources, targets = self._ranges(address, theirs), self._ranges(self._pool.data_ptr(), ours)
        began_at = time.perf_counter()
        self._nixl.read(_NIXL_PEER, sources, targets, _TRANSFER_S)
        return time.perf_counter() - began_at

    def close(self) -> None:
        """Closes all connectors and clients."""
        for driver in self._drivers.values():
            driver.close()
        for opened in (self._redis, self._nixl):
            if opened is not None:
                opened.close()

    def _ranges(self, address: int, block_ids: Sequence[int]) -> RangeTable:
        size = self._layout.block_bytes
        return make_ranges([address + block * size for block in block_ids], size)


def _digests(values: "Iterator[memoryview] | Iterator[bytes]") -> list[bytes]:
    return [xxhash.xxh3_128_digest(value) for value in values]
