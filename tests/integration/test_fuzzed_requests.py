"""Requests with any bytes, over HTTP and gRPC: no crash, no 500 or INTERNAL, no leak.

A failure names the number of the message; the same seed and number make the same message.
"""

import random

import pytest

from baton.v1 import generation_pb2
from tests.support.answer_checks import check_answer
from tests.support.asgi_calls import call_app
from tests.support.fuzzed_router import FuzzedRouter, fuzzed_router
from tests.support.odd_messages import odd_bytes, odd_generate_request, odd_message
from tests.support.odd_requests import odd_request
from tests.support.rpc_calls import DirectCalls, status_over_channel

NUM_HTTP = 5_000
NUM_DIRECT = 6_000
NUM_OVER_CHANNEL = 1_500
REFUSALS = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS")
METHODS = ("Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModel")
WEIGHTS = (3, 3, 1, 1, 1)


async def fuzz_http(router: FuzzedRouter, seed: int, count: int) -> None:
    """Sends HTTP requests to the application without sockets."""
    app = router.http_server.server._app

    async def call(number: int) -> str:
        request = odd_request(random.Random(f"{seed}-{number}"))
        answer = await call_app(app, request)
        try:
            check_answer(request, answer)
        except Exception as error:
            raise AssertionError(f"message {number} of seed {seed}: {request}") from error
        return str(answer.status)

    await router.run(count, call)


async def fuzz_rpc(router: FuzzedRouter, seed: int, count: int, status_of) -> None:
    """Calls gRPC's methods with bytes of messages."""

    async def call(number: int) -> str:
        rng = random.Random(f"{seed}-{number}")
        method = rng.choices(METHODS, WEIGHTS)[0]
        if method.startswith("Generate"):
            is_wild = rng.random() < 0.2
            kind = generation_pb2.GenerateRequest
            message = odd_message(rng, kind) if is_wild else odd_generate_request(rng)
        else:
            message = odd_message(rng, getattr(generation_pb2, f"{method}Request"))
        status = await status_of(method, odd_bytes(rng, message))
        assert status == "OK" or status in REFUSALS, (
            f"message {number} of seed {seed}: {status} of {method}, {message}"
        )
        return status

    await router.run(count, call)


async def test_a_few_thousand_messages():
    async with fuzzed_router() as router:
        await fuzz_http(router, 1, 800)
        direct = DirectCalls(router.http_server.router.service.models)
        await fuzz_rpc(router, 1, 1600, direct.status)
        # Requests that are right are among them.
        assert router.counts["200"] > 50
        assert router.counts["OK"] > 100
        assert router.counts["400"] > 200
        assert router.counts["INVALID_ARGUMENT"] > 200


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_thousands_of_http_requests():
    async with fuzzed_router() as router:
        await fuzz_http(router, 2, NUM_HTTP)
        assert router.counts["200"] > NUM_HTTP / 20


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_thousands_of_rpc_messages():
    async with fuzzed_router() as router:
        direct = DirectCalls(router.http_server.router.service.models)
        await fuzz_rpc(router, 3, NUM_DIRECT, direct.status)
        channel = router.http_server.router.channel

        async def status(method: str, data: bytes) -> str:
            return await status_over_channel(channel, method, data)

        await fuzz_rpc(router, 4, NUM_OVER_CHANNEL, status)
        assert router.counts["OK"] > NUM_DIRECT / 10
