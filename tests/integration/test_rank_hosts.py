"""Ranks whose processes are started apart, as on two hosts: sums by gloo, batches by TCP."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.common.version import __version__
from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.runtime.ranks import meeting
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.place import RankPlace
from kernels.ranks import RanksLostError
from kvstore.peer.address import holders_of
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.ports import reserved_port
from tests.support.rank_hosts import (
    NUM_TOKENS,
    SETTINGS,
    TOKEN,
    first_rank,
    other_rank,
    requests,
)
from tests.support.real_engines import SplitRun, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.two_hosts import other_host

pytestmark = pytest.mark.timeout(180)


def test_tokens_are_those_of_one_rank() -> None:
    path = tiny_checkpoint("llama")
    port = reserved_port()
    with other_rank(path, port), closing(first_rank(path, port)) as core:
        found = run_all(core, requests())
    one = EngineConfig(model=str(path), **{**SETTINGS, "tensor_parallel_size": 1})
    with closing(build_engine(one)) as core:
        expected = run_all(core, requests())
    for request_id, outputs in expected.items():
        for index in range(2):
            assert tokens_of(found[request_id], index) == tokens_of(outputs, index)


@pytest.mark.parametrize(
    ("variant", "width", "num_stages"),
    [("qwen2_alternating", 1, 2), pytest.param("llama_four_layers", 2, 2, marks=pytest.mark.slow)],
)
def test_stages_of_several_hosts_have_the_tokens_of_one_rank(
    variant: str, width: int, num_stages: int
) -> None:
    path = tiny_checkpoint(variant)
    port = reserved_port()
    size = width * num_stages
    sizes = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages, "nnodes": size}
    flags = {**sizes, "async_scheduling": True}
    with ExitStack() as others:
        processes = [
            others.enter_context(other_rank(path, port, node_rank=rank, **sizes))
            for rank in range(1, size)
        ]
        with closing(first_rank(path, port, **flags)) as core:
            found = run_all(core, requests())
        assert [process.wait(30) for process in processes] == [0] * (size - 1)
    one = EngineConfig(model=str(path), **{**SETTINGS, "tensor_parallel_size": 1})
    with closing(build_engine(one)) as core:
        expected = run_all(core, requests())
    for request_id, outputs in expected.items():
        for index in range(2):
            assert tokens_of(found[request_id], index) == tokens_of(outputs, index)


def test_a_rank_that_ends_ends_the_group() -> None:
    path = tiny_checkpoint("llama")
    port = reserved_port()
    with other_rank(path, port) as process, closing(first_rank(path, port)) as core:
        run_all(core, requests()[:1])
        process.kill()
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])


@pytest.mark.parametrize(
    ("variant", "connector"),
    [
        ("llama", "grpc://"),
        pytest.param("lfm2_biased", "file://{tmp_path}", marks=pytest.mark.slow),
    ],
)
def test_ranks_on_two_hosts_hand_their_kv_over(
    variant: str, connector: str, tmp_path: Path
) -> None:
    path = tiny_checkpoint(variant)
    port = reserved_port()
    url = connector.format(tmp_path=tmp_path)
    flags = {"kv_connector": url, "kv_transfer_head_slices": 2}
    one = {**SETTINGS, **flags, "tensor_parallel_size": 1, "kv_load_failure_policy": "fail"}
    config = EngineConfig(model=str(path), **one)
    with other_rank(path, port, **flags) as process:
        with (
            closing(first_rank(path, port, "prefill", **flags)) as prefill,
            closing(build_engine(config, ClusterSecurity(token=TOKEN))) as decode,
        ):
            split = SplitRun(prefill, decode)
            split.run([engine_request("a", tuple(prompt_of(43)), max_tokens=NUM_TOKENS)])
        assert process.wait(30) == 0
    found = [*split.handed["a"].progress[0].output_token_ids, *tokens_of(split.outputs["a"])]
    assert found == reference_greedy(path, prompt_of(43), NUM_TOKENS)
    assert split.outputs["a"][0].cached_tokens == 43


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_seqs": 7}, "--max-num-seqs of rank 1 is 7, of rank 0 8"),
        (
            {"speculative_config": '{"method": "ngram"}'},
            '--speculative-config of rank 1 is {"method": "ngram"',
        ),
        ({"block_size": 16}, "the KV cache of rank 1 is"),
        ({"model": "qwen2"}, "the checkpoint of rank 1 is"),
    ],
)
def test_a_rank_with_other_flags_is_refused(
    flags: dict[str, object], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_checkpoint("llama")
    port = reserved_port()
    theirs = tiny_checkpoint(str(flags.pop("model", "llama")))
    with other_rank(theirs, port, **flags) as process:
        with pytest.raises(ConfigurationError, match="a rank of --tensor-parallel-size has ended"):
            first_rank(path, port)
        assert process.wait(30) == 2
    assert message in capfd.readouterr().err


def test_the_other_process_fails_if_rank_0_does() -> None:
    path = tiny_checkpoint("llama")
    port = reserved_port()
    with other_rank(path, port) as process, closing(first_rank(path, port)) as core:
        run_all(core, requests()[:1])
        core._runner._ranks.abort()
        assert process.wait(30) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_host_that_is_cut_off_ends_the_group() -> None:
    path = tiny_checkpoint("llama")
    with other_host() as (here, there):
        port = reserved_port()
        limits = {"step_timeout_s": 3.0, "master_addr": here}
        with (
            other_rank(path, port, namespace=there, **limits) as process,
            closing(first_rank(path, port, **limits)) as core,
        ):
            (request,) = requests()[:1]
            outputs = run_all(core, [request])
            expected = reference_greedy(path, prompt_of(9), NUM_TOKENS)
            assert tokens_of(outputs["0"]) == expected
            subprocess.run(["ip", "-n", there, "link", "set", "there", "down"], check=True)
            with pytest.raises(RanksLostError):
                run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
            assert process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("scheme", ["grpc", "nixl"])
def test_peers_read_the_blocks_of_a_rank_on_another_host(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")  # the cable came after this process began
    path = tiny_checkpoint("llama")
    with other_host() as (here, there):
        port, kv_port = reserved_port(), reserved_port()
        options = "?timeout_s=20"
        hosts = {"master_addr": here, "kv_transfer_head_slices": 2}
        lent = {**hosts, "kv_connector": f"{scheme}://0.0.0.0:{kv_port}{options}&advertise={here}"}
        other = here.removesuffix(".1") + ".2"
        lent_there = {**hosts, "kv_connector": f"{scheme}://{other}:{kv_port}{options}"}
        config = EngineConfig(
            model=str(path),
            **{**SETTINGS, "tensor_parallel_size": 1, "kv_load_failure_policy": "fail"},
            kv_transfer_head_slices=2,
            kv_connector=f"{scheme}://{options}",
        )
        with (
            other_rank(path, port, namespace=there, **lent_there),
            closing(first_rank(path, port, "prefill", **lent)) as prefill,
            closing(build_engine(config, ClusterSecurity(token=TOKEN))) as decode,
        ):
            split = SplitRun(prefill, decode)
            split.run([engine_request("a", tuple(prompt_of(43)), max_tokens=NUM_TOKENS)])
        handed = split.handed["a"]
        addresses = holders_of(handed.handoff.connector_params, (0, 1))
        assert [each.endpoint for each in addresses] == [
            f"{here}:{kv_port}",
            f"{other}:{kv_port + 1}",
        ]
    found = [*handed.progress[0].output_token_ids, *tokens_of(split.outputs["a"])]
    assert found == reference_greedy(path, prompt_of(43), NUM_TOKENS)
    assert split.outputs["a"][0].cached_tokens == 43


def test_the_other_process_ends_with_rank_0_and_not_by_sigterm() -> None:
    path = tiny_checkpoint("llama")
    port = reserved_port()
    with other_rank(path, port) as process:
        with closing(first_rank(path, port)) as core:
            process.send_signal(signal.SIGTERM)
            run_all(core, requests()[:1])
            assert process.poll() is None
        assert process.wait(30) == 0


def test_callers_without_the_token_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get no message, and the group waits for its own ranks."""
    monkeypatch.setattr(meeting, "_MEETING_S", 20.0)
    port = reserved_port()
    config = EngineConfig(model="m", tensor_parallel_size=2)

    def meet(rank: int, token: str = TOKEN) -> HostRanks:
        return HostRanks(
            RankPlace(rank, 2, "127.0.0.1", port), config, ClusterSecurity(token=token)
        )

    with ThreadPoolExecutor(1) as executor:
        leading = executor.submit(meet, 0)
        store = TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
        address = "127.0.0.1", int(store.get("baton/port").split()[0])
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"\0\0\0\4nope")
            stranger.settimeout(30)
            with suppress(ConnectionResetError):
                while stranger.recv(1 << 10):
                    pass  # a challenge, then the end
        with pytest.raises(ConfigurationError, match="rank 1 of 2 did not meet the others"):
            meet(1, token="x" * 32)
        with closing(meet(1)) as follower, closing(leading.result(30)) as leader:
            leader.send(b"hello")
            assert follower.receive() == b"hello"


BOTH_VERSIONS = rf"rank 0 is Baton 0\.0\.9, this rank {re.escape(__version__)}"


@pytest.fixture(params=["1 attempt 0.0.9", "1 attempt 0.0.9 more"])
def old_place(request: pytest.FixtureRequest) -> Iterator[RankPlace]:
    """A place in whose launcher's store rank 0 of another version has been."""
    port = reserved_port()
    store = TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    store.set("baton/port", request.param)
    yield RankPlace(1, 2, "127.0.0.1", port, is_host=False)
    del store


def test_ranks_of_two_versions_do_not_meet(
    old_place: RankPlace, caplog: pytest.LogCaptureFixture
) -> None:
    class HastyRanks(HostRanks):
        num_waits = 0

        def _check_others(self) -> None:
            self.num_waits += 1
            assert re.search(BOTH_VERSIONS, caplog.text)  # from the first wait on
            if self.num_waits == 3:
                self._met._deadline = 0.0

    config = EngineConfig(model="m", tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match=f"rank 1 of 2 .*: {BOTH_VERSIONS}"):
        HastyRanks(old_place, config, ClusterSecurity(token=TOKEN))
    assert len(re.findall(BOTH_VERSIONS, caplog.text)) == 1


def test_a_rank_waits_for_those_that_follow_a_group_of_another_version(
    old_place: RankPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_MEETING_S", 30.0)
    waits = threading.Event()

    class PatientRanks(HostRanks):
        def _check_others(self) -> None:
            waits.set()

    def meet(place: RankPlace) -> HostRanks:
        config = EngineConfig(model="m", tensor_parallel_size=2)
        return PatientRanks(place, config, ClusterSecurity(token=TOKEN))

    with ThreadPoolExecutor(1) as executor:
        following = executor.submit(meet, old_place)
        assert waits.wait(30)
        with (
            closing(meet(replace(old_place, rank=0))) as leader,
            closing(following.result(30)) as follower,
        ):
            leader.send(b"hello")
            assert follower.receive() == b"hello"


def test_a_stage_may_take_long_to_read_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_UNSENT_MS", 200)
    port = reserved_port()
    config = EngineConfig(model="m", pipeline_parallel_size=2)
    large = bytes(30_000_000)  # more than the buffers of both sides

    def meet(rank: int) -> HostRanks:
        place = RankPlace(rank, 2, "127.0.0.1", port)
        return HostRanks(place, config, ClusterSecurity(token=TOKEN))

    with ThreadPoolExecutor(2) as executor:
        leading = executor.submit(meet, 0)
        with closing(meet(1)) as follower, closing(leading.result(30)) as leader:
            sending = executor.submit(leader.send, large)
            time.sleep(3)
            assert follower.receive() == large
            sending.result(30)


def test_rank_0_does_not_wait_for_ranks_that_will_not_come() -> None:
    class LonelyRanks(HostRanks):
        def _check_others(self) -> None:
            raise ConfigurationError("the others have ended")

    port = reserved_port()
    config = EngineConfig(model="m", tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="the others have ended"):
        LonelyRanks(RankPlace(0, 2, "127.0.0.1", port), config, ClusterSecurity(token=TOKEN))


def test_ranks_that_are_started_apart_need_a_token() -> None:
    place = RankPlace(0, 2, "127.0.0.1", 7)
    config = EngineConfig(model="m", tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="set --cluster-token-file or BATON_CLUSTER_TOKEN"):
        HostRanks(place, config, ClusterSecurity())
