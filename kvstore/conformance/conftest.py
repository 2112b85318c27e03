"""Fixtures of the conformance suite: the store under test, opened as a test needs it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlencode

import pytest

from kvstore.registry import open_store, store_capabilities
from kvstore.store import KvStore

StoreOpener = Callable[..., KvStore]


@pytest.fixture(scope="session")
def kv_connector_url(pytestconfig: pytest.Config) -> str:
    """The URL given on the command line."""
    url = pytestconfig.getoption("--kv-connector")
    if not url:
        raise pytest.UsageError("the conformance suite needs --kv-connector URL")
    return str(url)


@pytest.fixture
def make_url(kv_connector_url: str) -> Callable[..., str]:
    """The URL with options added: generous ones and no leases, unless the test names others."""
    defaults = {"ttl_s": 600, "timeout_s": 30}
    if store_capabilities(kv_connector_url).keeps_leases:
        defaults["lease_s"] = 0

    def make(**options: Any) -> str:
        query = urlencode(defaults | options)
        return f"{kv_connector_url}{'&' if '?' in kv_connector_url else '?'}{query}"

    return make


@pytest.fixture
def open_kv_store(make_url: Callable[..., str]) -> Iterator[StoreOpener]:
    """Opens the store with options; closes what it opened."""
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(closing(open_store(make_url(**options))))


@pytest.fixture
def store(open_kv_store: StoreOpener) -> KvStore:
    return open_kv_store()
