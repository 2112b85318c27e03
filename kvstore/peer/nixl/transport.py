"""`NixlTransport`: the data plane of `nixl://`, by NVIDIA's transfer library and its UCX backend.

One agent, the home, is what others reach; each peer that this process reaches
has a `NixlLink` with an agent of its own. What that costs, what UCX promises and
what not is told in docs/adr/0020-nixl-transport.md.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from baton.errors import ConfigurationError
from kvstore.peer.nixl.library import LATE_WRITES_S, load_nixl, new_agent
from kvstore.peer.nixl.link import NixlLink
from kvstore.peer.nixl.memory import AgentMetadata, MemoryMap, MemoryProbe, Region
from kvstore.peer.transport import PeerTransport, RangeTable, TransferError

__all__ = ["NixlTransport"]

_MAX_REMEMBERED = 4096


class NixlTransport(PeerTransport):
    """See `PeerTransport`. Transfers with one peer take turns, those with several do not.

    It must not be used, nor garbage-collected, in a forked child.

    Raises:
        ConfigurationError: the package is missing, or UCX does not start.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self) -> None:
        self._nixl = load_nixl()
        self._probe = MemoryProbe()
        self._home: Any = new_agent(self._nixl, f"baton-home-{uuid4().hex}", with_thread=True)
        self._lock = threading.Lock()
        self._memory = MemoryMap()
        self._registered: list[Any] = []
        self._links: dict[str, NixlLink] = {}
        # When what peers began, that are removed or never were added, is over.
        self._settled_at: OrderedDict[str, float] = OrderedDict()

    def register(self, address: int, num_bytes: int, *, device: str) -> None:
        """See `PeerTransport.register`.

        Raises:
            ConfigurationError: UCX cannot reach such memory.
        """
        region = Region(address, num_bytes, device)
        run = (region.address, region.num_bytes, region.device_id, "")
        with self._lock:
            try:
                self._registered.append(self._home.register_memory([run], region.kind))
            except Exception as error:  # nixl's errors have no base of their own
                raise ConfigurationError(
                    f"nixl cannot register {num_bytes} bytes of {device} memory: {error}"
                ) from error
            self._memory.add(region)

    def metadata(self) -> bytes:
        """See `PeerTransport.metadata`."""
        with self._lock:
            self._check_open()
            return AgentMetadata(
                pid=self._probe.pid,
                probe_address=self._probe.address,
                probe_token=self._probe.token,
                transports=os.environ.get("UCX_TLS", ""),
                regions=self._memory.regions,
                agent=self._home.get_agent_metadata(),
            ).to_bytes()

    def add_peer(self, peer_id: str, metadata: bytes) -> None:
        """See `PeerTransport.add_peer`. A peer with which a transfer failed is added anew."""
        with self._lock:
            self._check_open()
            link = self._links.get(peer_id)
            if link is None or link.is_lost:
                peer = AgentMetadata.from_bytes(metadata)
                self._links[peer_id] = NixlLink(self._nixl, peer, self._memory)

    def remove_peer(self, peer_id: str) -> Callable[[], bool]:
        """See `PeerTransport.remove_peer`."""
        with self._lock:
            link = self._links.pop(peer_id, None)
        if link is None:
            return partial(self.has_settled, peer_id)
        has_ended = link.close()
        # Unless the end of its process is seen, one of its system calls may be under way.
        is_over = has_ended and link.is_copied_by_kernel and link.process_end is not None
        late_s = 0.0 if is_over else LATE_WRITES_S
        with self._lock:
            self._settled_at.pop(peer_id, None)
            settled_at = self._remember(peer_id, late_s)
        return lambda: time.monotonic() >= settled_at

    def has_settled(self, peer_id: str) -> bool:
        """See `PeerTransport.has_settled`.

        At once of a peer whose transfers the kernel copies and whose end is seen, if it was added
        and removed. Of others after `LATE_WRITES_S`, counted from the first question if they never
        were added.
        """
        with self._lock:
            if peer_id in self._links and peer_id not in self._settled_at:
                return False
            return self._remember(peer_id, LATE_WRITES_S) <= time.monotonic()

    def watch(self, peer_id: str) -> Callable[[], bool] | None:
        """See `PeerTransport.watch`. It is seen of processes of this machine."""
        with self._lock:
            link = self._links.get(peer_id)
        if link is None or link.process_end is None:
            return None
        return link.process_end.has_come

    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        """See `PeerTransport.read`."""
        self._transfer("READ", peer_id, targets, sources, timeout_s)

    def write(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        """See `PeerTransport.write`."""
        self._transfer("WRITE", peer_id, sources, targets, timeout_s)

    def close(self) -> None:
        """See `PeerTransport.close`."""
        with self._lock:
            links, self._links = self._links, {}
            home, self._home = self._home, None
        for link in links.values():
            link.close()
        for registered in self._registered if home is not None else ():
            home.deregister_memory(registered)

    def _check_open(self) -> None:
        if self._home is None:
            raise TransferError("the transport is closed", is_settled=True)

    def _transfer(
        self,
        operation: str,
        peer_id: str,
        own: RangeTable,
        theirs: RangeTable,
        timeout_s: float,
    ) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is None:
            raise TransferError(f"no peer {peer_id} was added", is_settled=True)
        if len(own) or len(theirs):
            link.transfer(operation, own, theirs, timeout_s)

    def _remember(self, peer_id: str, late_s: float) -> float:
        """From when on a peer's transfers are over, unless that is known."""
        settled_at = self._settled_at.setdefault(peer_id, time.monotonic() + late_s)
        if len(self._settled_at) > _MAX_REMEMBERED:
            self._settled_at.popitem(last=False)
        return settled_at
