"""`NixlTransport`: reads peers' memory by NVIDIA's nixl library and its UCX backend.

One agent, the home, is what peers reach. Each peer that this process reads has
a `NixlLink` with an agent of its own. docs/adr/0020-nixl-transport.md says what
agents cost, and what UCX promises.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar
from uuid import uuid4

from typing_extensions import override

from baton.common.errors import ConfigurationError
from kvstore.peer.nixl.library import LATE_WRITES_S, load_nixl, new_agent
from kvstore.peer.nixl.link import NixlLink
from kvstore.peer.nixl.memory import (
    TOKEN_BYTES,
    AgentMetadata,
    MemoryMap,
    MemoryProbe,
    Region,
    machine_id,
)
from kvstore.peer.transport import PeerTransport, RangeTable, TransferError

__all__ = ["NixlTransport"]


class NixlTransport(PeerTransport):
    """Reads of one peer take turns; those of several do not.

    It must not be used, nor garbage-collected, in a forked child.

    Raises:
        ConfigurationError: the package is missing, or UCX does not start.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self) -> None:
        self._nixl = load_nixl()
        self._home: Any = new_agent(self._nixl, f"baton-home-{uuid4().hex}", with_thread=True)
        self._lock = threading.Lock()
        self._memory = MemoryMap()
        self._registered: list[Any] = []
        self._links: dict[str, NixlLink] = {}
        self._probe = MemoryProbe()
        self.register(self._probe.address, TOKEN_BYTES, device="cpu")

    @override
    def register(self, address: int, num_bytes: int, *, device: str) -> None:
        """Registers memory with the home agent; links register it with theirs when they read.

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

    @override
    def metadata(self) -> bytes:
        with self._lock:
            self._check_open()
            return AgentMetadata(
                pid=os.getpid(),
                machine=machine_id(),
                probe_address=self._probe.address,
                probe_token=self._probe.token,
                transports=os.environ.get("UCX_TLS", ""),
                regions=self._memory.regions,
                agent=self._home.get_agent_metadata(),
            ).to_bytes()

    @override
    def add_peer(self, peer_id: str, metadata: bytes, timeout_s: float) -> None:
        with self._lock:
            self._check_open()
            link = self._links.get(peer_id)
            if link is None or link.is_lost:
                peer = AgentMetadata.from_bytes(metadata)
                link = self._links[peer_id] = NixlLink(self._nixl, peer, self._memory)
        link.connect(timeout_s)

    @override
    def remove_peer(self, peer_id: str) -> None:
        with self._lock:
            link = self._links.pop(peer_id, None)
        if link is not None:
            link.close()

    @override
    def settlement(self) -> Callable[[], bool]:
        settled_at = time.monotonic() + LATE_WRITES_S
        return lambda: time.monotonic() >= settled_at

    @override
    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is None:
            raise TransferError(f"no peer {peer_id} was added", is_settled=True)
        if len(sources) or len(targets):
            try:
                link.read(sources, targets, timeout_s)
            except TransferError:
                self._drop(peer_id, link)
                raise

    @override
    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, {}
            home, self._home = self._home, None
        for link in links.values():
            link.close()
        for registered in self._registered if home is not None else ():
            home.deregister_memory(registered)

    def _drop(self, peer_id: str, link: NixlLink) -> None:
        """Closes a link, and forgets its peer if that has no newer one."""
        with self._lock:
            if self._links.get(peer_id) is link:
                del self._links[peer_id]
        link.close()

    def _check_open(self) -> None:
        if self._home is None:
            raise TransferError("the transport is closed", is_settled=True)
