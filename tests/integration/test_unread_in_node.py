"""A Node client that leaves its loops with `break`, which does not cancel, that pings each second,
and that is killed while the router waits to write to it.
"""

import asyncio
import logging

import pytest

from router.config.http import HttpConfig
from tests.support.conditions import until
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.grpc_clients.program import running_client
from tests.support.running_router import request, running_router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SEND_TIMEOUT_S = 3
"""A client is killed within it, once the router waits."""
PINGS = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_permit_without_calls": 1}
SCRIPT = [50 + i % 200 for i in range(1000)]
LONG_ID = "n" * 100
"""Each message repeats it, so that a few hundred of them are more than a client takes unread."""


def long_request(name: str):
    message = request("x", request_id=f"{name}{LONG_ID}", max_tokens=len(SCRIPT))
    message.sampling.n, message.sampling.logprobs = 8, 20
    message.sampling.temperature = 1
    return message


async def test_places_of_loops_that_were_left_and_of_a_client_that_is_killed(caplog):
    caplog.set_level(logging.INFO, "baton.rpc")
    decode = FakeDecode(SCRIPT, others=[SCRIPT] * 7)
    config = {
        "http": HttpConfig(port=None, send_timeout_s=SEND_TIMEOUT_S),
        "max_concurrent_requests": 4,
    }

    def codes() -> list[str]:
        lines = [line for line in caplog.messages if "/GenerateStream code=" in line]
        return [line.partition("code=")[2].split()[0] for line in lines]

    async with running_workers(decode), running_router(decode, **config) as router:

        def is_free() -> bool:
            return not router.server.num_calls and not router.service._admission.num_running

        async with running_client("grpc-js", router.server.address, options=PINGS) as program:
            loops = [
                program.start("GenerateStream", long_request(str(i)), leaveAfter=1)
                for i in range(4)
            ]
            for loop in loops:
                await loop.ended.wait()
            await until(lambda: is_free() and len(codes()) == 4)
            assert codes() == ["DEADLINE_EXCEEDED"] * 4
            answer = await program.call("Generate", request("x", max_tokens=2), timeoutS=20)
            assert answer.code.name == "OK"
            # A call that waits for its first token lasts through pings of each second.
            decode.pause_after = 0
            waiting = program.start("Generate", request("x", max_tokens=2), timeoutS=20)
            await decode.changes.until(lambda: len(decode.starts) == 6)
            await asyncio.sleep(5)
            assert not waiting.ended.is_set()
            decode.resume()
            await waiting.ended.wait()
            assert waiting.code.name == "OK"
            caplog.clear()
            left = program.start("GenerateStream", long_request("killed"), leaveAfter=1)
            await left.ended.wait()
            await program.kill()
        await until(lambda: is_free() and codes())
        assert codes() == ["CANCELLED"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
