"""A server answers a burst of calls that come while its event loop is busy."""

import time

import grpc

from baton.v1 import worker_pb2, worker_pb2_grpc
from rpc.channels import open_channel
from rpc.server import RpcServer
from rpc.server_config import ServerConfig

NUM_CALLS = 4000
"""gRPC's own limit of calls that no one has taken is 1,000, with some refused, and 3,000."""


class SlowToStart(worker_pb2_grpc.WorkerServiceServicer):
    is_first = True

    async def GetLoad(self, request, context):
        if self.is_first:
            self.is_first = False
            time.sleep(1.0)  # noqa: ASYNC251 - the event loop is busy while the other calls come
        return worker_pb2.GetLoadResponse()


async def test_no_call_of_a_burst_is_cancelled():
    server = RpcServer(ServerConfig(host="127.0.0.1", port=0), ["baton.v1.WorkerService"])
    server.add_servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, SlowToStart())
    await server.listen()
    try:
        async with open_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            calls = [
                stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=60) for _ in range(NUM_CALLS)
            ]
            codes = [await call.code() for call in calls]
    finally:
        await server.stop(0)
    assert set(codes) == {grpc.StatusCode.OK}
