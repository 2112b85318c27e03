"""Prompts that cannot fit cost nothing: neither tokenizing nor a copy."""

from collections.abc import Sequence

import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import SamplingParams
from baton.v1 import worker_pb2
from router.preparation import prepare_request
from router.request import GenerationRequest, RequestLimits
from router.served_model import ServedModel
from tests.support.running_router import tokenizer

MODEL = ServedModel.from_info(
    worker_pb2.GetInfoResponse(model="m", namespace=b"n", block_size=4, vocab_size=1000)
)
LIMITS = RequestLimits(vocab_size=1000, max_model_len=8, max_pool_tokens=16, max_candidates=4)


class Uncopied(Sequence):
    """Ids that may be counted and not read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        raise AssertionError("was read")


def prepare(prompt, tokenizer):
    request = GenerationRequest(
        request_id="r", prompt=prompt, params=SamplingParams(), priority=0, cache_salt=""
    )
    return prepare_request(request, tokenizer, MODEL, LIMITS, deadline=0.0)


async def test_too_many_ids_are_refused_unread():
    with pytest.raises(InvalidArgumentError, match="prompt has 8 tokens"):
        await prepare(Uncopied(), tokenizer())


async def test_text_that_no_tokens_could_hold_is_not_tokenized(monkeypatch):
    strict = tokenizer()
    limit = 8 * strict.longest_token_chars
    with monkeypatch.context() as patch:
        patch.setattr(type(strict), "encode", None)
        with pytest.raises(InvalidArgumentError, match=f"text has {limit + 1} .* most {limit}$"):
            await prepare("a" * (limit + 1), strict)


async def test_what_fits_is_taken():
    assert (await prepare([5] * 7, tokenizer())).prompt_token_ids == (5,) * 7
