"""`PeerBackend`: peers as a `StagedMover` sees them; see `kvstore.backend.Backend`."""

import logging
from collections.abc import Sequence

from kvstore.connector import LoadJob, SaveJob
from kvstore.peer.address import PeerAddress
from kvstore.peer.block_request import BlockRequest
from kvstore.peer.data_planes import DataPlane
from kvstore.peer.lender import Lender
from kvstore.peer.peers import PeerRefusedError, Peers
from kvstore.peer.renewals import Renewals
from kvstore.slot import Slot
from kvstore.store import GetStatus

__all__ = ["PeerBackend"]

_logger = logging.getLogger("baton.kvstore")


class PeerBackend:
    """Fetches what handoffs offer; what is put is lent.

    Args:
        peers: who lends.
        plane: how bytes come.
        renewals: which leases are known to be lost.
        lender: takes blocks that had to be gathered.
        timeout_s: longest time of a fetch.
    """

    def __init__(
        self,
        peers: Peers,
        plane: DataPlane,
        renewals: Renewals,
        lender: Lender,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._plane = plane
        self._renewals = renewals
        self._lender = lender
        self._timeout_s = timeout_s
        self.layout = ""
        """Own form of a block in words; set when the pool is registered."""

    @property
    def takes_frames(self) -> bool:
        """See `Backend.takes_frames`."""
        return self._plane.takes_frames

    def num_held(self, keys: Sequence[bytes]) -> int:
        """See `Backend.num_held`. Each lease has its own."""
        return 0

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """See `Backend.put`."""
        self._lender.put(job, keys, slots)

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[Slot]
    ) -> Sequence[GetStatus]:
        """See `Backend.fetch`. What a peer does not lend, or lends no longer, is missing."""
        num_blocks = self._fetch(job, keys, slots)
        hits, missing = [GetStatus.HIT] * num_blocks, len(keys) - num_blocks
        return hits + [GetStatus.MISSING] * missing

    def discard(self, key: bytes) -> None:
        """See `Backend.discard`. The bytes came to harm on the way: nothing is to be removed."""

    def _fetch(self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[Slot]) -> int:
        handoff = job.handoff
        if handoff is None or self._renewals.is_lost(handoff.handoff_id):
            return 0
        request = BlockRequest(
            lease_id=handoff.handoff_id,
            load_id=job.job_id,
            load_keys=job.keys,
            keys=keys,
            layout=self.layout,
            timeout_s=self._timeout_s,
        )
        try:
            with self._peers.use(PeerAddress.from_params(handoff.connector_params)) as peer:
                return self._plane.fetch(peer, request, slots)
        except (PeerRefusedError, ValueError) as error:
            _logger.warning("KV of handoff %s cannot be had: %s", handoff.handoff_id, error)
            return 0
