"""`Client` and `AsyncClient`: clients of a running router.

Both build requests and read responses with the pure functions of `baton.common.request.wire`.
They share the connection and its options, and differ in how a call is awaited, streamed and closed.
"""

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack, overload

import grpc

from baton.common.errors import InternalError
from baton.common.request.prompts import Prompt, TextPrompt, TokensPrompt
from baton.common.request.results import CompletionChunk, ModelDescription, RequestOutput
from baton.common.request.wire import (
    ChatRequestOptions,
    Params,
    RequestOptions,
    build_chat_request,
    build_request,
    parse_chunk,
    parse_model,
    parse_output,
    parse_response,
)
from baton.common.security.client import ClientTls, TlsOptions, key_metadata
from baton.v1 import generation_pb2, generation_pb2_grpc
from rpc.channels import open_blocking_channel, open_channel
from rpc.errors import from_rpc_error

__all__ = ["AsyncClient", "Client"]

Messages = Sequence[Mapping[str, Any]]
SeveralPrompts = list[str] | list[list[int]] | list[TextPrompt] | list[TokensPrompt] | list[Prompt]


@contextmanager
def _baton_errors() -> Iterator[None]:
    """Turns errors of gRPC into the matching errors of `baton.common.errors`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class _Ends:
    """Counts the prompts of a stream that have not had their last chunk."""

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._num_left = len(request.prompts.prompts) or 1

    def parse(self, response: generation_pb2.GenerateStreamResponse) -> CompletionChunk:
        """Returns the next chunk."""
        chunk = parse_chunk(response)
        self._num_left -= chunk.usage is not None
        return chunk

    def check(self) -> None:
        """Raises `InternalError` if the stream ended without a prompt's last chunk."""
        if self._num_left > 0:
            raise InternalError("the server ended the stream before the generation ended")


class _BaseClient:
    """The connection of a client and the options of its calls. `Client` has the arguments."""

    _open_channel: Callable[..., Any]

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        **tls: Unpack[TlsOptions],
    ) -> None:
        self._model = model
        self._metadata = key_metadata(api_key)
        files = ClientTls(**tls)
        self._channel = self._open_channel(
            address, files.channel_credentials(), options=files.channel_options()
        )
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def _start(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Starts a call of `baton.v1.GenerationService`."""
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)

    def _tokenize_request(self, text: str, add_special_tokens: bool) -> Any:
        return generation_pb2.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )

    def _detokenize_request(self, token_ids: Sequence[int], skip_special_tokens: bool) -> Any:
        return generation_pb2.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )


class Client(_BaseClient):
    """A blocking client of a router, usable from several threads.

    Every method raises the errors of `baton.common.errors` that `baton.v1.GenerationService`
    documents, with their `reason`, `field` and `retry_after_s`. A call that takes longer than
    `timeout_s` raises `DeadlineExceededError`; None leaves the limit to the server.

    Args:
        address: the router's `host:port`.
        model: the model to request; empty for the served one.
        api_key: is sent as a bearer token.
        tls: files for TLS: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_server_name`, as
            `baton.common.security.client.ClientTls` describes them.

    Raises:
        ConfigurationError: a file or the key is bad.
    """

    _open_channel = staticmethod(open_blocking_channel)

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompt: SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompt: Prompt | SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Completes a prompt and returns the whole result; a list of prompts, a list of results.

        A prompt is a text, a list of token ids, or a dictionary as `baton.prompts.TextPrompt` or
        `baton.prompts.TokensPrompt`. `baton.common.request.wire` documents `params` (`Params`)
        and `options` (`RequestOptions`).
        """
        request = build_request(prompt, params, self._model, **options)
        return parse_response(self._call("Generate", request, timeout_s), prompt)

    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> RequestOutput:
        """Answers a chat and returns the whole result, whose text is as generated: reasoning and
        tool calls are parts of it.

        `messages` are those of OpenAI's chat API. `baton.common.request.wire` documents
        `params` (`Params`) and `options` (`ChatRequestOptions`).
        """
        request = build_chat_request(messages, params, self._model, **options)
        return parse_output(self._call("Generate", request, timeout_s))

    def stream(
        self,
        prompt: Prompt | SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[CompletionChunk, None, None]:
        """Completes a prompt or several and yields chunks as they come; chunks of several
        prompts and candidates come in any order.

        Leaving the loop early, or closing the generator, cancels the request.
        """
        request = build_request(prompt, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    def stream_chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> Generator[CompletionChunk, None, None]:
        """Answers a chat as `chat` does, and yields chunks as `stream` does."""
        request = build_chat_request(messages, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for `text`."""
        request = self._tokenize_request(text, add_special_tokens)
        return list(self._call("Tokenize", request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """The text of `token_ids`."""
        request = self._detokenize_request(token_ids, skip_special_tokens)
        text: str = self._call("Detokenize", request, timeout_s).text
        return text

    def get_model(self, *, timeout_s: float | None = None) -> ModelDescription:
        """Describes the served model."""
        request = generation_pb2.GetModelRequest(model=self._model)
        return parse_model(self._call("GetModel", request, timeout_s))

    def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Returns the response of a method that has one."""
        with _baton_errors():
            return self._start(method, request, timeout_s)

    def _read_stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> Generator[CompletionChunk, None, None]:
        call = self._start("GenerateStream", request, timeout_s)
        ends = _Ends(request)
        try:
            with _baton_errors():
                for response in call:
                    yield ends.parse(response)
            ends.check()
        finally:
            call.cancel()

    def close(self) -> None:
        """Ends the running calls and closes the connection. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(_BaseClient):
    """`Client` for coroutines: the same arguments and methods, awaited. It must be created in the
    event loop that uses it.
    """

    _open_channel = staticmethod(open_channel)

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput: ...

    @overload
    async def generate(
        self,
        prompt: SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]: ...

    async def generate(
        self,
        prompt: Prompt | SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Does what `Client.generate` does."""
        request = build_request(prompt, params, self._model, **options)
        return parse_response(await self._call("Generate", request, timeout_s), prompt)

    async def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> RequestOutput:
        """Does what `Client.chat` does."""
        request = build_chat_request(messages, params, self._model, **options)
        return parse_output(await self._call("Generate", request, timeout_s))

    def stream(
        self,
        prompt: Prompt | SeveralPrompts,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Completes a prompt or several and yields chunks as they come; chunks of several
        prompts and candidates come in any order.

        Closing the generator (`contextlib.aclosing`), or cancelling the task that reads it, cancels
        the request.
        """
        request = build_request(prompt, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    def stream_chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Answers a chat as `chat` does, and yields chunks as `stream` does."""
        request = build_chat_request(messages, params, self._model, **options)
        return self._read_stream(request, timeout_s)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for `text`."""
        request = self._tokenize_request(text, add_special_tokens)
        return list((await self._call("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """The text of `token_ids`."""
        request = self._detokenize_request(token_ids, skip_special_tokens)
        text: str = (await self._call("Detokenize", request, timeout_s)).text
        return text

    async def get_model(self, *, timeout_s: float | None = None) -> ModelDescription:
        """Describes the served model."""
        request = generation_pb2.GetModelRequest(model=self._model)
        return parse_model(await self._call("GetModel", request, timeout_s))

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Returns the response of a method that has one."""
        with _baton_errors():
            return await self._start(method, request, timeout_s)

    async def _read_stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[CompletionChunk, None]:
        call = self._start("GenerateStream", request, timeout_s)
        ends = _Ends(request)
        try:
            with _baton_errors():
                async for response in call:
                    yield ends.parse(response)
            ends.check()
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the running calls and closes the connection. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
