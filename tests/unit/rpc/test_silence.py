"""`wait_until_silent`: a server that answers late is not silent."""

import asyncio

import pytest

from rpc import probe
from rpc.probe import wait_until_silent


class Server:
    """Answers each question after some ticks, the next of which begins with the answer.

    Args:
        delays: ticks until the answers; None for none. A negative one fails at once.
    """

    def __init__(self, monkeypatch, *delays):
        self.num_ticks = 0
        self.delays = list(delays)
        sleep = asyncio.sleep

        async def tick(_):
            self.num_ticks += 1
            for _ in range(3):  # the answer arrives before the next tick
                await sleep(0)

        monkeypatch.setattr(probe.asyncio, "sleep", tick)
        monkeypatch.setattr(probe, "_has_answered", self.answer)
        self._sleep = sleep

    async def answer(self, stub, timeout_s):
        delay = self.delays.pop(0)
        until = None if delay is None else self.num_ticks + delay
        while until is None or self.num_ticks < until:
            await self._sleep(0)
        return delay is None or delay >= 0


@pytest.mark.parametrize(
    ("delays", "num_ticks"),
    [
        ([None], 10),
        ([0, 0, None], 12),
        ([8, 8, 8, None], 3 * 9 + 10),  # busy, then silent
        ([-1] * 10, 10),  # nobody listens
        ([-1] * 9 + [0] + [-1] * 10, 20),
    ],
)
async def test_a_server_is_silent_after_ten_ticks_without_an_answer(monkeypatch, delays, num_ticks):
    server = Server(monkeypatch, *delays)
    await wait_until_silent("127.0.0.1:1", 5.0)
    assert server.num_ticks == num_ticks
    assert not server.delays
