"""A process of a router that hangs is ended, and starts again."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from baton.up import router_processes
from baton.up.router_processes import RouterProcesses
from router.processes.place import ProcessPlace
from rpc.server_config import ServerConfig
from tests.support.conditions import until
from worker.processes.run_folder import run_folder
from worker.processes.spawn import ProcessSpec


@asynccontextmanager
async def running(monkeypatch, lines):
    """Runs two processes; yields those that supervise them."""
    monkeypatch.setattr(router_processes, "_SILENCE_S", 2.0)
    monkeypatch.setattr(router_processes, "log_writer", lambda _: lines.append)
    with run_folder() as folder:
        places = [ProcessPlace(number, 2, str(folder)) for number in range(2)]
        module = "tests.support.hanging_process"
        specs = {
            place: ProcessSpec(f"router-{place.index}", module, (), place.environment)
            for place in places
        }
        processes = RouterProcesses(specs, ServerConfig())
        await processes.start()
        try:
            yield [processes._processes[place] for place in places]
        finally:
            await processes.stop(asyncio.Event())


@pytest.mark.parametrize(
    ("number", "end"),
    [(signal.SIGSTOP, "hangs; killed"), (signal.SIGUSR1, "hanging_process.py")],
    ids=["stopped", "blocked"],
)
async def test_a_process_that_hangs_is_ended_and_starts_again(monkeypatch, number, end):
    lines = []
    async with running(monkeypatch, lines) as (hanging, other):
        before = hanging.pid, other.pid
        os.kill(before[0], number)
        await until(lambda: hanging.pid not in (None, before[0]))
        assert other.pid == before[1]
    assert any(line.startswith("router-0 | ") and end in line for line in lines), lines
