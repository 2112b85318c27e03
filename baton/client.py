"""`Client` and `AsyncClient`: clients of a running router.

Both build requests and read responses with the pure functions of `baton.wire`.
They differ in how a call is awaited, streamed and closed.
"""

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc

from baton.errors import InternalError
from baton.results import CompletionChunk, ModelDescription, RequestOutput
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire import (
    Params,
    RequestOptions,
    build_request,
    parse_chunk,
    parse_model,
    parse_output,
)
from rpc.channels import CHANNEL_OPTIONS, open_channel
from rpc.errors import from_rpc_error

__all__ = ["AsyncClient", "Client"]


@contextmanager
def _baton_errors() -> Iterator[None]:
    """Turns errors of gRPC into the matching errors of `baton.errors`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _check_finished(last_chunk: CompletionChunk | None) -> None:
    """Raises `InternalError` if a stream ended without its last chunk."""
    if last_chunk is None or last_chunk.usage is None:
        raise InternalError("the server ended the stream before the generation ended")


class Client:
    """A blocking client of a router, usable from several threads.

    Every method raises the errors of `baton.errors` that
    `baton.v1.GenerationService` documents. A call that takes longer than
    `timeout_s` raises `DeadlineExceededError`; None leaves the limit to the
    server.

    Args:
        address: the router's `host:port`.
        model: the model to request; empty for the served one.
    """

    def __init__(self, address: str, *, model: str = "") -> None:
        self._model = model
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Completes `prompt`, a text or token ids, and returns the whole result.

        `baton.wire` documents `params` (`Params`) and `options` (`RequestOptions`).
        """
        request = build_request(prompt, params, self._model, **options)
        with _baton_errors():
            response = self._stub.Generate(request, timeout=timeout_s)
        return parse_output(response, prompt)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[CompletionChunk, None, None]:
        """Completes `prompt` and yields chunks as they come; chunks of several
        candidates come in any order.

        Leaving the loop early, or closing the generator, cancels the request.
        """
        request = build_request(prompt, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    def _read_stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> Generator[CompletionChunk, None, None]:
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        chunk = None
        try:
            with _baton_errors():
                for response in call:
                    chunk = parse_chunk(response)
                    yield chunk
            _check_finished(chunk)
        finally:
            call.cancel()

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for `text`."""
        request = generation_pb2.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )
        with _baton_errors():
            return list(self._stub.Tokenize(request, timeout=timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """The text of `token_ids`."""
        request = generation_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with _baton_errors():
            return self._stub.Detokenize(request, timeout=timeout_s).text

    def get_model(self, *, timeout_s: float | None = None) -> ModelDescription:
        """Describes the served model."""
        request = generation_pb2.GetModelRequest(model=self._model)
        with _baton_errors():
            return parse_model(self._stub.GetModel(request, timeout=timeout_s))

    def close(self) -> None:
        """Ends the running calls and closes the connection. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for coroutines: the same methods, awaited. Must be created in the
    event loop that uses it.

    Args:
        address: the router's `host:port`.
        model: the model to request; empty for the served one.
    """

    def __init__(self, address: str, *, model: str = "") -> None:
        self._model = model
        self._channel = open_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Completes `prompt`, a text or token ids, and returns the whole result.

        `baton.wire` documents `params` (`Params`) and `options` (`RequestOptions`).
        """
        request = build_request(prompt, params, self._model, **options)
        with _baton_errors():
            response = await self._stub.Generate(request, timeout=timeout_s)
        return parse_output(response, prompt)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Completes `prompt` and yields chunks as they come; chunks of several
        candidates come in any order.

        Closing the generator (`contextlib.aclosing`), or cancelling the task
        that reads it, cancels the request.
        """
        request = build_request(prompt, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    async def _read_stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[CompletionChunk, None]:
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        chunk = None
        try:
            with _baton_errors():
                async for response in call:
                    chunk = parse_chunk(response)
                    yield chunk
            _check_finished(chunk)
        finally:
            call.cancel()

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for `text`."""
        request = generation_pb2.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )
        with _baton_errors():
            response = await self._stub.Tokenize(request, timeout=timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """The text of `token_ids`."""
        request = generation_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with _baton_errors():
            response = await self._stub.Detokenize(request, timeout=timeout_s)
        return response.text

    async def get_model(self, *, timeout_s: float | None = None) -> ModelDescription:
        """Describes the served model."""
        request = generation_pb2.GetModelRequest(model=self._model)
        with _baton_errors():
            response = await self._stub.GetModel(request, timeout=timeout_s)
        return parse_model(response)

    async def close(self) -> None:
        """Ends the running calls and closes the connection. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
