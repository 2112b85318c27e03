"""`baton scale` against a set of fake workers, and against a worker that is no set."""

import asyncio

from baton import cli
from baton.common.errors import UnavailableError
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.replica_sets import running_set
from tests.support.running_router import script_of

SCRIPT = script_of("The quick brown fox jumps over the lazy dog.")


async def scale(*arguments):
    return await asyncio.to_thread(cli.main, ["scale", *arguments])


async def test_it_prints_the_addresses_of_the_workers(capsys):
    async with running_set(SCRIPT, 1) as replicas:
        assert await scale(replicas.address, "--data-parallel-size", "3") == 0
        expected = [worker.address for worker in replicas.workers]
        assert len(expected) == 3
        assert capsys.readouterr().out.split() == expected
        assert await scale(replicas.address, "-dp", "0") == 0
        assert capsys.readouterr().out == ""


async def test_it_says_that_workers_still_start(capsys, monkeypatch):
    async with running_set(SCRIPT, 0) as replicas:
        may_start = asyncio.Event()
        monkeypatch.setattr(FakeDecode, "start", lambda self: may_start.wait())
        assert await scale(replicas.address, "-dp", "2", "--timeout-s", "0") == 1
        assert capsys.readouterr().out == "2 workers still start or drain\n"
        may_start.set()


async def test_it_says_that_there_is_no_room(capsys, monkeypatch):
    async def start(_):
        raise UnavailableError("decode-0 could not be started: no room")

    async with running_set(SCRIPT, 0) as replicas:
        monkeypatch.setattr(FakeDecode, "start", start)
        assert await scale(replicas.address, "-dp", "1") == 1
    assert "decode-0 could not be started: no room" in capsys.readouterr().err


async def test_it_says_that_a_worker_is_no_set(capsys):
    worker = FakeDecode(SCRIPT)
    async with running_workers(worker):
        assert await scale(worker.address, "-dp", "2") == 1
    assert f"{worker.address} was not started with --data-parallel-size" in capsys.readouterr().err
