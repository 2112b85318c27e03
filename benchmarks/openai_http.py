"""An OpenAI-style HTTP endpoint: `POST /completions` with a prompt of token ids, streamed."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx2
from typing_extensions import override

from baton.cli.openai_endpoint import (
    client_options,
    ended_early,
    first_model,
    is_end,
    parse_base_url,
    parse_line,
    raise_for_status,
)
from baton.common.errors import BatonError, UnavailableError
from baton.common.security.client import ClientTls
from benchmarks.request import BenchRequest, EndpointDescription, LostRequestError, Target

__all__ = ["OpenAiTarget", "TokenCounter"]

_CONNECT_TIMEOUT_S = 30.0
_PLAIN = ClientTls()


class OpenAiTarget(Target):
    """An OpenAI-style endpoint.

    Args:
        url: its base URL, such as `http://127.0.0.1:8000/v1`.
        model: the model to ask for; empty for the first that the endpoint lists.
        api_key: key of its API; None takes the variable OPENAI_API_KEY, if it is set.
        tls: how it is verified.
    """

    def __init__(
        self, url: str, model: str, api_key: str | None = None, tls: ClientTls = _PLAIN
    ) -> None:
        self._url, self._model = parse_base_url(url), model
        # No limits here: the sender of a request limits its whole time.
        limits: dict[str, Any] = {
            "timeout": httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        }
        options = client_options(self._url, api_key, tls=tls)
        self._client = httpx2.AsyncClient(**(options | limits))

    @override
    async def describe(self) -> EndpointDescription:
        if not self._model:
            url = f"{self._url}/models"
            try:
                response = await self._client.get(url, timeout=_CONNECT_TIMEOUT_S)
            except httpx2.HTTPError as error:
                raise UnavailableError(f"cannot reach {url}: {error}") from error
            self._model = first_model(response)
        return EndpointDescription(self._model, vocab_size=None)

    @override
    async def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        counter = TokenCounter()
        url = f"{self._url}/completions"
        try:
            async with self._client.stream("POST", url, json=self._body(request)) as response:
                if response.is_error:
                    await response.aread()
                raise_for_status(response)
                async for line in response.aiter_lines():
                    if is_end(line):
                        counter.check()
                        return
                    if (event := parse_line(line)) is not None:
                        yield counter.count_tokens(event)
                raise ended_early()
        except BatonError as error:
            raise LostRequestError(error.message) from error
        except httpx2.HTTPError as error:
            raise LostRequestError(f"{type(error).__name__}: {error}") from error

    @override
    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        """Returns OpenAI's fields, and those by which vLLM and others report token counts."""
        return {
            "model": self._model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }


class TokenCounter:
    """Counts the tokens of each event of a stream.

    It counts the event's token ids, or else uses the running usage. A server that sends neither
    must send one token per message, which the usage at the end must confirm.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_unproven = 0

    def count_tokens(self, event: dict[str, Any]) -> int:
        """Returns the number of tokens since the event before.

        Raises:
            LostRequestError: the usage contradicts the number of messages.
        """
        choices, usage = event.get("choices") or [{}], event.get("usage")
        token_ids = choices[0].get("token_ids")
        if token_ids is not None:
            num_new = len(token_ids)
        elif usage:
            num_new = usage["completion_tokens"] - self._num_tokens
            self._prove(num_new)
        else:
            num_new = 1 if choices[0].get("text") else 0
            self._num_unproven += num_new
        self._num_tokens += num_new
        return num_new

    def check(self) -> None:
        """Checks the counts at the end of the stream.

        Raises:
            LostRequestError: the stream had no information about token counts.
        """
        if self._num_unproven:
            raise LostRequestError("the server sends neither token ids nor usage")

    def _prove(self, num_new: int) -> None:
        if self._num_unproven and num_new:
            raise LostRequestError(
                f"{self._num_unproven} messages brought {self._num_tokens + num_new} tokens; "
                "when each came is not known"
            )
        self._num_unproven = 0
