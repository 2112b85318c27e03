"""`Lender`: lends the blocks of save jobs under leases, where they lie.

In a host pool nothing is copied but tails: I/O threads hash blocks in place.
ADR 3 keeps such threads away from the pool. These only read, and only blocks
that a job holds and no step writes to (docs/adr/0019-peer-connectors.md).

Blocks that must be gathered first reach `put` by a `BlockMover`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvstore.codec import make_headers
from kvstore.jobs import SaveJob, SaveResult
from kvstore.mover.pieces import CANCELLED
from kvstore.peer.leases import LeaseTable, LentBlock
from kvstore.peer.lent_memory import HostMemory, LentMemory
from kvstore.store import KvObject, StoreUnavailableError
from kvstore.transfer_form import BlockSlicing

__all__ = ["Lender"]

_NUM_THREADS = 2
_NO_HEADER = b""

_logger = logging.getLogger("baton.kvstore")


class Lender:
    """Turns save jobs into lent blocks.

    Args:
        leases: the table of leases.
        wake: called, from any thread, when `poll` has something to return.
    """

    def __init__(self, leases: LeaseTable, wake: Callable[[], None]) -> None:
        self._leases = leases
        self._wake = wake
        self._io = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="baton-kv-lend")
        self._results: deque[SaveResult] = deque()
        # Held from the moment a job is lent until its result is in `_results`: a `poll` in between
        # could return its release before its result.
        self._lending = threading.Lock()
        self._gathered: dict[int, list[LentBlock]] = {}  # of jobs under way
        self._memory: LentMemory
        self._cut: BlockSlicing

    def register(self, memory: LentMemory, cut: BlockSlicing) -> None:
        """Sets the pool's memory and how it is cut into objects. Called once, before any job."""
        self._memory = memory
        self._cut = cut

    def start(self, saves: Sequence[SaveJob]) -> list[SaveJob]:
        """Starts jobs. Engine thread only.

        Returns:
            Jobs whose blocks the caller must pass to `put`, and whose results to `finish`.
        """
        to_gather = []
        for job in saves:
            if not job.lease_id:
                # No reader could find the blocks: only a handoff names a lease.
                self._results.append(SaveResult(job.job_id, committed=False, error=CANCELLED))
                self._wake()
                continue
            self._leases.begin_save(job.lease_id, job.job_id)
            if isinstance(self._memory, HostMemory):
                self._io.submit(self._lend, job, self._memory, time.monotonic())
            else:
                self._gathered[job.job_id] = []
                to_gather.append(job)
        return to_gather

    def poll(self) -> tuple[list[SaveResult], list[int]]:
        """Returns saves that have ended since the last call, and jobs that were released.

        A job is never released in an earlier call than the one that returns its result.
        """
        with self._lending:
            released = self._leases.take_released()
            results = [self._results.popleft() for _ in range(len(self._results))]
        self._memory.tails.give_back(released.tail_slots)
        return results, list(released.job_ids)

    def finish(self, result: SaveResult) -> SaveResult:
        """Ends a job whose blocks have been gathered; returns its result. Engine thread only."""
        blocks = self._gathered.pop(result.job_id)
        return self._end(result.job_id, blocks, result.seconds, result.error)

    def close(self) -> None:
        """Stops the threads. Idempotent."""
        self._io.shutdown(wait=True, cancel_futures=True)

    # I/O threads.

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        """Notes objects of a job that were gathered and sealed, and copies its tail.

        Raises:
            StoreUnavailableError: all slots for tails are in use.
        """
        places = dict(zip(job.keys, job.block_ids, strict=True))
        tails = job.keys[-self._cut.objects_per_block :] if job.num_tail_tokens else ()
        for key, slot in zip(keys, slots, strict=True):
            tail_slot = self._copy_tail(job, slot.payload) if key in tails else None
            block = LentBlock(key, bytes(slot.header), places[key], tail_slot)
            self._gathered[job.job_id].append(block)

    def _lend(self, job: SaveJob, memory: HostMemory, began_at: float) -> None:
        blocks: list[LentBlock] = []
        problem = ""
        try:
            keys = self._cut.object_keys(job.keys)
            object_ids = self._cut.object_ids(job.block_ids)
            first_tail = len(keys) - self._cut.objects_per_block
            for index, (key, object_id) in enumerate(zip(keys, object_ids, strict=True)):
                is_tail = job.num_tail_tokens > 0 and index >= first_tail
                blocks.append(self._place(job, memory, key, object_id, is_tail=is_tail))
            blocks = _seal(blocks, memory)
        except StoreUnavailableError as error:
            problem = "unavailable"
            _logger.debug("KV blocks are not lent: %s", error)
        except Exception:
            problem = "failed"
            _logger.exception("KV blocks cannot be lent")
        seconds = time.monotonic() - began_at
        with self._lending:
            self._results.append(self._end(job.job_id, blocks, seconds, problem))
        self._wake()

    def _place(
        self, job: SaveJob, memory: HostMemory, key: bytes, object_id: int, *, is_tail: bool
    ) -> LentBlock:
        """Returns a block that will be lent, without a header if that must still be made."""
        if is_tail:
            slot = self._copy_tail(job, memory.block(object_id))
            return LentBlock(key, _NO_HEADER, object_id, slot)
        return LentBlock(key, self._leases.known_header(key, object_id) or _NO_HEADER, object_id)

    def _copy_tail(self, job: SaveJob, block: memoryview) -> int:
        tails = self._memory.tails
        slot = tails.take()
        if slot is None:
            raise StoreUnavailableError("too many partial tails are lent at a time")
        tails.fill(slot, block, job.num_tail_tokens, job.tail_group)
        return slot

    def _end(
        self, job_id: int, blocks: Sequence[LentBlock], seconds: float, problem: str
    ) -> SaveResult:
        """Lends a job's blocks unless there was a problem or the lease is over."""
        is_lent = self._leases.end_save(job_id, None if problem else blocks)
        if not is_lent:
            tails = [block.tail_slot for block in blocks if block.tail_slot is not None]
            self._memory.tails.give_back(tails)
        error = "" if is_lent else problem or CANCELLED
        return SaveResult(job_id, committed=is_lent, is_held=is_lent, error=error, seconds=seconds)


def _seal(blocks: Sequence[LentBlock], memory: HostMemory) -> list[LentBlock]:
    """Returns the blocks with all headers; missing ones are made in one call."""
    bare = [block for block in blocks if block.header == _NO_HEADER]
    made = make_headers([memory.payload(block) for block in bare], [block.key for block in bare])
    headers = iter(made)
    return [
        replace(block, header=next(headers)) if block.header == _NO_HEADER else block
        for block in blocks
    ]
