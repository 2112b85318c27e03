"""Operators' faults x backends x moments, on one cluster for each backend.

Whatever the fault of a backend, each request is answered with the right tokens, none waits for
longer than one `timeout_s`, KV is handed over again soon after the fault's end without a restart,
`baton doctor` says what the running workers see, the log says it once, and nothing shows a
password. `FAULTS` is also what the table in docs/connectors.md is checked against.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.guard import breaker, store_watch
from tests.support.cluster import WORKER_CALL
from tests.support.faulty_clusters import BETWEEN_HOSTS, FaultyCluster, running_faulty_cluster
from tests.support.nixl_remote import needs_process_vm_readv
from tests.support.store_faults import PLANTED
from tests.support.tiers_here import running_tiers
from tests.support.two_hosts import why_unavailable

TIMEOUT_S = 2.0
SLACK_S = 1.0  # less than a second wait of `TIMEOUT_S` would take
DOCS = Path(__file__).resolve().parents[2] / "docs/connectors.md"


@dataclass(frozen=True)
class Fault:
    """What one sees of a fault.

    Attributes:
        words: one of them is part of the line in the log, and of the problem that doctor and router
            show; none if the fault is mended before anyone sees it.
        moves_kv: whether KV is handed over nevertheless.
        min_s: seconds that it lasts at least.
    """

    words: tuple[str, ...]
    moves_kv: bool = False
    min_s: float = 0.0


FAULTS = {
    "down": Fault(("Connection refused", "No master found")),
    "hangs": Fault(("not answered in time", "No master found")),
    "read-only": Fault(("NOREPLICAS",)),
    "full": Fault(("not allowed when used memory",)),
    "rotated": Fault(("username-password pair",)),
    "locked": Fault(("lock was not free", "not answered in time")),
    "removed": Fault((), moves_kv=True),
    "restarted": Fault((), moves_kv=True),
    "cut off": Fault(("not answered in time", "failed to connect")),
    # TCP would repeat what was lost much later than 15 s after the end.
    "cut off for long": Fault(("not answered in time", "failed to connect"), min_s=28.0),
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
    f"grpc{BETWEEN_HOSTS}": [("cut off for long", "running")],
    f"nixl{BETWEEN_HOSTS}": [("cut off", "running"), ("cut off", "at a restart")],
}
NEVER_STOPS = {"multi", "cluster", "grpc", "nixl"}
"""Backends that hand KV over during the fault, as another member or server does."""

MAX_LINES = 3
"""The most lines of one worker in its life about one fault: that it began, that it is over, and the
bound of the store that the worker opened.
"""


async def run_row(
    faulty: FaultyCluster, name: str, fault: str, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meets one fault at one moment."""
    stops = name not in NEVER_STOPS and not FAULTS[fault].moves_kv
    sees = FAULTS[fault].words
    if moment != "at start":
        await faulty.until_kv_moves()
        faulty.forget_lines()
        faulty.backend.begin(fault)
    began_at = time.monotonic()
    if moment == "at a restart":
        await faulty.restart_workers()
    await faulty.check_answers(3, TIMEOUT_S + SLACK_S)
    if stops:
        assert not await faulty.moves_kv()
    await faulty.doctor(capsys, sees)
    while time.monotonic() < began_at + FAULTS[fault].min_s:
        await faulty.check_answer(TIMEOUT_S + SLACK_S)
    faulty.backend.end(fault)
    if moment == "after it":
        await faulty.restart_workers()
    await faulty.until_kv_moves()
    await faulty.doctor(capsys)
    lines = faulty.lines()
    num_lives = 4 if "restart" in moment else 2  # of workers
    # A server that is back may say for a moment that its cluster is down.
    max_lines = MAX_LINES + (name == "cluster")
    assert len(lines) <= max_lines * num_lives, "\n".join(lines)
    if sees:
        assert any(words in line for words in sees for line in lines), "\n".join(lines)
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
    if name.endswith(BETWEEN_HOSTS):
        if reason := why_unavailable():
            pytest.skip(reason)
        token = WORKER_CALL[0][1].removeprefix("Bearer ")
        monkeypatch.setenv("BATON_CLUSTER_TOKEN", token)  # for `baton doctor`
    if name != "sentinel":  # one backend suffices for the cool-downs of operators
        monkeypatch.setattr(breaker, "_MAX_COOLDOWN_S", 1.0)
        monkeypatch.setattr(store_watch, "_CHECK_INTERVAL_S", 1.0)
    caplog.set_level(logging.INFO, "baton")
    fault, moment = ROWS[name][0]
    first_fault = fault if moment == "at start" else ""
    async with running_faulty_cluster(name, tmp_path, TIMEOUT_S, caplog, first_fault) as faulty:
        for fault, moment in ROWS[name]:
            print(f"{name}: {fault}, {moment}")
            await run_row(faulty, name, fault, moment, capsys)


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
