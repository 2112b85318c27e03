"""`NixlTransport` between real processes: right bytes, deadlines, remotes that die or stop."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from baton.common.errors import ConfigurationError
from kvstore.peer.nixl import library as nixl_library
from kvstore.peer.nixl import link as nixl_link
from kvstore.peer.nixl.memory import AgentMetadata
from kvstore.peer.nixl.transport import NixlTransport
from kvstore.peer.transport import TransferError, UnreadablePeerError, make_ranges
from tests.support.nixl_remote import NixlRemote, Pool, needs_process_vm_readv, ranges

NUM_BYTES = 12 << 20
GAP = 37
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def remote():
    needs_process_vm_readv()
    with closing(NixlRemote(NUM_BYTES)) as remote:
        yield remote


@pytest.fixture
def new_remote():
    """Starts remotes that tests may kill and stop."""
    needs_process_vm_readv()
    started = []

    def start(**options):
        started.append(NixlRemote(NUM_BYTES, **options))
        return started[-1]

    yield start
    for remote in started:
        remote.kill()
        remote.close()


@contextmanager
def opened():
    """Yields a transport and a pool that is registered with it."""
    with closing(NixlTransport()) as transport:
        pool = Pool(NUM_BYTES, seed=2)
        pool.register(transport)
        yield transport, pool


@pytest.fixture(scope="module")
def shared(remote):
    with opened() as (transport, pool):
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        yield transport, pool


def read_all(transport, peer_id, remote, pool, timeout_s=TIMEOUT_S):
    transport.read(
        peer_id,
        make_ranges([remote.address], NUM_BYTES),
        make_ranges([pool.address], NUM_BYTES),
        timeout_s,
    )


def checked_error(call, *, at_most_s):
    """Returns the error of a transfer that must fail within a time."""
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        call()
    assert time.monotonic() - began < at_most_s
    return caught.value


def expected_after(before, ranges_to, source, ranges_from, base_to, base_from):
    """Returns what memory must hold after ranges were copied into it, guards included."""
    expected = before.copy()
    for to, origin in zip(ranges_to.tolist(), ranges_from.tolist(), strict=True):
        start = origin[0] - base_from
        expected[to[0] - base_to :][: to[1]] = source[start:][: origin[1]]
    return expected


SHAPES = [(1, 1), (1, 65_537), (3, 12_345), (16, 100_003), (256, 20_480), (256, 77), (1, 11 << 20)]


@pytest.mark.parametrize(("num_ranges", "num_bytes"), SHAPES)
def test_a_read_brings_the_bytes_and_touches_nothing_else(remote, shared, num_ranges, num_bytes):
    transport, pool = shared
    source = remote.now()
    pool.bytes[:] = 0xA5
    sources = ranges(remote.address, num_ranges, num_bytes, gap=11)[::-1]
    targets = ranges(pool.address, num_ranges, num_bytes, gap=GAP)
    expected = expected_after(pool.bytes, targets, source, sources, pool.address, remote.address)
    transport.read("remote", sources, targets, TIMEOUT_S)
    assert np.array_equal(pool.bytes, expected)


def test_a_read_in_parts_is_complete(remote, shared, monkeypatch):
    monkeypatch.setattr(nixl_link, "_PART_BYTES", 100_000)
    transport, pool = shared
    source = remote.now()
    pool.bytes[:] = 0xA5
    sizes = [1, 99_999, 100_001, 350_000, 7, 50_000, 50_000, 1]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    sources, targets = (
        make_ranges([base + start for start in starts], sizes)
        for base in (remote.address, pool.address)
    )
    transport.read("remote", sources, targets, TIMEOUT_S)
    total = sum(sizes)
    assert np.array_equal(pool.bytes[:total], source[:total])
    assert (pool.bytes[total:] == 0xA5).all()


def test_a_read_of_no_ranges_does_nothing(shared):
    transport, _ = shared
    nothing = make_ranges([], 0)
    transport.read("remote", nothing, nothing, TIMEOUT_S)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_threads_read_concurrently(remote, num_peers):
    with opened() as (transport, pool), ThreadPoolExecutor(4) as threads:
        pool.bytes[:] = 0
        names = [f"peer {i % num_peers}" for i in range(4)]
        for name in names:
            transport.add_peer(name, remote.metadata, TIMEOUT_S)
        size = NUM_BYTES // 5
        source = remote.now()

        def read(index):
            start = index * size
            for _ in range(10):
                transport.read(
                    names[index],
                    make_ranges([remote.address + start], size),
                    make_ranges([pool.address + start], size),
                    TIMEOUT_S,
                )

        list(threads.map(read, range(4)))
        assert np.array_equal(pool.bytes[: 4 * size], source[: 4 * size])
        assert not pool.bytes[4 * size :].any()


def test_invalid_ranges_are_refused_and_later_reads_succeed(remote, shared):
    transport, pool = shared
    theirs = make_ranges([remote.address], 100)
    own = make_ranges([pool.address], 100)
    for source, target, complaint in (
        (make_ranges([remote.address + NUM_BYTES - 50], 100), own, "not registered"),
        (make_ranges([remote.address - 1], 100), own, "not registered"),
        (theirs, make_ranges([pool.address + NUM_BYTES], 100), "not registered"),
        (theirs, make_ranges([2**64 - 50], 100), "not registered"),
        (theirs, make_ranges([pool.address], 99), "differ in length"),
    ):
        with pytest.raises(TransferError, match=complaint) as caught:
            transport.read("remote", source, target, TIMEOUT_S)
        assert caught.value.is_settled
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)  # a read that fails removes it
    with pytest.raises(TransferError, match="differ in length"):
        transport.read("remote", theirs, own.repeat(2, axis=0), TIMEOUT_S)
    transport.add_peer("remote", remote.metadata, TIMEOUT_S)
    with pytest.raises(TransferError, match="no peer unknown"):
        transport.read("unknown", theirs, own, TIMEOUT_S)
    transport.read("remote", theirs, own, TIMEOUT_S)


@pytest.mark.parametrize("metadata", [b"", b"\0\0\0\2{}", b"\0\0\0\2[]", b"\0\0\1\0{", b"x" * 99])
def test_malformed_metadata_is_refused(shared, metadata):
    with pytest.raises(TransferError, match="malformed") as caught:
        shared[0].add_peer("odd", metadata, TIMEOUT_S)
    assert caught.value.is_settled


def test_metadata_that_nixl_finds_malformed_makes_a_peer_unreadable(remote, shared):
    transport, _ = shared
    with pytest.raises(UnreadablePeerError):
        transport.add_peer("cut", remote.metadata[:-20], TIMEOUT_S)


def test_the_probe_token_of_another_process_makes_a_peer_unreadable(remote, shared):
    """That process has the peer's process id, as on another machine or in another namespace."""
    transport, _ = shared
    other = replace(AgentMetadata.from_bytes(remote.metadata), probe_token=b"x" * 16)
    with pytest.raises(UnreadablePeerError, match="another process"):
        transport.add_peer("other", other.to_bytes(), TIMEOUT_S)


def test_memory_may_be_registered_after_a_peer_was_added(remote):
    with closing(NixlTransport()) as transport:
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        for seed in (3, 4):
            pool = Pool(NUM_BYTES, seed)
            pool.register(transport)
            read_all(transport, "remote", remote, pool)
            assert np.array_equal(pool.bytes, remote.now())


def test_a_remote_killed_before_a_transfer_is_an_error_at_once(new_remote):
    remote = new_remote()
    with opened() as (transport, pool):
        transport.add_peer("first", remote.metadata, TIMEOUT_S)
        read_all(transport, "first", remote, pool)
        remote.kill()
        error = checked_error(
            lambda: read_all(transport, "first", remote, pool), at_most_s=TIMEOUT_S / 2
        )
        assert error.is_settled
        again = new_remote(seed=5)
        transport.add_peer("second", again.metadata, TIMEOUT_S)
        read_all(transport, "second", again, pool)
        assert np.array_equal(pool.bytes, again.bytes)
        with pytest.raises(TransferError, match="no peer first"):
            read_all(transport, "first", remote, pool)
        transport.remove_peer("second")
        transport.remove_peer("second")


def test_a_remote_killed_during_transfers_harms_no_other(remote, new_remote):
    victim = new_remote()
    with opened() as (transport, pool):
        transport.add_peer("victim", victim.metadata, TIMEOUT_S)
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        read_all(transport, "victim", victim, pool)
        begun = threading.Event()

        def move_until_it_fails():
            while True:
                read_all(transport, "victim", victim, pool)
                begun.set()

        with ThreadPoolExecutor(1) as threads:
            failing = threads.submit(move_until_it_fails)
            begun.wait(TIMEOUT_S)
            victim.kill()
            error = failing.exception(TIMEOUT_S)
        assert isinstance(error, TransferError)
        assert error.is_settled
        read_all(transport, "remote", remote, pool)
        assert np.array_equal(pool.bytes, remote.now())


@pytest.mark.slow
def test_adding_a_stopped_remote_times_out_and_succeeds_later(new_remote):
    remote = new_remote()
    with opened() as (transport, pool):
        remote.stop()
        began = time.monotonic()
        with pytest.raises(UnreadablePeerError, match="the time is up"):
            transport.add_peer("stopped", remote.metadata, 1.0)
        assert time.monotonic() - began < 10.0
        pool.bytes[:] = 7
        remote.resume()
        assert np.array_equal(remote.now(), remote.bytes)
        assert (pool.bytes == 7).all()
        transport.remove_peer("stopped")
        transport.add_peer("stopped", remote.metadata, TIMEOUT_S)
        read_all(transport, "stopped", remote, pool)
        assert np.array_equal(pool.bytes, remote.bytes)


@pytest.mark.slow
def test_threads_that_add_a_stopped_remote_fail_within_their_timeouts(new_remote):
    remote = new_remote()
    with opened() as (transport, _), ThreadPoolExecutor(2) as threads:
        remote.stop()
        began = time.monotonic()
        calls = [
            threads.submit(transport.add_peer, "stopped", remote.metadata, wait_s)
            for wait_s in (3.0, 1.0)
        ]
        errors = [call.exception(TIMEOUT_S) for call in calls]
        assert all(isinstance(each, UnreadablePeerError | TransferError) for each in errors)
        assert time.monotonic() - began < 10.0


def test_adding_a_peer_waits_for_other_connections_no_longer_than_its_timeout(remote):
    with opened() as (transport, pool):
        with nixl_library._creating, ThreadPoolExecutor(1) as threads:
            adding = threads.submit(transport.add_peer, "remote", remote.metadata, 0.2)
            error = adding.exception(TIMEOUT_S)
        assert isinstance(error, TransferError), "the timeout says nothing about the peer"
        assert error.is_settled
        assert "took the time" in str(error)
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        read_all(transport, "remote", remote, pool)


def test_a_reader_killed_while_it_reads_harms_no_other(remote, new_remote):
    reader = new_remote()
    reader.keep_reading(remote)
    reader.kill()
    with opened() as (transport, pool):
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        read_all(transport, "remote", remote, pool)
        assert np.array_equal(pool.bytes, remote.now())


@pytest.mark.parametrize("end", [NixlTransport.close, lambda t: t.remove_peer("stopped")])
def test_a_call_in_progress_fails_when_its_peer_is_removed_or_the_transport_closed(new_remote, end):
    remote = new_remote()
    with opened() as (transport, _), ThreadPoolExecutor(1) as threads:
        remote.stop()
        adding = threads.submit(transport.add_peer, "stopped", remote.metadata, TIMEOUT_S)
        with pytest.raises(TimeoutError):
            adding.result(0.5)
        began = time.monotonic()
        end(transport)
        error = adding.exception(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert isinstance(error, TransferError)
        assert error.is_settled


def test_a_closed_transport_refuses_and_closes_again(remote):
    with opened() as (transport, pool):
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        transport.close()
        with pytest.raises(TransferError):
            read_all(transport, "remote", remote, pool)
        with pytest.raises(TransferError, match="closed"):
            transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        with pytest.raises(TransferError, match="closed"):
            transport.metadata()


def test_over_tcp_a_peer_is_unreadable_and_survives(monkeypatch):
    """The same holds between machines without RDMA: only the peer's CPU could send the bytes."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with closing(NixlRemote(NUM_BYTES, transports="tcp")) as remote, opened() as (transport, pool):
        began = time.monotonic()
        with pytest.raises(UnreadablePeerError, match="UCX_TLS=tcp"):
            transport.add_peer("far", remote.metadata, TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        with pytest.raises(TransferError, match="given up"):
            read_all(transport, "far", remote, pool)
        assert np.array_equal(remote.now(), remote.bytes)


def test_a_peer_is_unreadable_if_the_kernel_refuses_process_vm_readv():
    """The reader is its own process, since it cannot regain the permission."""
    remote = NixlRemote(4096)
    with closing(remote), closing(NixlRemote(4096, is_confined=True)) as confined:
        reason = confined.try_to_add(remote)
        assert "process_vm_readv fails: Operation not permitted" in reason
        assert np.array_equal(remote.now(), remote.bytes)


def test_a_link_is_closed_although_a_call_hangs(remote, monkeypatch):
    monkeypatch.setattr(nixl_link, "_CLOSE_S", 0.01)
    with closing(NixlTransport()) as transport:
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        with transport._links["remote"]._lock:
            transport.remove_peer("remote")
            assert not transport.settlement()(), "the hanging call may still write"


def test_an_error_without_a_message_is_reported_by_its_class(remote):
    with opened() as (transport, pool):
        transport.add_peer("remote", remote.metadata, TIMEOUT_S)
        read_all(transport, "remote", remote, pool)

        def fail(*args):
            raise MemoryError

        transport._links["remote"]._agent.transfer = fail
        with pytest.raises(TransferError, match="MemoryError"):
            read_all(transport, "remote", remote, pool)


def test_a_missing_package_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(nixl_library, "_MODULES", ("nixl_of_no_kind",))
    with pytest.raises(ConfigurationError, match=r'pip install "baton-llm\[nixl\]"'):
        NixlTransport()


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("UCX_TLS", "cma", "see UCX_TLS"),
        ("UCX_NET_DEVICES", "nosuch0:1", "this machine has no device 'nosuch0'"),
    ],
)
def test_what_ucx_does_not_have_is_an_error(monkeypatch, variable, value, advice):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{variable}.*{advice}|{advice}"):
        NixlTransport()


def test_registering_memory_of_an_absent_device_is_an_error():
    with closing(NixlTransport()) as transport, pytest.raises(ConfigurationError, match="cuda:0"):
        transport.register(0x7000_0000_0000, 1 << 20, device="cuda:0")


def test_an_idle_agent_with_a_thread_uses_little_cpu():
    agent = nixl_library.new_agent(nixl_library.load_nixl(), "resting", with_thread=True)
    began, cpu_began = time.monotonic(), time.process_time()
    while time.monotonic() < began + 0.5:
        threading.Event().wait(0.1)
    assert time.process_time() - cpu_began < 0.25
    assert agent.get_agent_metadata()
