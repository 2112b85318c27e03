"""A `PeerRig` in its own process, which tests can call, stop and kill."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles
from kvstore.layout import KvLayout
from tests.support.confinement import forbid_process_vm_calls
from tests.support.peer_rig import LAYOUT, TIMEOUT_S, PeerRig, random_pool

__all__ = ["LendingProcess"]


class LendingProcess:
    """Lends blocks of the pool that `random_pool` returns for the seed.

    Args:
        url: URL of the connector.
        layout: layout of a block.
        num_blocks: size of the pool.
        seed: seed of the pool's content.
        transports: its UCX_TLS; None to leave that unset.
        is_confined: whether the kernel forbids it to read other processes' memory.
        files: its certificates; None for plain text.
        token: the cluster's token; None for none.
    """

    def __init__(
        self,
        url: str,
        layout: KvLayout = LAYOUT,
        num_blocks: int = 64,
        seed: int = 0,
        *,
        transports: str | None = None,
        is_confined: bool = False,
        files: CertificateFiles | None = None,
        token: str | None = None,
    ) -> None:
        # Forked from a process that has imported torch and started nothing.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.peer_rig"])
        self._ours, theirs = context.Pipe()
        credentials = (files, token)
        arguments = (theirs, url, layout, num_blocks, seed, transports, is_confined, credentials)
        self._process = context.Process(target=_lend, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.pool = random_pool(num_blocks, layout, seed)
        self.endpoint: str = self._answer(60)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the rig in the process, between steps of the rig."""
        self._ours.send((method, arguments))
        return self._answer(TIMEOUT_S)

    def stop(self) -> None:
        """Stops the process with SIGSTOP; returns once all its threads are stopped."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        give_up_at = time.monotonic() + TIMEOUT_S
        while any(_state(task) != "T" for task in tasks.iterdir()):
            assert time.monotonic() < give_up_at, "the process does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._ours.close()

    def _answer(self, timeout_s: float) -> Any:
        assert self._ours.poll(timeout_s), "the process does not answer"
        return self._ours.recv()


def _state(task: Path) -> str:
    """Returns the state of a thread, as proc(5) names it: T of one that has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


def _lend(
    commands: Connection,
    url: str,
    layout: KvLayout,
    num_blocks: int,
    seed: int,
    transports: str | None,
    is_confined: bool,
    credentials: tuple[CertificateFiles | None, str | None],
) -> None:
    torch.set_num_threads(1)
    # The fork server has the environment of the test that used it first.
    os.environ.pop("UCX_TLS", None)
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    if is_confined:
        forbid_process_vm_calls()
    security = ClusterSecurity(None, *credentials)
    pool = random_pool(num_blocks, layout, seed)
    rig = PeerRig(url, layout, pool=pool, security=security)
    commands.send(rig.worker.address.endpoint)
    while True:
        if commands.poll(0.005):
            method, arguments = commands.recv()
            if method == "released":
                commands.send(list(rig.released))
            else:
                commands.send(getattr(rig, method)(*arguments))
        rig.step()
