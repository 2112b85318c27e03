"""`PeerServicer`: the handlers of `KvPeerService`, by which a process lends blocks.

`PeerServer`: the gRPC server for them. It has a port and threads of its own, so
that blocks never delay the tokens of the tier's server.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, cast

import grpc

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc
from kvstore.peer.framing import pack_chunks, to_message
from kvstore.peer.leases import BlockRead, LeaseGoneError, LeaseTable
from kvstore.peer.lent_memory import LentMemory
from kvstore.peer.locations import BlockLocations, LentRanges
from kvstore.store import StoreUnavailableError

__all__ = [
    "CHANNEL_OPTIONS",
    "GENERATION_REFUSED",
    "SERVICE_NAME",
    "Lending",
    "PeerServer",
    "PeerServicer",
]

_MAX_CALL_S = 90.0


@dataclass(frozen=True, slots=True)
class Lending:
    """The memory that a process lends, known once its pool is registered.

    Attributes:
        layout: the form of a block in words.
        memory: reads lent blocks for ReadBlocks.
        ranges: locates lent blocks in registered memory; None for `grpc://`.
        metadata: what readers' transports need; empty for `grpc://`.
    """

    layout: str
    memory: LentMemory
    ranges: LentRanges | None = None
    metadata: bytes = b""


class PeerServicer:
    """Answers the calls of `KvPeerService`.

    Args:
        generation: id of this process's start.
        transport: "grpc" or the transport's name.
        leases: the leases under which blocks are lent.
        timeout_s: longest time of a read.
        on_released: called when the end of a read has released save jobs.
    """

    def __init__(
        self,
        generation: bytes,
        transport: str,
        leases: LeaseTable,
        timeout_s: float,
        on_released: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._transport = transport
        self._leases = leases
        self._timeout_s = timeout_s
        self._on_released = on_released
        self._lending: Lending | None = None

    def lend(self, lending: Lending) -> None:
        """Lets readers read from this memory. Called once, when the pool is registered."""
        self._lending = lending

    # The handlers; gRPC calls each in a thread.

    def Describe(  # noqa: N802 - gRPC's name
        self, request: pb.DescribeRequest, context: Any
    ) -> pb.DescribeResponse:
        """Describes this process, and how its memory is reached."""
        lending = self._open_for(context)
        return pb.DescribeResponse(
            generation=self._generation,
            transport=self._transport,
            metadata=lending.metadata,
            layout=lending.layout,
        )

    def OpenBlocks(  # noqa: N802 - gRPC's name
        self, request: pb.OpenBlocksRequest, context: Any
    ) -> pb.OpenBlocksResponse:
        """Returns where blocks lie, and keeps them there for the reader."""
        lending = self._open_for(context)
        timeout_ms = min(request.timeout_ms, int(self._timeout_s * 1000))
        read = self._open(request.blocks, timeout_ms / 1000, lending, context)
        locations = _locate(read, lending.ranges)
        return pb.OpenBlocksResponse(
            read_id=read.read_id, locations=locations, timeout_ms=timeout_ms
        )

    def CloseBlocks(  # noqa: N802 - gRPC's name
        self, request: pb.CloseBlocksRequest, context: Any
    ) -> pb.CloseBlocksResponse:
        """Ends reads that OpenBlocks began."""
        self._open_for(context)
        self._check_generation(request.generation, context)
        for read_id in request.read_ids:
            self._close(read_id)
        return pb.CloseBlocksResponse()

    def ReadBlocks(  # noqa: N802 - gRPC's name
        self, request: pb.ReadBlocksRequest, context: Any
    ) -> Iterator[bytes]:
        """Yields the blocks' bytes, in messages as they go over the wire."""
        lending = self._open_for(context)
        timeout_s = min(context.time_remaining(), self._timeout_s)
        read = self._open(request.blocks, timeout_s, lending, context)
        try:
            yield from _messages(read, lending.memory, timeout_s)
        except LeaseGoneError as error:
            _abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        except StoreUnavailableError as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            self._close(read.read_id)

    def RenewLeases(  # noqa: N802 - gRPC's name
        self, request: pb.RenewLeasesRequest, context: Any
    ) -> pb.RenewLeasesResponse:
        """Extends leases."""
        self._check_generation(request.generation, context)
        return pb.RenewLeasesResponse(gone=self._leases.renew(request.lease_ids))

    # Helpers of the handlers.

    def _open_for(self, context: Any) -> Lending:
        """Returns the lent memory, for a call with a deadline that is not too far away."""
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > _MAX_CALL_S:
            message = f"a call needs a deadline of at most {_MAX_CALL_S:g} s"
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, message)
        if self._lending is None:
            _abort(context, grpc.StatusCode.UNAVAILABLE, "the engine is starting")
        return self._lending

    def _check_generation(self, generation: bytes, context: Any) -> None:
        if generation != self._generation:
            _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{GENERATION_REFUSED}: the reader asks for {generation.hex()}, "
                f"this process is {self._generation.hex()}",
            )

    def _open(
        self, blocks: pb.KvBlockList, timeout_s: float, lending: Lending, context: Any
    ) -> BlockRead:
        self._check_generation(blocks.generation, context)
        if blocks.layout != lending.layout:
            _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"KV layout: the reader has {blocks.layout}, the lender has {lending.layout}",
            )
        try:
            return self._leases.open_read(blocks.lease_id, blocks.keys, timeout_s)
        except LeaseGoneError as error:
            _abort(context, grpc.StatusCode.NOT_FOUND, str(error))

    def _close(self, read_id: int) -> None:
        self._leases.close_read(read_id)
        if self._leases.has_released:
            self._on_released()


def _abort(context: Any, status: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(status, message)
    raise AssertionError("abort raises")


def _messages(read: BlockRead, memory: LentMemory, timeout_s: float) -> Iterator[bytes]:
    for frames in memory.frames(read, timeout_s):
        buffers = chain.from_iterable((memoryview(header), payload) for header, payload in frames)
        for chunk in pack_chunks(buffers):
            with read.copying():
                message = to_message(chunk)
            yield message


def _locate(read: BlockRead, ranges: LentRanges | None) -> pb.KvBlockLocations:
    headers = b"".join(block.header for block in read.blocks)
    if ranges is None:
        return pb.KvBlockLocations(headers=headers, num_ranges=[0] * len(read.blocks))
    return BlockLocations(headers, ranges.of_blocks(read.blocks)).to_proto()


SERVICE_NAME = "baton.v1.KvPeerService"
GENERATION_REFUSED = "generation"
"""The first word of a refusal because of the generation."""

_NUM_THREADS = 16
# A decode worker has up to six calls under way: four threads load, one renews, one closes reads.
_MAX_CALLS = 1024
_MAX_MESSAGE_BYTES = 16 << 20
_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # After an outage of the network, TCP repeats what was lost as late as the outage was long. A
    # connection without answers to pings is closed before, and a new one works at once.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),  # binding a port in use must fail, not share the port
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # the longest time of an attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    # A process that restarts at an address must not wait for its predecessor's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class PeerServer:
    """A gRPC server for `KvPeerService`, with a bounded number of threads and calls.

    Args:
        address: `host:port` to listen on; port 0 for a free one.
        servicer: has the handlers, such as a `PeerServicer`; its `ReadBlocks` yields messages as
            bytes.
        security: what callers must show, and the port's certificate.

    Attributes:
        port: the bound port.

    Raises:
        ConfigurationError: the address cannot be bound.
    """

    def __init__(
        self, address: str, servicer: Any, security: ClusterSecurity | None = None
    ) -> None:
        security = security or ClusterSecurity()
        security.check_host("KV peers: the address", _parse_host(address))
        credentials = security.server_credentials()
        self._server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="baton-kv-peer"),
            handlers=[_make_handlers(servicer, security)],
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigurationError(
                f"KV peers: cannot listen on {address}: in use, or not an address of this machine; "
                "where the URL names no port, each process takes a free one"
            ) from None
        self._server.start()

    def close(self) -> None:
        """Refuses further calls and ends those under way. Idempotent."""
        self._server.stop(grace=0).wait()


def _parse_host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _make_handlers(servicer: Any, security: ClusterSecurity) -> grpc.GenericRpcHandler:
    """Returns the generated handlers, with one for ReadBlocks whose messages are bytes. They
    refuse callers from outside of the cluster before a request is parsed.
    """
    recorder = _HandlerRecorder()
    kv_peer_pb2_grpc.add_KvPeerServiceServicer_to_server(servicer, cast("grpc.Server", recorder))
    recorder.handlers["ReadBlocks"] = grpc.unary_stream_rpc_method_handler(
        servicer.ReadBlocks, request_deserializer=pb.ReadBlocksRequest.FromString
    )
    closed = {name: _closed(handler, security) for name, handler in recorder.handlers.items()}
    return grpc.method_handlers_generic_handler(SERVICE_NAME, closed)


def _closed(handler: Any, security: ClusterSecurity) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler for callers that the cluster admits alone.

    On the wire a single request is a stream of one. As a stream, it is not received before the
    caller is admitted, so a caller without a credential occupies neither a thread nor memory.
    """

    def admitted(requests: Iterator[bytes], context: Any) -> Any:
        if not security.admits(context.invocation_metadata(), context.auth_context()):
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "no valid credential of this cluster")
        data = next(requests, None)
        if data is None:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        return handler.request_deserializer(data)

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: handler.unary_stream(admitted(requests, context), context),
            response_serializer=handler.response_serializer,
        )
    return grpc.stream_unary_rpc_method_handler(
        lambda requests, context: handler.unary_unary(admitted(requests, context), context),
        response_serializer=handler.response_serializer,
    )


class _HandlerRecorder:
    """Stands in for the server in the generated `add_KvPeerServiceServicer_to_server`."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Does nothing: the other method gets the same handlers."""

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, Any]) -> None:
        """Keeps the handlers of the service."""
        self.handlers = dict(handlers)
