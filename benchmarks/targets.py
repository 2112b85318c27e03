"""`--target URL`: opens a Baton router over gRPC, or an OpenAI-style HTTP endpoint."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

from typing_extensions import override

from baton.client import AsyncClient
from baton.common.errors import BatonError, ConfigurationError
from baton.common.request.sampling_params import SamplingParams
from baton.common.security.client import ClientTls
from benchmarks.request import BenchRequest, EndpointDescription, LostRequestError, Target

__all__ = ["BatonTarget", "open_target", "opened_target"]

_PLAIN = ClientTls()
_DESCRIBE_TIMEOUT_S = 30.0


@asynccontextmanager
async def opened_target(
    url: str, model: str, api_key: str | None = None, tls: ClientTls = _PLAIN
) -> AsyncGenerator[Target, None]:
    """Opens a target as `open_target` does, and closes it at the end."""
    target = open_target(url, model, api_key, tls)
    try:
        yield target
    finally:
        await target.close()


def open_target(
    url: str, model: str, api_key: str | None = None, tls: ClientTls = _PLAIN
) -> Target:
    """Opens `grpc://host:port`, a Baton router, or `http://host:port/v1`, OpenAI-style.

    Args:
        url: the endpoint's URL.
        model: the model to ask for; empty for the served one.
        api_key: key of the endpoint's API; None takes the variable OPENAI_API_KEY over HTTP.
        tls: how the endpoint is verified.

    Raises:
        ConfigurationError: the URL is neither, its client is not installed, or the key or a file
            is bad.
    """
    parts = urlsplit(url)
    if parts.scheme == "grpc" and parts.netloc and not parts.path.strip("/"):
        return BatonTarget(parts.netloc, model, api_key, tls)
    if parts.scheme in ("http", "https") and parts.netloc:
        from benchmarks.openai_http import OpenAiTarget

        return OpenAiTarget(url, model, api_key, tls)
    raise ConfigurationError(
        f"--target is {url!r}; it must be grpc://HOST:PORT or http://HOST:PORT/v1"
    )


class BatonTarget(Target):
    """A Baton router.

    Args:
        address: the router's `host:port`.
        model: the model to ask for; empty for the served one.
        api_key: key of its API.
        tls: how it is verified.
    """

    def __init__(
        self, address: str, model: str, api_key: str | None = None, tls: ClientTls = _PLAIN
    ) -> None:
        self._client = AsyncClient(address, model=model, api_key=api_key, **tls.options)

    @override
    async def describe(self) -> EndpointDescription:
        model = await self._client.get_model(timeout_s=_DESCRIBE_TIMEOUT_S)
        return EndpointDescription(model.name, model.vocab_size)

    @override
    async def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        params = SamplingParams(
            temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
        )
        try:
            async with aclosing(self._client.stream(request.prompt_token_ids, params)) as chunks:
                async for chunk in chunks:
                    yield len(chunk.token_ids)
        except BatonError as error:
            raise LostRequestError(f"{error.code}: {error.message}") from error

    @override
    async def close(self) -> None:
        await self._client.close()
