"""`DecodeConnection`: the one Connect stream between this router and a decode replica.

Commands go out; each message that comes in carries the new outputs of all of this
router's requests on the replica. A request's outputs wait in its `DecodeStream` until
they are read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from baton.common.errors import InvalidArgumentError, UnavailableError
from baton.common.request.answer import CandidateOutput
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, request_pb2
from router.fleet.output_wire import output_from_proto
from rpc.channels import MAX_MESSAGE_BYTES
from rpc.errors import from_worker_error
from rpc.pending_outputs import PendingOutputs, add_output

__all__ = ["DecodeConnection", "DecodeStream", "ReplicaLostError", "RequestMovedError"]

_CommandKey = tuple[str, str | int]
"""The id of a request or handoff, and the command's target: one of the names below, or the number
of a candidate."""
_REQUEST = "request"
_PREFETCH = "prefetch"
_MOVE = "move"
_RELEASE = "release"


def _nothing() -> None:
    """Does nothing."""


class ReplicaLostError(UnavailableError):
    """The replica died or cannot be reached; its requests can continue on another one."""


class RequestMovedError(ReplicaLostError):
    """The replica has ended the request because it moves to another one.

    Attributes:
        handoff: where its KV is; None if it must be looked up or computed.
    """

    def __init__(self, message: str, handoff: prefill_pb2.KvHandoff | None) -> None:
        super().__init__(message)
        self.handoff = handoff


class DecodeStream:
    """The outputs of one request on one replica; they are merged until they are read.

    Args:
        request_id: the request.
        connection: to the replica.
        on_end: called once the replica has sent the last output, or sends no more.
    """

    def __init__(
        self, request_id: str, connection: "DecodeConnection", on_end: Callable[[], None]
    ) -> None:
        self._request_id = request_id
        self._connection = connection
        self._on_end = on_end
        self._pending: PendingOutputs = {}
        self._finished: set[int] = set()
        self._failure: ReplicaLostError | None = None
        self._is_woken = False
        self._has_moved = False
        self._changed = asyncio.Event()

    def deliver(self, output: request_pb2.CandidateOutput) -> None:
        """Adds an output. Late outputs of finished candidates are dropped."""
        if output.index in self._finished and not output.is_last:
            return
        add_output(self._pending, output)
        self._changed.set()
        if output.is_last:
            self._on_end()

    def fail(self, error: ReplicaLostError) -> None:
        """Ends the stream; outputs that were delivered can still be read."""
        self._failure = error
        self._changed.set()
        self._on_end()

    def wake(self) -> None:
        """Makes `read` return None if there is no output."""
        self._is_woken = True
        self._changed.set()

    async def read(self) -> CandidateOutput | None:
        """Waits for outputs and returns those of one candidate since its last read, merged.

        Returns None after `wake`.

        Raises:
            RequestMovedError: `move` was called, and no more outputs will come.
            ReplicaLostError: no more outputs will come.
            BatonError: the request failed on the replica.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
            if self._is_woken:
                self._is_woken = False
                if not self._pending:
                    return None
        output = self._pending.pop(next(iter(self._pending)))
        if output.HasField("error"):
            raise from_worker_error(output.error)
        return output_from_proto(output)

    def finish(self, index: int) -> None:
        """Ends one candidate on the replica and drops its further outputs. Idempotent."""
        if index not in self._finished:
            self._finished.add(index)
            self._connection.finish_candidate(self._request_id, index)

    def move(self) -> None:
        """Asks the replica to end the request, which continues on another one. Idempotent."""
        if not self._has_moved:
            self._has_moved = True
            self._connection.move(self._request_id)

    def close(self) -> None:
        """Cancels the request on the replica unless it has ended. Idempotent."""
        self._connection.cancel(self._request_id)


class DecodeConnection:
    """Commands and outputs of all requests on one replica.

    Args:
        stub: the replica's DecodeService.
        name: the replica's name in error messages.
        security: what this router shows to the replica.
        on_close: called once the stream has broken, before its requests look for other replicas.

    Attributes:
        is_open: False once the stream has broken.
    """

    def __init__(
        self,
        stub: "decode_pb2_grpc.DecodeServiceAsyncStub",
        name: str,
        security: ClusterSecurity,
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        self._stub = stub
        self._name = name
        self._security = security
        self._on_close = on_close
        self._streams: dict[str, DecodeStream] = {}
        # Commands that were not sent yet. A request's cancel withdraws its unsent start, and
        # blocks to prefetch are joined, so at most one command waits per key.
        self._commands: dict[_CommandKey, decode_pb2.ConnectRequest] = {}
        self._has_commands = asyncio.Event()
        self.is_open = True

    async def run(self) -> None:
        """Sends commands and delivers outputs until the stream breaks.

        Raises:
            ReplicaLostError: when the stream has broken; every request's stream raises it too.
        """
        call = self._stub.Connect(self._outgoing(), metadata=self._security.call_metadata())
        reason = "its stream ended"
        try:
            async for response in call:
                for output in response.outputs:
                    self._deliver(output)
                for moved in response.moved:
                    self._end_moved(moved)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            self._close(reason)
        raise self._lost(reason)

    def start(
        self, command: decode_pb2.ConnectRequest, on_end: Callable[[], None] = _nothing
    ) -> DecodeStream:
        """Starts a request, whose id must be new to the replica.

        Args:
            command: its start, in the message that is sent.
            on_end: called once the replica has sent the last output, or sends no more, although
                the outputs may not have been read yet.

        Raises:
            ReplicaLostError: the connection has broken.
            InvalidArgumentError: the request is too large for a message, which would break the
                connection for all requests.
        """
        if not self.is_open:
            raise self._lost("the connection is closed")
        num_bytes = command.ByteSize()
        if num_bytes > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"the prompt, its tokens so far and the parameters have {num_bytes} bytes; a "
                f"decode replica takes at most {MAX_MESSAGE_BYTES}"
            )
        request_id = command.start.spec.request_id
        stream = self._streams[request_id] = DecodeStream(request_id, self, on_end)
        self._send((request_id, _REQUEST), command)
        return stream

    def prefetch(self, request_id: str, blocks: prefill_pb2.KvHandoff) -> None:
        """Makes the replica load blocks for a request that will start later. Best effort.

        Unsent blocks of the same handoff are joined. Unsent blocks of another handoff are
        replaced: after a preemption, or when another prefill replica computes the prompt,
        the new handoff lists all blocks again.
        """
        if not self.is_open:
            return
        key = request_id, _PREFETCH
        waiting = self._commands.get(key)
        if waiting and waiting.prefetch.blocks.handoff_id == blocks.handoff_id:
            waiting.prefetch.blocks.MergeFrom(blocks)
        else:
            prefetch = decode_pb2.PrefetchKv(blocks=blocks)
            self._send(key, decode_pb2.ConnectRequest(prefetch=prefetch))

    def withdraw_prefetch(self, request_id: str) -> None:
        """Drops a request's unsent blocks, which it no longer needs."""
        self._commands.pop((request_id, _PREFETCH), None)

    def cancel(self, request_id: str) -> None:
        """Stops a request and forgets it. Unknown and ended ids are no error."""
        if self._streams.pop(request_id, None) is None:
            return
        key = request_id, _REQUEST
        if self._commands.pop(key, None) is None:
            cancel = decode_pb2.CancelDecode(request_id=request_id)
            self._send(key, decode_pb2.ConnectRequest(cancel=cancel))

    def finish_candidate(self, request_id: str, index: int) -> None:
        """Stops one candidate of a request. Unknown and ended ids are no error."""
        if request_id in self._streams:
            cancel = decode_pb2.CancelDecode(request_id=request_id, index=index)
            self._send((request_id, index), decode_pb2.ConnectRequest(cancel=cancel))

    def move(self, request_id: str) -> None:
        """Asks for the end of a request that moves. Unknown and ended ids are no error."""
        if request_id in self._streams:
            move = decode_pb2.MoveDecode(request_id=request_id)
            self._send((request_id, _MOVE), decode_pb2.ConnectRequest(move=move))

    def release(self, handoff_id: str) -> None:
        """Ends the lease of a moved request's blocks. Best effort: leases end by themselves."""
        if self.is_open:
            release = decode_pb2.ReleaseMoved(handoff_id=handoff_id)
            self._send((handoff_id, _RELEASE), decode_pb2.ConnectRequest(release=release))

    def wake(self) -> None:
        """Wakes the readers of all streams, as something has changed for the replica."""
        for stream in self._streams.values():
            stream.wake()

    def _send(self, key: _CommandKey, command: decode_pb2.ConnectRequest) -> None:
        self._commands[key] = command
        self._has_commands.set()

    async def _outgoing(self) -> AsyncIterator[decode_pb2.ConnectRequest]:
        # When a call ends by itself, gRPC does not cancel this generator; `_close` wakes it.
        while self.is_open:
            await self._has_commands.wait()
            while self._commands:
                yield self._commands.pop(next(iter(self._commands)))
            self._has_commands.clear()

    def _deliver(self, output: request_pb2.CandidateOutput) -> None:
        """Passes an output to its stream. Late outputs of cancelled requests have none."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.is_last:
            del self._streams[output.request_id]
        stream.deliver(output)

    def _end_moved(self, moved: decode_pb2.MovedRequest) -> None:
        stream = self._streams.pop(moved.request_id, None)
        handoff = moved.handoff if moved.HasField("handoff") else None
        if stream is not None:
            stream.fail(RequestMovedError(f"request moved away from {self._name}", handoff))
        elif handoff is not None:
            self.release(handoff.handoff_id)

    def _close(self, reason: str) -> None:
        self.is_open = False
        self._on_close()
        self._commands.clear()
        self._has_commands.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(self._lost(reason))

    def _lost(self, reason: str) -> ReplicaLostError:
        return ReplicaLostError(f"decode replica {self._name} was lost ({reason})")
