"""`RequestSender`: sends requests of a batch, with further attempts when a server is busy."""

import asyncio
import random
from typing import Any

import httpx2

from baton.cli.batch.files import BatchLine, OutputFile
from baton.cli.openai_endpoint import JSON_HEADERS, unreachable

__all__ = ["RequestSender"]

_BUSY = (429, 503)
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_MAX_RETRY_AFTER_S = 300.0


class RequestSender:
    """Sends requests and writes their results.

    Args:
        client: an HTTP client.
        url: the server's base URL, whose path stands for the `/v1` of the requests.
        max_retries: further attempts of a request.
        timeout_s: longest time of one attempt.
    """

    def __init__(
        self, client: httpx2.AsyncClient, url: str, *, max_retries: int, timeout_s: float
    ) -> None:
        self._client, self._url = client, url
        self._max_retries, self._timeout_s = max_retries, timeout_s

    async def check_reachable(self) -> None:
        """Makes sure that something answers at the URL.

        Raises:
            UnavailableError: nothing does.
        """
        try:
            await self._client.get(f"{self._url}/models")
        except httpx2.TransportError as error:
            raise unreachable(self._url, error) from error

    async def run(self, line: BatchLine, output: OutputFile) -> None:
        """Sends a request and writes its result.

        Raises:
            UnavailableError: the server cannot be reached any more. The request has no result.
        """
        if line.problem:
            output.write_error(line, "invalid_line", f"line {line.number}: {line.problem}")
            return
        try:
            response = await self._send(line)
        except (TimeoutError, httpx2.TimeoutException):
            text = f"no answer within {self._timeout_s:g} s"
            output.write_error(line, "timeout", text)
        except httpx2.TransportError as error:
            output.write_error(line, "connection_lost", f"{type(error).__name__}: {error}")
        else:
            request_id = response.headers.get("x-request-id", "")
            output.write_response(line, response.status_code, request_id, _body(response))

    async def _send(self, line: BatchLine) -> httpx2.Response:
        """Posts a request until the server takes it, or the attempts are used up."""
        url = self._url + line.url.removeprefix("/v1")
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            delay_s = min(_FIRST_DELAY_S * 2**attempt, _MAX_DELAY_S) * random.uniform(0.5, 1)
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.post(url, content=line.body, headers=JSON_HEADERS)
            except httpx2.ConnectError as error:
                if is_last:
                    raise unreachable(self._url, error) from error
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if is_last:
                    raise
            else:
                if is_last or response.status_code not in _BUSY:
                    return response
                delay_s = _retry_after_s(response, delay_s)
            await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")


def _retry_after_s(response: httpx2.Response, default_s: float) -> float:
    """Returns the seconds that the server asks to wait; its dates are not read."""
    try:
        asked_s = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return default_s
    return min(max(asked_s, 0.0), _MAX_RETRY_AFTER_S)


def _body(response: httpx2.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"error": {"message": response.text}}
