"""The peer service: deadlines, generations, reads that outlive their lease or are in doubt."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc
from kvstore.codec import HEADER_BYTES, verify
from kvstore.jobs import LoadResult
from kvstore.layout import KvLayout
from kvstore.peer import worker
from kvstore.peer.lending import describe_layout
from kvstore.peer.transport import TransferError
from kvstore.store import KvObject
from kvstore.transfer_form import TransferForm
from tests.support.connector_rig import keys
from tests.support.peer_rig import LAYOUT, TIMEOUT_S, MemoryTransport, PeerRig

pytestmark = pytest.mark.alone

READ_S = 1.0
LARGE = KvLayout(16, 8, 64, 128, "float32")  # blocks of 8 MiB


class Reader:
    """A bare client of the service; it can make calls that `PeerConnectorWorker` never makes."""

    def __init__(self, rig: PeerRig, layout: KvLayout) -> None:
        # Without the probe the window does not grow, and unread bytes stay with the sender.
        self.channel = grpc.insecure_channel(
            rig.worker.address.endpoint, options=[("grpc.http2.bdp_probe", 0)]
        )
        self.stub = kv_peer_pb2_grpc.KvPeerServiceStub(self.channel)
        self.generation = rig.worker.address.generation
        self.layout = describe_layout(layout)

    def blocks(self, num_blocks: int, lease_id: str = "lease") -> pb.KvBlockList:
        return pb.KvBlockList(
            generation=self.generation,
            lease_id=lease_id,
            keys=keys(num_blocks),
            layout=self.layout,
        )

    def open_blocks(self, num_blocks: int, timeout_ms: int = 60_000) -> pb.OpenBlocksResponse:
        message = pb.OpenBlocksRequest(blocks=self.blocks(num_blocks), timeout_ms=timeout_ms)
        return self.stub.OpenBlocks(message, timeout=TIMEOUT_S)


@pytest.fixture
def prefill() -> Iterator[PeerRig]:
    rig = PeerRig(f"nixl://?timeout_s={READ_S}", num_blocks=16, transport=MemoryTransport())
    yield rig
    rig.worker.close()


@pytest.fixture
def reader(prefill: PeerRig) -> Iterator[Reader]:
    client = Reader(prefill, LAYOUT)
    yield client
    client.channel.close()


def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code(), failed.value.details()


def test_protobuf_parses_the_hand_framed_blocks(prefill: PeerRig, reader: Reader) -> None:
    prefill.publish([1, 2, 3])
    message = pb.ReadBlocksRequest(blocks=reader.blocks(3))
    stream = b"".join(part.data for part in reader.stub.ReadBlocks(message, timeout=TIMEOUT_S))

    frame_bytes = HEADER_BYTES + LAYOUT.block_bytes
    assert len(stream) == 3 * frame_bytes
    for index, key in enumerate(keys(3)):
        frame = memoryview(stream)[index * frame_bytes :][:frame_bytes]
        assert verify([KvObject.split(frame, HEADER_BYTES)], [key])
        assert frame[HEADER_BYTES:] == prefill.pool[1 + index].numpy().tobytes()


@pytest.mark.parametrize("timeout_s", [None, 3600.0])
def test_a_call_needs_a_sensible_deadline(
    prefill: PeerRig, reader: Reader, timeout_s: float | None
) -> None:
    prefill.publish([1])
    stub, blocks = reader.stub, reader.blocks(1)
    calls = [
        lambda: stub.Describe(pb.DescribeRequest(), timeout=timeout_s),
        lambda: stub.OpenBlocks(pb.OpenBlocksRequest(blocks=blocks), timeout=timeout_s),
        lambda: list(stub.ReadBlocks(pb.ReadBlocksRequest(blocks=blocks), timeout=timeout_s)),
    ]
    for call in calls:
        assert status_of(call)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_calls_with_another_generation_are_refused(prefill: PeerRig, reader: Reader) -> None:
    prefill.publish([1])
    reader.generation = b"another"
    stub, blocks, timeout_s = reader.stub, reader.blocks(1), TIMEOUT_S
    calls = [
        lambda: stub.OpenBlocks(pb.OpenBlocksRequest(blocks=blocks), timeout=timeout_s),
        lambda: stub.CloseBlocks(pb.CloseBlocksRequest(), timeout=timeout_s),
        lambda: list(stub.ReadBlocks(pb.ReadBlocksRequest(blocks=blocks), timeout=timeout_s)),
        lambda: stub.RenewLeases(pb.RenewLeasesRequest(), timeout=timeout_s),
    ]
    for call in calls:
        status, message = status_of(call)
        assert status is grpc.StatusCode.FAILED_PRECONDITION
        assert message.startswith("generation: ")


def test_an_open_read_keeps_the_blocks_of_an_ended_lease(prefill: PeerRig, reader: Reader) -> None:
    job_id = prefill.publish([1, 2])
    opened = reader.open_blocks(2)
    prefill.end("lease")
    prefill.step()

    assert prefill.released == []
    assert status_of(lambda: reader.open_blocks(2))[0] is grpc.StatusCode.NOT_FOUND
    message = pb.CloseBlocksRequest(generation=reader.generation, read_ids=[opened.read_id, 99])
    reader.stub.CloseBlocks(message, timeout=TIMEOUT_S)
    prefill.run_until(lambda: prefill.released == [job_id])


def test_a_reader_that_never_closes_holds_blocks_for_a_bounded_time(
    prefill: PeerRig, reader: Reader
) -> None:
    job_id = prefill.publish([1, 2])
    opened = reader.open_blocks(2)
    prefill.end("lease")

    assert opened.timeout_ms == 1000 * READ_S
    prefill.run_until(lambda: prefill.released == [job_id])


def test_a_stalled_stream_is_ended_and_its_blocks_are_released() -> None:
    prefill = PeerRig(f"grpc://?timeout_s={READ_S}", LARGE, num_blocks=4)
    reader = Reader(prefill, LARGE)
    try:
        job_id = prefill.publish(range(4))
        message = pb.ReadBlocksRequest(blocks=reader.blocks(4))
        stream = reader.stub.ReadBlocks(message, timeout=TIMEOUT_S)
        received = [len(next(stream).data)]
        prefill.end("lease")
        prefill.run_until(lambda: prefill.released == [job_id])
        prefill.pool.zero_()  # other requests use the pool now

        with pytest.raises(grpc.RpcError) as failed:
            received.extend(len(part.data) for part in stream)
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        assert sum(received) < 4 * (HEADER_BYTES + LARGE.block_bytes)
    finally:
        reader.channel.close()
        prefill.worker.close()


def test_close_ends_streams_that_are_being_read() -> None:
    prefill = PeerRig("grpc://?timeout_s=60", LARGE, num_blocks=4)
    reader = Reader(prefill, LARGE)
    prefill.publish(range(4))
    message = pb.ReadBlocksRequest(blocks=reader.blocks(4))
    stream = reader.stub.ReadBlocks(message, timeout=TIMEOUT_S)
    next(stream)
    began_at = time.monotonic()
    prefill.worker.close()
    prefill.worker.close()

    assert time.monotonic() - began_at < TIMEOUT_S / 2
    with pytest.raises(grpc.RpcError):
        list(stream)
    reader.channel.close()


def test_an_engine_that_does_not_step_delays_readers_for_a_bounded_time() -> None:
    form = TransferForm(4, "float16")  # the engine's thread must gather the blocks
    prefill = PeerRig(f"grpc://?timeout_s={READ_S}", form=form)
    decode = PeerRig(f"grpc://?timeout_s={READ_S}", form=form)
    try:
        job_id = prefill.publish([1, 2])
        assert decode.load(prefill.handoff(2), [1, 2]).error == "unavailable"
        prefill.end("lease")
        prefill.run_until(lambda: prefill.released == [job_id])
    finally:
        prefill.worker.close()
        decode.worker.close()


# Failed reads that may still write.


def forget_kept_memory(closed: Any) -> None:
    """Closes a worker again and frees the memory that it kept for reads in doubt."""
    closed.close()
    held = worker._still_written_to
    [index] = [index for index, memory in enumerate(held) if memory is closed._kept]
    del held[index]


class Doubtful(MemoryTransport):
    """A transport whose reads fail and do not settle until `recover`."""

    def __init__(self) -> None:
        super().__init__(self._fail)
        self.is_well = False

    def _fail(self) -> None:
        if not self.is_well:
            self.settled = False
            raise TransferError("the time is up", is_settled=False)

    def recover(self) -> None:
        self.is_well = self.settled = True


def test_segments_in_doubt_are_not_used_until_their_reads_have_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.mover.staging._NUM_SEGMENTS", 2)
    monkeypatch.setattr("kvstore.guard.breaker._FIRST_COOLDOWN_S", 0.01)
    monkeypatch.setattr("kvstore.guard.breaker._MAX_COOLDOWN_S", 0.01)
    doubtful = Doubtful()
    # Only blocks in the pool's own form are read in place; these go through segments.
    form = TransferForm(LAYOUT.block_size // 2, LAYOUT.dtype)
    prefill, decode = (
        PeerRig("nixl://?timeout_s=20", num_blocks=16, transport=transport, form=form)
        for transport in (MemoryTransport(), doubtful)
    )
    mover = decode.worker._mover
    try:
        prefill.publish([1, 2])
        handoff = prefill.handoff(2)
        jobs = []
        while mover.staging._free:
            jobs.append(decode.start_load(handoff, [1, 2]))
            decode.run_until(
                lambda: mover.num_in_doubt == 2 * len(jobs) or jobs[-1] in decode.loads
            )
            if jobs[-1] in decode.loads:
                jobs.pop()  # the breaker was open
        assert len(jobs) == 2
        num_moved = doubtful.num_moved
        lost = decode.load(handoff, [1, 2])
        assert lost.error == "unavailable", (
            "fails at once, since the segments may be held for minutes"
        )
        assert not decode.loads.keys() & set(jobs), "the blocks of reads in doubt are held"

        doubtful.recover()
        decode.run_until(lambda: decode.loads.keys() >= set(jobs))
        assert {decode.loads[job].error for job in jobs} == {"unavailable"}
        decode.run_until(lambda: decode.load(handoff, [1, 2]).num_blocks == 2)
        assert doubtful.num_moved > num_moved
        assert not mover.is_in_doubt
        assert (decode.pool[1:3] == prefill.pool[1:3]).all()
    finally:
        prefill.worker.close()
        decode.worker.close()


def test_a_read_in_doubt_is_tracked_after_its_peer_is_forgotten() -> None:
    prefill = PeerRig("nixl://", transport=MemoryTransport())
    transport = Doubtful()
    decode = PeerRig("nixl://", transport=transport)
    try:
        prefill.publish([1])
        fail = transport.fault

        def forget_and_fail() -> None:
            decode.worker._peers.forget(prefill.worker.address)
            fail()

        transport.fault = forget_and_fail
        load_id = decode.start_load(prefill.handoff(1), [1])
        decode.run_until(lambda: decode.worker._mover.is_in_doubt)
        assert load_id not in decode.loads, "the block is not free"
        transport.recover()
        decode.run_until(lambda: load_id in decode.loads)
        assert decode.loads[load_id] == LoadResult(load_id, 0, "unavailable")
        assert not decode.worker._mover.is_in_doubt
    finally:
        prefill.worker.close()
        decode.worker.close()


def test_memory_in_doubt_outlives_its_connector() -> None:
    prefill = PeerRig("nixl://", transport=MemoryTransport())
    decode = PeerRig("nixl://", transport=Doubtful())
    prefill.publish([1])
    decode.start_load(prefill.handoff(1), [1])
    mover = decode.worker._mover
    decode.run_until(lambda: mover.is_in_doubt)
    for rig in (prefill, decode):
        rig.worker.close()
    forget_kept_memory(decode.worker)
