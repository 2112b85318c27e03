"""Checks that a KV store answers."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing

from baton.doctor import Finding, Level
from baton.errors import ConfigurationError
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError
from kvstore.url import printable_url

__all__ = ["check_store"]

_KEY_BYTES = 32
_PROBE = b"baton doctor"


def check_store(url: str) -> Iterator[Finding]:
    """Writes an object under a new key, reads it back and removes it.

    Args:
        url: the store's, as for `--kv-connector`; findings leave its password out.
    """
    name = printable_url(url)
    started = time.perf_counter()
    try:
        with closing(open_store(url, is_diagnosis=True)) as store:
            problem = _try(store)
    except ConfigurationError as error:
        problem = error.message
    except StoreUnavailableError as error:
        problem = f"does not answer: {error}"
    elapsed_ms = (time.perf_counter() - started) * 1000
    facts = {"url": name, "elapsed_ms": round(elapsed_ms, 2)}
    if problem:
        yield Finding("kv store", Level.PROBLEM, f"{name}: {problem}", facts)
    else:
        text = f"{name}: wrote, read and removed an object in {elapsed_ms:.0f} ms"
        yield Finding("kv store", Level.OK, text, facts)


def _try(store: KvStore) -> str:
    """Returns what went wrong, or an empty text."""
    key = secrets.token_bytes(_KEY_BYTES)
    written = KvObject.split(memoryview(_PROBE), 0)
    found = KvObject.split(memoryview(bytearray(len(_PROBE))), 0)
    store.put([key], [written])
    statuses = store.get_into([key], [found])
    store.delete([key])
    if statuses != [GetStatus.HIT] or found.to_bytes() != _PROBE:
        return "what was written was not found again"
    return ""
