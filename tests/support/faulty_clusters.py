"""Clusters over a KV backend with faults, and what clients and operators see of them."""

import asyncio
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from typing_extensions import override

from baton.cli import main
from baton.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, Cluster, running_cluster
from tests.support.running_router import RunningRouter, request, token_ids_of
from tests.support.store_faults import Cable, FaultyBackend, running_backend
from tests.support.thread_time import ThreadTime
from tests.support.tiers_here import running_tiers
from tests.support.two_hosts import running_two_hosts

__all__ = ["BETWEEN_HOSTS", "FaultyCluster", "running_faulty_cluster"]

BETWEEN_HOSTS = " between hosts"
"""Ends the name of a peer connector whose workers run on two hosts."""
_BACK_S = 15.0
_RECONNECT_S = 60.0
_NUM_TOKENS = 8
_PROMPT_TOKENS = 60
# A line of a process: date, time, level, logger, message.
_LINE = re.compile(r"^\S+ \S+ (INFO|WARNING|ERROR) (\S+) (.*)$", re.MULTILINE)


@cache
def _expected_tokens(seed: int) -> list[int]:
    return reference_greedy(tiny_checkpoint("llama"), prompt_of(_PROMPT_TOKENS, seed), _NUM_TOKENS)


class FaultyCluster(ABC):
    """A router and its workers over a backend, with a client that sends a new prompt each time.

    Args:
        backend: where KV is.
        workers: of both tiers.
        channel: to the router.
        address: of the router.
        metadata: the credential that the router asks of operators.

    Attributes:
        backend: see above.
        shown: everything that operators were shown.
    """

    def __init__(
        self,
        backend: FaultyBackend,
        workers: Sequence[Any],
        channel: grpc.aio.Channel,
        address: str,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.backend, self.shown = backend, ""
        self._workers, self._address, self._metadata = workers, address, metadata
        self._seeds = itertools.count(1)
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(channel)

    @abstractmethod
    async def restart_workers(self) -> None:
        """Restarts all workers one by one; returns when the router knows them."""

    @abstractmethod
    def forget_lines(self) -> None:
        """Lets `lines` leave out what was logged so far."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The lines about backends that an operator sees by default; they count as shown."""

    def pids(self) -> list[int]:
        """The processes that compute answers, apart from this one."""
        return []

    async def check_answer(self, max_wait_s: float = 30.0) -> None:
        """Sends a prompt, whose right answer comes in time. The work for it does not count."""
        seed = next(self._seeds)
        message = request(prompt_of(_PROMPT_TOKENS, seed), max_tokens=_NUM_TOKENS, ignore_eos=True)
        expected = _expected_tokens(seed)
        work, began_at = ThreadTime(*self.pids()), time.monotonic()
        stream = self._stub.GenerateStream(message, timeout=30)
        tokens = token_ids_of([response async for response in stream])
        took_s, busy_s = time.monotonic() - began_at, work.busy_s()
        assert tokens == expected
        assert took_s - busy_s <= max_wait_s, f"an answer took {took_s:.1f} s, {busy_s:.1f} of work"

    async def check_answers(self, count: int, max_wait_s: float) -> None:
        """Sends prompts at the same time, then some one after the other."""
        await asyncio.gather(*(self.check_answer(max_wait_s) for _ in range(count)))
        for _ in range(2):
            await self.check_answer(max_wait_s)

    async def moves_kv(self) -> bool:
        """Whether decode loads the KV of a new prompt."""
        before = await self._loaded_tokens()
        await self.check_answer()
        return await self._loaded_tokens() > before

    async def until_kv_moves(self) -> None:
        """Waits until KV is handed over, at most for the documented time."""
        began_at = time.monotonic()
        while not await self.moves_kv():
            assert time.monotonic() < began_at + _BACK_S, f"no KV is handed over {_BACK_S} s later"
            await asyncio.sleep(0.1)

    async def doctor(self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...] = ()) -> None:
        """Waits until doctor says of the running workers what they should see."""
        addresses = (self._address, *(worker.address for worker in self._workers))
        targets = [f"--target={address}" for address in addresses]
        ends_at = time.monotonic() + _BACK_S
        while True:
            status = await asyncio.to_thread(main, ["doctor", *targets])
            output = capsys.readouterr()
            self.shown += output.out + output.err
            folded = " ".join(output.out.split())
            if status == bool(words) and (not words or any(word in folded for word in words)):
                return
            assert time.monotonic() < ends_at, output.out
            await asyncio.sleep(0.1)

    async def _replicas(self) -> Sequence[Any]:
        message = cluster_pb2.GetClusterRequest()
        cluster = await self._cluster.GetCluster(message, timeout=20, metadata=self._metadata)
        self.shown += str(cluster)
        return cluster.replicas

    async def _loaded_tokens(self) -> int:
        return sum(replica.counters.loaded_tokens for replica in await self._replicas())


class _ClusterHere(FaultyCluster):
    """All in this process."""

    def __init__(
        self, router: RunningRouter, backend: FaultyBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        super().__init__(backend, router.workers, router.channel, router.server.address)
        self._router, self._caplog = router, caplog

    @override
    async def restart_workers(self) -> None:
        for worker in self._workers:
            await worker.restart()
        await self._router.until(lambda: len(self._router.candidate_ids()) == len(self._workers))

    @override
    def forget_lines(self) -> None:
        self._caplog.clear()

    @override
    def lines(self) -> list[str]:
        self.shown += self._caplog.text
        return [
            record.getMessage()
            for record in self._caplog.records
            if record.name == "baton.kvstore" or record.levelno > logging.INFO
            if record.name != "baton.router"  # which loses the workers that are restarted
        ]


class _ClusterOnHosts(FaultyCluster):
    """Processes of their own: each tier on a host, the router here."""

    def __init__(self, cluster: Cluster, channel: grpc.aio.Channel, backend: FaultyBackend) -> None:
        address = cluster.router.address
        super().__init__(backend, cluster.workers, channel, address, WORKER_CALL)
        self._servers = [cluster.router, *cluster.workers]
        self._forgotten = ""

    @override
    async def restart_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
            await worker.restart()
        ready = cluster_pb2.REPLICA_STATE_READY
        async with asyncio.timeout(_RECONNECT_S):
            while any(replica.state != ready for replica in await self._replicas()):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)

    @override
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers]

    @override
    def forget_lines(self) -> None:
        self._forgotten = self._log()

    @override
    def lines(self) -> list[str]:
        log = self._log()
        self.shown += log
        found, before = _LINE.findall(log), _LINE.findall(self._forgotten)
        for line in before:
            found.remove(line)
        return [text for level, name, text in found if name == "baton.kvstore" or level != "INFO"]

    def _log(self) -> str:
        return "\n".join(worker.log() for worker in self._workers)


@asynccontextmanager
async def running_faulty_cluster(
    name: str,
    folder: Path,
    timeout_s: float,
    caplog: pytest.LogCaptureFixture,
    first_fault: str = "",
) -> AsyncIterator[FaultyCluster]:
    """Runs a cluster over a backend.

    Args:
        name: of the backend; with `BETWEEN_HOSTS` at its end, each tier has a host.
        folder: for files.
        timeout_s: of the connector.
        caplog: of the test.
        first_fault: is there when the workers start.
    """
    scheme, on_hosts, _ = name.partition(BETWEEN_HOSTS)
    if on_hosts:
        with running_two_hosts(scheme, f"timeout_s={timeout_s:g}") as hosts:
            async with (
                running_cluster(
                    folder,
                    model=tiny_checkpoint("llama"),
                    kv_connector=hosts.decode_url,
                    prefill_flags=[f"--kv-connector={hosts.prefill_url}"],
                    places=hosts.places,
                ) as cluster,
                grpc.aio.insecure_channel(cluster.router.address) as channel,
            ):
                yield _ClusterOnHosts(cluster, channel, Cable(hosts))
        return
    with running_backend(name, folder, timeout_s) as backend:
        if first_fault:
            backend.begin(first_fault)
        async with running_tiers(folder, "prefill", "decode", kv_connector=backend.url) as router:
            yield _ClusterHere(router, backend, caplog)
