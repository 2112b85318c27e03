"""An OpenAI-style HTTP endpoint: `POST /completions` with a prompt of token ids, streamed."""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx2
from typing_extensions import override

from baton.common.errors import UnavailableError
from baton.common.security.client import ClientTls
from baton.common.security.tokens import bearer
from benchmarks.request import BenchRequest, EndpointDescription, LostRequestError, Target

__all__ = ["OpenAiTarget", "TokenCounter", "read_events"]

_CONNECT_TIMEOUT_S = 30.0
_PLAIN = ClientTls()
_MAX_REASON_LENGTH = 200


class OpenAiTarget(Target):
    """An OpenAI-style endpoint.

    Args:
        base_url: the URL, such as `http://127.0.0.1:8000/v1`.
        model: the model to ask for; empty for the first that the endpoint lists.
        api_key: key of its API; None takes the variable OPENAI_API_KEY, if it is set.
        tls: how it is verified.
    """

    def __init__(
        self, base_url: str, model: str, api_key: str | None = None, tls: ClientTls = _PLAIN
    ) -> None:
        key = api_key or os.environ.get("OPENAI_API_KEY")
        context = tls.http_context()
        self._base_url = base_url.rstrip("/")
        self._model = model
        # No limits here: the sender of a request limits its whole time.
        self._client = httpx2.AsyncClient(
            verify=True if context is None else context,
            headers={"Authorization": bearer(key)} if key else {},
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    @override
    async def describe(self) -> EndpointDescription:
        if not self._model:
            try:
                response = await self._client.get(
                    f"{self._base_url}/models", timeout=_CONNECT_TIMEOUT_S
                )
                self._model = response.raise_for_status().json()["data"][0]["id"]
            except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
                raise UnavailableError(
                    f"{self._base_url}/models does not list a model: {error!r}"
                ) from error
        return EndpointDescription(self._model, vocab_size=None)

    @override
    async def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        counter = TokenCounter()
        url = f"{self._base_url}/completions"
        try:
            async with self._client.stream("POST", url, json=self._body(request)) as response:
                if response.is_error:
                    raise LostRequestError(_reason(response.status_code, await response.aread()))
                async for event in read_events(response.aiter_lines()):
                    yield counter.count_tokens(event)
        except httpx2.HTTPError as error:
            raise LostRequestError(f"{type(error).__name__}: {error}") from error
        counter.check()

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


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the JSON objects of a stream of server-sent events.

    Raises:
        LostRequestError: an event is an error or not JSON, or the stream ends before `[DONE]`.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield _parse_event(data)
    raise LostRequestError("the stream ended before [DONE]")


def _parse_event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict) or "error" in event:
        raise LostRequestError(f"in the stream: {data[:_MAX_REASON_LENGTH]}")
    return event


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


def _reason(status: int, body: bytes) -> str:
    return f"HTTP {status}: {body.decode(errors='replace')[:_MAX_REASON_LENGTH]}"
