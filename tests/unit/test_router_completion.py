"""What a client is told of its tokens."""

import pytest

from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2, decode_pb2
from router.completion import Completion
from router.request import RoutedRequest
from tests.support.running_router import script_of, tokenizer

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def completion(**params):
    request = RoutedRequest(
        request_id="r",
        worker_id="r/1",
        namespace=b"",
        prompt_token_ids=(5, 6),
        block_keys=(),
        block_size=4,
        params=SamplingParams(**params),
        stop_token_ids=(),
        priority=0,
        cache_salt="",
        deadline=0.0,
    )
    return Completion(request, tokenizer(), arrival=0.0)


def output(token_ids, finish_reason=0, **fields):
    return decode_pb2.DecodeOutput(token_ids=token_ids, finish_reason=finish_reason, **fields)


async def test_tokens_after_a_stop_text_are_not_told():
    token_ids = script_of("a.b.c")
    response = completion(stop=["b"]).add(output(token_ids, LENGTH))
    assert list(response.token_ids) == token_ids[:3]
    assert response.text == "a."
    assert response.finish_reason == STOP
    assert response.matched_stop.text == "b"
    assert response.usage.completion_tokens == 3


async def test_text_held_back_for_a_stop_comes_at_the_end():
    part = completion(stop=["b!"])
    first = part.add(output(script_of("ab")))
    last = part.add(output([], LENGTH))
    assert (first.text, last.text) == ("a", "b")
    assert last.finish_reason == LENGTH
    assert not last.HasField("matched_stop")


async def test_half_a_character_waits_for_the_other_half():
    token_ids = [token_id for byte in "€".encode() for token_id in byte_token(byte)]
    part = completion()
    texts = [part.add(output([token_id])).text for token_id in token_ids]
    assert texts == ["", "", "€"]


def byte_token(byte):
    """The token of one byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    symbol = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return [tokenizer()._backend.token_to_id(symbol)]


@pytest.mark.parametrize(("reason", "matched"), [(STOP, 7), (LENGTH, 0)])
async def test_stopping_token_is_told(reason, matched):
    response = completion().add(output([9, 7], reason))
    assert response.matched_stop.token_id == matched
    assert response.finish_reason == reason


async def test_only_the_first_output_tells_of_the_prompt():
    part = completion()
    prompt = common_pb2.Timings(queue_ms=1, prefill_ms=2, transfer_ms=3)
    part.add(output([9], cached_tokens=4, timings=prompt))
    handed_over = common_pb2.Timings(queue_ms=50, prefill_ms=60, load_ms=5)
    part.add(output([9], cached_tokens=8, timings=handed_over))
    resumed = common_pb2.Timings(load_ms=500)
    last = part.add(output([9], LENGTH, timings=resumed))
    assert last.usage.cached_tokens == 4
    assert last.usage.prompt_tokens == 2
    timings = last.timings
    assert (timings.queue_ms, timings.prefill_ms, timings.transfer_ms) == (1, 2, 3)
    assert timings.load_ms == 5
