"""Endpoints of the load generator: tokens are counted by their ids, and losses are errors."""

import pytest

from baton.common.errors import ConfigurationError, UnavailableError
from benchmarks.load import LoadLimits, run_load
from benchmarks.request import BenchRequest
from benchmarks.targets import open_target, opened_target
from tests.support.fake_completions import running_fake_completions
from tests.support.fake_generation import running_fake_generation

LIMITS = LoadLimits(max_concurrency=None, request_timeout_s=30)
THREE_TOKENS = BenchRequest((1, 2), 3)


async def record_of(url, request=THREE_TOKENS):
    async with opened_target(url, "") as target:
        (record,) = await run_load([request], target, LIMITS)
        return record


@pytest.fixture
def endpoint():
    with running_fake_completions() as server:
        yield server


def by_ids(*token_ids):
    return {"choices": [{"text": "x", "token_ids": list(token_ids)}]}


def by_usage(count):
    return {"choices": [{"text": "x"}], "usage": {"completion_tokens": count}}


TEXT = {"choices": [{"text": "x"}]}


@pytest.mark.parametrize(
    ("events", "num_first"),
    [
        ([by_ids(4), by_ids(5, 6), {"choices": [], "usage": {"completion_tokens": 3}}], 1),
        ([by_usage(2), by_usage(3)], 2),
        ([TEXT, TEXT, TEXT, {"choices": [], "usage": {"completion_tokens": 3}}], 1),
    ],
)
async def test_tokens_are_counted_by_the_servers_ids_or_usage(endpoint, events, num_first):
    endpoint.events = [*events, "[DONE]"]
    record = await record_of(endpoint.url)
    assert record.error is None
    times = record.token_times_s
    assert len(times) == 3
    assert times.count(times[0]) >= num_first
    assert record.sent_s <= times[0] <= times[-1] <= record.ended_s


async def test_the_body_requests_an_exact_number_of_tokens_and_their_ids(endpoint):
    endpoint.events = [by_ids(4, 5, 6), "[DONE]"]
    await record_of(endpoint.url)
    (body,) = endpoint.bodies
    assert body["prompt"] == [1, 2]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert body["return_token_ids"]


async def test_the_api_key_is_sent(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint.events = [by_ids(4, 5, 6), "[DONE]"]
    await record_of(endpoint.url)
    assert endpoint.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([by_ids(4), "[DONE]"], "1 tokens came, 3 were asked for"),
        ([by_ids(4, 5, 6, 7), "[DONE]"], "4 tokens came, 3 were asked for"),
        ([by_ids(4, 5, 6)], "the stream ended before"),
        ([TEXT, TEXT, TEXT, "[DONE]"], "the server sends neither token ids nor usage"),
        ([TEXT, by_usage(3), "[DONE]"], "1 messages brought 3 tokens"),
        ([{"error": {"message": "out of memory"}}, "[DONE]"], "out of memory"),
        (["<html>", "[DONE]"], "the server sent no JSON object: <html>"),
    ],
)
async def test_missing_extra_and_malformed_events_are_errors(endpoint, events, message):
    endpoint.events = events
    record = await record_of(endpoint.url)
    assert message in record.error


async def test_a_refusal_is_an_error_with_its_reason(endpoint):
    endpoint.status, endpoint.events = 429, ["too many"]
    assert (await record_of(endpoint.url)).error.startswith("HTTP 429: ")


async def test_an_absent_http_server_is_an_error():
    async with opened_target("http://127.0.0.1:1/v1", "") as target:
        with pytest.raises(UnavailableError, match="cannot reach http:"):
            await target.describe()
        (record,) = await run_load([THREE_TOKENS], target, LIMITS)
    assert record.error.startswith("ConnectError")


async def test_a_router_streams_tokens():
    with running_fake_generation() as server:
        url = f"grpc://{server.address}"
        async with opened_target(url, "") as target:
            description = await target.describe()
        assert (description.model, description.vocab_size) == ("fake", 300)
        record = await record_of(url)
        assert record.error is None
        assert len(record.token_times_s) == 3
        assert record.token_times_s[1] == record.token_times_s[2]
        (request,) = server.requests
        assert list(request.token_ids.ids) == [1, 2]
        assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (3, True)
        short = await record_of(url, BenchRequest((1,), 4))
        assert short.error == "3 tokens came, 4 were asked for"


async def test_an_absent_router_is_an_error():
    assert (await record_of("grpc://127.0.0.1:1")).error.startswith("UNAVAILABLE")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "grpc://", "grpc://host:1/v1", "ftp://host/v1"])
def test_a_malformed_target_is_refused(url):
    with pytest.raises(ConfigurationError, match="--target is"):
        open_target(url, "")
