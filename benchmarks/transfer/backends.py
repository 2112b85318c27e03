"""Which connectors are measured: those that were asked for, or all that this machine has."""

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from baton.errors import ConfigurationError
from benchmarks.transfer.redis_server import REDIS_SERVER, running_redis
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities
from kvstore.url import MULTI_SCHEME, scheme_of

__all__ = ["Backend", "machine_backends", "named_backend"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder there is private
_SPARE_SHARE = 8
"""Of a store's bound, the part that removed objects may keep for those to come."""
_LEAST_BYTES = 256 << 20
"""Of a store, so that it holds what prompts leave there."""
_TIMEOUT = "timeout_s=30"


@dataclass(frozen=True, slots=True)
class Backend:
    """One connector.

    Attributes:
        name: in tables.
        url: opens it.
        is_shared: whether processes share it; else both ends are in one.
        lends: whether a save moves nothing: who loads reads the blocks where they lie.
        raw: what it is measured beside.
    """

    name: str
    url: str
    is_shared: bool
    lends: bool
    raw: Literal["", "redis", "nixl"] = ""


def named_backend(url: str) -> Backend:
    """The connector of a URL.

    Raises:
        ConfigurationError: the scheme is unknown, or its package is missing.
    """
    can, scheme = connector_capabilities(url), scheme_of(url)
    raw: dict[str, Literal["redis", "nixl"]] = {
        "redis": "redis",
        "rediss": "redis",
        "nixl": "nixl",
    }
    return Backend(
        name=connector_name(url),
        url=url,
        is_shared=can.shared_between_processes,
        lends=can.lends_blocks and scheme != MULTI_SCHEME,
        raw=raw.get(scheme, ""),
    )


@contextmanager
def machine_backends(most_bytes: int) -> Iterator[tuple[list[Backend], list[str]]]:
    """Opens what the connectors of this machine need, for as long as they are measured.

    Args:
        most_bytes: of a save.

    Yields:
        The connectors, and why others are not among them.
    """
    max_bytes = max(_LEAST_BYTES, (_SPARE_SHARE + 1) * most_bytes)
    options = f"max_bytes={max_bytes}&{_TIMEOUT}"
    missing: list[str] = []
    with ExitStack() as opened:
        urls = [f"memory://bench?max_bytes={2 * most_bytes}"]
        if os.access(_SHARED_MEMORY, os.W_OK):
            urls.append(f"shm://{opened.enter_context(_shared_folder())}?{options}")
        else:
            missing.append(f"shm: there is no {_SHARED_MEMORY}")
        folder = opened.enter_context(TemporaryDirectory(prefix="baton-bench-"))
        urls.append(f"file://{folder}?{options}")
        urls += _redis_urls(opened, missing)
        urls.append(f"grpc://?{_TIMEOUT}")
        urls += _nixl_urls(missing)
        members = [url for url in urls if scheme_of(url) in ("nixl", "redis")]
        if len(members) > 1:
            urls.append(f"{MULTI_SCHEME}://{','.join(reversed(members))}")
        yield [named_backend(url) for url in urls], missing


def _redis_urls(opened: ExitStack, missing: list[str]) -> Sequence[str]:
    if shutil.which(REDIS_SERVER) is None:
        missing.append(f"redis: {REDIS_SERVER} is not on PATH")
        return ()
    return (f"{opened.enter_context(running_redis())}?{_TIMEOUT}",)


def _nixl_urls(missing: list[str]) -> Sequence[str]:
    from kvstore.peer.nixl.library import load_nixl

    try:
        load_nixl()
    except ConfigurationError as error:
        missing.append(f"nixl: {error}")
        return ()
    return (f"nixl://?{_TIMEOUT}",)


@contextmanager
def _shared_folder() -> Iterator[str]:
    """The name of a `shm://` store of the run's own, removed at the end."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    try:
        yield name
    finally:
        shutil.rmtree(_SHARED_MEMORY / f"baton-{name}", ignore_errors=True)
