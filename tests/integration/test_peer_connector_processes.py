"""Peers in their own processes: real transfers, kills, stops and restarts."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvstore.layout import KvLayout
from tests.support.peer_process import LendingProcess
from tests.support.peer_rig import PeerRig
from tests.support.ports import reserved_port

WAYS = ("grpc", "nixl", "nixl unreadable")
"""The last way's lenders cannot be read, as on other machines, and send blocks by gRPC."""
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, block_size=16, head_dim=64, dtype="bfloat16")
TIMEOUT_S = 2.0  # of one transfer, on a busy machine


def url_of(way: str, **options: Any) -> str:
    named = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{way.split(maxsplit=1)[0]}://?{named}"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lend(way: str) -> Iterator[Callable[..., LendingProcess]]:
    processes: list[LendingProcess] = []

    def start(num_blocks: int = 256, seed: int = 0, **options: Any) -> LendingProcess:
        url = url_of(way, timeout_s=TIMEOUT_S, **options)
        if "port" in options:
            url = url.replace("://", f"://127.0.0.1:{options['port']}").replace(
                f"&port={options['port']}", ""
            )
        transports = "tcp" if way == "nixl unreadable" else None
        processes.append(LendingProcess(url, LAYOUT, num_blocks, seed, transports=transports))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def decode(way: str) -> Iterator[PeerRig]:
    rig = PeerRig(
        url_of(way, timeout_s=TIMEOUT_S),
        LAYOUT,
        pool=torch.zeros(256, *LAYOUT.block_shape).bfloat16(),
    )
    yield rig
    began_at = time.monotonic()
    rig.worker.close()
    assert time.monotonic() - began_at < 30, "close takes too long"


def test_blocks_are_loaded_from_another_process(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    prefill = lend()
    job_id = prefill.ask("publish", range(200), "lease", 0, 5)
    handoff = prefill.ask("handoff", 200)

    assert decode.load(handoff, range(200)).num_blocks == 200
    assert torch.equal(decode.pool[:199], prefill.pool[:199])
    assert torch.equal(decode.pool[199, ..., :5, :], prefill.pool[199, ..., :5, :])
    assert not decode.pool[199, ..., 5:, :].any()
    prefill.ask("end", "lease")
    give_up_at = time.monotonic() + 60
    while prefill.ask("released") != [job_id]:
        assert time.monotonic() < give_up_at


def test_a_confined_reader_gets_blocks_by_grpc() -> None:
    url = url_of("nixl", timeout_s=TIMEOUT_S)
    with (
        LendingProcess(url, LAYOUT, 32) as prefill,
        LendingProcess(url, LAYOUT, 32, is_confined=True) as decode,
    ):
        prefill.ask("publish", range(32), "lease", 0, 5)
        result = decode.ask("load", prefill.ask("handoff", 32), range(32))
        assert (result.num_blocks, result.error) == (32, "")


def test_loads_from_a_killed_peer_fail_in_time_and_others_succeed(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    killed, other = lend(seed=1), lend(seed=2)
    for process in (killed, other):
        process.ask("publish", range(16))
    handoff, others = killed.ask("handoff", 16), other.ask("handoff", 16)
    assert decode.load(handoff, range(16)).num_blocks == 16
    killed.kill()
    before = decode.pool.clone()

    began_at = time.monotonic()
    jobs = [decode.start_load(handoff, range(20, 36)) for _ in range(20)]
    decode.run_until(lambda: len(decode.loads) == 21)

    assert {decode.loads[job].error for job in jobs} == {"unavailable"}
    assert time.monotonic() - began_at < 4 * TIMEOUT_S
    assert torch.equal(decode.pool, before)
    assert decode.load(others, range(16)).num_blocks == 16


def test_loads_in_progress_end_when_their_peer_is_killed(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    prefill = lend()
    prefill.ask("publish", range(250))
    handoff = prefill.ask("handoff", 250)
    jobs = [decode.start_load(handoff, range(250)) for _ in range(8)]
    decode.step()
    prefill.kill()
    decode.run_until(lambda: len(decode.loads) == len(jobs))

    for job in jobs:
        result = decode.loads[job]
        assert result.num_blocks == 250 or result.error == "unavailable"
    longest = max(result.num_blocks for result in decode.loads.values())
    assert torch.equal(decode.pool[:longest], prefill.pool[:longest])


@pytest.mark.slow
def test_loads_from_a_stopped_peer_fail_in_time_and_succeed_once_it_continues(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    prefill = lend(lease_s=60)
    prefill.ask("publish", range(16))
    handoff = prefill.ask("handoff", 16)
    prefill.stop()
    began_at = time.monotonic()
    jobs = [decode.start_load(handoff, range(20, 36)) for _ in range(20)]
    decode.run_until(lambda: len(decode.loads) == len(jobs))
    assert {decode.loads[job].error for job in jobs} == {"unavailable"}
    assert time.monotonic() - began_at < 4 * TIMEOUT_S

    prefill.resume()
    give_up_at = time.monotonic() + 60
    while (result := decode.load(handoff, range(16))).num_blocks < 16:
        assert time.monotonic() < give_up_at, result
        decode.woken.wait(0.1)
    assert torch.equal(decode.pool[:16], prefill.pool[:16])
    assert not decode.worker._mover.is_in_doubt


def test_a_restarted_peer_at_the_same_address_lends_only_new_blocks(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    port = reserved_port()
    first = lend(seed=1, port=port)
    first.ask("publish", range(16))
    old = first.ask("handoff", 16)
    assert decode.load(old, range(16)).num_blocks == 16
    first.kill()
    second = lend(seed=2, port=port)
    second.ask("publish", range(16))
    before = decode.pool.clone()

    result = decode.load(old, range(20, 36))
    assert (result.num_blocks, result.error) == (0, "missing")
    assert torch.equal(decode.pool, before)
    assert decode.load(second.ask("handoff", 16), range(20, 36)).num_blocks == 16
    assert torch.equal(decode.pool[20:36], second.pool[:16])


def test_close_is_bounded_with_loads_in_progress(
    lend: Callable[..., LendingProcess], decode: PeerRig
) -> None:
    prefill = lend()
    prefill.ask("publish", range(250))
    handoff = prefill.ask("handoff", 250)
    prefill.stop()
    for _ in range(8):
        decode.start_load(handoff, range(250))
    decode.step()
    # The fixture closes the connector and checks the time that this takes.
