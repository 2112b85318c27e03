"""Operators' faults x backends x moments, on one cluster for each backend.

Whatever the fault of a backend, each request is answered with the right tokens, none waits for
longer than one `timeout_s`, KV is handed over again soon after the fault's end without a restart,
`baton doctor` says what the running workers see, the log says it once, and nothing shows a
password. `FAULTS` is also what the table in docs/connectors.md is checked against.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from baton.cli import main
from baton.v1 import cluster_pb2, cluster_pb2_grpc
from kvstore.guard import breaker, store_watch
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.nixl_remote import needs_process_vm_readv
from tests.support.running_router import RunningRouter, request, token_ids_of
from tests.support.store_faults import PLANTED, FaultyBackend, running_backend
from tests.support.thread_time import ThreadTime
from tests.support.tiers_here import running_tiers

TIMEOUT_S = 2.0
SLACK_S = 1.0  # less than a second wait of `TIMEOUT_S` would take
BACK_S = 15.0
NUM_TOKENS = 8
PROMPT_TOKENS = 60
DOCS = Path(__file__).resolve().parents[2] / "docs/connectors.md"


@dataclass(frozen=True)
class Fault:
    """What one sees of a fault.

    Attributes:
        words: one of them is part of the line in the log, and of the problem that doctor and router
            show; none if the fault is mended before anyone sees it.
        moves_kv: whether KV is handed over nevertheless.
    """

    words: tuple[str, ...]
    moves_kv: bool = False


FAULTS = {
    "down": Fault(("Connection refused", "No master found")),
    "hangs": Fault(("not answered in time", "No master found")),
    "read-only": Fault(("NOREPLICAS",)),
    "full": Fault(("not allowed when used memory",)),
    "rotated": Fault(("username-password pair",)),
    "locked": Fault(("lock was not free", "not answered in time")),
    "removed": Fault((), moves_kv=True),
    "restarted": Fault((), moves_kv=True),
}

# By backend: the faults, and the moments at which each is met. A row that begins "at start" ends
# with workers that were started while the fault lasted, and so does one "at a restart".
ROWS: dict[str, Sequence[tuple[str, str]]] = {
    "redis": [
        ("down", "at start"),
        ("hangs", "running"),
        ("rotated", "at a restart"),
        ("full", "running"),
        ("read-only", "running"),
        ("down", "after it"),
    ],
    "sentinel": [("down", "running"), ("hangs", "at a restart")],
    "cluster": [("down", "running"), ("hangs", "at a restart")],
    "file": [("locked", "running"), ("removed", "running"), ("removed", "at a restart")],
    "shm": [("locked", "at a restart"), ("removed", "running")],
    "multi": [("down", "at start"), ("hangs", "running")],
    "grpc": [("restarted", "at a restart")],
    "nixl": [("restarted", "at a restart")],
}
NEVER_STOPS = {"multi", "cluster", "grpc", "nixl"}
"""Backends that hand KV over during the fault, as another member or server does."""

MAX_LINES = 3
"""The most lines of one worker in its life about one fault: that it began, that it is over, and the
bound of the store that the worker opened.
"""


@cache
def expected_tokens(seed: int) -> list[int]:
    return reference_greedy(tiny_checkpoint("llama"), prompt_of(PROMPT_TOKENS, seed), NUM_TOKENS)


class FaultyCluster:
    """A cluster over a backend, with a client that sends a new prompt each time."""

    def __init__(self, router: RunningRouter, backend: FaultyBackend) -> None:
        self.router, self.backend = router, backend
        self.shown = ""
        self._seeds = itertools.count(1)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(router.channel)

    async def check_answer(self, max_wait_s: float = 30.0) -> None:
        """Sends a prompt, whose right answer comes in time. The work for it does not count."""
        seed = next(self._seeds)
        message = request(prompt_of(PROMPT_TOKENS, seed), max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = expected_tokens(seed)
        work, began_at = ThreadTime(), time.monotonic()
        tokens = token_ids_of(await self.router.generate(message))
        took_s, busy_s = time.monotonic() - began_at, work.busy_s()
        assert tokens == expected
        assert took_s - busy_s <= max_wait_s, f"an answer took {took_s:.1f} s, {busy_s:.1f} of work"

    async def check_answers(self, count: int, max_wait_s: float) -> None:
        """Sends prompts at the same time, then some one after the other."""
        await asyncio.gather(*(self.check_answer(max_wait_s) for _ in range(count)))
        for _ in range(2):
            await self.check_answer(max_wait_s)

    async def loaded_tokens(self) -> int:
        cluster = await self._cluster.GetCluster(cluster_pb2.GetClusterRequest(), timeout=20)
        self.shown += str(cluster)
        return sum(replica.counters.loaded_tokens for replica in cluster.replicas)

    async def moves_kv(self) -> bool:
        """Whether decode loads the KV of a new prompt."""
        before = await self.loaded_tokens()
        await self.check_answer()
        return await self.loaded_tokens() > before

    async def until_kv_moves(self) -> None:
        """Waits until KV is handed over, at most for the documented time."""
        ends_at = time.monotonic() + BACK_S
        while not await self.moves_kv():
            assert time.monotonic() < ends_at, f"no KV is handed over {BACK_S} s later"
            await asyncio.sleep(0.1)

    async def doctor(self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...] = ()) -> None:
        """Waits until doctor says of the running workers what they should see."""
        router = self.router.server.address
        targets = [f"--target={router}", *(f"--target={w.address}" for w in self.router.workers)]
        ends_at = time.monotonic() + BACK_S
        while True:
            status = await asyncio.to_thread(main, ["doctor", *targets])
            output = capsys.readouterr()
            self.shown += output.out + output.err
            folded = " ".join(output.out.split())
            if status == bool(words) and (not words or any(word in folded for word in words)):
                return
            assert time.monotonic() < ends_at, output.out
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running_faulty_cluster(name: str, folder: Path) -> AsyncIterator[FaultyCluster]:
    """Runs a cluster over a backend; the first row's fault is there at the start of its workers."""
    fault, moment = ROWS[name][0]
    with running_backend(name, folder, TIMEOUT_S) as backend:
        if moment == "at start":
            backend.begin(fault)
        async with running_tiers(folder, "prefill", "decode", kv_connector=backend.url) as router:
            yield FaultyCluster(router, backend)


def lines_about(records: Sequence[logging.LogRecord]) -> list[str]:
    """The lines about backends that an operator sees by default."""
    return [
        record.getMessage()
        for record in records
        if record.name == "baton.kvstore" or record.levelno > logging.INFO
        if record.name != "baton.router"  # which loses the workers that are restarted
    ]


async def run_row(
    faulty: FaultyCluster,
    name: str,
    fault: str,
    moment: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Meets one fault at one moment."""
    stops = name not in NEVER_STOPS and not FAULTS[fault].moves_kv
    sees = FAULTS[fault].words
    if moment != "at start":
        await faulty.until_kv_moves()
        caplog.clear()
        faulty.backend.begin("hangs" if fault == "locked" else fault)
    if moment == "at a restart":
        for worker in faulty.router.workers:
            await worker.restart()
        await faulty.router.until(lambda: len(faulty.router.candidate_ids()) == 2)
    await faulty.check_answers(3, TIMEOUT_S + SLACK_S)
    if stops:
        assert not await faulty.moves_kv()
    await faulty.doctor(capsys, sees)
    faulty.backend.end("hangs" if fault == "locked" else fault)
    if moment == "after it":
        for worker in faulty.router.workers:
            await worker.restart()
        await faulty.router.until(lambda: len(faulty.router.candidate_ids()) == 2)
    await faulty.until_kv_moves()
    await faulty.doctor(capsys)
    lines = lines_about(caplog.records)
    num_lives = 4 if "restart" in moment else 2  # of workers
    # A server that is back may say for a moment that its cluster is down.
    max_lines = MAX_LINES + (name == "cluster")
    assert len(lines) <= max_lines * num_lives, "\n".join(lines)
    if sees:
        assert any(words in line for words in sees for line in lines), "\n".join(lines)
    faulty.shown += caplog.text
    assert PLANTED not in faulty.shown


@pytest.mark.parametrize(
    "name",
    [
        "grpc",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name != "grpc"),
    ],
)
async def test_each_fault_of_a_backend_is_survived(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "nixl":
        needs_process_vm_readv()
    if name != "sentinel":  # one backend suffices for the cool-downs of operators
        monkeypatch.setattr(breaker, "_MAX_COOLDOWN_S", 1.0)
        monkeypatch.setattr(store_watch, "_CHECK_INTERVAL_S", 1.0)
    caplog.set_level(logging.INFO, "baton")
    async with running_faulty_cluster(name, tmp_path) as faulty:
        for fault, moment in ROWS[name]:
            print(f"{name}: {fault}, {moment}")
            await run_row(faulty, name, fault, moment, caplog, capsys)


async def test_tiers_on_two_stores_of_one_kind_are_noticed_before_the_first_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = {"prefill": f"file://{tmp_path}/a", "decode": f"file://{tmp_path}/b"}
    async with running_tiers(tmp_path, "prefill", "decode", kv_connector=urls) as router:
        await router.until(lambda: router.fleet.stores.warning)
        assert caplog.text.count("have different KV stores") == 1
        _, decode = router.workers
        decode.kv_connector = urls["prefill"]
        await decode.restart()
        await router.until(lambda: len(router.candidate_ids()) == 2)
        await router.until(lambda: not router.fleet.stores.warning)


def test_the_table_of_faults_in_the_docs_is_complete() -> None:
    text = DOCS.read_text()
    section = text.partition("## Faults\n")[2].partition("\n## ")[0]
    words = {words for fault in FAULTS.values() for words in fault.words}
    assert not {each for each in words if f"`{each}`" not in section}
