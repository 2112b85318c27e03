"""An engine in its own process that lends a prompt's beginning, and that tests stop or kill."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Self

from engine.request import PrefixRequest
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff
from tests.support.checkpoints import tiny_checkpoint
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request

__all__ = ["LendingEngine"]

_TIMEOUT_S = 60.0


class LendingEngine:
    """Computes a prompt and lends its full blocks.

    Args:
        kv_connector: URL of its connector.
        prompt: the prompt.

    Attributes:
        handoff: the terms of the loan.
    """

    def __init__(self, kv_connector: str, prompt: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.lending_engine"])
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_lend, args=(theirs, kv_connector, prompt), daemon=True
        )
        self._process.start()
        theirs.close()
        with ours:
            assert ours.poll(_TIMEOUT_S), "the process does not answer"
            self.handoff: KvHandoff = ours.recv()

    def send(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.join(_TIMEOUT_S)


def _lend(ours: Connection, kv_connector: str, prompt: tuple[int, ...]) -> None:
    core = build_core(tiny_checkpoint("llama"), "both", kv_connector=kv_connector, block_size=8)
    run_all(core, [engine_request("first", prompt, max_tokens=1)])
    keys = tuple(BlockKeyChain(core.namespace, 8).extend(prompt))
    core.scheduler.lend_prefix(PrefixRequest("lease", keys, ours.send))
    while True:
        core.run_step(lambda outputs: None)
        core.wait()
