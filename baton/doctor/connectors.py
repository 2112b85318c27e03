"""Checks that a KV connector hands blocks over, as far as one process can see."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, suppress

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from baton.doctor import Finding, Level
from baton.doctor.nixl_reads import why_unreadable
from baton.doctor.stores import check_store
from kvstore.diagnosis import unused_key
from kvstore.driver import ConnectorDriver, ContractError
from kvstore.layout import KvLayout
from kvstore.registry import known_stores, open_connector
from kvstore.url import MULTI_SCHEME, printable_url, scheme_of, split_members

__all__ = ["check_connector"]

_TOPIC = "kv connector"
_LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32")
# Blocks of the pool.
_SAVED, _LOADED = (0, 1), (2, 3)
_LIMIT_S = 30.0
_CLEAN_UP_S = 5.0


def check_connector(url: str) -> Iterator[Finding]:
    """Tries a store with one object, and any other connector with a hand-over of blocks.

    Of a `multi://` URL, each member is tried, and then all of them as one.

    Args:
        url: the value of `--kv-connector`; findings leave its passwords out.
    """
    if scheme_of(url) in known_stores():
        yield from check_store(url)
        return
    if scheme_of(url) == MULTI_SCHEME:
        for member in split_members(url):
            yield from check_connector(member)
    finding = _check_handing_over(url)
    yield finding
    if scheme_of(url) == "nixl" and finding.level is Level.OK:
        yield _check_reads()


def _check_reads() -> Finding:
    """Checks whether `nixl://` can read the memory of another process of this machine."""
    if reason := why_unreadable():
        text = f"blocks of other processes come by gRPC, which is slower: {reason}"
        return Finding(_TOPIC, Level.NOTE, f"nixl://: {text}", {"reads_memory": False})
    text = "nixl://: reads the memory of other processes of this machine"
    return Finding(_TOPIC, Level.OK, text, {"reads_memory": True})


def _check_handing_over(url: str) -> Finding:
    name = printable_url(url)
    started = time.perf_counter()
    try:
        problem = _hand_over(url)
    except ConfigurationError as error:
        problem = error.message
    except TimeoutError:
        problem = f"not done within {_LIMIT_S:g} s"
    except ContractError as error:
        problem = str(error)
    elapsed_ms = (time.perf_counter() - started) * 1000
    facts = {"url": name, "elapsed_ms": round(elapsed_ms, 2)}
    if problem:
        return Finding(_TOPIC, Level.PROBLEM, f"{name}: {problem}", facts)
    text = (
        f"{name}: opened it, saved {len(_SAVED)} blocks and loaded them again "
        f"within this process in {elapsed_ms:.0f} ms"
    )
    return Finding(_TOPIC, Level.OK, text, facts)


def _hand_over(url: str) -> str:
    """Saves blocks, loads them again and removes them; returns what went wrong, or nothing.

    Raises:
        ConfigurationError: the connector cannot be opened.
        ContractError: the connector broke its contract.
        TimeoutError: a job did not end in time.
    """
    import torch  # here, as stores are checked without it

    pool = torch.randn(len(_SAVED) + len(_LOADED), *_LAYOUT.block_shape)
    keys = tuple(unused_key() for _ in _SAVED)
    lease_id = secrets.token_hex(16)
    security = ClusterSecurity.from_environment(CredentialsConfig())
    opened = open_connector(url, security, is_diagnosis=True)
    with closing(ConnectorDriver(opened, pool, _LAYOUT, timeout_s=_LIMIT_S)) as driver:
        try:
            saved = driver.save(keys, _SAVED, lease_id=lease_id)
            if not saved.committed:
                return f"blocks cannot be saved ({saved.error or 'not taken'})"
            loaded = driver.load(driver.make_handoff(keys, lease_id), _LOADED)
        finally:
            with suppress(TimeoutError):
                driver.forget(keys, lease_id, _CLEAN_UP_S)
    if loaded.num_blocks < len(_LOADED):
        return f"blocks that were saved cannot be loaded ({loaded.error})"
    is_same = torch.equal(pool[list(_SAVED)], pool[list(_LOADED)])
    return "" if is_same else "blocks that were loaded are not those that were saved"
