"""`PeerServer`: the port that readers connect to, and what both ends of it agree on.

It is a port of its own, apart from the tier's, so that bytes never stand in
the way of tokens.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc

from baton.errors import ConfigurationError
from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc

__all__ = ["CHANNEL_OPTIONS", "GENERATION_REFUSED", "SERVICE_NAME", "PeerServer"]

SERVICE_NAME = "baton.v1.KvPeerService"
GENERATION_REFUSED = "generation"
"""What a refusal begins with if it is for the generation."""

_NUM_THREADS = 16
_MAX_CALLS = 256
_MAX_MESSAGE_BYTES = 16 << 20
_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a port shared with a stranger
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    # Whoever restarts at an address must not wait for the back-off of who was there before.
    ("grpc.use_local_subchannel_pool", 1),
)


class PeerServer:
    """A grpc server with `KvPeerService` and a bounded number of threads and calls.

    Args:
        address: `host:port` to listen on; port 0 for a free one.
        servicer: what answers, say `kvstore.peer.service.PeerServicer`; its `ReadBlocks` gives
            messages as bytes.

    Attributes:
        port: the bound port.

    Raises:
        ConfigurationError: the address cannot be bound.
    """

    def __init__(self, address: str, servicer: Any) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="baton-kv-peer"),
            handlers=[_handlers_of(servicer)],
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigurationError(
                f"KV peers: cannot listen on {address}: in use, or not an address of this machine; "
                "where the URL names no port, each process takes a free one"
            ) from None
        self._server.start()

    def close(self) -> None:
        """Takes no more calls and ends those under way. Idempotent."""
        self._server.stop(grace=0).wait()


def _handlers_of(servicer: Any) -> grpc.GenericRpcHandler:
    """The generated handlers, but for ReadBlocks, whose messages are bytes already."""
    recorder = _HandlerRecorder()
    kv_peer_pb2_grpc.add_KvPeerServiceServicer_to_server(servicer, cast("grpc.Server", recorder))
    recorder.handlers["ReadBlocks"] = grpc.unary_stream_rpc_method_handler(
        servicer.ReadBlocks, request_deserializer=pb.ReadBlocksRequest.FromString
    )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, recorder.handlers)


class _HandlerRecorder:
    """Takes the place of the server in the generated `add_…Servicer_to_server`."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """The same handlers come to the other method."""

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, Any]) -> None:
        """Keeps the handlers of the service."""
        self.handlers = dict(handlers)
