"""Child processes: what to run (`ProcessSpec`), and those that run (`RunningProcess`)."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.common.container_limits import EndWatch
from baton.common.flags.config_flags import flags_of_config
from baton.common.flags.sources import variable_of, without_flag_variables
from baton.common.module_process import module_command
from engine.config import EngineConfig

__all__ = ["LocalProcess", "ProcessSpec", "RunningProcess", "Spawn", "spawn_here", "worker_spec"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that runs a module of Baton's with arguments; the log calls it `name`.

    Attributes:
        environment: variables besides those of this process that are no flags; not shown, as they
            hold secrets.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


class RunningProcess(Protocol):
    """A process that was started, here or on another machine."""

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""

    @property
    def returncode(self) -> int | None:
        """How it ended; None before."""

    @property
    def stdout(self) -> Any:
        """Its output, of which `read(n)` returns up to n bytes, and none at the end."""

    async def wait(self) -> int:
        """Returns how it ended, when it has. Its children may still write to its output."""

    def describe_end(self) -> str:
        """Returns how it ended, for a log."""

    def terminate(self) -> None:
        """Sends SIGTERM."""

    def kill(self) -> None:
        """Kills it."""

    def close(self) -> None:
        """Releases what it held, after its end. Its output is not read any more."""


Spawn = Callable[[ProcessSpec], Awaitable[RunningProcess]]
"""Starts a process. Raises `OSError` if it cannot be started."""


class LocalProcess:
    """A process on this machine.

    Args:
        process: asyncio's, without a pipe: `wait` would wait for that, too.
        stdout: the process's output.
        pipe: what `stdout` reads.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stdout: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self.pid = process.pid
        self.stdout = stdout
        self._process = process
        self._pipe = pipe
        self._end_watch = EndWatch()

    @property
    def returncode(self) -> int | None:
        """How it ended; None before."""
        return self._process.returncode

    async def wait(self) -> int:
        """Returns how it ended, when it has."""
        return await self._process.wait()

    def describe_end(self) -> str:
        """Returns how it ended, for a log."""
        return self._end_watch.describe(self.returncode)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Closes its output."""
        self._pipe.close()


async def spawn_here(spec: ProcessSpec) -> LocalProcess:
    """Starts a process on this machine."""
    stdout = asyncio.StreamReader()
    read_end, write_end = os.pipe()
    try:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(read_end, "rb")
        )
        try:
            process = await _start(spec, write_end)
        except BaseException:
            pipe.close()
            raise
    finally:
        os.close(write_end)
    return LocalProcess(process, stdout, pipe)


async def _start(spec: ProcessSpec, output: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *module_command(spec.module, *spec.arguments, ends_with_parent=True),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env={**without_flag_variables(os.environ), **spec.environment},
        # Ctrl-C in the terminal must reach only the supervisor, which stops processes in order.
        start_new_session=True,
    )


def worker_spec(
    tier: str,
    number: int,
    engine: EngineConfig,
    flags: Iterable[str],
    environment: Mapping[str, str],
) -> ProcessSpec:
    """Returns the process of a worker.

    Args:
        tier: prefill or decode.
        number: the worker's number in its tier.
        engine: config of its engine.
        flags: its other flags, among them the address to listen on.
        environment: variables with the cluster's secrets.
    """
    omitted, variables = set[str](), dict(environment)
    if engine.kv_connector is not None:  # any URL may have a password, which ps would show
        omitted.add("kv_connector")
        variables[variable_of("kv-connector")] = engine.kv_connector
    arguments = (*flags_of_config(engine, omit=omitted), *flags)
    return ProcessSpec(f"{tier}-{number}", f"worker.{tier}", arguments, variables)
