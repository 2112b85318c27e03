"""`ProcessesCollector`: collects the metrics of a router's processes."""

import asyncio
from collections.abc import Iterable, Sequence

import grpc
from prometheus_client import Metric
from prometheus_client.registry import Collector

from baton.v1 import router_process_pb2, router_process_pb2_grpc
from router.observe.metrics import METRICS
from router.processes.summed_metrics import SummedMetrics
from rpc.channels import open_channel

__all__ = ["ProcessesCollector"]

_TIMEOUT_S = 2.0
_MAX_WAIT_S = 4.0
_Answer = router_process_pb2.GetMetricsResponse


class ProcessesCollector(Collector):
    """A collector for a registry of `prometheus_client`. It asks the processes of a router, and
    adds their metrics up. To be made in the event loop, which other threads collect through.

    Args:
        targets: the gRPC targets of the processes, in the order of their numbers.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._channels = [open_channel(target) for target in targets]
        self._summed = SummedMetrics(METRICS)
        self._collecting = asyncio.Lock()

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of the router. Blocks; not for the event loop."""
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(_MAX_WAIT_S)

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _collect(self) -> Iterable[Metric]:
        async with self._collecting:  # answers are added up in the order in which they were made
            answers = await asyncio.gather(*map(_ask, self._channels))
            return await asyncio.to_thread(self._add_up, answers)

    def _add_up(self, answers: Iterable[_Answer | None]) -> Iterable[Metric]:
        for number, answer in enumerate(answers):
            if answer is None:
                self._summed.note_silence(number)
            else:
                self._summed.take(number, answer.incarnation, answer.text.decode())
        return list(self._summed.families())


async def _ask(channel: grpc.aio.Channel) -> _Answer | None:
    """Asks a process; returns None if it does not answer."""
    stub = router_process_pb2_grpc.RouterMetricsServiceStub(channel)
    try:
        return await stub.GetMetrics(router_process_pb2.GetMetricsRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
