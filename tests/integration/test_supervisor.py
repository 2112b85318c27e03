"""`SupervisedProcess` with real processes: restarts, an orderly stop, no orphans."""

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton.common.errors import DeadlineExceededError, UnavailableError
from baton.up.cluster import start_server, stop_on_signal
from baton.up.plan import Server
from worker.processes.spawn import ProcessSpec, RunningProcess, spawn_here
from worker.processes.supervisor import RestartPolicy, SupervisedProcess

DEADLINE_S = 30
PATIENT = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, stop_grace_s=DEADLINE_S)
QUICK = replace(PATIENT, stop_grace_s=0.5)  # kills processes that a busy machine holds up


class Lines:
    """Records the lines that processes write, and waits for one."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._line_written = asyncio.Event()

    def write(self, line: str) -> None:
        self.seen.append(line)
        self._line_written.set()

    async def wait_for(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sum(text in line for line in self.seen) < times:
                self._line_written.clear()
                await self._line_written.wait()

    def pids(self) -> list[int]:
        return [int(line.split()[-1]) for line in self.seen if " pid " in line]


@pytest.fixture
async def lines():
    return Lines()


@pytest.fixture
async def supervise(lines):
    """Yields a function that starts scripted workers, and stops them all at the end."""
    started = []

    def start(*arguments: str) -> SupervisedProcess:
        spec = ProcessSpec("worker", "tests.support.scripted_worker", arguments)
        policy = QUICK if "stubborn" in arguments else PATIENT
        process = SupervisedProcess(spec, lines.write, policy)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        await process.stop()


async def test_output_is_prefixed(lines, supervise):
    process = supervise("serve")
    await lines.wait_for("ready")
    assert lines.seen == [f"worker | pid {process.pid}", "worker | ready"]


async def test_a_progress_bar_is_one_line(lines, supervise):
    supervise("bar")
    await lines.wait_for("ready")
    assert [line for line in lines.seen if " of " in line] == ["worker | 100 of 100"]


async def test_stop_terminates_a_process_before_killing_it(lines, supervise):
    process = supervise("serve")
    await lines.wait_for("ready")
    await process.stop()
    assert lines.seen[-1] == "worker | terminated"
    assert not psutil.pid_exists(lines.pids()[0])
    assert process.pid is None
    assert not process.died.is_set()


async def test_stop_kills_a_process_that_ignores_termination(lines, supervise):
    process = supervise("stubborn")
    await lines.wait_for("ready")
    await process.stop()
    assert any("killed" in line for line in lines.seen)
    assert not psutil.pid_exists(lines.pids()[0])


async def test_a_killed_worker_starts_again(lines, supervise):
    process = supervise("serve")
    await lines.wait_for("ready")
    os.kill(process.pid, signal.SIGKILL)
    await lines.wait_for("ready", times=2)
    first, second = lines.pids()
    assert first != second == process.pid
    assert process.died.is_set()


async def test_a_worker_that_served_starts_again_at_once_each_time(lines):
    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    policy = RestartPolicy(first_delay_s=2 * DEADLINE_S, stop_grace_s=5)
    process = SupervisedProcess(spec, lines.write, policy)
    num_starts = itertools.count(1)

    async def wait_serving():
        await lines.wait_for("ready", times=next(num_starts))

    await process.start_until(wait_serving)
    for times in (2, 3, 4):
        process.kill()
        await lines.wait_for("ready", times=times)
    await process.stop()


async def test_a_process_that_hangs_is_killed_and_starts_again(lines):
    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    process = SupervisedProcess(spec, lines.write, PATIENT)
    num_starts, hangs = itertools.count(1), asyncio.Event()

    async def wait_serving():
        await lines.wait_for("ready", times=next(num_starts))

    async def wait_stuck():
        await hangs.wait()
        hangs.clear()

    await process.start_until(wait_serving, wait_stuck)
    hangs.set()
    await lines.wait_for("ready", times=2)
    await process.stop()
    assert "worker | hangs; killed" in lines.seen


async def test_a_wait_for_a_serving_process_that_fails_ends_the_start(lines):
    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    process = SupervisedProcess(spec, lines.write, QUICK)

    async def wait_serving():
        raise DeadlineExceededError("not serving after 900 s")

    with pytest.raises(DeadlineExceededError, match="after 900 s"):
        await process.start_until(wait_serving)
    await process.stop()


async def test_a_stop_ends_the_wait_for_a_process_that_does_not_serve_yet(lines):
    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    process = SupervisedProcess(spec, lines.write, QUICK)
    starting = asyncio.create_task(process.start_until(asyncio.Event().wait))
    await lines.wait_for("ready")
    await process.stop()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnavailableError, match="stopped before it was serving"):
            await starting


async def test_a_death_is_noticed_while_a_child_keeps_the_output_open(lines, supervise):
    open_before = open_pipes()
    process = supervise("orphan")
    try:
        await lines.wait_for("ended with status 0", times=2)
        await process.stop()
    finally:
        for line in lines.seen:
            if " child " in line:
                os.kill(int(line.split()[-1]), signal.SIGKILL)
    assert open_pipes() <= open_before


def open_pipes() -> set[str]:
    """Names the pipes and sockets that this process has open."""
    names = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            names.add(str(file.readlink()))
    return {name for name in names if name.startswith(("pipe:", "socket:"))}


async def test_stop_ends_a_crash_loop(lines, supervise):
    process = supervise("crash", "3")
    await lines.wait_for("ended with status 3", times=3)
    await process.stop()
    assert process.pid is None
    assert not any(psutil.pid_exists(pid) for pid in lines.pids())


def without_processes(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


async def test_a_process_that_the_machine_cannot_start_ends_the_start(lines, monkeypatch):
    monkeypatch.setattr(asyncio, "create_subprocess_exec", without_processes)
    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    process = SupervisedProcess(spec, lines.write, QUICK)
    starting = start_server(Server(spec, "127.0.0.1:1"), process)
    with pytest.raises(UnavailableError, match="worker could not be started"):
        await asyncio.wait_for(starting, DEADLINE_S)
    await process.stop()


async def test_a_start_that_fails_later_is_tried_again(lines, supervise, monkeypatch):
    process = supervise("serve")
    await lines.wait_for("ready")
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", without_processes)
        process.kill()
        await lines.wait_for("could not be started", times=2)
    await lines.wait_for("ready", times=2)
    assert process.start_error is None


async def test_a_process_that_has_ended_gets_no_signals():
    process = await spawn_here(ProcessSpec("worker", "tests.support.scripted_worker", ("crash",)))
    assert await process.wait() == 0
    process.terminate()
    process.close()


async def test_a_process_can_be_started_elsewhere(lines):
    seen = []

    async def spawn(spec: ProcessSpec) -> RunningProcess:
        seen.append(spec.name)
        return await spawn_here(spec)

    spec = ProcessSpec("worker", "tests.support.scripted_worker", ("serve",))
    process = SupervisedProcess(spec, lines.write, QUICK, spawn)
    process.start()
    await lines.wait_for("ready")
    assert process.started.is_set()
    process.kill()
    await lines.wait_for("ready", times=2)
    await process.stop()
    assert seen == ["worker", "worker"]


async def test_a_stop_does_not_wait_for_a_start_elsewhere(lines):
    started, is_cancelled = asyncio.Event(), []

    async def spawn(spec: ProcessSpec) -> RunningProcess:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise
        raise AssertionError

    process = SupervisedProcess(ProcessSpec("worker", "m", ()), lines.write, QUICK, spawn)
    process.start()
    async with asyncio.timeout(DEADLINE_S):
        await started.wait()
        await process.stop()
    assert is_cancelled == [True]
    assert not process.started.is_set()


class FailingProcess:
    """A process that runs until it is killed; what is in `failing` fails."""

    pid, returncode = 42, None

    def __init__(self, failing: str) -> None:
        self.calls: list[str] = []
        self.stdout = self
        self._failing, self._ended = failing, asyncio.Event()

    async def read(self, num_bytes: int) -> bytes:
        self._call("read")
        return b""

    async def wait(self) -> int:
        self._call("wait")
        await self._ended.wait()
        self.returncode = -9
        return -9

    def describe_end(self) -> str:
        return f"ended with status {self.returncode}"

    def terminate(self) -> None:
        self._call("terminate")

    def kill(self) -> None:
        self._ended.set()
        self._call("kill")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._failing:
            raise RuntimeError(f"{name} failed")


@pytest.mark.parametrize("failing", ["read", "wait", "close"])
async def test_a_run_that_fails_is_followed_by_another(lines, failing):
    made = []

    async def spawn(spec: ProcessSpec) -> RunningProcess:
        made.append(FailingProcess(failing if not made else ""))
        return made[-1]

    process = SupervisedProcess(ProcessSpec("worker", "m", ()), lines.write, QUICK, spawn)
    process.start()
    async with asyncio.timeout(DEADLINE_S):
        await process.started.wait()
        process.kill()
        await lines.wait_for(f"failed: RuntimeError('{failing} failed')")
        await lines.wait_for("starting again")
        await process.stop()
    assert made[0].calls[-1] == "close"
    assert process.died.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_parent_leaves_no_orphan():
    command = [sys.executable, "-m", "tests.support.supervising_parent", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        seen: list[str] = []
        try:
            while sum("ready" in line for line in seen) < 2:
                seen.append(parent.stdout.readline())
                assert seen[-1], f"the parent ended early: {seen}"
        finally:
            parent.kill()
    children = [int(line.split()[-1]) for line in seen if " pid " in line]
    assert len(children) == 2
    remaining = []
    for pid in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining.append(psutil.Process(pid))
    # Without an init process that reaps orphans, they stay as zombies without resources.
    _, alive = psutil.wait_procs(remaining, timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


async def test_a_process_that_a_second_signal_kills_is_not_started_again(lines, supervise):
    process = supervise("stubborn")
    await lines.wait_for("ready")
    waiting = asyncio.create_task(stop_on_signal([process]))
    try:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(waiting, DEADLINE_S)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while process.pid is not None:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # `QUICK` would have started it by then
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert process.pid is None
    assert len(lines.pids()) == 1


@pytest.mark.parametrize(
    ("name", "own", "text"),
    [
        ("BATON_PORT", {}, ""),
        ("BATON_CPU_KERNELS", {}, "parent"),
        ("BATON_CLUSTER_TOKEN", {}, ""),
        ("BATON_CLUSTER_TOKEN", {"BATON_CLUSTER_TOKEN": "own"}, "own"),
        ("BATON_KV_CONNECTOR", {"BATON_KV_CONNECTOR": "own"}, "own"),
    ],
)
async def test_processes_get_their_own_flags_and_secrets_from_the_environment(
    lines, monkeypatch, name, own, text
):
    monkeypatch.setenv(name, "parent")
    spec = ProcessSpec("child", "tests.support.print_variable", (name,), own)
    process = SupervisedProcess(spec, lines.write, RestartPolicy(first_delay_s=DEADLINE_S))
    process.start()
    await lines.wait_for("ended with status 0")
    await process.stop()
    assert lines.seen == [*([f"child | {text}"] if text else []), "child | ended with status 0"]
