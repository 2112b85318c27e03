"""`OtherProcesses`: asks the other processes of this router, and the one that started them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from baton.common.errors import UnavailableError
from baton.v1 import (
    cluster_pb2,
    registration_pb2,
    registration_pb2_grpc,
    router_process_pb2,
    router_process_pb2_grpc,
)
from router.processes.place import ProcessPlace
from rpc.channels import open_channel

__all__ = ["OtherProcesses"]

_TIMEOUT_S = 1.0
_METRICS_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer")
_Ask = Callable[[router_process_pb2_grpc.RouterProcessServiceStub], Awaitable[_Answer]]


class OtherProcesses:
    """The other processes of a router.

    Args:
        place: of this process.
    """

    def __init__(self, place: ProcessPlace) -> None:
        self._channels = [open_channel(other.target) for other in place.others]
        self._numbers = [other.index for other in place.others]
        self._parent = open_channel(place.parent_target)

    async def states(
        self,
    ) -> tuple[Sequence[router_process_pb2.GetProcessResponse], Sequence[int]]:
        """Returns the states of the others, and the numbers of those that have not answered."""
        request = router_process_pb2.GetProcessRequest()
        answers = await self._ask_all(lambda stub: stub.GetProcess(request, timeout=_TIMEOUT_S))
        states = [answer for answer in answers if answer is not None]
        pairs = zip(self._numbers, answers, strict=True)
        return states, [number for number, answer in pairs if answer is None]

    async def traces(
        self, trace: cluster_pb2.GetTraceRequest
    ) -> Sequence[cluster_pb2.GetTraceResponse]:
        """Returns the records of those that answer."""
        request = router_process_pb2.GetProcessTraceRequest(trace=trace)
        answers = await self._ask_all(
            lambda stub: stub.GetProcessTrace(request, timeout=_TIMEOUT_S)
        )
        return [answer.trace for answer in answers if answer is not None]

    async def metrics(self) -> bytes:
        """Returns the metrics of the whole router, which its parent keeps.

        Raises:
            UnavailableError: the parent does not answer.
        """
        stub = router_process_pb2_grpc.RouterMetricsServiceStub(self._parent)
        request = router_process_pb2.GetMetricsRequest()
        try:
            return (await stub.GetMetrics(request, timeout=_METRICS_TIMEOUT_S)).text
        except grpc.aio.AioRpcError:
            raise UnavailableError(
                "the process that adds up the router's metrics does not answer"
            ) from None

    async def announce(self, request: registration_pb2.AnnounceRequest) -> None:
        """Passes the announcement of a worker on. One that does not answer gets the next
        renewal.
        """
        await self._relay(lambda stub: stub.Announce(request, timeout=_TIMEOUT_S))

    async def withdraw(self, request: registration_pb2.WithdrawRequest) -> None:
        """Passes the withdrawal of a worker on."""
        await self._relay(lambda stub: stub.Withdraw(request, timeout=_TIMEOUT_S))

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in (*self._channels, self._parent)))

    async def _ask_all(self, ask: Callable[[Any], Awaitable[_Answer]]) -> list[_Answer | None]:
        """Asks all at once; returns None for those that do not answer."""
        return await asyncio.gather(*(_ask_one(channel, ask) for channel in self._channels))

    async def _relay(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        """Makes a call to all at once; failures are no error."""
        stubs = (
            registration_pb2_grpc.RegistrationServiceStub(channel) for channel in self._channels
        )
        for answer in await asyncio.gather(*map(call, stubs), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, grpc.aio.AioRpcError):
                raise answer


async def _ask_one(channel: grpc.aio.Channel, ask: _Ask[_Answer]) -> _Answer | None:
    try:
        return await ask(router_process_pb2_grpc.RouterProcessServiceStub(channel))
    except grpc.aio.AioRpcError:
        return None
