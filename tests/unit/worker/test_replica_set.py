"""`ReplicaSet` and its service: workers come, go, fail and are listed."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.common.errors import ConfigurationError, DeadlineExceededError, UnavailableError
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from tests.support.conditions import until
from tests.support.replica_sets import SERVICE_NAME, HeldReplica
from tests.support.rpc_servers import running_server
from tests.support.running_router import failed_call
from worker.replica_processes import StartingSet
from worker.replica_set import ReplicaSet, ReplicaSetServicer


class Held:
    """A set of held replicas.

    Attributes:
        made: all replicas that the set has made.
        taken: the addresses that each of them could not have.
        has_made: set once there is one.
    """

    def __init__(self):
        self.made = []
        self.taken = []
        self.has_made = asyncio.Event()
        self.set = ReplicaSet(self._make)

    def _make(self, number, taken):
        self.has_made.set()
        self.taken.append(list(taken))
        self.made.append(replica := HeldReplica(number))
        return replica

    async def scaled(self, number):
        """Scales; lets all replicas start and end."""
        scaling = asyncio.create_task(self.set.scale(number))
        await asyncio.sleep(0)
        for replica in self.made:
            replica.may_start.set()
            replica.may_end.set()
        await scaling

    async def scaling(self, number):
        """Starts to scale; returns the task once it waits."""
        task = asyncio.create_task(self.set.scale(number))
        for _ in range(3):
            await asyncio.sleep(0)
        return task


@pytest.fixture
async def held():
    return Held()


async def listed(replicas, count):
    """The first lists that a watcher gets."""
    seen = []
    async with asyncio.timeout(10):
        async for addresses in replicas.watch():
            seen.append(list(addresses))
            if len(seen) == count:
                return seen
    return seen


async def test_a_replica_is_listed_once_it_serves(held):
    watching = asyncio.create_task(listed(held.set, 3))
    scaling = await held.scaling(2)
    assert (held.set.addresses, held.set.num_changing) == ([], 2)
    first = asyncio.create_task(listed(held.set, 2))
    held.made[1].may_start.set()
    assert await first == [[], [":1001"]]
    assert not scaling.done()
    held.made[0].may_start.set()
    await scaling
    assert await watching == [[], [":1001"], [":1000", ":1001"]]
    assert held.set.num_changing == 0


async def test_the_youngest_leave_the_list_before_they_end(held):
    await held.scaled(3)
    held.made[1].may_end.clear()
    held.made[2].may_end.clear()
    scaling = asyncio.create_task(held.set.scale(1))
    await asyncio.sleep(0)
    assert held.set.addresses == [":1000"]
    assert [replica.calls for replica in held.made] == [["start"]] * 3
    for replica in held.made[1:]:
        replica.may_end.set()
    await scaling
    assert [replica.calls for replica in held.made] == [["start"], *[["start", "stop"]] * 2]


async def test_a_number_is_free_once_its_replica_has_ended(held):
    await held.scaled(2)
    held.made[1].may_end.clear()
    scaling = await held.scaling(1)
    again = await held.scaling(2)
    assert [replica.number for replica in held.made] == [0, 1, 2]
    held.made[1].may_end.set()
    held.made[2].may_start.set()
    await asyncio.gather(scaling, again)
    assert held.set.addresses == [":1000", ":1002"]
    await held.scaled(3)
    assert [replica.number for replica in held.made] == [0, 1, 2, 1]


async def test_an_address_is_free_once_its_replica_has_ended(held):
    await held.scaled(2)
    held.made[1].may_end.clear()
    scaling = await held.scaling(1)
    again = await held.scaling(2)
    held.made[1].may_end.set()
    held.made[2].may_start.set()
    await asyncio.gather(scaling, again)
    await held.scaled(3)
    assert held.taken == [[], [":1000"], [":1000", ":1001"], [":1000", ":1002"]]


@pytest.mark.parametrize("error", [ConfigurationError, RuntimeError])
async def test_a_replica_that_cannot_start_is_removed_and_reported(error, held):
    await held.scaled(1)
    scaling = await held.scaling(3)
    held.made[1].refusal = error("it could not start")
    for replica in held.made:
        replica.may_start.set()
    with pytest.raises(error, match="it could not start"):
        await scaling
    assert held.set.addresses == [":1000", ":1002"]
    assert held.made[1].calls == ["start", "stop"]


async def test_a_replica_that_moves_is_listed_at_its_new_address(held):
    watching = asyncio.create_task(listed(held.set, 2))
    await held.scaled(2)
    assert (await watching)[-1] == [":1000", ":1001"]
    watching = asyncio.create_task(listed(held.set, 2))
    await asyncio.sleep(0)
    held.made[0].move("10.0.0.7:1000")
    assert (await watching)[-1] == ["10.0.0.7:1000", ":1001"]


async def test_a_start_that_is_taken_back_is_no_error(held):
    scaling = await held.scaling(2)
    held.made[0].may_start.set()
    held.made[1].may_end.set()
    await held.set.scale(1)
    await scaling
    assert held.set.addresses == [":1000"]
    assert held.made[1].calls == ["start", "stop"]


async def test_a_change_goes_on_if_its_caller_leaves(held):
    scaling = await held.scaling(1)
    scaling.cancel()
    await asyncio.gather(scaling, return_exceptions=True)
    held.made[0].may_start.set()
    await held.set.scale(1)
    assert held.set.addresses == [":1000"]
    assert len(held.made) == 1


async def test_a_drained_set_ends_its_lists_and_grows_no_more(held):
    await held.scaled(2)
    watching = asyncio.create_task(listed(held.set, 9))
    await asyncio.sleep(0)
    await held.set.drain(1.0)
    assert await watching == [[":1000", ":1001"], []]
    assert [replica.calls for replica in held.made] == [["start", "stop"]] * 2
    with pytest.raises(UnavailableError):
        await held.set.scale(1)


@pytest.mark.parametrize("end", [lambda replicas: replicas.drain(1.0), ReplicaSet.close])
async def test_an_empty_set_that_ends_ends_its_lists(held, end):
    watching = asyncio.create_task(listed(held.set, 2))
    await asyncio.sleep(0)
    await end(held.set)
    assert await watching == [[]]


async def test_close_kills_what_does_not_end(held):
    await held.scaled(2)
    for replica in held.made:
        replica.may_end.clear()
    async with asyncio.timeout(10):
        await held.set.close()
    assert [replica.calls for replica in held.made] == [["start", "stop", "kill"]] * 2


@pytest.fixture
async def server():
    return RpcServer(ServerConfig(), (SERVICE_NAME,))


async def first_serves(held, server):
    """A set of two workers, the first of which serves."""
    starting = StartingSet(held.set, 2, server)
    await held.has_made.wait()
    held.made[0].may_start.set()
    await listed(held.set, 2)
    return starting


async def test_a_set_without_room_serves_with_the_workers_that_it_has(held, server):
    starting = await first_serves(held, server)
    assert not server.is_serving
    held.made[1].refusal = UnavailableError("the Ray cluster had no room")
    held.made[1].may_start.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.is_serving
    assert held.set.addresses == [":1000"]
    assert held.made[0].calls == ["start"]
    await starting.close()


@pytest.mark.parametrize("num_serving", [0, 1])
@pytest.mark.parametrize("error", [DeadlineExceededError, ConfigurationError, RuntimeError])
async def test_a_worker_that_cannot_start_ends_the_set_after_a_drain(
    held, server, error, num_serving
):
    starting = StartingSet(held.set, num_serving + 1, server)
    await held.has_made.wait()
    for replica in held.made:
        replica.may_start.set()
    held.made[-1].refusal = error("it could not start")
    held.made[-1].may_end.set()
    failed = asyncio.create_task(server.wait_failed())
    if num_serving:
        await until(lambda: held.made[0].calls == ["start", "stop"])
        assert not failed.done()
        held.made[0].may_end.set()
    shown = RuntimeError if error is RuntimeError else ConfigurationError
    with pytest.raises(shown, match="it could not start"):
        await asyncio.wait_for(failed, 10)
    await starting.close()
    assert "kill" not in held.made[0].calls
    assert not server.is_serving


async def test_a_set_that_ends_while_it_starts_drains_the_workers_that_serve(held, server):
    starting = await first_serves(held, server)
    held.made[1].may_end.set()
    draining = asyncio.create_task(starting.drain(1.0))
    await asyncio.wait({draining}, timeout=0.05)
    assert not draining.done()
    held.made[0].may_end.set()
    await asyncio.wait_for(draining, 10)
    await starting.close()
    assert [replica.calls for replica in held.made] == [["start", "stop"]] * 2
    assert not server.is_serving


@asynccontextmanager
async def serving(replicas):
    """A server with the set's service; yields a stub."""

    def start(server):
        server.add_servicer(
            replica_set_pb2_grpc.add_ReplicaSetServiceServicer_to_server,
            ReplicaSetServicer(replicas),
        )
        return replicas

    async with running_server((SERVICE_NAME,), start) as (_, channel):
        yield replica_set_pb2_grpc.ReplicaSetServiceStub(channel)


@pytest.mark.parametrize("given", [{}, {"num_replicas": 257}])
async def test_bad_numbers_name_the_field(given, held):
    async with serving(held.set) as stub:
        error = await failed_call(stub.Scale(replica_set_pb2.ScaleRequest(**given), timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    value = given.get("num_replicas")
    assert error.details() == f"num_replicas is {value}; it must be in [0, 256]"
    assert held.made == []


async def test_scale_answers_at_its_timeout_and_goes_on(held):
    async with serving(held.set) as stub:
        request = replica_set_pb2.ScaleRequest(num_replicas=1, timeout_ms=0)
        response = await stub.Scale(request, timeout=10)
        assert (list(response.addresses), response.num_changing) == ([], 1)
        held.made[0].may_start.set()
        held.made[0].may_end.set()
        response = await stub.Scale(replica_set_pb2.ScaleRequest(num_replicas=1), timeout=10)
        assert (list(response.addresses), response.num_changing) == ([":1000"], 0)
        response = await stub.Scale(replica_set_pb2.ScaleRequest(num_replicas=0), timeout=10)
        assert (list(response.addresses), response.num_changing) == ([], 0)


async def test_a_start_that_fails_after_the_timeout_is_logged(held, caplog):
    async with serving(held.set) as stub:
        request = replica_set_pb2.ScaleRequest(num_replicas=1, timeout_ms=0)
        await stub.Scale(request, timeout=10)
        (replica,) = held.made
        replica.refusal = ConfigurationError("decode-0 could not start")
        replica.may_start.set()
        replica.may_end.set()
        with pytest.raises(ConfigurationError):  # another caller waits for it
            await held.set.scale(1)
    assert "decode-0 could not start" in caplog.text


async def test_a_failed_start_has_a_status_of_its_own(held):
    async with serving(held.set) as stub:
        call = stub.Scale(replica_set_pb2.ScaleRequest(num_replicas=1), timeout=10)
        await held.has_made.wait()
        held.made[0].refusal = ConfigurationError("decode-0 could not start")
        held.made[0].may_start.set()
        held.made[0].may_end.set()
        error = await failed_call(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "decode-0 could not start"
