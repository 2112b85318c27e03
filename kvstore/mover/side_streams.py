"""`SideStreamCopier`: copies between a GPU's pool and pinned segments, beside its steps.

One stream per direction, with a staging tensor of a segment's size on the device:

    out  gather kernel: pool -> staging    one copy: staging -> segment    event
    in   one copy: segment -> staging      scatter kernel: staging -> pool    event

What is converted, or part of a block, is so on the device: the staging has it in its form. The
staging of a direction is used again without waiting: its stream keeps the order.

No stream waits for another, for the engine's bookkeeping has ordered what matters
(docs/adr/0017-side-streams.md):

- What is saved was written by steps whose outputs the engine has seen, so that the device is
  done with them, and is shared with the job, so that no later step writes to it. To wait for the
  compute stream would put the save behind the steps launched since.
- What is loaded into was free, so that every step that had touched it has reported.
- A step that reads what was loaded is launched once the load's event has been seen.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvstore.codec import HEADER_BYTES
from kvstore.mover.copies import BlockCopier, Copy
from kvstore.mover.pool_objects import open_pool
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, RangeError

__all__ = ["SideStreamCopier"]

_logger = logging.getLogger("baton.kvstore")


@dataclass(frozen=True, slots=True)
class _RecordedCopy:
    """A copy whose end an event marks.

    Attributes:
        event: recorded behind the copy.
        overflowed: what the copy tells, `[1]` bool in pinned memory.
    """

    event: torch.cuda.Event
    overflowed: torch.Tensor

    def wait(self) -> None:
        """See `Copy.wait`; other Python threads run meanwhile."""
        self.event.synchronize()
        if self.overflowed:
            raise RangeError


class _Lane:
    """One direction: a stream, and what its copies pass through on the device.

    Attributes:
        frames: as `Segment.frames`, so that a whole segment is one copy.
        payload: as `Segment.payload`.
        object_ids: as `Segment.object_ids`.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.frames = torch.zeros_like(segment.frames, device=device)
        self.payload = self.frames[:, HEADER_BYTES:]
        self.object_ids = torch.zeros_like(segment.object_ids, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self, segment: Segment) -> Iterator[_RecordedCopy]:
        """Puts the block's work on the stream; what it gives can be waited for after it."""
        segment.overflowed.zero_()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copy = _RecordedCopy(event, segment.overflowed)
        with torch.cuda.stream(self._stream):
            try:
                yield copy
                event.record()
            except BaseException:
                # The segment is used again: nothing that was started may outlive the failure.
                self._stream.synchronize()
                raise

    def wait(self) -> None:
        """Returns once the stream has done all that it was given."""
        self._stream.synchronize()


class SideStreamCopier(BlockCopier):
    """Copies on two streams of the pool's device.

    Args:
        pool: the pool, `[num_blocks, *cut.layout.block_shape]`, which no step uses yet.
        cut: how it is cut into objects.
    """

    def __init__(self, pool: torch.Tensor, cut: BlockSlicing) -> None:
        self._num_objects = len(pool) * cut.transfer_blocks * cut.objects_per_block
        self._objects = open_pool(pool, cut)
        segment = Segment(cut.object_layout, pinned=pool.is_cuda)
        self._out = _Lane(segment, pool.device)
        self._in = _Lane(segment, pool.device)
        # No stream is ordered after what zeroed pool and staging.
        torch.cuda.synchronize(pool.device)
        self._warm_up(segment)

    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy:
        """See `BlockCopier.gather`."""
        lane, count = self._out, len(object_ids)
        with lane.copying(segment) as copy:
            ids = _send_object_ids(object_ids, segment, lane)
            _tell(self._objects.read(ids, lane.payload[:count]), segment)
            segment.frames[:count].copy_(lane.frames[:count], non_blocking=True)
        return copy

    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy:
        """See `BlockCopier.scatter`."""
        lane, count = self._in, len(object_ids)
        with lane.copying(segment) as copy:
            ids = _send_object_ids(object_ids, segment, lane)
            lane.frames[:count].copy_(segment.frames[:count], non_blocking=True)
            _tell(self._objects.write(lane.payload[:count], ids), segment)
        return copy

    def close(self) -> None:
        """See `BlockCopier.close`."""
        for lane in (self._out, self._in):
            try:
                lane.wait()
            except RuntimeError as error:  # then nothing runs on it any more
                _logger.warning("closing the KV copies: %s", error)

    def _warm_up(self, segment: Segment) -> None:
        """Has the kernels compiled and loaded, which would hold up the engine's thread later.

        Once for an object and once for many: which kernel runs may depend on it. The pool has
        zeros, which are written back.
        """
        for count in sorted({1, min(segment.num_slots, self._num_objects)}):
            self.gather(range(count), segment).wait()
            self.scatter(segment, range(count)).wait()


def _send_object_ids(object_ids: Sequence[int], segment: Segment, lane: _Lane) -> torch.Tensor:
    """The ids on the device, by way of the segment's pinned memory: the host does not wait."""
    count = len(object_ids)
    segment.object_ids[:count] = torch.tensor(object_ids)
    lane.object_ids[:count].copy_(segment.object_ids[:count], non_blocking=True)
    return lane.object_ids[:count]


def _tell(overflowed: torch.Tensor | None, segment: Segment) -> None:
    if overflowed is not None:
        segment.overflowed.copy_(overflowed, non_blocking=True)
