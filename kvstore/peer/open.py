"""`open_peer_connector`: from a `grpc://` or `nixl://` URL to both halves of the connector."""

from kvstore.connector import KvConnectorScheduler, KvConnectorWorker
from kvstore.peer.address import PeerUrl
from kvstore.peer.transport import PeerTransport
from kvstore.peer.worker import PeerConnectorWorker

__all__ = ["open_peer_connector"]


def open_peer_connector(url: str) -> tuple[KvConnectorScheduler, KvConnectorWorker]:
    """Opens both halves, and listens.

    Raises:
        ConfigurationError: the URL is wrong, the port is in use, or a package is missing.
    """
    peer_url = PeerUrl.parse(url)
    transport = _open_transport(peer_url.scheme)
    try:
        worker = PeerConnectorWorker(peer_url, transport)
    except BaseException:
        if transport is not None:
            transport.close()
        raise
    scheduler = KvConnectorScheduler(
        peer_url.scheme,
        lease_s=peer_url.lease_s,
        finds_by_key=False,
        params=worker.address.to_params(peer_url.scheme),
    )
    return scheduler, worker


def _open_transport(scheme: str) -> PeerTransport | None:
    """What moves bytes; None where grpc itself does."""
    if scheme == "grpc":
        return None
    from kvstore.peer.nixl.transport import NixlTransport

    return NixlTransport()
