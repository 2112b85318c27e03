"""`BlockRequest`: what a reader wants of a peer, and how long it waits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.address import PeerAddress

__all__ = ["BlockRequest"]


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks that a lease lends: a piece of a load.

    Attributes:
        lease_id: the lease.
        load_id: the load.
        load_keys: of the load's blocks.
        keys: of those that are wanted now, in the load's order.
        layout: the reader's form of a block in words.
        timeout_s: longest wait for all of them.
        began_at: when the wait began, by `time.monotonic`.
    """

    lease_id: str
    load_id: int
    load_keys: Sequence[bytes]
    keys: Sequence[bytes]
    layout: str
    timeout_s: float
    began_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Time left."""
        return max(0.0, self.began_at + self.timeout_s - time.monotonic())

    def begun_anew(self) -> "BlockRequest":
        """The request with all of its time: to meet a peer for the first time is not its matter."""
        return replace(self, began_at=time.monotonic())

    def rest(self, first: int) -> "BlockRequest":
        """The request without its leading blocks."""
        return replace(self, keys=self.keys[first:])

    def with_neighbours(self, num_blocks: int) -> "BlockRequest":
        """The request for all blocks of those runs of `num_blocks` of the load that its own are in.

        So pieces that come in any order ask for the same.
        """
        first, last = (self.load_keys.index(key) for key in (self.keys[0], self.keys[-1]))
        begin, end = first // num_blocks, last // num_blocks + 1
        return replace(self, keys=self.load_keys[begin * num_blocks : end * num_blocks])

    def to_proto(self, address: PeerAddress) -> pb.KvBlockList:
        """As a peer is asked for them."""
        return pb.KvBlockList(
            generation=address.generation,
            lease_id=self.lease_id,
            keys=self.keys,
            layout=self.layout,
        )
