"""`OpenAiEndpoint`: a small client of OpenAI's HTTP API, for the commands that talk to a server."""

import argparse
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2

from baton.common.errors import (
    AbortedError,
    BatonError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.client import ClientTls
from baton.common.security.tokens import bearer

__all__ = [
    "DEFAULT_URL",
    "HTTP_OMITS",
    "JSON_HEADERS",
    "OpenAiEndpoint",
    "add_endpoint_args",
    "client_options",
    "ended_early",
    "error_text",
    "first_model",
    "is_end",
    "parse_base_url",
    "parse_line",
    "raise_for_status",
    "unreachable",
]

DEFAULT_URL = "http://127.0.0.1:8000/v1"
JSON_HEADERS = {"Content-Type": "application/json"}
HTTP_OMITS = ("ssl_server_name",)
"""Fields of `ClientTls` that gRPC alone has."""
_PLAIN = ClientTls()
_CONNECT_TIMEOUT_S = 10.0
_MAX_TIMEOUT_S = 1e6  # a socket cannot wait for much longer
_MAX_REASON_LENGTH = 500
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_ERRORS: dict[int, type[BatonError]] = {
    400: InvalidArgumentError,
    404: NotFoundError,
    429: ResourceExhaustedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


def add_endpoint_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose a server and a model."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="base URL of an OpenAI API (default: %(default)s)"
    )
    parser.add_argument(
        "--model-name",
        default="",
        metavar="NAME",
        help="the model's name in requests (default: the first listed)",
    )
    parser.add_argument(
        "--model", dest="model_name", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of the API (default: the variable OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the next part of an answer (default: %(default)g)",
    )
    add_flags(parser, ClientTls, "security", omit=HTTP_OMITS)


class OpenAiEndpoint:
    """A server of OpenAI's API. Closed by `close` or at the end of a `with` block.

    Args:
        url: its base URL, such as `http://127.0.0.1:8000/v1`; `/v1` and `http://` may be left out.
        model: the model to ask for; empty for the first that the server lists.
        api_key: is sent as a bearer token; None takes that of `OPENAI_API_KEY`, if it is set.
        timeout_s: longest wait for the next part of an answer.
        tls: how the server is verified.

    Raises:
        ConfigurationError: the URL, the key, the time or a file is malformed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        timeout_s: float = 600.0,
        tls: ClientTls = _PLAIN,
    ) -> None:
        self.url = parse_base_url(url)
        self._model = model
        self._client = httpx2.Client(**client_options(self.url, api_key, timeout_s, tls))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Makes the endpoint that the flags of `add_endpoint_args` describe."""
        return cls(
            args.url,
            model=args.model_name,
            api_key=args.api_key,
            timeout_s=args.timeout_s,
            tls=config_from_args(ClientTls, args),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    @property
    def model(self) -> str:
        """The model's name. If none was given, the server is asked for its list.

        Raises:
            BatonError: the server cannot be reached, or lists no model.
        """
        if not self._model:
            with self._answers():
                response = self._client.get(f"{self.url}/models")
            self._model = first_model(response)
        return self._model

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Posts a request to `path`; yields the events of its stream. Closing it cancels.

        Raises:
            BatonError: the server cannot be reached, refuses the request, reports an error in
                the stream, or ends the stream before its end.
        """
        whole_body = {"model": self.model, "stream": True, **body}
        # The escapes of `json.dumps` also hold what UTF-8 cannot; the server then refuses it.
        content = json.dumps(whole_body).encode()
        request = self._client.build_request(
            "POST", f"{self.url}{path}", content=content, headers=JSON_HEADERS
        )
        with self._answers():
            response = self._client.send(request, stream=True)
            try:
                if response.is_error:
                    response.read()
                raise_for_status(response)
                for line in response.iter_lines():
                    if is_end(line):
                        return
                    if (event := parse_line(line)) is not None:
                        yield event
                raise ended_early()
            finally:
                response.close()

    @contextmanager
    def _answers(self) -> Generator[None, None, None]:
        """Turns failures of the connection into errors of Baton."""
        try:
            yield
        except httpx2.ConnectError as error:
            raise unreachable(self.url, error) from error
        except httpx2.TimeoutException as error:
            raise DeadlineExceededError(f"{self.url} did not answer in time") from error
        except httpx2.HTTPError as error:
            raise AbortedError(f"the connection to {self.url} was lost: {error}") from error


def client_options(
    url: str, api_key: str | None, timeout_s: float = _MAX_TIMEOUT_S, tls: ClientTls = _PLAIN
) -> dict[str, Any]:
    """Returns the arguments of an HTTP client for requests to `url`.

    Raises:
        ConfigurationError: no header can hold the key, the time is out of range, or a file of
            `tls` is bad.
    """
    key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
    if key and not (key.isascii() and key.isprintable()):
        flag = "OPENAI_API_KEY" if api_key is None else "--api-key"
        raise ConfigurationError(f"{flag} has characters that no HTTP header can hold")
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigurationError(
            f"--timeout-s is {timeout_s:g}; it must be in (0, {_MAX_TIMEOUT_S:g}]"
        )
    context = tls.http_context()
    return {
        "verify": True if context is None else context,
        "headers": {"Authorization": bearer(key)} if key else {},
        "timeout": httpx2.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        # A proxy cannot reach the servers of this machine.
        "trust_env": urlsplit(url).hostname not in _LOOPBACK_HOSTS,
    }


def parse_base_url(text: str) -> str:
    """Returns a base URL without a slash at its end; completes `host:port`.

    Raises:
        ConfigurationError: it is not a URL of HTTP.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigurationError(f"--url is {text!r}; it must be like {DEFAULT_URL}")
    return f"{url.rstrip('/')}/v1" if parts.path in ("", "/") else url.rstrip("/")


def unreachable(url: str, cause: Exception) -> UnavailableError:
    """Returns the error of a server that cannot be reached."""
    return UnavailableError(
        f"cannot reach {url} ({cause}); `baton serve` starts a server, --url names another"
    )


def error_text(body: bytes) -> str:
    """Returns the message of an error's body: OpenAI's form, or the text itself."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)
    except ValueError:
        return text[:_MAX_REASON_LENGTH]
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:_MAX_REASON_LENGTH]


def raise_for_status(response: httpx2.Response) -> None:
    """Raises the error that a response, which was read, reports by its status; else nothing."""
    if response.is_error:
        kind = _ERRORS.get(response.status_code, BatonError)
        raise kind(f"HTTP {response.status_code}: {error_text(response.content)}")


def first_model(response: httpx2.Response) -> str:
    """Returns the first model of an answer to `GET /models`.

    Raises:
        BatonError: the answer is an error, or lists no model.
    """
    raise_for_status(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise NotFoundError(f"{response.url} lists no model") from None


def is_end(line: str) -> bool:
    """Returns whether a line of a stream of events ends it."""
    return _data_of(line) == "[DONE]"


def parse_line(line: str) -> dict[str, Any] | None:
    """Returns the event of a line of a stream; None for a comment that keeps the connection open,
    or the blank line after an event.

    Raises:
        BatonError: the event is an error, or not a JSON object.
    """
    data = _data_of(line)
    if data is None:
        return None
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise AbortedError(f"the server sent no JSON object: {data[:_MAX_REASON_LENGTH]}")
    if event.get("error"):
        raise BatonError(error_text(data.encode()))
    return event


def ended_early() -> AbortedError:
    """Returns the error of a stream without the event that ends it."""
    return AbortedError("the stream ended before its end; the server was stopped?")


def _data_of(line: str) -> str | None:
    return line.removeprefix("data:").strip() if line.startswith("data:") else None
