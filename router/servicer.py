"""`GenerationServicer`: GenerationService over the models' pipelines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from typing_extensions import override

from baton.common.errors import DeadlineExceededError, Reason, ResourceExhaustedError
from baton.common.request.answer import CandidateOutput, JoinedAnswer
from baton.common.request.generation import GenerationRequest
from baton.common.request.known_fields import check_known
from baton.common.request.slo import Slo
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.chat.chat_request import ChatRequest
from router.generation_wire import request_from_proto, stream_response, whole_response
from router.models import Models
from router.requests.validation import (
    MAX_DETOKENIZE_TOKEN_IDS,
    MAX_TOKENIZE_CHARS,
    check_length,
    check_token_ids,
)
from rpc.channels import MAX_MESSAGE_BYTES
from rpc.interceptors import name_call
from rpc.logs import CURRENT_CALL

__all__ = ["GenerationServicer"]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The service that clients call; `protos/baton/v1/generation.proto` documents the methods.

    Args:
        models: the served models, which run the requests.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    @override
    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> generation_pb2.GenerateResponse:
        is_several = request.WhichOneof("prompt") == "prompts"
        num_prompts = len(request.prompts.prompts) if is_several else 1
        num_bytes = 0  # no more than the answer has
        async with self._opened(request, context) as (opened, outputs):
            answers = [JoinedAnswer() for _ in range(num_prompts)]
            async for output in outputs:
                answers[output.prompt_index].add(output)
                num_bytes += len(output.token_ids) + len(output.text)
                _check_answer_size(num_bytes)
        if is_several:
            response = generation_pb2.GenerateResponse(
                request_id=opened.request_id, responses=map(whole_response, answers)
            )
        else:
            response = whole_response(answers[0])
        _check_answer_size(response.ByteSize())
        return response

    @override
    async def GenerateStream(  # type: ignore[override]  # the stubs expect a generator
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Writes the messages instead of yielding them, so that the deadline also ends a call
        whose client does not read.
        """
        async with self._opened(request, context) as (_, outputs):
            async for output in outputs:
                await context.write(stream_response(output))

    @override
    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Any
    ) -> generation_pb2.GetModelResponse:
        check_known(request, "router", "client")
        model, limits = self._models.find(request.model).fleet.require_model()
        return generation_pb2.GetModelResponse(
            model=model.model,
            max_model_len=limits.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            block_size=model.block_size,
            kv_namespace=model.namespace.hex(),
        )

    @override
    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Any
    ) -> generation_pb2.TokenizeResponse:
        check_known(request, "router", "client")
        model = self._models.find(request.model)
        check_length("text", request.text, MAX_TOKENIZE_CHARS)
        add_special_tokens = request.add_special_tokens or not request.HasField(
            "add_special_tokens"
        )
        token_ids = await model.encode(request.text, add_special_tokens=add_special_tokens)
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    @override
    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        check_known(request, "router", "client")
        model = self._models.find(request.model)
        check_length("token_ids", request.token_ids, MAX_DETOKENIZE_TOKEN_IDS, unit="ids")
        check_token_ids("token_ids", request.token_ids, model.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await model.decode(request.token_ids, skip_special_tokens=skip)
        return generation_pb2.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _opened(
        self, message: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[tuple[GenerationRequest | ChatRequest, AsyncIterator[CandidateOutput]]]:
        """Opens the outputs of a request within the call's deadline."""
        check_known(message, "router", "client")
        model = self._models.find(message.model)
        _note_slo(context)
        limits = message.stopping
        is_stated = limits.HasField("max_tokens")
        max_tokens = limits.max_tokens if is_stated else model.default_max_tokens
        # Before it waits for its turn, and before the message is read: a refusal must come at once
        # and cost little.
        model.check_load(_timeout_s(context), max_tokens, message.priority)
        await model.enter(_timeout_s(context))
        request = await request_from_proto(message)
        async with model.outputs(request, _timeout_s(context)) as outputs:
            name_call(request.request_id)
            yield request, outputs


def _check_answer_size(num_bytes: int) -> None:
    """Refuses an answer that one message cannot hold.

    Raises:
        ResourceExhaustedError: names the limit, and what to do.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ResourceExhaustedError(
            f"the answer has more than {MAX_MESSAGE_BYTES} bytes, the most of Generate; use "
            "GenerateStream, or lower max_tokens, n, logprobs or the number of prompts",
            reason=Reason.ANSWER_TOO_LARGE,
        )


def _note_slo(context: Any) -> None:
    """Takes the objectives in a call's metadata.

    Raises:
        InvalidArgumentError: one is bad; names it.
    """
    call = CURRENT_CALL.get()
    if call is not None:
        call.slo = Slo.from_headers(context.invocation_metadata() or ())


def _timeout_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline; None if it has none.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceededError(
            "the call's deadline has passed", reason=Reason.REQUEST_DEADLINE
        )
    return remaining_s
