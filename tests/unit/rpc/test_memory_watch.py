"""The warning before a process is killed for lack of memory."""

import asyncio

import pytest

from rpc.process_limits import MemoryWatch


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [
        ([None, None], 0),
        ([0.5, 0.94], 0),
        ([0.5, 0.96, 0.99, 0.9, 0.97], 1),
        ([0.96, 0.8, 0.97], 2),
    ],
)
def test_nearly_used_up_memory_is_a_warning_once_until_it_falls(caplog, shares, warnings):
    values = iter(shares)
    watch = MemoryWatch(lambda: next(values))
    for _ in shares:
        watch.check()
    assert len(caplog.records) == warnings
    assert all("exit code 137" in record.message for record in caplog.records)
    assert all("mem_limit" in record.message for record in caplog.records)


async def test_nothing_is_watched_without_a_limit():
    await asyncio.wait_for(MemoryWatch(lambda: None).run(), 20)
