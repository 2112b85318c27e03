"""`DecodeConnection`, the router's end of a Connect stream, without a server."""

import asyncio
from functools import partial

import pytest

from baton.common.errors import InternalError, InvalidArgumentError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import common_pb2, decode_pb2, prefill_pb2, request_pb2
from router.fleet.decode_connection import DecodeConnection, ReplicaLostError


class FakeStub:
    """A stub whose Connect method reads commands and yields responses from a queue."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[decode_pb2.ConnectResponse | None] = asyncio.Queue()
        self.is_cancelled = False

    def Connect(self, commands, *, metadata):
        self.commands = commands
        self.metadata = metadata
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self):
        while (response := await self.responses.get()) is not None:
            yield response
            self.responses.task_done()

    def send(self, *outputs) -> None:
        self.responses.put_nowait(decode_pb2.ConnectResponse(outputs=outputs))


def start_command(request_id):
    start = decode_pb2.StartDecode(spec=request_pb2.RequestSpec(request_id=request_id))
    return decode_pb2.ConnectRequest(start=start)


def make_handoff(handoff_id, *keys, num_tokens=0):
    return prefill_pb2.KvHandoff(
        handoff_id=handoff_id, block_keys=keys, num_tokens=num_tokens, connector_params=b"p"
    )


def make_output(request_id, *token_ids, index=0, finish_reason=0, is_last=None):
    return request_pb2.CandidateOutput(
        request_id=request_id,
        index=index,
        token_ids=token_ids,
        finish_reason=finish_reason,
        is_last=bool(finish_reason) if is_last is None else is_last,
    )


@pytest.fixture
async def connected():
    stub = FakeStub()
    connection = DecodeConnection(stub, "name", ClusterSecurity())
    task = asyncio.create_task(connection.run())
    await asyncio.sleep(0)
    yield stub, connection, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_unread_outputs_are_merged(connected):
    stub, connection, _ = connected
    a, b = connection.start(start_command("a")), connection.start(start_command("b"))
    first = make_output("a", 1)
    first.cached_tokens = 5
    stub.send(first, make_output("b", 9))
    stub.send(make_output("a", 2))
    stub.send(make_output("a", 3, finish_reason=common_pb2.FINISH_REASON_STOP))
    await stub.responses.join()
    merged = await a.read()
    assert list(merged.token_ids) == [1, 2, 3]
    assert merged.cached_tokens == 5
    assert merged.finish_reason == "stop"
    assert list((await b.read()).token_ids) == [9]


async def test_a_request_ends_on_the_replica_before_its_outputs_are_read(connected):
    """Clients that do not read must not seem to take the seats of a replica."""
    stub, connection, _ = connected
    ended = []
    streams = [connection.start(start_command(name), partial(ended.append, name)) for name in "ab"]
    stub.send(make_output("a", 1), make_output("b", 2))
    await stub.responses.join()
    assert not ended
    stub.send(make_output("a", 3, finish_reason=common_pb2.FINISH_REASON_STOP))
    await stub.responses.join()
    assert ended == ["a"]
    assert list((await streams[0].read()).token_ids) == [1, 3]
    streams[1].fail(ReplicaLostError("lost"))
    assert ended == ["a", "b"]


async def test_a_request_that_is_too_large_for_a_message_is_refused_alone(connected):
    stub, connection, _ = connected
    running = connection.start(start_command("a"))
    large = start_command("b")
    large.start.spec.prompt_token_ids.extend([2**31 - 1] * (4 * 2**20))  # five bytes each
    with pytest.raises(InvalidArgumentError, match=r"20971\d+ bytes; a decode"):
        connection.start(large)
    assert connection.is_open
    stub.send(make_output("a", 1))
    assert list((await running.read()).token_ids) == [1]
    connection.start(start_command("b"))  # the id is not in use


async def test_candidates_are_merged_separately_and_the_last_output_stays_last(connected):
    stub, connection, _ = connected
    stream = connection.start(start_command("a"))
    stop = common_pb2.FINISH_REASON_STOP
    stub.send(make_output("a", 1), make_output("a", 2, index=1))
    stub.send(make_output("a", 3, index=1, finish_reason=stop, is_last=False))
    stub.send(make_output("a", 4, finish_reason=stop))
    await stub.responses.join()
    read = [await stream.read(), await stream.read()]
    assert [(each.index, list(each.token_ids), each.is_last) for each in read] == [
        (1, [2, 3], False),
        (0, [1, 4], True),
    ]
    stream.close()  # the request has ended, so no cancel is sent
    connection.start(start_command("b"))
    await anext(stub.commands)  # the start of a
    assert (await anext(stub.commands)).start.spec.request_id == "b"


async def test_an_unknown_finish_reason_is_an_error_that_names_it(connected):
    stub, connection, _ = connected
    stream = connection.start(start_command("a"))
    stub.send(make_output("a", 1, finish_reason=99))
    with pytest.raises(InternalError, match=r"^finish_reason is 99, which this router does not"):
        await stream.read()


async def test_an_error_is_raised_after_the_tokens_that_came_before_it(connected):
    stub, connection, _ = connected
    stream = connection.start(start_command("a"))
    stub.send(make_output("a", 1), make_output("a", 2, index=1))
    end = make_output("a", finish_reason=common_pb2.FINISH_REASON_ERROR)
    end.error.MergeFrom(request_pb2.WorkerError(code=13, message="gone"))
    stub.send(end)
    await stub.responses.join()
    read = [await stream.read() for _ in range(2)]
    assert [(list(each.token_ids), each.finish_reason, each.is_last) for each in read] == [
        ([1], None, False),
        ([2], None, False),
    ]
    with pytest.raises(InternalError, match="gone"):
        await stream.read()


async def test_a_finished_candidate_is_cancelled_once_and_never_read_again(connected):
    stub, connection, _ = connected
    stream = connection.start(start_command("a"))
    await anext(stub.commands)
    stub.send(make_output("a", 1), make_output("a", 2, index=1))
    await stub.responses.join()
    await stream.read()
    for _ in range(2):
        stream.finish(0)
    cancel = (await anext(stub.commands)).cancel
    assert (cancel.request_id, cancel.HasField("index"), cancel.index) == ("a", True, 0)
    stub.send(make_output("a", 3), make_output("a", 4, index=1))
    await stub.responses.join()
    assert list((await stream.read()).token_ids) == [2, 4]
    stub.send(make_output("a", finish_reason=common_pb2.FINISH_REASON_ABORTED))
    await stub.responses.join()
    last = await stream.read()
    assert (last.is_last, list(last.token_ids)) == (True, [])
    connection.start(start_command("b"))
    assert (await anext(stub.commands)).start.spec.request_id == "b"


async def test_commands_go_out_in_order(connected):
    stub, connection, _ = connected
    for name in "abc":
        connection.start(start_command(name))
    sent = [await anext(stub.commands) for _ in range(3)]
    assert [command.start.spec.request_id for command in sent] == ["a", "b", "c"]
    connection.cancel("b")
    assert (await anext(stub.commands)).cancel.request_id == "b"


async def test_prefetches_are_merged_while_unsent_and_sent_before_the_start(connected):
    stub, connection, _ = connected
    connection.prefetch("a", make_handoff("h", b"1", b"2", num_tokens=8))
    sent = (await anext(stub.commands)).prefetch
    assert (list(sent.blocks.block_keys), sent.blocks.num_tokens) == ([b"1", b"2"], 8)
    connection.prefetch("a", make_handoff("h", b"3", num_tokens=12))
    connection.start(start_command("b"))
    connection.prefetch("a", make_handoff("h", b"4", b"5", num_tokens=20))
    connection.start(start_command("a"))
    gathered, other, begun = [await anext(stub.commands) for _ in range(3)]
    assert gathered.prefetch.blocks == make_handoff("h", b"3", b"4", b"5", num_tokens=20)
    assert other.start.spec.request_id == "b"
    assert begun.start.spec.request_id == "a"


async def test_a_new_handoff_replaces_the_prefetch_of_a_lost_prefill_replica(connected):
    stub, connection, _ = connected
    connection.prefetch("a", make_handoff("lost", b"1", b"2"))
    connection.prefetch("a", make_handoff("next", b"1"))
    connection.prefetch("a", make_handoff("next", b"2"))
    (sent,) = [await anext(stub.commands)]
    assert sent.prefetch.blocks == make_handoff("next", b"1", b"2")


async def test_a_withdrawn_prefetch_is_not_sent(connected):
    stub, connection, task = connected
    connection.prefetch("a", make_handoff("h", b"1"))
    connection.withdraw_prefetch("a")
    connection.withdraw_prefetch("unknown")
    connection.start(start_command("b"))
    assert (await anext(stub.commands)).start.spec.request_id == "b"
    stub.responses.put_nowait(None)
    with pytest.raises(ReplicaLostError):
        await task
    connection.prefetch("a", make_handoff("h", b"1"))  # ignored: the replica is lost


async def test_closing_a_stream_withdraws_an_unsent_start(connected):
    stub, connection, _ = connected
    connection.start(start_command("a")).close()
    connection.start(start_command("b"))
    assert (await anext(stub.commands)).start.spec.request_id == "b"


async def test_no_cancel_is_sent_for_ended_or_unknown_requests(connected):
    stub, connection, _ = connected
    stream = connection.start(start_command("a"))
    await anext(stub.commands)
    stub.send(make_output("a", 1, finish_reason=common_pb2.FINISH_REASON_LENGTH))
    await stream.read()
    stream.close()
    connection.cancel("unknown")
    stub.send(make_output("a", 2), make_output("unknown", 3))  # late
    await stub.responses.join()
    connection.start(start_command("b"))
    assert (await anext(stub.commands)).start.spec.request_id == "b"


async def test_commands_end_with_the_stream(connected):
    stub, _, task = connected
    coming = asyncio.create_task(anext(stub.commands, None))
    stub.responses.put_nowait(None)
    with pytest.raises(ReplicaLostError):
        await task
    async with asyncio.timeout(20):
        assert await coming is None


async def test_a_broken_stream_fails_its_requests_after_their_received_tokens(connected):
    stub, connection, task = connected
    reader, waiter = connection.start(start_command("a")), connection.start(start_command("b"))
    waiting = asyncio.create_task(waiter.read())
    stub.send(make_output("a", 1))
    stub.responses.put_nowait(None)
    with pytest.raises(ReplicaLostError, match="name was lost"):
        await task
    with pytest.raises(ReplicaLostError):
        await waiting
    assert list((await reader.read()).token_ids) == [1]
    for _ in range(2):
        with pytest.raises(ReplicaLostError):
            await reader.read()
    assert stub.is_cancelled
    assert not connection.is_open
    with pytest.raises(ReplicaLostError):
        connection.start(start_command("c"))
