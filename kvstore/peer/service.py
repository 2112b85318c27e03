"""`PeerServicer`: what a process that lends answers its readers, call by call.

`PeerServer`: the port that readers connect to, and what both ends of it agree on.

It is a port of its own, apart from the tier's, so that bytes never stand in
the way of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, cast

import grpc

from baton.errors import ConfigurationError
from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc
from kvstore.peer.framing import pack_chunks, to_message
from kvstore.peer.leases import BlockRead, LeaseGoneError, LeaseTable
from kvstore.peer.lent_memory import LentMemory
from kvstore.peer.locations import BlockLocations, LentRanges
from kvstore.peer.pushes import Pusher
from kvstore.store import StoreUnavailableError

__all__ = [
    "CHANNEL_OPTIONS",
    "GENERATION_REFUSED",
    "SERVICE_NAME",
    "Lending",
    "PeerServer",
    "PeerServicer",
]

_LONGEST_CALL_S = 90.0


@dataclass(frozen=True, slots=True)
class Lending:
    """What a process lends from, once its pool is registered.

    Attributes:
        layout: the form of a block in words.
        memory: where bytes are read.
        ranges: where readers reach them by themselves; None if they cannot.
        pusher: what writes them to readers; None if nothing does.
        metadata: of the transport.
    """

    layout: str
    memory: LentMemory
    ranges: LentRanges | None = None
    pusher: Pusher | None = None
    metadata: bytes = b""


class PeerServicer:
    """Answers from a lease table.

    Args:
        generation: of this process.
        transport: name of the data plane.
        leases: what is lent.
        timeout_s: longest read.
        on_released: called after a read that may have released something.
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
        """From now on blocks can be read."""
        self._lending = lending

    # `KvPeerService`, see the proto; grpc calls each in a thread.

    def Describe(  # noqa: N802 - gRPC's name
        self, request: pb.DescribeRequest, context: Any
    ) -> pb.DescribeResponse:
        """What this process is, and how its memory is reached."""
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
        """Where blocks lie."""
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
        """The caller has read them."""
        self._open_for(context)
        self._check_generation(request.generation, context)
        for read_id in request.read_ids:
            self._close(read_id)
        return pb.CloseBlocksResponse()

    def ReadBlocks(  # noqa: N802 - gRPC's name
        self, request: pb.ReadBlocksRequest, context: Any
    ) -> Iterator[bytes]:
        """The blocks' bytes, in messages as they go over the wire."""
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

    def PushBlocks(  # noqa: N802 - gRPC's name
        self, request: pb.PushBlocksRequest, context: Any
    ) -> pb.PushBlocksResponse:
        """Writes blocks into the caller's memory."""
        lending = self._open_for(context)
        if lending.pusher is None or lending.ranges is None:
            _abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{self._transport} does not push")
        timeout_s = min(request.timeout_ms / 1000, self._timeout_s)
        read = self._open(request.blocks, timeout_s, lending, context)
        try:
            return lending.pusher.push(request, read, lending.ranges, timeout_s)
        finally:
            self._close(read.read_id)

    def SettlePush(  # noqa: N802 - gRPC's name
        self, request: pb.SettlePushRequest, context: Any
    ) -> pb.SettlePushResponse:
        """Whether a push can write no more."""
        lending = self._open_for(context)
        self._check_generation(request.generation, context)
        is_settled = lending.pusher is None or lending.pusher.settle(request.push_id)
        return pb.SettlePushResponse(is_settled=is_settled)

    def RenewLeases(  # noqa: N802 - gRPC's name
        self, request: pb.RenewLeasesRequest, context: Any
    ) -> pb.RenewLeasesResponse:
        """Extends leases."""
        self._check_generation(request.generation, context)
        return pb.RenewLeasesResponse(gone=self._leases.renew(request.lease_ids))

    # What they share.

    def _open_for(self, context: Any) -> Lending:
        """What is lent from, for a call with a sensible deadline."""
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > _LONGEST_CALL_S:
            message = f"a call needs a deadline of at most {_LONGEST_CALL_S:g} s"
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
