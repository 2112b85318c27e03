"""How often the router measures the lateness of its event loop."""

import asyncio

import pytest

from router.requests.pace import Pace


async def test_an_idle_router_measures_less_often_until_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace, intervals = Pace(), list[float]()

    async def sleep(seconds: float) -> None:
        intervals.append(seconds)
        pace.is_used = len(intervals) == 250
        if len(intervals) == 300:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await pace.run()
    assert intervals == [0.01] * 100 + [0.1] * 150 + [0.01] * 50
