"""The peer connector over real sockets: bytes, leases, faults and shutdown."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvstore.jobs import ConnectorWork, LoadResult, SaveResult
from kvstore.layout import FP8, KvLayout, StateLayout, StatePart
from kvstore.peer.planes import DataPlane
from kvstore.peer.service import PeerServicer
from kvstore.peer.transport import TransferError
from kvstore.transfer_form import PoolShare, TransferForm
from tests.support.connector_rig import keys
from tests.support.peer_rig import LAYOUT, TIMEOUT_S, MemoryTransport, PeerRig, random_pool
from tests.support.ports import reserved_port

MakeRig = Callable[..., PeerRig]
WAYS = ("grpc", "pull", "unreadable")
"""Blocks are sent by gRPC, read by a transport, or sent since the transport cannot read them."""
STATES = StateLayout(2, (StatePart("s", 3, 100, "float32"),))


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[PeerRig] = []

    def make(way: str = "grpc", options: str = "", **arguments: Any) -> PeerRig:
        if way != "grpc":
            transport = arguments.setdefault("transport", MemoryTransport())
            transport.obstacle = "a wall" if way == "unreadable" else ""
        scheme = "grpc" if way == "grpc" else "nixl"
        if "timeout_s" not in options:  # the default is short for a busy machine
            options = f"timeout_s={TIMEOUT_S:g}&{options}".rstrip("&")
        rigs.append(PeerRig(f"{scheme}://?{options}", **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.worker.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_blocks", [1, 7, 40])
def test_loaded_blocks_equal_the_published_ones(
    make_rig: MakeRig, way: str, num_blocks: int
) -> None:
    prefill, decode = make_rig(way), make_rig(way, pool=torch.zeros(64, *LAYOUT.block_shape))
    job_id = prefill.publish(range(3, 3 + num_blocks))

    assert prefill.saves[job_id] == SaveResult(job_id, committed=True, is_held=True)
    result = decode.load(prefill.handoff(num_blocks), range(63, 63 - num_blocks, -1))
    assert (result.num_blocks, result.error) == (num_blocks, "")
    assert torch.equal(decode.pool[-num_blocks:].flip(0), prefill.pool[3 : 3 + num_blocks])
    assert not decode.pool[: 64 - num_blocks].any(), "no other block is written"
    assert prefill.released == []


LAYOUTS = {
    "bfloat16": KvLayout(1, 4, 16, 64, "bfloat16"),
    "float16": KvLayout(3, 2, 8, 64, "float16"),
    "fp8": KvLayout(2, 2, 8, 64, FP8),
    "one block to a segment": KvLayout(16, 8, 64, 64, "float32"),
    "many chunks to a block": KvLayout(8, 4, 64, 128, "float32"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_every_layout_are_loaded_unchanged(
    make_rig: MakeRig, name: str, way: str
) -> None:
    layout = LAYOUTS[name]
    prefill = make_rig(way, layout=layout, num_blocks=8)
    decode = make_rig(way, layout=layout, pool=torch.zeros_like(prefill.pool))
    prefill.publish(range(5), num_tail_tokens=3)

    assert decode.load(prefill.handoff(5), range(5)).num_blocks == 5
    assert torch.equal(decode.pool[:4], prefill.pool[:4])
    valid = layout.head_dim * 3
    ours, theirs = (pool[4].flatten(3)[..., :valid] for pool in (decode.pool, prefill.pool))
    assert torch.equal(ours, theirs)
    rest = decode.pool[4].flatten(3)[..., valid : layout.block_size * layout.head_dim]
    assert not rest.any(), "tokens after the tail are not loaded"
    assert not decode.pool[5:].any()


@pytest.mark.parametrize("way", WAYS)
def test_pools_of_unlike_block_sizes_share_a_transfer_form(make_rig: MakeRig, way: str) -> None:
    form = TransferForm(4, "float32", states=STATES)  # two objects of 1536 bytes
    layout, share = replace(LAYOUT, block_size=8), PoolShare(num_blocks=8)
    prefill = make_rig(way, layout=layout, form=form, num_blocks=8 + 3, share=share)
    pool, share = torch.zeros(16 + 4, *LAYOUT.block_shape), PoolShare(num_blocks=16)
    decode = make_rig(way, layout=LAYOUT, pool=pool, form=form, share=share)
    gathering = threading.Thread(target=lambda: prefill.run_until(lambda: bool(decode.loads)))
    prefill.publish([*range(2, 10), 18, 19])  # the second slot
    gathering.start()  # the lending engine steps while its blocks are read

    assert decode.load(prefill.handoff(10), [*range(8), 16, 17]).num_blocks == 10
    assert torch.equal(decode.pool[16:18].flatten(), prefill.pool[9].flatten())
    assert not decode.pool[18:].any()
    gathering.join(TIMEOUT_S)
    sliced = prefill.pool[1:5].unflatten(4, (2, 4)).movedim(4, 1).flatten(0, 1)
    assert torch.equal(decode.pool[:8], sliced)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_converted_to_the_transfer_form(make_rig: MakeRig, way: str) -> None:
    form, share = TransferForm(4, "float16", states=STATES), PoolShare(num_blocks=40)
    prefill = make_rig(way, form=form, share=share)
    layout = replace(LAYOUT, dtype="float16")
    pool = torch.zeros(64, *LAYOUT.block_shape).half()
    decode = make_rig(way, layout=layout, pool=pool, form=form, share=share)
    units = range(40, 44)
    prefill.scheduler.save(keys(4, first=5), units, lease_id="lease")
    prefill.publish(range(5), num_tail_tokens=2)
    gathering = threading.Thread(target=lambda: prefill.run_until(lambda: bool(decode.loads)))
    gathering.start()

    assert decode.load(prefill.handoff(9), [*range(5), *units]).num_blocks == 9
    sent, arrived = (rig.pool[40:].view(-1).view(torch.uint8) for rig in (prefill, decode))
    assert torch.equal(arrived[: 4 * 768], sent[: 4 * 768])
    assert not arrived[4 * 768 :].any()
    gathering.join(TIMEOUT_S)
    assert torch.equal(decode.pool[:4], prefill.pool[:4].half())
    assert torch.equal(decode.pool[4, ..., :2, :], prefill.pool[4, ..., :2, :].half())
    assert not decode.pool[4, ..., 2:, :].any()


def test_full_blocks_are_lent_without_a_copy(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(), make_rig()
    prefill.publish([3])
    prefill.pool[3, 0, 0, 0, 0, 0] += (
        1  # forbidden in use; a copied block would not have the change
    )
    expected = decode.pool.clone()
    expected[9] = 0

    result = decode.load(prefill.handoff(1), [9])

    assert (result.num_blocks, result.error) == (0, "corrupt")
    assert torch.equal(decode.pool, expected), "the corrupt block is zeroed"


@pytest.mark.parametrize("way", WAYS)
def test_ending_a_lease_releases_its_blocks(make_rig: MakeRig, way: str) -> None:
    prefill, decode = make_rig(way), make_rig(way)
    jobs = [prefill.publish([1, 2]), prefill.publish([3], first_key=2, num_tail_tokens=1)]
    other = prefill.publish([1, 2], lease_id="other")
    handoff = prefill.handoff(3)
    assert decode.load(handoff, [4, 5, 6]).num_blocks == 3

    prefill.end("lease", "unknown")
    prefill.run_until(lambda: sorted(prefill.released) == jobs)
    decode.pool[7:10] = math.nan
    expected = decode.pool.clone()
    expected[7:10] = 0  # blocks that were not loaded are zeroed

    assert decode.load(handoff, [7, 8, 9]) == LoadResult(1, 0, "missing")
    assert torch.equal(decode.pool, expected)
    assert decode.load(prefill.handoff(2, "other"), [7, 8]).num_blocks == 2
    assert other not in prefill.released


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["read", "cancelled"])
def test_blocks_are_released_once_no_load_reads_them(
    make_rig: MakeRig, *, is_cancelled: bool
) -> None:
    reading, may_continue = threading.Event(), threading.Event()

    def stall() -> None:
        reading.set()
        assert may_continue.wait(TIMEOUT_S)

    transport, patient = MemoryTransport(stall), f"timeout_s={3 * TIMEOUT_S:g}"
    prefill = make_rig("pull", patient)
    decode = make_rig("pull", patient, transport=transport)
    job_id = prefill.publish(range(8))
    load_id = decode.start_load(prefill.handoff(8), range(8))
    decode.step()
    assert reading.wait(TIMEOUT_S)
    prefill.end("lease")
    prefill.step()
    assert prefill.released == []

    if is_cancelled:
        decode.scheduler.cancel_load(load_id)
        decode.step()
    may_continue.set()
    decode.run_until(lambda: load_id in decode.loads)
    prefill.run_until(lambda: prefill.released == [job_id])


@pytest.fixture
def opened_keys(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """Returns a list that gets the keys of each call of OpenBlocks."""
    opened: list[list[bytes]] = []
    open_blocks = PeerServicer.OpenBlocks

    def note(servicer: PeerServicer, request: Any, context: Any) -> Any:
        opened.append(list(request.blocks.keys))
        return open_blocks(servicer, request, context)

    monkeypatch.setattr(PeerServicer, "OpenBlocks", note)
    return opened


def test_a_load_of_many_pieces_opens_its_blocks_once_and_outlives_its_lease(
    make_rig: MakeRig, opened_keys: list[list[bytes]]
) -> None:
    layout = LAYOUTS["one block to a segment"]
    prefill = make_rig("pull", layout=layout, num_blocks=12)
    pool = torch.zeros(12, *layout.block_shape)
    # No piece is read before the lease has ended.
    transport = MemoryTransport(lambda: prefill.worker.start(ConnectorWork(ended=["lease"])))
    decode = make_rig("pull", layout=layout, pool=pool, transport=transport)
    job_id = prefill.publish(range(12))
    handoff = prefill.handoff(12)

    assert decode.load(handoff, range(12)).num_blocks == 12
    assert torch.equal(pool, prefill.pool)
    assert opened_keys == [list(handoff.block_keys)]
    assert len(transport.allowed_s) == 4
    prefill.run_until(lambda: prefill.released == [job_id])


def test_a_reader_opens_few_blocks_until_it_knows_their_number_of_ranges(
    make_rig: MakeRig, opened_keys: list[list[bytes]]
) -> None:
    """If the lender's pool is sliced, a response grows with the ranges of its blocks."""
    layout = KvLayout(64, 32, 64, 1, "float32")
    prefill, decode = (make_rig("pull", layout=layout, num_blocks=12) for _ in range(2))
    prefill.publish(range(12))

    assert decode.load(prefill.handoff(12), range(12)).num_blocks == 12
    assert list(map(len, opened_keys)) == [4, 12], (
        "the first response shows that each block is one range"
    )

    opened_keys.clear()
    assert decode.load(prefill.handoff(12), range(12)).num_blocks == 12
    assert list(map(len, opened_keys)) == [12]


def test_one_call_opens_a_limited_number_of_blocks(
    make_rig: MakeRig, opened_keys: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block is read while the peer answers."""
    monkeypatch.setattr("kvstore.peer.open_reads._MAX_BLOCKS", 6)
    layout = LAYOUTS["one block to a segment"]
    prefill, decode = (make_rig("pull", layout=layout, num_blocks=12) for _ in range(2))
    prefill.publish(range(12))

    assert decode.load(prefill.handoff(12), range(12)).num_blocks == 12
    assert sorted(map(len, opened_keys)) == [6, 6]


@pytest.mark.alone
def test_a_read_ends_within_its_lenders_timeout(make_rig: MakeRig) -> None:
    prefill, transport = make_rig("pull", "timeout_s=1"), MemoryTransport()
    decode = make_rig("pull", f"timeout_s={TIMEOUT_S:g}", transport=transport)
    prefill.publish(range(4))

    assert decode.load(prefill.handoff(4), range(4)).num_blocks == 4
    assert 0 < transport.allowed_s[0] <= 1


def test_unreadable_peers_are_tried_once_each_and_the_reason_is_logged_once(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    transport = MemoryTransport()
    decode = make_rig("unreadable", transport=transport)
    peers = [make_rig("pull") for _ in range(2)]
    for prefill in peers:
        prefill.publish([1, 2])
        for _ in range(2):
            assert decode.load(prefill.handoff(2), [4, 5]).num_blocks == 2
            decode.worker._peers.forget(prefill.worker.address)  # as after some idle time
    connected = [name.partition("-")[0] for name in transport.connected]
    assert connected == [peer.worker.address.peer_id for peer in peers]
    assert transport.num_moved == 0
    warnings = [line for line in caplog.messages if "cannot read its memory: a wall" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"KV blocks of {peers[0].worker.address.endpoint} come by gRPC")


def test_another_generation_is_tried_again(make_rig: MakeRig) -> None:
    transport = MemoryTransport()
    first, decode = make_rig("pull"), make_rig("unreadable", transport=transport)
    first.publish([1])
    assert decode.load(first.handoff(1), [4]).num_blocks == 1
    transport.obstacle = ""
    assert decode.load(first.handoff(1), [4]).num_blocks == 1
    assert transport.num_moved == 0, "the first result is kept"

    second = make_rig("pull")
    second.publish([1])
    assert decode.load(second.handoff(1), [4]).num_blocks == 1
    assert transport.num_moved == 1


def test_concurrent_loads_try_a_new_peer_once(make_rig: MakeRig) -> None:
    transport = MemoryTransport()
    prefill, decode = make_rig("pull"), make_rig("unreadable", transport=transport)
    prefill.publish(range(4))
    jobs = [decode.start_load(prefill.handoff(4), range(4 * i, 4 * i + 4)) for i in range(8)]
    decode.run_until(lambda: len(decode.loads) == len(jobs))
    assert all(result.num_blocks == 4 for result in decode.loads.values())
    assert len(transport.connected) == 1


def test_a_peer_is_tried_again_after_a_failed_read(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer may have become unreadable."""
    monkeypatch.setattr("kvstore.guard.breaker._FIRST_COOLDOWN_S", 0.0)
    transport = MemoryTransport()
    prefill, decode = make_rig("pull"), make_rig("pull", transport=transport)
    prefill.publish([1])

    def lose_permission() -> None:
        transport.obstacle = "a wall"
        raise TransferError("no right", is_settled=True)

    transport.fault = lose_permission
    assert decode.load(prefill.handoff(1), [4]).error == "unavailable"
    assert decode.load(prefill.handoff(1), [4]).num_blocks == 1
    assert len(transport.connected) == 2


def test_the_end_of_an_unknown_lease_does_not_wake_the_engine(make_rig: MakeRig) -> None:
    rig = make_rig()
    job_id = rig.publish(range(2))
    rig.end("lease")
    rig.run_until(lambda: rig.released == [job_id])
    rig.woken.clear()
    rig.end("lease")
    rig.step()
    assert not rig.woken.is_set()


def test_missing_blocks_end_the_prefix(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(), make_rig()
    prefill.publish([1, 2])
    prefill.publish([4], first_key=3)

    assert decode.load(prefill.handoff(4), range(10, 14)) == LoadResult(0, 2, "missing")


def test_saves_without_a_lease_are_not_lent(make_rig: MakeRig) -> None:
    prefill = make_rig()
    job_id = prefill.publish([1], lease_id="")
    assert prefill.saves[job_id] == SaveResult(job_id, committed=False, error="cancelled")


@pytest.mark.alone
def test_an_unrenewed_lease_expires(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(options="lease_s=0.3&timeout_s=0.3"), make_rig()
    job_id = prefill.publish([1, 2])
    handoff = prefill.handoff(2)

    prefill.run_until(lambda: prefill.released == [job_id])

    assert decode.load(handoff, [4, 5]) == LoadResult(0, 0, "missing")


@pytest.mark.alone
def test_a_kept_handoff_is_renewed_until_it_is_dropped(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(options="lease_s=2&timeout_s=1"), make_rig()
    job_id = prefill.publish([1, 2])
    handoff = prefill.handoff(2)
    decode.scheduler.keep(handoff)
    decode.scheduler.keep(handoff)
    decode.step()
    began_at = time.monotonic()
    prefill.run_until(lambda: time.monotonic() > began_at + 2.5 or prefill.released != [])
    assert prefill.released == [], "the lease is renewed"
    assert decode.load(handoff, [4, 5]).num_blocks == 2

    decode.scheduler.drop("lease")
    decode.scheduler.drop("lease")
    decode.step()
    prefill.run_until(lambda: prefill.released == [job_id])


@pytest.mark.alone
def test_blocks_of_a_lost_lease_are_missing_without_a_call(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(options="lease_s=0.3"), make_rig()
    prefill.publish([1, 2])
    handoff = prefill.handoff(2)
    prefill.end("lease")
    decode.scheduler.keep(handoff)
    decode.step()
    decode.run_until(lambda: decode.worker._renewals.is_lost("lease", prefill.worker.address))
    prefill.worker.close()

    assert decode.load(handoff, [4, 5]) == LoadResult(0, 0, "missing")


def test_a_restarted_peer_at_the_same_address_is_another_generation(make_rig: MakeRig) -> None:
    decode, url = make_rig(), f"grpc://127.0.0.1:{reserved_port()}"
    first = PeerRig(url)
    with closing(first.worker):
        first.publish([1, 2])
        old = first.handoff(2)
        assert decode.load(old, [4, 5]).num_blocks == 2
    second = PeerRig(url, pool=random_pool(64, LAYOUT, seed=1))
    with closing(second.worker):
        second.publish([1, 2])

        assert decode.load(old, [6, 7]) == LoadResult(1, 0, "missing")
        assert decode.load(second.handoff(2), [6, 7]).num_blocks == 2
        assert torch.equal(decode.pool[6:8], second.pool[1:3])


def test_another_form_is_refused_with_both_sides_named(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_rig(), make_rig(layout=replace(LAYOUT, num_layers=3))
    prefill.publish([1])

    assert decode.load(prefill.handoff(1), [4]) == LoadResult(0, 0, "missing")
    assert "the reader has 3 layers" in caplog.text
    assert "the lender has 2 layers" in caplog.text


def test_malformed_connector_params_mean_missing_blocks(make_rig: MakeRig) -> None:
    prefill, decode = make_rig(), make_rig()
    prefill.publish([1])
    for params in (b"", b"\xff\xff", b"\x0a\x01x"):
        handoff = replace(prefill.handoff(1), connector_params=params)
        result = decode.load(handoff, [4])
        assert (result.num_blocks, result.error) == (0, "missing")


@pytest.mark.parametrize("way", WAYS)
def test_fifty_concurrent_loads_return_the_right_blocks(make_rig: MakeRig, way: str) -> None:
    prefill, decode = make_rig(way, num_blocks=200), make_rig(way, num_blocks=200)
    handoffs = []
    for index in range(50):
        lease = f"lease {index}"
        prefill.publish(range(4 * index, 4 * index + 4), lease, first_key=4 * index)
        handoffs.append(prefill.handoff(4, lease, first_key=4 * index))
    decode.pool.zero_()
    for index, handoff in enumerate(handoffs):
        decode.start_load(handoff, range(196 - 4 * index, 200 - 4 * index))
    decode.run_until(lambda: len(decode.loads) == 50)

    assert all(result.num_blocks == 4 for result in decode.loads.values())
    assert torch.equal(decode.pool.view(50, 4, -1).flip(0), prefill.pool.view(50, 4, -1))


@pytest.mark.parametrize("byte", [0, -1])
@pytest.mark.parametrize("is_header", [True, False], ids=["header", "block"])
def test_bytes_corrupted_in_transfer_are_refused(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, *, is_header: bool, byte: int
) -> None:
    prefill, decode = make_rig(), make_rig()
    prefill.publish(range(4))
    fetch = DataPlane.fetch

    def corrupt(plane: DataPlane, peer: Any, request: Any, slots: Any) -> int:
        num_blocks = fetch(plane, peer, request, slots)
        (slots[2].header if is_header else slots[2].payload)[byte] ^= 1
        return num_blocks

    monkeypatch.setattr(DataPlane, "fetch", corrupt)
    expected = decode.pool.clone()
    expected[10:12], expected[12:14] = prefill.pool[:2], 0

    assert decode.load(prefill.handoff(4), range(10, 14)) == LoadResult(0, 2, "corrupt")
    assert torch.equal(decode.pool, expected)


def test_tails_beyond_the_number_of_slots_are_not_lent(make_rig: MakeRig) -> None:
    prefill = make_rig(options="lease_s=60")
    tails = prefill.worker._lending.lender._memory.tails
    for _ in range(len(tails._free) - 2):
        tails.take()
    results = []
    for index in range(4):
        job_id = prefill.publish([index], f"lease {index}", index, num_tail_tokens=1)
        results.append(prefill.saves[job_id].error)
    assert results == [""] * 2 + ["unavailable"] * 2

    prefill.end("lease 0")
    prefill.run_until(lambda: prefill.released == [0])
    job_id = prefill.publish([17], "lease 17", 17, num_tail_tokens=1)
    assert prefill.saves[job_id].committed


def test_a_save_that_ends_after_its_lease_lends_nothing(make_rig: MakeRig) -> None:
    prefill = make_rig()
    lender = prefill.worker._lending.lender
    num_slots = len(lender._memory.tails._free)
    may_continue = threading.Event()
    for _ in range(2):  # keeps both threads busy
        lender._io.submit(may_continue.wait, TIMEOUT_S)
    job_id = prefill.scheduler.save([b"k"], [1], 2, lease_id="lease")
    prefill.end("lease")
    may_continue.set()
    prefill.run_until(lambda: job_id in prefill.saves)

    assert prefill.saves[job_id] == SaveResult(job_id, committed=False, error="cancelled")
    assert prefill.released == []
    assert len(lender._memory.tails._free) == num_slots
