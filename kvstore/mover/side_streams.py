"""`SideStreamCopier`: copies between a GPU's pool and pinned segments while steps run.

There is one stream per direction, with a staging tensor of a segment's size on the device:

    out  gather kernel: pool -> staging    one copy: staging -> segment    event
    in   one copy: segment -> staging      scatter kernel: staging -> pool    event

Objects that are parts of blocks, or of another type, are cut out and converted on the device. The
staging tensor is reused without waiting, because its stream keeps the order.

No stream waits for another, because the engine orders what depends on each other
(docs/adr/0017-side-streams.md):

- Saved blocks were written by steps whose outputs the engine has received, so the device is done
  with them. They are shared with the job, so no later step writes to them. Waiting for the compute
  stream would delay the save behind the steps launched since.
- Blocks that are loaded into were free, so all steps that touched them have ended.
- A step that reads loaded blocks is launched after the load's event was seen.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from typing_extensions import override

from kvstore.codec import HEADER_BYTES
from kvstore.mover.copies import BlockCopier, Copy
from kvstore.mover.pool_objects import open_pool
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, RangeError

__all__ = ["SideStreamCopier"]

_logger = logging.getLogger("baton.kvstore")


@dataclass(frozen=True, slots=True)
class _RecordedCopy(Copy):
    """A copy whose end an event marks.

    Attributes:
        event: recorded after the copy.
        overflowed: `[1]` bool in pinned memory, set by the copy.
    """

    event: torch.cuda.Event
    overflowed: torch.Tensor

    @override
    def wait(self) -> None:
        """Waits without the GIL."""
        self.event.synchronize()
        if self.overflowed:
            raise RangeError


class _SideLane:
    """One direction: a stream and its staging tensors on the device.

    Attributes:
        frames: of the shape of `Segment.frames`, so that a whole segment is one copy.
        payload: the payloads in `frames`.
        object_ids: of the shape of `Segment.object_ids`.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.frames = torch.zeros_like(segment.frames, device=device)
        self.payload = self.frames[:, HEADER_BYTES:]
        self.object_ids = torch.zeros_like(segment.object_ids, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self, segment: Segment) -> Iterator[_RecordedCopy]:
        """Runs the block's work on the stream; yields the copy, to be waited for afterwards."""
        segment.overflowed.zero_()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copy = _RecordedCopy(event, segment.overflowed)
        with torch.cuda.stream(self._stream):
            try:
                yield copy
                event.record()
            except BaseException:
                # The segment is reused after a failure, so nothing may still be under way.
                self._stream.synchronize()
                raise

    def wait(self) -> None:
        """Returns once the stream has done all its work."""
        self._stream.synchronize()


class SideStreamCopier(BlockCopier):
    """Copies on two streams of the pool's device.

    Args:
        pool: the pool, `[num_blocks, *slicing.layout.block_shape]`, which no step uses yet.
        slicing: how the pool is cut into objects.
    """

    def __init__(self, pool: torch.Tensor, slicing: BlockSlicing) -> None:
        self._objects = open_pool(pool, slicing)
        segment = Segment(slicing.object_layout, pinned=pool.is_cuda)
        self._out = _SideLane(segment, pool.device)
        self._in = _SideLane(segment, pool.device)
        # The streams are not ordered after the kernels that zeroed pool and staging.
        torch.cuda.synchronize(pool.device)
        first, slots = slicing.first_state_object, slicing.slots
        if slots is None:
            self._warm_up(segment, range(slicing.objects_in(len(pool))))
        else:
            self._warm_up(segment, range(first))
            self._warm_up(segment, range(first, first + slots.slot_bytes // slots.unit_bytes))

    @override
    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy:
        lane, count = self._out, len(object_ids)
        with lane.copying(segment) as copy:
            ids = _send_object_ids(object_ids, segment, lane)
            overflowed = self._objects.read(object_ids, lane.payload[:count], ids)
            _save_overflow(overflowed, segment)
            segment.frames[:count].copy_(lane.frames[:count], non_blocking=True)
        return copy

    @override
    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy:
        lane, count = self._in, len(object_ids)
        with lane.copying(segment) as copy:
            ids = _send_object_ids(object_ids, segment, lane)
            lane.frames[:count].copy_(segment.frames[:count], non_blocking=True)
            overflowed = self._objects.write(lane.payload[:count], object_ids, ids)
            _save_overflow(overflowed, segment)
        return copy

    @override
    def close(self) -> None:
        for lane in (self._out, self._in):
            try:
                lane.wait()
            except RuntimeError as error:  # then nothing runs on the stream
                _logger.warning("closing the KV copies: %s", error)

    def _warm_up(self, segment: Segment, object_ids: Sequence[int]) -> None:
        """Compiles and loads the kernels now, so that they do not delay the engine's thread later.

        It copies one object and then many, because that may select different kernels. The pool
        holds zeros, which are written back.
        """
        for count in sorted({1, min(segment.num_slots, len(object_ids))}):
            self.gather(object_ids[:count], segment).wait()
            self.scatter(segment, object_ids[:count]).wait()


def _send_object_ids(object_ids: Sequence[int], segment: Segment, lane: _SideLane) -> torch.Tensor:
    """Copies ids to the device through the segment's pinned memory; the host does not wait."""
    count = len(object_ids)
    segment.object_ids[:count] = torch.tensor(object_ids)
    lane.object_ids[:count].copy_(segment.object_ids[:count], non_blocking=True)
    return lane.object_ids[:count]


def _save_overflow(overflowed: torch.Tensor | None, segment: Segment) -> None:
    if overflowed is not None:
        segment.overflowed.copy_(overflowed, non_blocking=True)
