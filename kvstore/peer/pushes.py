"""`Pusher`: writes lent blocks into readers' memory, and knows what became of it."""

import logging
import threading
from collections import OrderedDict
from enum import Enum

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.leases import BlockRead
from kvstore.peer.locations import LentRanges, ranges_from_proto
from kvstore.peer.transport import PeerTransport, TransferError

__all__ = ["Pusher"]

# Pushes that never begin: they come soon or not at all. An entry is some hundred bytes.
_MAX_REMEMBERED = 65_536
_MAX_READERS = 64

_logger = logging.getLogger("baton.kvstore")


class _State(Enum):
    UNDER_WAY = "under way"
    SETTLED = "settled"
    UNSETTLED = "unsettled"


class Pusher:
    """Pushes for readers, each at most once. Thread-safe.

    Args:
        transport: what writes.
    """

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        # Pushes by id: the reader's peer id, and where it stands. Those that have begun and are
        # settled are left out: of what is not known here `settle` says the same.
        self._pushes: OrderedDict[bytes, tuple[str, _State]] = OrderedDict()
        self._readers: OrderedDict[str, int] = OrderedDict()  # pushes under way by peer id

    def push(
        self, request: pb.PushBlocksRequest, read: BlockRead, ranges: LentRanges, timeout_s: float
    ) -> pb.PushBlocksResponse:
        """Writes the leading blocks of a read that the transport can reach.

        Args:
            request: who asks, and where to.
            read: what.
            ranges: where that lies.
            timeout_s: longest wait.
        """
        reader = request.reader_generation.hex()
        if not self._begin(request.push_id, reader):
            return pb.PushBlocksResponse(error="the reader has given it up", is_settled=True)
        state = _State.UNSETTLED
        try:
            num_blocks = self._write(request, read, ranges, timeout_s)
            state = _State.SETTLED
        except (TransferError, ValueError) as error:
            is_settled = not isinstance(error, TransferError) or error.is_settled
            state = _State.SETTLED if is_settled else state
            return pb.PushBlocksResponse(error=str(error), is_settled=is_settled)
        finally:
            self._end(request.push_id, reader, state)
        headers = b"".join(block.header for block in read.blocks[:num_blocks])
        return pb.PushBlocksResponse(headers=headers, is_settled=True)

    def settle(self, push_id: bytes) -> bool:
        """Whether a push can write no more. One that has not begun never will."""
        with self._lock:
            reader, state = self._pushes.setdefault(push_id, ("", _State.SETTLED))
            self._forget_oldest()
        return self._is_over(reader, state)

    def _write(
        self, request: pb.PushBlocksRequest, read: BlockRead, ranges: LentRanges, timeout_s: float
    ) -> int:
        places = ranges.of_blocks(read.blocks)
        num_blocks = places.num_reachable
        targets = ranges_from_proto(request.targets)[:num_blocks]
        sources = places.select(range(num_blocks))
        parts = sources.parts_of(targets)
        if num_blocks:
            reader = request.reader_generation.hex()
            self._transport.add_peer(reader, request.reader_metadata)
            self._transport.write(reader, sources.table, parts, timeout_s)
        return num_blocks

    def _begin(self, push_id: bytes, reader: str) -> bool:
        """Whether the push may begin: a reader may have asked for the end before the start."""
        with self._lock:
            if push_id in self._pushes:
                return False
            self._pushes[push_id] = (reader, _State.UNDER_WAY)
            self._readers[reader] = self._readers.pop(reader, 0) + 1
            self._forget_oldest()
            idle = [name for name, count in self._readers.items() if not count]
            too_many = idle[: max(0, len(self._readers) - _MAX_READERS)]
            for name in too_many:
                del self._readers[name]
        for name in too_many:
            self._transport.remove_peer(name)
        return True

    def _end(self, push_id: bytes, reader: str, state: _State) -> None:
        if state is _State.UNSETTLED:
            _logger.warning("a push to %s may still be writing", reader)
            # Before anybody can ask: the answer must be about this push and none before it.
            self._transport.remove_peer(reader)
        with self._lock:
            self._readers[reader] -= 1
            if state is _State.SETTLED:
                del self._pushes[push_id]
            else:
                self._pushes[push_id] = (reader, state)

    def _forget_oldest(self) -> None:
        if len(self._pushes) > _MAX_REMEMBERED:
            push_id, (reader, state) = self._pushes.popitem(last=False)
            if not self._is_over(reader, state):
                self._pushes[push_id] = (reader, state)  # its turn comes again

    def _is_over(self, reader: str, state: _State) -> bool:
        """Whether a push can write no more."""
        if state is _State.UNSETTLED:
            return self._transport.has_settled(reader)
        return state is _State.SETTLED
