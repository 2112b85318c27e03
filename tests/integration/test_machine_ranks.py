"""Two machines with two ranks each, of which the command on a machine starts the second one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.runtime.ranks import hosts
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.place import place_of
from kernels.ranks import RanksLostError
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.ports import reserved_port
from tests.support.rank_engines import wait_until_ended
from tests.support.rank_hosts import NUM_TOKENS, TOKEN, first_rank, other_rank, requests
from tests.support.real_engines import run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.two_hosts import other_host

pytestmark = pytest.mark.timeout(180)

SIZES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}

END_S = 40


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> None:
    """Lets ranks start as they do for users."""


@contextmanager
def two_machines(
    namespace: str = "", **flags: object
) -> Iterator[tuple[EngineCore, subprocess.Popen, dict[str, psutil.Process]]]:
    """Yields the engine, the second machine's command, and the processes that both have started:
    "here" and "there".
    """
    path = tiny_checkpoint("llama_four_layers")
    port = reserved_port()
    flags = {**SIZES, **flags}
    with (
        other_rank(path, port, namespace, **flags) as command,
        closing(first_rank(path, port, **flags)) as core,
    ):
        (here,) = core._runner._ranks._children.pids
        (there,) = psutil.Process(command.pid).children(recursive=True)
        started = {"here": psutil.Process(here), "there": there}
        try:
            yield core, command, started
        finally:
            for process in started.values():
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def check_tokens(core: EngineCore) -> None:
    outputs = run_all(core, requests())
    path = Path(core.config.model)
    for request_id, length in (("0", 9), ("2", 31)):
        expected = reference_greedy(path, prompt_of(length), NUM_TOKENS)
        assert tokens_of(outputs[request_id]) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        pytest.param(
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_tokens_are_those_of_transformers(sizes: dict[str, int]) -> None:
    with two_machines(**sizes) as (core, command, started):
        check_tokens(core)
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        core.close()
        assert not started["here"].is_running()
        assert command.wait(END_S) == 0
    assert not started["there"].is_running()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_machines_meet_by_a_network() -> None:
    with (
        other_host() as (here, namespace),
        two_machines(namespace, master_addr=here) as (core, command, _),
    ):
        check_tokens(core)
        core.close()
        assert command.wait(END_S) == 0


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("there", signal.SIGKILL),
        pytest.param("there", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("here", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("here", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_all_processes(victim: str, number: signal.Signals) -> None:
    with two_machines(step_timeout_s=5.0) as (core, command, started):
        run_all(core, requests()[:1])
        started[victim].send_signal(number)
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
        core.close()
        assert command.wait(END_S) == 1
        assert not any(process.is_running() for process in started.values())


@pytest.mark.slow
def test_a_frozen_rank_ends_with_its_command() -> None:
    with two_machines() as (core, command, started):
        started["there"].suspend()
        command.kill()
        wait_until_ended(started["there"].pid)
        with pytest.raises(RanksLostError):
            run_all(core, requests()[:1])


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_rank_that_does_not_start_ends_its_command(
    node_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = reserved_port()
    config = EngineConfig(
        model="m", **SIZES, nnodes=2, node_rank=node_rank, master_port=port, device="cpu"
    )
    place = place_of(config, {})
    assert place is not None
    monkeypatch.setattr(sys, "executable", "false")
    store = None  # of a rank 0 that waits, too
    if node_rank > 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigurationError, match="has started did not meet the others"):
        HostRanks(place, config, ClusterSecurity(token=TOKEN))
    del store


def test_a_machine_needs_a_gpu_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hosts, "resolve_device", lambda *_: torch.device("cuda"))
    config = EngineConfig(model="m", tensor_parallel_size=4, nnodes=2)
    place = place_of(config, {})
    assert place is not None
    with pytest.raises(ConfigurationError, match="gives this machine 2 ranks, and it has 1 GPUs"):
        HostRanks(place, config, ClusterSecurity(token=TOKEN))
