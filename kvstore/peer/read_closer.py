"""`ReadCloser`: tells peers which of their blocks are no longer read."""

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.address import PeerAddress
from kvstore.peer.peers import Peers
from kvstore.store import StoreUnavailableError

__all__ = ["ReadCloser"]

_ASK_S = 2.0

_logger = logging.getLogger("baton.kvstore")


class ReadCloser:
    """Tells it in a thread of its own, in one call for all reads of a peer that have ended
    meanwhile: a load must not wait for that. Where it fails, reads end at their deadlines.

    Args:
        peers: whose blocks were read.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._over: deque[tuple[PeerAddress, int]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-close")

    def add(self, address: PeerAddress, read_id: int) -> None:
        """A read is over. Any thread may call it."""
        self._over.append((address, read_id))
        with suppress(RuntimeError):  # after `close`
            self._thread.submit(self._tell)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _tell(self) -> None:
        by_peer: dict[PeerAddress, list[int]] = {}
        for _ in range(len(self._over)):
            address, read_id = self._over.popleft()
            by_peer.setdefault(address, []).append(read_id)
        for address, read_ids in by_peer.items():
            message = pb.CloseBlocksRequest(generation=address.generation, read_ids=read_ids)
            try:
                with self._peers.use(address) as peer:
                    peer.stub.CloseBlocks(message, timeout=_ASK_S)
            except (grpc.RpcError, StoreUnavailableError, ValueError) as error:
                _logger.debug("%s is not told of the end of reads: %s", address.endpoint, error)
