"""`GenerationServicer`: GenerationService over the pipeline."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from typing_extensions import override

from baton.errors import DeadlineExceededError
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.completion import WholeGeneration
from router.config import RouterConfig
from router.fleet import Fleet
from router.pipeline import Pipeline
from router.tokenizer import Tokenizer
from router.validation import (
    MAX_DETOKENIZE_TOKEN_IDS,
    MAX_TOKENIZE_CHARS,
    check_length,
    check_model,
    check_token_ids,
)
from rpc.interceptors import name_call

__all__ = ["GenerationServicer"]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The service that clients call; `protos/baton/v1/generation.proto` documents the methods.

    Args:
        config: the router's.
        tokenizer: the model's.
        fleet: describes the served model.
        pipeline: runs the requests.
    """

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, fleet: Fleet, pipeline: Pipeline
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._pipeline = pipeline

    @override
    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> generation_pb2.GenerateResponse:
        whole = WholeGeneration()
        async with self._responses(request, context) as responses:
            async for response in responses:
                whole.add(response)
        return whole.response()

    @override
    async def GenerateStream(  # type: ignore[override]  # the stubs expect a generator
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Writes the messages instead of yielding them, so that the deadline also ends a call
        whose client does not read.
        """
        async with self._responses(request, context) as responses:
            async for response in responses:
                await context.write(response)

    @override
    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Any
    ) -> generation_pb2.GetModelResponse:
        check_model(request.model, self._config.model_name)
        model, limits = self._fleet.require_model()
        return generation_pb2.GetModelResponse(
            model=model.model,
            max_model_len=limits.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            block_size=model.block_size,
            namespace=model.namespace.hex(),
        )

    @override
    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Any
    ) -> generation_pb2.TokenizeResponse:
        check_model(request.model, self._config.model_name)
        check_length("text", request.text, MAX_TOKENIZE_CHARS)
        add_special_tokens = request.add_special_tokens or not request.HasField(
            "add_special_tokens"
        )
        token_ids = await self._tokenizer.encode_async(
            request.text, add_special_tokens=add_special_tokens
        )
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    @override
    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        check_model(request.model, self._config.model_name)
        check_length("token_ids", request.token_ids, MAX_DETOKENIZE_TOKEN_IDS, unit="ids")
        model = self._fleet.model
        vocab_size = model.vocab_size if model else self._tokenizer.vocab_size
        check_token_ids("token_ids", request.token_ids, vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._tokenizer.decode_async(request.token_ids, skip_special_tokens=skip)
        return generation_pb2.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _responses(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[AsyncIterator[generation_pb2.GenerateStreamResponse]]:
        """Opens the pipeline's messages within the deadline. A request without an id gets one.

        Raises:
            DeadlineExceededError: the deadline passed while the context was open.
        """
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
            name_call(request.request_id)
        timeout_s = _timeout_s(context, self._config.default_timeout_s)
        messages = self._pipeline.generate(request, time.monotonic() + timeout_s)
        try:
            async with asyncio.timeout(timeout_s), aclosing(messages) as responses:
                yield responses
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request did not end within {timeout_s:.1f} s"
            ) from None


def _timeout_s(context: grpc.aio.ServicerContext[Any, Any], longest_s: float) -> float:
    """Seconds until the caller's deadline, at most `longest_s`.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return longest_s
    if remaining_s <= 0:
        raise DeadlineExceededError("the call's deadline has passed")
    return min(remaining_s, longest_s)
