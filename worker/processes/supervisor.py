"""`SupervisedProcess`: a child process, restarted after `RestartDelays` until `stop` is called."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.common.errors import ConfigurationError, UnavailableError
from worker.processes.spawn import ProcessSpec, RunningProcess, Spawn, spawn_here

__all__ = ["RestartDelays", "RestartPolicy", "SupervisedProcess"]

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_REDRAW_INTERVAL_S = 5.0
"""Time between two lines about a progress bar, which a process draws many times a second."""
_LAST_OUTPUT_S = 1.0
"""Time to read the output of a process that has ended: children may keep it open."""
_WaitServing = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the process that was started last is serving."""
_WaitStuck = Callable[[], Coroutine[Any, Any, None]]
"""Waits, from the moment when the process serves, until it must be killed because it hangs."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays before restarts, and the time a process may take to stop.

    A process that served before it died starts again at once, `max_restarts_at_once` times in a
    row and in the long run once every `restart_interval_s`. For one that dies before it serves,
    the delay doubles from `first_delay_s` to `max_delay_s`, until a start succeeds.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    max_restarts_at_once: int = 5
    restart_interval_s: float = 2.0
    stop_grace_s: float = 10.0


class RestartDelays:
    """The delays of one process.

    Args:
        policy: their lengths.
        clock: returns the time in seconds.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._delay_s = policy.first_delay_s
        self._restarts_left = float(policy.max_restarts_at_once)
        self._counted_at = clock()

    def next_s(self, *, has_served: bool) -> float:
        """Returns the delay before the next start.

        Args:
            has_served: whether the process was serving before it died.
        """
        if has_served:
            self._delay_s = self._policy.first_delay_s
            return self._take_restart()
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._policy.max_delay_s)
        return delay_s

    def _take_restart(self) -> float:
        """Takes a restart out of a token bucket; returns the time until the bucket has it."""
        policy, now = self._policy, self._clock()
        gained = (now - self._counted_at) / policy.restart_interval_s
        self._counted_at = now
        self._restarts_left = min(self._restarts_left + gained, policy.max_restarts_at_once) - 1
        return max(0.0, -self._restarts_left * policy.restart_interval_s)


class SupervisedProcess:
    """Runs a process, copies its output line by line, and restarts it when it dies.

    Args:
        spec: the process to run.
        write_line: called with each line of output, prefixed with the process's name.
        policy: delays of restarts and of the stop.
        spawn: starts the process, by default on this machine.

    Attributes:
        pid: process id of the running process; None while none runs.
        started: set when the process has been started at least once.
        died: set when the process has ended without `stop`, or could not be started, at least
            once.
        start_error: why the latest start failed; None if the process was started.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        write_line: Callable[[str], None],
        policy: RestartPolicy | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.started = asyncio.Event()
        self.died = asyncio.Event()
        self.start_error: OSError | None = None
        self._write_line = write_line
        self._policy = policy or RestartPolicy()
        self._delays = RestartDelays(self._policy)
        self._spawn = spawn or spawn_here
        self._stopping = asyncio.Event()
        self._process: RunningProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._wait_serving: _WaitServing | None = None
        self._wait_stuck: _WaitStuck | None = None
        self._has_served = False  # the process that was started last
        self._wait_ended = asyncio.Event()  # at least one wait for a serving process has ended
        self._serving_error: Exception | None = None

    def start(self) -> "asyncio.Task[None]":
        """Starts the process and its supervision; returns the task of the supervision. It is not
        known when the process serves, so all of its restarts are delayed.
        """
        self._keeper = asyncio.create_task(self._keep_running(), name=self.spec.name)
        return self._keeper

    async def start_until(
        self, wait_serving: _WaitServing, wait_stuck: _WaitStuck | None = None
    ) -> None:
        """Starts the process and its supervision; returns when it is serving.

        Args:
            wait_serving: called after each start of the process.
            wait_stuck: called each time the process serves. When it returns, the process is
                killed, and starts again. None: a process that hangs is left alone.

        Raises:
            ConfigurationError: the process ended first. It is restarted until `stop` is called.
            UnavailableError: the machine could not start the process, or `stop` was called first.
        """
        self._wait_serving, self._wait_stuck = wait_serving, wait_stuck
        keeper = self.start()
        wait_ended = asyncio.create_task(self._wait_ended.wait())
        died = asyncio.create_task(self.died.wait())
        try:
            await asyncio.wait({wait_ended, died, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wait_ended.cancel()
            died.cancel()
        if self._serving_error is not None:
            raise self._serving_error
        if self._wait_ended.is_set():
            return
        if self._stopping.is_set():
            raise UnavailableError(f"{self.spec.name} was stopped before it was serving")
        if self.start_error is not None:
            raise UnavailableError(f"{self.spec.name} could not be started: {self.start_error}")
        raise ConfigurationError(
            f"{self.spec.name} could not start; its last log lines have the reason"
        )

    def begin_stop(self) -> None:
        """Begins what `stop` does, without waiting for the end."""
        self._stopping.set()

    async def stop(self) -> None:
        """Ends the process with SIGTERM, and with SIGKILL after the grace period. Idempotent."""
        self.begin_stop()
        if self._keeper is not None:
            await self._keeper

    def kill(self) -> None:
        """Kills the process; it is restarted unless `stop` or `begin_stop` was called."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _keep_running(self) -> None:
        while True:
            self._has_served = False
            try:
                end = await self._run_once()
            except Exception as error:  # a process that nobody watches would stay listed
                end = f"failed: {error!r}"
            if self._stopping.is_set():
                return
            self.died.set()
            self._log(end)
            await self._wait_for_stop(self._delays.next_s(has_served=self._has_served))
            if self._stopping.is_set():
                return
            self._log("starting again")

    async def _run_once(self) -> str:
        """Runs the process until it ends or `stop` is called; returns how it ended, for the log."""
        try:
            process = await self._spawn_or_stop()
        except OSError as error:  # the machine has no process or no memory left
            self.start_error = error
            return f"could not be started: {error}"
        self.start_error = None
        if process is None:
            return "was not started"
        self._process, self.pid = process, process.pid
        self.started.set()
        following = asyncio.create_task(self._follow())
        try:
            await self._attend(process)
        finally:
            following.cancel()
        return process.describe_end()

    async def _follow(self) -> None:
        """Notes when the running process serves, and kills it if it hangs after that."""
        await self._await_serving()
        if self._has_served and self._wait_stuck is not None:
            await self._wait_stuck()
            self._log("hangs; killed")
            self.kill()

    async def _await_serving(self) -> None:
        """Waits until the running process serves, and notes it."""
        if self._wait_serving is None:
            return
        try:
            await self._wait_serving()
            self._has_served = True
        except Exception as error:  # for the caller of `start_until`
            self._serving_error = error
        self._wait_ended.set()

    async def _attend(self, process: RunningProcess) -> None:
        """Copies a process's output until it ends, or ends it once `stop` is called."""
        ending = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        copying = asyncio.create_task(self._copy_output(process))
        try:
            await asyncio.wait({ending, stopping, copying}, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                copying.result()  # raises: without a reader the process would block at a full pipe
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await self._terminate(process, ending)
            ending.result()
            await asyncio.wait({copying}, timeout=_LAST_OUTPUT_S)
        finally:
            self.pid = None
            for task in (ending, stopping, copying):
                task.cancel()
            self.kill()  # has no effect unless this run has failed
            process.close()

    async def _spawn_or_stop(self) -> RunningProcess | None:
        """Starts the process; returns None if `stop` was called first, as a start elsewhere may
        take minutes.
        """
        spawning = asyncio.ensure_future(self._spawn(self.spec))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({spawning, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if spawning.done():
            return spawning.result()
        spawning.cancel()
        await asyncio.wait({spawning})
        return None

    async def _terminate(self, process: RunningProcess, ending: "asyncio.Task[int]") -> None:
        process.terminate()
        await asyncio.wait({ending}, timeout=self._policy.stop_grace_s)
        if not ending.done():
            self._log(f"did not end within {self._policy.stop_grace_s:g} s; killed")
            process.kill()
            await ending

    async def _wait_for_stop(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), timeout_s)
        except TimeoutError:
            return

    async def _copy_output(self, process: RunningProcess) -> None:
        pending, redrawn_at = b"", time.monotonic()
        while chunk := await process.stdout.read(_READ_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._log(_last_drawn(line))
            now = time.monotonic()
            is_redrawn = b"\r" in pending and now - redrawn_at > _REDRAW_INTERVAL_S
            redrawn_at = now if is_redrawn else redrawn_at
            if is_redrawn or len(pending) > _MAX_LINE_BYTES:
                self._log(_last_drawn(pending))
            if b"\r" in pending:  # the last form of the line is enough
                end = b"\r" if pending.endswith(b"\r") else b""
                pending = _last_drawn(pending) + end
            if len(pending) > _MAX_LINE_BYTES:
                pending = b""
        self._log(_last_drawn(pending))

    def _log(self, line: str | bytes) -> None:
        text = line if isinstance(line, str) else line.decode(errors="replace")
        if text.strip():
            self._write_line(f"{self.spec.name} | {text.rstrip()}")


def _last_drawn(line: bytes) -> bytes:
    """Returns the text of a line that a terminal shows: that after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
