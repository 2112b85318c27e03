"""`DecodeConnection`: the one Connect stream between this router and a decode replica.

Commands go in, and each message that comes out carries the new tokens of all
of this router's requests there. A request's outputs wait, merged, in its
`DecodeStream`: at most `max_tokens` token ids per candidate, however slow its
client is.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from baton.errors import UnavailableError
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2

__all__ = ["DecodeConnection", "DecodeStream", "ReplicaLostError"]

_REST = -1
"""In place of a candidate's number: the end of those that have not ended."""
_PREFETCH = -2
"""In place of a candidate's number: what a request that is to start will load."""


class ReplicaLostError(UnavailableError):
    """The replica died or cannot be reached; its requests can go on elsewhere."""


class DecodeStream:
    """The outputs of one request on one replica, merged while nobody reads."""

    def __init__(self, request_id: str, connection: "DecodeConnection") -> None:
        self._request_id = request_id
        self._connection = connection
        self._pending: dict[int, decode_pb2.DecodeOutput] = {}  # by candidate, or `_REST`
        self._finished: set[int] = set()
        self._failure: ReplicaLostError | None = None
        self._changed = asyncio.Event()

    def deliver(self, output: decode_pb2.DecodeOutput) -> None:
        """Adds an output to its candidate's: token ids in order, the rest as protobuf
        merges. The request's last output stays the last.
        """
        if output.index in self._finished and not output.is_last:
            return
        pending = self._pending.get(output.index)
        if pending is None:
            self._pending[output.index] = output
        elif pending.finish_reason:  # the request's end, which is not that candidate's
            self._pending[_REST] = output
        else:
            pending.MergeFrom(output)
            if output.is_last:
                self._pending[output.index] = self._pending.pop(output.index)
        self._changed.set()

    def fail(self, error: ReplicaLostError) -> None:
        """Ends the stream; what was delivered can still be read."""
        self._failure = error
        self._changed.set()

    async def read(self) -> decode_pb2.DecodeOutput:
        """All that came of one candidate since its last read; waits for something to come.

        Raises:
            ReplicaLostError: nothing more will come.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    def finish(self, index: int) -> None:
        """Ends one candidate on the replica; nothing more of it is read. Idempotent."""
        if index not in self._finished:
            self._finished.add(index)
            self._connection.finish_candidate(self._request_id, index)

    def close(self) -> None:
        """Cancels the request on the replica unless it has ended. Idempotent."""
        self._connection.cancel(self._request_id)


class DecodeConnection:
    """Commands and outputs of all requests on one replica.

    Args:
        stub: of the replica's channel.
        name: the replica, for error messages.

    Attributes:
        is_open: False once the stream has broken.
    """

    def __init__(self, stub: "decode_pb2_grpc.DecodeServiceAsyncStub", name: str) -> None:
        self._stub = stub
        self._name = name
        self._streams: dict[str, DecodeStream] = {}
        # By request id, and by candidate if it concerns one alone: a cancel takes back a start
        # that was not sent yet, so at most one command waits per request and candidate. Blocks
        # to prefetch wait in one, too.
        self._commands: dict[tuple[str, int | None], decode_pb2.ConnectRequest] = {}
        self._has_commands = asyncio.Event()
        self.is_open = True

    async def run(self) -> None:
        """Sends commands and delivers outputs until the stream breaks.

        Raises:
            ReplicaLostError: always, in the end; every request got it too.
        """
        call = self._stub.Connect(self._outgoing())
        reason = "its stream ended"
        try:
            async for response in call:
                for output in response.outputs:
                    self._deliver(output)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            self._close(reason)
        raise self._lost(reason)

    def start(self, command: decode_pb2.StartDecode) -> DecodeStream:
        """Starts a request; its id must be new to the replica.

        Raises:
            ReplicaLostError: the connection has broken.
        """
        if not self.is_open:
            raise self._lost("the connection is closed")
        request_id = command.request.request_id
        stream = self._streams[request_id] = DecodeStream(request_id, self)
        self._send(request_id, None, decode_pb2.ConnectRequest(start=command))
        return stream

    def prefetch(self, request_id: str, blocks: prefill_pb2.KvHandoff) -> None:
        """Has the replica load blocks for a request that is to start. Best effort.

        They go out with blocks of the same handoff that were not sent yet, behind them.
        Those of another one, whose prefill replica was lost or whose prompt gave way, it names
        again.
        """
        if not self.is_open:
            return
        waiting = self._commands.get((request_id, _PREFETCH))
        if waiting and waiting.prefetch.blocks.handoff_id == blocks.handoff_id:
            waiting.prefetch.blocks.MergeFrom(blocks)
        else:
            command = decode_pb2.ConnectRequest(prefetch=decode_pb2.PrefetchKv(blocks=blocks))
            self._send(request_id, _PREFETCH, command)

    def withdraw_prefetch(self, request_id: str) -> None:
        """Takes back what was not sent yet of `prefetch`: the request needs it no more."""
        self._commands.pop((request_id, _PREFETCH), None)

    def cancel(self, request_id: str) -> None:
        """Stops a request and forgets it. Unknown and ended ids are fine."""
        if self._streams.pop(request_id, None) is None:
            return
        if self._commands.pop((request_id, None), None) is None:
            cancel = decode_pb2.CancelDecode(request_id=request_id)
            self._send(request_id, None, decode_pb2.ConnectRequest(cancel=cancel))

    def finish_candidate(self, request_id: str, index: int) -> None:
        """Stops one candidate of a request. Unknown and ended ones are fine."""
        if request_id in self._streams:
            cancel = decode_pb2.CancelDecode(request_id=request_id, index=index)
            self._send(request_id, index, decode_pb2.ConnectRequest(cancel=cancel))

    def _send(self, request_id: str, index: int | None, command: decode_pb2.ConnectRequest) -> None:
        self._commands[request_id, index] = command
        self._has_commands.set()

    async def _outgoing(self) -> AsyncIterator[decode_pb2.ConnectRequest]:
        # gRPC, where a call has ended by itself, leaves whoever waits here waiting.
        while self.is_open:
            await self._has_commands.wait()
            while self._commands:
                yield self._commands.pop(next(iter(self._commands)))
            self._has_commands.clear()

    def _deliver(self, output: decode_pb2.DecodeOutput) -> None:
        """Late outputs of cancelled requests find no stream and are dropped."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.is_last:
            del self._streams[output.request_id]
        stream.deliver(output)

    def _close(self, reason: str) -> None:
        self.is_open = False
        self._commands.clear()
        self._has_commands.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(self._lost(reason))

    def _lost(self, reason: str) -> ReplicaLostError:
        return ReplicaLostError(f"decode replica {self._name} was lost ({reason})")
