"""`--target URL`: the endpoint that a URL names."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from baton.errors import ConfigurationError
from benchmarks.targets.target import Target

__all__ = ["open_target", "opened_target"]


@asynccontextmanager
async def opened_target(url: str, model: str) -> AsyncGenerator[Target, None]:
    """`open_target`, closed at the end."""
    target = open_target(url, model)
    try:
        yield target
    finally:
        await target.close()


def open_target(url: str, model: str) -> Target:
    """Opens `grpc://host:port`, a Baton router, or `http://host:port/v1`, OpenAI-style.

    Args:
        url: of the endpoint.
        model: the model to ask for; empty for the one it serves.

    Raises:
        ConfigurationError: the URL is neither, or its client is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == "grpc" and parts.netloc and not parts.path.strip("/"):
        from benchmarks.targets.baton_grpc import BatonTarget

        return BatonTarget(parts.netloc, model)
    if parts.scheme in ("http", "https") and parts.netloc:
        from benchmarks.targets.openai_http import OpenAiTarget

        return OpenAiTarget(url, model)
    raise ConfigurationError(
        f"--target is {url!r}; it must be grpc://HOST:PORT or http://HOST:PORT/v1"
    )
