"""Fixtures of the conformance suite: the store or connector under test.

Tests of connectors are collected for every URL, tests of stores only if the URL names a store.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from kvstore.conformance.engines import TinyEngine
from kvstore.connector import ConnectorCapabilities
from kvstore.registry import connector_capabilities, known_stores, open_store, store_capabilities
from kvstore.store import KvStore
from kvstore.url import MULTI_SCHEME, scheme_of, split_members

StoreOpener = Callable[..., KvStore]
EngineOpener = Callable[..., TinyEngine]

_CONNECTOR_TESTS = "test_connector_"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the tests of stores if the connector is not a store."""
    url = config.getoption("--kv-connector", None)
    is_for_stores = collection_path.name.startswith("test_") and not (
        collection_path.name.startswith(_CONNECTOR_TESTS)
    )
    is_no_store = bool(url) and scheme_of(str(url)) not in known_stores()
    return True if is_for_stores and is_no_store else None


@pytest.fixture(scope="session")
def kv_connector_url(pytestconfig: pytest.Config) -> str:
    """The URL given on the command line."""
    url = pytestconfig.getoption("--kv-connector", None)
    if not url:
        raise pytest.UsageError(
            "the conformance suite needs -p kvstore.conformance.plugin --kv-connector URL"
        )
    return str(url)


@pytest.fixture
def make_url(kv_connector_url: str) -> Callable[..., str]:
    """Returns a function that adds options to the URL; by default long times and no leases."""
    defaults = {"ttl_s": 600, "timeout_s": 30}
    if store_capabilities(kv_connector_url).keeps_leases:
        defaults["lease_s"] = 0

    def make(**options: Any) -> str:
        query = urlencode(defaults | options)
        return f"{kv_connector_url}{'&' if '?' in kv_connector_url else '?'}{query}"

    return make


@pytest.fixture
def open_kv_store(make_url: Callable[..., str]) -> Iterator[StoreOpener]:
    """Returns a function that opens the store with options. All are closed in the end."""
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(closing(open_store(make_url(**options))))


@pytest.fixture
def store(open_kv_store: StoreOpener) -> KvStore:
    return open_kv_store()


@pytest.fixture
def capabilities(kv_connector_url: str) -> ConnectorCapabilities:
    """The capabilities that the connector declares."""
    return connector_capabilities(kv_connector_url)


@pytest.fixture
def open_engine(kv_connector_url: str) -> Iterator[EngineOpener]:
    """Returns a function that opens engines on the connector. All are closed in the end."""
    with ExitStack() as opened:

        def open_one(*args: Any, url: str = kv_connector_url, **options: Any) -> TinyEngine:
            return opened.enter_context(closing(TinyEngine(url, *args, **options)))

        yield open_one


@pytest.fixture
def publisher(open_engine: EngineOpener) -> TinyEngine:
    return open_engine()


@pytest.fixture
def reader(open_engine: EngineOpener) -> TinyEngine:
    return open_engine()


@pytest.fixture
def short_lease_url(kv_connector_url: str) -> str:
    """The URL with a lease of one second for each member that keeps leases."""
    return joined(
        [
            with_option(url, "lease_s=1") if connector_capabilities(url).keeps_leases else url
            for url in members_of(kv_connector_url)
        ]
    )


def members_of(url: str) -> tuple[str, ...]:
    """Returns the URLs of a `multi://` URL's members; of any other URL, the URL itself."""
    return split_members(url) if scheme_of(url) == MULTI_SCHEME else (url,)


def joined(members: Sequence[str]) -> str:
    """Returns the URL that names these connectors as one."""
    return members[0] if len(members) == 1 else f"{MULTI_SCHEME}://{','.join(members)}"


def with_option(url: str, option: str) -> str:
    """Returns one connector's URL with `NAME=VALUE` added."""
    return f"{url}{'&' if '?' in url else '?'}{option}"
