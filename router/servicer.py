"""`GenerationServicer`: GenerationService over the pipeline."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from baton.errors import DeadlineExceededError
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.completion import WholeGeneration
from router.config import RouterConfig
from router.fleet import Fleet
from router.pipeline import Pipeline
from router.preparation import decode, encode
from router.tokenizer import Tokenizer
from router.validation import (
    MAX_DETOKENIZE_TOKEN_IDS,
    MAX_TOKENIZE_CHARS,
    check_length,
    check_model,
    check_token_ids,
)
from rpc.deadlines import remaining_s
from rpc.interceptors import name_call

__all__ = ["GenerationServicer"]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The front door; see `protos/baton/v1/generation.proto`.

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

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> generation_pb2.GenerateResponse:
        """Generates a completion and returns it whole."""
        whole = WholeGeneration()
        async with self._responses(request, context) as responses:
            async for response in responses:
                whole.add(response)
        return whole.response()

    async def GenerateStream(  # type: ignore[override]  # noqa: N802 - stubs know only generators
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Generates a completion and streams it.

        Writes rather than yields, so that the deadline covers a client that
        does not read.
        """
        async with self._responses(request, context) as responses:
            async for response in responses:
                await context.write(response)

    async def GetModel(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GetModelRequest, context: Any
    ) -> generation_pb2.GetModelResponse:
        """Describes the served model."""
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

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.TokenizeRequest, context: Any
    ) -> generation_pb2.TokenizeResponse:
        """Turns text into token ids."""
        check_model(request.model, self._config.model_name)
        check_length("text", request.text, MAX_TOKENIZE_CHARS)
        add_special_tokens = request.add_special_tokens or not request.HasField(
            "add_special_tokens"
        )
        token_ids = await encode(
            self._tokenizer, request.text, add_special_tokens=add_special_tokens
        )
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        check_model(request.model, self._config.model_name)
        check_length("token_ids", request.token_ids, MAX_DETOKENIZE_TOKEN_IDS, unit="ids")
        model = self._fleet.model
        vocab_size = model.vocab_size if model else self._tokenizer.vocab_size
        check_token_ids("token_ids", request.token_ids, vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await decode(self._tokenizer, request.token_ids, skip_special_tokens=skip)
        return generation_pb2.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _responses(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[AsyncIterator[generation_pb2.GenerateStreamResponse]]:
        """The pipeline's messages, within the deadline; the request gets an id if it has none.

        Raises:
            DeadlineExceededError: the deadline passed inside the context.
        """
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
            name_call(request.request_id)
        timeout_s = remaining_s(context, self._config.default_timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with (
                asyncio.timeout_at(deadline),
                aclosing(self._pipeline.generate(request, deadline)) as responses,
            ):
                yield responses
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request did not end within {timeout_s:.1f} s"
            ) from None
